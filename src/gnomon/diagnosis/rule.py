"""What a rule is, and what it says when it speaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from gnomon.core.types import Group, Rollout
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.finding import Severity
from gnomon.diagnosis.history import History

ROUNDING = 1e-9
Shown = Sequence[tuple[Group, Rollout]]
Pick = Callable[[Sequence[Group]], Shown]
"""Chooses rollouts of a step that show what is meant."""


def nobody(groups: Sequence[Group]) -> Shown:
    """Show no rollout."""
    return ()


def everybody(groups: Sequence[Group]) -> list[tuple[Group, Rollout]]:
    """Return every rollout with its group."""
    return [(group, rollout) for group in groups for rollout in group.rollouts]


def one_a_prompt(groups: Sequence[Group]) -> Shown:
    """Show the first rollout of each prompt."""
    return [(group, group.rollouts[0]) for group in groups if group.rollouts]


@dataclass(frozen=True)
class Alarm:
    """What a rule says of a run as it is now; `Finding` has the meaning of the fields. since: the first step of it."""

    severity: Severity
    since: int
    summary: str
    evidence: Mapping[str, float]
    meaning: str
    advice: Sequence[str]
    pick: Pick = field(default=nobody)


class Rule(Protocol):
    """A frozen dataclass: its fields are thresholds, its call is the rule, its name that of its findings."""

    name: ClassVar[str]

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Return what is wrong after the latest step, None for nothing or where it is not measured."""
        ...


def graded(value: float, warning: float, severe: float) -> Severity | None:
    """Return how bad a value is that should be small.

    >>> graded(0.3, warning=0.2, severe=0.4)
    'warning'
    """
    if value >= severe - ROUNDING:
        return "severe"
    return "warning" if value >= warning - ROUNDING else None


def percent(value: float) -> str:
    """Return a share as people write it.

    >>> percent(0.125), percent(0.004)
    ('12%', '0.4%')
    """
    return f"{value:.0%}" if value >= 0.095 or value == 0 else f"{100 * value:.1f}%"
