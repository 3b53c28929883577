"""The learner's update is the gradient of the whole minibatch, however it is computed."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gnomon.algorithms import CISPO, DR_GRPO, GRPO, GSPO, P3O, SPO, Algorithm, Entropy, Kl, LossInputs, Updates
from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import CheckpointError, ConfigError, LearnerError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.logprobs import TokenScorer
from gnomon.models.lora import adapt

WITH_ENTROPY = replace(GRPO, name="grpo-entropy", regularizers=(Entropy(0.1),))
WITH_REFERENCE = replace(GRPO, name="grpo-kl", regularizers=(Kl("reference", 0.1),))
# Its dead rows stay dead, yet their tokens belong to the statistics of the step.
WITHOUT_ESS_KL = replace(P3O, name="p3o-without-kl", regularizers=())
ALGORITHMS = [GRPO, DR_GRPO, GSPO, CISPO, P3O, SPO, WITH_ENTROPY, WITH_REFERENCE, WITHOUT_ESS_KL]
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)


def run(work: Any) -> Any:
    return asyncio.run(work)


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.snapshot().tensors()}


def updated(learner: TorchLearner, minibatch: Batch, algorithm: Algorithm) -> dict[str, Tensor]:
    run(learner.update(minibatch, algorithm, 0))
    return weights(learner)


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def is_identical(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


def plain_update(model: Any, batch: Batch, algorithm: Algorithm) -> dict[str, Tensor]:
    """One forward of the whole padded batch, every logit, one backward; then Adam's first step with epsilon 1."""
    policy = (model(input_ids=batch.tokens).logits / batch.temperature).log_softmax(-1)
    where = (batch.prompt_lengths[:, None] + torch.arange(batch.width)).clamp(max=batch.tokens.shape[1] - 1)
    predicted = policy[torch.arange(len(batch))[:, None], where - 1]
    chosen = predicted.gather(2, batch.tokens.gather(1, where)[:, :, None])[:, :, 0]
    entropy = -(predicted.exp() * predicted).sum(-1)
    statistics = algorithm.statistics(chosen, batch, entropy) if algorithm.reads_statistics else Statistics()
    algorithm.loss(chosen, entropy, batch, statistics).total.backward()
    return {
        name: (p - p.grad / (p.grad.abs() + 1)).detach() for name, p in model.named_parameters() if p.grad is not None
    }


@each_algorithm
def test_an_update_is_the_gradient_of_the_whole_minibatch(algorithm, make_model, make_learner, make_minibatch):
    """Cut, trimmed, sorted, dead rows left out, head in chunks: the gradient is that of the plain formula."""
    minibatch = make_minibatch(algorithm)

    found = updated(make_learner(), minibatch, algorithm)

    assert_same(found, plain_update(make_model(), minibatch, algorithm), atol=2e-6)


@each_algorithm
def test_the_micro_batch_budget_changes_nothing(algorithm, make_learner, make_minibatch):
    """One row a cut, a few, all at once: the same weights, and the same metrics."""
    minibatch = make_minibatch(algorithm)
    learners = [make_learner(max_tokens_per_micro_batch=budget) for budget in (1, 25, 10_000)]
    metrics = [run(learner.update(minibatch, algorithm, 0)).values() for learner in learners]

    assert_same(weights(learners[0]), weights(learners[2]))
    assert_same(weights(learners[1]), weights(learners[2]))
    varying = ("tokens/computed", "learner/computed_per_token")
    for name in metrics[0].keys() - set(varying):
        assert metrics[0][name] == pytest.approx(metrics[2][name], rel=1e-4, abs=1e-5), name


@given(seed=st.integers(0, 99), order=st.permutations(range(6)), more=st.integers(0, 4))
@settings(max_examples=15)
def test_row_order_and_padding_change_nothing(seed, order, more, make_learner, make_minibatch):
    """Rows in any order, with extra columns of any content: the same weights."""
    minibatch = make_minibatch(GRPO, seed)
    wanted = updated(make_learner(), minibatch, GRPO)

    found = updated(make_learner(), widen(minibatch.rows(order), more), GRPO)

    assert_same(found, wanted)


