"""The formulas: against the reference's numbers, against every preset on random batches, and free of our pieces."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gnomon.analysis.dissect.reference as oracles
from gnomon.algorithms import NAMED, resolve
from gnomon.analysis.dissect.dissect import decompose
from gnomon.analysis.dissect.reference import ORACLES, Oracle, Step
from gnomon.analysis.dissect.reference.advantages import (
    Credit,
    fixed,
    gae,
    group_mean,
    leave_one_out,
    length_adaptive,
    length_sigmoid,
    length_weighted,
    over_optimum,
    returns,
    tracked,
    whitened,
)
from gnomon.analysis.dissect.reference.losses import (
    Pusher,
    clip,
    constant_length,
    reference_k2,
    regression,
    sequence_mean,
    token_mean,
)
from gnomon.analysis.dissect.verify import (
    ATOL,
    GOLDENS,
    KINDS,
    Golden,
    Kind,
    answered,
    compare,
    draw,
    to_batch,
    vectors,
)

approx = pytest.approx
exact = {"rel": 1e-10, "abs": 1e-14}
ROOT = Path(__file__).resolve().parents[4]
GIVEN = ("luffy", "dpo", "ipo-preference", "kto")


def step(rewards: Sequence[float], mask: Sequence[Sequence[int]], group: Sequence[int], **more: Any) -> Step:
    """Return a step from lists; policies that are left out are -1 everywhere, also where masked."""
    wide = max(map(len, mask))
    flags = np.array([[*row, *[0] * (wide - len(row))] for row in mask]) > 0
    plain = np.full(flags.shape, -1.0)
    given = {name: np.array(value, dtype=float) for name, value in more.items()}
    policies = {name: given.pop(name, plain) for name in ("current", "behavior", "proximal")}
    return Step(
        rewards=np.array(rewards, dtype=float),
        mask=flags,
        group=np.array(group),
        graded=np.ones(len(rewards), dtype=bool),
        truncated=np.zeros(len(rewards), dtype=bool),
        **policies,
        **given,
    )


def four(**more: Any) -> Step:
    """Return the reference's four sequences, with ``old`` as behavior and proximal."""
    fixture = vectors()["fixture"]
    named = {"current": "lp", "behavior": "old", "proximal": "old", "reference": "ref", "values": "values"} | more
    return step(fixture["rewards"], fixture["mask"], fixture["gid"], **{k: fixture[v] for k, v in named.items()})


def credited(credit: Credit, given: Step) -> Any:
    """Return advantages [B, T]."""
    return given.scatter(credit(given.responses()))


def close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    """Assert equality of arrays."""
    np.testing.assert_allclose(actual, np.array(expected), rtol=1e-10, atol=atol)


