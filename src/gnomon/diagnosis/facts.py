"""The settings that rules need, read from an unchecked experiment table."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.core.tables import value_at
from gnomon.tasks.published import PUBLISHED

LARGEST = 1e30
_NOTHING: list[Any] = []
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """Settings of a run that affect the diagnosis.

    Attributes:
        steps: Training steps.
        generations: Responses per prompt (G).
        updates: Optimizer updates per step.
        has_band: Whether ratios are clipped to a band for certain, also where a log does not tell its two sides apart.
        bound: Largest staleness in steps.
        budget: Most tokens of a response.
        prompts: Prompts per step.
        weights: Weights of the reward's components by name, in their order, those of a published set where the table
            names no reward. The first one is the run's main objective.
        preset: The algorithm's name.
        initial: Initial values of a tracker; "" without a tracker.
        table: The experiment's table.
        is_supervised: Whether answers are trained on that the run does not sample: the dataset's, or logged ones.
    """

    steps: int = 0
    generations: int = 1
    updates: int = 1
    has_band: bool = False
    bound: int = 0
    budget: int = 0
    prompts: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)
    preset: str = ""
    initial: str = ""
    table: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_supervised: bool = False

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Facts":
        """Read the facts from an experiment's table; missing or invalid values become defaults.

        >>> Facts.of({"steps": 9, "algorithm": {"num_generations": 4, "updates": {"minibatches": 2}}}).updates
        2
        """
        # A table may be edited or of another version: each number is one that rules can divide by.
        generations = max(1, _at(table, "algorithm.num_generations", 1))
        is_measured, tracker = table.get("max_staleness") == "measured", value_at(table, "algorithm.tracker")
        samples = _at(table, "algorithm.samples", "policy")
        return cls(
            steps=_at(table, "steps", 0),
            generations=generations,
            prompts=max(1, _at(table, "rollouts_per_step", 1) // generations),
            updates=max(1, _at(table, "algorithm.updates.epochs", 1) * _at(table, "algorithm.updates.minibatches", 1)),
            has_band=_at(table, "algorithm.surrogate.trust.piece", "") == "Clip",
            bound=_at(table, "staleness.limit" if is_measured else "max_staleness", 0),
            budget=_at(table, "sampling.max_completion_length", 0),
            weights=_weights(_at(table, "rewards", _NOTHING)) or _own_weights(table),
            preset=_at(table, "algorithm.name", ""),
            is_supervised=samples != "policy" or _at(table, "rollouts_from", "") != "",
            initial=_at(tracker, "initial", "prior") if _at(tracker, "piece", "") == "TrackerConfig" else "",
            table=table,
        )

    def has(self, advice: str) -> bool:
        """Return whether the run has the one setting that an advice names.

        >>> facts = Facts.of({"algorithm": {"name": "spo", "correction": {"piece": "TruncatedIS"}}})
        >>> [facts.has(f'algorithm{key}: why') for key in ('.correction = "TruncatedIS"', ' = "spo"', ' = "dapo"')]
        [True, True, False]
        """
        # An advice that names one setting with one value; "or" and "," name alternatives.
        named = re.match(r'([\w.]+) = "([\w-]+)"(?! or|,)', advice)
        if named is None or advice.count(' = "') > 1:
            return False
        found = value_at(self.table, named[1])
        return named[2] in ((found.get("piece"), found.get("name")) if isinstance(found, Mapping) else (found,))


def _weights(rewards: Sequence[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for reward in rewards:
        if not isinstance(reward, Mapping):
            continue
        own = _at(reward, "verifier.function", "").rpartition(":")[2] or _at(reward, "verifier.kind", "")
        weight = _at(reward, "weight", 1.0)
        found[_at(reward, "name", own)] = float(weight) if abs(weight) <= LARGEST else 0.0
    return found


def _own_weights(table: Mapping[str, Any]) -> dict[str, float]:
    own = PUBLISHED.get(_at(table, "task.set", ""))
    return {} if own is None else {reward.part: reward.weight for reward in own.rewards}


def _at(table: Any, path: str, default: T) -> T:
    found = value_at(table, path)
    # type() and not isinstance: true is no number here.
    kinds: tuple[type, ...] = (int, float) if type(default) is float else (type(default),)
    return found if type(found) in kinds else default
