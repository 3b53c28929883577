"""What is advised can be typed: every key that a rule names is a key of an experiment."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import gnomon.diagnosis.rules
from gnomon.algorithms import PRESETS
from gnomon.config.experiment import load

KEY = re.compile(r"\b(?:(?:algorithm|learner|sampling|grading|engine|checkpoints|evaluation|task)(?:\.[a-z_0-9]+)+)")
RULES = Path(gnomon.diagnosis.rules.__file__).parent
SOURCES = (*sorted(RULES.glob("*.py")), RULES.parent / "remedies.toml")
NAMED = sorted({key for path in SOURCES for key in KEY.findall(path.read_text())})


def is_key(value: Any, path: list[str]) -> bool:
    """Whether one goes from field to field to the end of the path."""
    if not path:
        return True
    names = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    return path[0] in names and is_key(getattr(value, path[0]), path[1:])


@pytest.fixture(scope="module")
def experiments() -> list[Any]:
    """One experiment of each algorithm."""
    return [load("tiny", [f"algorithm={name}"]).experiment for name in PRESETS]


def test_what_is_advised_is_a_key(experiments: list[Any]):
    """Every key in a rule's text is one of some experiment; there are many, and a misspelled one is noticed."""
    assert [key for key in NAMED if not any(is_key(e, key.split(".")) for e in experiments)] == []
    assert len(NAMED) > 20
    assert not any(is_key(e, ["learner", "optimizer", "learningrate"]) for e in experiments)
