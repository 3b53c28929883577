"""`gnomon dissect --verify`: check every preset against a second implementation."""

import json
import math
import platform
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.algorithms import NAMED, Algorithm, resolve
from gnomon.analysis.dissect.dissect import Dissection, decompose
from gnomon.analysis.dissect.reference import ORACLES, Oracle, ReferenceAnswer, Step
from gnomon.analysis.dissect.reference.advantages import gae, length_adaptive
from gnomon.analysis.dissect.reference.losses import clip, constant_length, geometric_clip, leash
from gnomon.core.errors import ConfigError
from gnomon.core.progress import track
from gnomon.core.types import GIVEN, Batch

# Reference numbers in the package: losses and gradients computed by a third program.

ATOL = 1e-7
"""The file's gradients are finite differences with an error of about 1e-9."""


@dataclass(frozen=True)
class Golden:
    """One reference case of the file, with the preset and the formulas that should give its numbers.

    Attributes:
        preset: Name of the preset.
        section: Keys that lead to the case.
        loss: Key of the loss.
        gradient: Key of the gradient; empty if the case has none.
        changes: Settings that differ from the preset.
        oracle: The same change of the preset's oracle.
        current: Section with the current log-probabilities.
        proximal: Array of the fixture with the proximal log-probabilities.
    """

    preset: str
    section: tuple[str, ...]
    loss: str = "loss"
    gradient: str = "dloss_dlp"
    changes: Mapping[str, Any] = field(default_factory=dict)
    oracle: Callable[[Oracle], Oracle] = lambda oracle: oracle
    current: str = "fixture"
    proximal: str = "old"

    @property
    def spec(self) -> dict[str, Any]:
        """The algorithm as `gnomon.algorithms.resolve` takes it."""
        return {"preset": self.preset, **self.changes}

    @property
    def formulas(self) -> Oracle:
        """The oracle of the changed preset."""
        return self.oracle(ORACLES[self.preset])

    def expected(self) -> tuple[float, Any]:
        """Return loss and gradient [B, T]; None without a gradient."""
        numbers = vectors()
        for name in self.section:
            numbers = numbers[name]
        return float(numbers[self.loss]), np.array(numbers[self.gradient]) if self.gradient else None

    def step(self) -> Step:
        """Return the file's four sequences."""
        # (sequences, positions), computed once by a program that shares no code with the presets or the oracles.
        fixture = vectors()["fixture"]
        mask = np.array(fixture["mask"]) > 0
        return Step(
            rewards=np.array(fixture["rewards"]),
            mask=mask,
            group=np.array(fixture["gid"]),
            graded=np.ones(len(mask), dtype=bool),
            truncated=np.zeros(len(mask), dtype=bool),
            current=np.array(vectors()[self.current]["lp"]),
            behavior=np.array(fixture["old"]),
            proximal=np.array(fixture[self.proximal]),
            reference=np.array(fixture["ref"]),
            values=np.array(fixture["values"]),
        )


def vectors() -> dict[str, Any]:
    """Read the whole file."""
    content: dict[str, Any] = json.loads(
        (files("gnomon.analysis.dissect") / "golden_vectors.json").read_text(encoding="utf-8")
    )
    return content


