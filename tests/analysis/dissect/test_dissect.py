"""Dissection: what is said of a batch, from a file, a run, or tensors; and what is refused."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import gnomon
from gnomon.algorithms import (
    CISPO,
    DECOUPLED_PPO,
    GRPO,
    PRESETS,
    Algorithm,
    Entropy,
    MaskedIS,
    PolicyGradient,
    Unbounded,
)
from gnomon.analysis.dissect.dissect import as_row, cosines, decompose, dissect
from gnomon.analysis.dissect.verify import KINDS, draw, to_batch
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.records.batches import RecordedBatch, read_batch, write_batch
from gnomon.testing import loss_and_gradient, make_batch
from gnomon.training.api import train_experiment

approx = pytest.approx
LOG = [[math.log(r) for r in row] for row in ([0.5, 1.0, 1.5], [0.5, 1.0, 1.5])]


def pair() -> RecordedBatch:
    """Return a right and a wrong answer of three tokens with ratios 0.5, 1 and 1.5 to behavior, which is 1."""
    batch = make_batch([1.0, 0.0], [[1, 1, 1], [1, 1, 1]], behavior=[[0.0] * 3] * 2)
    return RecordedBatch(batch, torch.tensor(LOG, dtype=torch.float64), ("p", "p"))


def test_clipped_tokens_are_told_from_those_outside():
    """A = +-0.7071: right answers stop above 1.2, wrong ones below 0.8: two of six clipped, four outside."""
    loss, gradient, report = gnomon.dissect(pair(), gnomon.GRPO)

    assert report.trust == ("..x", "x..")
    a = 1 / math.sqrt(2) / (1 + math.sqrt(2) * 1e-6)
    assert gradient[0].tolist() == approx([-0.5 * a / 6, -a / 6, 0.0], rel=1e-10)
    assert gradient[1].tolist() == approx([0.0, a / 6, 1.5 * a / 6], rel=1e-10)
    assert loss == approx(a * (-(0.5 + 1 + 1.2) + (0.8 + 1 + 1.5)) / 6, rel=1e-10)
    assert report.statistics["clipped_fraction"] == approx(2 / 6)
    assert report.statistics["out_of_band_fraction"] == approx(4 / 6)
    assert report.statistics["zero_gradient_token_fraction"] == approx(2 / 6)
    assert report.statistics["gradient_norm"] == approx(float(gradient.norm()))
    assert report.statistics["ess_fraction"] == approx(6**2 / (6 * 2 * (0.25 + 1 + 2.25)))
    assert report.push.tolist() == [approx([0.5, 1.0, 0.0]), approx([0.0, 1.0, 1.5])]


def test_capped_tokens_are_pushed_less_and_corrected_ones_more_or_not_at_all():
    """A cap marks -, a correction above 1 marks +, a masked one x, and a user's own bound is seen by its effect."""
    capped = replace(CISPO, surrogate=PolicyGradient(replace(CISPO.surrogate.trust, cap=1.2)))  # type: ignore[attr-defined]
    recorded = pair()
    apart = recorded.batch.with_fields(proximal=torch.tensor(LOG, dtype=torch.float64))
    masking = replace(GRPO, correction=MaskedIS(0.8, 2.0))

    assert dissect(recorded, capped)[2].trust == ("..-", "..-")
    assert dissect(recorded, capped)[2].statistics["capped_fraction"] == approx(2 / 6)
    assert decompose(DECOUPLED_PPO, apart, recorded.current).trust == ("-.+", "-.+")
    assert decompose(masking, apart, recorded.current).trust == ("x.+", "x.+")


@pytest.mark.parametrize("name", PRESETS)
def test_the_numbers_are_those_of_training(name: str):
    """Loss and gradient are the sums that a learner makes, for every preset; the parts add up."""
    batch, current = to_batch(draw(KINDS[1], 3))
    algorithm = PRESETS[name]
    loss, gradient, report = dissect(batch, algorithm, current)
    expected = loss_and_gradient(algorithm, algorithm.prepare(batch), current)

    assert loss == approx(expected[0], rel=1e-12)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-12, atol=1e-15)
    assert (report.value_loss is not None) == (algorithm.critic is not None)
    assert (loss == report.policy_loss) == (not algorithm.regularizers)
    assert gradient[~batch.mask].abs().sum() == 0


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_to_train_is_no_error(name: str):
    """A batch without one trained token, and one without a position: loss 0, no gradient, every number finite."""
    for mask in ([[0, 0], [0]], [[], []]):
        more = {"reference": mask, "values": mask, "proximal": mask, "sharpened": mask, "baseline": [0.5, 0.5]}
        more |= {"component_rewards": [[1.0], [0.0]], "components": ("a",), "component_weights": (1.0,)}
        loss, gradient, report = dissect(make_batch([1.0, 0.0], mask, **more), name)  # type: ignore[arg-type]

        assert (loss, float(gradient.abs().sum())) == (0.0, 0.0)
        assert all(math.isfinite(x) for x in report.statistics.values())
        assert "." not in "".join(report.trust)


