"""One GRPO step as a run makes it: answers drawn, scored, trained on, published; each part timed on its own."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.ceilings import Work
from benchmarks.gpu.shapes import SHAPES, make
from gnomon.algorithms import GRPO
from gnomon.core.types import Batch, Completion, Grade, Group, Rollout, Task
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.learner.forward import default_budget
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.device import finish
from gnomon.rollouts.collate import collate

Say = Callable[[str, dict[str, Any]], None]


def run_model(name: str, work: Work, device: torch.device, dtype: torch.dtype, say: Say) -> None:
    """Make the model, then a cold and a warm step; ``say`` is told of each part as soon as it is known.

    Eight answers come last: they show what a decoding step costs where the weights alone must be read.
    """
    shape = SHAPES[name]
    began = time.perf_counter()
    model = make(shape, device, dtype)
    say("model", {"parameters": sum(p.numel() for p in model.parameters()), "seconds": time.perf_counter() - began})
    plan = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-6))
    learner = TorchLearner(model, plan, 10)
    engine = LocalEngine(model, work.rows)
    bounds = {
        "update_flops": work.update_flops(shape, model),
        "decode_bytes": work.decode_bytes(shape, model, dtype.itemsize),
        "tokens": work.tokens,
        "dtype": str(dtype).removeprefix("torch."),
    }
    say("bounds", bounds)
    for kind in ("cold", "warm"):
        asyncio.run(_step(engine, learner, work, device, lambda part, found, kind=kind: say(f"{kind} {part}", found)))
    few = Work(1, 8, work.prompt, work.answer // 4)
    _, seconds = asyncio.run(generate(engine, few, device, 9))
    bytes_needed = few.decode_bytes(shape, model, dtype.itemsize)
    say("warm decode of 8", {"seconds": seconds, "tokens": few.tokens, "decode_bytes": bytes_needed})
    asyncio.run(engine.close())


def compare_budgets(name: str, work: Work, device: torch.device, dtype: torch.dtype, say: Say) -> None:
    """Time an update with micro-batches of 1, 2, 4 and 8 times the tokens that a run takes by itself."""
    model = make(SHAPES[name], device, dtype)
    engine = LocalEngine(model, work.rows)
    answers, _ = asyncio.run(generate(engine, work, device, 0))
    asyncio.run(engine.close())
    batch = collate(graded(answers, work), 1.0)
    batch = replace(batch, proximal=batch.behavior)
    own = default_budget(model)
    for tokens in (own, 2 * own, 4 * own, 8 * own):
        plan = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-6), max_tokens_per_micro_batch=tokens)
        title = f"update, {name}: {tokens:,} tokens a micro-batch"
        try:
            learner = TorchLearner(model, plan, 10)
            for _ in range(2):  # the first compiles
                reset_peak(device)
                finish(device)
                began = time.perf_counter()
                asyncio.run(_update(learner, batch))
                finish(device)
            found = {"seconds": time.perf_counter() - began, "peak_bytes": peak(device)}
            say(title, found | {"needed_flops": work.update_flops(SHAPES[name], model)})
        except torch.OutOfMemoryError:
            say(title, {"left out": "out of memory"})
            return


async def _step(engine: LocalEngine, learner: TorchLearner, work: Work, device: torch.device, say: Say) -> None:
    reset_peak(device)
    answers, generating = await generate(engine, work, device, learner.version)
    say("generate", {"seconds": generating, "peak_bytes": peak(device)})
    reset_peak(device)
    batch = collate(graded(answers, work), 1.0)
    began = time.perf_counter()
    scores = await learner.score(batch, GRPO.needs | {"proximal"})
    finish(device)
    scoring = time.perf_counter() - began
    assert scores.proximal is not None, "it was asked for"
    gap = (scores.proximal - batch.behavior)[batch.mask].abs()
    say("score", {"seconds": scoring, "gap_mean": float(gap.mean()), "gap_max": float(gap.max())})
    began = time.perf_counter()
    await _update(learner, scores.into(batch))
    finish(device)
    updating = time.perf_counter() - began
    say("update", {"seconds": updating, "peak_bytes": peak(device)})
    learner.advance()
    began = time.perf_counter()
    await engine.load(learner.snapshot())
    finish(device)
    say("publish", {"seconds": time.perf_counter() - began})
    say("step", {"seconds": generating + scoring + updating})


async def _update(learner: TorchLearner, batch: Batch) -> None:
    for minibatch in GRPO.minibatches(GRPO.prepare(batch), 0):
        await learner.update(minibatch, GRPO, 0)


async def generate(
    engine: LocalEngine, work: Work, device: torch.device, version: int
) -> tuple[list[list[Completion]], float]:
    """Return all answers, each of the whole length, and the seconds until the last one came."""
    sampling = Sampling(max_completion_length=work.answer)
    keys = [[sample_key(0, version, str(p), k) for k in range(work.size)] for p in range(work.groups)]
    finish(device)
    began = time.perf_counter()
    asked = (engine.generate(_prompt(p, work), own, sampling) for p, own in enumerate(keys))
    answers = await asyncio.gather(*asked)
    finish(device)
    return list(answers), time.perf_counter() - began


def _prompt(number: int, work: Work) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(3, 500, (work.prompt,), generator=generator).tolist())


def graded(answers: list[list[Completion]], work: Work) -> list[Group]:
    """Return groups of graded answers; rewards alternate, so that every row is trained."""
    groups = []
    for number, own in enumerate(answers):
        task = Task(id=str(number), prompt=_prompt(number, work), text="")
        rollouts = [_rollout(task, answer, float(place % 2)) for place, answer in enumerate(own)]
        groups.append(Group(task, tuple(rollouts)))
    return groups


def _rollout(task: Task, answer: Completion, reward: float) -> Rollout:
    return Rollout(
        task_id=task.id,
        prompt=task.prompt,
        response=answer.tokens,
        mask=(True,) * len(answer.tokens),
        logprobs=answer.logprobs,
        full_logprobs=answer.full_logprobs,
        text="",
        grade=Grade(reward),
        oldest_version=answer.oldest_version,
        newest_version=answer.newest_version,
        stop=answer.stop,
    )


def reset_peak(device: torch.device) -> None:
    """Begin to watch memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Return the most bytes that tensors took on the device since `reset_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
