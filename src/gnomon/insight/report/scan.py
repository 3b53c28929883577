"""One pass over the rollouts of a run: which there are, how they were rewarded, and how each prompt went over time."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnomon.records.corruption import BUDGET, chosen_rollouts, lines_of, rollout_row
from gnomon.records.jsonl import is_number
from gnomon.records.reading import RunRecord, column

_ERROR_STEPS = 10
_Z = 1.959964


@dataclass(frozen=True)
class ScannedRun:
    """A rollout by its place.

    Attributes:
        reward: None for an error, and for the dataset's own answer.
        surprise: Reward less what was expected, without its sign.
        is_looked_at: Whether the entropy of its tokens was recorded.
        is_error: Whether it could not be judged.
    """

    step: int
    place: int
    task_id: str
    reward: float | None
    surprise: float = 0.0
    is_looked_at: bool = False
    is_error: bool = False


@dataclass(frozen=True)
class Visit:
    """One visit to one prompt.

    Attributes:
        reward: Mean over the answers.
        value: Tracked before it, None without a tracker.
    """

    step: int
    reward: float
    value: float | None = None


@dataclass
class Scan:
    """What was found.

    Attributes:
        means: Mean rewards of the groups, by step that was read.
        steps: Steps that were read.
        of_steps: Steps that the run has recorded.
        damaged: Lines that are no rollout, as `records.damage` counts them.
    """

    seen: list[ScannedRun] = field(default_factory=list)
    means: dict[int, list[float]] = field(default_factory=dict)
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    of_steps: int = 0
    damaged: int = 0


def scan(record: RunRecord, metrics: Sequence[Mapping[str, Any]], budget: int = BUDGET) -> Scan:
    """Return what the rollouts of the run say.

    Args:
        metrics: Rows which tell in what steps there were errors.
    """
    failed = [step for step, share in column(metrics, "rollout/error_fraction") if share > 0]
    there = record.rollout_steps()
    read = chosen_rollouts(record.files, budget, sorted(set(failed) & set(there))[-_ERROR_STEPS:])
    counted = chosen_rollouts(record.files, budget)
    found = Scan(steps=len(read), of_steps=len(there))
    for step, path in read.items():
        lines = list(lines_of(path))
        rows = [(place, row) for place, line in enumerate(lines) if (row := rollout_row(line)) is not None]
        found.damaged += (len(lines) - len(rows)) * (step in counted)
        _add(found, step, rows)
    return found


def reward_intervals(found: Scan) -> dict[int, tuple[float, float]]:
    """Return the 95% interval of each step's mean reward, for a run of which every step was read; else nothing.

    Mean over groups ± 1.96 standard errors, groups being what was drawn independently; within the rewards that were
    ever given, since no mean is beyond them.
    """
    rewards = [seen.reward for seen in found.seen if seen.reward is not None]
    if found.steps < found.of_steps or not rewards:
        return {}
    least, most = min(rewards), max(rewards)
    found_here = {}
    for step, means in found.means.items():
        if len(means) > 1:
            center, half = statistics.fmean(means), _Z * statistics.pstdev(means) / math.sqrt(len(means) - 1)
            found_here[step] = (max(least, center - half), min(most, center + half))
    return found_here


def _add(found: Scan, step: int, lines: Sequence[tuple[int, dict[str, Any]]]) -> None:
    groups: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
    for place, row in lines:
        groups.setdefault(row.get("group"), []).append((place, row))
    for members in groups.values():
        rewards = [float(row["reward"]) for _, row in members if row["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        baseline: Any = members[0][1].get("baseline")
        value = float(baseline) if is_number(baseline) else None
        expected = mean if value is None else value
        for place, row in members:
            reward = None if row["reward"] is None else float(row["reward"])
            surprise = 0.0 if reward is None else abs(reward - expected)
            is_error = reward is None and row.get("error") is not None
            found.seen.append(ScannedRun(step, place, row["task_id"], reward, surprise, "entropy" in row, is_error))
        if rewards:
            found.means.setdefault(step, []).append(mean)
            name = members[0][1]["task_id"]
            found.visits.setdefault(name, []).append(Visit(step, mean, value))
            found.questions.setdefault(name, members[0][1]["question"][:400])
