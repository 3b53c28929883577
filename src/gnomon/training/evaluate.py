"""Held-out questions, asked through the same rollout as in training."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from gnomon.core.statistics import mean_interval
from gnomon.core.types import Group, Rollout
from gnomon.records.eval_records import EvalRecord
from gnomon.records.jsonl import read_rows
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.tasks.base import TaskSet

EVALUATION_ROUND = -1


@dataclass(frozen=True)
class EvalScore:
    """A mean over prompts, with its 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Evaluation:
    """What held-out prompts say of one set of weights.

    scores: each part of the grade by name, the first among the samples with each other ("answer given format"), and
        ``reward``: a mean over prompts of the mean over their samples, that is avg@k; the interval is that of
        `mean_interval` over prompts.
    pass_at, maj_at: k to value, of the first part, when its scores are 0 or 1: means over prompts of `pass_at_k` and
        `maj_at_k`. Answers vote in the canonical form of the first reward's verifier.
    intervals: the 95% intervals of what is no score: "pass@2", "maj@4", "tokens", "truncated".
    errors: samples that could not be graded; they are in no score.
    answered: how each prompt was answered, what evaluations are paired by; in a file of its own, not in the row.
    slow: what is computed by a slower way than there could be, with the factor; a run has it in its card instead.
    """

    step: int
    task: str
    prompts: int
    samples: int
    scores: Mapping[str, EvalScore]
    pass_at: Mapping[str, float]
    maj_at: Mapping[str, float]
    length_tokens_mean: float
    truncated_fraction: float
    errors: int
    seconds: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    answered: tuple[EvalRecord, ...] = ()
    slow: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line: the first score with its interval, on how many prompts, after which step."""
        name = next(iter(self.scores))
        return f"{name} {self.headline} on {self.prompts} prompts of '{self.task}' after step {self.step}"

    @property
    def headline(self) -> EvalScore:
        """The first part's score: what "accuracy" means in this evaluation."""
        return next(iter(self.scores.values()))

    @property
    def ungraded(self) -> str:
        """What could not be graded, in words: samples, and prompts that have none at all; "" for nothing."""
        if self.errors == 0:
            return ""
        said = f"{self.errors} of {self.prompts * self.samples} samples could not be graded and are in no score"
        empty = sum(not row.scores for row in self.answered)
        return f"{said}, on {empty} of {self.prompts} prompts none could" if empty else said

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object for ``evaluations.jsonl``; ``slow`` is in it where something is."""
        row = asdict(replace(self, answered=()))
        del row["answered"]
        if not self.slow:
            del row["slow"]
        return row


def read_evaluations(path: Path) -> tuple[Evaluation, ...]:
    """Return the evaluations of a run's file, in order; lines that are none are passed over, as torn ones are."""
    return tuple(found for row in read_rows(path) if (found := _evaluation(row)) is not None)


def _evaluation(row: Mapping[str, Any]) -> Evaluation | None:
    try:
        scores = {name: EvalScore(**score) for name, score in row["scores"].items()}
        intervals = {name: (low, high) for name, (low, high) in row.get("intervals", {}).items()}
        slow = tuple(map(str, row.get("slow", ())))
        found = Evaluation(**{**row, "scores": scores, "intervals": intervals, "answered": (), "slow": slow})
        numbers = [*found.pass_at.values(), *found.maj_at.values(), *(v for s in scores.values() for v in astuple(s))]
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    numbers += [found.length_tokens_mean, found.truncated_fraction, found.seconds]
    numbers += [end for interval in intervals.values() for end in interval]
    counts = [found.step, found.prompts, found.samples, found.errors]
    are_numbers = all(type(n) in (int, float) for n in numbers) and all(type(n) is int for n in counts)
    return found if scores and are_numbers and isinstance(found.task, str) else None


