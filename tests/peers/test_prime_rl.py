"""prime-rl (559b447, 2026-08-21): its losses and advantages, read from a checkout that the variable PRIME_RL names.

It is on no package index, and its modules import a trainer and an orchestrator: these are left out by empty modules,
so that nothing but torch runs. Without the variable nothing here is collected.
"""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gnomon.algorithms import DPPO, IPO, DivergenceMask, GroupRelative, Kl, TokenMean

ABSENT = {
    "beartype": ("beartype",),
    "jaxtyping": ("Bool", "Float", "Int", "jaxtyped"),
    "verifiers": (),
    "verifiers.v1": ("Episode",),
    "prime_rl.configs.trainer": ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig"),
    "prime_rl.configs.algorithm": ("GRPOAlgoConfig",),
    "prime_rl.utils.utils": ("import_object",),
    "prime_rl.orchestrator.algo.base": ("Algorithm", "iter_trainable_traces"),
    "prime_rl.orchestrator.algo.routing": ("assign_advantages",),
}


class Named:
    """Stands for a class or a decorator that these modules only mention."""

    def __class_getitem__(cls, _: Any) -> type:
        """Return itself, as an annotation."""
        return cls

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Return a decorator that changes nothing."""
        return lambda function: function


class Plain:
    """An algorithm that holds nothing."""


@pytest.fixture
def prime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return prime-rl's modules for losses and for the advantages of GRPO and MaxRL, not compiled."""
    monkeypatch.setattr(torch, "compile", Named)
    kept = {name: sys.modules.get(name) for name in ABSENT}
    for name, members in ABSENT.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(members, Named))
    vars(sys.modules["verifiers"])["v1"] = sys.modules["verifiers.v1"]
    vars(sys.modules["prime_rl.orchestrator.algo.base"]).update(
        Algorithm=Plain, iter_trainable_traces=lambda traces: ((None, trace) for trace in traces)
    )
    vars(sys.modules["prime_rl.orchestrator.algo.routing"])["assign_advantages"] = lambda trace, value: vars(
        trace
    ).update(advantage=value)
    folder = Path(os.environ["PRIME_RL"]) / "src/prime_rl"

    def module(path: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"prime_rl_{Path(path).stem}", folder / path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found
        spec.loader.exec_module(found)
        return found

    algorithms = {name: module(f"orchestrator/algo/{name}.py") for name in ("grpo", "max_rl")}
    yield SimpleNamespace(loss=module("trainer/rl/loss.py"), **algorithms)
    for name, former in kept.items():
        sys.modules.pop(name) if former is None else sys.modules.update({name: former})


@pytest.mark.parametrize("kl", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("function", "settings", "preset"),
    [
        ("ipo_loss_fn", {"ipo_threshold": 0.3}, IPO),
        (
            "default_loss_fn",
            {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2},
            replace(DPPO, correction=DivergenceMask("tv", 0.2, side="outward"), aggregate=TokenMean()),
        ),
    ],
    ids=["ipo", "dppo"],
)
def test_losses(prime, problem, same, function, settings, preset, kl):
    """The gradient of each token, its squared log-ratio twice our k2; the value there is of ratios, here of logs."""
    batch, leaf = problem.batch, problem.current.clone().requires_grad_()
    config = SimpleNamespace(adv_tau=1.0, kl_tau=kl, **settings)
    total, _ = prime.loss.compute_loss(
        list(leaf),
        list(batch.behavior),
        None,
        list(batch.advantages),
        list(batch.mask),
        None,
        None,
        None,
        lambda inputs: getattr(prime.loss, function)(inputs, config),
        int(batch.mask.sum()),
        1,
        1,
    )
    (gradient,) = torch.autograd.grad(total, leaf)

    same(problem.ours(replace(preset, regularizers=(Kl("behavior", 2 * kl, "k2"),)))[1], gradient)
    assert bool(gradient.any())


@pytest.mark.parametrize(
    ("name", "algorithm", "piece"),
    [("grpo", "GRPOAlgorithm", GroupRelative("none")), ("max_rl", "MaxRLAlgorithm", GroupRelative("mean", epsilon=0))],
    ids=["grpo", "maxrl"],
)
def test_advantages(prime, problem, same, name, algorithm, piece):
    """Centered rewards of each group, over its mean in MaxRL; prime-rl's are float32, with no epsilon."""
    batch, ours = problem.batch, piece(problem.batch)[0][:, 0]
    scorer = vars(getattr(prime, name))[algorithm].__new__(vars(getattr(prime, name))[algorithm])
    scorer.length_penalty = None
    for group in batch.group.unique():
        traces = [SimpleNamespace(reward=reward) for reward in batch.rewards[batch.group == group].tolist()]
        asyncio.run(scorer.score_group(traces))
        same(ours[batch.group == group], torch.tensor([trace.advantage for trace in traces]), 1e-6)
