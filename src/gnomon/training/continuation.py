"""Go on with a run after its end: what may change, and what is kept."""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Self

from gnomon.config.experiment import Experiment, anchored, from_table, to_toml, with_settings
from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import ConfigError
from gnomon.records.checkpoints import CheckpointRef
from gnomon.records.directory import RunDirectory
from gnomon.records.ownership import check_own
from gnomon.records.run_card import write_extension
from gnomon.training.provenance import changed_settings

_LENGTH = ("steps", "budget.tokens", "budget.seconds")


@dataclass(frozen=True)
class Continuation:
    """A run, and the experiment that it is to go on with.

    Attributes:
        run: The run's directory.
        begun: The experiment of the run as it is recorded.
        experiment: The experiment that is asked for now.
    """

    run: Path
    begun: Experiment
    experiment: Experiment

    @classmethod
    def of(cls, run: Path, settings: Sequence[tuple[str, Any]]) -> Self:
        """Return the continuation of a run with some settings changed.

        Args:
            run: The run's directory. Nothing that it names is executed unless this user began the run.
            settings: Paths such as "steps" with their new values.

        Raises:
            UserError: There is no run, another user began it and it names code, or a setting is not what it may be.
        """
        directory = RunDirectory(run)
        directory.check(run)
        table = directory.table()
        check_own(run, table)
        if not settings:
            raise ConfigError(
                f"{run} is continued with something changed, such as more steps in all: gnomon continue "
                f"{quote(str(run))} steps=200; to go on as it was begun, type gnomon resume {quote(str(run))}"
            )
        return cls(run, from_table(table).experiment, anchored(with_settings(table, settings).experiment))

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ: path to the value at the beginning and the value now."""
        there, now = (tomllib.loads(to_toml(each)) for each in (self.begun, self.experiment))
        return changed_settings(there, now)

    def check_extension(self, found: CheckpointRef | None) -> None:
        """Refuse what would not give the numbers of a run that had asked for as many steps from the beginning.

        Args:
            found: The checkpoint from which the run goes on.

        Raises:
            ConfigError: The message says what to type instead.
        """
        typed = quote(str(self.run))
        if found is None:
            raise ConfigError(
                f"{self.run} has no checkpoint, so there is nothing to continue; gnomon resume {typed} begins it again"
            )
        made, asked, before = found.step, self.experiment.steps, self.begun.steps
        # A budget that a run did not have was not counted either.
        others = [key for key, (was, _) in self.changed.items() if key not in _LENGTH or was in (None, 0, 0.0)]
        begin = f"gnomon train {quote(f'{self.run}/experiment.toml')} model={quote(str(found.path))} --run-dir DIR"
        if others:
            raise ConfigError(
                f"{', '.join(others)} cannot change within a run, only how long it is ({', '.join(_LENGTH)}); begin "
                f"another run with its weights: {begin}, with this changed"
            )
        if asked < made:
            raise ConfigError(
                f"steps = {asked} counts from the beginning of the run, of which {made} are made; type "
                f"steps={made + 1} or more"
            )
        plan = self.begun.learner.optimizer
        rates = ((plan.learning_rate_at(step, before), plan.learning_rate_at(step, asked)) for step in range(made))
        if any(was != now for was, now in rates):
            raise ConfigError(
                f'learner.optimizer.schedule = "{plan.schedule}" made the learning rates of the {made} steps that are '
                f"made depend on steps = {before}, so a run of {asked} steps would have had others; begin another run "
                f"with its weights: {begin} steps=N"
            )

    def write(self, directory: RunDirectory) -> None:
        """Write the experiment into a run that is locked, and note that in the card; nothing where it is there."""
        if not self.changed:
            return
        written = to_toml(self.experiment).encode()
        write_durably(directory.experiment, written)
        digest = hashlib.sha256(written).hexdigest()
        write_extension(directory.card, digest, self.changed)
