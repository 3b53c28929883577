"""Corrupt lines of a run's files, counted in the same way by every reader of a run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import numbered, open_plain
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import is_number, is_step, parsed

BUDGET = 32 * 2**20
"""Bytes of rollouts that are read: about a second. Longer runs are read at evenly spaced steps."""
ROLLOUTS = "rollouts"


def damaged(run: RunDirectory, rollouts: int | None = None) -> dict[str, int]:
    """Return how many damaged lines each file of rows has, and the rollout files together; nothing of sound ones.

    A last line without line feed is not whole yet, and counts as little as one that is not there. Of more than 32 MiB
    of rollouts those of evenly spaced steps count.

    Args:
        rollouts: Damaged lines of these, where they were counted already.
    """
    found = {path.name: damaged_rows(path) for path in (run.metrics, run.evaluations, run.findings)}
    if rollouts is None:
        rollouts = sum(damaged_rollouts(path) for path in chosen_rollouts(run).values())
    found[ROLLOUTS] = rollouts
    return {name: count for name, count in found.items() if count}


def damaged_rows(path: Path) -> int:
    """Return how many lines of a file of rows are no object with the number of its step."""
    # A line without its end is being written at this moment.
    return sum(not is_step((parsed(line) or {}).get("step")) for line in lines_of(path) if line.endswith(b"\n"))


def damaged_rollouts(path: Path) -> int:
    """Return how many lines of a rollout file are no rollout."""
    return sum(rollout_row(line) is None for line in lines_of(path))


def rollout_row(line: bytes) -> dict[str, Any] | None:
    """Return what a line of a rollout file says, None where that is no rollout."""
    row = parsed(line)
    if row is None or type(row.get("group")) is not int or "reward" not in row:
        return None
    is_reward = row["reward"] is None or is_number(row["reward"])
    are_texts = isinstance(row.get("task_id"), str) and isinstance(row.get("question"), str)
    return row if is_reward and are_texts else None


def chosen_rollouts(run: RunDirectory, budget: int = BUDGET, also: Sequence[int] = ()) -> dict[int, Path]:
    """Return the rollout files that are read, by step: all, or where they are more than the budget evenly spaced ones.

    The last step is always among them.

    Args:
        also: Further steps.
    """
    there = dict(numbered(run.rollouts, r"step-(\d+)\.jsonl"))
    # Steps are about equally large, so every n-th file keeps to the budget; the whole of each is read.
    stride = max(1, math.ceil(sum(map(_size, there.values())) / budget))
    listed = sorted(there)
    return {step: there[step] for step in sorted({*listed[::stride], *listed[-1:], *(set(also) & there.keys())})}


def in_words(found: Mapping[str, int]) -> str:
    """Return what was damaged in one sentence; empty for nothing.

    >>> in_words({"metrics.jsonl": 2, "rollouts": 1})
    '2 damaged lines in metrics.jsonl and 1 in rollouts were passed over'
    """
    if not found:
        return ""
    (first, count), *others = found.items()
    lines = "line" if count == 1 else "lines"
    said = [f"{count} damaged {lines} in {first}", *(f"{number} in {name}" for name, number in others)]
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"{listed} {'was' if sum(found.values()) == 1 else 'were'} passed over"


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, none where it cannot be read."""
    try:
        with open_plain(path) as file:
            yield from file
    except OSError:
        return


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
