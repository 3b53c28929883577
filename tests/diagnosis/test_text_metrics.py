"""What is measured of the answers of a step: numbers worked out by hand, and laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnosis.rows import group, rollout

from gnomon.core.statistics import degenerate_probability
from gnomon.diagnosis.text_metrics import expected_degenerate, measure_answers, rank_correlation, repetition


def test_repetition_counts_runs_of_four_tokens():
    """1 2 3 4 1 2 3 4 has five runs of four: 1234, 2341, 3412, 4123, 1234; one of five was there before."""
    assert repetition(rollout([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(0.2)
    assert repetition(rollout([7] * 8)) == pytest.approx(0.8)
    assert repetition(rollout([1, 2, 3, 4, 5, 6, 7])) is None


def test_copies_are_held_against_chance():
    """Of three answers two are alike: one pair of three. Chance is the mean of 1/2, 1/2 and 1/4: 5/12."""
    found = measure_answers([group(rollout([1]), rollout([1]), rollout([2, 3]))])

    assert found["rollout/duplicate_pair_fraction"] == pytest.approx(1 / 3)
    assert found["rollout/duplicate_pair_expected_fraction"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)


def test_independent_draws_are_as_alike_as_chance_says():
    """Of 400 groups of 8 draws among answers of probability .5, .3 and .2, 38% of pairs agree: .25 + .09 + .04."""
    random = np.random.default_rng(0)
    chances = [0.5, 0.3, 0.2]
    groups = [
        group(*(rollout([int(y)], logprobs=[math.log(chances[y])]) for y in random.choice(3, 8, p=chances)))
        for _ in range(400)
    ]
    found = measure_answers(groups)

    assert found["rollout/duplicate_pair_fraction"] == pytest.approx(0.38, abs=0.02)
    assert found["rollout/duplicate_pair_expected_fraction"] == pytest.approx(0.38, abs=0.02)


def test_lengths_are_compared_within_prompts():
    """In both prompts the longer answer earns more (+1), though the prompt of long answers earns less in all (-)."""
    easy = group(rollout([1], 0.8), rollout([1, 2], 0.9), name="easy")
    hard = group(rollout([1] * 8, 0.1), rollout([1] * 9, 0.2), name="hard")

    assert measure_answers([easy, hard])["rollout/length_reward_correlation"] == pytest.approx(1.0)
    alone = [group(r, name=str(n)) for n, r in enumerate((*easy.rollouts, *hard.rollouts))]
    assert measure_answers(alone)["rollout/length_reward_correlation"] == pytest.approx(-0.6)


def test_what_truncation_costs_is_measured():
    """Two cut off answers earn 0 and 0.5 (mean 0.25), a complete one 1; an error is in neither."""
    answers = [rollout([1], 0.0, "length"), rollout([2], 0.5, "length"), rollout([3], 1.0), rollout([4], None)]
    found = measure_answers([group(*answers)])

    assert found["rollout/truncated_reward_mean"] == pytest.approx(0.25)
    assert found["rollout/complete_reward_mean"] == pytest.approx(1.0)


def test_leverages_times_weights_add_up_to_one():
    """Reward = 0.5 a + b; a and b are independent, so of the variance 0.25/4 + 1/4 the part b has 0.8, a 0.2."""
    answers = [rollout([a, b], 0.5 * a + b, parts={"a": float(a), "b": float(b)}) for a in (0, 1) for b in (0, 1)]
    found = measure_answers([group(*answers)])

    assert found["reward/a_leverage"] * 0.5 == pytest.approx(0.2)
    assert found["reward/b_leverage"] == pytest.approx(0.8)
    assert found["reward/a_std"] == pytest.approx(0.5)


def test_equal_rates_give_the_closed_form():
    """Prompts that are all alike in what they show are as often all right as p^G says: (1/2)^4."""
    right, wrong = expected_degenerate([(2, 4), (2, 4), (1, 4), (3, 4)])

    assert right + wrong == pytest.approx(degenerate_probability(0.5, 4))


def test_rates_that_differ_make_more_of_them():
    """Half the groups all right and half all wrong: E[p] = E[p^2] = 1/2, so that p is 0 or 1 and all are expected."""
    right, wrong = expected_degenerate([(8, 8), (0, 8)] * 10)

    assert right == pytest.approx(0.5, abs=0.01)
    assert wrong == pytest.approx(0.5, abs=0.01)


def test_expected_shares_are_met_by_independent_draws():
    """Of 2000 prompts with rates from Beta(1, 2), 8 answers each, as many are degenerate as is expected of them."""
    random = np.random.default_rng(1)
    counts = [(int(random.binomial(8, random.beta(1, 2))), 8) for _ in range(2000)]
    right, wrong = expected_degenerate(counts)

    assert right == pytest.approx(sum(k == 8 for k, _ in counts) / 2000, abs=0.01)
    assert wrong == pytest.approx(sum(k == 0 for k, _ in counts) / 2000, abs=0.02)


@given(st.lists(st.tuples(st.integers(0, 6), st.just(6)), min_size=1, max_size=20))
def test_expected_shares_are_shares(counts):
    """Whatever the groups show, both are in [0, 1] and so is their sum, but for rounding."""
    right, wrong = expected_degenerate(counts)

    assert 0 <= right <= 1 + 1e-9
    assert 0 <= wrong <= 1 + 1e-9
    assert right + wrong <= 1 + 1e-9


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_a_rank_correlation_is_within_one_and_with_itself_one(numbers):
    """Spearman's correlation of numbers with themselves is 1, with their opposites -1; of equal ones there is none."""
    values = np.round(np.array(numbers), 6)
    found = rank_correlation(values, values)

    if len(set(values.tolist())) == 1:
        assert found is None
    else:
        assert found == pytest.approx(1.0)
        assert rank_correlation(values, -values) == pytest.approx(-1.0)


