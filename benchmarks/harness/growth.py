"""How cost grows: one number of a small model's work changes, the others stay."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness.materials import BenchShape, Trainer, make_batch, make_groups, rows_for
from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import peak_gib, repeat, resident_bytes
from gnomon.algorithms import NAMED
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.metrics import measure_advantages
from gnomon.algorithms.sections import EmaProximal, Updates
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.learner.allocator import tune_machine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.reference import ReferenceModels
from gnomon.learner.sections import LearnerConfig
from gnomon.models.critic import CausalCritic, ValueHead
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.records.batches import BatchLog
from gnomon.records.jsonl import JsonlSink
from gnomon.records.rollouts import RolloutLog
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.drift import AccumulatedDrift
from gnomon.rollouts.curriculum.samplers import PrioritizedCurriculum
from gnomon.rollouts.curriculum.tracker import DecayRule, ValueTracker
from gnomon.rollouts.metrics import measure_round, measure_waste
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch

_GRPO = NAMED["grpo"]
_LONG = 2048
"""Tokens of an answer from which once is enough: a small share of it is luck, and it takes minutes."""


def batch(size: Size, repeats: int) -> BenchResult:
    """Return microseconds a token of one update, over the rows of a batch."""
    shapes = {
        f"{rows:,} rows": BenchShape(
            (size.prompt,) * (rows // size.generations), size.generations, size.answer, size.budget
        )
        for rows in size.rows
    }
    return _updates("batch", shapes, size, repeats)


def group(size: Size, repeats: int) -> BenchResult:
    """Return microseconds a token of one update of one group with a long prompt, over the answers in it."""
    shapes = {
        f"{n:,} answers a prompt": BenchShape((size.shared_prompt,), n, size.answer, size.budget) for n in size.groups
    }
    return _updates("group size", shapes, size, repeats)


def length(size: Size, repeats: int) -> BenchResult:
    """Return microseconds a token of generating and training four answers, over their length."""
    tune_machine()
    config = _config(size, context=size.prompt + max(size.lengths))
    trainer, measures = _trainer(config, _GRPO), []
    engine = LocalEngine(tiny_model(0, config), 4)
    asyncio.run(engine.load(Snapshot(0, lambda: iter(()))))
    for tokens in size.lengths:
        shape = BenchShape((size.prompt,), 4, tokens, tokens)
        made = trainer.on_policy(make_batch(shape, config.vocab_size))
        times, warmups = (repeats, 1) if tokens < _LONG else (1, 0)
        seconds = repeat(partial(trainer.step, made), times, warmups)
        measures.append(_each(f"{tokens:,} tokens, update", seconds, 4 * tokens))
        seconds = repeat(partial(_answer, engine, size.prompt, 4, tokens), times, warmups)
        measures.append(_each(f"{tokens:,} tokens, generate", seconds, 4 * tokens))
    asyncio.run(engine.close())
    measures.append(BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("growth", "length", tuple(measures))


def vocabulary(size: Size, repeats: int) -> BenchResult:
    """Return microseconds a token of one update and of one generated token, over the width of the logits."""
    tune_machine()
    measures = []
    for width in size.vocabularies:
        config = replace(_config(size), vocab_size=width)
        trainer = _trainer(config, _GRPO)
        shape = BenchShape((size.prompt,) * size.prompts, size.generations, size.answer, size.budget)
        made = trainer.on_policy(make_batch(shape, width))
        measures.append(
            _each(f"{width:,} tokens, update", repeat(partial(trainer.step, made), repeats), sum(shape.lengths))
        )
        engine = LocalEngine(tiny_model(0, config), size.generations)
        asyncio.run(engine.load(Snapshot(0, lambda: iter(()))))
        seconds = repeat(partial(_answer, engine, size.prompt, size.generations, size.budget), repeats)
        measures.append(_each(f"{width:,} tokens, generate", seconds, size.generations * size.budget))
        asyncio.run(engine.close())
    measures.append(BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("growth", "vocabulary", tuple(measures))


def tracker(size: Size, repeats: int) -> BenchResult:
    """Return bytes a prompt and the milliseconds of ``take(2048)``, over the prompts that the value tracker knows.

    Bytes are what the process grew by, with roster, tracker, accumulated drift and prioritized curriculum, once they
    are built (the allocator gives memory back in this process); what building them took beside is in the peak.
    """
    measures = []
    for prompts in size.tracked:
        gc.collect()
        before = resident_bytes()
        task_index = TaskIndex(f"prompt-{number}" for number in range(prompts))
        values = ValueTracker(task_index, DecayRule(0.875, 0.96))
        drift = AccumulatedDrift(task_index)
        curriculum = PrioritizedCurriculum(values, 0.05, 0.0, 0)
        seconds = repeat(partial(curriculum.take, min(2048, prompts)), repeats)
        gc.collect()
        after = resident_bytes()
        if before is not None and after is not None:
            measures.append(BenchMeasure(f"{prompts:,} prompts, memory", "bytes/prompt", ((after - before) / prompts,)))
        measures.append(BenchMeasure(f"{prompts:,} prompts, take 2,048", "ms", tuple(1e3 * s for s in seconds)))
        del task_index, values, drift, curriculum
    measures.append(BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("growth", "prompts tracked", tuple(measures))


def algorithms(size: Size, repeats: int) -> BenchResult:
    """Return what the learner's half of a step of each preset takes, as a multiple of GRPO's on the same rows.

    Each measurement is a pair, GRPO then the preset, so that a change of the machine's pace falls on both. All make one
    update here, of the critic too, so that the pieces are compared and not the number of updates; a preset that reads
    another policy makes a forward pass of it, one that reads a statistic of the whole step makes one of all cuts but
    the first, and facts say which do. Of a preset that scores with other policies "scoring aside" has the updates
    alone. VAPO's review imitates its best answers between steps, which is not in its number.
    """
    tune_machine()
    config = _config(size)
    shape = BenchShape((size.prompt,) * size.prompts, size.generations, size.answer, size.budget)
    baseline = _trainer(config, _GRPO)
    made = baseline.on_policy(make_batch(shape, config.vocab_size))
    measures, passes = [], {}
    for name in size.presets or NAMED:
        preset = NAMED[name]
        critic = None if preset.critic is None else replace(preset.critic, updates=Updates())
        algorithm = replace(preset, updates=Updates(), critic=critic)
        trainer, rows = _trainer(config, algorithm), rows_for(algorithm, made)
        passes[name] = [*sorted(algorithm.needs), *(["statistics"] if algorithm.reads_statistics else [])]
        ratios, aside = [], []
        _timed(trainer, rows)
        for _ in range(repeats):
            (ours, our_updates), (theirs, their_updates) = _timed(baseline, made), _timed(trainer, rows)
            ratios.append(theirs / ours)
            aside.append(their_updates / our_updates)
        measures.append(BenchMeasure(name, "x grpo", tuple(ratios)))
        if algorithm.needs:
            measures.append(BenchMeasure(f"{name}, scoring aside", "x grpo", tuple(aside)))
        trainer.learner.close()
    return BenchResult("growth", "algorithms", tuple(measures), {"more passes": passes})


def _timed(trainer: Trainer, batch: Batch) -> tuple[float, float]:
    """Return the seconds of a step, and of its updates alone."""
    start = time.perf_counter()
    scored = trainer.scored(batch)
    middle = time.perf_counter()
    trainer.learn(scored)
    end = time.perf_counter()
    return end - start, end - middle


def recording(size: Size, repeats: int) -> BenchResult:
    """Return the milliseconds of writing one step of the fixed work's shape down: metrics, rollouts, whole batches."""
    shape = BenchShape((size.prompt,) * size.prompts, size.generations, size.answer, size.budget)
    groups = make_groups(shape, size.vocabulary)
    finished = RolloutBatch(0, groups, (), RolloutTimer())
    made = make_batch(shape, size.vocabulary)
    algorithm = _GRPO
    prepared = algorithm.prepare(made)
    metrics = _measured(algorithm, finished, prepared)
    with tempfile.TemporaryDirectory(prefix="gnomon-bench-") as folder:
        place = Path(folder)
        sink, rollouts, batches = JsonlSink(place / "metrics.jsonl"), RolloutLog(place / "r"), BatchLog(place / "b")
        parts = {
            "measure": lambda: _measured(algorithm, finished, prepared),
            "metrics": lambda: sink.write(1, metrics.values()),
            "rollouts": lambda: rollouts.write(1, groups),
            "batches (off by default)": lambda: batches.write(1, prepared),
        }
        measures = [BenchMeasure(n, "ms", tuple(1e3 * s for s in repeat(work, repeats))) for n, work in parts.items()]
        sink.close()
    return BenchResult("growth", "recording", tuple(measures))


