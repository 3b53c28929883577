"""Every metric that the code measures has a meaning, and every meaning belongs to a metric."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import gnomon
from gnomon.core.metric_meanings import MEANINGS, metric_of

PACKAGE = Path(gnomon.__file__).parent
STATIONS = {name.partition("/")[0] for name in MEANINGS}
METRIC = re.compile(r"([a-z]+)/[a-z0-9_*]+")
# Rooms that show metrics or translate their names for other programs; `stale_fraction` is a former name that is read.
READERS = ("insight", "cli", "analysis", "diagnosis/rules")
NO_METRICS = {"waste/stale_fraction", "memory/peak_gib", "turns/ended_by_", "turns/role_"}


@cache
def measured() -> set[str]:
    """Return the names of metrics in the code; a part that a run gives is an asterisk."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(READERS) or place in ("core/metric_meanings.py", "records/sinks.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    matched = {name: METRIC.fullmatch(name) for name in found}
    return {name for name, match in matched.items() if match and match[1] in STATIONS} - NO_METRICS


def test_every_metric_of_the_code_has_a_meaning():
    """A name that the code writes is in the table, by itself or by its pattern."""
    names = {name: re.compile(name.replace("*", r"\w+")) for name in measured()}
    unknown = {name: pattern for name, pattern in names.items() if metric_of(name) is None}

    assert len(names) > 100
    assert [name for name, pattern in unknown.items() if not any(map(pattern.fullmatch, MEANINGS))] == []


def test_every_meaning_belongs_to_a_metric_of_the_code():
    """No entry is left of a metric that the code does not write any more."""
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\w+")) for name in measured()]

    assert [entry for entry in MEANINGS if not any(pattern.fullmatch(entry) for pattern in patterns)] == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rollout/reward_mean", "rollout/reward_mean"),
        ("reward/format_mean", "reward/NAME_mean"),
        ("reward/my_own_leverage", "reward/NAME_leverage"),
        ("mismatch/engine_abs_nats", "mismatch/PART_abs_nats"),
        ("mismatch/engine_nats", "mismatch/PART_nats"),
        ("turns/ended_by_flood_fraction", "turns/ended_by_CAUSE_fraction"),
        ("time/generate_seconds", "time/generate_seconds"),
        ("mine/thing", None),
    ],
)
def test_a_name_finds_its_entry(name: str, entry: str | None):
    """A name that a run gives belongs to the longest pattern; a user's own belongs to none."""
    assert metric_of(name) == entry
