"""Containers: what is refused and why, the command that is built, and hostile programs where podman runs."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.runs import same, trace

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, Stopped
from gnomon.rewards.sandbox.audit import attack
from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.rewards.sandbox.container import Container, ContainerSandbox
from gnomon.rewards.sandbox.hostile import ALL
from gnomon.rollouts.env_workers import environment_fork_server
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.python_tool import CONTAINER_ENDED
from gnomon.tasks.tools import ToolRaised, Tools, check_tools
from gnomon.training.api import resume, train_experiment
from gnomon.training.run import StopRequest

IMAGE = f"gnomon-test-{os.getpid()}"
BOUNDS = SandboxLimits(wall_seconds=5.0, memory_mib=256, output_kib=256, files_mib=16, threads=64)


def engine(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of this name on the PATH, alone with the system's."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_an_engine_that_is_not_there_is_refused(monkeypatch):
    """The message names the program and what else isolates."""
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ConfigError, match='docker is not on the PATH; install it, or take sandbox = "auto"'):
        ContainerSandbox("docker", "x").check()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "does not answer .*Cannot connect to the Docker"),
        ('[ "$1" = info ]', "there is no image 'x' here; docker pull x"),
        ('[ "$1" != run ] || { echo "cgroups are refused" >&2; exit 125; }', "no container of 'x' starts .cgroups are"),
    ],
)
def test_what_the_engine_complains_about_is_said(script, said, tmp_path, monkeypatch):
    """A daemon that does not answer, an image that is missing, a container that does not start: each with its fix."""
    engine(tmp_path, "docker", script, monkeypatch)

    with pytest.raises(ConfigError, match=said):
        ContainerSandbox("docker", "x").check()


def test_an_image_without_python_is_refused_for_programs_of_it(tmp_path, monkeypatch):
    """With what the engine says, and what else could be done; a shell alone needs none."""
    engine(tmp_path, "podman", NO_PYTHON, monkeypatch)

    ContainerSandbox("podman", "x").check()
    with pytest.raises(ConfigError, match=r"no python3 runs in 'x' .*python3.*not found.*take \"shell\" alone"):
        ContainerSandbox("podman", "x").check(has_python=True)


NO_PYTHON = """case "$*" in
run*) echo ready; exec cat >/dev/null ;;
*python3*) echo "exec: python3: executable file not found" >&2; exit 127 ;;
esac"""


def test_the_command_leaves_nothing_open():
    """No network, no capability, no writing, bounds of memory, processes and files; each is opened by its setting."""
    closed = " ".join(ContainerSandbox("docker", "x", BOUNDS).command("n"))
    opened = " ".join(ContainerSandbox("podman", "x", BOUNDS, True, True).command("n"))

    for part in (
        "--network none", "--read-only", "--user 65533:65533", "--cap-drop all", "no-new-privileges", "--memory 256m",
        "--memory-swap 256m", "--pids-limit 64", "fsize=16777216", "/tmp:size=16m", "--rm", "--pull never",
    ):  # fmt: skip
        assert part in closed
    assert not any(part in opened for part in ("--network", "--read-only", "--user"))
    assert "--http-proxy=false" in opened
    assert closed.endswith("--entrypoint sh x -c trap '' CHLD; echo ready; exec cat >/dev/null")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sandbox": "podman", "tools": ("python",)}, "needs image"),
        ({"sandbox": "podman", "tools": ("shell",), "image": "--privileged"}, "got '--privileged'"),
        ({"sandbox": "podman", "tools": ("python",), "image": "x", "packages": ("numpy",)}, "leave packages out"),
        ({"sandbox": "podman", "tools": ("a.py:f",), "image": "x"}, "is for tools"),
        ({"tools": ("shell",)}, "need a container"),
        ({"tools": ("python",), "image": "x"}, "need a container"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings, said):
    """An engine needs an image and a tool that runs in it; the tool shell needs an engine."""
    with pytest.raises(ConfigError, match=said):
        EnvironmentConfig(kind="tools", **settings)


TOOLS = EnvironmentConfig(kind="tools", tools=("python", "shell"), sandbox="podman", image="x", image_files="files")
WITHOUT = {"sandbox": "auto", "image": "", "image_files": "", "tools": ("python",)}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"answer": "4"}, "no such column; there are answer"),
        ({"files": ["/tmp/a"]}, r"holds \"\['/tmp/a'\]\"; write"),
        ({"files": {"/tmp/a": 1}}, "write .*paths and texts"),
        ({"files": {"": "x"}}, "write .*paths and texts"),
        ({"files": {"/tmp/a\0": "x"}}, "write .*paths and texts"),
    ],
)
def test_a_column_that_holds_no_files_is_said(columns, said):
    """Missing, no table, no texts, a path that no system has: with the column's name and the form."""
    with pytest.raises(ToolRaised, match=f"image_files = 'files': .*{said}"):
        asyncio.run(Tools(TOOLS).begin("", columns))


