"""F16: a process that is killed while it writes metrics and rollouts leaves whole lines, whole files, and goes on."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.forked import FORKS

from gnomon.core.atomic_files import drop_step_files
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.records.jsonl import JsonlSink, drop_after, read_rows
from gnomon.records.rollouts import RolloutLog, read_rollouts

KILLS = 100
ROWS = 8
NUMBERS = {f"loss/number_{n}": n / 7 for n in range(200)}


def _write_on(folder: Path, first: int) -> None:
    """Write step after step, from ``first``, until killed."""
    sink, log = JsonlSink(folder / "metrics.jsonl"), RolloutLog(folder / "rollouts")
    task = Task("t", (1, 2), "a question")
    row = Rollout(
        "t", (1, 2), (3,) * 50, (True,) * 50, (-0.5,) * 50, (-0.5,) * 50, "text" * 50, Grade(1.0), 0, 0, "stop"
    )
    step = first
    while True:
        sink.write(step, NUMBERS)
        log.write(step, [Group(task, (row,) * ROWS)])
        step += 1


@pytest.mark.slow
def test_a_hundred_kills_while_it_writes(tmp_path: Path):
    """Each at another moment: every row there is whole and in order, every rollout file has all of its rows.

    Cut back to the last step that both have, as a resumed run cuts, the next process goes on without a gap.
    """
    chosen, done, torn = random.Random(0), 0, 0
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "rollouts"
    for _ in range(KILLS):
        child = FORKS.Process(target=_write_on, args=(tmp_path, done + 1))
        child.start()
        until = time.monotonic() + 60
        while not (folder / f"step-{done + 1:06d}.jsonl").exists():
            assert child.is_alive()
            assert time.monotonic() < until
            time.sleep(0.0005)
        time.sleep(chosen.uniform(0, 0.004))
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        rows = [row["step"] for row in read_rows(metrics)]
        files = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.jsonl"))
        torn += not metrics.read_bytes().endswith(b"\n") or any(folder.glob(".*"))

        assert rows == list(range(1, len(rows) + 1))
        assert files == list(range(1, len(files) + 1))
        assert len(rows) - len(files) in (0, 1)
        assert all(len(list(read_rollouts(folder / f"step-{n:06d}.jsonl"))) == ROWS for n in files[done:])
        # As in a run: the newest checkpoint is some steps back.
        done = max(done, len(files) - 3)
        drop_after(metrics, done)
        drop_step_files(folder, "jsonl", done)
        assert not any(folder.glob(".*"))
        assert len([*read_rows(metrics)]) == len([*folder.iterdir()]) == done
    assert torn > 0
