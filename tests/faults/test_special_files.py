"""Something else in the place of a run's file: every verb ends in words and in time."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from gnomon.cli.main import main
from gnomon.core.atomic_files import open_plain, read_plain
from gnomon.core.errors import RunDirectoryError
from gnomon.records.directory import RunDirectory, lock_owner

RUN = ["steps=2", "task.size=40", "rollouts_per_step=8", "held_out.size=3", "algorithm.num_generations=2",
       "records.batches=true"]  # fmt: skip
FILES = [
    "metrics.jsonl", "evaluations.jsonl", "findings.jsonl", "diagnosis.json", "run.json", "experiment.toml", ".lock",
    "rollouts/step-000002.jsonl", "evaluations/step-000002.jsonl", "rollouts", "evaluations", "checkpoints",
    "checkpoints/best.json", "checkpoints/step-2", "checkpoints/step-2/manifest.json",
    "checkpoints/step-2/config.json", "checkpoints/step-2/state/stream.json", "batches/step-000002.json",
    "checkpoints/step-2/tokenizer.json", "checkpoints/step-2/model.safetensors", "batches/step-000002.safetensors",
]  # fmt: skip
VERBS = ["resume", "report", "doctor", "watch", "export"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that is finished."""
    run = tmp_path_factory.mktemp("special") / "base"
    assert main(["train", "tiny", *RUN, "--run-dir", str(run)]) == 0
    return run


def put(make: Callable[[Path], object], path: Path) -> None:
    """Put something in the place of a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    make(path)


def ended(arguments: list[str]) -> int:
    """Return the exit code of a verb. Raises: whatever nobody foresaw, and where it waits for ever."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hung: {arguments}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        return main(arguments)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bind(path: Path) -> None:
    """Have a socket at that place, to which nobody listens; the path of a socket has at most 107 letters."""
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
        listening.bind(path.name)


def lead_to_zeros(path: Path) -> None:
    """Have a device there that never ends, by a link, as whoever is not root can."""
    path.symlink_to("/dev/zero")


def lead_to_itself(path: Path) -> None:
    """Have a link there that leads to itself, by way of another one."""
    between = path.with_name(f"{path.name}.link")
    between.symlink_to(path.name)
    path.symlink_to(between.name)