def _answer(engine: LocalEngine, prompt: int, answers: int, tokens: int) -> None:
    """Generate ``answers`` of ``tokens`` tokens to a prompt of ``prompt`` tokens."""
    sampling = Sampling(max_completion_length=tokens)
    asyncio.run(engine.generate(range(3, 3 + prompt), range(answers), sampling))


def _measured(algorithm: Algorithm, finished: RolloutBatch, prepared: Batch) -> Metrics:
    measured = measure_round(finished, 0) + measure_advantages(algorithm, prepared)
    return measured + measure_waste(finished, prepared, Metrics())


def _updates(name: str, shapes: Mapping[str, BenchShape], size: Size, repeats: int) -> BenchResult:
    tune_machine()
    config = _config(size)
    trainer, measures = _trainer(config, _GRPO), []
    for label, shape in shapes.items():
        made = trainer.on_policy(make_batch(shape, config.vocab_size))
        seconds = repeat(partial(trainer.step, made), repeats)
        measures.append(_each(label, seconds, sum(shape.lengths)))
    measures.append(BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("growth", name, tuple(measures))


def _config(size: Size, context: int = 4096) -> TinyConfig:
    return TinyConfig(
        layers=size.layers, width=size.width, vocab_size=size.vocabulary, context_length=context, spread=0.02
    )


def _trainer(config: TinyConfig, algorithm: Algorithm) -> Trainer:
    plan, policy, asks = LearnerConfig(precision="fp32"), tiny_model(0, config), algorithm.reference
    reference, critic = ReferenceModels(), None
    if "reference" in algorithm.needs:
        average = EmaProximal(asks.decay) if asks.model == "average" else None
        # Other weights than the policy's: where both agree, distillation has no gradient.
        model = tiny_model(1, config) if average is None else None
        reference = ReferenceModels(model, average=average, top=algorithm.reference_top)
    if algorithm.critic is not None:
        head = ValueHead(config.width)
        critic = head if algorithm.critic.trunk == "shared" else CausalCritic(tiny_model(0, config), head)
    return Trainer(TorchLearner(policy, plan, 1, reference, critic, algorithm.proximal), algorithm)


def _each(name: str, seconds: tuple[float, ...], tokens: int) -> BenchMeasure:
    return BenchMeasure(name, "us/token", tuple(1e6 * s / tokens for s in seconds))
