"""Self-imitation on a tiny model: when it is due, what it does to the weights, and what it calls it."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.critic import head_for
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.rollouts.collate import collate
from gnomon.rollouts.self_imitation_buffer import SelfImitationReplay
from gnomon.training.self_imitation import NoImitation, SelfImitationUpdates

SHAPE = TinyConfig(width=16, heads=2, kv_heads=1)


def build(learning_rate: float = 0.01, critic: CriticConfig | None = None, **plan: object) -> SelfImitationUpdates:
    model = tiny_model(0, SHAPE)
    settings = LearnerConfig(optimizer=OptimizerConfig(learning_rate=learning_rate), max_tokens_per_micro_batch=64)
    learner = TorchLearner(model, settings, steps=10, critic=None if critic is None else head_for(model))
    replay = SelfImitationBuffer(**plan)
    return SelfImitationUpdates(replay, SelfImitationReplay(replay, seed=0), learner, 1.0, critic)


def answered(count: int, reward: float = 1.0) -> list[Group]:
    """Return answers to different prompts, sampled by the weights of version 1."""
    groups = []
    for number in range(count):
        prompt, response = (65 + number, 66), (70 + number, 71, 72)
        rollout = Rollout(
            f"t{number}", prompt, response, (True,) * 3, (-5.0,) * 3, (-5.0,) * 3, "", Grade(reward), 1, 1, "stop"
        )
        groups.append(Group(Task(f"t{number}", prompt, ""), (rollout,)))
    return groups


def likelihood(practiced: SelfImitationUpdates, groups: list[Group]) -> float:
    """Return the mean log-probability of the answers' tokens."""
    batch = collate(groups, 1.0)
    scored = asyncio.run(practiced.learner.score(batch, {"proximal"})).proximal
    assert scored is not None
    return float(scored[batch.mask].mean())


def test_it_is_due_every_few_steps():
    """Every third step, two updates each; never before anything was good enough to be kept."""
    practiced = build(every=3, updates=2)
    practiced.observe(answered(4, reward=0.0))
    assert asyncio.run(practiced.update(3)) == []

    practiced.observe(answered(4))
    counts = [len(asyncio.run(practiced.update(done))) for done in range(1, 7)]

    assert counts == [0, 0, 2, 0, 0, 2]


def test_imitated_answers_become_likelier():
    """Twenty updates raise the probability of what was kept, and the first loss is their mean surprise."""
    practiced = build(every=1, updates=20)
    practiced.observe(answered(4))
    before = likelihood(practiced, answered(4))
    updates = asyncio.run(practiced.update(1))

    assert updates[0]["imitation/loss"] == pytest.approx(-before, rel=1e-5)
    assert likelihood(practiced, answered(4)) > before + 1


def test_its_learning_rate_is_a_share_of_the_policys():
    """A ratio of a half is the same as half the rate: the weights agree to the last bit."""
    half, full = build(0.02, every=1, learning_rate_ratio=0.5), build(0.01, every=1)
    for practiced in (half, full):
        practiced.observe(answered(4))
        asyncio.run(practiced.update(1))
    left, right = half.learner.state().tensors, full.learner.state().tensors

    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_what_it_measures_is_not_the_policys():
    """Its loss, gradient and updates have names of their own; only the work is counted with all other work."""
    practiced = build(every=1, rows=3)
    observed = practiced.observe(answered(5))
    (made,) = asyncio.run(practiced.update(4))
    shared = {name for name in made if not name.startswith("imitation/")}

    assert shared == {"tokens/computed", "learner/computed_per_token"}
    assert (made["imitation/rows"], made["imitation/updates"], made["imitation/weight_mean"]) == (3, 1, 1.0)
    assert made["imitation/age_steps_mean"] == 2.0
    assert (observed["imitation/buffer"], observed["imitation/buffer_reward_mean"]) == (5, 1.0)


@pytest.mark.parametrize(("coefficient", "is_taught"), [(0.01, True), (0.0, False)])
def test_surplus_teaches_the_critic_as_well(coefficient: float, is_taught: bool):
    """A head of zeros expects 0 of answers that earned 1: the weight is 1, and then values rise, if they count."""
    critic = CriticConfig(trunk="shared")
    practiced = build(critic=critic, every=1, weigh="surplus", value_coefficient=coefficient)
    practiced.observe(answered(4))
    (made,) = asyncio.run(practiced.update(1))
    batch = collate(answered(4), 1.0)
    values = asyncio.run(practiced.learner.score(batch, {"values"})).values

    assert values is not None
    assert made["imitation/weight_mean"] == 1.0
    assert ("imitation/value_loss" in set(made)) == is_taught
    assert bool((values[batch.mask] > 0).all()) == is_taught


def test_what_was_expected_is_not_imitated():
    """Once the critic expects more than was earned, nothing moves, neither policy nor critic."""
    critic = CriticConfig(trunk="shared")
    practiced = build(critic=critic, every=1, weigh="surplus", above=-2.0)
    practiced.observe(answered(4, reward=-1.0))
    before = practiced.learner.state().tensors
    (made,) = asyncio.run(practiced.update(1))
    after = practiced.learner.state().tensors

    assert made["imitation/updates"] == 0
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_nothing_is_practiced_without_a_plan():
    """No buffer, no update, no metric."""
    nothing = NoImitation()

    assert nothing.observe(answered(2)).values() == {}
    assert asyncio.run(nothing.update(4)) == []


def test_a_resumed_buffer_practices_the_same(make: Callable[[], SelfImitationUpdates]):
    """Draws depend on seed, step and what is kept, so the weights after a resume agree to the last bit."""
    first, second = make(), make()
    first.observe(answered(6))
    second.buffer.restore(first.buffer.state())
    for practiced in (first, second):
        asyncio.run(practiced.update(2))
    left, right = first.learner.state().tensors, second.learner.state().tensors

    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture
def make() -> Callable[[], SelfImitationUpdates]:
    return lambda: build(every=2, rows=2, updates=3)
