"""What `test_device.py` asks about, computed on the CPU and on the second device: a JSON object on standard output."""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from conftest import REVEALING, SHAPE, build_batch
from second_device import NAME, register
from torch import nn

import gnomon.learner.forward
from gnomon.algorithms import PRESETS, Algorithm
from gnomon.algorithms.sections import EmaProximal
from gnomon.core.types import Completion, State
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.critic import CausalCritic, head_for
from gnomon.models.cuda_graph_decoder import StaticDecoder
from gnomon.models.decoder import AlignedDecoder, RecomputeDecoder, SameLengthDecoder
from gnomon.models.lora import adapt
from gnomon.models.tiny import tiny_model

PLAN = LearnerConfig(optimizer=replace(REVEALING, learning_rate=0.1), max_tokens_per_micro_batch=60)
MIXTURE = replace(SHAPE, architecture="qwen3_moe")
PROMPTS = [(3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7, 9), (11,)]


def model_on(device: str, lora: bool = False, dtype: torch.dtype = torch.float32, shape: Any = SHAPE) -> nn.Module:
    model = tiny_model(0, shape, dtype)
    torch.manual_seed(0)
    return (adapt(model, LoraConfig(rank=2)) if lora else model).to(device)


def learner_on(device: str, algorithm: Algorithm, plan: LearnerConfig = PLAN, **model: Any) -> TorchLearner:
    policy, critic = model_on(device, **model), None
    reference = None if model.get("lora") or "reference" not in algorithm.needs else model_on(device).eval()
    if algorithm.critic is not None:
        own = model_on(device)
        critic = head_for(policy) if algorithm.critic.trunk == "shared" else CausalCritic(own, head_for(own))
    return TorchLearner(policy, plan, 10, reference, critic, algorithm.proximal)


async def step(learner: TorchLearner, algorithm: Algorithm, seed: int = 0) -> None:
    """One training step as the loop makes it, with the critic's updates after the policy's."""
    batch = build_batch(seed).with_fields(proximal=None, reference=None)
    batch = algorithm.prepare((await learner.score(batch, algorithm.needs)).into(batch))
    for minibatch in algorithm.minibatches(batch, 0):
        await learner.update(minibatch, algorithm, 0)
    if algorithm.critic is not None:
        for minibatch in algorithm.value_minibatches(batch, 0):
            await learner.fit(minibatch, algorithm, 0)
    learner.advance()


def distance(one: State, other: State) -> float:
    """The largest difference of two states; a tensor that is not on the CPU, or missing, is infinitely far."""
    if one.tensors.keys() != other.tensors.keys():
        return float("inf")
    pairs = [(one.tensors[name], other.tensors[name]) for name in one.tensors]
    if any(t.device.type != "cpu" for pair in pairs for t in pair):
        return float("inf")
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def trained(algorithm: Algorithm, plan: LearnerConfig = PLAN, **model: Any) -> float:
    """How far one step on the second device ends from that on the CPU."""
    learners = [learner_on(device, algorithm, plan, **model) for device in ("cpu", NAME)]
    for learner in learners:
        asyncio.run(step(learner, algorithm))
    return distance(*(learner.state() for learner in learners))


def continued() -> float:
    """How far a run that changes devices after each step ends from one that stays on the CPU."""
    algorithm = replace(PRESETS["grpo"], proximal=EmaProximal(0.9))
    stays, first, second = (learner_on(device, algorithm) for device in ("cpu", NAME, "cpu"))
    for seed in range(3):
        asyncio.run(step(stays, algorithm, seed))
    asyncio.run(step(first, algorithm, 0))
    second.restore(first.state())
    asyncio.run(step(second, algorithm, 1))
    first.restore(second.state())
    asyncio.run(step(first, algorithm, 2))
    return distance(stays.state(), first.state())


def answers(model: nn.Module, sampling: Sampling, source: TorchLearner | None = None) -> list[list[Completion]]:
    engine = LocalEngine(model, 5, shared=source is None)

    async def ask() -> list[list[Completion]]:
        if source is not None:
            await engine.load(source.snapshot())
        keys = [[sample_key(0, 0, str(number), k) for k in range(2)] for number in range(len(PROMPTS))]
        asked = (engine.generate(prompt, own, sampling) for prompt, own in zip(PROMPTS, keys, strict=True))
        found = await asyncio.gather(*asked)
        await engine.close()
        return list(found)

    return asyncio.run(ask())


