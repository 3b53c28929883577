"""The trackers that a run may write to; each library is imported when its tracker is opened, in its thread."""

import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gnomon.records.plain import read_plain_text


class Tracker(Protocol):
    """Somebody else's place for metrics. May raise, hang or be slow."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""
        ...

    def finish(self) -> None:
        """Write out and close."""
        ...


@dataclass(frozen=True)
class TensorBoard:
    """Event files in RUN/tensorboard. writer: `torch.utils.tensorboard.SummaryWriter`."""

    writer: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


@dataclass(frozen=True)
class LoggedRun:
    """A run of Weights & Biases or trackio, which have one interface."""

    run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at ``step``."""
        self.run.log(dict(values), step=step)

    def finish(self) -> None:
        """Upload what is left, and close."""
        self.run.finish()


def open_tensorboard(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open event files; on a resume, what was written after ``step`` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    make: Any = SummaryWriter
    return TensorBoard(make(log_dir=str(directory / "tensorboard"), purge_step=step + 1 if step else None))


def open_wandb(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open a Weights & Biases run; its own environment variables (WANDB_PROJECT, WANDB_MODE, ...) hold.

    A resumed run goes on under the same identity, which lies in the run directory.
    """
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gnomon"),
        name=run_name,
        id=_identity(directory),
        resume="allow",
        dir=str(directory),
        config=dict(config),
        settings=wandb.Settings(console="off"),
    )
    return LoggedRun(run)


def open_trackio(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open a trackio run in its local database; a resumed run goes on under the same name."""
    import trackio

    # It greets on standard output, which belongs to results.
    with contextlib.redirect_stdout(sys.stderr):
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "gnomon"),
            name=run_name,
            config=dict(config),
            resume="allow",
            embed=False,
        )
    return LoggedRun(run)


def _identity(directory: Path) -> str:
    kept = directory / ".tracker-id"
    if not kept.exists():
        kept.write_text(secrets.token_hex(8))
    return read_plain_text(kept).strip()