def widen(batch: Batch, more: int) -> Batch:
    """Put ``more`` columns behind every row: tokens of 7, masked, not a number wherever a number may stand."""

    def wider(tensor: Tensor, value: float) -> Tensor:
        return torch.cat([tensor, torch.full((len(batch), more), value, dtype=tensor.dtype)], 1)

    return batch.with_fields(
        tokens=wider(batch.tokens, 7),
        mask=wider(batch.mask, 0),
        behavior=wider(batch.behavior, float("nan")),
        full_behavior=wider(batch.full_behavior, float("nan")),
        proximal=wider(batch.proximal, float("nan")),
        reference=wider(batch.reference, float("nan")),
        sharpened=wider(batch.sharpened, float("nan")),
        advantages=wider(batch.advantages, 0),
        weights=wider(batch.weights, 0),
        own_weights={name: wider(own, 0) for name, own in batch.own_weights.items()},
    )


def test_dead_rows_are_not_computed_and_change_no_bit(make_learner, make_minibatch):
    """The degenerate group's two rows cost no token; without them the minibatch has the same update."""
    minibatch = make_minibatch(GRPO)
    live = GRPO.live_rows(minibatch)
    whole, cut = make_learner(), make_learner()

    metrics = run(whole.update(minibatch, GRPO, 0))
    run(cut.update(minibatch.rows(live.nonzero()[:, 0]), GRPO, 0))

    assert int(live.sum()) == 4
    real = metrics["tokens/computed"] / metrics["learner/computed_per_token"]
    assert real == pytest.approx(int(minibatch.lengths[live].sum()))
    assert is_identical(weights(whole), weights(cut))


