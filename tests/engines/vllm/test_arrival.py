"""The proof of arrival with vLLM: what it believes, and what each way of going wrong is called."""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.core.errors import EngineError, WeightSyncError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.pool import EnginePool
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.rounding import rounded
from gnomon.training.weight_sync import CalibratedTolerance, VerifiedWeightSync

pytestmark = pytest.mark.filterwarnings("ignore")

GATE = "model.layers.1.mlp.gate_proj.weight"
Change = Callable[[Snapshot], Snapshot]


class Between:
    """Stands between a pool and vLLM, and changes what is loaded from version 1 on; implements `Engine`."""

    def __init__(self, engine: Any, change: Change) -> None:
        self._engine, self._change = engine, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load(self, snapshot: Snapshot) -> None:
        await self._engine.load(snapshot if snapshot.version == 0 else self._change(snapshot))


def without(name: str) -> Change:
    """Return a change that leaves a tensor out."""
    return lambda given: Snapshot(given.version, lambda: (pair for pair in given.tensors() if pair[0] != name))


def altered(name: str) -> Change:
    """Return a change that sends other numbers than were meant for a tensor."""

    def change(given: Snapshot) -> Snapshot:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for own, tensor in given.tensors():
                yield own, tensor * 1.5 if own == name else tensor

        return Snapshot(given.version, tensors)

    return change


def proved(engine: Engine, model: torch.nn.Module, is_rounded: bool = False) -> list[dict[str, float]]:
    """Deliver, move the weights as an update does, deliver again; return both metrics."""
    learner = TorchLearner(model, LearnerConfig(precision="fp32"), steps=9)
    axes = input_axes(model)
    sending = (lambda snapshot: rounded(snapshot, "fp8", axes)) if is_rounded else None
    weight_sync = VerifiedWeightSync(EnginePool({"vllm": engine}), 259, sending, CalibratedTolerance())

    async def deliveries() -> list[dict[str, float]]:
        first = await weight_sync.publish(weight_sync.engines, learner)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        learner.advance()
        return [first.values(), (await weight_sync.publish(weight_sync.engines, learner)).values()]

    torch.manual_seed(0)
    return asyncio.run(deliveries())


@pytest.mark.parametrize("is_rounded", [False, True], ids=["plain", "fp8"])
def test_weights_that_arrive_are_believed(engine, config, is_rounded):
    """Both deliveries: in float32 vLLM is less than 1e-4 nats from the learner, also with rounded weights."""
    for metrics in proved(engine, tiny_model(0, config), is_rounded):
        assert metrics["arrival/canary_abs_mean_nats"] < 1e-4


def test_a_tensor_that_is_left_out_on_the_way_is_named(engine, config):
    """vLLM would keep what it had; the load is refused, and the run ends with the name."""
    with pytest.raises(
        EngineError, match=rf"vllm: snapshot 1 does not fit the engine: .*missing \['{re.escape(GATE)}'\]"
    ):
        proved(Between(engine, without(GATE)), tiny_model(0, config))


def test_a_tensor_with_other_numbers_is_named(engine, config):
    """The fingerprint of what vLLM took in is not that of what was sent."""
    with pytest.raises(
        WeightSyncError, match=rf"version 1 did not arrive in engine vllm: 1 of 20 .*\({re.escape(GATE)} is"
    ):
        proved(Between(engine, altered(GATE)), tiny_model(0, config))


def test_a_score_waits_for_no_answer(run):
    """With every place taken and more waiting, the canary is answered before any of them, so weights arrive at once."""

    async def steps(engine):
        asking = [
            asyncio.ensure_future(engine.generate([65, n], [n], Sampling(max_completion_length=90))) for n in range(8)
        ]
        await asyncio.sleep(0.05)
        assert len(await engine.score([256, 50], [65, 66], 1.0)) == 2
        assert not any(answer.done() for answer in asking)
        for answer in asking:
            answer.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    run(steps)
