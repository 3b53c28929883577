"""Runs that are compared with each other: what one left behind, how a crash leaves it, and how one is killed."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.forked import Forked, ended
from tests.random_model import RANDOM

from gnomon.records.jsonl import read_rows
from gnomon.records.manifest import write_manifest


def trace(run: Path, steps: int) -> dict[str, Any]:
    """Return all that a run left behind, without clocks and memory: metrics, evaluations, rollouts, final state.

    Positions computed for drift after a step's updates are counted with the next step's, in another session or none.
    """
    final = run / "checkpoints" / f"step-{steps}"
    records = sorted([*run.glob("rollouts/*"), *run.glob("batches/*"), *run.glob("evaluations/*")])
    files = [*records, *sorted((final / "state").glob("*.json")), *sorted(final.rglob("*.safetensors"))]
    kept = {str(path.relative_to(run)): _TURN_SECONDS.sub(b"", path.read_bytes()) for path in files}
    return {name: measured(run / f"{name}.jsonl") for name in ("metrics", "evaluations", "pretraining")} | kept


_TURN_SECONDS = re.compile(rb'"turn_seconds":\[[^]]*\],?')


def measured(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of metrics, without clocks and memory; none when there is no file."""
    noise = ("time/", "memory/", "seconds")
    return [{k: v for k, v in row.items() if not k.startswith(noise)} for row in read_rows(path)]


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Assert that two traces are equal, naming what is not."""
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def left_out(run: Path, step: int, part: str, fresh: Path) -> None:
    """Put the part of a checkpoint of a run that made no step in the place of the one after ``step``.

    fresh: the folder with that state. The learner keeps its number of steps, so that only its weights and moments are
    another's.
    """
    checkpoint = run / "checkpoints" / f"step-{step}"
    for ending in ("safetensors",) if part == "learner" else ("safetensors", "json"):
        shutil.copy2(fresh / f"{part}.{ending}", checkpoint / "state" / f"{part}.{ending}")
    write_manifest(checkpoint, step)


def broken_off(run: Path, copy: Path, step: int) -> Path:
    """Return a copy of a run as a crash leaves it: checkpoints up to ``step``, but records of later steps."""
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    if not list((copy / "checkpoints").glob("step-*")):
        (copy / ".saved").unlink()
    return copy


def gnomon(*arguments: str) -> list[str]:
    """Return the command that runs `gnomon` with this interpreter."""
    return [sys.executable, "-c", "import sys; from gnomon.cli.main import main; sys.exit(main())", *arguments]


def signaled(
    run: Path, number: signal.Signals, options: list[str], rows: str = "metrics"
) -> "subprocess.CompletedProcess[str]":
    """Train in a process of its own and send it a signal once two rows of that file are written down."""
    program = Forked(["train", RANDOM, *options, "--run-dir", str(run)])
    metrics, deadline = run / f"{rows}.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    program.send_signal(number)
    return ended(program)