def test_gradient_checkpointing_changes_no_bit(make_model, make_learner, make_minibatch):
    """Layers computed again give the same gradient, and the module is left as it was."""
    minibatch, model = make_minibatch(WITH_ENTROPY), make_model()
    learner = make_learner(model, gradient_checkpointing=True)

    assert is_identical(updated(learner, minibatch, WITH_ENTROPY), updated(make_learner(), minibatch, WITH_ENTROPY))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_update_after_scoring_has_ratios_of_exactly_one(dtype, make_model, make_learner, make_batch):
    """Proximal and current are one policy then: no drift, nothing clipped. After an update there is some."""
    algorithm = replace(GRPO, updates=Updates(epochs=2))
    learner = make_learner(make_model(dtype=dtype))
    batch = make_batch()
    batch = algorithm.prepare(run(learner.score(batch, algorithm.needs)).into(batch))

    first, second = (run(learner.update(m, algorithm, 0)) for m in algorithm.minibatches(batch, 0))

    assert first["loss/drift_abs_nats"] == 0
    assert first["loss/clipped_fraction"] == 0
    assert second["loss/drift_abs_nats"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_do_not_depend_on_the_cut(dtype, make_model, make_learner, make_batch):
    """Whatever the micro-batches, a row's log-probabilities agree: to rounding of the precision."""
    batch = make_batch()
    results = [
        run(make_learner(make_model(dtype=dtype), max_tokens_per_micro_batch=budget).score(batch, {"proximal"}))
        for budget in (1, 10_000)
    ]
    alone = results[0].proximal

    assert alone.dtype == torch.float32
    assert not alone[~batch.mask].any()
    assert (alone[batch.mask] < 0).all()
    torch.testing.assert_close(results[1].proximal, alone, rtol=0, atol=2e-6 if dtype == torch.float32 else 0.05)


def test_scores_are_those_of_the_scorer(make_model, make_learner, make_batch):
    """`score` gives what the model says, row by row."""
    batch = make_batch()
    scorer = TokenScorer(make_model())
    wanted = scorer(batch.tokens, batch.prompt_lengths, batch.mask, batch.temperature).logprobs

    found = run(make_learner().score(batch, {"proximal"}))

    torch.testing.assert_close(found.proximal, wanted.detach(), rtol=0, atol=2e-6)
    assert found.reference is found.values is None


def test_half_the_temperature_says_how_the_squares_add_up(make_model, make_learner, make_batch):
    """p^2 over the probability at half the temperature is the sum of squares of the whole distribution."""
    batch = make_batch()
    found = run(make_learner().score(batch, {"proximal", "sharpened"}))
    logits = make_model()(input_ids=batch.tokens).logits.double() / batch.temperature
    squares = logits.softmax(-1).square().sum(-1)
    rows, columns = batch.mask.nonzero(as_tuple=True)

    sums = (2 * found.proximal - found.sharpened).exp()[batch.mask]
    torch.testing.assert_close(
        sums.double(), squares[rows, batch.prompt_lengths[rows] + columns - 1].detach(), rtol=2e-5, atol=0
    )
    assert not found.sharpened[~batch.mask].any()


def test_no_live_row_skips_the_optimizer(make_learner, make_minibatch):
    """Every reward equal: the state is byte for byte what it was, and the skip is counted."""
    learner = make_learner()
    run(learner.update(make_minibatch(GRPO), GRPO, 0))
    minibatch = make_minibatch(GRPO)
    before = learner.state()

    metrics = run(learner.update(minibatch.with_fields(advantages=0 * minibatch.advantages), GRPO, 0))

    assert metrics["learner/skipped_updates"] == 1
    assert metrics["learner/updates"] == 0
    assert metrics["tokens/computed"] == 0
    assert is_identical(learner.state().tensors, before.tensors)


@dataclass(frozen=True)
class Kink:
    """sqrt(|0 current|): zero, with a slope that is not a number."""

    name: str = "kink"
    needs: frozenset[str] = frozenset()

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        return default

    def __call__(self, view: LossInputs) -> tuple[Tensor, Metrics]:
        return (0 * view.current).abs().sqrt(), Metrics()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(bad, dtype, make_model, make_learner, make_minibatch):
    """A loss or gradient of nan raises; weights, masters, moments and the next update are as if it never was."""
    learners = [make_learner(make_model(dtype=dtype)) for _ in range(2)]
    good = make_minibatch(GRPO)
    for learner in learners:
        run(learner.update(good, GRPO, 0))
    before, module = learners[0].state(), weights(learners[0])
    algorithm = GRPO if bad == "loss" else replace(GRPO, regularizers=(Kink(),))
    minibatch = make_minibatch(algorithm)
    if bad == "loss":
        # The first micro-batch is fine, the last one is not: its gradients must go as well.
        shortest = int(torch.where(GRPO.live_rows(minibatch), minibatch.lengths, 99).argmin())
        minibatch.advantages[shortest] = torch.where(minibatch.mask[shortest], float("nan"), 0.0)

    with pytest.raises(LearnerError, match=f"the {bad} is not finite"):
        run(learners[0].update(minibatch, algorithm, 0))

    assert is_identical(learners[0].state().tensors, before.tensors)
    assert is_identical(weights(learners[0]), module)
    assert is_identical(updated(learners[0], good, GRPO), updated(learners[1], good, GRPO))


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return adapt(model, LoraConfig(rank=2, alpha=4))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "lora"])
def test_a_restored_learner_goes_on_bit_for_bit(kind, make_model, make_batch):
    """Two steps, state, two more steps; another learner restored from the state makes the same two steps."""
    algorithm = replace(SPO, updates=Updates(minibatches=2))
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    plan = LearnerConfig(OptimizerConfig(learning_rate=1e-2, schedule="cosine", weight_decay=0.1, warmup_steps=2))

    def build(seed: int) -> TorchLearner:
        # With adapters the base is no part of the state, so it must be the same one.
        model = make_model(0 if kind == "lora" else seed, dtype)
        return TorchLearner(adapted(model) if kind == "lora" else model, plan, steps=5)

    def walk(learner: TorchLearner, steps: range) -> None:
        for step in steps:
            batch = make_batch(step)
            batch = algorithm.prepare(run(learner.score(batch, algorithm.needs)).into(batch))
            for minibatch in algorithm.minibatches(batch, step):
                run(learner.update(minibatch, algorithm, step))
            learner.advance()

    learner, resumed = build(0), build(9)
    walk(learner, range(2))
    state = learner.state()
    walk(learner, range(2, 4))
    walk(resumed, range(1))
    resumed.restore(state)
    assert resumed.version == 2
    walk(resumed, range(resumed.version, 4))

    assert resumed.version == learner.version == 4
    assert is_identical(resumed.state().tensors, learner.state().tensors)
    assert is_identical(weights(resumed), weights(learner))
    assert not is_identical(learner.state().tensors, state.tensors)


