"""A container of docker's or podman's from an image of the user's: programs run in it, files go in and out."""

import os
import secrets
import select
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal, get_args

from gnomon.core.errors import ConfigError
from gnomon.core.processes.stop_signals import stop_signals_blocked
from gnomon.rewards.sandbox.base import NotRun, Outcome, SandboxLimits
from gnomon.rewards.sandbox.watch import Ends, Process, Watched, in_thread, watch

ContainerEngine = Literal["docker", "podman"]
CONTAINER_ENGINES = get_args(ContainerEngine)
ENGINE_VARIABLES = (
    "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINER_HOST", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_CERT_PATH",
    "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
)  # fmt: skip
"""Variables by which an engine's program finds its configuration, its store and its daemon."""

_NOBODY, _KEEPER = "65534:65534", "65533:65533"  # of programs, and of the first process, which they cannot trace then
_SECONDS = 60.0  # that the engine may take for a command of its own
_FOLDER = tempfile.gettempdir()  # podman's monitor leaves an empty file where it starts, once memory ran out
_READY = b"ready\n"
# The first process ends with its input, which ends with us however we end; then the engine removes the container. It
# ignores SIGCHLD, and so the kernel reaps the orphans that it is given.
_WAIT = "trap '' CHLD; echo ready; exec cat >/dev/null"
_PYTHON = (
    "import os, sys; _ = b''\nwhile _[-1:] != b'\\n': _ += os.read(0, 1)\n"
    "_n, _ = int(_), b''\nwhile len(_) < _n: _ += os.read(0, _n - len(_))\n"
    "sys.argv = ['main.py']; exec(compile(_, 'main.py', 'exec'))"
)


@dataclass(frozen=True)
class ContainerSandbox:
    """Runs programs in containers of an image, which has a ``sh`` and, for Python, a ``python3``.

    Attributes:
        engine: Its program is looked for on the PATH.
        image: It must be there already: nothing is fetched.
        bounds: ``files_mib`` bounds /tmp and any one file; ``threads`` bounds processes and threads together.
        has_network: Whether programs reach the engine's network; else they have a loopback device alone.
        is_writable: Whether programs run as the image's user and may write all over their copy of it, whose size is
            the engine's to limit; else as nobody, and in /tmp.
    """

    engine: ContainerEngine
    image: str
    bounds: SandboxLimits = SandboxLimits()
    has_network: bool = False
    is_writable: bool = False

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.engine

    def command(self, name: str) -> list[str]:
        """Return the command that starts the container of this name."""
        bounds = self.bounds
        place = ["--tmpfs", f"/tmp:size={bounds.files_mib}m,mode=1777"]
        # The first process runs as another user than programs do, or a
        # program could trace or kill it and take its place.
        place += [] if self.is_writable else ["--read-only", "--user", _KEEPER, "--workdir", "/tmp"]
        place += ["--network", "none"] * (not self.has_network)
        return [
            self.engine, "run", "--interactive", "--rm", "--pull", "never", "--name", name, "--label", "gnomon", *place,
            *["--http-proxy=false"] * (self.engine == "podman"),  # it would hand in the proxy's password
            "--memory", f"{bounds.memory_mib}m", "--memory-swap", f"{bounds.memory_mib}m", "--cpus", "1",
            "--pids-limit", str(bounds.threads), "--ulimit", f"fsize={bounds.files_mib << 20}", "--ulimit", "core=0",
            "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096",
            "--cap-drop", "all", "--security-opt", "no-new-privileges", "--entrypoint", "sh", self.image, "-c", _WAIT,
        ]  # fmt: skip

    def inside(self, name: str, *words: str) -> list[str]:
        """Return the command that runs these words in the container of this name."""
        user = [] if self.is_writable else ["--user", _NOBODY]
        return [self.engine, "exec", "--interactive", *user, name, *words]

    def check(self, has_python: bool = False) -> None:
        """Start and end a container.

        Args:
            has_python: Programs in Python are to run in it.

        Raises:
            ConfigError: The engine is not there or does not answer, the image is not there or does not run, or no
                Python runs in it.
        """
        asked = f'sandbox = "{self.engine}"'
        if shutil.which(self.engine) is None:
            raise ConfigError(f'{asked}: {self.engine} is not on the PATH; install it, or take sandbox = "auto"')
        if why := _fault([self.engine, "info"]):
            raise ConfigError(f"{asked}: {self.engine} does not answer ({why}); start it, or fix its configuration")
        if _fault([self.engine, "image", "inspect", self.image]):
            raise ConfigError(f"{asked}: there is no image '{self.image}' here; {self.engine} pull {self.image}")
        try:
            container = Container(self)
        except NotRun as error:
            raise ConfigError(f"{asked}: no container of '{self.image}' starts ({error})") from error
        ran = container.python("") if has_python else None
        container.close()
        if ran is not None and ran.cause is not None:
            raise ConfigError(
                f"{asked}: no python3 runs in '{self.image}' ({ran.stderr[-300:].strip() or ran.cause}), and the tool "
                '"python" needs one; put it into the image, or take "shell" alone (environment.tools)'
            )

    async def run(self, source: str, stdin: str = "") -> Outcome:
        """Run a Python program in a container of its own; cancelling ends it."""
        return await in_thread(self.run_now, source, stdin)

    def run_now(self, source: str, stdin: str = "", watched: Watched | None = None) -> Outcome:
        """Run a Python program in a container of its own, and wait for it."""
        try:
            container = Container(self)
        except NotRun as error:
            return Outcome("", str(error), "refused", 0.0)
        try:
            return container.python(source, stdin, watched)
        finally:
            container.close()


