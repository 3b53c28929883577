"""The design of a comparison: one experiment, several algorithms, several seeds, and one budget per run."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.algorithms import to_table as algorithm_table
from gnomon.analysis.compare.jobs import ComparisonJob
from gnomon.analysis.compare.records import Unit
from gnomon.config.experiment import Experiment, from_table
from gnomon.config.reading import parse_override, read
from gnomon.core.errors import ConfigError
from gnomon.core.tables import to_table
from gnomon.records.ownership import check_own
from gnomon.training.provenance import differences

MARKS = 8
"""Evaluations during training, spread evenly over the budget; two more come before and after."""
_MOST_STEPS = 10**6
_OURS = {
    "seed": "--seeds says how many there are",
    "steps": "--steps sets it for every run",
    "budget.tokens": "--budget sets it",
    "budget.seconds": "--seconds sets it",
    "algorithm": "--algorithms names them",
}


@dataclass(frozen=True)
class RunLimit:
    """The budget of each run: tokens generated for training, seconds of training, or steps.

    Raises:
        ConfigError: If the amount is not positive and finite.
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        if not 0 < self.amount < math.inf:
            option = "--budget" if self.unit == "tokens" else f"--{self.unit}"
            wanted = "finite" if self.amount == math.inf else "a number above 0"
            raise ConfigError(f"{option} must be {wanted}, got {self.amount:g}: what each run may spend")

    def __str__(self) -> str:
        what = "generated tokens" if self.unit == "tokens" else self.unit
        return f"{self.amount:,.10g} {what}"

    def overrides(self, rollouts_per_step: int) -> list[str]:
        """Return the overrides that end a run at this limit.

        Args:
            rollouts_per_step: Responses of a step.
        """
        if self.unit == "steps":
            return [f"steps={int(self.amount)}"]
        # Every response has at least one token, so the budget ends the run before this number of steps.
        most = math.ceil(self.amount / rollouts_per_step) if self.unit == "tokens" else _MOST_STEPS
        amount = f"tokens={int(self.amount)}" if self.unit == "tokens" else f"seconds={float(self.amount)}"
        return [f"steps={most}", f"budget.{amount}"]

    def marks(self) -> dict[str, Any]:
        """Return the settings of evaluations during training; a user's own settings replace them."""
        if self.unit == "steps":
            return {"evaluation.every": max(1, int(self.amount) // MARKS)}
        return {"budget.evaluations": MARKS}


@dataclass(frozen=True)
class Contestant:
    """One algorithm of a comparison.

    Attributes:
        spec: The value of ``algorithm`` in an experiment.
    """

    name: str
    spec: Any

    @property
    def slug(self) -> str:
        """The name as a folder name."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.") or "algorithm"


@dataclass(frozen=True)
class Design:
    """A comparison before it runs. Make one with `Design.of`.

    Attributes:
        table: The experiment; its own algorithm is not used.
        overrides: Settings for every run.
        entrants: The algorithms.
        seeds: Number of seeds, counted from the experiment's own seed.
        limit: Budget of each run.
    """

    table: Mapping[str, Any]
    overrides: tuple[str, ...]
    entrants: tuple[Contestant, ...]
    seeds: int
    limit: RunLimit

    @classmethod
    def of(
        cls, experiment: str | Path, overrides: Sequence[str], algorithms: Sequence[str], seeds: int, limit: RunLimit
    ) -> "Design":
        """Check and return a comparison.

        Args:
            experiment: TOML file or name of the experiment.
            overrides: Settings for every run.
            algorithms: Presets, FILE.py:NAME, or TOML files that differ from the experiment only by their algorithm.
            seeds: Number of seeds.
            limit: Budget of each run.

        Raises:
            ConfigError: If the algorithms cannot be compared.
        """
        if seeds < 1:
            raise ConfigError(f"--seeds must be 1 or more, got {seeds}; with one nothing is learned about another seed")
        for key, _ in map(parse_override, overrides):
            if key in _OURS:
                raise ConfigError(f"{key} cannot be set in a comparison: {_OURS[key]}")
        table = _own(experiment)
        named = [name for name in (part.strip() for part in algorithms) if name]
        if len(named) < 2:
            raise ConfigError("--algorithms needs two names or more, such as grpo,spo (`gnomon algorithms` lists them)")
        entrants = tuple(_entrant(name, table) for name in named)
        for what, values in (("name", [e.name for e in entrants]), ("folder", [e.slug for e in entrants])):
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ConfigError(f"two algorithms have the {what} {twice[0]}; give a file of its own name for one")
        design = cls(table, tuple(overrides), entrants, seeds, limit)
        for entrant in entrants:
            _check_schedule(design.experiment(entrant).learner.optimizer.schedule, entrant, limit)
        return design

    def seed_numbers(self) -> list[int]:
        """Return the seeds."""
        first = self.table.get("seed", 0)
        return [(first if type(first) is int else 0) + number for number in range(self.seeds)]

    def job(self, entrant: Contestant, seed: int, folder: Path) -> ComparisonJob:
        """Return the run of one algorithm with one seed, below the comparison's folder."""
        return ComparisonJob(
            f"{entrant.name}, seed {seed}",
            {**self.table, "algorithm": entrant.spec},
            self._settings(entrant, seed),
            folder / "runs" / entrant.slug / f"seed-{seed}",
        )

    def experiment(self, entrant: Contestant) -> Experiment:
        """Return one algorithm's experiment with the first seed.

        Raises:
            ConfigError: If the experiment is invalid; the message names the algorithm.
        """
        settings = self._settings(entrant, self.seed_numbers()[0])
        return _built({**self.table, "algorithm": entrant.spec}, settings, entrant.name)

    def terms(self) -> dict[str, Any]:
        """Return what all runs share: everything but algorithms and seeds."""
        shared = {key: value for key, value in self.table.items() if key not in ("algorithm", "seed", "name")}
        terms = {"experiment": shared, "overrides": list(self.overrides), "limit": [self.limit.amount, self.limit.unit]}
        return dict(json.loads(json.dumps(terms, default=str)))

    def digest(self) -> str:
        """Return a short hash of the terms, so that the same command finds its folder again."""
        return hashlib.blake2b(json.dumps(self.terms(), sort_keys=True).encode(), digest_size=4).hexdigest()

    def _settings(self, entrant: Contestant, seed: int) -> tuple[str, ...]:
        """Return the overrides of a run: the user's, the budget, the evaluations, the seed."""
        given = {key for key, _ in map(parse_override, self.overrides)}
        # budget.evaluations needs a budget, which is added below.
        plain = [o for o in self.overrides if parse_override(o)[0] != "budget.evaluations"]
        built = _built({**self.table, "algorithm": entrant.spec}, plain, entrant.name)
        marks = [f"{key}={value}" for key, value in self.limit.marks().items() if key not in given]
        return (*self.overrides, *self.limit.overrides(built.rollouts_per_step), *marks, f"seed={seed}")


def _built(table: Mapping[str, Any], overrides: Sequence[str], name: str) -> Experiment:
    try:
        return from_table(table, overrides).experiment
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _entrant(named: str, table: Mapping[str, Any]) -> Contestant:
    """Return the contestant for a preset, for FILE.py:NAME, or for an experiment that differs only by its algorithm."""
    if not named.endswith(".toml"):
        return Contestant(named.rpartition(":")[2] if ":" in named else named, named)
    own, path = _own(named), Path(named)
    theirs = _built(own, (), path.stem)
    ours = _built({**table, "algorithm": algorithm_table(theirs.algorithm)}, (), path.stem)
    begun, given = (to_table(replace(one, name="")) | {"algorithm": None} for one in (ours, theirs))
    other = differences(begun, given)
    if other:
        raise ConfigError(
            f"{named} differs from the experiment in more than its algorithm, so a difference could come from there: "
            f"{'; '.join(other[:3])} ('there' is the experiment, 'here' the file)"
        )
    return Contestant(path.stem, algorithm_table(theirs.algorithm))


def _own(experiment: str | Path) -> dict[str, Any]:
    """Return an experiment's table. Raises ConfigError if it belongs to another user's run and names code."""
    table, folder = read(experiment), Path(experiment).parent
    if (folder / "run.json").exists():
        check_own(folder, table)
    return table


def _check_schedule(schedule: str, entrant: Contestant, limit: RunLimit) -> None:
    if limit.unit != "steps" and schedule != "constant":
        raise ConfigError(
            f"{entrant.name}: the {schedule} schedule of the learning rate falls over a number of steps, and a budget "
            f"of {limit.unit} leaves that number open; set learner.optimizer.schedule=constant, or compare with --steps"
        )
