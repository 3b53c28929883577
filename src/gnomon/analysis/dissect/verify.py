"""`gnomon dissect --verify`: check every preset against a second implementation."""

import math
import platform
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gnomon.algorithms import NAMED, Algorithm, resolve
from gnomon.analysis.dissect.dissect import Dissection, decompose
from gnomon.analysis.dissect.golden import ATOL, GOLDENS, Golden
from gnomon.analysis.dissect.random_batches import KINDS, answered, draw, to_batch
from gnomon.analysis.dissect.reference import ORACLES, ReferenceAnswer
from gnomon.core.errors import ConfigError
from gnomon.core.progress import counted

RELATIVE, ABSOLUTE = 1e-10, 1e-13
FORMULATED: Mapping[str, Algorithm] = {name: NAMED[name] for name in ORACLES}
"""The presets that have formulas: all that a recorded batch of log-probabilities has enough for."""
TOLERANCE = f"|ours - oracle| <= {RELATIVE:g} of the larger one + {ABSOLUTE:g}, each number on its own"


@dataclass(frozen=True)
class ArrayDifference:
    """A disagreement of a preset and its oracle: batch (kind and seed), quantity, sequence and position."""

    algorithm: str
    kind: str
    seed: int
    quantity: str
    place: tuple[int, ...]
    ours: float
    theirs: float

    def __str__(self) -> str:
        at = f" at sequence {self.place[0]}, position {self.place[1]}" if self.place else ""
        batch = f"batch '{self.kind}', seed {self.seed}"
        return f"{self.algorithm}: {batch}: {self.quantity}{at} is {self.ours!r}, the formula says {self.theirs!r}"


@dataclass(frozen=True)
class PieceVerdict:
    """The check of one preset: batches, compared numbers, and the largest |difference| / tolerance."""

    batches: int
    numbers: int
    largest: float
    difference: ArrayDifference | None


@dataclass(frozen=True)
class VerifyReport:
    """Verdicts by preset, the number of reference cases, and a sentence for each wrong case."""

    presets: Mapping[str, PieceVerdict]
    cases: int
    wrong_cases: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether there is no difference."""
        return not self.wrong_cases and all(v.difference is None for v in self.presets.values())

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object of `--verify --json`."""
        algorithms = {
            name: {
                "agrees": v.difference is None,
                "batches": v.batches,
                "numbers": v.numbers,
                "largest_share_of_tolerance": v.largest if math.isfinite(v.largest) else None,
                "difference": None if v.difference is None else str(v.difference),
            }
            for name, v in self.presets.items()
        }
        return {
            "agrees": self.agrees,
            "tolerance": TOLERANCE,
            "kinds": [kind.name for kind in KINDS],
            "versions": versions(),
            "algorithms": algorithms,
            "reference": {"cases": self.cases, "wrong": list(self.wrong_cases)},
        }

    def __str__(self) -> str:
        width = max(map(len, self.presets), default=0)
        lines = [
            "Each preset against formulas in numpy float64, written from the papers and sharing no code with it:",
            "advantages, loss, policy loss, value loss, gradient d loss / d log-probability, clipped fractions, ESS.",
            f"Tolerance: {TOLERANCE}.",
            "Random batches, each kind with seeds from 0:",
            *textwrap.wrap("; ".join(kind.name for kind in KINDS), 96, initial_indent="  ", subsequent_indent="  "),
            "",
            f"{'preset':<{width}}  batches  numbers  largest difference, as a share of the tolerance",
        ]
        for name, v in self.presets.items():
            word = "agrees" if v.difference is None else "DIFFERS"
            lines.append(f"{name:<{width}}  {v.batches:>7}  {v.numbers:>7}  {v.largest:<8.1g} {word}")
        wrong = [str(v.difference) for v in self.presets.values() if v.difference is not None]
        used = ", ".join(f"{name} {version}" for name, version in versions().items())
        found = f"{len(wrong)} of {len(self.presets)} differ" if wrong else f"all {len(self.presets)} presets agree"
        right = self.cases - len(self.wrong_cases)
        lines += ["", f"{found}; {right} of {self.cases} reference cases are right ({used})"]
        return "\n".join([*lines, *(f"  {line}" for line in (*wrong, *self.wrong_cases))])


