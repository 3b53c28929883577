"""What is compared: one experiment, several algorithms in its place, several seeds, one budget for each run."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.algorithms import Uniform
from gnomon.algorithms import to_table as algorithm_table
from gnomon.analysis.compare.jobs import ComparisonJob
from gnomon.analysis.compare.records import Unit
from gnomon.config.experiment import Experiment, from_table, parse_override, read
from gnomon.core.errors import ConfigError
from gnomon.core.tables import to_table
from gnomon.records.ownership import check_own
from gnomon.training.provenance import differences

MARKS = 8
"""Evaluations on the way, evenly over the budget, beside those before and after."""
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
    """What each run may spend, and in which unit: tokens generated for training, seconds of it, or steps.

    Raises: ConfigError unless it is above 0.
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
        """Return what makes a run of so many answers a step end there."""
        if self.unit == "steps":
            return [f"steps={int(self.amount)}"]
        # Every answer has a token at least, so the budget ends the run before so many steps do.
        most = math.ceil(self.amount / rollouts_per_step) if self.unit == "tokens" else _MOST_STEPS
        amount = f"tokens={int(self.amount)}" if self.unit == "tokens" else f"seconds={float(self.amount)}"
        return [f"steps={most}", f"budget.{amount}"]

    def marks(self) -> dict[str, Any]:
        """Return what has a run evaluated on the way, as overrides that a user may have set otherwise."""
        if self.unit == "steps":
            return {"evaluation.every": max(1, int(self.amount) // MARKS)}
        return {"budget.evaluations": MARKS}


@dataclass(frozen=True)
class Contestant:
    """An algorithm that is compared. spec: as an experiment has it under ``algorithm``."""

    name: str
    spec: Any

    @property
    def slug(self) -> str:
        """The name as a folder has it."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.") or "algorithm"


@dataclass(frozen=True)
class Design:
    """A comparison before any of it is run.

    table: of the experiment; its own algorithm is not used. overrides: for every run. seeds: how many, from the
    experiment's own upwards. Make one with `Design.of`.
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
        """Return the comparison of these algorithms: presets, FILE.py:NAME, or TOML files that differ by algorithm.

        Raises: ConfigError naming what cannot be compared.
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
        """Return the run of an algorithm with one seed, below the comparison's folder."""
        return ComparisonJob(
            f"{entrant.name}, seed {seed}",
            {**self.table, "algorithm": entrant.spec},
            self._settings(entrant, seed),
            folder / "runs" / entrant.slug / f"seed-{seed}",
        )

    def experiment(self, entrant: Contestant) -> Experiment:
        """Return what an algorithm is trained as, with the first seed. Raises: ConfigError naming the algorithm."""
        settings = self._settings(entrant, self.seed_numbers()[0])
        return _built({**self.table, "algorithm": entrant.spec}, settings, entrant.name)

    def terms(self) -> dict[str, Any]:
        """Return what every run of the comparison shares: all but algorithms and seeds."""
        shared = {key: value for key, value in self.table.items() if key not in ("algorithm", "seed", "name")}
        terms = {"experiment": shared, "overrides": list(self.overrides), "limit": [self.limit.amount, self.limit.unit]}
        return dict(json.loads(json.dumps(terms, default=str)))

    def digest(self) -> str:
        """Return a short name for the terms, so that the same command finds its folder again."""
        return hashlib.blake2b(json.dumps(self.terms(), sort_keys=True).encode(), digest_size=4).hexdigest()

    def asks_uniformly(self, entrant: Contestant) -> bool:
        """Whether the algorithm leaves the order of questions to the shuffled epochs."""
        return isinstance(self.experiment(entrant).algorithm.sampler, Uniform)

    def _settings(self, entrant: Contestant, seed: int) -> tuple[str, ...]:
        """Return the overrides of a run: the user's, the budget, the evaluations on the way, the seed."""
        given = {key for key, _ in map(parse_override, self.overrides)}
        # Evaluations are shares of a budget, which is not there yet.
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
    """Return the algorithm of a preset, of FILE.py:NAME, or of an experiment that is otherwise the same."""
    if not named.endswith(".toml"):
        return Contestant(named.rpartition(":")[2] if ":" in named else named, named)
    own, path = _own(named), Path(named)
    theirs = _built(own, (), path.stem)
    ours = _built({**table, "algorithm": algorithm_table(theirs.algorithm)}, (), path.stem)
    begun, given = (_without_algorithm(to_table(replace(one, name=""))) for one in (ours, theirs))
    other = differences(begun, given)
    if other:
        raise ConfigError(
            f"{named} differs from the experiment in more than its algorithm, so a difference could come from there: "
            f"{'; '.join(other[:3])} ('there' is the experiment, 'here' the file)"
        )
    return Contestant(path.stem, algorithm_table(theirs.algorithm))


def _own(experiment: str | Path) -> dict[str, Any]:
    """Return an experiment's table. Raises: ConfigError where it is of a run of somebody else and names code."""
    table, folder = read(experiment), Path(experiment).parent
    if (folder / "run.json").exists():
        check_own(folder, table)
    return table


def _without_algorithm(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "algorithm"}


def _check_schedule(schedule: str, entrant: Contestant, limit: RunLimit) -> None:
    if limit.unit != "steps" and schedule != "constant":
        raise ConfigError(
            f"{entrant.name}: the {schedule} schedule of the learning rate falls over a number of steps, and a budget "
            f"of {limit.unit} leaves that number open; set learner.optimizer.schedule=constant, or compare with --steps"
        )
