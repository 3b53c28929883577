"""One step of the critic is the gradient of the whole minibatch, and moves nothing that it should not."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.algorithms import GRPO, P3O, PPO, CriticConfig, EmaProximal, Pretraining, Updates
from gnomon.core.errors import CheckpointError, ConfigError, LearnerError
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.critic import CausalCritic, ValueScorer, head_for, load_critic
from gnomon.models.lora import adapt

# One minibatch, the policy's learning rate, no clip: the gradient can be told from the new weights (`REVEALING`).
PLAIN = CriticConfig(learning_rate_ratio=1.0)
TAUGHT = replace(PPO, name="ppo-plain", critic=PLAIN, updates=Updates())
SHARED = replace(TAUGHT, critic=replace(PLAIN, trunk="shared"))
FROZEN = replace(SHARED, critic=replace(SHARED.critic, pretraining=Pretraining(frozen_trunk=True)))
SMOOTH = LearnerConfig(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), max_tokens_per_micro_batch=40)


def run(work: Any) -> Any:
    return asyncio.run(work)


def is_identical(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def build_critic(model: nn.Module, scale: float = 1.0) -> CausalCritic:
    """A value model of the tests' tiny shape; with a head of zeros a trunk has no gradient, so it gets another."""
    critic = CausalCritic(model, head_for(model)).eval()
    nn.init.normal_(critic.score.weight, std=scale, generator=torch.Generator().manual_seed(3))
    return critic


def valued(batch: Batch, **changes: Any) -> Batch:
    """The batch with values, returns and weights for one step of a critic."""
    generator = torch.Generator().manual_seed(8)
    values = torch.where(batch.mask, torch.randn(batch.mask.shape, generator=generator), 0.0)
    batch = batch.with_fields(values=values, bootstrap=torch.zeros(len(batch)), **changes)
    return TAUGHT.value_minibatches(TAUGHT.prepare(batch), 0)[0]


@pytest.fixture
def minibatch(make_batch) -> Batch:
    """One optimizer step of a critic."""
    return valued(make_batch())


def fitted(model: nn.Module, minibatch: Batch, algorithm=TAUGHT, budget: int = 40, scale: float = 1.0) -> Any:
    """A critic after one step with a learning rate of 1 and Adam's epsilon of 1, and its metrics."""
    critic = build_critic(model, scale)
    optimizer = OptimizerConfig(learning_rate=1.0, epsilon=1.0, max_gradient_norm=float("inf"))
    learner = TorchLearner(model, LearnerConfig(optimizer, max_tokens_per_micro_batch=budget), 10, critic=critic)
    return critic, run(learner.fit(minibatch, algorithm, 0))