def verify(algorithms: Mapping[str, Algorithm] = FORMULATED, batches: int = 2) -> VerifyReport:
    """Check algorithms on random steps of every kind and on the reference cases.

    Args:
        algorithms: Algorithms under any key; each is compared with the formulas of its own ``name``, so that a user's
            "grpo" can be checked too.
        batches: Steps of each kind, with seeds from 0.

    Raises:
        ConfigError: If there are no formulas for an algorithm's name.
    """
    missing = [a.name for a in algorithms.values() if a.name not in ORACLES]
    if missing:
        raise ConfigError(
            f"no formulas are written for {', '.join(missing)}, so there is nothing to hold it against; there are for "
            f"{', '.join(ORACLES)}"
        )
    cases = [case for case in GOLDENS if case.preset in algorithms]
    each = counted(algorithms.items(), "verifying", len(algorithms))
    presets = {name: _verify(name, algorithm, batches) for name, algorithm in each}
    return VerifyReport(presets, len(cases), tuple(line for case in cases for line in _wrong(case)))


def versions() -> dict[str, str]:
    """Return the versions of Python, numpy and torch."""
    return {"python": platform.python_version(), "numpy": np.__version__, "torch": str(torch.__version__)}


def compare(ours: Dissection, theirs: ReferenceAnswer) -> tuple[int, float, list[tuple[str, tuple[int, ...], Any]]]:
    """Return the number of compared numbers, the largest share of the tolerance, and the quantities that exceed it."""
    pairs: dict[str, tuple[Any, Any]] = {
        "advantages": (ours.advantages.numpy(), theirs.advantages),
        "loss": (ours.loss, theirs.loss),
        "policy loss": (ours.policy_loss, theirs.policy_loss),
        "gradient": (ours.gradient.numpy(), theirs.gradient),
        "value loss": (ours.value_loss, theirs.value_loss),
        "clipped fraction": (ours.statistics["clipped_fraction"], theirs.clipped_fraction),
        "out-of-band fraction": (ours.statistics["out_of_band_fraction"], theirs.out_of_band_fraction),
        "ESS fraction": (ours.statistics["ess_fraction"], theirs.ess_fraction),
    }
    numbers, largest, wrong = 0, 0.0, []
    for quantity, (left, right) in pairs.items():
        if left is None and right is None:
            continue
        share = share_of_tolerance(left, right)
        numbers += share.size
        largest = max(largest, float(share.max(initial=0.0)))
        if bool((share > 1).any()):
            place = np.unravel_index(int(share.argmax()), share.shape)
            both = (float(np.asarray(left, dtype=float)[place]), float(np.asarray(right, dtype=float)[place]))
            wrong.append((quantity, tuple(int(i) for i in place), both))
    return numbers, largest, wrong


def share_of_tolerance(ours: Any, theirs: Any) -> Any:
    """Return |difference| / tolerance for each number; infinite if only one of both is finite.

    >>> share_of_tolerance([1.0, float("nan")], [1.0, 2.0]).tolist()
    [0.0, inf]
    """
    left, right = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    allowed = RELATIVE * np.maximum(np.abs(left), np.abs(right)) + ABSOLUTE
    finite = np.isfinite(left) & np.isfinite(right)
    return np.where(finite, np.abs(left - right) / np.where(finite, allowed, 1.0), np.inf)


def _verify(name: str, algorithm: Algorithm, batches: int) -> PieceVerdict:
    numbers, largest, first = 0, 0.0, None
    for kind in KINDS:
        for seed in range(batches):
            step = answered(draw(kind, seed), algorithm)
            answer = ORACLES[algorithm.name](step)
            count, share, wrong = compare(decompose(algorithm, *to_batch(step)), answer)
            numbers, largest = numbers + count, max(largest, share)
            if wrong and first is None:
                quantity, place, (ours, theirs) = wrong[0]
                first = ArrayDifference(name, kind.name, seed, quantity, place, ours, theirs)
    return PieceVerdict(len(KINDS) * batches, numbers, largest, first)


def _wrong(case: Golden) -> list[str]:
    """Return a sentence for each number of a reference case that the preset or its oracle gets wrong."""
    step, (loss, gradient) = case.step(), case.expected()
    ours, theirs = decompose(resolve(case.spec), *to_batch(step)), case.formulas(step)
    found = []
    for who, its_loss, its_gradient in (
        ("preset", ours.loss, ours.gradient.numpy()),
        ("formula", theirs.loss, theirs.gradient),
    ):
        place = f"reference case {'.'.join(case.section)}: the {who} {case.preset}"
        if not share_of_tolerance(its_loss, loss) <= 1:
            found.append(f"{place} has loss {its_loss!r}, which should be {loss!r}")
        if gradient is not None and not np.allclose(its_gradient, gradient, rtol=0, atol=ATOL):
            found.append(f"{place} has a gradient that is off by {np.abs(its_gradient - gradient).max():g}")
    return found
