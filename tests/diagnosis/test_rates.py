"""The page of the diagnosis has the rates of misses and false alarms that the recorded runs give."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from gnomon.diagnosis.catalog import RULES

FILE = Path(__file__).parents[2] / "experiments" / "diagnosis" / "run.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Return the program that trains and judges."""
    spec = importlib.util.spec_from_file_location("diagnosed_runs", FILE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_page_has_the_rates_of_the_recorded_runs(program: ModuleType):
    """`python experiments/diagnosis/run.py --write` writes it; newer rules are named."""
    recorded = json.loads((FILE.parent / "results.json").read_text())
    page = program.page(recorded["runs"], recorded["rules"])

    assert page == program.PAGE.read_text()
    assert set(recorded["rules"]) <= RULES.keys()
    assert all(f"| `{name}` |" in page for name in RULES)


def test_a_miss_and_a_false_alarm_are_counted_by_rule(program: ModuleType):
    """A fault whose rule made a note alone is missed; a healthy run with a warning is a false alarm."""
    sick = {"case": "too hard", "is_healthy": False}
    healthy = {"case": "grpo", "is_healthy": True}
    found = program.rates(
        [
            {**sick, "findings": {"all-wrong": "severe"}},
            {**sick, "findings": {"all-wrong": "note", "reward-falls": "severe"}},
            {**healthy, "findings": {"all-wrong": "warning"}},
            {**healthy, "findings": {"reward-falls": "note"}},
        ]
    )

    assert "| `all-wrong` | 2 | 1 (50%; 9% to 91%) | 2 | 1 (50%; 9% to 91%) |" in found
    assert "| `reward-falls` | 0 | not tried | 2 | 0 (0%; 0% to 66%) |" in found