def test_a_batch_of_tensors_needs_no_current():
    """Without `current` the loss is taken at proximal, else at behavior: every ratio is 1."""
    batch = make_batch([1.0, 0.0], [[1, 1], [1]], dtype=torch.float32)
    _, gradient, report = dissect(batch, "grpo")

    assert (gradient.dtype, report.statistics["clipped_fraction"]) == (torch.float64, 0.0)
    assert report.trust == ("..", ". ")
    with pytest.raises(ConfigError, match=r"current has shape \(1, 2\), and the batch is \(2, 2\)"):
        dissect(batch, "grpo", torch.zeros(1, 2))


def test_cosines():
    """1 on the diagonal, the same both ways, 1 for algorithms that differ in scale only, nan against nothing."""
    recorded = pair()
    same = replace(GRPO, advantage=replace(GRPO.advantage, scale="none"))
    none = replace(GRPO, advantage=replace(GRPO.advantage, epsilon=1e300))
    found = {n: dissect(recorded, a)[2] for n, a in {"grpo": GRPO, "same": same, "p3o": PRESETS["p3o"]}.items()}
    table = cosines(found)

    assert [table[name][name] for name in found] == approx([1.0] * 3)
    assert table["grpo"]["same"] == approx(1.0)
    assert table["grpo"]["p3o"] == table["p3o"]["grpo"] < 0.99
    tiny = dissect(recorded, none)[2]
    assert cosines({"grpo": found["grpo"], "tiny": tiny})["grpo"]["tiny"] == approx(1.0)
    still = dissect(recorded.batch.with_fields(rewards=torch.zeros(2)), GRPO)[2]
    assert math.isnan(cosines({"grpo": found["grpo"], "still": still})["grpo"]["still"])


@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [
        (PRESETS["spo"], ["baseline"]),
        (PRESETS["rloo"], ["reference"]),
        (PRESETS["vapo"], ["values"]),
        (PRESETS["a-star-po"], ["reference", "baseline"]),
    ],
    ids=lambda x: x.name if isinstance(x, Algorithm) else "",
)
def test_a_missing_field_is_named_with_its_algorithm(algorithm: Algorithm, fields: list[str]):
    """All fields that an algorithm reads and the batch lacks are in one message, with what to do."""
    with pytest.raises(ConfigError, match=f"algorithm '{algorithm.name}'") as caught:
        dissect(pair(), algorithm)

    assert [name for name in fields if name not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "rewards", "said"),
    [
        ("reward-model", [1.0, 0.0], "teaches a critic alone"),
        ("dpo", [1.0, 0.0, 0.0], "a prompt_id has 3 answers"),
        ("kto", [1.0, 0.0], "the reward 1 for a good answer, -1 for a bad one"),
    ],
)
def test_answers_of_another_kind_are_refused(name: str, rewards: list[float], said: str):
    """A group of a policy's answers is no pair, its rewards are no labels, and a reward model has no policy's loss."""
    masks = [[1]] * len(rewards)
    batch = make_batch(rewards, masks, reference=[[-1.0]] * len(rewards), values=[[0.0]] * len(rewards))

    with pytest.raises(ConfigError, match=said):
        dissect(batch, name)


def test_entropy_is_estimated_so_that_its_mean_is_right():
    """Over three tokens, each weighed by its own probability, value and slope have the entropy's value and gradient."""
    logits = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    log = torch.log_softmax(logits, 0)
    entropy = -(log.exp() * log).sum()
    batch = make_batch([0.0] * 3, [[1]] * 3, behavior=log.detach()[:, None].tolist())
    found = dissect(batch, replace(GRPO, regularizers=(Entropy(0.1),)))[2]

    # The mean over sequences gives each token a third; its probability should stand there.
    (expected,) = torch.autograd.grad(-0.1 * entropy, logits, retain_graph=True)
    (actual,) = torch.autograd.grad((3 * log.exp().detach() * found.gradient[:, 0] * log).sum(), logits)
    torch.testing.assert_close(actual, expected)
    assert found.loss == approx(0.1 * float(log.detach().mean()))
    assert found.estimates_entropy
    assert not dissect(batch, replace(GRPO, regularizers=(Entropy(0.0),)))[2].estimates_entropy


