"""A run's files, for readers that must not disturb the run: reports, live views, diagnoses, studies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gnomon.core.atomic_files import numbered
from gnomon.core.errors import DatasetError, RunDirectoryError
from gnomon.records.directory import RunDirectory, lock_owner
from gnomon.records.jsonl import ended, is_number, made_its_last, step_rows
from gnomon.records.rollouts import RecordedRollout, read_rollouts
from gnomon.records.run_card import read_card

State = Literal["live", "finished", "stopped"]


@dataclass(frozen=True)
class RunRecord:
    """What a run has written down so far. Nothing here takes its lock, changes a file or fails because one is damaged.

    Open one with `RunRecord.of`. Every call reads the files again, so a live run is seen as it is now; but for the
    experiment, which does not change while a run is there.
    """

    path: Path

    @classmethod
    def of(cls, path: str | Path) -> "RunRecord":
        """Return the record of the run at ``path``.

        Raises:
            RunDirectoryError: There is none, naming the nearest one, or its experiment cannot be read: without it
                nothing that was measured can be judged.
        """
        place = RunDirectory.named_by(path)
        RunDirectory.check(place)
        record = cls(place)
        record._table  # noqa: B018 - read here, so that an unreadable file is found here
        return record

    @property
    def files(self) -> RunDirectory:
        """The names of its files."""
        return RunDirectory(self.path)

    def experiment(self) -> dict[str, Any]:
        """Return the resolved experiment as a table, empty where it cannot be read."""
        try:
            return self._table
        except RunDirectoryError:
            return {}

    @cached_property
    def _table(self) -> dict[str, Any]:
        return self.files.table()

    def card(self) -> dict[str, Any]:
        """Return the run card, empty where there is none."""
        return read_card(self.files.card)

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row a step in order of steps; of a step that was written twice the last. Torn lines are left out.

        A number that was not finite is None.
        """
        # A dict keeps the last row of a step that was written twice.
        rows = {row["step"]: row for row in step_rows(self.files.metrics)}
        return [rows[step] for step in sorted(rows)]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of the evaluations, in order; `gnomon.training.evaluate.read_evaluations` has them typed."""
        return list(step_rows(self.files.evaluations))

    def findings(self) -> list[dict[str, Any]]:
        """Return the rows of what the diagnosis found while the run was training; `Finding.of_row` reads one."""
        return list(step_rows(self.files.findings))

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts are on disk, in order."""
        return [step for step, _ in numbered(self.files.rollouts, r"step-(\d+)\.jsonl")]

    def rollouts(self, step: int) -> list[RecordedRollout]:
        """Return the rollouts of a step; none where its file is missing or damaged."""
        try:
            return list(read_rollouts(self.files.rollouts / f"step-{step:06d}.jsonl"))
        except DatasetError:
            return []

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a published checkpoint, in order."""
        return [step for step, _ in numbered(self.files.checkpoints, r"step-(\d+)")]

    def steps(self) -> int:
        """Return how many steps the experiment asks for, 0 where it does not say."""
        asked = self.experiment().get("steps")
        return asked if type(asked) is int else 0

    def state(self) -> State:
        """Return whether a process works on it now, else how it `ended`."""
        return "live" if lock_owner(self.path) is not None else self.ended()

    def ended(self) -> Literal["finished", "stopped"]:
        """Return whether it reached its end, as if no process worked on it."""
        return ended(self.experiment(), self.metrics(), self.checkpoint_steps())

    def made_its_last(self) -> bool:
        """Return whether the metrics say that it made its last step, or spent its budget."""
        rows = self.metrics()
        return bool(rows) and made_its_last(self.experiment(), rows)


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each row that has such a `number`.

    >>> column([{"step": 1, "a": 0.5}, {"step": 2, "a": None}, {"step": 3}], "a")
    [(1, 0.5)]
    """
    return [(row["step"], value) for row in rows if (value := number(row, name)) is not None]


def number(row: Mapping[str, Any], name: str) -> float | None:
    """Return the number ``name`` of a row that `is_number`, None where it has none."""
    value: Any = row.get(name)
    return float(value) if is_number(value) else None
