"""One update on the same rollouts: whole, with dead rows, and with a long prompt shared or not; and the learner's half
of a step of other algorithms, and of long answers and prompts.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.materials import BenchShape, Trainer, experiment_of, make_batch
from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import peak_gib, repeat
from gnomon.algorithms import PPO, SPO, VAPO, Algorithm
from gnomon.algorithms.composition import minibatch_rows
from gnomon.core.types import Batch
from gnomon.learner.allocator import tune_machine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.precision import dtype_of
from gnomon.models.critic import POLICY, load_critic
from gnomon.models.decoder import vocabulary_size
from gnomon.models.load import load_model
from gnomon.models.prefix import number_prompts


def shapes(size: Size) -> dict[str, BenchShape]:
    """Return the work of each measure.

    "half dead" is "full" with equal rewards in half of the groups. "long prompt" is one group with a long prompt;
    "long prompt, not shared" the same tokens as rows of their own, each with a prompt that no other row has.
    """
    full = BenchShape((size.prompt,) * size.prompts, size.generations, size.answer, size.budget)
    long = BenchShape((size.shared_prompt,), size.generations, size.answer, size.budget)
    return {
        "full": full,
        "half dead": replace(full, degenerate=size.prompts // 2),
        "long prompt": long,
        "long prompt, not shared": replace(long, is_shared=False),
    }


def update(size: Size, repeats: int) -> BenchResult:
    """Return the seconds of one optimizer step of the fixed work's model and algorithm on made-up rollouts."""
    trainer, vocabulary = trainer_of(size)
    measures, works = [], {}
    for name, shape in shapes(size).items():
        batch = trainer.on_policy(make_batch(shape, vocabulary))
        measures.append(BenchMeasure(name, "s", repeat(partial(trainer.step, batch), repeats)))
        works[name] = [shape.work("update")]
    measures.append(BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("update", "gnomon", tuple(measures), {"precision": trainer.precision, "works": works})


def learning(size: Size, repeats: int) -> BenchResult:
    """Return the seconds of everything that a step learns from: scoring, updates, the critic, and SPO's tracking.

    As many rows as the fixed work has, of prompts that begin alike: SPO and PPO with an answer a prompt, VAPO with 16.
    "long answers" are two prompts with eight answers each, all of the longest length, "long prompts" two with eight
    short answers, both under GRPO.

    The limit is that of the passes that the algorithm is made of: each row once to score it, and once for each update;
    no row of a first update, which has the weights that scored it; a prompt's previous answer beside its new one, after
    SPO's updates.
    """
    measures, works, precision = [], {}, "fp32"
    for name, (algorithm, shape) in learning_work(size).items():
        trainer, vocabulary = trainer_of(size, algorithm)
        precision = trainer.precision
        batch = learned_from(trainer, shape, vocabulary)
        measures.append(BenchMeasure(name, "s", repeat(partial(_learn, trainer, batch), repeats)))
        works[name] = list(_passes(trainer.algorithm, batch, size.beginning))
        trainer.learner.close()
    return BenchResult("learning", "gnomon", tuple(measures), {"precision": precision, "works": works})


def learning_work(size: Size) -> dict[str, tuple[Algorithm | None, BenchShape]]:
    """Return the algorithm, None for GRPO, and the rows of each measure of `learning`."""
    rows, long = size.prompts * size.generations, (size.long_answer, size.long_answer)
    short = (size.answer, size.budget)

    def made(prompt: int, prompts: int, generations: int, lengths: tuple[int, int] = short) -> BenchShape:
        return BenchShape((prompt,) * prompts, generations, *lengths, beginning=size.beginning)

    several = min(16, rows)
    return {
        "spo": (SPO, made(size.prompt, rows, 1)),
        "ppo": (PPO, made(size.prompt, rows, 1)),
        "vapo": (VAPO, made(size.prompt, rows // several, several)),
        "long answers": (None, made(size.prompt, 2, 8, long)),
        "long prompts": (None, made(size.long_prompt, 2, 8)),
    }


def learned_from(trainer: Trainer, shape: BenchShape, vocabulary: int) -> Batch:
    """Return rows of rewards 1 and -1: a critic says 0 at first, and none may be right about a row."""
    batch = make_batch(shape, vocabulary)
    return trainer.on_policy(batch.with_fields(rewards=2 * batch.rewards - 1))


def _learn(trainer: Trainer, batch: Batch) -> None:
    trainer.step(batch)
    if trainer.algorithm.tracker is not None:
        asyncio.run(trainer.learner.score(_visited_again(batch), {"proximal"}))


def _visited_again(batch: Batch) -> Batch:
    """Return what a tracker scores after a step: each prompt's previous answer and its new one, of one length here."""
    return batch.rows(torch.arange(len(batch)).repeat(2))


def _passes(algorithm: Algorithm, batch: Batch, beginning: int) -> Iterator[dict[str, Any]]:
    """Yield the parts of a step's work; what scores a first minibatch is a part of its update."""

    def part(name: str, rows: Tensor) -> dict[str, Any]:
        chosen = batch.rows(rows)
        lengths = (chosen.lengths - chosen.prompt_lengths).tolist()
        numbers, _ = number_prompts(chosen.tokens, chosen.prompt_lengths)
        prompts = list(dict(zip(numbers, chosen.prompt_lengths.tolist(), strict=True)).values())
        return {"part": name, "prompts": prompts, "lengths": lengths, "beginning": beginning}

    kinds = [("proximal", "score", "update", algorithm.updates)]
    if algorithm.critic is not None:
        kinds.append(("values", "value", "fit", algorithm.critic.updates))
    for need, scores, learns, updates in kinds:
        minibatches = minibatch_rows(batch, updates, 0)
        if need in algorithm.needs and len(minibatches) > 1:
            yield part(scores, torch.cat(minibatches[1 : updates.minibatches]))
        yield from (part(learns, rows) for rows in minibatches)
    if algorithm.tracker is not None:
        both = part("score", torch.arange(len(batch)))
        yield {**both, "lengths": 2 * both["lengths"]}


def trainer_of(size: Size, algorithm: Algorithm | None = None) -> tuple[Trainer, int]:
    """Return the fixed work's model under a learner of its own, and the width of the logits.

    algorithm: Instead of the fixed work's; its critic begins as the policy.
    """
    tune_machine()
    experiment = experiment_of(size)
    precision = experiment.learner.precision
    assert precision != "auto", "it was resolved"
    dtype = dtype_of(precision)
    model, algorithm = load_model(experiment.model, dtype), algorithm or experiment.algorithm
    critic = None if algorithm.critic is None else load_critic(experiment.model, POLICY, dtype)
    learner = TorchLearner(model, experiment.learner, 1, critic=critic)
    return Trainer(learner, algorithm, precision), vocabulary_size(model)
