"""Reference values of what surrounds the losses, and that no section of the reference is left out."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms.test_golden import GOLDEN, approx

from gnomon.core.statistics import degenerate_probability, draws_until_mixed, pass_at_k
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.models.head import chosen_logprobs
from gnomon.rollouts.curriculum.base import is_informative


def group_of(rewards: list[float], correct: list[float]) -> Group:
    """Return a group with these rewards, of which correctness was one component."""
    rollouts = tuple(
        Rollout("a", (1,), (2,), (True,), (-1.0,), (-1.0,), "", Grade(reward, {"answer": right}), 0, 0, "stop")
        for reward, right in zip(rewards, correct, strict=True)
    )
    return Group(Task("a", (1,), ""), rollouts)


def test_dynamic_sampling_by_reward_and_by_correctness():
    """All right with different penalties: kept when rewards are compared, not when correctness is."""
    expected = GOLDEN["dynamic_sampling"]
    groups = {n: group_of(expected["shaped_rewards"][n], expected["correct"][n]) for n in expected["correct"]}

    assert {n: is_informative(g) for n, g in groups.items()} == expected["keep_by_shaped_reward_spread"]
    assert {n: is_informative(g, "answer") for n, g in groups.items()} == expected["keep_by_accuracy"]
    assert {n: is_informative(g, "format") for n, g in groups.items()} == expected["keep_by_shaped_reward_spread"]


def test_the_cost_of_groups():
    """How often a group of 8 teaches nothing, and how long one waits for a mixed pair."""
    expected = GOLDEN["group_cost"]

    assert [degenerate_probability(p, 8) for p in expected["p"]] == approx(expected["degenerate_prob_G8"], rel=1e-12)
    assert [draws_until_mixed(p) for p in expected["p"]] == approx(expected["expected_draws_until_mixed"], rel=1e-12)


def test_pass_at_k():
    """Five right in sixteen."""
    expected = GOLDEN["pass_at_k"]

    found = [pass_at_k(expected["n"], expected["c"], k) for k in expected["k"]]
    assert found == approx(expected["value"], rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probabilities_of_logits(temperature: float):
    """Log-softmax and entropy at the sampler's temperature, through the head that training uses."""
    expected: Any = GOLDEN["logits"]
    logits = torch.tensor(expected["logits"])
    head = torch.nn.Linear(3, 4, bias=False)
    head.weight.data = logits.T.contiguous()
    found = chosen_logprobs(torch.eye(3), head, torch.tensor(expected["targets"]), temperature, 2, True)

    for tensor, name in zip(found, ("logp", "entropy"), strict=True):
        assert tensor.tolist() == approx(expected[f"T{temperature}"][name], rel=1e-5, abs=1e-6)


def test_no_section_of_the_reference_is_left_out():
    """Every section is read by some test."""
    tests = Path(__file__).parents[1]
    read = {name for path in tests.rglob("test_*.py") for name in re.findall(r"""["'](\w+)["']""", path.read_text())}

    assert set(GOLDEN) - read == set()
