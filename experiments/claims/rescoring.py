"""Recorded answers, scored again by the weights of a run's checkpoints: what a ratio is made of.

Answers that a step was trained on would look more alike than they are to the weights that come out of it, so those of
the *next* step are scored, by the weights that the step began with and by the ones that it ended with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from experiments.claims.estimates import NotMeasured
from experiments.claims.exact_rates import counted, spelled
from torch import Tensor, nn

from gnomon.config.experiment import load
from gnomon.core.types import Rollout, Task
from gnomon.models.load import load_model, load_tokenizer
from gnomon.models.logprobs import TokenScorer, TokenScores
from gnomon.models.routing import Routing
from gnomon.records.reading import RunRecord
from gnomon.training.build_data import questions


@dataclass(frozen=True)
class Answers:
    """Recorded answers as tensors.

    tokens Int[B S]; prompt_lengths Int[B]; mask Bool[B T]; rewards Float[B]; group Int[B]; version Int[B], of the
    weights that sampled the last token.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor
    version: Tensor

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], groups: Sequence[int]) -> "Answers":
        """Return the answers that could be graded."""
        chosen = [(r, g) for r, g in zip(rollouts, groups, strict=True) if r.grade.reward is not None]
        rows = [[*r.prompt, *r.response] for r, _ in chosen]
        width, longest = max(len(r.response) for r, _ in chosen), max(map(len, rows))
        return cls(
            tokens=torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]),
            prompt_lengths=torch.tensor([len(r.prompt) for r, _ in chosen]),
            mask=torch.tensor([[*r.mask, *[False] * (width - len(r.mask))] for r, _ in chosen]),
            rewards=torch.tensor([r.grade.reward or 0.0 for r, _ in chosen], dtype=torch.float64),
            group=torch.tensor([g for _, g in chosen]),
            version=torch.tensor([r.newest_version for r, _ in chosen]),
        )

    @classmethod
    def recorded(cls, record: RunRecord, step: int) -> "Answers":
        """Return the answers of a step. Raises: NotMeasured where the run has none of it."""
        found = record.rollouts(step)
        if not found:
            raise NotMeasured(f"{record.path.name} has no answers of step {step}")
        return cls.of([r.rollout for r in found], [r.group for r in found])

    def row(self, index: int) -> "Answers":
        """Return one of them."""
        kept = slice(index, index + 1)
        return Answers(*(getattr(self, f.name)[kept] for f in fields(self)))

    def scored(self, scorer: TokenScorer, routing: Routing | None = None) -> TokenScores:
        """Return what a model says of them, at temperature 1."""
        return scorer(self.tokens, self.prompt_lengths, self.mask, 1.0, False, routing)


def weights_after(record: RunRecord, step: int) -> nn.Module:
    """Return the model that a run had after ``step`` steps. Raises: NotMeasured where that was not kept."""
    if step and step not in record.checkpoint_steps():
        raise NotMeasured(f"{record.path.name} has no checkpoint of step {step}")
    name = str(record.files.checkpoints / f"step-{step}") if step else record.experiment()["model"]
    return load_model(name, torch.float32)


@dataclass(frozen=True)
class Shares:
    """How much of the variance of log-ratios is the routers': of single tokens, and of means over a response.

    moved: standard deviation of a token's log-ratio with free routers, in nats: how far the step really went. A step
    that changed nothing moved by 0, and both shares of it are nan.
    """

    tokens: float
    responses: float
    moved: float


@lru_cache(maxsize=64)
def routers_share(run: Path, step: int) -> Shares:
    """Return what the variance of log-ratios over training step number ``step`` loses when its routing is replayed.

    1 - Var(replayed) / Var(free), on the answers of the step after it. Raises: NotMeasured for a run that lacks them or
    the weights before and after, or whose model has no experts.
    """
    record = RunRecord(run)
    answers = Answers.recorded(record, step + 1)
    with torch.no_grad():
        before = answers.scored(TokenScorer(weights_after(record, step - 1)), Routing())
        if before.experts is None:
            raise NotMeasured("a dense model has no routers")
        later = TokenScorer(weights_after(record, step))
        free = answers.scored(later, Routing()).logprobs - before.logprobs
        held = answers.scored(later, Routing(before.experts)).logprobs - before.logprobs
    if not bool(free.any()):
        return Shares(math.nan, math.nan, 0.0)
    counts = answers.mask.sum(1)
    means: Any = [(change.double() * answers.mask).sum(1) / counts for change in (held, free)]
    spread = [float(change[answers.mask].double().var()) for change in (held, free)]
    return Shares(1 - spread[0] / spread[1], 1 - float(means[0].var() / means[1].var()), spread[1] ** 0.5)


@lru_cache(maxsize=64)
def won_back(run: Path, step: int) -> float:
    """Return how much more often the weights after ``step`` are right with the experts of the weights before it.

    The exact mean rate on the questions that are trained on, with the earlier weights' choices replayed, less that with
    free routers. Above 0: the update was made for choices that it changed itself. Raises: NotMeasured as
    `weights_after` does, and for a dense model.
    """
    record = RunRecord(run)
    experiment = load(record.files.experiment).experiment
    train = questions(experiment).split.train
    tasks: list[Task] = [train[index] for index in range(len(train))]
    tokenizer = load_tokenizer(experiment.model)
    rows = spelled(tasks, [counted(task, tokenizer) for task in tasks])
    temperature = experiment.sampling.temperature
    with torch.no_grad():
        chosen = TokenScorer(weights_after(record, step - 1))(*rows, temperature, False, Routing()).experts
        if chosen is None:
            raise NotMeasured("a dense model has no routers")
        later = TokenScorer(weights_after(record, step))
        held, free = (
            later(*rows, temperature, False, routing).logprobs.sum(1).exp() for routing in (Routing(chosen), None)
        )
    return float((held - free).mean())
