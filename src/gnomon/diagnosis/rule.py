"""The interface of rules, and the alarms that rules return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Formatter, Template
from typing import Any, ClassVar, Protocol

from gnomon.core.tables import packaged_toml
from gnomon.core.types import Group, Rollout
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.finding import Severity
from gnomon.diagnosis.history import History

ROUNDING = 1e-9
Shown = Sequence[tuple[Group, Rollout]]
Pick = Callable[[Sequence[Group]], Shown]
"""Chooses rollouts of a step that illustrate an alarm."""


def select_none(groups: Sequence[Group]) -> Shown:
    """Choose no rollout."""
    return ()


def select_all(groups: Sequence[Group]) -> list[tuple[Group, Rollout]]:
    """Choose every rollout."""
    return [(group, rollout) for group in groups for rollout in group.rollouts]


def one_a_prompt(groups: Sequence[Group]) -> Shown:
    """Choose the first rollout of each prompt."""
    return [(group, group.rollouts[0]) for group in groups if group.rollouts]


@dataclass(frozen=True)
class Alarm:
    """A rule's result at one step; the fields are those of `Finding`, and ``since`` is the problem's first step."""

    severity: Severity
    since: int
    summary: str
    evidence: Mapping[str, float]
    meaning: str
    advice: Sequence[str]
    pick: Pick = field(default=select_none)


class Rule(Protocol):
    """A frozen dataclass whose fields are thresholds, whose call is the rule, and whose name the findings have."""

    name: ClassVar[str]

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Return the problem after the latest step; None without a problem or without the needed metrics."""


class _Words(Formatter):
    """Formats of ``remedies.toml``: those of Python, and ``{share:%}`` as `percent` writes it."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return percent(value) if format_spec == "%" else str(super().format_field(value, format_spec))


# Once: each call of packaged_toml is a deep copy, and every step asks for a dozen texts.
@cache
def _remedies() -> Mapping[str, Any]:
    return packaged_toml("gnomon.diagnosis", "remedies.toml")


def alarm(
    severity: Severity, since: int, key: str, evidence: Mapping[str, float], pick: Pick = select_none, **words: object
) -> Alarm:
    """Return an alarm in the words of ``remedies.toml``: what was seen, what it usually means, and what to try.

    Args:
        severity: The alarm's.
        since: The problem's first step.
        key: The rule's name; where a rule has several findings, with a word more.
        evidence: Numbers of the finding; the words name them too.
        pick: Chooses rollouts that illustrate it.
        words: What stands there as ``{name}`` in what is said, and as ``$name`` elsewhere.
    """
    text = {**_remedies().get(key.partition(".")[0], {}), **_remedies()[key]}
    named = {**evidence, **words}
    lines = (text["means"], *text.get("try", ()), *text.get("always", ()))
    means, *advice = (Template(line).safe_substitute(named) for line in lines)
    return Alarm(severity, since, _Words().vformat(text["says"], (), named), evidence, means, tuple(advice), pick)


def graded(value: float, warning: float, severe: float) -> Severity | None:
    """Return the severity of a value that should be small.

    >>> graded(0.3, warning=0.2, severe=0.4)
    'warning'
    """
    if value >= severe - ROUNDING:
        return "severe"
    return "warning" if value >= warning - ROUNDING else None


def percent(value: float) -> str:
    """Format a share.

    >>> percent(0.125), percent(0.004)
    ('12%', '0.4%')
    """
    return f"{value:.0%}" if value >= 0.095 or value == 0 else f"{100 * value:.1f}%"