def same(ours: list[list[Completion]], theirs: list[list[Completion]]) -> bool:
    """Whether tokens are equal, and log-probabilities and experts to rounding."""
    pairs = [pair for groups in zip(ours, theirs, strict=True) for pair in zip(*groups, strict=True)]
    close = [
        torch.allclose(torch.tensor([a.logprobs, a.full_logprobs]), torch.tensor([b.logprobs, b.full_logprobs]))
        for a, b in pairs
    ]
    routed = [(a.routing is None and b.routing is None) or torch.equal(a.routing, b.routing) for a, b in pairs]
    return all(close) and all(routed) and all(a.tokens == b.tokens for a, b in pairs)


def generated(sampling: Sampling, shape: Any = SHAPE) -> bool:
    """Whether the engine draws the same on both devices."""
    return same(*(answers(model_on(device, shape=shape), sampling) for device in ("cpu", NAME)))


def published(engine: str, learner: str) -> bool:
    """Whether weights of a learner with adapters reach an engine on another device."""
    source = learner_on(learner, PRESETS["grpo"], lora=True)
    asyncio.run(step(source, PRESETS["grpo"]))
    wanted = answers(model_on("cpu"), Sampling(max_completion_length=4), source)
    stale = answers(model_on("cpu"), Sampling(max_completion_length=4))
    return same(answers(model_on(engine), Sampling(max_completion_length=4), source), wanted) and not same(
        wanted, stale
    )


def decoded(make: Callable[[nn.Module], Any]) -> float:
    """How far logits on the second device are from plain forward passes on the CPU, with rows coming and going."""
    ours, plain = make(model_on(NAME)), RecomputeDecoder(model_on("cpu"))
    joined = PROMPTS if ours.joins else [PROMPTS[0], PROMPTS[0][::-1]]
    worst, tokens = 0.0, [(7 * i) % 11 for i in range(len(joined))]
    with torch.no_grad():
        for each in (ours, plain):
            each.admit(joined, 4, frozenset())
        for turn in range(6):
            logits = ours.step(tokens, 300), plain.step(tokens, 300)
            worst = max(worst, float((logits[0].cpu() - logits[1]).abs().max()))
            tokens = [(2 * t + 1) % 7 for t in tokens]
            if turn == 2:
                for each in (ours, plain):
                    each.leave(1)
                    if each.joins and ours.joins:
                        # More rows and columns than there is room for: the buffers move.
                        each.admit([tuple(range(1, 260)), PROMPTS[1]], 200, frozenset())
                tokens = tokens[:-1] + [4, 5] * ours.joins
    return worst


@contextmanager
def planted(owner: Any, name: str, fault: Callable[..., Any]) -> Iterator[None]:
    """A world in which somebody forgot to move something."""
    right = vars(owner)[name]
    setattr(owner, name, fault)
    try:
        yield
    finally:
        setattr(owner, name, right)


def forgotten() -> list[str]:
    """What is said when a cut stays where it was, and when a critic does."""
    said = []
    algorithm = PRESETS["ppo"]
    with planted(gnomon.learner.forward, "move", lambda cut, device: cut):
        said.append(refusal(lambda: asyncio.run(step(learner_on(NAME, algorithm), algorithm))))
    own = model_on("cpu")
    beside = TorchLearner(model_on(NAME), PLAN, 10, None, CausalCritic(own, head_for(own)))
    said.append(refusal(lambda: asyncio.run(step(beside, algorithm))))
    return said


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""


def results() -> dict[str, Callable[[], Any]]:
    plain, short = Sampling(max_completion_length=4), replace(PLAN, gradient_checkpointing=True)
    return {
        **{f"preset {name}": lambda preset=preset: trained(preset) for name, preset in PRESETS.items()},
        "adapters": lambda: trained(PRESETS["grpo"], lora=True),
        "bfloat16": lambda: trained(PRESETS["grpo"], dtype=torch.bfloat16),
        "checkpointing": lambda: trained(PRESETS["grpo"], short),
        "mixture": lambda: trained(PRESETS["grpo"], shape=MIXTURE),
        "changing devices": continued,
        "engine": lambda: generated(plain),
        "engine, truncated": lambda: generated(replace(plain, top_p=0.8, top_k=50, min_p=0.01, temperature=0.7)),
        "engine, mixture": lambda: generated(replace(plain, record_routing=True), MIXTURE),
        "publish to the device": lambda: published(NAME, "cpu"),
        "publish from the device": lambda: published("cpu", NAME),
        **{f"decoder {make.__name__}": lambda make=make: decoded(make)
           for make in (AlignedDecoder, SameLengthDecoder, StaticDecoder, RecomputeDecoder)},
        "forgotten": forgotten,
    }  # fmt: skip


def main(names: Sequence[str]) -> None:
    kept = register()
    found: dict[str, Any] = {}
    for name, work in results().items():
        if names and name not in names:
            continue
        try:
            found[name] = work()
        except Exception:
            found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)
    del kept


if __name__ == "__main__":
    main(sys.argv[1:])
