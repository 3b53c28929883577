"""Read a finished run for a comparison: scores by tokens, costs, and the prompts that the run asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from gnomon.core.errors import DatasetError
from gnomon.records.eval_records import answered_after
from gnomon.records.jsonl import read_rows, waste_cause
from gnomon.records.reading import RunRecord, number
from gnomon.training.evaluate import read_evaluations

STAGES = ("generate", "grade", "score", "update", "publish", "track")
Unit = Literal["tokens", "seconds", "steps"]
"""The unit of the budget, which is the same for all runs of a comparison."""


@dataclass(frozen=True)
class Point:
    """One evaluation.

    Attributes:
        tokens: Generated for training before the evaluation.
        seconds: Of training before the evaluation.
        steps: Before the evaluation.
        score: Mean of the first score.
    """

    tokens: float
    seconds: float
    steps: float
    score: float

    def spent(self, unit: Unit) -> float:
        """Return the amount that training had spent."""
        return {"tokens": self.tokens, "seconds": self.seconds, "steps": self.steps}[unit]


@dataclass(frozen=True)
class Cost:
    """The cost of a run, or the mean cost of several runs.

    Attributes:
        tokens: Generated for training in all.
        before: Tokens before the first step, for initial values or a critic.
        trained: Tokens with a gradient.
        wasted: Cause to tokens.
        seconds: Stage to seconds.
    """

    steps: float
    tokens: float
    before: float
    trained: float
    wasted: Mapping[str, float]
    seconds: Mapping[str, float]

    @classmethod
    def mean(cls, costs: Sequence["Cost"]) -> "Cost":
        """Return the mean over runs."""
        return cls(**{field.name: _mean([getattr(cost, field.name) for cost in costs]) for field in fields(cls)})


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of tables' numbers by name; one that a table has not is 0 there."""
    if not isinstance(values[0], Mapping):
        return sum(values) / len(values)
    names = dict.fromkeys(name for table in values for name in table)
    return {name: _mean([table.get(name, 0.0) for table in values]) for name in names}


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        points: Evaluations in order.
        scores: Prompt to mean score of the last evaluation.
        rewards: Tokens spent and mean training reward, for each step.
        asked: Prompts of each step, in recorded order; empty without recorded rollouts.
        is_filtered: Whether the run removed groups. Then the order within a step is not recorded.
    """

    algorithm: str
    seed: int
    path: Path
    points: tuple[Point, ...]
    scores: Mapping[str, float]
    rewards: tuple[tuple[float, float], ...]
    cost: Cost
    asked: tuple[tuple[str, ...], ...]
    is_filtered: bool

    def at(self, mark: float, unit: Unit) -> Point:
        """Return the first evaluation at or after ``mark``, or the last evaluation."""
        # An evaluation happens between steps, so it may come a little after its share of the budget was spent.
        late = [point for point in self.points if point.spent(unit) >= mark]
        return late[0] if late else self.points[-1]


def read_trained(algorithm: str, seed: int, path: Path) -> Trained:
    """Read a finished run's files.

    Raises:
        DatasetError: If the files lack what a comparison needs.
    """
    record = RunRecord.of(path)
    rows = record.metrics()
    points = _points(path, rows)
    if not points:
        raise DatasetError(f"{path} holds no evaluation, so it cannot be compared; remove it and train again")
    asked, is_filtered = _asked(record)
    spent = [_number(row, "tokens/generated_total") for row in rows]
    return Trained(
        algorithm=algorithm,
        seed=seed,
        path=path,
        points=points,
        scores=_scores(record),
        rewards=tuple((tokens, _number(row, "rollout/reward_mean")) for tokens, row in zip(spent, rows, strict=True)),
        cost=_cost(rows),
        asked=asked,
        is_filtered=is_filtered,
    )


def _points(path: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    before = _before(rows)
    # Step 0 is the evaluation before training. Tokens that the run generated for initial
    # values or a critic count there already, so that a curve starts where its budget did.
    spent = {0: (before, 0.0)}
    seconds = 0.0
    for row in rows:
        seconds += _number(row, "time/step_seconds")
        spent[row["step"]] = (_number(row, "tokens/generated_total"), seconds)
    # An evaluation of a step whose metrics are torn has no known cost, so it cannot be placed on the curve.
    found = [e for e in read_evaluations(path / "evaluations.jsonl") if e.step in spent]
    return tuple(Point(*spent[e.step], float(e.step), e.headline.mean) for e in found)


def _before(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens generated before the first step."""
    # The total counts from the run's beginning and the other number
    # is the first step's own, so what is left was spent before it.
    return _number(rows[0], "tokens/generated_total") - _number(rows[0], "tokens/generated") if rows else 0.0


def _scores(record: RunRecord) -> dict[str, float]:
    steps = [row["step"] for row in record.evaluations()]
    answered = answered_after(record.files.answers, steps[-1]) if steps else ()
    return {row.prompt_id: score for row in answered if (score := row.measure("avg")) is not None}


def _cost(rows: Sequence[Mapping[str, Any]]) -> Cost:
    wasted: dict[str, float] = {}
    for row in rows:
        for name in row:
            if cause := waste_cause(name).replace("_", " "):
                # Recorded as a fraction of the step's tokens; steps differ in
                # length, so tokens are summed and not fractions.
                wasted[cause] = wasted.get(cause, 0.0) + _number(row, name) * _number(row, "tokens/generated")
    seconds = {stage: sum(_number(row, f"time/{stage}_seconds") for row in rows) for stage in STAGES}
    seconds["step"] = sum(_number(row, "time/step_seconds") for row in rows)
    return Cost(
        steps=float(len(rows)),
        tokens=_before(rows) + sum(_number(row, "tokens/generated") for row in rows),
        before=_before(rows),
        trained=sum(_number(row, "tokens/trained") for row in rows),
        wasted=wasted,
        seconds=seconds,
    )


def _asked(record: RunRecord) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """Return the prompts of each step, and whether groups were removed."""
    steps, is_filtered = [], False
    for step in record.rollout_steps():
        groups: dict[int, str] = {}
        for row in read_rows(record.files.rollouts / f"step-{step:06d}.jsonl"):
            number = row.get("group")
            # A group has one prompt and several rows; its number is the place in the order in which prompts were asked.
            groups.setdefault(number if type(number) is int else -1, str(row.get("task_id")))
            # Dynamic sampling records removed groups behind the kept ones, which breaks the order within the step.
            is_filtered = is_filtered or row.get("kept") is False
        steps.append(tuple(task for _, task in sorted(groups.items())))
    return tuple(steps), is_filtered


def _number(row: Mapping[str, Any], name: str) -> float:
    return number(row, name) or 0.0
