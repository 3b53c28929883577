"""Each part of the mismatch has a cause; created alone, it alone is seen."""

import asyncio
from dataclasses import dataclass, replace

import pytest
import torch
from tests.training.weights import learner_of, move
from torch import nn

from gnomon.algorithms.sections import EmaProximal
from gnomon.core.metrics import Metrics
from gnomon.core.types import GIVEN, Batch, Completion, Grade, Group, Rollout, Task
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.rounding import rounded
from gnomon.rollouts.collate import collate
from gnomon.training.weight_sync import DecomposedMismatch, SnapshotTransform

PARTS = ("truncation", "staleness", "engine", "precision", "temperature")
PROMPT = (256, 50, 43, 50, 61)
ROUNDING = 2e-6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Setting:
    """What differs between who sampled and who is trained. dtype: of the engine. moved: after sampling."""

    sampling: Sampling = Sampling(max_completion_length=10)
    dtype: torch.dtype = torch.float32
    is_rounded: bool = False
    is_moved: bool = False
    is_scored: bool = True
    rows: int = 40
    sleeps: bool = False
    given: int = 0


def rollout(completion: Completion) -> Rollout:
    """Return a graded rollout whose third token was not the policy's."""
    mask = tuple(place != 2 for place in range(len(completion.tokens)))
    return Rollout(
        task_id="a",
        prompt=PROMPT,
        response=completion.tokens,
        mask=mask,
        logprobs=completion.logprobs,
        full_logprobs=completion.full_logprobs,
        text="",
        grade=Grade(1.0),
        oldest_version=completion.oldest_version,
        newest_version=completion.newest_version,
        stop=completion.stop,
    )


def measured(setting: Setting, step: int = 0) -> Metrics:
    """Return what the mismatch was taken apart into."""

    async def body() -> Metrics:
        torch.manual_seed(0)
        model = tiny_model()
        learner = learner_of(model)
        engine = LocalEngine(tiny_model(0, dtype=setting.dtype), shared=False)
        sending = sending_of(model) if setting.is_rounded else None
        await engine.load(learner.snapshot() if sending is None else sending(learner.snapshot()))
        answers = await engine.generate(PROMPT, range(setting.rows), setting.sampling)
        if setting.is_moved:
            move(model, 0.01)
            learner.advance()
            await engine.load(learner.snapshot() if sending is None else sending(learner.snapshot()))
        sampled = [*map(rollout, answers)]
        given = [replace(each, oldest_version=GIVEN, newest_version=GIVEN) for each in sampled[: setting.given]]
        given = [replace(each, logprobs=(0.0,) * each.length, full_logprobs=(0.0,) * each.length) for each in given]
        batch = collate([Group(Task("a", PROMPT, ""), (*given, *sampled))], setting.sampling.temperature)
        if setting.is_scored:
            batch = (await learner.score(batch, {"proximal"})).into(batch)
        if setting.sleeps:
            await engine.sleep()
        try:
            probe = DecomposedMismatch(engine, learner, sending, is_asleep=setting.sleeps)
            return await probe.measure(batch, step)
        finally:
            await engine.close()

    return asyncio.run(body())


def sending_of(model: nn.Module) -> SnapshotTransform:
    """Return what rounds to fp8."""
    axes = input_axes(model)
    return lambda snapshot: rounded(snapshot, "fp8", axes)


ALONE = {
    "truncation": Setting(Sampling(max_completion_length=10, top_p=0.7)),
    "staleness": Setting(is_moved=True),
    "engine": Setting(dtype=BF16),
    "precision": Setting(is_rounded=True),
    "temperature": Setting(Sampling(max_completion_length=10, temperature=0.7)),
}


@pytest.mark.parametrize("part", ["", *PARTS])
def test_answers_that_were_given_differ_from_nobody(part: str):
    """Nobody sampled them: their zeros are no log-probabilities of an engine, stale by sixty nats and more."""
    setting = ALONE.get(part, Setting())
    alone, beside = measured(setting), measured(replace(setting, given=3))

    for name in (*PARTS, "total"):
        assert beside[f"mismatch/{name}_abs_nats"] == pytest.approx(alone[f"mismatch/{name}_abs_nats"], abs=1e-5)


@pytest.mark.parametrize("is_scored", [True, False], ids=["scored", "unscored"])
@pytest.mark.parametrize("part", PARTS)
def test_a_cause_is_seen_in_its_own_part_alone(part, is_scored):
    """The others are 0, those that cannot be anything else exactly, and the engine's at float32's rounding."""
    metrics = measured(replace(ALONE[part], is_scored=is_scored))

    assert metrics[f"mismatch/{part}_abs_nats"] > 1e-3
    for other in PARTS:
        if other not in (part, "engine"):
            assert metrics[f"mismatch/{other}_abs_nats"] == 0.0
    if part != "engine":
        assert metrics["mismatch/engine_abs_nats"] < ROUNDING
    assert metrics["mismatch/total_abs_nats"] == pytest.approx(metrics[f"mismatch/{part}_abs_nats"], abs=ROUNDING)


