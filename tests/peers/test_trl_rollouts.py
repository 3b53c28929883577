"""TRL 1.16.0: advantages, penalties and masks, made by the real trainers from given responses and rewards."""

import math
from dataclasses import replace

import pytest
import torch

from gnomon.algorithms import (
    GRPO,
    RLOO,
    Clip,
    ClippedSurrogate,
    GroupRelative,
    LeaveOneOut,
    Normalized,
    PerReward,
    Ratio,
    SequenceMean,
)
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import LengthPenalty
from gnomon.rollouts.curriculum.tracker import optimal_value


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(trl, problem, same, scale):
    """TRL's advantages are ours with an epsilon of 1e-4; the preset's is 1e-6, and that is all the difference."""
    ours = GroupRelative(scale=scale, epsilon=1e-4)(problem.batch)[0][:, 0]

    same(ours, trl(scale_rewards=scale).scored(problem)["advantages"])


def test_gdpo(trl, problem, same):
    """Each reward in its group's scale, weighed, added up and in the batch's scale: TRL's epsilons are 1e-4."""
    both = torch.stack([problem.batch.rewards, (problem.batch.rewards * 37).sin()], 1)
    named = {"component_rewards": both, "components": ("a", "b"), "component_weights": (1.0, 0.5)}
    silent = [lambda completions, **_: [0.0] * len(completions)] * 2
    peer = trl(reward=silent, multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5])
    theirs = peer.scored(problem, rewards=both)["advantages"]
    piece = Normalized(PerReward(GroupRelative(epsilon=1e-4)), over="batch", epsilon=1e-4)

    same(piece(problem.batch.with_fields(**named))[0][:, 0], theirs, 1e-6)


def test_ungraded_responses(trl, problem, same):
    """A response that no reward could judge is left out of mean and deviation and has advantage 0, in both."""
    graded = problem.batch.is_graded.clone()
    graded[[5, 9, 10, 11]] = False
    holed = problem.with_batch(is_graded=graded)
    theirs = trl(loss_type="grpo").scored(holed)["advantages"]

    same(GroupRelative(epsilon=1e-4)(holed.batch)[0][:, 0], theirs)
    assert theirs[[5, 8, 9, 10, 11]].tolist() == [0] * 5


def test_ungraded_tokens(trl, problem, same):
    """TRL counts the tokens of ungraded responses in the denominator; our batches mask them out."""
    graded = torch.ones(16, dtype=torch.bool)
    graded[5] = False
    advantages = torch.where(graded[:, None], problem.batch.advantages, 0.0)
    theirs = problem.with_batch(advantages=advantages)
    ours = theirs.with_batch(is_graded=graded, mask=problem.batch.mask & graded[:, None])
    loss, gradient = ours.ours(GRPO)

    same((loss * 15 / 16, gradient * 15 / 16), trl(loss_type="grpo").loss(theirs))


def test_truncated_responses(trl, problem, same):
    """Masked truncated responses leave the loss and stay in their group's statistics, in both."""
    cut = problem.with_batch(is_truncated=torch.ones(16, dtype=torch.bool))
    made = trl(mask_truncated_completions=True).scored(cut)
    prepared = replace(GRPO, mask_truncated=True, advantage=GroupRelative(epsilon=1e-4)).prepare(cut.batch)

    assert int(made["completion_mask"].sum()) == int(prepared.mask.sum()) == 0
    same(made["advantages"], GroupRelative(epsilon=1e-4)(cut.batch)[0][:, 0])


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_leave_one_out(trl, drawn, same, beta):
    """TRL's RLOO advantages are ours, the distance to the reference summed into the reward."""
    problem = drawn(1, holes=False)
    peer = trl("trl.RLOOTrainer", beta=beta, normalize_advantages=False)

    same(LeaveOneOut(kl=beta)(problem.batch)[0][:, 0], peer.scored(problem)["advantages"])


def test_rloo(trl, drawn, compose, same):
    """TRL's RLOO loss clips the product of a response's ratios; our preset clips tokens, this composition is TRL's."""
    problem = drawn(2, holes=False)
    peer = trl("trl.RLOOTrainer", epsilon=0.2)
    algorithm = compose(
        ratio=Ratio(level="sequence_product"), surrogate=ClippedSurrogate(Clip(0.2, 0.2)), aggregate=SequenceMean()
    )
    old = torch.where(problem.batch.mask, problem.batch.proximal, 0.0).sum(1)
    theirs = peer.loss(problem, old_logps=old, completion_mask=problem.batch.mask.long())

    same(problem.ours(algorithm), theirs)
    assert abs(problem.ours(RLOO)[0] - theirs[0]) > 1e-4


def test_rloo_far_away(trl, drawn, compose):
    """TRL does not bound the product: 12 tokens at +4 give e^48, which we bound to e^20."""
    problem = drawn(3, holes=False)
    far = problem.with_batch(proximal=problem.current - 4)
    algorithm = compose(ratio=Ratio(level="sequence_product"), surrogate=ClippedSurrogate(Clip(0.2, 0.2)))
    old = torch.where(far.batch.mask, far.batch.proximal, 0.0).sum(1)
    theirs, _ = trl("trl.RLOOTrainer").loss(far, old_logps=old, completion_mask=far.batch.mask.long())

    assert far.ours(algorithm)[0] < math.e**20 < theirs


@pytest.mark.parametrize("length", [50, 80, 81, 90, 100, 120])
def test_overlong_penalty(length):
    """DAPO's soft punishment is TRL's, capped beyond the budget."""
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)([[0] * length])

    assert LengthPenalty(20, 1.0, 100)(Sample("", "", completion_tokens=length)) == pytest.approx(theirs[0])


def test_optimal_values(trl):
    """A*-PO's first stage, sampled by TRL's trainer from a real model, gives our V* of the rewards that it saw."""
    torch.manual_seed(0)
    seen: dict[str, list[float]] = {}

    def reward(prompts, completions, **_):
        drawn = torch.randint(0, 2, (len(prompts),)).tolist()
        for prompt, value in zip(prompts, drawn, strict=True):
            seen.setdefault(prompt, []).append(float(value))
        return drawn

    peer = trl("trl.experimental.a2po.A2POTrainer", reward=reward, beta1=0.5, num_value_samples=4)
    peer.trainer._estimate_optimal_values()
    theirs = peer.trainer._optimal_values

    assert len(theirs) > 8
    assert {len(rewards) for rewards in seen.values()} == {4}
    assert {p: optimal_value(seen[p], 0.5) for p in theirs} == pytest.approx(theirs, rel=1e-6)
