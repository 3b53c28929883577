"""The reference policy is what `algorithm.reference` says: the first weights, their average, or teachers by task."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.algorithms import GRPO, OPD, SDFT, Distillation, EmaProximal, ReferencePolicy, TaskTeacher
from gnomon.core.errors import CheckpointError
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.reference import ReferenceModels
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.learner.spec import LearnerSpec
from gnomon.models.logprobs import TokenScorer

PLAN = LearnerConfig(OptimizerConfig(learning_rate=1e-2), precision="fp32")


def run(work: Any) -> Any:
    return asyncio.run(work)


def said_by(model: Any, batch: Any) -> torch.Tensor:
    """Return what a model says of a batch, computed without a learner."""
    with torch.no_grad():
        return TokenScorer(model)(batch.tokens, batch.prompt_lengths, batch.mask, batch.temperature).logprobs


@pytest.mark.parametrize("names", [*itertools.permutations(["a", "a:b", "a:b:c"])])
def test_the_teacher_with_the_longest_name_scores(make_model, make_batch, names: tuple[str, ...]):
    """Ids of a part "a:b" begin with "a:" as well; which teacher scores them depends on no order of names."""
    teachers = {name: make_model(seed) for seed, name in enumerate(("a", "a:b", "a:b:c"), start=1)}
    learner = TorchLearner(make_model(0), PLAN, 5, ReferenceModels(make_model(4), {n: teachers[n] for n in names}))
    batch = make_batch().with_fields(task_ids=("a:0", "a:b:1", "a:b:c:0", "a:b:2", "a:c:1", "a:b:c:2"))

    found = run(learner.score(batch, {"reference"})).reference

    for row, name in enumerate(("a", "a:b", "a:b:c", "a:b", "a", "a:b:c")):
        torch.testing.assert_close(found[row], said_by(teachers[name], batch)[row], atol=1e-5, rtol=0)


def test_each_teacher_scores_the_rows_of_its_task(make_model, make_batch):
    """Rows of the part "sums" have the log-probabilities of its teacher, all others those of the general one."""
    policy, general, sums = (make_model(seed) for seed in (0, 1, 2))
    learner = TorchLearner(policy, PLAN, 5, ReferenceModels(general, {"sums": sums}))
    names = ("sums:0", "sums:1", "code:0", "sumsy:1", "code:2", "sums:2")
    batch = make_batch().with_fields(task_ids=names)

    found = run(learner.score(batch, {"reference"})).reference

    is_sums = torch.tensor([name.startswith("sums:") for name in names])
    expected = torch.where(is_sums[:, None], said_by(sums, batch), said_by(general, batch))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (said_by(sums, batch) - said_by(general, batch)).abs().max() > 0.1


def averaged(make_model: Any) -> TorchLearner:
    return TorchLearner(make_model(), PLAN, 5, ReferenceModels(average=EmaProximal(0.5)))


def test_an_averaged_reference_follows_the_weights_and_is_resumed(make_model, make_minibatch):
    """It lies between the first weights and the present ones, and a restored learner says the same bit for bit."""
    learner, resumed, minibatch = averaged(make_model), averaged(make_model), make_minibatch(OPD)
    for step in range(3):
        run(learner.update(minibatch, OPD, step))
    scores = run(learner.score(minibatch, {"reference", "proximal"}))
    first = said_by(make_model(), minibatch)
    resumed.restore(learner.state())
    again = run(resumed.score(minibatch, {"reference", "proximal"}))

    assert 0 < (scores.reference - first).abs().sum() < (scores.proximal - first).abs().sum()
    assert torch.equal(again.reference, scores.reference)
    with pytest.raises(CheckpointError, match="made with an averaged reference policy"):
        TorchLearner(make_model(), PLAN, 5).restore(learner.state())


def test_a_state_on_another_teacher_is_refused(make_model):
    """A run that goes on with another teacher of one task is another run."""

    def build(seed: int) -> TorchLearner:
        return TorchLearner(make_model(), PLAN, 5, ReferenceModels(make_model(1), {"sums": make_model(seed)}))

    state = build(2).state()
    build(2).restore(state)
    with pytest.raises(CheckpointError, match="made on other frozen weights"):
        build(3).restore(state)


def test_a_spec_loads_each_teacher_once(make_model):
    """Two tasks with one teacher share its module, in the precision that the reference asks for."""
    plan = ReferencePolicy("average", (TaskTeacher("a", "tiny"), TaskTeacher("b", "tiny")), precision="bf16")
    spec = LearnerSpec("tiny", replace(OPD, reference=plan), PLAN, steps=5)

    found = spec.references(torch.device("cpu"))

    assert found.by_task["a"] is found.by_task["b"] is found.frozen
    assert next(found.by_task["a"].parameters()).dtype == torch.bfloat16
    assert found.average == EmaProximal(plan.decay)
    assert LearnerSpec("tiny", OPD, PLAN, steps=5).references(torch.device("cpu")).model is not None
    assert LearnerSpec("tiny", GRPO, PLAN, steps=5).references(torch.device("cpu")) == ReferenceModels()


def hinted(batch: Batch) -> Batch:
    """Return the batch with hints of 1 to 5 tokens, none for row 1."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([3, 0, 5, 1, 4, 2])
    hints = torch.randint(1, 200, (6, 5), generator=generator)
    return batch.with_fields(hints=torch.where(torch.arange(5) < lengths[:, None], hints, 0), hint_lengths=lengths)


