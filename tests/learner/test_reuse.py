"""A step computes nothing twice with the same weights: the first update goes on from the pass that scored its rows."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.learner.test_critic import build_critic

from gnomon.algorithms import PPO, SPO, VAPO
from gnomon.algorithms.composition import minibatch_rows
from gnomon.algorithms.sections import Updates
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.prefix import common_beginning

ROOMY = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_micro_batch=1000)
FOUR = Updates(minibatches=4)
ALGORITHMS = {
    "spo": SPO,
    "ppo": PPO,
    "vapo": replace(VAPO, updates=FOUR, critic=replace(VAPO.critic, updates=FOUR)),
}


def beginning_alike(batch: Batch) -> Batch:
    """The batch with one first token in all prompts."""
    return batch.with_fields(tokens=batch.tokens.index_fill(1, torch.tensor([0]), 7))


def needed(batch: Batch, rows: torch.Tensor, reads_end: bool) -> int:
    """Return the tokens that scoring ``rows`` takes: what all prompts begin with, each prompt, and each answer up to
    the state before its last trained token, or that after its last one.
    """
    prompts: dict[tuple[int, ...], int] = {}
    answers = 0
    for row in rows.tolist():
        length = int(batch.prompt_lengths[row])
        prompts[tuple(batch.tokens[row, :length].tolist())] = length
        last = int(batch.mask[row].nonzero().max())
        answers += int(batch.lengths[row]) - length if reads_end else last
    stem = common_beginning(prompts)
    return stem + sum(length - stem for length in prompts.values()) + answers


def walk(learner: TorchLearner, algorithm: Any, batch: Batch, is_told: bool) -> int:
    """Make one step; returns the tokens that it computed."""

    async def step() -> int:
        first = algorithm.first_rows(batch, 1, 2) if is_told else None
        scored = algorithm.prepare((await learner.score(batch, algorithm.needs, first)).into(batch))
        made = [await learner.update(minibatch, algorithm, 0) for minibatch in algorithm.minibatches(scored, 1)]
        made += [await learner.fit(minibatch, algorithm, 0) for minibatch in algorithm.value_minibatches(scored, 2)]
        return int(sum(each["tokens/computed"] for each in made))

    return asyncio.run(step())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_makes_no_forward_pass_that_another_has_made(name, make_model, make_batch):
    """Every row once to score it, and once for each update but the first, of the policy and of the critic: exactly, by
    counts of tokens; weights are to 1e-6 those of a step that computes the first minibatch again.
    """
    algorithm, batch = ALGORITHMS[name], beginning_alike(make_batch(3, groups=16, size=1)).with_fields(proximal=None)
    learners = [
        TorchLearner(make_model(), ROOMY, 10, critic=build_critic(make_model(4)) if algorithm.critic else None)
        for _ in range(2)
    ]
    computed, again = (
        walk(learner, algorithm, batch, told) for learner, told in zip(learners, (True, False), strict=True)
    )
    if not learners[0]._scorer.shares_beginnings():
        pytest.skip("the kernels were not compiled")

    least, first = 0, algorithm.first_rows(batch, 1, 2)
    for what, updates, seed in (
        ("proximal", algorithm.updates, 1),
        ("values", getattr(algorithm.critic, "updates", None), 2),
    ):
        if updates is None:
            continue
        minibatches = minibatch_rows(batch, updates, seed)
        rest = torch.ones(len(batch), dtype=torch.bool).index_fill(0, first[what], False).nonzero()[:, 0]
        least += sum(needed(batch, rows, what == "values") for rows in [rest, *minibatches])
    assert computed == least < again
    for own, other in zip(*(learner._model.parameters() for learner in learners), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-6)
    assert learners[0]._begun is None


@pytest.mark.parametrize("change", ["another minibatch", "restored", "other weights", "masked"])
def test_what_was_computed_with_other_weights_or_rows_is_not_used(change, make_model, make_batch):
    """The update then computes its rows itself: its weights are bit for bit those of a learner that kept nothing."""
    batch = make_batch(3, groups=8).with_fields(proximal=None)
    found = []
    for first in (SPO.first_rows(batch, 1, 2), None):
        learner = TorchLearner(make_model(), ROOMY, 10)
        state = learner.state()
        scored = SPO.prepare(asyncio.run(learner.score(batch, SPO.needs, first)).into(batch))
        cuts = SPO.minibatches(scored, 1)
        if change == "another minibatch":
            cuts = cuts[1:]
        elif change == "restored":
            learner.restore(state)
        elif change == "other weights":
            cuts = [cuts[1], cuts[0]]
        else:
            mask = cuts[0].mask.clone()
            mask[int(mask.any(1).nonzero()[0]), 0] = False
            cuts[0] = SPO.weigh(cuts[0].with_fields(mask=mask))
        for cut in cuts[:2]:
            # The same numbers for both: scoring in one pass or two rounds differently.
            asyncio.run(learner.update(cut.with_fields(proximal=torch.zeros_like(cut.behavior) - 5.5), SPO, 0))
        found.append(list(learner._model.parameters()))
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other)
