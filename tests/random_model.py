"""The experiment of tests that begin with random weights; the recipe `tiny` begins with a model that was taught."""

from pathlib import Path

RANDOM = str(Path(__file__).with_suffix(".toml"))