def test_a_piece_of_ones_own_that_measures_nothing_is_counted_by_its_effect():
    """A surrogate without metrics still gets a clipped fraction: tokens with an advantage and no push."""
    report = dissect(pair(), replace(GRPO, surrogate=_Silent()))[2]

    assert report.trust == (".x.", ".x.")
    assert report.statistics["clipped_fraction"] == report.statistics["out_of_band_fraction"] == approx(2 / 6)


@dataclass(frozen=True)
class _Silent:
    """REINFORCE that ignores tokens of ratio 1, and says nothing about it."""

    def __call__(self, view):  # type: ignore[no-untyped-def]
        loss, _ = PolicyGradient(Unbounded())(view)
        return torch.where(view.log_ratio == 0, 0.0 * loss, loss), gnomon.core.metrics.Metrics()


def test_numbers_that_overflow_are_null():
    """A log-ratio of 1000 has no effective size: P3O's loss is null in JSON, GRPO's is a number."""
    recorded = pair()
    far = RecordedBatch(recorded.batch, recorded.current + torch.tensor([1000.0, 0.0, 0.0]), recorded.prompt_ids)
    row = as_row(far, {name: dissect(far, name)[2] for name in ("grpo", "p3o")})

    assert row["algorithms"]["p3o"]["loss"] is None
    assert row["algorithms"]["grpo"]["loss"] is not None
    assert row["cosine"]["grpo"]["p3o"] is None


def test_a_run_s_own_batches_can_be_dissected(tmp_path: Path):
    """What `records.batches` writes is read; every ratio of a first update is 1, so nothing is clipped."""
    sizes = ["task.size=60", "evaluation.before=false", "checkpoints.every=0", "steps=1", "rollouts_per_step=16"]
    train_experiment(load("tiny", [*sizes, "records.batches=true"]), tmp_path / "run")
    (path,) = (tmp_path / "run" / "batches").glob("*.json")
    _, gradient, report = gnomon.dissect(path, "grpo")

    assert gradient.shape == read_batch(path).batch.mask.shape
    assert report.statistics["clipped_fraction"] == 0.0
    assert set("".join(report.trust)) <= set(". 0")


def test_what_is_written_is_read_with_bootstrap(tmp_path: Path):
    """The critic's value after the last token, for algorithms that go on after a truncation."""
    batch, current = to_batch(draw(KINDS[0], 1))
    batch = batch.with_fields(bootstrap=torch.arange(len(batch)).double(), is_truncated=batch.is_graded)
    write_batch(tmp_path / "b.json", batch, current)
    recorded = read_batch(tmp_path / "b.json")
    going_on = replace(PRESETS["vapo"], advantage=replace(PRESETS["vapo"].advantage, truncation="value"))  # type: ignore

    assert recorded.batch.bootstrap is not None
    assert recorded.batch.bootstrap.tolist() == list(range(len(batch)))
    assert dissect(recorded, going_on)[0] == approx(dissect(batch, going_on, current)[0], rel=1e-12)
    with pytest.raises(ConfigError, match="bootstrap"):
        dissect(recorded.batch.with_fields(bootstrap=None), going_on)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "expected one JSON object"),
        ("\x00", "is no JSON"),
    ],
    ids=["empty", "deep", "list", "zero byte"],
)
def test_a_file_that_is_no_batch_is_one_error(tmp_path: Path, text: str, said: str):
    """Empty, endlessly nested, or something else: a DatasetError that names the file."""
    (tmp_path / "b.json").write_text(text)

    with pytest.raises(DatasetError, match=rf"b\.json {said}|b\.json is no usable batch:\n  {said}"):
        dissect(tmp_path / "b.json", "grpo")


def test_a_batch_too_wide_to_be_padded_is_refused(tmp_path: Path):
    """One answer of 200,000 positions beside 600 of none would be 120 million numbers a matrix."""
    long = "{" + f'"prompt_id": "a", "reward": 0, "mask": [{"0," * 199_999}0], '
    long += ", ".join(f'"{name}": [{"0," * 199_999}0]' for name in ("current", "behavior")) + "}"
    short = '{"prompt_id": "b", "reward": 0, "mask": [], "current": [], "behavior": []}'
    rows = ", ".join([long, *[short] * 600])
    (tmp_path / "b.json").write_text('{"format": "gnomon-batch/1", "sequences": [' + rows + "]}")

    with pytest.raises(DatasetError, match="601 sequences padded to the longest, 200000 positions"):
        dissect(tmp_path / "b.json", "grpo")