def assert_near(found: nn.Module, wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in copied(found).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_values_are_those_of_the_scorer(make_model, make_learner, make_batch):
    """`score` gives values and bootstrap, row by row, without a gradient; nothing else is scored."""
    batch, critic = make_batch(), build_critic(make_model(4))
    learner = TorchLearner(make_model(), SMOOTH, 10, critic=critic)

    found = run(learner.score(batch, {"values"}))
    wanted = ValueScorer(critic, critic.score)(batch.tokens, batch.prompt_lengths, batch.lengths, batch.mask)

    torch.testing.assert_close(found.values, wanted.values.detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(found.bootstrap, wanted.bootstrap.detach(), rtol=0, atol=2e-6)
    assert not found.values.requires_grad
    assert found.proximal is found.reference is None


@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_fit_is_the_gradient_of_the_whole_minibatch(clip, make_model, minibatch):
    """Cut, trimmed and packed: Adam's first step is that of half the mean squared error over all tokens at once."""
    algorithm = replace(TAUGHT, critic=replace(PLAIN, clip=clip))
    critic = build_critic(make_model(4))
    hidden = critic.get_decoder()(input_ids=minibatch.tokens).last_hidden_state
    where = (minibatch.prompt_lengths[:, None] + torch.arange(minibatch.width) - 1).clamp(max=hidden.shape[1] - 1)
    values = critic.score(hidden)[torch.arange(len(minibatch))[:, None], where, 0]
    error = (values - minibatch.returns)[minibatch.mask].square()
    if clip is not None:
        bounded = minibatch.values + (values - minibatch.values).clamp(-clip, clip)
        error = error.maximum((bounded - minibatch.returns)[minibatch.mask].square())
    (error.mean() / 2).backward()
    wanted = {n: (p - p.grad / (p.grad.abs() + 1)).detach() for n, p in critic.named_parameters()}

    found, metrics = fitted(make_model(4), minibatch, algorithm)

    assert_near(found, wanted)
    assert metrics["critic/loss"] == pytest.approx(float(error.mean().detach()) / 2, rel=1e-5)


def test_micro_batches_order_and_padding_change_nothing(make_model, minibatch):
    """A token at a time, all at once, rows reversed: the same weights and metrics."""
    wanted, expected = fitted(make_model(4), minibatch)

    for batch, budget in ((minibatch, 1), (minibatch, 10_000), (minibatch.rows([5, 4, 3, 2, 1, 0]), 40)):
        found, metrics = fitted(make_model(4), batch, budget=budget)
        assert_near(found, copied(wanted))
        for name in ("critic/loss", "critic/gradient_norm", "critic/clipped_fraction"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4)


def test_a_critic_learns_the_returns(make_model, make_batch):
    """Thirty steps on one batch: values come near the returns, and the loss near zero."""
    critic, batch = build_critic(make_model(4), scale=0.0), make_batch()
    learner = TorchLearner(make_model(), LearnerConfig(OptimizerConfig(learning_rate=1e-2)), 10, critic=critic)
    minibatch = valued(batch)
    assert not run(learner.score(batch, {"values"})).values.any()

    losses = [run(learner.fit(minibatch, TAUGHT, 0))["critic/loss"] for _ in range(30)]

    first = float(minibatch.returns[minibatch.mask].square().mean()) / 2
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert losses[-1] < first / 20
    error = (run(learner.score(batch, {"values"})).values - minibatch.returns)[batch.mask]
    assert float(error.abs().mean()) < 0.2


def test_one_sided_lessons_leave_high_values_alone(make_model, minibatch):
    """Returns below every value: nothing to learn when only what is too low is wrong."""
    low = minibatch.with_fields(returns=torch.full_like(minibatch.returns, -1e3))
    critic = build_critic(make_model(4))
    learner = TorchLearner(make_model(), LearnerConfig(), 10, critic=critic)
    before = copied(critic)

    metrics = run(learner.fit(low, TAUGHT, 0, one_sided=True))

    assert metrics["critic/gradient_norm"] == 0
    assert is_identical(copied(critic), before)
    assert run(learner.fit(low, TAUGHT, 0))["critic/gradient_norm"] > 0


@pytest.mark.parametrize("kind", ["fp32", "bf16", "lora"])
def test_separate_networks_never_touch_each_other(kind, make_model, make_minibatch, minibatch):
    """A fit leaves the policy as it was, byte for byte, masters and moments too; an update the critic."""
    policy = make_model(dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "lora":
        policy = adapt(policy, LoraConfig(rank=2, alpha=4))
    learner = TorchLearner(
        policy, SMOOTH, 10, critic=build_critic(make_model(4, dtype=next(policy.parameters()).dtype))
    )

    def halves() -> list[dict[str, Tensor]]:
        tensors = learner.state().tensors
        return [{n: t for n, t in tensors.items() if n.startswith("critic/") == is_critic} for is_critic in (0, 1)]

    run(learner.update(make_minibatch(GRPO), GRPO, 0))
    policy_before, critic_before = halves()
    module = copied(policy)
    run(learner.fit(minibatch, TAUGHT, 0))
    policy_between, critic_between = halves()
    run(learner.update(make_minibatch(GRPO), GRPO, 0))
    policy_after, critic_after = halves()

    assert is_identical(policy_between, policy_before)
    assert not is_identical(critic_between, critic_before)
    assert is_identical(critic_after, critic_between)
    assert not is_identical(policy_after, policy_between)
    assert not is_identical(copied(policy), module)


def on_shared_trunk(policy: nn.Module, plan: LearnerConfig = SMOOTH, **more: Any) -> tuple[TorchLearner, nn.Module]:
    head = head_for(policy)
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
    return TorchLearner(policy, plan, 10, critic=head, **more), head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shared_trunk_is_moved_by_both_and_its_head_by_values_alone(dtype, make_model, make_minibatch, minibatch):
    """One set of masters, which the module is the rounding of; an update leaves the head's master and moments alone."""
    policy = make_model(dtype=dtype)
    learner, head = on_shared_trunk(policy)
    start = copied(policy)

    run(learner.fit(minibatch, SHARED, 0))
    trunk, taught, state = copied(policy), copied(head), learner.state().tensors
    run(learner.update(make_minibatch(GRPO), GRPO, 0))
    after = learner.state().tensors

    assert not torch.equal(trunk["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])
    assert is_identical(copied(head), taught)
    assert all(torch.equal(after[name], state[name]) for name in state if "value_head" in name)
    assert sum("value_head" in name for name in state) == 3
    assert not is_identical(copied(policy), trunk)
    assert all(torch.equal(p, after[f"master/{n}"].to(dtype)) for n, p in copied(policy).items())


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_pretraining_with_a_frozen_trunk_teaches_the_head_alone(trunk, make_model, minibatch):
    """Trunk and its moments keep every bit, at the plan's constant rate; a training step moves the trunk as well."""
    plan = replace(SMOOTH, optimizer=OptimizerConfig(learning_rate=1e-2, schedule="linear", warmup_steps=5))
    policy = make_model()
    algorithm = replace(FROZEN, critic=replace(FROZEN.critic, trunk=trunk, learning_rate_ratio=2.0))
    critic = build_critic(make_model(4))
    learner, head = on_shared_trunk(policy, plan)
    if trunk == "separate":
        learner, head = TorchLearner(policy, plan, 10, critic=critic), critic.score
    body = critic.model if trunk == "separate" else policy
    before, first = copied(body), head.weight.detach().clone()

    metrics = run(learner.fit(minibatch, algorithm, None))

    assert metrics["critic/learning_rate"] == 2e-2
    assert is_identical(copied(body), before)
    assert not torch.equal(head.weight, first)
    metrics = run(learner.fit(minibatch, algorithm, 0))
    assert metrics["critic/learning_rate"] == pytest.approx(2e-2 / 5)
    assert not is_identical(copied(body), before)


@pytest.mark.parametrize(
    ("algorithm", "step", "has_moved"),
    [(TAUGHT, 0, False), (SHARED, 0, True), (FROZEN, None, False)],
    ids=["separate", "shared", "frozen"],
)
def test_a_fit_between_scoring_and_update_is_noticed(
    algorithm, step, has_moved, make_model, make_batch, make_minibatch
):
    """On a shared trunk the policy is then no longer the proximal one that was scored; otherwise it still is."""
    learner, _ = on_shared_trunk(make_model())
    if algorithm is TAUGHT:
        learner = TorchLearner(make_model(), SMOOTH, 10, critic=build_critic(make_model(4)))
    batch = make_minibatch(GRPO)
    batch = run(learner.score(batch, {"proximal"})).into(batch)

    run(learner.fit(valued(make_batch()), algorithm, step))
    metrics = run(learner.update(batch, GRPO, 0))

    assert (metrics["loss/drift_abs_nats"] > 0) == has_moved


def test_metrics_say_what_a_fit_did(make_model, minibatch):
    """Norm, rate, count, work; a minibatch without a token makes no step and changes nothing."""
    critic, metrics = fitted(make_model(4), minibatch)
    assert metrics["critic/updates"] == 1
    assert metrics["critic/gradient_norm"] > 0
    assert metrics["critic/learning_rate"] == 1.0
    assert metrics["tokens/computed"] > 0

    learner = TorchLearner(make_model(), SMOOTH, 10, critic=critic)
    before = learner.state().tensors
    metrics = run(learner.fit(minibatch.with_fields(mask=minibatch.mask & False), TAUGHT, 0))
    assert metrics["critic/updates"] == 0
    assert metrics["tokens/computed"] == 0
    assert is_identical(learner.state().tensors, before)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(bad, is_shared, make_model, make_minibatch, minibatch):
    """A loss or a gradient that is not finite raises; the next fit is as if it never was."""
    learners = [
        on_shared_trunk(make_model())[0]
        if is_shared
        else TorchLearner(make_model(), SMOOTH, 10, critic=build_critic(make_model(4)))
        for _ in range(2)
    ]
    algorithm = SHARED if is_shared else TAUGHT
    spoiled = minibatch.with_fields(returns=minibatch.returns.clone(), weights=minibatch.weights.clone())
    shortest = int(minibatch.lengths.argmin())
    if bad == "loss":
        # The first micro-batch is fine, the last one is not: its gradients must go as well.
        spoiled.returns[shortest] = float("nan")
    else:
        # A weight so large that the loss is finite in float64 and its gradient is not in float32.
        spoiled.weights[:] = torch.where(minibatch.mask, 1e38, 0.0)
        spoiled = spoiled.with_fields(weights=spoiled.weights.double() * 10, returns=spoiled.returns.double())
    before = learners[0].state().tensors

    with pytest.raises(LearnerError, match=f"the {bad} is not finite"):
        run(learners[0].fit(spoiled, algorithm, 0))

    assert is_identical(learners[0].state().tensors, before)
    for learner in learners:
        run(learner.fit(minibatch, algorithm, 0))
        run(learner.update(make_minibatch(GRPO), GRPO, 0))
    assert is_identical(learners[0].state().tensors, learners[1].state().tensors)


def build_walker(kind: str, make_model, seed: int) -> tuple[TorchLearner, Any]:
    """A learner of one kind, and the algorithm that it follows."""
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    policy = make_model(0 if kind == "lora" else seed, dtype)
    if kind == "lora":
        torch.manual_seed(seed)
        policy = adapt(policy, LoraConfig(rank=2, alpha=4))
    updates = Updates(minibatches=2)
    if "shared" in kind:
        return on_shared_trunk(policy)[0], replace(SHARED, updates=updates)
    if kind == "lagged":
        algorithm = replace(P3O, name="p3o-lagged", scope="lagged", updates=updates)
        return TorchLearner(policy, SMOOTH, 10), algorithm
    proximal = EmaProximal() if kind in ("ewma", "lora") else None
    learner = TorchLearner(policy, SMOOTH, 10, critic=build_critic(make_model(seed + 4, dtype)), proximal=proximal)
    return learner, replace(TAUGHT, proximal=proximal, updates=updates)


@pytest.mark.parametrize("kind", ["separate", "separate bf16", "shared", "shared bf16", "ewma", "lora", "lagged"])
def test_a_restored_learner_goes_on_bit_for_bit(kind, make_model, make_batch):
    """Two steps, state, two more; another learner restored from the state makes the same two, whatever it has."""

    def walk(learner: TorchLearner, algorithm: Any, steps: range) -> None:
        for step in steps:
            batch = make_batch(step)
            batch = algorithm.prepare(run(learner.score(batch, algorithm.needs)).into(batch))
            for minibatch in algorithm.minibatches(batch, step):
                run(learner.update(minibatch, algorithm, step))
            for minibatch in algorithm.value_minibatches(batch, step):
                run(learner.fit(minibatch, algorithm, step))
            learner.advance()

    (learner, algorithm), (resumed, _) = (build_walker(kind, make_model, seed) for seed in (0, 9))
    walk(learner, algorithm, range(2))
    state = learner.state()
    walk(learner, algorithm, range(2, 4))
    walk(resumed, algorithm, range(1))
    resumed.restore(state)
    assert resumed.state().values == state.values
    assert is_identical(resumed.state().tensors, state.tensors)
    walk(resumed, algorithm, range(resumed.version, 4))

    assert resumed.state().values == learner.state().values
    assert is_identical(resumed.state().tensors, learner.state().tensors)
    assert not is_identical(learner.state().tensors, state.tensors)
    batch = make_batch(7)
    scores = [run(each.score(batch, algorithm.needs)) for each in (learner, resumed)]
    for name, tensor in vars(scores[0]).items():
        assert tensor is None or torch.equal(tensor, vars(scores[1])[name])


@pytest.mark.parametrize(
    ("saved", "mine", "message"),
    [
        ("separate", "lagged", "made with a separate critic, this run has no critic"),
        ("lagged", "separate", "made with no critic, this run has a separate critic"),
        ("shared", "separate", "made with a critic on the policy's trunk, this run has a separate critic"),
        ("ewma", "separate", "made with an averaged proximal policy, this run has no averaged proximal policy"),
    ],
)
def test_a_state_with_other_parts_is_refused(saved, mine, message, make_model):
    """The message says what the checkpoint has and what the run has; nothing was changed."""
    state = build_walker(saved, make_model, 0)[0].state()
    learner, _ = build_walker(mine, make_model, 1)
    before = learner.state().tensors

    with pytest.raises(CheckpointError, match=message):
        learner.restore(state)
    assert is_identical(learner.state().tensors, before)


def test_a_critic_of_another_shape_is_refused_before_the_policy_is_restored(make_model):
    """All parts are compared before the first one is changed."""
    learner, _ = build_walker("separate", make_model, 0)
    state = build_walker("separate", make_model, 1)[0].state()
    name = "critic/master/score.weight"
    other = replace(state, tensors={**state.tensors, name: torch.zeros(1, 3)})
    before = learner.state().tensors

    with pytest.raises(CheckpointError, match="belongs to another model"):
        learner.restore(other)
    assert is_identical(learner.state().tensors, before)


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_the_critic_is_written_with_the_model(kind, tmp_path, make_model, make_batch, minibatch):
    """Loaded from the folder, it says what the learner says, on the trunk that it had then."""
    learner, algorithm = build_walker(kind, make_model, 0)
    run(learner.fit(minibatch, algorithm, 0))
    learner.write_model(tmp_path)

    critic = load_critic(str(tmp_path), str(tmp_path / "critic" if kind == "separate" else tmp_path))

    batch = make_batch()
    found = ValueScorer(critic, critic.score)(batch.tokens, batch.prompt_lengths, batch.lengths, batch.mask)
    wanted = run(learner.score(batch, {"values"}))
    torch.testing.assert_close(found.values.detach(), wanted.values, rtol=0, atol=1e-5)


def test_without_a_critic_there_is_nothing_to_fit(make_learner, make_model, minibatch):
    """Neither a learner without one nor an algorithm without one can teach it."""
    with pytest.raises(ConfigError, match="this learner has no critic"):
        run(make_learner().fit(minibatch, TAUGHT, 0))
    learner, _ = build_walker("separate", make_model, 0)
    with pytest.raises(ConfigError, match="the algorithm 'grpo' has no critic"):
        run(learner.fit(minibatch, GRPO, 0))
