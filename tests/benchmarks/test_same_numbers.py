"""Digests of runs: equal under equal seeds, and a difference is named by run, step and what."""

from pathlib import Path

import pytest
from benchmarks.same_numbers import first_difference, main


def test_the_first_difference_is_named_and_a_missing_number_is_one() -> None:
    """Sampled tokens that differ in step 2 are said before the weights that differ because of them."""
    before = {"grpo": {"step 1": {"weights": "a"}, "step 2": {"sampled tokens": "b", "weights": "c"}}}
    after = {"grpo": {"step 1": {"weights": "a"}, "step 2": {"sampled tokens": "x", "weights": "y"}}}
    assert first_difference(before, before) is None
    assert first_difference(before, after) == "grpo, step 2, sampled tokens"
    assert first_difference(before, {"grpo": {"step 1": {"weights": "a"}}}) == "grpo, step 2, sampled tokens"
    assert first_difference({}, before) == "grpo, step 1, weights"
    assert first_difference(before, {}) is None


@pytest.mark.slow
def test_a_changed_seed_is_a_difference_and_the_same_seed_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of one preset are repeated to the last bit, and another seed samples other tokens in step 1."""
    file = str(tmp_path / "digests.json")
    short = ["--preset", "grpo", "--steps", "2"]
    assert main(["write", file, *short]) == 0
    assert main(["compare", file, *short]) == 0
    assert "the same: grpo" in capsys.readouterr().out
    assert main(["compare", file, *short, "--seed", "1"]) == 1
    assert "differs: grpo, step 1, sampled tokens" in capsys.readouterr().out