def test_moments_are_part_of_the_state(make_model, make_minibatch):
    """A learner restored with its moments set to zero makes another update."""
    plan = LearnerConfig(OptimizerConfig(learning_rate=1e-2))
    learner, other = (TorchLearner(make_model(), plan, steps=9) for _ in range(2))
    run(learner.update(make_minibatch(GRPO), GRPO, 0))
    state = learner.state()
    without = {n: torch.zeros_like(t) if n.startswith("moment1/") else t for n, t in state.tensors.items()}
    other.restore(replace(state, tensors=without))
    minibatch = make_minibatch(GRPO, 1)

    assert not is_identical(updated(other, minibatch, GRPO), updated(learner, minibatch, GRPO))


def test_adapters_alone_are_trained_and_saved(make_model, make_learner, make_minibatch):
    """Base weights keep every bit; the state holds adapters only; the snapshot has the plain model's names."""
    model = adapted(make_model())
    learner = make_learner(model)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}

    metrics = run(learner.update(make_minibatch(GRPO), GRPO, 0))

    now = dict(model.named_parameters())
    assert metrics["learner/gradient_norm"] > 0
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    assert all("lora_" in name for name in learner.state().tensors if name.startswith("master/"))
    assert weights(learner).keys() == weights(make_learner()).keys()


def test_the_reference_of_adapters_is_their_base(make_model, make_learner, make_minibatch):
    """Without a copy: the reference is the model without adapters, and scoring it leaves them on."""
    learner = make_learner(adapted(make_model()))
    minibatch = make_minibatch(GRPO)
    run(learner.update(minibatch, GRPO, 0))

    scores = run(learner.score(minibatch, {"proximal", "reference"}))
    base = run(make_learner().score(minibatch, {"proximal"})).proximal

    torch.testing.assert_close(scores.reference, base, rtol=0, atol=1e-6)
    assert (scores.proximal - base).abs().max() > 1e-3
    run(learner.update(minibatch, GRPO, 0))


def test_the_reference_stays_where_training_began(make_model, make_minibatch):
    """A frozen copy scores the same before and after an update."""
    plan = LearnerConfig(OptimizerConfig(learning_rate=0.1))
    learner = TorchLearner(make_model(), plan, steps=1, reference=make_model())
    minibatch = make_minibatch(GRPO)
    before = run(learner.score(minibatch, {"reference", "proximal"}))
    run(learner.update(minibatch, GRPO, 0))
    after = run(learner.score(minibatch, {"reference", "proximal"}))

    assert torch.equal(before.reference, before.proximal)
    assert torch.equal(after.reference, before.reference)
    assert not torch.equal(after.proximal, before.proximal)


@pytest.mark.parametrize(("need", "message"), [("reference", "needs a reference policy"), ("values", "has no critic")])
def test_what_cannot_be_scored_is_said(need, message, make_learner, make_batch):
    """Scores for which there is no model are an error, not zeros."""
    with pytest.raises(ConfigError, match=message):
        run(make_learner().score(make_batch(), {need}))


@pytest.mark.parametrize("changed", ["base", "reference"])
def test_a_state_on_other_frozen_weights_is_refused(changed, make_model):
    """Adapters mean nothing on another base, nor a KL to another reference."""

    def build(seed: int) -> TorchLearner:
        if changed == "base":
            return TorchLearner(adapted(make_model(seed)), LearnerConfig(), steps=1)
        return TorchLearner(make_model(), LearnerConfig(), steps=1, reference=make_model(seed))

    state = build(0).state()
    build(0).restore(state)
    with pytest.raises(CheckpointError, match="made on other frozen weights"):
        build(1).restore(state)


def test_metrics_name_what_an_update_did(make_learner, make_minibatch):
    """Loss parts, norm, rate, work; they merge over updates as means and sums."""
    learner = make_learner()
    metrics = [run(learner.update(make_minibatch(WITH_ENTROPY, seed), WITH_ENTROPY, 3)) for seed in (0, 1)]
    merged = metrics[0] + metrics[1]

    for name in ("loss/policy", "loss/entropy", "learner/gradient_norm"):
        assert merged[name] == pytest.approx((metrics[0][name] + metrics[1][name]) / 2)
    assert merged["learner/updates"] == 2
    assert merged["learner/skipped_updates"] == 0
    assert merged["learner/learning_rate"] == 1.0
    assert merged["tokens/computed"] == metrics[0]["tokens/computed"] + metrics[1]["tokens/computed"]
    assert merged["learner/computed_per_token"] > 0


