"""Mixtures of experts in the learner: which routing is recorded, which is replayed, and what is said about it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import GRPO, Kl
from gnomon.core.types import Batch
from gnomon.learner.forward import trim
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.tiny import TinyConfig, tiny_model

ARCHITECTURES = ("qwen3_moe", "olmoe")
LAYERS, EXPERTS, CHOSEN = 2, 4, 2
NEEDS = {"proximal", "routing"}


def build(architecture: Any = "qwen3_moe", seed: int = 0) -> Any:
    return tiny_model(seed, TinyConfig(width=16, heads=2, kv_heads=1, architecture=architecture))


def run(work: Any) -> Any:
    return asyncio.run(work)


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.snapshot().tensors()}


def routed_elsewhere(batch: Batch) -> Batch:
    """The batch with experts that no router chose: 2 and 3 at even positions, 0 and 1 at odd ones."""
    even = (torch.arange(batch.tokens.shape[1]) % 2 == 0)[None, :, None, None].expand(len(batch), -1, LAYERS, CHOSEN)
    routing = torch.where(even, torch.tensor([2, 3]), torch.tensor([0, 1])).to(torch.int16)
    is_there = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    return batch.with_fields(routing=torch.where(is_there[:, :, None, None], routing, -1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("replays", ["proximal", "behavior"])
def test_on_unchanged_weights_the_ratio_is_one(architecture: str, replays: str, make_batch, make_learner):
    """R2 and R3: current less proximal is 0.0 for every token, although the forward pass is another one."""
    batch = make_batch()
    if replays == "behavior":
        batch = routed_elsewhere(batch)
    # One row a cut, so that both passes have the same shapes; the second learner does not know what the first scored.
    one, other = (make_learner(build(architecture), max_tokens_per_micro_batch=1) for _ in range(2))
    scored = run(one.score(batch, NEEDS if replays == "proximal" else {"proximal"})).into(batch)
    measured = run(other.update(GRPO.weigh(GRPO.prepare(scored)), GRPO, 0))

    assert scored.routing is not None
    assert scored.routing.dtype == torch.int16
    assert measured["learner/updates"] == 1
    assert measured["loss/drift_abs_nats"] == 0.0


def test_a_routing_is_replayed_and_not_only_carried(make_batch):
    """Under experts that no router chose the proximal policy is another one, and the reference stays as it is."""
    plan = LearnerConfig(max_tokens_per_micro_batch=40)
    learner = TorchLearner(build(), plan, steps=10, reference=build(seed=1))
    batch = make_batch()
    free = run(learner.score(batch, {"proximal", "reference"}))
    replayed = run(learner.score(routed_elsewhere(batch), {"proximal", "reference"}))

    assert float((free.proximal - replayed.proximal).abs()[batch.mask].mean()) > 1e-3
    assert torch.equal(free.reference, replayed.reference)
    assert free.routing is None


def test_routing_is_recorded_where_the_model_was_asked(make_batch, make_learner):
    """Every position that predicts a trained token has experts; a row without one has none; a dense model has none."""
    batch = make_batch()
    batch = batch.with_fields(mask=batch.mask & (torch.arange(len(batch)) != 1)[:, None])
    routing = run(make_learner(build()).score(batch, NEEDS)).routing
    rows, columns = batch.mask.nonzero(as_tuple=True)

    assert routing.shape == (*batch.tokens.shape, LAYERS, CHOSEN)
    assert bool((routing[rows, batch.prompt_lengths[rows] + columns - 1] >= 0).all())
    assert bool((routing[1] == -1).all())
    assert run(make_learner().score(batch, NEEDS)).routing is None


def test_after_an_update_the_metric_sees_what_replay_holds_still(make_batch, make_learner):
    """The first update finds no expert changed and no drift; the second finds some changed."""
    learner, algorithm = make_learner(build()), replace(GRPO, name="r2", routing="proximal")
    batch = make_batch()
    batch = run(learner.score(batch.with_fields(proximal=None), NEEDS)).into(batch)
    minibatch = algorithm.weigh(algorithm.prepare(batch))
    first, second = (run(learner.update(minibatch, algorithm, step)) for step in range(2))

    assert (first["routing/changed_fraction"], first["loss/kl_proximal_nats"]) == (0.0, 0.0)
    assert 0.0 < second["routing/changed_fraction"] < 1.0
    unknown = replace(minibatch, routing=None)
    assert "routing/changed_fraction" not in set(run(learner.update(unknown, algorithm, 2)))


def test_free_routers_are_watched_where_the_proximal_policy_is_scored_anyway(make_batch, make_learner):
    """Nothing is replayed, so experts change, and the metric counts them all the same."""
    learner = make_learner(build())
    batch = make_batch().with_fields(proximal=None)
    batch = run(learner.score(batch, {"proximal"})).into(batch)
    assert batch.routing is None
    minibatch = GRPO.weigh(GRPO.prepare(batch))
    first, second = (run(learner.update(minibatch, GRPO, step)) for step in range(2))

    assert (first["routing/changed_fraction"], first["loss/kl_proximal_nats"]) == (0.0, 0.0)
    assert 0.0 < second["routing/changed_fraction"] < 1.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuts_and_recomputation_change_no_update_under_replay(architecture: str, make_minibatch, make_learner):
    """One row at a time, all at once, and with layers computed again: the same new weights, to 1e-5."""
    minibatch = routed_elsewhere(make_minibatch(GRPO))

    def after(**plan: object) -> dict[str, Tensor]:
        learner = make_learner(build(architecture), **plan)
        run(learner.update(minibatch, GRPO, 0))
        return weights(learner)

    whole = after(max_tokens_per_micro_batch=10_000)
    found = [after(max_tokens_per_micro_batch=1), after(gradient_checkpointing=True)]
    free = make_learner(build(architecture))
    run(free.update(minibatch.with_fields(routing=None), GRPO, 0))

    for cut in found:
        assert all(torch.allclose(cut[name], whole[name], atol=1e-5) for name in whole)
    assert not all(torch.allclose(tensor, whole[name], atol=1e-4) for name, tensor in weights(free).items())


def test_a_cut_carries_its_routing(make_batch):
    """Rows and trimmed columns of the routing are those of the tokens."""
    batch = routed_elsewhere(make_batch())
    marked = batch.with_fields(routing=batch.tokens[:, :, None, None].expand(-1, -1, LAYERS, CHOSEN).to(torch.int16))
    cut = trim(marked.rows([4, 1]))

    assert torch.equal(cut.routing[:, :, 0, 0].long(), cut.tokens)
    assert cut.tokens.shape[1] < batch.tokens.shape[1] or int(cut.lengths.max()) == batch.tokens.shape[1]


def test_the_metric_sees_a_pass_that_the_update_goes_on_from(make_batch, make_learner):
    """R3: the same choices are compared, whether the first update computes its rows again or not."""
    batch = routed_elsewhere(make_batch()).with_fields(proximal=None)
    found = []
    for first in (None, {"proximal": torch.arange(len(batch))}):
        learner = make_learner(build())
        scored = run(learner.score(batch, {"proximal"}, first)).into(batch)
        measured = run(learner.update(GRPO.weigh(GRPO.prepare(scored)), GRPO, 0))
        found.append(measured.measures["routing/changed_fraction"])

    assert found[0] == found[1]
    assert 0 < found[0].value <= 1


def test_only_several_updates_need_the_proximal_routing():
    """With one update the current choice is that of the step's beginning, so nothing has to be recorded."""
    once = replace(GRPO, name="r2", routing="proximal")
    several = replace(once, updates=replace(GRPO.updates, minibatches=2))
    with_reference = replace(GRPO, regularizers=(Kl("reference", 0.1),), routing="behavior")

    assert "routing" not in once.needs
    assert several.needs >= NEEDS
    assert "routing" not in with_reference.needs


def test_a_step_under_replay_is_the_free_one_where_no_choice_changes(make_batch, make_learner):
    """Three updates that change no router's mind: with R2 the same new weights as without, to 1e-7."""
    several = replace(GRPO, updates=replace(GRPO.updates, epochs=3))
    slow = OptimizerConfig(learning_rate=1e-5, max_gradient_norm=float("inf"))
    found, changed = [], []
    for needs in (NEEDS, {"proximal"}):
        learner = make_learner(build(), optimizer=slow)
        before = weights(learner)
        batch = run(learner.score(make_batch().with_fields(proximal=None), needs)).into(make_batch())
        assert (batch.routing is None) == (needs != NEEDS)
        for minibatch in several.minibatches(several.prepare(batch), seed=0):
            changed.append(run(learner.update(minibatch, several, 0))["routing/changed_fraction"])
        found.append(weights(learner))

    assert changed == [0.0] * 6
    assert max(float((found[0][name] - before[name]).abs().max()) for name in before) > 1e-5
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in before) < 1e-7
