"""A run on a cluster of which an engine and a grader are killed: it goes on, loses nothing, and gets them back."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.cluster.running import numbers, running, said_by, until_step

from gnomon.records.jsonl import read_rows

pytestmark = pytest.mark.slow
OVERRIDES = ("steps=5000", "max_staleness=1", "checkpoints.every=0", "evaluation.before=false", "evaluation.every=0")


def test_a_run_goes_on_without_an_engine_and_a_grader(tmp_path: Path):
    """Both are killed, the run says so, and both come back; every step has as many groups and answers as ever.

    Weights of every step that changed them travelled to every engine that was there, and partly while it answered.
    """
    run = tmp_path / "run"
    with running(run, *OVERRIDES) as program:
        until_step(run, program)
        for title in ("ray::EngineActor", "ray::GraderActor"):
            os.kill(numbers(program.pid, title)[0], signal.SIGKILL)
        until = time.monotonic() + 120
        while not any(row["engines/returned"] for row in read_rows(run / "metrics.jsonl")):
            assert program.poll() is None, said_by(run)
            assert time.monotonic() < until, said_by(run)
            time.sleep(0.5)
        until_step(run, program, len(list(read_rows(run / "metrics.jsonl"))) + 3)
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 143, said_by(run)

    said, rows = said_by(run), list(read_rows(run / "metrics.jsonl"))
    assert "lost engine engine-" in said
    assert "is back, and holds the weights of version" in said
    assert "lost the grader at place" in said
    assert sum(row["engines/lost"] for row in rows) == sum(row["engines/returned"] for row in rows) == 1
    assert rows[-1]["engines/alive"] == 2
    assert all(row["weights/sent_bytes"] > 0 for row in rows if row["learner/updates"])
    assert max(row["weights/overlap_fraction"] for row in rows) <= 1
    sizes = [group_sizes(path) for path in (run / "rollouts").iterdir()]
    assert len(sizes) == len(rows)
    assert set(sizes) == {sizes[0]}


def group_sizes(path: Path) -> tuple[int, ...]:
    """How many answers each group of a step has."""
    return tuple(Counter(json.loads(line)["group"] for line in path.read_text().splitlines()).values())
