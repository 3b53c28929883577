"""Answers of one length: the local engine beside the generation that comes with the model."""

import asyncio
from typing import Any

import torch

from benchmarks.harness.materials import experiment_of
from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import peak_gib, repeat
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.learner.allocator import tune_machine
from gnomon.learner.precision import Precision, dtype_of
from gnomon.models.load import load_model
from gnomon.models.prefix import common_beginning
from gnomon.training.build_data import questions


def decode(size: Size, repeats: int) -> BenchResult:
    """Return tokens a second of the local engine: every answer runs to the whole budget, log-probabilities included.

    Before each repeat the engine is told of new weights, so no prompt's keys and values are carried over, as after an
    update.
    """
    tune_machine()
    model, prompts, precision = asked(size)
    engine = LocalEngine(model, size.prompts * size.generations)
    sampling = Sampling(max_completion_length=size.budget)
    version = 0

    async def publish() -> None:
        await engine.load(Snapshot(version, lambda: iter(())))

    async def ask() -> None:
        keys = [[sample_key(version, 0, str(p), k) for k in range(size.generations)] for p in range(len(prompts))]
        pairs = zip(prompts, keys, strict=True)
        answers = await asyncio.gather(*(engine.generate(prompt, own, sampling) for prompt, own in pairs))
        assert all(len(one.tokens) == size.budget for answer in answers for one in answer)

    def renew() -> None:
        nonlocal version
        version += 1
        asyncio.run(publish())

    seconds = repeat(lambda: asyncio.run(ask()), repeats, before=renew)
    asyncio.run(engine.close())
    return _result("gnomon", size, prompts, precision, seconds)


def decode_plainly(size: Size, repeats: int) -> BenchResult:
    """Return the same of ``model.generate`` as transformers brings it: sampled, padded left, no log-probabilities."""
    tune_machine()
    model, prompts, precision = asked(size)
    rows = [list(prompt) for prompt in prompts for _ in range(size.generations)]
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    budget = {"min_new_tokens": size.budget, "max_new_tokens": size.budget}

    def generate() -> None:
        with torch.inference_mode():
            model.generate(input_ids=tokens, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **budget)

    return _result("transformers", size, prompts, precision, repeat(generate, repeats))


def asked(size: Size) -> tuple[Any, list[tuple[int, ...]], Precision]:
    """Return the fixed work's model, the prompts of one step, and the precision that both sides compute in."""
    experiment = experiment_of(size)
    tasks = questions(experiment).split.train
    prompts = [tasks[index].prompt for index in range(size.prompts)]
    precision = experiment.learner.precision
    assert precision != "auto", "it was resolved"
    return load_model(experiment.model, dtype_of(precision)), prompts, precision


def _result(
    contender: str, size: Size, prompts: list[tuple[int, ...]], precision: Precision, seconds: tuple[float, ...]
) -> BenchResult:
    rows = size.prompts * size.generations
    rates = tuple(rows * size.budget / s for s in seconds)
    work = {
        "part": "generate",
        "prompts": [len(p) for p in prompts],
        "lengths": [size.budget] * rows,
        "beginning": common_beginning(set(prompts)),
    }
    measures = (BenchMeasure("decode", "tokens/s", rates), BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("engine", contender, measures, {"precision": precision, "works": {"decode": [work]}})
