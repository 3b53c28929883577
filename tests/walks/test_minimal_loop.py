"""The loop of examples/minimal_loop.py: short enough to read, and training works."""

import asyncio
import importlib.util
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_loop.py"


@pytest.fixture
def minimal_loop() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("minimal_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_has_at_most_150_lines_and_needs_no_launcher() -> None:
    """The example builds everything itself: nothing is imported from the rooms that build a run."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "import gnomon.training" not in text
    assert "from gnomon.training" not in text
    assert "from gnomon.config" not in text


@pytest.mark.slow
def test_rewards_rise_in_the_minimal_loop(minimal_loop: ModuleType) -> None:
    """From random weights to more than three times the reward of the first ten steps within forty."""
    rewards, _, _ = asyncio.run(minimal_loop.train(steps=40))
    assert len(rewards) == 40
    assert fmean(rewards[-10:]) > 3 * fmean(rewards[:10])
