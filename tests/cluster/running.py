"""Runs on a cluster of their own, started as a person starts them, and what of them is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.random_model import RANDOM

LAYOUT = ("learner.processes=2", "engine.count=2", "cluster.graders=2", "grading.workers=1", "device=cpu")
MAIN = "import sys; from gnomon.cli.main import main; sys.exit(main())"
STARTING_SECONDS = 280.0
SECONDS = 240.0  # until what should end is held to hang; how long it took is printed
"""Within which whatever happens to a run ends it."""


@contextmanager
def running(
    folder: Path, *overrides: str, cluster: str = "ray", environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """`gnomon train tiny --cluster CLUSTER` in ``folder``, in a session of its own; ended with all it started."""
    said = (folder.parent / f"{folder.name}.log").open("w+")
    command = [sys.executable, "-c", MAIN, "train", RANDOM, "--cluster", cluster, *LAYOUT, *overrides]
    with said:
        program = subprocess.Popen(
            [*command, "--run-dir", str(folder)],
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"},
        )
        try:
            yield program
        finally:
            if program.poll() is None:
                program.kill()
            program.wait()
            for number in family(program.pid):
                os.kill(number, signal.SIGKILL)


def said_by(folder: Path) -> str:
    """What the run in ``folder`` wrote."""
    return (folder.parent / f"{folder.name}.log").read_text()


def until_step(folder: Path, program: "subprocess.Popen[str]", steps: int = 2) -> None:
    """Wait until so many steps were made."""
    until = time.monotonic() + STARTING_SECONDS
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert program.poll() is None, said_by(folder)
        assert time.monotonic() < until, said_by(folder)
        time.sleep(0.2)


def family(session: int) -> dict[int, str]:
    """Processes of a session that live, each with its command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def numbers(session: int, title: str) -> list[int]:
    """Those of them whose command line has ``title`` in it, in order."""
    return sorted(number for number, line in family(session).items() if title in line)


def until_alone(session: int, seconds: float) -> dict[int, str]:
    """Wait until nobody of a session is left, or so long; return who is."""
    until = time.monotonic() + seconds
    while (left := family(session)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def ends_in_words(folder: Path, program: "subprocess.Popen[str]", said: str) -> None:
    """Wait for the end of a run to which something was done: with exit code 1, in words, and nobody left."""
    began = time.monotonic()
    code = program.wait(SECONDS)
    took, left = time.monotonic() - began, until_alone(program.pid, 30)
    print(f"{took:.1f} s\n{said_by(folder)[-1500:]}")
    assert code == 1
    assert re.search(said, said_by(folder))
    assert "Traceback" not in said_by(folder)
    assert left == {}
