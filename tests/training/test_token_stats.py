"""A few answers of some steps are looked at token by token, and nothing else changes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.learner.conftest import build_batch, build_learner

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.records.reading import RunRecord
from gnomon.training.api import train_experiment
from gnomon.training.run_logger import SampledTokenProbe, representative_rows

SMALL = ("steps=3", "rollouts_per_step=32", "algorithm.num_generations=4", "task.size=60", "evaluation.before=false")


def test_the_telling_answers_are_taken_in_turn():
    """Of two questions, rewards 1 0 0 0 and 1 1 1 0: best, worst, furthest from its group's mean, first, and again.

    Best: row 0, then row 4 (of the other question). Worst: row 1, then 7. Furthest: rows 0 and 7 are 0.75 from 0.25 and
    0.75. In turn: 0, 1, (0), (0), then 4, 7, (7), (4); with room for three the first three of these.
    """
    batch = build_batch(groups=2, size=4)
    batch = batch.with_fields(
        rewards=torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]).double(), mask=torch.ones_like(batch.mask)
    )

    assert representative_rows(batch, 4) == [0, 1, 4, 7]
    assert representative_rows(batch, 3) == [0, 1, 4]
    assert representative_rows(batch, 8, one_in=4) == [0, 1]
    assert sorted(representative_rows(batch, 64)) == list(range(8))


def test_what_is_not_trained_is_not_looked_at():
    """Errors and masked answers are passed over; of nothing nothing is seen, and no pass is made."""
    batch = build_batch(groups=2, size=2)
    batch = batch.with_fields(is_graded=torch.tensor([False, True, True, True]))
    batch = batch.with_fields(mask=torch.ones_like(batch.mask) & torch.tensor([True, False, True, True])[:, None])

    assert sorted(representative_rows(batch, 8)) == [2, 3]
    nothing = batch.with_fields(is_graded=torch.zeros(4, dtype=torch.bool))
    assert asyncio.run(SampledTokenProbe(build_learner(), 8).probe(nothing, 0))[0] is None


def test_a_look_is_the_learners_own_distribution_and_changes_nothing():
    """Log-probabilities as `logprobs` has them; entropies as the loss sees them; state and counts are as before."""
    learner, batch = build_learner(), build_batch()
    before = learner.state()
    seen, metrics = asyncio.run(SampledTokenProbe(learner, 4, one_in=1).probe(batch, 8))
    assert seen is not None
    rows = batch.rows(seen.rows)
    own = asyncio.run(learner.logprobs(rows))
    logits = (learner._model(rows.tokens).logits / rows.temperature).log_softmax(-1).detach()
    place = rows.prompt_lengths[:, None] + torch.arange(rows.width) - 1
    wanted = -(logits.exp() * logits).sum(-1).gather(1, place.clamp(max=rows.tokens.shape[1] - 1))

    assert torch.equal(seen.logprobs, own)
    assert torch.allclose(seen.entropy, torch.where(rows.mask, wanted, 0.0), atol=1e-5)
    assert list(metrics) == ["time/glimpse_seconds"]
    after = learner.state()
    assert after.values == before.values
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())


def test_a_run_writes_it_down_and_learns_the_same(tmp_path: Path):
    """Four of 32 answers (an eighth) of the first step have entropies, none of the next two; weights and metrics are
    those of a run without, and the rollout files are otherwise the same.
    """
    rows = {}
    for name, tokens in (("with", 8), ("without", 0)):
        train_experiment(load("tiny", [*SMALL, f"records.tokens={tokens}"]), tmp_path / name)
        lines = (tmp_path / name / "rollouts" / "step-000001.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    looked = [row for row in rows["with"] if "entropy" in row]
    metrics = [RunRecord.of(tmp_path / name).metrics() for name in ("with", "without")]
    apart = [{k: v for k, v in row.items() if k not in ("entropy", "proximal")} for row in rows["with"]]

    assert len(looked) == 4
    assert all(len(row["entropy"]) == len(row["proximal"]) == len(row["response"]) for row in looked)
    assert all(0 <= value < 6 for row in looked for value in row["entropy"])
    assert apart == rows["without"]
    assert [row["loss/policy"] for row in metrics[0]] == [row["loss/policy"] for row in metrics[1]]
    assert ["time/glimpse_seconds" in row for row in metrics[0]] == [True, False, False]


def test_more_than_anybody_reads_is_refused():
    """64 answers a step at most, before anything is loaded."""
    with pytest.raises(ConfigError, match=r"records\.tokens must be in \[0, 64\], got 65"):
        load("tiny", ["records.tokens=65"])
    assert replace(load("tiny").experiment.records, tokens=0).tokens == 0