def test_engines_find_their_configuration_from_an_environments_process(monkeypatch):
    """The variables by which they find store and daemon reach the process that starts containers, and no other's."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/mine.sock")

    given, others = (environment_fork_server(plan)._environment() for plan in (TOOLS, replace(TOOLS, **WITHOUT)))

    assert given["DOCKER_HOST"] == "unix:///run/mine.sock"
    assert "DOCKER_HOST" not in others


ENGINE = """case "$*" in
run*) echo ready; exec cat >/dev/null ;;
*"kill -9 -1") exit KILLED ;;
*'cat > "$1"'*) cat >> FOLDER/put ;;
*) head -c 300000 /dev/zero ;;
esac"""


@pytest.mark.parametrize(("killed", "is_new"), [(0, False), (1, False), (126, True)])
def test_a_container_without_room_for_a_kill_gives_way_to_a_new_one(killed, is_new, tmp_path, monkeypatch):
    """After too much output a container stays, also where nothing was left to kill (1); else one has the files anew."""
    script = ENGINE.replace("KILLED", str(killed)).replace("FOLDER", str(tmp_path))
    engine(tmp_path, "podman", script, monkeypatch)
    call = '<tool_call>{"name": "shell", "arguments": {"command": "yes"}}</tool_call>'

    async def talk() -> list[str]:
        tools = Tools(TOOLS)
        await tools.begin("", {"files": {"/tmp/n": "41", "/tmp/none": None}})
        said = [(await tools.reply(call)).messages[0][1] for _ in range(2)]
        await tools.end()
        return said

    assert [CONTAINER_ENDED in text for text in asyncio.run(talk())] == [is_new, is_new]
    assert (tmp_path / "put").read_text() == "41" * (1 + is_new)


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """An image of this machine's Python, its libraries and busybox; skips with the reason where podman runs none."""
    busybox, interpreter = "/bin/busybox", Path("/usr/bin/python3").resolve()
    if shutil.which("podman") is None or not os.path.exists(busybox) or not interpreter.exists():
        pytest.skip("podman, busybox-static or the system's Python is not installed")
    folder = tmp_path_factory.mktemp("image")
    if shutil.which("runc"):
        (folder / "containers.conf").write_text('[engine]\nruntime = "runc"\n')
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    library = Path(f"/usr/lib/{interpreter.name}")
    linked = subprocess.run(
        ["ldd", interpreter, *library.glob("lib-dynload/*.so")], capture_output=True, text=True
    ).stdout.split()
    skipped = ("site-packages", "dist-packages", "test", "__pycache__")
    with tarfile.open(folder / "image.tar", "w") as tar:
        tar.add(interpreter, "usr/bin/python3")
        tar.add(library, str(library)[1:], filter=lambda f: None if os.path.basename(f.name) in skipped else f)
        for path in {word for word in linked if word.startswith("/") and not word.endswith(":")}:
            tar.add(os.path.realpath(path), path[1:])
        for name in ("busybox", "sh", "cat", "head", "mkdir", "dirname", "sleep", "ls", "test", "["):
            tar.add(os.path.realpath(busybox), f"bin/{name}")
        room = tarfile.TarInfo("tmp")
        room.type, room.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(room)
    made = subprocess.run(["podman", "import", folder / "image.tar", IMAGE], capture_output=True, text=True)
    try:
        if made.returncode:
            pytest.skip(f"podman makes no image here: {made.stderr[-200:]}")
        ContainerSandbox("podman", IMAGE, BOUNDS).check()
    except ConfigError as error:
        pytest.skip(f"podman runs no container here: {error}")
    yield IMAGE
    subprocess.run(["podman", "rmi", "--force", IMAGE], capture_output=True)
    os.environ.pop("CONTAINERS_CONF", None)


