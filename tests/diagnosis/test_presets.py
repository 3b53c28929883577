"""Every rule sees what every algorithm measures, or says that it cannot look."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.diagnosis.rows import group, rollout

from gnomon.algorithms import NAMED, Algorithm, LossInputs, TrackerConfig
from gnomon.algorithms.metrics import measure_advantages, measure_values
from gnomon.config.experiment import load
from gnomon.core.tables import to_table
from gnomon.core.types import Batch
from gnomon.diagnosis.doctor import Doctor
from gnomon.diagnosis.rules.policy import ALLOWED, CANARY
from gnomon.diagnosis.text_metrics import measure_answers
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.tracker import DecayRule, ValueTracker
from gnomon.rollouts.metrics import measure_round
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch
from gnomon.testing import make_batch

SAMPLED = [algorithm for algorithm in NAMED.values() if algorithm.samples == "policy"]
ROWS = 16


def prepared(algorithm: Algorithm) -> Batch:
    """Return two groups of eight answers of two tokens, one of each right."""
    level = [[-2.0, -2.5]] * ROWS
    batch = make_batch(
        [1.0, *[0.0] * 7] * 2,
        [[1, 1]] * ROWS,
        [0] * 8 + [1] * 8,
        behavior=level,
        proximal=level,
        reference=level,
        sharpened=level,
        values=[[0.4, 0.6]] * ROWS,
        baseline=[0.5] * ROWS,
        bootstrap=[0.0] * ROWS,
        component_rewards=[[1.0, 0.0], *[[0.0, 0.0]] * 7] * 2,
        components=("a", "b"),
        component_weights=(1.0, 0.5),
    )
    return algorithm.weigh(algorithm.prepare(batch))


def stopped(algorithm: Algorithm, view: LossInputs) -> float:
    """Return the share of pushed tokens that the surrogate stops, by the slope of its loss and nothing else."""
    (slope,) = torch.autograd.grad(algorithm.surrogate(view)[0].sum(), [view.current])
    pushed = view.advantages != 0
    return float((slope == 0)[pushed].double().mean()) if bool(pushed.any()) else 0.0


def answered() -> RolloutBatch:
    """Return a round of answers in a box, with two parts of a reward."""
    both = [{"a": float(n % 2), "b": 0.5 * (n > 1)} for n in range(4)]
    said = [replace(rollout([3, n, 4, 5] * 3, float(n % 2), parts=both[n]), text=rf"\boxed{{{n}}}") for n in range(4)]
    return RolloutBatch(0, (group(*said, name="x"), group(*said, name="y")), (), RolloutTimer())


def a_step(algorithm: Algorithm) -> tuple[dict[str, Any], float]:
    """Return what a step measures in which every ratio moved by two nats where its advantage pushes it, and how many
    tokens' pushes were stopped.
    """
    batch, finished = prepared(algorithm), answered()
    assert batch.advantages is not None
    current = (batch.behavior + 2 * batch.advantages.sign()).requires_grad_()
    entropy = torch.full_like(current, 1.5)
    statistics = algorithm.statistics(current, batch, entropy)
    found = algorithm.loss(current, entropy, batch, statistics, -current).metrics
    view = replace(algorithm.view(current, entropy, batch, statistics), anchor_kl=-current)
    found += measure_advantages(algorithm, batch) + measure_round(finished, 0) + measure_answers(finished.groups)
    if algorithm.critic is not None:
        found += measure_values(batch)
    if isinstance(algorithm.tracker, TrackerConfig):
        found += ValueTracker(TaskIndex(["x", "y"]), DecayRule.constant(0.5)).observe(finished.groups, {})
    # What loop, learner and weight syncs measure for every algorithm alike.
    alike = ("learner/gradient_norm", "learner/refused_steps", "time/step_seconds", CANARY, ALLOWED)
    return {**found.values(), **dict.fromkeys(alike, 1.0)}, stopped(algorithm, view)


def doctor_of(algorithm: Algorithm, row: dict[str, Any], **updates: int) -> Doctor:
    """Return a doctor that has seen forty such steps and an evaluation."""
    table = to_table(load("tiny", [f"algorithm={algorithm.name}"]).experiment)
    table["algorithm"]["updates"] |= updates
    table["rewards"] = [{"name": "a"}, {"name": "b"}]
    doctor = Doctor(table)
    for step in range(1, 41):
        doctor.observe(step, row)
    doctor.observe_evaluation({"step": 40, "scores": {"reward": {"mean": 0.5, "high": 0.6}}, "loss_nats": 1.0})
    return doctor


@pytest.mark.parametrize("algorithm", SAMPLED, ids=lambda a: a.name)
def test_every_rule_sees_every_algorithm_or_says_that_it_cannot(algorithm: Algorithm):
    """A rule lacks a metric where the algorithm has no clip, no critic or no tracker, and nowhere else; where the
    pushes of most tokens are stopped, whatever piece stops them, it is found.
    """
    row, share = a_step(algorithm)
    doctor = doctor_of(algorithm, row, minibatches=4)
    lacking = {
        "clip-fraction": share == 0,
        "critic-explains-nothing": algorithm.critic is None,
        "tracker-starves": not isinstance(algorithm.tracker, TrackerConfig),
    }

    assert doctor.unable().keys() == {name for name, lacks in lacking.items() if lacks}
    found = "clip-fraction" in {finding.rule for finding in doctor.findings}
    assert found if share >= 0.4 else not (found and share == 0)


@pytest.mark.parametrize("algorithm", SAMPLED, ids=lambda a: a.name)
def test_a_clip_is_seen_in_a_steps_only_update_where_it_acts(algorithm: Algorithm):
    """An averaged proximal policy lets ratios leave the band in the first update; nothing is said at ratios of 1."""
    row, share = a_step(algorithm)
    still = {name: 0.0 if "clipped" in name or "out_of_band" in name else value for name, value in row.items()}
    moved, silent = (
        "clip-fraction" in {finding.rule for finding in doctor_of(algorithm, each, minibatches=1, epochs=1).findings}
        for each in (row, still)
    )
    assert moved if share >= 0.4 else not (moved and share == 0)
    assert not silent