def test_tokens_of_scoring_are_counted_with_the_next_update(make_learner, make_minibatch):
    """One row a cut has no padding: scoring adds every position that predicts a token, once."""
    minibatch = make_minibatch(GRPO)
    learner, other = (make_learner(max_tokens_per_micro_batch=1) for _ in range(2))
    run(learner.score(minibatch, {"proximal"}))

    with_scoring = run(learner.update(minibatch, GRPO, 0))["tokens/computed"]
    without = run(other.update(minibatch, GRPO, 0))["tokens/computed"]

    assert with_scoring - without == int((minibatch.lengths - 1).sum())


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_statistic_of_a_whole_update_costs_a_second_pass_of_all_cuts_but_the_first(
    budget, make_learner, make_minibatch
):
    """One row a cut: all rows but the longest twice. All rows in one cut: none."""
    minibatch = make_minibatch(P3O)
    computed = {}
    for algorithm in (P3O, replace(P3O, name="p3o-lagged", scope="lagged")):
        learner = make_learner(max_tokens_per_micro_batch=budget)
        computed[algorithm.scope] = run(learner.update(minibatch, algorithm, 0))["tokens/computed"]

    predicting = minibatch.lengths - 1
    again = int(predicting.sum() - predicting.max()) if budget == 1 else 0

    assert computed["step"] - computed["lagged"] == again


def test_work_is_done_off_the_event_loop(make_model, make_learner, make_minibatch):
    """While an update runs the loop goes on, and every call runs in one and the same other thread."""
    model, seen = make_model(), set()
    learner = make_learner(model)
    model.model.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
    ticks = []

    async def main() -> None:
        update = asyncio.create_task(learner.update(make_minibatch(GRPO), GRPO, 0))
        while not update.done():
            ticks.append(1)
            await asyncio.sleep(0)
        await learner.score(make_minibatch(GRPO), {"proximal"})

    run(main())

    assert len(ticks) > 2
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_versions_count_training_steps(make_model, make_learner):
    """A snapshot carries the number of finished steps, and its tensors are the module's own."""
    model = make_model()
    learner = make_learner(model)
    first = learner.snapshot()
    learner.advance()

    assert (first.version, learner.snapshot().version, learner.version) == (0, 1, 1)
    assert dict(first.tensors())["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_written_model_says_what_the_learner_says(is_adapted, tmp_path, make_model, make_learner, make_minibatch):
    """Loaded by transformers from the folder, it gives the same log-probabilities, adapters merged."""
    learner = make_learner(adapted(make_model()) if is_adapted else make_model())
    minibatch = make_minibatch(GRPO)
    run(learner.update(minibatch, GRPO, 0))

    learner.write_model(tmp_path)
    loaded = make_learner(AutoModelForCausalLM.from_pretrained(tmp_path))

    wanted, found = (run(each.score(minibatch, {"proximal"})).proximal for each in (learner, loaded))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch must be at least 1 token, got 0"),
        ({"precision": "fp16"}, "must be auto, fp32 or bf16, got 'fp16'"),
    ],
)
def test_a_learner_plan_that_cannot_be_meant_is_refused(setting, message):
    """The message names the key and the value."""
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(**setting)


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_a_rate_is_a_factor_on_the_learning_rate_of_one_update(rate, make_model, make_minibatch):
    """The weights are those of a plan with another learning rate; the update after it has the plan's own again."""

    def build(learning_rate: float) -> TorchLearner:
        return TorchLearner(make_model(), LearnerConfig(OptimizerConfig(learning_rate=learning_rate)), steps=10)

    learner, other = build(1e-3), build(1e-3 * rate)
    metrics = run(learner.update(make_minibatch(GRPO), GRPO, 0, rate=rate))
    run(other.update(make_minibatch(GRPO), GRPO, 0))

    assert metrics["learner/learning_rate"] == pytest.approx(1e-3 * rate)
    assert_same(weights(learner), weights(other), atol=1e-7)
    assert run(learner.update(make_minibatch(GRPO), GRPO, 0))["learner/learning_rate"] == 1e-3