SPECIAL = {"pipe": os.mkfifo, "folder": os.mkdir, "socket": bind, "device": lead_to_zeros, "loop": lead_to_itself}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("name", FILES)
def test_every_verb_ends_whatever_is_in_a_files_place(
    tmp_path: Path, base: Path, make: Callable[[Path], object], name: str, capsys: pytest.CaptureFixture[str]
):
    """A named pipe or a socket with nobody at its other end, a folder, a device, a link to itself: no traceback."""
    run = tmp_path / "run"
    shutil.copytree(base, run)
    put(make, run / name)
    for verb in VERBS:
        more = {"watch": ["--once"], "export": [str(tmp_path / "model")]}.get(verb, [])
        assert ended([verb, str(run), *more]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollouts/step-000002.jsonl", "metrics.jsonl", "findings.jsonl", "run.json"])
def test_a_run_with_a_folder_for_a_record_is_not_gone_on_with(tmp_path: Path, base: Path, name: str):
    """Before anything is removed: exit code 2."""
    run = tmp_path / "run"
    shutil.copytree(base, run)
    put(os.mkdir, run / name)
    before = json.dumps(sorted(str(path) for path in run.rglob("*")))

    assert main(["resume", str(run)]) == 2
    assert json.dumps(sorted(str(path) for path in run.rglob("*"))) == before


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_whatever_is_in_the_place_of_a_run_or_of_what_is_written(
    tmp_path: Path, base: Path, make: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
):
    """A run, an experiment, a table, a model, a page or an exported folder: exit code 2, and the place is as it was."""
    place = tmp_path / "place"
    make(place)
    before = os.lstat(place)
    given = [[verb, str(place)] for verb in ("resume", "report", "doctor", "train", "plan")]
    given += [["compare", str(place), "--algorithms", "grpo,rloo", "--steps", "1"]]
    given += [["dissect", str(place), "--algorithms", "grpo,rloo"]]
    given += [["watch", str(place), "--once"], ["export", str(place), str(tmp_path / "model")]]
    given += [["evaluate", str(place), "--task", "arithmetic"], ["report", str(base), str(place)]]
    given += [["report", str(base), "--out", str(place)], ["plan", "tiny", f"model={place}"]]
    if make is not os.mkdir:  # an empty folder is one to write into
        given += [["export", str(base), str(place)], ["train", "tiny", "--run-dir", str(place)]]
    given += [["plan", "tiny", "task.kind=table", f"task.path={place}"], ["plan", "tiny", f"algorithm={place}:OWN"]]

    assert [arguments for arguments in given if ended(arguments) != 2] == []
    assert "Traceback" not in capsys.readouterr().err
    assert os.path.samestat(os.lstat(place), before)


def test_a_place_to_write_whose_name_is_too_long_is_refused(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
):
    """An exported folder, one to upload and a page: what the system cannot name is no place to write."""
    place = str(tmp_path / ("x" * 4000))
    given = [["export", str(base), place], ["export", str(base), place, "--to", "hub:me/x", "--dry-run"]]
    given += [["report", str(base), "--out", place]]

    assert [arguments for arguments in given if ended(arguments) != 2] == []
    assert capsys.readouterr().err.count("too long") == len(given)


REMOVING = """
import pathlib, shutil
for removed in pathlib.Path(REMOVED).glob("checkpoints/step-*"):
    shutil.rmtree(removed)

def score(prompt, completion, **columns):
    return 1.0
"""


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run that goes on keeps its newest ones alone; here a reward's file removes them, between check and load."""
    run, file = tmp_path / "run", tmp_path / "mine.py"
    file.write_text(REMOVING.replace("REMOVED", repr(str(tmp_path / "nothing"))))
    reward = f'rewards=[{{kind="function", function="{file}:score"}}]'
    assert main(["train", "tiny", *RUN, reward, "--run-dir", str(run)]) == 0
    file.write_text(REMOVING.replace("REMOVED", repr(str(run))))
    capsys.readouterr()

    assert main(["evaluate", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run} goes on and removed step-2 while it was read; try again, or take a copy first: gnomon export" in said


def test_only_plain_files_are_opened(tmp_path: Path):
    """A pipe, a folder, a socket and a device are said to be that; links to files are files."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))
    (tmp_path / "file").write_text("said")
    (tmp_path / "link").symlink_to("file")

    for path, what in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a folder"), (tmp_path / "socket", "a socket")):
        with pytest.raises(OSError, match=f"it is {what}, not a file"):
            open_plain(path)
    with pytest.raises(OSError, match="it is a device, not a file"):
        open_plain(Path(os.devnull))
    assert read_plain(tmp_path / "link") == b"said"


LOCKS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "folder": os.mkdir, "socket": bind, "device": lead_to_zeros,
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link out": lambda path: path.symlink_to("../victim"),
    "link within": lambda path: path.symlink_to("metrics.jsonl"),
    "a terabyte of zeros": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "of another host": lambda path: path.write_text('{"pid": 1, "host": "elsewhere", "started": "2026-01-01"}'),
    "of nobody": lambda path: path.write_text('{"pid": 999999999, "host": "x", "started": "2026-01-01"}'),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOCKS)
def test_whatever_is_in_the_place_of_a_lock_is_locked_or_refused(tmp_path: Path, base: Path, kind: str):
    """At once, by what begins and by what goes on; what a link leads to stays as it is."""
    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    shutil.copytree(base, run)
    put(LOCKS[kind], run / ".lock")
    (tmp_path / "new").mkdir()
    put(LOCKS[kind], tmp_path / "new" / ".lock")
    before = (run / "metrics.jsonl").read_bytes()

    assert lock_owner(run) is None
    is_plain = kind in ("a terabyte of zeros", "of another host", "of nobody")
    for take in (lambda: RunDirectory.reopen(run), lambda: RunDirectory.create(tmp_path / "new")):
        with contextlib.nullcontext() if is_plain else pytest.raises(RunDirectoryError, match=r"lock|run"):
            take().close()
    assert (tmp_path / "victim").read_text() == "precious"
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_lock_is_its_holders_while_it_lives_whatever_it_says(tmp_path: Path):
    """Held by a living process with another's note, it is refused; the death of that process frees it."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for note in ("", "null", '{"pid": 999999999, "host": "x", "started": "y"}', "[" * 5000, "\0" * 9999):
            (tmp_path / ".lock").write_text(note)
            assert lock_owner(tmp_path) is not None
            with pytest.raises(RunDirectoryError, match="in use by"):
                RunDirectory.create(tmp_path)
        holder.kill()
    RunDirectory.create(tmp_path).close()