def listed() -> str:
    """Return the containers of this session's image that podman still knows."""
    asked = ["podman", "ps", "--all", "--filter", "label=gnomon", "--format", "{{.Names}} {{.Image}}"]
    named = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    return "\n".join(line for line in named if IMAGE in line)


def wait_for_none() -> None:
    """Wait until podman knows none."""
    until = time.monotonic() + 20
    while listed() and time.monotonic() < until:
        time.sleep(0.1)
    assert listed() == ""


@pytest.mark.slow
def test_files_go_in_and_out_and_programs_end(image):
    """A command finds what an earlier one left; causes are named; one that hangs ends and the container stays."""
    sandbox = ContainerSandbox("podman", image, BOUNDS)
    container = Container(sandbox)
    try:
        container.put("/tmp/deep/in", b"\x00\xff40")
        assert container.get("/tmp/deep/in") == b"\x00\xff40"
        program = "n = int(open('/tmp/deep/in', 'rb').read()[2:]); print(n + int(input())); open('/tmp/out', 'w')"
        outcome = container.python(program, "2\n")
        assert (outcome.stdout, outcome.cause) == ("42\n", None), outcome.stderr
        assert container.run(["sh", "-c", "exit 3"]).cause == "exit 3"
        assert container.run(["sh", "-c", "sleep 100 & while true; do :; done"]).cause == "time"
        assert container.run(["sh", "-c", "while true; do echo xxxxxxxxxxxxxxxxxxxxx; done"]).cause == "output"
        assert container.python("raise ValueError('x' * 3_000_000)").cause == "output"
        assert container.run(["ls", "/sys/class/net", "/tmp"]).stdout.split() == [
            "/sys/class/net:",
            "lo",
            "/tmp:",
            "deep",
            "out",
        ]
        with pytest.raises(OSError, match=r"/no: .*[Rr]ead-only"):
            container.put("/no", b"x")
        with pytest.raises(OSError, match=r"/tmp/none: .*[Nn]o such file"):
            container.get("/tmp/none")
    finally:
        container.close()
    assert listed() == ""


# What a container has for itself and our own walls forbid: folders and sockets of its own, processes up to the bound,
# address space that is not filled, shared memory in its bound, clocks that can be read, files as its memory has room,
# programs of its own (errors of some calls say that nobody is there).
ITS_OWN = {
    "every folder of the root", "its own root", "UDP", "listen", "netlink", "fork bomb", "memory mapped",
    "shared memory of System V", "shared memory folder", "raise its own limits", "wait for the grader's clock",
    "the machine's scheduling", "a timer that outlives it", "a timer as a file", "slow the clock down",
    "many files", "kill by descriptor", "trace", "read another's memory", "a shell", "allow itself to be traced",
}  # fmt: skip
# What the engine's own filter of calls has to forbid; Debian's podman 4.3.1 does not.
OF_THE_FILTER = {"unshare", "enter a namespace", "the host of a virtual machine", "keys", "calls of 32 bits"}
ATTACKS = [probe for probe in ALL if probe.name not in ITS_OWN | OF_THE_FILTER]


@pytest.mark.slow
@pytest.mark.parametrize("probe", ATTACKS, ids=lambda probe: probe.name)
def test_hostile_programs_stay_in_the_container(image, probe, target):
    """Files, network, secrets and time of the machine are out of reach, and the next program runs as ever."""
    finding = attack(ContainerSandbox("podman", image, BOUNDS), probe, target)

    assert finding.reached == ()


