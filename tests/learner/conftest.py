"""A tiny model, a batch that it could have answered, and a learner around them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from gnomon.algorithms import Algorithm
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.tiny import TinyConfig, tiny_model

# Programs of their own, which `test_device.py` runs.
collect_ignore = ["on_second_device.py", "second_device.py"]
SHAPE = TinyConfig(width=16, heads=2, kv_heads=1)
# Adam's first step with epsilon 1 is g / (|g| + 1): the new weights tell the gradient, entry for entry.
REVEALING = OptimizerConfig(learning_rate=1.0, epsilon=1.0, max_gradient_norm=float("inf"))


def build_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model(seed, SHAPE, dtype)


def build_learner(model: nn.Module | None = None, **plan: object) -> TorchLearner:
    settings = LearnerConfig(optimizer=REVEALING, max_tokens_per_micro_batch=40)
    return TorchLearner(model or build_model(), replace(settings, **plan), steps=10)


def build_batch(seed: int = 0, groups: int = 3, size: int = 2) -> Batch:
    """Groups of answers of 1 to 7 tokens; the last group's rewards are equal; some tokens are masked."""
    generator = torch.Generator().manual_seed(seed)
    count = groups * size

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts = draw(2, 6, groups).repeat_interleave(size)
    answers = draw(1, 8, count)
    width = int(answers.max())
    mask = torch.arange(width) < answers[:, None]
    mask[0, 0] = answers[0] == 1
    rewards = torch.tensor([1.0, 0.0] * count)[:count].double()
    rewards[-size:] = 1.0
    # Near what an untrained model gives 259 tokens, so that some ratios are clipped and some are not.
    behavior = torch.randn(count, width, generator=generator) * 0.5 - 5.6
    tokens = draw(0, 256, count, int((prompts + answers).max()))
    return Batch(
        tokens=torch.where(torch.arange(tokens.shape[1]) < (prompts + answers)[:, None], tokens, 0),
        prompt_lengths=prompts,
        lengths=prompts + answers,
        mask=mask,
        rewards=rewards,
        is_graded=torch.ones(count, dtype=torch.bool),
        is_truncated=torch.zeros(count, dtype=torch.bool),
        group=torch.arange(groups).repeat_interleave(size),
        version=torch.zeros(count, dtype=torch.long),
        behavior=torch.where(mask, behavior, 0.0),
        full_behavior=torch.where(mask, behavior, 0.0),
        temperature=0.9,
        baseline=torch.full((count,), 0.4, dtype=torch.float64),
        proximal=torch.where(mask, behavior + 0.2, 0.0),
        reference=torch.where(mask, behavior - 0.1, 0.0),
        sharpened=torch.where(mask, behavior + 0.1, 0.0),
        component_rewards=rewards[:, None],
        components=("answer",),
        component_weights=(1.0,),
    )


def build_minibatch(algorithm: Algorithm, seed: int = 0) -> Batch:
    """The whole batch, prepared and weighed, as one optimizer step."""
    return algorithm.weigh(algorithm.prepare(build_batch(seed)))


@pytest.fixture(scope="session")
def make_model() -> Callable[..., nn.Module]:
    return build_model


@pytest.fixture(scope="session")
def make_learner() -> Callable[..., TorchLearner]:
    return build_learner


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return build_batch


@pytest.fixture(scope="session")
def make_minibatch() -> Callable[..., Batch]:
    return build_minibatch