GOLDENS: tuple[Golden, ...] = (
    Golden("grpo", ("clip_family", "grpo_eps0.2_seqmean")),
    Golden("dapo", ("clip_family", "dapo_0.2_0.28_tokenmean")),
    Golden(
        "dr-grpo",
        ("clip_family", "dr_grpo_horizon6"),
        changes={"aggregate.length": 6},
        oracle=lambda o: replace(o, mean=constant_length(6)),
    ),
    Golden("gspo", ("gspo",), current="gspo"),
    Golden("gspo-token", ("gspo",), current="gspo"),
    Golden(
        "gmpo",
        ("gmpo",),
        loss="loss_eps_log_0p2",
        gradient="dloss_dlp_0p2",
        changes={"surrogate.epsilon": 0.2},
        oracle=lambda o: replace(o, push=geometric_clip(0.2)),
    ),
    Golden("sapo", ("sapo",)),
    Golden("cispo", ("cispo", "absolute_cap_5")),
    Golden("p3o", ("p3o", "rho_kl_variant")),
    Golden(
        "p3o",
        ("p3o",),
        changes={"regularizers.0.estimator": "k3"},
        oracle=lambda o: replace(o, terms=(leash(is_k3=True),)),
    ),
    Golden(
        "p3o-two-anchor",
        ("p4o_mixture_anchor",),
        gradient="",
        changes={"regularizers.0.estimator": "k3"},
        oracle=lambda o: replace(o, terms=(leash(is_mixture=True, is_k3=True),)),
        proximal="prox",
    ),
    Golden(
        "decoupled-ppo",
        ("decoupled_ppo",),
        changes={"surrogate.trust": {"low": 0.1, "high": 0.1}},
        oracle=lambda o: replace(o, push=clip(0.1, 0.1, cap=5.0)),
        proximal="prox",
    ),
    Golden(
        "vapo",
        ("vapo",),
        changes={"advantage.policy_lambda.alpha": 1.0},
        oracle=lambda o: replace(o, credit=gae(length_adaptive(1.0))),
    ),
)


# Seeded random optimizer steps, from plain to extreme.


@dataclass(frozen=True)
class Kind:
    """One kind of batch.

    Attributes:
        shift: Standard deviation of the log-ratios between policies, in nats.
        center: Mean of the log-probabilities, in nats.
        spread: Standard deviation of the log-probabilities, in nats.
        sizes: Fewest and most responses of a group.
        holes: Fraction of masked positions inside responses.
        ungraded: Fraction of responses without a reward.
        rewards: Possible rewards; empty for normally distributed ones.
        width: Most tokens of a response.
        segmented: Fraction of responses that continue in the row after.
        turns: Most answers of a response; with more than one, rewards stand where they were earned.
    """

    name: str
    shift: float = 0.3
    center: float = -2.0
    spread: float = 0.5
    sizes: tuple[int, int] = (2, 5)
    holes: float = 0.0
    ungraded: float = 0.0
    rewards: tuple[float, ...] = ()
    width: int = 8
    segmented: float = 0.0
    turns: int = 1


KINDS = (
    Kind("lengths, real rewards"),
    Kind("masks with holes", holes=0.4),
    Kind("right or wrong, equal groups", rewards=(0.0, 1.0)),
    Kind("groups of one", sizes=(1, 2)),
    Kind("responses without a verdict", ungraded=0.3, rewards=(0.0, 0.5, 1.0)),
    Kind("all rewards equal", rewards=(1.0,)),
    Kind("on policy", shift=0.0, rewards=(-1.0, 1.0)),
    Kind("ratios near one", shift=2e-4),
    Kind("extreme ratios", shift=9.0),
    Kind("huge probabilities", center=-1e-4, spread=1e-5, shift=1e-5),
    Kind("tiny probabilities", center=-90.0, spread=20.0, shift=3.0),
    Kind("long responses", width=70, holes=0.1, rewards=(0.0, 1.0)),
    Kind("everything at once", shift=2.0, sizes=(1, 4), holes=0.3, ungraded=0.2, rewards=(0.0, 0.0, 1.0, 0.3)),
    Kind("responses in several rows", sizes=(2, 6), holes=0.2, segmented=0.5),
    Kind("conversations", width=12, holes=0.3, turns=4, ungraded=0.1),
    Kind("conversations in several rows", sizes=(2, 6), width=12, holes=0.3, turns=4, segmented=0.5),
)
"""The kinds of `draw`, in the order of `verify`."""


