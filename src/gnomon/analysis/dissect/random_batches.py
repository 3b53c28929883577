"""Seeded random optimizer steps, from plain to extreme."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.algorithms import Algorithm
from gnomon.analysis.dissect.reference import Step
from gnomon.core.types import GIVEN, Batch


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
    random = np.random.default_rng([seed, KINDS.index(kind)])
    sizes = random.integers(kind.sizes[0], kind.sizes[1] + 1, size=4)
    group = np.repeat(np.arange(len(sizes)), sizes)
    rows = len(group)
    lengths = random.integers(0, kind.width + 1, size=rows)
    lengths[0] = kind.width
    graded = random.random(rows) >= kind.ungraded
    mask = np.arange(kind.width) < lengths[:, None]
    mask &= (random.random(mask.shape) >= kind.holes) & graded[:, None]
    rewards = random.choice(kind.rewards, size=rows) if kind.rewards else random.normal(size=rows)
    rollout = None
    if kind.segmented:
        goes_on = (random.random(rows) < kind.segmented) & (group == np.append(group[1:], -1))
        rollout = np.cumsum(~np.append(False, goes_on[:-1])) - 1
        rewards, graded = rewards[rollout], graded[rollout]

    def moved(
        anchor: np.ndarray[tuple[int, ...], np.dtype[np.float64]], by: float
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return anchor + by * random.normal(size=mask.shape)

    behavior = moved(np.full(mask.shape, kind.center), kind.spread)
    proximal = moved(behavior, kind.shift)
    # Half of the responses move as a whole, so that means over a response also leave every bound.
    together = kind.shift * 3 * random.normal(size=(rows, 1)) * (random.random((rows, 1)) < 0.5)
    policies = {"behavior": behavior, "proximal": proximal, "current": moved(proximal, kind.shift) + together}
    policies |= {"reference": moved(behavior, kind.shift), "values": random.normal(size=mask.shape)}
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
        state = turn * 7919 % 3
        steps = np.where(mask & graded[:, None], np.round(random.normal(size=mask.shape)), 0.0)
        index = np.arange(rows) if rollout is None else rollout
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
