"""Success rates in a JSON file, keyed by task id: what a tracker starts from and what it exports."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gnomon.curriculum.roster import Roster
from gnomon.errors import DatasetError

Rewards = Literal["binary", "continuous"]


def posterior_rate(total: float, samples: float, rewards: Rewards, prior: float) -> float:
    """Return the value of a task from rollouts that earned ``total`` in ``samples`` tries.

    Binary: (successes + prior) / (samples + 2 prior), so that 0 of 8 is rare rather than impossible
    (Jeffreys' 1/2: 1/18); prior 0 is the paper's plain mean. Continuous: the plain mean, for a pseudo-count
    has no scale there.

    >>> round(posterior_rate(2, 8, "binary", 0.5), 8), posterior_rate(2, 8, "continuous", 0.5)
    (0.27777778, 0.25)
    """
    if rewards == "continuous":
        return total / samples
    return (total + prior) / (samples + 2 * prior)


def read_rates(path: Path, rewards: Rewards, prior: float) -> dict[str, float]:
    """Return task id to value from a JSON object, id to a rate or to ``[successes, samples]``.

    A rate is taken as it is; counts get ``prior``.

    Raises: DatasetError when the file is missing, is no JSON object, or holds entries that are neither; the
    message lists the first of these.
    """
    rates: dict[str, float] = {}
    wrong: list[str] = []
    for task_id, entry in _read(path).items():
        rate = _rate(entry, rewards, prior)
        if rate is None:
            wrong.append(f"{task_id!r}: {json.dumps(entry)[:60]}")
            continue
        rates[task_id] = rate
    if wrong:
        scale = "in [0, 1]" if rewards == "binary" else "finite"
        raise DatasetError(
            f"{path} has {len(wrong)} entries that are neither a rate ({scale}) nor [successes, samples]: "
            f"{'; '.join(wrong[:5])}"
        )
    return rates


def read_values(path: Path) -> dict[str, float]:
    """Return task id to value from a JSON object, id to any finite number.

    Raises: DatasetError when the file is missing, is no JSON object, or holds anything else.
    """
    values = _read(path)
    wrong = [f"{task_id!r}: {json.dumps(entry)[:60]}" for task_id, entry in values.items() if not _is_number(entry)]
    if wrong:
        raise DatasetError(f"{path} has {len(wrong)} entries that are no finite number: {'; '.join(wrong[:5])}")
    return {task_id: float(entry) for task_id, entry in values.items()}


def places(values: Mapping[str, float], roster: Roster, path: Path) -> dict[int, float]:
    """Return index to value of the tasks that ``roster`` knows; ids of other tasks are passed over.

    Raises: DatasetError when it knows none.
    """
    named = {roster.find(task_id): value for task_id, value in values.items()}
    ours = {index: value for index, value in named.items() if index is not None}
    if not ours:
        example = f", such as {next(iter(values))!r}" if values else ""
        raise DatasetError(
            f"none of the {len(values)} ids in {path}{example} is one of the {len(roster)} tasks; "
            "tracker.initial needs the ids of this task set"
        )
    return ours


def write_rates(path: Path, rates: Mapping[str, float]) -> None:
    """Write task id to rate; `read_rates` returns the same numbers."""
    path.write_text(json.dumps(dict(rates), ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise DatasetError(f"success rates cannot be read from {path}: {problem}") from problem
    if not isinstance(content, dict):
        raise DatasetError(f"{path} must hold one JSON object, task id to rate, but holds a {type(content).__name__}")
    return content


def _rate(entry: Any, rewards: Rewards, prior: float) -> float | None:
    """Return the value that a file's entry means, or None if it means nothing."""
    if _is_number(entry):
        return float(entry) if rewards == "continuous" or 0 <= entry <= 1 else None
    if not (isinstance(entry, list) and len(entry) == 2 and all(_is_number(part) for part in entry)):
        return None
    total, samples = entry
    if samples < 1 or (rewards == "binary" and not 0 <= total <= samples):
        return None
    return posterior_rate(total, samples, rewards, prior)


def _is_number(entry: Any) -> bool:
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        return False
    try:
        return math.isfinite(entry)
    except OverflowError:
        return False
