"""Find the checkpoint to resume from, and truncate the logs to the checkpoint's step."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from shlex import quote

from gnomon.config.experiment import Experiment
from gnomon.core.atomic_files import drop_step_files
from gnomon.core.errors import CheckpointError, RunDirectoryError
from gnomon.records.checkpoints import CheckpointRef, Checkpoints
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import drop_after, step_rows
from gnomon.records.reading import RunRecord
from gnomon.records.run_card import end_of


@dataclass(frozen=True)
class ResumePoint:
    """The place from which a run goes on.

    Attributes:
        found: The newest sound checkpoint; None at the beginning.
        batches: How many batches of value pretraining the run has made; None when that phase is over, or the run has no
            such phase.
        first: Steps that were made by the run that this one continues.
    """

    found: CheckpointRef | None
    batches: int | None = None
    first: int = 0

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.first if self.found is None else self.found.step

    @property
    def said(self) -> str:
        """What a person is told beside the step."""
        return "" if self.batches is None else f", after batch {self.batches} of value pre-training"

    def warnings(self, directory: RunDirectory) -> Iterator[str]:
        """Yield what is not as a run leaves it."""
        yield from () if self.found is None else self.found.warnings
        if self.found is None:
            kept = "; what it recorded is kept in a folder former-N" if _recorded(directory) else ""
            yield f"{directory.path} has no checkpoint yet, so it begins again at step {self.first}{kept}"
        missing = self.step - self.first - sum(step <= self.step for step in _recorded(directory))
        if missing > 0:
            yield (
                f"{directory.metrics} lacks {missing} of the {self.step} steps before this checkpoint: they were made, "
                "and will not be made again, so curves and totals go without them"
            )


def find_resume_point(directory: RunDirectory, experiment: Experiment) -> ResumePoint:
    """Return where the run stands; nothing is changed.

    Raises:
        CheckpointError: If all checkpoints are damaged.
        RunDirectoryError: If they are gone though the run had some: it would be begun again over its own records.
    """
    plan = experiment.checkpoints
    for folder in (directory.checkpoints, directory.pretraining_checkpoints):
        if os.path.lexists(folder) and not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder; bring back the checkpoints, or move away what is there")
    found = Checkpoints(directory.checkpoints, plan.keep_last, plan.keep_every or None).newest()
    if found is None and (found := Checkpoints(directory.pretraining_checkpoints).newest()) is not None:
        return ResumePoint(replace(found, step=0), found.step)
    if found is None:
        _refuse_lost(directory, plan.every, experiment.first_step)
    return ResumePoint(found, first=experiment.first_step)


def rewind(directory: RunDirectory, at: ResumePoint) -> None:
    """Remove what was written after the checkpoint; it will be written again. Without one everything is set aside."""
    kept = -1 if at.found is None else at.step
    if at.found is None:
        directory.set_aside()
    if at.batches is None:
        # Over, or never saved: a crash may have left its folder behind.
        shutil.rmtree(directory.pretraining_checkpoints, ignore_errors=True)
    if at.batches is not None:
        drop_after(directory.pretraining, at.batches)
    Checkpoints(directory.checkpoints).sweep()
    for left in directory.path.glob(".*.tmp"):
        left.unlink(missing_ok=True)
    for path in (directory.metrics, directory.evaluations, directory.findings):
        drop_after(path, kept)
    for folder, suffix in ((directory.answers, "jsonl"), (directory.rollouts, "jsonl"), (directory.batches, "json")):
        drop_step_files(folder, suffix, kept)


def _refuse_lost(directory: RunDirectory, every: int, first: int) -> None:
    made = max([*_recorded(directory), *RunRecord(directory.path).rollout_steps()], default=first) - first
    if directory.saved.exists() or _must_have_saved(directory, every, made):
        raise RunDirectoryError(
            f"{directory.checkpoints} has no checkpoint, though {made} steps were made and some were saved: they are "
            "gone, or on a disk that is not mounted; nothing was changed. Bring them back; or begin again as another "
            f"run: gnomon train {quote(str(directory.experiment))} --run-dir DIR"
        )


def _must_have_saved(directory: RunDirectory, every: int, made: int) -> bool:
    """Whether a run without a mark of having saved, for example an older version's, saved all the same."""
    if directory.checkpoints.is_dir() and any(directory.checkpoints.glob(".tmp-*")):
        return every > 0 and made > 2 * every
    # A checkpoint is on the disk before the next one is begun, and that comes after its step's metrics.
    due = every * (2 if directory.checkpoints.is_dir() else 1)
    record = RunRecord(directory.path)
    return (every > 0 and made > due) or (record.made_its_last() and not end_of(record.card()))


def _recorded(directory: RunDirectory) -> set[int]:
    """Return the steps that have metrics."""
    return {row["step"] for row in step_rows(directory.metrics)}
