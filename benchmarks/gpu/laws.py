"""What must hold on a device before its speed means anything: the CPU's float32 numbers, engine and learner alike."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.ceilings import Work
from benchmarks.gpu.kernels import distances
from benchmarks.gpu.shapes import SHAPES, Shape, make
from benchmarks.gpu.step import generate, graded
from gnomon.algorithms import GRPO
from gnomon.core.types import Batch, State
from gnomon.engines.local import LocalEngine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.cuda_graph_decoder import Recorded, StaticDecoder, fastest_decoder
from gnomon.models.decoder import AlignedDecoder, Decoder, RecomputeDecoder
from gnomon.models.device import finish
from gnomon.models.logprobs import TokenScorer
from gnomon.rollouts.collate import collate

BOUND = 1e-4
"""Largest relative difference from the CPU in float32."""
PLAN = LearnerConfig(optimizer=OptimizerConfig(learning_rate=0.1, epsilon=1.0, max_gradient_norm=math.inf))
WORK = Work(4, 4, 11, 24)
CPU = torch.device("cpu")


def laws(device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the checks by name; each returns what it measured, ``holds`` among it."""
    dense, adapters = SHAPES["small"], SHAPES["small-lora"]
    return {
        "loss and gradient": lambda: _gradient(device, dense),
        "two updates": lambda: _updates(device, dense, PLAN),
        "two updates, adapters": lambda: _updates(device, adapters, PLAN),
        "two updates, checkpointing": lambda: _updates(device, dense, replace(PLAN, gradient_checkpointing=True)),
        "resume": lambda: _resume(device, dense),
        "engine is learner, float32": lambda: _engine(device, torch.float32, 1e-4),
        "engine is learner, bfloat16": lambda: _engine(device, torch.bfloat16, 0.2),
        "recorded steps": lambda: _recorded(device),
        "attention of packed rows": lambda: distances(device),
    }


def _batch() -> Batch:
    """Answers of the CPU in float32: the same for every device."""
    model = make(SHAPES["small"], CPU, torch.float32)
    answers, _ = asyncio.run(generate(LocalEngine(model, 16), WORK, CPU, 0))
    ragged = [[_shortened(a, 3 + (5 * i) % 20) for i, a in enumerate(own)] for own in answers]
    return collate(graded(ragged, WORK), 1.0)


def _shortened(answer: Any, length: int) -> Any:
    cut = {name: getattr(answer, name)[:length] for name in ("tokens", "logprobs", "full_logprobs")}
    return replace(answer, **cut)


