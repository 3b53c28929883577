import math
from dataclasses import replace

import pytest
import torch
from tests.rollouts.timed import TimedEngine, stream_of, train, virtually

from gnomon.algorithms.presets import GRPO
from gnomon.core.metrics import Mean, Metrics
from gnomon.core.types import GIVEN, Batch, Grade, Group, Rollout, Task
from gnomon.diagnosis.doctor import Doctor
from gnomon.diagnosis.text_metrics import measure_answers
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.metrics import STOPPED, measure_round, measure_waste
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch
from gnomon.training.staleness_filter import EssFilter


def answer(reward: float | None, tokens: int, stop: str = "stop") -> Rollout:
    zeros = (-1.0,) * tokens
    grade = Grade(reward) if reward is not None else Grade(None, error="no answer")
    return Rollout(
        task_id="t", prompt=(1,), response=(2,) * tokens, mask=(True,) * tokens, logprobs=zeros, full_logprobs=zeros,
        text="", grade=grade, oldest_version=0, newest_version=0, stop=stop,
    )  # fmt: skip


def group(*rollouts: Rollout) -> Group:
    return Group(Task("t", (1,), "question"), rollouts)


def test_every_cause_is_counted_once_and_they_add_up():
    """What becomes of 100 tokens, by hand.

    Trained groups hold 10 (equal), 8 (error), 6 (cut off), 4 (advantage 0) and 33 that push: 61. The mask keeps
    10 + 4 + 33 = 47 of them, and a fraction of 6/47 of these was stopped: 6. Then 27 are trained on of
    61 + 12 + 7 + 9 + 11 = 100.
    """
    trained = (
        group(answer(1.0, 5), answer(1.0, 5)),
        group(answer(1.0, 16), answer(0.0, 17), answer(None, 8), answer(0.0, 6, "length"), answer(0.5, 4)),
    )
    refused = (group(answer(1.0, 6), answer(0.0, 6)), group(answer(0.0, 3), answer(0.0, 4)))
    finished = RolloutBatch(0, trained, refused, RolloutTimer(), (group(answer(1.0, 9)),), (group(answer(0.0, 11)),))
    batch = collate(trained, 1.0)
    mask = batch.mask & ~batch.is_truncated[:, None]
    advantages = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0, -1.0, 0.0])[:, None] * mask
    prepared = batch.with_fields(mask=mask, advantages=advantages)

    measured = measure_waste(finished, prepared, Metrics.of({STOPPED: Mean(6, 47)}))

    parts = {"degenerate": 17, "zero_advantage": 4, "clipped": 6, "truncated": 6, "errored": 8}
    parts |= {"refused": 12, "surplus": 9, "off_policy": 11}
    assert {name: measured[f"waste/{name}_fraction"] for name in parts} == pytest.approx(
        {name: count / 100 for name, count in parts.items()}
    )
    assert measured["tokens/wasted_fraction"] == pytest.approx(sum(parts.values()) / 100)
    counts = {"trained": 27, "idle": 26, "failed": 8, "refused": 19, "surplus": 9, "distrusted": 11}
    assert {name: measured[f"tokens/{name}"] for name in counts} == counts