@pytest.mark.parametrize("top", [None, 4, 0])
@pytest.mark.parametrize("tokens", [16, 10_000])
def test_a_hint_stands_in_place_of_the_prompt(top: int | None, tokens: int, make_model, make_batch):
    """Each row's response is scored behind its own hint, in any cut; a row without one is 0 and not taught."""
    batch = hinted(make_batch())
    plan = replace(PLAN, max_tokens_per_micro_batch=tokens)
    learner = TorchLearner(make_model(), plan, 5, ReferenceModels(is_policy=True, top=top))

    found = run(learner.score(batch, {"reference"}))

    assert batch.is_taught.tolist() == [True, False, True, True, True, True]
    for row, length in enumerate(batch.hint_lengths.tolist()):
        response = batch.tokens[row, batch.prompt_lengths[row] : batch.lengths[row]]
        if not length:
            assert not found.reference[row].any()
            continue
        whole = torch.cat([batch.hints[row, :length], response])[None]
        with torch.no_grad():
            logits = make_model()(input_ids=whole).logits[0, length - 1 : -1] / batch.temperature
        said, kept = logits.log_softmax(-1), batch.mask[row, : len(response)]
        expected = said.gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(found.reference[row, : len(response)][kept], expected[kept], atol=1e-5, rtol=0)
        if top is not None:
            values, ids = said.topk(top or said.shape[1])
            torch.testing.assert_close(found.top_logprobs[row, : len(response)][kept], values[kept], atol=1e-5, rtol=0)
            assert torch.equal(found.top_tokens[row, : len(response)][kept][:, :3].long(), ids[kept][:, :3])


@pytest.mark.parametrize("is_split", [True, False])
def test_likeliest_tokens_are_kept_however_the_model_is_computed(make_model, make_batch, is_split: bool):
    """The three likeliest of the first 50 tokens, of a whole model and of one with its head apart; 0 elsewhere."""
    model, batch = make_model(), make_batch()
    scorer = TokenScorer(model, chunk_tokens=4)
    scorer.is_split = is_split
    scorer.shares_prompts = is_split and scorer.shares_prompts
    with torch.no_grad():
        top = scorer.keeping(3, 50)(batch.tokens, batch.prompt_lengths, batch.mask, batch.temperature).top
        rows, columns = batch.mask.nonzero(as_tuple=True)
        logits = model(input_ids=batch.tokens).logits[rows, batch.prompt_lengths[rows] + columns - 1]
    values, ids = (logits / batch.temperature).log_softmax(-1)[:, :50].topk(3)

    assert top is not None
    assert torch.equal(top.tokens[rows, columns].long(), ids)
    torch.testing.assert_close(top.logprobs[rows, columns], values, atol=1e-5, rtol=0)
    assert not top.logprobs[~batch.mask].any()


@pytest.mark.parametrize("tokens", [16, 10_000])
def test_distillation_is_the_kl_to_the_teacher_in_any_cut(tokens: int, make_model, make_batch):
    """Loss and the gradient's norm are those of the formula over all 259 tokens, computed without a learner."""
    algorithm = replace(SDFT, surrogate=Distillation(0))
    plan = LearnerConfig(OptimizerConfig(learning_rate=1e-2), precision="fp32", max_tokens_per_micro_batch=tokens)
    policy, teacher, batch = make_model(), make_model(1), make_batch()
    learner = TorchLearner(policy, plan, 5, ReferenceModels(teacher, top=0))
    scored = run(learner.score(batch, algorithm.needs)).into(batch)
    rows, columns = batch.mask.nonzero(as_tuple=True)
    places = (rows, batch.prompt_lengths[rows] + columns - 1)
    ours, theirs = (
        (m(input_ids=batch.tokens).logits[places] / batch.temperature).log_softmax(-1) for m in (make_model(), teacher)
    )
    expected = (ours.exp() * (ours - theirs)).sum(-1).mean()

    (minibatch,) = algorithm.minibatches(algorithm.prepare(scored), 0)
    found = run(learner.update(minibatch, algorithm, 0))

    assert found["loss/policy"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["loss/kl_teacher_nats"] == pytest.approx(expected.item(), rel=1e-4)
    fresh = make_model()
    again = (fresh(input_ids=batch.tokens).logits[places] / batch.temperature).log_softmax(-1)
    (again.exp() * (again - theirs.detach())).sum(-1).mean().backward()
    norm = torch.stack([p.grad.square().sum() for p in fresh.parameters() if p.grad is not None]).sum().sqrt()
    assert found["learner/gradient_norm"] == pytest.approx(norm.item(), rel=1e-3)