@pytest.mark.slow
def test_processes_are_bounded(image):
    """A fork bomb ends at the bound, and the next command runs in the same container."""
    container = Container(ContainerSandbox("podman", image, BOUNDS))
    try:
        bomb = "import os\nn = 0\nwhile os.fork() and n < 1000: n += 1\n"
        outcome = container.python(f"try:\n    {bomb.replace(chr(10), chr(10) + '    ')}\nfinally: print(n)")
        assert max(map(int, outcome.stdout.split())) < BOUNDS.threads
        until = time.monotonic() + 20  # the last of them may still be ending
        while (after := container.run(["sh", "-c", "echo on"])).stdout != "on\n":
            assert time.monotonic() < until, after
    finally:
        container.close()


HELD = f"""
import sys, time
from gnomon.rewards.sandbox.container import Container, ContainerSandbox
container = Container(ContainerSandbox("podman", {IMAGE!r}))
print("open", flush=True)
container.run(["sh", "-c", "sleep 600"])
"""


@pytest.mark.slow
def test_a_container_is_removed_when_its_owner_is_killed(image):
    """SIGKILL to the process that holds one in the middle of a command leaves no container."""
    holder = subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    assert "gnomon-" in listed()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()

    wait_for_none()


@pytest.mark.slow
def test_tools_share_a_rollouts_container(image):
    """The row's files are there, python and shell see each other's, and the end removes the container."""
    plan = EnvironmentConfig(
        kind="tools", tools=("python", "shell"), sandbox="podman", image=image, image_files="files"
    )
    check_tools(plan)
    tools = Tools(plan)

    async def talk() -> list[str]:
        await tools.begin("", {"files": {"/tmp/n": "41"}})
        calls = ('"python", "arguments": {"code": "open(\'m\', \'w\').write(str(int(open(\'n\').read()) + 1))"}',
                 '"shell", "arguments": {"command": "cat m"}')  # fmt: skip
        said = [(await tools.reply(f'<tool_call>{{"name": {call}}}</tool_call>')).messages[0][1] for call in calls]
        await tools.end()
        return said

    assert asyncio.run(talk()) == ["[no output]", "42"]
    assert listed() == ""


# Every answer is a call whose letter the policy chooses; the second one finds what the first one left.
CALL = r'<tool_call>\{"name": "shell", "arguments": \{"command": "echo [a-d]>>n; cat n in"\}\}</tool_call>'
CALLING = (
    "steps=3", "rollouts_per_step=4", "algorithm.num_generations=2", "held_out.size=1", "evaluation.before=false",
    "environment.kind=tools", 'environment.tools=["shell"]', "environment.sandbox=podman",
    "environment.image_files=files", "environment.max_turns=2", "environment.max_concurrent=1",
    "environment.timeout_seconds=60", "sampling.max_completion_length=400",
    "rewards=[{kind='format', pattern='.*echo [ab].*'}]", f"sampling.grammar.regex={json.dumps(CALL)}",
)  # fmt: skip


@pytest.mark.slow
def test_a_stopped_run_of_tools_in_containers_is_the_uninterrupted_one(image, tmp_path):
    """Its containers are gone when it stops, and new ones have the rows' files: all that is recorded is equal.

    One conversation at a time: an answer that is computed beside others differs in its last digits by who they are.
    """
    rows = [{"prompt": f"go {n}", "answer": "a", "files": {"/tmp/in": f"{n}"}} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = f"task={{kind='table', path='{tmp_path / 'rows.jsonl'}'}}"
    experiment = load(RANDOM, [task, f"environment.image={image}", *CALLING])
    train_experiment(experiment, tmp_path / "whole")
    with pytest.raises(Stopped, match="stopped after step 1"):
        train_experiment(experiment, tmp_path / "run", StopRequest(signal.SIGTERM, after=1))
    assert listed() == ""
    resume(tmp_path / "run")

    same(trace(tmp_path / "run", 3), trace(tmp_path / "whole", 3))
    replies = re.findall(r"<\|eos\|>\\n[a-d]\\n\d\\n", (tmp_path / "run/rollouts/step-000003.jsonl").read_text())
    assert len(replies) == 4, "a new session's calls are answered from the row's file"