def test_a_group_of_one_is_not_degenerate():
    """A lone answer whose reward is its baseline has nobody to be equal to: its advantage is zero."""
    alone = (group(answer(1.0, 4)),)
    batch = collate(alone, 1.0)
    prepared = batch.with_fields(advantages=torch.zeros(batch.mask.shape))

    measured = measure_waste(RolloutBatch(0, alone, (), RolloutTimer()), prepared, Metrics())

    assert (measured["waste/zero_advantage_fraction"], measured["waste/degenerate_fraction"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("rollouts", "is_masked", "cause"),
    [
        ((answer(None, 4, "length"), answer(None, 4)), True, "errored"),
        ((answer(1.0, 4, "length"), answer(1.0, 4, "length")), True, "truncated"),
        ((answer(1.0, 4, "length"), answer(1.0, 4, "length")), False, "degenerate"),
        ((answer(1.0, 4), answer(0.0, 4)), True, "zero_advantage"),
    ],
    ids=["error before the rest", "cut off before equal", "cut off but not masked", "no other reason"],
)
def test_of_several_causes_in_a_trained_group_the_first_counts(
    rollouts: tuple[Rollout, ...], is_masked: bool, cause: str
):
    """No reward, then cut off and masked, then all rewards equal, then an advantage of 0, then no slope."""
    trained = (group(*rollouts),)
    batch = collate(trained, 1.0)
    mask = batch.mask & ~batch.is_truncated[:, None] if is_masked else batch.mask
    prepared = batch.with_fields(mask=mask, advantages=torch.zeros(batch.mask.shape))

    assert causes(RolloutBatch(0, trained, (), RolloutTimer()), prepared) == {cause: 1.0}


def causes(finished: RolloutBatch, prepared: Batch) -> dict[str, float]:
    """Return the causes that took any token, with their shares."""
    measured = measure_waste(finished, prepared, Metrics())
    shares = {name: measured[name] for name in set(measured) if name.startswith("waste/")}
    return {name.removeprefix("waste/").removesuffix("_fraction"): share for name, share in shares.items() if share}


def test_the_cause_of_a_group_goes_before_those_of_its_rollouts():
    """Groups of errors and of equal rewards that were late or no longer trusted are that; only a filter's are told
    apart by their rewards."""
    spoiled = group(answer(None, 1), answer(1.0, 1), answer(1.0, 1))
    trained = (group(answer(1.0, 2), answer(0.0, 2)),)
    batch = collate(trained, 1.0).with_fields(advantages=torch.ones(2, 2))

    assert causes(RolloutBatch(0, trained, (), RolloutTimer(), (spoiled,)), batch) == {"surplus": pytest.approx(3 / 7)}
    assert causes(RolloutBatch(0, trained, (), RolloutTimer(), (), (spoiled,)), batch) == {
        "off_policy": pytest.approx(3 / 7)
    }
    assert causes(RolloutBatch(0, trained, (spoiled,), RolloutTimer()), batch) == {"degenerate": pytest.approx(3 / 7)}


def test_what_a_stream_finishes_too_late_is_surplus():
    """Two slow prompts end together where one place is left: one of two tokens is wasted, as surplus."""
    slow = UniformCurriculum(1000, seed=0).take(2)
    engine = TimedEngine(lambda index, key: 2.5 if index in slow else 0.5)
    stream = stream_of(engine, 1, max_staleness=2, stragglers="drop")
    finished = virtually(train(stream, engine, 3))[2]
    # Of the trained group's shape: the engine's tokens are keys, which no tensor holds.
    batch = collate((group(answer(1.0, 1)),), 1.0)

    assert causes(finished, batch.with_fields(advantages=torch.ones(batch.mask.shape)))["surplus"] == 0.5


def test_what_filter_removes_is_off_policy():
    """Weights 1, 1 and 9 a token: the third group goes, and with it 2 of 6 tokens."""
    groups = tuple(group(answer(1.0, 2)) for _ in range(3))
    batch = collate(groups, 1.0)
    logs = torch.tensor([0.0, 0.0, math.log(9.0)])
    scored = batch.with_fields(proximal=batch.behavior + logs[:, None])
    stream = stream_of(TimedEngine(lambda *_: 0.0), 1, max_staleness=4)
    left, rest, _ = EssFilter(0.5, stream, GRPO).apply(RolloutBatch(0, groups, (), RolloutTimer()), scored, version=5)

    assert causes(left, rest.with_fields(advantages=torch.ones(rest.mask.shape))) == {
        "off_policy": pytest.approx(1 / 3)
    }


@pytest.mark.parametrize(("reward", "told"), [(0.0, "zero"), (1.0, "best")])
def test_a_demonstration_hides_no_group_of_equal_answers(reward: float, told: str):
    """Seven answers beside one that was given: all wrong is all wrong, though it is right; and it copies nothing."""
    shown = replace(answer(1.0, 3), oldest_version=GIVEN, newest_version=GIVEN, logprobs=(0.0,) * 3, response=(7, 7, 7))
    groups = tuple(group(*(answer(reward, 4 + n) for n in range(7)), shown) for _ in range(2))
    measured = measure_round(RolloutBatch(0, groups, (), RolloutTimer()), 0) + measure_answers(groups)

    assert measured[f"rollout/all_equal_{told}_fraction"] == 1
    assert measured["rollout/duplicate_pair_expected_fraction"] < 0.01
    assert measured["rollout/all_right_expected_fraction"] == reward
    alone = tuple(group(*each.rollouts[:7]) for each in groups)
    assert measure_answers(groups).values() == measure_answers(alone).values()
    doctor = Doctor({"rollouts_per_step": 16, "algorithm": {"name": "luffy", "num_generations": 8}})
    for step in range(1, 10):
        doctor.observe(step, measured.values())
    assert {0.0: "all-wrong", 1.0: "all-right"}[reward] in {finding.rule for finding in doctor.findings}