def test_nothing_is_measured_of_nothing():
    """A step without groups, or with one answer a prompt and one length, has none of these numbers but what it can."""
    assert set(measure_answers([])) == set()
    assert "rollout/duplicate_pair_fraction" not in set(measure_answers([group(rollout([1]))]))
    assert "rollout/length_reward_correlation" not in set(measure_answers([group(rollout([1]), rollout([2]))]))


@pytest.mark.parametrize(
    ("text", "is_marked"),
    [
        ("<think>a</think>7", True),
        ("</think>7", True),
        ("<answer>7</answer>", True),
        ("so \\boxed{7}", True),
        ("so \\boxed {7}", True),
        ("4 + 3\n#### 7", True),
        ("```python\nx\n```", True),
        ("<tool_call>{}</tool_call>", True),
        ("<final_answer>7</final_answer>", True),
        ("<REASONING>a</REASONING> 7", True),
        ("[THINK]a[/THINK]7", True),
        ("<|end_of_thought|>7", True),
        ("so \\fbox{7}", True),
        ("  ~~~\nx\n  ~~~", True),
        ("**Answer:** 7", True),
        ("The answer is 7.", True),
        ("a<|im_end|>\n<|im_start|>user\nb", False),
        ("1 < 2 and 3 </ 4 >", False),
        ("answering it", False),
        ("7", False),
        ("the #### of", False),
        ("<think>never ends", False),
    ],
)
def test_marks_of_answers_are_found(text, is_marked):
    """Two different answers with the mark and one without it: two thirds are marked, and what they earn is measured."""
    marked = [replace(rollout([n], reward=float(n)), text=f"{text}{' ' * n}") for n in (0, 1)]

    found = measure_answers([group(*marked, rollout([7], reward=1.0))])

    names = [f"rollout/marked_{name}" for name in ("fraction", "reward_mean", "reward_std")]
    shown = [found[name] for name in names if name in found]
    assert shown == ([pytest.approx(2 / 3), 0.5, 0.5] if is_marked else [])