def draw(kind: Kind, seed: int) -> Step:
    """Return the step of ``kind`` for ``seed``, the same on every machine with the same numpy.

    Masked positions hold nan and inf, because no computation may read them.
    """
    # The kind is part of the seed, so a new kind at the end changes no earlier batch.
    random = np.random.default_rng([seed, KINDS.index(kind)])
    sizes = random.integers(kind.sizes[0], kind.sizes[1] + 1, size=4)
    group = np.repeat(np.arange(len(sizes)), sizes)
    rows = len(group)
    lengths = random.integers(0, kind.width + 1, size=rows)
    # One row has full width: the longest response of a real batch fills its row.
    lengths[0] = kind.width
    graded = random.random(rows) >= kind.ungraded
    mask = np.arange(kind.width) < lengths[:, None]
    # Holes are tokens that a tool wrote; a response without a verdict is not trained on at all.
    mask &= (random.random(mask.shape) >= kind.holes) & graded[:, None]
    rewards = random.choice(kind.rewards, size=rows) if kind.rewards else random.normal(size=rows)
    rollout = None
    if kind.segmented:
        # A row continues in the next one only within its group, since a rollout belongs to one prompt.
        goes_on = (random.random(rows) < kind.segmented) & (group == np.append(group[1:], -1))
        rollout = np.cumsum(~np.append(False, goes_on[:-1])) - 1
        # All segments of a rollout carry the same reward and verdict.
        rewards, graded = rewards[rollout], graded[rollout]

    def moved(
        anchor: np.ndarray[tuple[int, ...], np.dtype[np.float64]], by: float
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return anchor + by * random.normal(size=mask.shape)

    # Each policy is the one before it, moved: behavior sampled, proximal is the
    # learner at the step's beginning, current is what the loss is computed at.
    behavior = moved(np.full(mask.shape, kind.center), kind.spread)
    proximal = moved(behavior, kind.shift)
    # Half of the responses move as a whole, so that means over a response also leave every bound.
    together = kind.shift * 3 * random.normal(size=(rows, 1)) * (random.random((rows, 1)) < 0.5)
    policies = {"behavior": behavior, "proximal": proximal, "current": moved(proximal, kind.shift) + together}
    policies |= {"reference": moved(behavior, kind.shift), "values": random.normal(size=mask.shape)}
    # A masked position that leaks into a sum makes it nan, which no tolerance forgives.
    nothing = np.array([np.nan, np.inf, -np.inf])
    hidden = {
        name: np.where(mask, matrix, random.choice(nothing, size=mask.shape)) for name, matrix in policies.items()
    }
    # The squares of all other probabilities add up to (1 - p)^2 / e: one of them has more than half of what is left.
    odds = 2 * (proximal - np.log(-np.expm1(np.minimum(proximal, -1e-9)))) + 1
    hidden["sharpened"] = np.where(mask, -np.logaddexp(0.0, -odds), np.nan)
    turn = state = steps = None
    if kind.turns > 1:
        turn = np.sort(random.integers(0, kind.turns, size=mask.shape), 1) + kind.turns * np.arange(rows)[:, None]
        # Few states, so that several answers of a group meet in one and some are alone.
        state = turn * 7919 % 3
        steps = np.where(mask & graded[:, None], np.round(random.normal(size=mask.shape)), 0.0)
        index = np.arange(rows) if rollout is None else rollout
        # The reward of a rollout is the sum of what its answers earned, over all of its rows.
        rewards = np.bincount(index, steps.sum(1), minlength=rows)[index]
    # The second reward is 0 or 1, so that some groups agree in one and differ in the other.
    components = np.stack([rewards, (random.random(rows) < 0.5).astype(np.float64)], 1)
    return Step(
        rewards=np.where(graded, rewards, 0.0),
        mask=mask,
        group=group.astype(np.int64),
        graded=graded,
        truncated=random.random(rows) < 0.3,
        baseline=random.random(rows),
        rollout=rollout,
        components=components if rollout is None else components[rollout],
        component_weights=(1.0, 0.5),
        turn=turn,
        state=state,
        steps=steps,
        **hidden,
    )


def answered(step: Step, algorithm: Algorithm) -> Step:
    """Return the step as the algorithm's dataset would have given its responses; itself where a policy samples all.

    Each two responses are a pair, or one with a label and one that measures the KL; or all are right answers; or the
    first of each group is a demonstration.
    """
    # Pairs are of rollouts and not of rows: both rows of one rollout stay together.
    index = np.arange(len(step.group)) if step.rollout is None else step.rollout
    is_first = index % 2 == 0
    if algorithm.demonstrated:
        return replace(step, given=np.isin(index, index[np.unique(step.group, return_index=True)[1]]))
    if algorithm.samples == "pairs":
        return replace(step, group=index // 2)
    if algorithm.samples == "labels":
        labels = np.where(step.rewards > 0, 1.0, -1.0) * is_first
        return replace(step, rewards=labels, graded=is_first, group=index // 2, steps=None)
    if algorithm.samples == "data":
        return replace(step, rewards=step.graded.astype(np.float64), steps=None)
    return step


_NAMES = {
    "rewards": "rewards", "mask": "mask", "group": "group", "graded": "is_graded", "truncated": "is_truncated",
    "behavior": "behavior", "proximal": "proximal", "sharpened": "sharpened", "reference": "reference",
    "values": "values",
    "baseline": "baseline", "components": "component_rewards", "turn": "turn", "state": "state",
    "steps": "step_rewards", "rollout": "rollout_id",
}  # fmt: skip
"""Fields of a batch by the names of those of a step."""


def to_batch(step: Step) -> tuple[Batch, Tensor]:
    """Return the step as a batch in float64, and the current log-probabilities."""
    rows, width = step.mask.shape
    arrays = {theirs: getattr(step, ours) for ours, theirs in _NAMES.items()}
    there: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
    # Prompts have no tokens here: losses read log-probabilities of responses alone.
    nothing = torch.zeros(rows, dtype=torch.long)
    batch = Batch(
        tokens=torch.zeros(rows, width, dtype=torch.long),
        prompt_lengths=nothing,
        lengths=torch.full((rows,), width),
        version=nothing if step.given is None else torch.where(torch.from_numpy(step.given), GIVEN, 0),
        full_behavior=there["behavior"],
        components=() if step.components is None else tuple(map(str, range(step.components.shape[1]))),
        component_weights=step.component_weights,
        **there,
    )
    return batch, torch.from_numpy(step.current)


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
class PresetVerdict:
    """The check of one preset: batches, compared numbers, and the largest |difference| / tolerance."""

    batches: int
    numbers: int
    largest: float
    difference: ArrayDifference | None


@dataclass(frozen=True)
class VerifyReport:
    """Verdicts by preset, the number of reference cases, and a sentence for each wrong case."""

    presets: Mapping[str, PresetVerdict]
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
    # A preset without formulas would otherwise count as verified.
    missing = [a.name for a in algorithms.values() if a.name not in ORACLES]
    if missing:
        raise ConfigError(
            f"no formulas are written for {', '.join(missing)}, so there is nothing to hold it against; there are for "
            f"{', '.join(ORACLES)}"
        )
    cases = [case for case in GOLDENS if case.preset in algorithms]
    each = track(algorithms.items(), "verifying", len(algorithms))
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
        # Both say that there is no critic. If only one does, the comparison below turns None into nan and reports it.
        if left is None and right is None:
            continue
        # Each number for itself: a mean over the matrix would hide one wrong token.
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
    # An infinity is never equal to the other side's: sound formulas of finite inputs have none.
    finite = np.isfinite(left) & np.isfinite(right)
    return np.where(finite, np.abs(left - right) / np.where(finite, allowed, 1.0), np.inf)


def _verify(name: str, algorithm: Algorithm, batches: int) -> PresetVerdict:
    numbers, largest, first = 0, 0.0, None
    for kind in KINDS:
        for seed in range(batches):
            step = answered(draw(kind, seed), algorithm)
            answer = ORACLES[algorithm.name](step)
            count, share, wrong = compare(decompose(algorithm, *to_batch(step)), answer)
            numbers, largest = numbers + count, max(largest, share)
            # The first disagreement is reported with its place; the others usually follow from it.
            if wrong and first is None:
                quantity, place, (ours, theirs) = wrong[0]
                first = ArrayDifference(name, kind.name, seed, quantity, place, ours, theirs)
    return PresetVerdict(len(KINDS) * batches, numbers, largest, first)


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
        # Written with "not", so that a share that is nan is wrong as well.
        if not share_of_tolerance(its_loss, loss) <= 1:
            found.append(f"{place} has loss {its_loss!r}, which should be {loss!r}")
        if gradient is not None and not np.allclose(its_gradient, gradient, rtol=0, atol=ATOL):
            found.append(f"{place} has a gradient that is off by {np.abs(its_gradient - gradient).max():g}")
    return found
