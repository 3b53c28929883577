"""Whoever looks at a run again and again: each look reads what was added, and disturbs nobody."""

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import numbered
from gnomon.core.tables import parse_toml
from gnomon.diagnosis import Finding
from gnomon.diagnosis.current_findings import read_current_findings
from gnomon.diagnosis.finding import newest
from gnomon.insight.watch.files import DamagedRollouts, Growing, Row, Unchanged
from gnomon.insight.watch.run_snapshot import RunSnapshot, Scored, ended
from gnomon.insight.watch.samples import Samples, read_samples
from gnomon.records.corruption import ROLLOUTS
from gnomon.records.directory import RunDirectory, lock_owner
from gnomon.records.jsonl import is_number, is_step, parsed
from gnomon.records.run_card import end_of

_PREFIXES = ("rollout/", "reward/", "loss/", "learner/", "time/", "stream/", "engines/", "critic/", "tokens/", "waste/")
_NAMES = ("seconds", "memory/peak_bytes", "mismatch/logprob_abs_mean_nats")


class Watcher:
    """Looks at the run at ``path``. Nothing is written, and no lock is kept.

    A run that is not there yet, that goes or that comes back is a `RunSnapshot` like others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = files = RunDirectory(path)
        self._table: Unchanged[Mapping[str, Any]] = Unchanged(files.experiment, _table, {})
        self._metrics = Growing(files.metrics, numbers)
        self._teaching = Growing(files.pretraining, numbers)
        self._evaluations = Growing(files.evaluations, scored)
        self._findings = Growing(files.findings, Finding.of_row)
        self._ranking: Unchanged[list[Finding] | None] = Unchanged(files.diagnosis, read_current_findings, None)
        self._ended: Unchanged[str] = Unchanged(files.card, _ended, "")
        self._samples = Samples()
        self._damage = DamagedRollouts(files)
        self._was_there = False

    def look(self) -> RunSnapshot:
        """Return the run as it is now."""
        now = time.time()
        if not self._files.experiment.is_file():
            self._samples = Samples()
            return RunSnapshot(self.path, now, was_there=self._was_there)
        self._was_there = True
        owner = lock_owner(self.path)
        for file in (self._metrics, self._teaching, self._evaluations, self._findings):
            file.look()
        table, rows = self._table.look(), in_order(self._metrics.rows)
        self._look_at_samples(rows)
        checkpoints = [step for step, _ in numbered(self._files.checkpoints, r"step-(\d+)")]
        return RunSnapshot(
            path=self.path,
            now=now,
            state="live" if owner else ended(rows, table, checkpoints),
            was_there=True,
            owner=owner,
            table=table,
            rows=rows,
            teaching=in_order(self._teaching.rows),
            evaluations=tuple(self._evaluations.rows),
            findings=tuple(self._current_findings()),
            samples=self._samples,
            checkpoint=checkpoints[-1] if checkpoints else None,
            written=_written(self._files.metrics),
            damaged=self._damaged(),
            ended=self._ended.look(),
        )

    def _current_findings(self) -> list[Finding]:
        """Return the findings in their newest words; where no such file is there, in those in which they were news."""
        standing = self._ranking.look()
        return newest(self._findings.rows) if standing is None else standing

    def _damaged(self) -> dict[str, int]:
        files = (self._metrics, self._evaluations, self._findings)
        found = {file.path.name: file.damaged for file in files} | {ROLLOUTS: self._damage.look(self._samples.step)}
        return {name: count for name, count in found.items() if count}

    def _look_at_samples(self, rows: Sequence[Row]) -> None:
        """Read the samples of the newest step that has its rollouts on disk, once a step."""
        step = rows[-1]["step"] if rows else 0
        if step < self._samples.step:
            self._samples = Samples()
        # The rollouts of a step are written after its metrics.
        for number in range(step, max(self._samples.step, step - 2), -1):
            path = self._files.rollouts / f"step-{number:06d}.jsonl"
            if path.is_file():
                self._samples = read_samples(path, number)
                break


def _ended(text: bytes) -> str:
    card = parsed(text)
    return "" if card is None else end_of(card)


def numbers(row: Row) -> Row | None:
    """Return a row's step and its numbers that are shown, None where it has no step; what is no number is left out.

    Each name is in memory once, however many rows have it.

    >>> numbers({"step": 1, "loss/policy": 0.5, "loss/ess_fraction": None, "mismatch/k3_nats": 1})
    {'step': 1, 'loss/policy': 0.5}
    """
    if not is_step(row.get("step")):
        return None
    shown = (name for name in row if name.startswith(_PREFIXES) or name in _NAMES)
    return {"step": row["step"]} | {sys.intern(name): row[name] for name in shown if is_number(row[name])}


def in_order(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows in order of steps, of a step that was written twice the last."""
    if all(before["step"] < after["step"] for before, after in pairwise(rows)):
        return tuple(rows)
    by_step = {row["step"]: row for row in rows}
    return tuple(by_step[step] for step in sorted(by_step))


def scored(row: Row) -> Scored | None:
    """Return what an evaluation's row says first, None where it says nothing."""
    scores, step, prompts = row.get("scores"), row.get("step"), row.get("prompts")
    for name, score in scores.items() if isinstance(scores, dict) else ():
        said = [score.get(key) for key in ("mean", "low", "high")] if isinstance(score, dict) else []
        values = [value for value in said if is_number(value)]
        if is_step(step) and len(values) == 3:
            mean, low, high = values
            return Scored(step, name, mean, low, high, prompts if is_step(prompts) else 0)
    return None


def _table(content: bytes) -> Mapping[str, Any]:
    try:
        return parse_toml(content.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
