"""What is legal and rarely meant."""

from dataclasses import replace
from typing import Any

import pytest

from gnomon.algorithms import GRPO, NAMED, OPO, P3O, SPO, Algorithm, Entropy, Kl, Prioritized, TrackerConfig, Updates
from gnomon.algorithms.validate import remarks


@pytest.mark.parametrize("preset", NAMED.values(), ids=lambda a: a.name)
def test_there_is_nothing_to_remark_on_a_preset(preset: Algorithm):
    """Papers' own settings are no surprise."""
    assert remarks(preset) == ()


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (OPO, {"updates": Updates(epochs=2, minibatches=4)}, "8 updates a step"),
        (P3O, {"scope": "micro_batch"}, "depends on how the machine cuts a step"),
        (GRPO, {"tracker": TrackerConfig()}, "neither the baseline nor the sampler reads it"),
        (GRPO, {"regularizers": (Kl(),)}, "The coefficient of kl_reference is 0"),
        (GRPO, {"regularizers": (Entropy(0.0),)}, "The coefficient of entropy is 0"),
    ],
)
def test_what_is_rarely_meant_is_one_sentence(base: Algorithm, changes: dict[str, Any], expected: str):
    """Each builds, and is remarked on once, with what to set."""
    (said,) = remarks(replace(base, **changes))

    assert expected in said
    assert "algorithm." in said
    assert said.endswith(".")


def test_a_tracker_with_a_reader_is_not_remarked_on():
    """A curriculum reads it as well as a baseline does."""
    assert remarks(replace(GRPO, tracker=TrackerConfig(), sampler=Prioritized())) == ()
    assert remarks(replace(SPO, num_generations=4)) == ()