class Container:
    """One container, from now until `close`: what a command leaves in it, files and processes, the next one finds.

    It ends with this process, also when that is killed, and the engine removes it.

    Raises:
        NotRun: It does not start.
    """

    def __init__(self, sandbox: ContainerSandbox) -> None:
        self._sandbox, self._name = sandbox, f"gnomon-{secrets.token_hex(8)}"
        with stop_signals_blocked():
            self._first = subprocess.Popen(
                sandbox.command(self._name),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                cwd=_FOLDER,
            )  # fmt: skip
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        is_said = select.select([self._first.stdout], [], [], _SECONDS)[0]
        if not is_said or self._first.stdout.readline() != _READY:
            # It has written nothing in a minute: kill it, or reading its errors would wait for ever.
            if not is_said:
                self._first.kill()
            why = self._first.stderr.read().decode(errors="replace").strip()
            self.close()
            raise NotRun(why[-300:] or "it ended at once")

    def python(self, source: str, stdin: str = "", watched: Watched | None = None) -> Outcome:
        """Run a Python program as ``main.py``."""
        size = len(source.encode(errors="replace"))
        return self.run(["python3", "-c", _PYTHON], f"{size}\n{source}{stdin}", watched)

    def run(self, words: Sequence[str], stdin: str = "", watched: Watched | None = None) -> Outcome:
        """Run a command; one that takes too long or writes too much is ended with every process in the container.

        Raises:
            NotRun: The container is gone, and no command's bounds were the cause (`is_ended` says so then).
        """
        watched = watched or Watched()

        def starting(stack: ExitStack, given: int, asked: int, ends: Ends | None) -> tuple[Process, int]:
            report = os.pipe()
            # `watch` starts the clock at the report of a witness. A container has none, so this line stands in for one.
            os.write(report[1], b"walls container\n")
            os.close(report[1])
            stack.callback(os.close, report[0])
            command = self._sandbox.inside(self._name, *words)
            with stop_signals_blocked():
                process = subprocess.Popen(
                    command, stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                    cwd=_FOLDER,
                )  # fmt: skip
            return process, report[0]

        ending = watch(starting, "", stdin, self._sandbox.bounds, watched)
        process = watched.process
        status = process.returncode if isinstance(process, subprocess.Popen) else None
        was_open = not self.is_ended
        # Killing the engine's `exec` command leaves the processes
        # inside running: they are ended by a command of their own.
        if ending.cause or status is None or status < 0:
            self._sweep()
        # The sweep may have ended the container because there was no room for another
        # process: the command's own bounds were the cause then, and its outcome stands.
        if self.is_ended and not (was_open and ending.cause):
            raise NotRun(f"the container ended: {ending.stderr[-300:].strip()}")
        cause = ending.cause or (None if status == 0 else f"exit {status}")
        # A shell reports a process that was ended by signal N as status 128 + N.
        if ending.cause is None and status is not None and 128 < status <= 192:
            cause = f"signal {status - 128}"
        return Outcome(ending.stdout, ending.stderr, cause, ending.seconds)

    def put(self, path: str, content: bytes) -> None:
        """Write a file, and the folders above it.

        Raises:
            OSError: It cannot be written.
        """
        # What is not read is no reason: podman drops a command's errors where its input breaks off.
        self._move('{ mkdir -p "$(dirname "$1")" && cat > "$1"; } || { cat > /dev/null; exit 1; }', path, content)

    def get(self, path: str) -> bytes:
        """Return a file's content, up to the bound on files.

        Raises:
            OSError: It cannot be read, or is larger.
        """
        limit = self._sandbox.bounds.files_mib << 20
        # One byte more than the limit tells a file that is too large from one that just fits.
        found = self._move(f'cat < "$1" | head -c {limit + 1}; [ -r "$1" ]', path, b"")
        if len(found) > limit:
            raise OSError(f"{path}: it has more than {self._sandbox.bounds.files_mib} MiB")
        return found

    @property
    def is_ended(self) -> bool:
        """Whether it is gone, with what was in it."""
        return self._first.poll() is not None

    def close(self) -> None:
        """End and remove it."""
        for pipe in (self._first.stdin, self._first.stdout, self._first.stderr):
            if pipe is not None:
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._first.wait(5.0)
        if self._first.returncode is None:
            _fault([self._sandbox.engine, "rm", "--force", self._name])
            self._first.kill()
            self._first.wait()

    def _move(self, script: str, path: str, content: bytes) -> bytes:
        words = self._sandbox.inside(self._name, "sh", "-c", script, "sh", path)
        try:
            ended = subprocess.run(words, input=content, capture_output=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            self._sweep()
            raise OSError(f"{path}: it took more than {_SECONDS:.0f} s") from error
        if ended.returncode:
            raise OSError(f"{path}: {ended.stderr.decode(errors='replace').strip()[-300:]}")
        return ended.stdout

    def _sweep(self) -> None:
        """Kill every process but the first, or end the container where there is no room for one that kills."""
        if _fault(self._sandbox.inside(self._name, "sh", "-c", "kill -9 -1"), (0, 1, 137)):  # 1: there is none
            self.close()


def _fault(words: Sequence[str], good: tuple[int, ...] = (0,)) -> str | None:
    """Run a command of the engine's; return the end of what it complains about, or None."""
    try:
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS:.0f} s"
    if ended.returncode in good:
        return None
    return ended.stderr.decode(errors="replace").strip()[-300:] or f"exit {ended.returncode}"