def _on(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Return one and the same model on any device."""
    return make(shape, CPU, torch.float32).to(dtype).to(device)


def _gradient(device: torch.device, shape: Shape) -> dict[str, Any]:
    batch, found = _batch(), {}
    weights = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(3))
    for where in (CPU, device):
        model = _on(shape, where)
        parts = (batch.tokens.to(where), batch.prompt_lengths.to(where), batch.mask.to(where))
        scores = TokenScorer(model)(*parts, temperature=0.9)
        loss = (weights.to(where) * scores.logprobs).sum() + scores.entropy.sum()
        loss.backward()
        gradients = torch.cat([p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None])
        found[where] = (loss.detach().cpu(), scores.logprobs.detach().cpu(), gradients)
    relative = [_relative(a, b) for a, b in zip(found[CPU], found[device], strict=True)]
    return {"holds": max(relative) < BOUND, **dict(zip(("loss", "logprobs", "gradient"), relative, strict=True))}


def _relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).norm() / wanted.norm())


def _learner(device: torch.device, shape: Shape, plan: LearnerConfig) -> TorchLearner:
    return TorchLearner(_on(shape, device), plan, 10)


async def _step(learner: TorchLearner, batch: Batch) -> None:
    batch = (await learner.score(batch, GRPO.needs | {"proximal"})).into(batch)
    for minibatch in GRPO.minibatches(GRPO.prepare(batch), 0):
        await learner.update(minibatch, GRPO, 0)
    learner.advance()


def _separate(one: State, other: State) -> float:
    """Return the largest relative difference of masters and moments."""
    names = [name for name in one.tensors if name != "steps" and float(one.tensors[name].norm()) > 0]
    return max(_relative(one.tensors[name], other.tensors[name]) for name in names)


def _updates(device: torch.device, shape: Shape, plan: LearnerConfig) -> dict[str, Any]:
    batch, learners = _batch(), [_learner(where, shape, plan) for where in (CPU, device)]
    for learner in learners:
        for _ in range(2):
            asyncio.run(_step(learner, batch))
    apart = _separate(*(learner.state() for learner in learners))
    # Second moments are squares, so their relative error is twice the gradient's.
    return {"holds": apart < 10 * BOUND, "apart": apart}


def _resume(device: torch.device, shape: Shape) -> dict[str, Any]:
    batch, first, second = _batch(), _learner(device, shape, PLAN), _learner(device, shape, PLAN)
    asyncio.run(_step(first, batch))
    second.restore(first.state())
    restored = max(float((a - b).abs().max()) for a, b in _pairs(first.state(), second.state()))
    for learner in (first, second):
        asyncio.run(_step(learner, batch))
    apart, elsewhere = _separate(first.state(), second.state()), _learner(CPU, shape, PLAN)
    elsewhere.restore(first.state())
    moved = max(float((a - b).abs().max()) for a, b in _pairs(first.state(), elsewhere.state()))
    is_right = restored == 0 and moved == 0 and apart < 10 * BOUND
    return {"holds": is_right, "restored": restored, "moved to the CPU": moved, "apart after a step": apart}


def _pairs(one: State, other: State) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(one.tensors[name], other.tensors[name]) for name in one.tensors]


def _engine(device: torch.device, dtype: torch.dtype, bound: float) -> dict[str, Any]:
    model = _on(SHAPES["small"], device, dtype)
    answers, _ = asyncio.run(generate(LocalEngine(model, 16), WORK, device, 0))
    batch = collate(graded(answers, WORK), 1.0)
    scores = asyncio.run(TorchLearner(model, PLAN, 1).score(batch, frozenset({"proximal"})))
    assert scores.proximal is not None, "it was asked for"
    gap = (scores.proximal - batch.behavior)[batch.mask].abs()
    plain = make(SHAPES["small"], CPU, torch.float32)
    wanted, _ = asyncio.run(generate(LocalEngine(plain, 16), WORK, CPU, 0))
    pairs = [pair for own in zip(answers, wanted, strict=True) for pair in zip(*own, strict=True)]
    equal = sum(a.tokens == b.tokens for a, b in pairs) / len(pairs)
    return {"holds": float(gap.max()) < bound, "gap_max": float(gap.max()), "answers equal to the CPU's": equal}


def _recorded(device: torch.device) -> dict[str, Any]:
    """Recorded steps give plain logits, and how much sooner: 8 rows, 64 steps of a model of many small kernels."""
    shape = replace(SHAPES["small"], layers=2 if device.type == "cpu" else 24)
    model = _on(shape, device)
    chosen = type(fastest_decoder(model)).__name__
    seconds: dict[str, float] = {}
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, decoder in _decoders(model, device).items():
            decoder.admit([(5, 6, 7, 8 + row % 2) for row in range(8)], 80, frozenset())
            for step in range(72):
                if step == 8:
                    finish(device)
                    began = time.perf_counter()
                found = decoder.step([3 + (step + row) % 50 for row in range(8)], 80)
            finish(device)
            seconds[name] = (time.perf_counter() - began) / 64
            logits[name] = found.float().cpu().clone()
    apart = {name: _relative(logits["plain"], each) for name, each in logits.items()}
    wanted = "StaticDecoder" if device.type == "cuda" else "FusedDecoder"
    is_right = chosen == wanted and max(apart.values()) < BOUND
    return {"holds": is_right, "chosen": chosen, "apart": apart, "seconds": seconds}


def _decoders(model: Any, device: torch.device) -> dict[str, Decoder]:
    unrecorded = StaticDecoder(model)
    unrecorded._recorded = Recorded(CPU)
    recorded = StaticDecoder(model)
    return {
        "plain": RecomputeDecoder(model),
        "aligned": AlignedDecoder(model),
        "static": unrecorded,
        "recorded": recorded,
    }