@pytest.mark.parametrize(
    ("credit", "key"),
    [
        (group_mean("group"), "grpo_unbiased_eps1e6"),
        (group_mean("group", epsilon=1e-4), "grpo_unbiased_eps1e4"),
        (group_mean("none"), "dr_grpo"),
        (group_mean("batch", epsilon=1e-4), "lite_ppo_batch_std_unbiased_eps1e4"),
        (length_weighted, "opo"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_group_advantages(credit: Credit, key: str):
    """Each group estimator gives the reference's numbers on six responses of two groups."""
    g = vectors()["group_advantages"]
    given = step(g["rewards"], [[1] * int(n) for n in g["lengths"]], g["group"])

    close(credited(credit, given)[:, 0], g[key])


def test_leave_one_out():
    """Without a penalty RLOO's numbers; the reference's log-probabilities then do not matter."""
    g = vectors()["group_advantages"]
    mask = [[1] * int(n) for n in g["lengths"]]
    given = step(g["rewards"], mask, g["group"], reference=np.full((6, 40), -3.0))

    close(credited(leave_one_out(kl=0.0), given)[:, 0], g["rloo"])


def test_a_group_of_one_and_a_group_of_equals_are_worth_nothing():
    """Responses 0 (alone) and 1, 2 (equal) get 0 from every group baseline, whitened or not."""
    given = step([1.0, 0.3, 0.3, 1.0, 0.0], [[1]] * 5, [0, 1, 1, 2, 2])
    for credit in (group_mean("group"), group_mean("batch"), length_weighted, whitened(group_mean("none"), True)):
        assert credited(credit, given)[:3, 0].tolist() == [0.0, 0.0, 0.0]
        assert credited(credit, given)[3, 0] > 0.4


@pytest.mark.parametrize(
    ("mean", "key"),
    [
        (token_mean, "token_mean"),
        (sequence_mean, "seq_mean_token_mean"),
        (constant_length(8), "seq_mean_token_sum_norm"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_means(mean: Callable[..., list[float]], key: str):
    """The weighted sum of the reference's token losses is its mean of that kind."""
    g = vectors()["aggregation"]
    responses = four().responses()
    sums = [sum(row[: len(r)]) for row, r in zip(g["token_losses"], responses, strict=True)]

    assert sum(w * s for w, s in zip(mean(responses), sums, strict=True)) == approx(g[key], **exact)


def test_generalized_advantages():
    """Lambda 1, 0.95 and 0, the hole, the length rule, the sigmoid rule, and the whitened advantages."""
    g, given = vectors()["gae"], four()
    hole = replace(given, mask=np.array(g["tool_hole_mask"]) > 0)

    close(credited(gae(fixed(1.0)), given), g["lam1_adv"])
    close(credited(gae(fixed(0.95)), given), g["lam095_adv"])
    close(credited(gae(fixed(0.0)), given), g["lam0_adv"])
    close(credited(gae(fixed(0.95)), hole), g["tool_hole_lam095_adv"])
    close(credited(gae(length_adaptive(1.0)), given), g["length_adaptive_alpha_1"]["adv"])
    close(credited(whitened(gae(fixed(0.95))), given), g["whitened_lam095_population"], atol=1e-6)
    long = step([0.0] * 4, [[1] * int(n) for n in g["review_sigmoid_lambda"]["length"]], range(4))
    assert length_sigmoid(0.3, 0.95)(long.responses()) == approx(g["review_sigmoid_lambda"]["lam"], **exact)


def test_returns_with_a_penalty():
    """REINFORCE++: returns with KL 0.1 in the reward, whitened, and the baseline variant."""
    g, given = vectors()["reinforce_pp"], four()

    close(credited(returns(kl=0.1), given), g["returns"])
    close(credited(whitened(returns(kl=0.1)), given), g["adv_population"], atol=1e-6)
    close(credited(whitened(group_mean("none")), given), g["baseline_variant_population"], atol=1e-6)
    value, _ = reference_k2(1.0)(given.responses(), token_mean(given.responses()), None)  # type: ignore[arg-type]
    assert value == approx(g["k2_loss_vs_ref"], **exact)


def test_tracked_baseline_and_fixed_optimum():
    """SPO's whitened advantages, and A*-PO's loss of two sequences whose log-probabilities are -20 and -31."""
    g = vectors()["spo"]
    given = step(g["rewards"], [[1]] * 4, range(4), baseline=g["v0_code_jeffreys"])
    close(credited(over_optimum, given)[:, 0], g["raw_advantage"])
    close(credited(tracked(), given)[:, 0], g["adv_sample_std"], atol=1e-7)
    a = vectors()["a_star_po"]
    now, before = ([[x / 2, x / 2] for x in a[key]] for key in ("seq_logp", "seq_ref_logp"))
    pair = step(a["outcome"], [[1, 1]] * 2, [0, 1], current=now, reference=before, baseline=[a["v_star"]] * 2)

    assert Oracle(over_optimum, regression(a["beta2"]), sequence_mean)(pair).loss == approx(a["loss"], **exact)


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: ".".join(case.section))
def test_formulas_and_presets_give_the_reference_s_losses_and_gradients(case: Golden):
    """Every loss and gradient of the reference that belongs to a preset, from the oracle and from the preset."""
    loss, gradient = case.expected()
    theirs, ours = case.formulas(case.step()), decompose(resolve(case.spec), *to_batch(case.step()))

    assert theirs.loss == approx(loss, **exact)
    assert ours.loss == approx(loss, **exact)
    if gradient is not None:
        close(theirs.gradient, gradient, ATOL)
        close(ours.gradient.numpy(), gradient, ATOL)


@pytest.mark.parametrize(
    ("push", "key"), [(clip(0.2, 0.2), "grpo_eps0.2_seqmean"), (clip(0.2, 0.28), "dapo_0.2_0.28_tokenmean")]
)
def test_both_clip_fractions(push: Pusher, key: str):
    """Strictly clipped 0.2 of the tokens, outside of the band about half."""
    expected = vectors()["clip_family"][key]
    answer = Oracle(group_mean("group"), push, token_mean)(four())

    assert answer.clipped_fraction == approx(expected["clip_frac"], **exact)
    assert answer.out_of_band_fraction == approx(expected["out_of_range_frac"], **exact)


def test_every_preset_has_an_oracle():
    """A new preset needs its formulas written a second time, and a formula a preset.

    A batch of log-probabilities has no distributions of a teacher, and a reward model has no policy.
    """
    assert set(ORACLES) == set(NAMED) - {"sdft", "sdpo", "reward-model"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=2)
def test_every_preset_is_its_formula_on_random_batches(kind: Kind, seed: int):
    """Advantages, losses, gradient, clip fractions and ESS agree to 1e-10, on any batch of every kind."""
    drawn = draw(kind, seed)
    for name, oracle in ORACLES.items():
        step = answered(drawn, NAMED[name])
        _, _, wrong = compare(decompose(NAMED[name], *to_batch(step)), oracle(step))
        assert wrong == [], name


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo", "vapo", "a-star-po", "reinforce-pp-baseline", *GIVEN])
def test_the_gradient_is_that_of_the_loss(name: str):
    """Moving one token by 1e-6 each way changes the loss as its slope says, where nothing in the loss is frozen."""
    given = answered(draw(KINDS[0], 5), NAMED[name])
    places = np.argwhere(given.mask)[:6]
    for row, position in places:
        moved = []
        for by in (1e-6, -1e-6):
            current = given.current.copy()
            current[row, position] += by
            moved.append(ORACLES[name](replace(given, current=current)).loss)
        slope = (moved[0] - moved[1]) / 2e-6
        assert ORACLES[name](given).gradient[row, position] == approx(slope, rel=1e-5, abs=1e-8)


def test_the_oracles_know_none_of_our_pieces():
    """Nothing in the room of the oracles imports torch, or anything of gnomon but itself."""
    allowed = {"numpy", "math", "collections", "dataclasses", "typing"}
    for path in Path(oracles.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("gnomon.analysis.dissect.reference"), (
                    f"{path.name}: {name}"
                )
