import pytest
import torch

from gnomon.metrics import Mean, Metrics
from gnomon.rollouts.collate import collate
from gnomon.rollouts.rollout import Stopwatch
from gnomon.rollouts.stream import Round
from gnomon.rollouts.waste import STOPPED, measure_waste
from gnomon.types import Grade, Group, Rollout, Task


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
    finished = Round(0, trained, refused, Stopwatch(), (group(answer(1.0, 9)),), (group(answer(0.0, 11)),))
    batch = collate(trained, 1.0)
    mask = batch.mask & ~batch.is_truncated[:, None]
    advantages = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0, -1.0, 0.0])[:, None] * mask
    prepared = batch.with_fields(mask=mask, advantages=advantages)

    measured = measure_waste(finished, prepared, Metrics.of({STOPPED: Mean(6, 47)}))

    parts = {"degenerate": 17, "zero_advantage": 4, "clipped": 6, "truncated": 6, "errored": 8}
    parts |= {"refused": 12, "surplus": 9, "stale": 11}
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

    measured = measure_waste(Round(0, alone, (), Stopwatch()), prepared, Metrics())

    assert (measured["waste/zero_advantage_fraction"], measured["waste/degenerate_fraction"]) == (1.0, 0.0)
