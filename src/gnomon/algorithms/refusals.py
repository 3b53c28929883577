"""What is wrong with a composition, and which changes of it would mend that."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from gnomon.algorithms.composition import Composition
from gnomon.algorithms.spelling import spelled

_OFFERED = 3
"""Fixes that one message offers at most."""


@dataclass(frozen=True)
class Change:
    """One value of a composition in place of another: ``path`` as "ratio.anchor", below the algorithm."""

    path: str
    value: Any

    def __str__(self) -> str:
        return f"algorithm.{self.path} = {spelled(self.value)}"


@dataclass(frozen=True)
class Refusal:
    """One mistake: what is wrong and why, and the changes that may mend it, the likeliest first."""

    reason: str
    candidates: tuple[Change, ...] = ()


Rules = Callable[[Composition], list[Refusal]]
"""A composition to everything that is wrong with it."""


def said(refusal: Refusal, algorithm: Composition, rules: Rules) -> str:
    """Return the sentence of a refusal, with those of its fixes that work for this composition.

    A fix works when fewer mistakes are left than before: so whoever follows fixes arrives at a composition that builds.
    """
    fixes = list(islice(_working(refusal, algorithm, rules), _OFFERED))
    return f"{refusal.reason}; set {' or '.join(fixes)}" if fixes else refusal.reason


def _working(refusal: Refusal, algorithm: Composition, rules: Rules) -> Iterator[str]:
    """Yield the changes that mend something; two changes at once only where none does alone."""
    wrong = len(rules(algorithm))
    after = [(change, changed(algorithm, change)) for change in refusal.candidates]
    alone = [str(change) for change, altered in after if len(rules(altered)) < wrong]
    if alone:
        yield from alone
        return
    for first, altered in after:
        for second in (c for r in rules(altered) if r.reason != refusal.reason for c in r.candidates):
            if second.path != first.path and len(rules(changed(altered, second))) < wrong:
                yield f"{first} and {second}"


def changed(algorithm: Composition, change: Change) -> Composition:
    """Return ``algorithm`` with a change, unchecked: what would be wrong with it is the question."""
    name, _, below = change.path.partition(".")
    altered = copy.copy(algorithm)
    object.__setattr__(altered, name, _within(getattr(algorithm, name), below, change.value))
    return altered


def _within(piece: Any, path: str, value: Any) -> Any:
    if not path:
        return value
    name, _, below = path.partition(".")
    return replace(piece, **{name: _within(getattr(piece, name), below, value)})