@dataclass(frozen=True)
class Evaluator:
    """Asks held-out tasks; the same draws each time, so two evaluations differ by their weights alone.

    on_group: called as each group arrives, for progress.
    """

    rollouter: Rollouter
    tasks: TaskSet

    async def __call__(self, step: int, on_group: Callable[[Group], None] = lambda group: None) -> Evaluation:
        """Return the evaluation of the weights that the engine holds now."""
        began, watch = time.perf_counter(), RolloutTimer()

        async def ask(index: int) -> Group:
            group = await self.rollouter.ask(self.tasks[index], EVALUATION_ROUND, watch)
            on_group(group)
            return group

        groups = await asyncio.gather(*(ask(index) for index in range(len(self.tasks))))
        evaluation = summarize(groups, step, self.tasks.name, self.rollouter.generations)
        return replace(evaluation, seconds=time.perf_counter() - began)


def summarize(groups: Sequence[Group], step: int, task: str, samples: int) -> Evaluation:
    """Return what graded groups, one a prompt, amount to."""
    rollouts = [r for group in groups for r in group.rollouts]
    count = max(len(rollouts), 1)
    graded = [g for g in ([r for r in group.rollouts if r.grade.error is None] for group in groups) if g]
    names = list(dict.fromkeys(name for g in graded for r in g for name in r.grade.parts))
    parts = {n: [[r.grade.parts[n] for r in g if n in r.grade.parts] for g in graded] for n in names}
    scores = {name: _score(values) for name, values in parts.items()}
    scores |= _given(graded, names)
    scores["reward"] = _score([[r.grade.reward or 0.0 for r in g] for g in graded])
    answered = tuple(EvalRecord.of(group, next(iter(names), "")) for group in groups)
    curves = _curves(answered, samples)
    return Evaluation(
        step=step,
        task=task,
        prompts=len(groups),
        samples=samples,
        scores=scores,
        pass_at={name.removeprefix("pass@"): s.mean for name, s in curves.items() if name.startswith("pass@")},
        maj_at={name.removeprefix("maj@"): s.mean for name, s in curves.items() if name.startswith("maj@")},
        length_tokens_mean=sum(len(r.response) for r in rollouts) / count,
        truncated_fraction=sum(r.is_truncated for r in rollouts) / count,
        errors=sum(r.grade.error is not None for r in rollouts),
        seconds=0.0,
        intervals={name: (s.low, s.high) for name, s in curves.items()},
        answered=answered,
    )


def _given(graded: Sequence[Sequence[Rollout]], names: Sequence[str]) -> dict[str, EvalScore]:
    """Return the first part's mean among the samples whose other 0-or-1 part is 1: right answers, form set aside."""
    found: dict[str, EvalScore] = {}
    for other in names[1:]:
        values = [r.grade.parts.get(other) for g in graded for r in g]
        if set(values) <= {0.0, 1.0} and 1.0 in values:
            chosen = [[r.grade.parts[names[0]] for r in g if r.grade.parts[other] == 1.0] for g in graded]
            found[f"{names[0]} given {other}"] = _score(chosen)
    return found


def _score(values: Sequence[Sequence[float]]) -> EvalScore:
    means = [sum(v) / len(v) for v in values if v]
    return _mean(means) if means else EvalScore(0.0, 0.0, 1.0)


def _mean(values: Sequence[float]) -> EvalScore:
    interval = mean_interval(values)
    return EvalScore(sum(values) / len(values), interval.low, interval.high)


def _curves(answered: Sequence[EvalRecord], samples: int) -> dict[str, EvalScore]:
    """Return pass@k and maj@k for the powers of two up to ``samples``, and for it; length and truncation.

    A curve is over the same prompts at every k: those with any graded sample. Where one of these has too few, or scores
    are not 0 or 1, there is no pass@k and no maj@k.
    """
    found: dict[str, EvalScore] = {}
    rows = [row for row in answered if row.scores]
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= samples} | {samples})
    names = [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in ks if k > 1]
    for name in names if all(row.is_binary for row in rows) else ():
        values = [row.measure(name) for row in rows]
        known = [value for value in values if value is not None]
        if known and len(known) == len(rows):
            found[name] = _mean(known)
    for name in ("tokens", "truncated"):
        known = [value for row in answered if (value := row.measure(name)) is not None]
        if known:
            found[name] = _mean(known)
    return found