def test_nothing_is_seen_where_nothing_differs():
    """The engine's own noise in float32 is below 1e-6 nats, and all tokens but the foreign ones are measured."""
    metrics = measured(Setting())

    assert metrics["mismatch/total_abs_nats"] < 1e-6
    assert [metrics[f"mismatch/{part}_abs_nats"] for part in PARTS if part != "engine"] == [0.0] * 4


@pytest.mark.parametrize("step", [0, 7])
def test_the_parts_add_up(step):
    """With every cause at once, the means of the parts sum to the mean of the whole, on the same tokens."""
    sampling = Sampling(max_completion_length=10, top_p=0.8, temperature=0.8)
    metrics = measured(Setting(sampling, dtype=BF16, is_rounded=True, is_moved=True), step)

    assert all(metrics[f"mismatch/{part}_abs_nats"] > 1e-3 for part in PARTS)
    parts = sum(metrics[f"mismatch/{part}_nats"] for part in PARTS)
    assert parts == pytest.approx(metrics["mismatch/total_nats"], abs=1e-6)


def test_an_engine_that_sleeps_is_not_asked():
    """Of stale answers its own part and staleness are one, and the parts add up to the whole without it."""
    sampling = Sampling(max_completion_length=10, top_p=0.8, temperature=0.8)
    metrics = measured(Setting(sampling, dtype=BF16, is_rounded=True, is_moved=True, sleeps=True))

    assert "mismatch/engine_nats" not in metrics.values()
    parts = sum(metrics[f"mismatch/{part}_nats"] for part in PARTS if part != "engine")
    assert parts == pytest.approx(metrics["mismatch/total_nats"], abs=1e-6)
    assert "mismatch/engine_nats" in measured(replace(ALONE["engine"], sleeps=True)).values()


def test_a_truncated_token_was_likelier_than_it_seems():
    """Truncation only ever raises the probability of what is left: its mean is its mean absolute value."""
    metrics = measured(ALONE["truncation"])

    assert metrics["mismatch/truncation_nats"] == metrics["mismatch/truncation_abs_nats"]


def batch_of(rows: int, version: int = 0, temperature: float = 1.0) -> Batch:
    """Return rows of one token, that of row n being n, scored."""
    done = [Completion((n,), (-1.0,), (-1.0,), version, version, "length") for n in range(rows)]
    batch = collate([Group(Task("a", PROMPT, ""), tuple(map(rollout, done)))], temperature)
    return batch.with_fields(proximal=batch.behavior)


def test_rows_are_measured_in_turn_where_that_costs_a_pass():
    """A sixteenth of the rows, four at most and one at least, after which come the next; all where it costs nothing."""

    async def chosen(batch: Batch, step: int) -> list[int]:
        probe = DecomposedMismatch(LocalEngine(tiny_model()), learner_of(tiny_model()))
        return [int(batch.tokens[row, len(PROMPT)]) for row in probe._rows(batch, step)]

    assert asyncio.run(chosen(batch_of(128), 0)) == list(range(128))
    assert asyncio.run(chosen(batch_of(128, temperature=0.5), 0)) == [0, 1, 2, 3]
    assert asyncio.run(chosen(batch_of(128, version=7), 1)) == [4, 5, 6, 7]
    assert asyncio.run(chosen(batch_of(40, temperature=0.5), 3)) == [6, 7]
    assert asyncio.run(chosen(batch_of(3, temperature=0.5), 4)) == [1]
    assert asyncio.run(chosen(batch_of(128).with_fields(proximal=None), 0)) == [0, 1, 2, 3]


def test_a_batch_without_a_trained_token_is_not_measured():
    """There is nothing to divide by."""
    batch = batch_of(2)
    nothing = batch.with_fields(mask=batch.mask & False)
    probe = DecomposedMismatch(LocalEngine(tiny_model()), learner_of(tiny_model()))

    assert list(asyncio.run(probe.measure(nothing, 0))) == []


def test_an_average_of_weights_is_no_part_of_the_mismatch():
    """Where the proximal policy is an average, the parts are measured to the weights that are trained."""

    async def body() -> Metrics:
        model = tiny_model()
        plan = LearnerConfig(precision="fp32")
        learner = TorchLearner(model, plan, steps=9, proximal=EmaProximal())
        move(model)
        engine = LocalEngine(model)
        await engine.load(learner.snapshot())
        answers = await engine.generate(PROMPT, range(8), Sampling(max_completion_length=4))
        batch = collate([Group(Task("a", PROMPT, ""), tuple(map(rollout, answers)))], 1.0)
        batch = (await learner.score(batch, {"proximal"})).into(batch)
        assert float((batch.proximal - batch.behavior)[batch.mask].abs().max()) > 0.01
        metrics = await DecomposedMismatch(engine, learner, is_averaged=True).measure(batch, 0)
        await engine.close()
        return metrics

    assert asyncio.run(body())["mismatch/total_abs_nats"] < 1e-6
