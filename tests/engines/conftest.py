"""What the engine tests share: small models of several architectures, and how any of them is scored plainly."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core.types import Completion
from gnomon.engines.base import Engine, Sampling

Asks = Sequence[tuple[Sequence[int], Sequence[int], Sampling]]


def plain_logits(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return the logits Float[T V] of each completion token from one forward pass over the whole sequence."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *completion]])
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float()


@pytest.fixture
def score() -> Callable[[nn.Module, Sequence[int], Completion, float], Tensor]:
    """Return a function: the tempered log-probabilities of a completion, teacher-forced."""

    def teacher_forced(model: nn.Module, prompt: Sequence[int], done: Completion, temperature: float) -> Tensor:
        logits = plain_logits(model, prompt, done.tokens) / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]

    return teacher_forced


@pytest.fixture
def ask() -> Callable[[Engine, Asks], list[list[Completion]]]:
    """Return a function that makes all calls in one turn of an event loop and closes the engine."""

    async def together(engine: Engine, asks: Asks) -> list[list[Completion]]:
        answers = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return answers

    return lambda engine, asks: asyncio.run(together(engine, asks))
