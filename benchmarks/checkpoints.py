"""``python -m benchmarks.checkpoints``: what checkpoints cost by the clock, against the same run without any.

Two programs train the same experiment with the same seed, so their steps do the same work token for token; one saves
every ``--every`` steps, the other never. They take turns of ``--every`` steps: whoever is not on turn is stopped by
SIGSTOP, so both meet the same machine, and what a checkpoint does in the background falls into the turn that begins
with it. The first turn of each is thrown away: libraries and memory are new then.

What a checkpoint costs hangs on the model, not on how long a step is, so short steps (``rollouts_per_step=16``) give
more pairs of turns in the same time, and less of what both runs share to scatter. Let a turn be longer than a
checkpoint is written: it says so when one was not through in its turn.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gnomon.config.experiment import load
from gnomon.core.statistics import student_quantile

_LOOK_SECONDS = 0.005
_START_SECONDS = 300.0
_PROGRAM = "import sys; from gnomon.cli.main import main; sys.exit(main())"


class Contender:
    """One of the two runs, in a process group of its own, that makes so many steps when it is told to."""

    def __init__(self, folder: Path, overrides: Sequence[str], every: int) -> None:
        self.metrics, self._log = folder / "run" / "metrics.jsonl", (folder / "log").open("wb")
        command = [sys.executable, "-c", _PROGRAM, "train", *overrides, f"checkpoints.every={every}"]
        self._program = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run")],
            stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self._wait(1, time.monotonic() + _START_SECONDS)
        self._signal(signal.SIGSTOP)

    def steps(self, count: int) -> float:
        """Return the seconds by the clock of ``count`` more steps, from the end of one to the end of another."""
        wanted = self._made() + count
        self._signal(signal.SIGCONT)
        began = time.monotonic()
        self._wait(wanted, began + _START_SECONDS)
        seconds = time.monotonic() - began
        self._signal(signal.SIGSTOP)
        return seconds

    def rows(self) -> list[dict[str, float]]:
        """Return the metrics so far."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def end(self) -> None:
        """Kill it."""
        self._signal(signal.SIGKILL)
        self._program.wait()
        self._log.close()

    def _made(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def _wait(self, steps: int, until: float) -> None:
        while self._made() < steps:
            if self._program.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"a run ended or hangs; it said:\n{Path(self._log.name).read_text()[-2000:]}")
            time.sleep(_LOOK_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        if self._program.poll() is None:
            os.killpg(self._program.pid, number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure for about ``--seconds`` and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__.splitlines()[0])
    parser.add_argument("experiment", nargs="?", default="quickstart")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--every", type=int, default=8, metavar="STEPS", help="between checkpoints, and of a turn")
    parser.add_argument("--pairs", type=int, default=0, help="of turns that count; 0: as many as the seconds allow")
    parser.add_argument("--seconds", type=float, default=150.0, help="in all, starting included, at least for a pair")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="of a step whose share is asked for: as here")
    given = parser.parse_intermixed_args(arguments)
    end = time.monotonic() + given.seconds
    # Evaluation would come into the first turn alone; what is learned would change how long answers are.
    same = [given.experiment, "steps=100000", "evaluation.before=false", "checkpoints.keep_last=1", *given.overrides]
    with tempfile.TemporaryDirectory() as made:
        folders = [Path(made) / name for name in ("saving", "plain")]
        for folder in folders:
            folder.mkdir()
        contenders: list[Contender] = []
        try:
            for folder, every in zip(folders, (given.every, 0), strict=True):
                contenders.append(Contender(folder, same, every))
            turns = _measured(contenders, given.every, given.pairs, end)
            rows = contenders[0].rows()
        finally:
            for contender in contenders:
                contender.end()
    asked = load(given.experiment, given.overrides).experiment.checkpoints.every
    said = _said(turns, rows, given.every)
    print(json.dumps(said | _share(said, asked, given.step_seconds), indent=1))
    return 0


def _measured(contenders: Sequence[Contender], every: int, pairs: int, end: float) -> list[tuple[float, float]]:
    """Return the seconds of each pair of turns; a turn begins where the step ends that is saved.

    pairs: that count, which the first does not; 0 for as many as there is time for until ``end``.
    """
    saving, plain = contenders
    # The first row is there; now up to the end of the step after which the first checkpoint is due.
    saving.steps(every - 1), plain.steps(every - 1)
    turns: list[tuple[float, float]] = []
    while len(turns) < 2 or (len(turns) <= pairs if pairs else time.monotonic() + sum(turns[-1]) < end):
        if len(turns) % 2:
            without, cost = plain.steps(every), saving.steps(every)
        else:
            cost, without = saving.steps(every), plain.steps(every)
        turns.append((cost, without))
    return turns


def _said(taken: Sequence[tuple[float, float]], rows: Sequence[dict[str, float]], every: int) -> dict[str, object]:
    """Return what the turns (seconds with a checkpoint, seconds without) come to; the first pair does not count."""
    turns = taken[1:]
    costs = [saving - plain for saving, plain in turns]
    mean, count = statistics.mean(costs), len(costs)
    half = student_quantile(0.05, count - 1) * statistics.stdev(costs) / count**0.5 if count > 1 else None
    return {
        "turns": [[round(seconds, 2) for seconds in pair] for pair in taken],
        "pairs": count,
        "steps_between": every,
        "step_seconds": round(statistics.mean(plain for _, plain in turns) / every, 3),
        "checkpoint_seconds": round(mean, 2),
        "checkpoint_seconds_median": round(statistics.median(costs), 2),
        # Student's interval of the mean, 95%.
        "checkpoint_seconds_within": None if half is None else [round(mean - half, 2), round(mean + half, 2)],
        **{f"{name}_seconds": _spent(rows, name) for name in ("copy", "wait", "write")},
        "cores": os.cpu_count(),
    }


def _spent(rows: Sequence[dict[str, float]], name: str) -> list[float]:
    """Return the run's own account of each checkpoint. wait: what is not 0 was not through in its turn."""
    seconds = [row.get(f"time/checkpoint_{name}_seconds", 0.0) for row in rows]
    return [round(spent, 2) for spent in seconds if spent >= 0.005]


def _share(said: dict[str, object], every: int, step_seconds: float | None) -> dict[str, object]:
    """Return the share of step time that a checkpoint takes where one is made after ``every`` steps.

    step_seconds: of such a step; as long as one here when not given.
    """
    step, mean, within = said["step_seconds"], said["checkpoint_seconds"], said["checkpoint_seconds_within"]
    assert isinstance(step, float)
    assert isinstance(mean, float)
    step = step if step_seconds is None else step_seconds
    if every == 0:
        return {}
    ends = None if not isinstance(within, list) else [round(end / (every * step), 5) for end in within]
    share = round(mean / (every * step), 5)
    return {"share": share, "share_within": ends, "share_every": every, "share_step_seconds": step}


if __name__ == "__main__":
    sys.exit(main())
