"""Held-out questions, asked through the same rollout as in training."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gnomon.core.statistics import macro_interval, mean_interval
from gnomon.core.types import Batch, Grade, Group, Rollout
from gnomon.engines.base import Sampling
from gnomon.learner.base import Learner
from gnomon.records.eval_records import EvalRecord
from gnomon.records.jsonl import read_rows
from gnomon.rewards.grading import Grading
from gnomon.rollouts.collate import collate
from gnomon.rollouts.dataset_rollouter import DatasetRollouter
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.tasks.base import TaskSet

# Rounds of training count from 0, so evaluations share no random numbers with them.
EVALUATION_ROUND = -1
_ROWS = 256
"""Held-out rows that are measured at once; the learner cuts them into micro-batches."""
_MOST = 700.0
"""Nats whose exponential a float still holds."""


@dataclass(frozen=True)
class EvalScore:
    """A mean over prompts, with its 95% interval: from 0 to 1, and shown as a dash, where no sample was graded."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 1.0

    def __str__(self) -> str:
        return self.shown if self == EvalScore() else f"{self.shown} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def shown(self) -> str:
        """The mean with three digits, or the dash."""
        return "-" if self == EvalScore() else f"{self.mean:.3f}"


@dataclass(frozen=True)
class Evaluation:
    """What held-out prompts say of one set of weights.

    Attributes:
        scores: Each part of the grade by name, the first among the samples with each other ("answer given format"), and
            ``reward``: a mean over prompts of the mean over their samples, that is avg@k; the interval is that of
            `mean_interval` over prompts.
        pass_at: k to the mean over prompts of `pass_at_k`, for the first part where its scores are 0 or 1.
        maj_at: k to the mean over prompts of `maj_at_k`, for the same part. Answers vote in the canonical form of the
            first reward's verifier.
        intervals: The 95% intervals of what is no score: "pass@2", "maj@4", "tokens", "truncated".
        errors: Samples that could not be graded; they are in no score.
        answered: How each prompt was answered, what evaluations are paired by; in a file of its own, not in the row.
        slow: What is computed by a slower way than there could be, with the factor; a run has it in its card instead.
        drawn: How answers were drawn, in words, with what of it is training's.
        loss_nats: Loss a token of the dataset's own answers to held-out questions, where they are trained on; None
            elsewhere. ``likelihood`` among the scores is the geometric mean of an answer's token probabilities.
        perplexity: exp(loss_nats).
        parts: The evaluation of each set, where several were asked; all other numbers are then of their macro average
            (scores, pass@k, maj@k, their intervals) or of all samples together (tokens, truncated, errors).
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
    drawn: str = ""
    parts: tuple["Evaluation", ...] = ()
    loss_nats: float | None = None
    perplexity: float | None = None

    def __str__(self) -> str:
        """Return one line: the first score with its interval, on how many prompts, after which step."""
        name = next(iter(self.scores))
        each = f" ({', '.join(f'{p.task} {p.headline.shown}' for p in self.parts)})" if self.parts else ""
        return f"{name} {self.headline} on {self.prompts} prompts of '{self.task}' after step {self.step}{each}"

    @property
    def headline(self) -> EvalScore:
        """The first part's score: what "accuracy" means in this evaluation."""
        return next(iter(self.scores.values()))

    @property
    def ungraded(self) -> str:
        """What could not be graded, in words: samples, and prompts that have none at all; "" for nothing."""
        if self.errors == 0:
            return ""
        drawn = sum(p.prompts * p.samples for p in self.parts or (self,))
        said = f"{self.errors} of {drawn} samples could not be graded and are in no score"
        empty = sum(row.errors == row.samples for row in self.answered)
        return f"{said}, on {empty} of {self.prompts} prompts none could" if empty else said

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object for ``evaluations.jsonl``; what not every evaluation has only with content."""
        # ``answered`` has a file of its own, and parts have their own form.
        row = asdict(replace(self, answered=(), parts=()))
        del row["answered"]
        row["parts"] = [part.as_row() for part in self.parts]
        is_kept = {name: bool(row[name]) for name in ("slow", "drawn", "parts")}
        is_kept |= {name: row[name] is not None for name in ("loss_nats", "perplexity")}
        return {name: value for name, value in row.items() if is_kept.get(name, True)}


_FORM = TypeAdapter(Evaluation)


def read_evaluations(path: Path) -> tuple[Evaluation, ...]:
    """Return the evaluations of a run's file, in order; lines that are none are passed over, as torn ones are."""
    return tuple(found for row in read_rows(path) if (found := _evaluation(row)) is not None)


def _evaluation(row: Mapping[str, Any]) -> Evaluation | None:
    try:
        # Strict: a row that was torn or edited must not be read as numbers that it does not have.
        found = _FORM.validate_json(json.dumps(row), strict=True)
    except ValidationError:
        return None
    return found if all(each.scores for each in (found, *found.parts)) else None


@dataclass(frozen=True)
class EvalSet:
    """One set of held-out questions, and how it is asked.

    Attributes:
        tasks: Its questions.
        sampling: How answers are drawn.
        samples: Answers to each question.
        grading: What judges them.
        drawn: The sampling in words.
    """

    tasks: TaskSet
    sampling: Sampling
    samples: int
    grading: Grading
    drawn: str


@dataclass(frozen=True)
class Evaluator:
    """Asks held-out sets one after another; the same draws each time, so two evaluations differ by their weights alone.

    Attributes:
        asking: Opens what asks and grades one set, for as long as that set is asked.
    """

    asking: Callable[[EvalSet], AbstractAsyncContextManager[Rollouter]]
    eval_sets: tuple[EvalSet, ...]

    @property
    def prompts(self) -> int:
        """Questions of all sets."""
        return sum(len(eval_set.tasks) for eval_set in self.eval_sets)

    async def __call__(self, step: int, on_group: Callable[[Group], None] = lambda group: None) -> Evaluation:
        """Return the evaluation of the weights that the engine holds now; on_group is called as each group arrives."""
        found = [await self._one(eval_set, step, on_group) for eval_set in self.eval_sets]
        return found[0] if len(found) == 1 else macro_average(found)

    async def _one(self, eval_set: EvalSet, step: int, on_group: Callable[[Group], None]) -> Evaluation:
        began, watch = time.perf_counter(), RolloutTimer()
        async with self.asking(eval_set) as rollouter:

            async def ask(index: int) -> Group:
                group = await rollouter.run_group(eval_set.tasks[index], EVALUATION_ROUND, watch)
                on_group(group)
                return group

            groups = await asyncio.gather(*(ask(index) for index in range(len(eval_set.tasks))))
        evaluation = summarize(groups, step, eval_set.tasks.name, eval_set.samples, tuple(eval_set.grading.weights))
        return replace(evaluation, seconds=time.perf_counter() - began, drawn=eval_set.drawn)


@dataclass(frozen=True)
class LikelihoodEvaluator:
    """Measures how likely the weights find the dataset's own answers, and has answers generated where that is asked.

    Of a reward model it measures how often the chosen answer's score is the higher one, a tie counting half.

    Attributes:
        learner: Whose weights.
        rows: Held-out questions with their answers; None where they have none.
        source: Gives the answers as rollouts.
        asked: Generates and judges answers; None where none is generated.
        publish: Brings the weights to the engine.
    """

    learner: Learner
    rows: TaskSet | None
    source: DatasetRollouter
    temperature: float
    asked: Evaluator | None
    publish: Callable[[], Awaitable[object]]

    @property
    def prompts(self) -> int:
        """Rows that are measured, and questions that are asked."""
        return len(self.rows or ()) + (0 if self.asked is None else self.asked.prompts)

    async def __call__(self, step: int, on_group: Callable[[Group], None] = lambda group: None) -> Evaluation:
        """Return the evaluation of the learner's weights; on_group is called as each row is measured or answered."""
        found = None if self.rows is None else await self._measured(self.rows, step, on_group)
        if self.asked is None:
            assert found is not None, "held-out rows are measured, or answers are asked for"
            return found
        await self.publish()
        judged = await self.asked(step, on_group)
        if found is None:
            return judged
        scores = {**judged.scores, "likelihood": found.headline}
        return replace(judged, scores=scores, loss_nats=found.loss_nats, perplexity=found.perplexity)

    async def _measured(self, held_out: TaskSet, step: int, on_group: Callable[[Group], None]) -> Evaluation:
        began, groups = time.perf_counter(), list[Group]()
        # Summed over all rows, since the loss is a mean over tokens and rows differ in length.
        lost, tokens = 0.0, 0
        for first in range(0, len(held_out), _ROWS):
            rows = [held_out[n] for n in range(first, min(first + _ROWS, len(held_out)))]
            answered = [await self.source.run_group(row, EVALUATION_ROUND, RolloutTimer()) for row in rows]
            batch = collate(answered, self.temperature)
            if self.source.generations > 1:
                groups += await self._ranked(answered, batch, on_group)
                continue
            logprobs = (await self.learner.logprobs(batch)).double()
            for group, own, mask in zip(answered, logprobs, batch.mask, strict=True):
                nats, count = -float(own[mask].sum()), int(mask.sum())
                lost, tokens = lost + nats, tokens + count
                # The geometric mean of the token probabilities, in (0, 1], whatever the length.
                likelihood = math.exp(-nats / max(count, 1))
                grade = Grade(likelihood, {"likelihood": likelihood})
                groups.append(Group(group.task, (replace(group.rollouts[0], grade=grade),)))
                on_group(groups[-1])
        loss = lost / max(tokens, 1)
        found = summarize(groups, step, held_out.name, 1)
        # The "reward" of such a grade is the likelihood again, and pass@k means nothing.
        scores = {name: score for name, score in found.scores.items() if name != "reward"}
        seconds = time.perf_counter() - began
        found = replace(found, scores=scores, pass_at={}, seconds=seconds)
        if self.source.generations > 1:
            return found
        return replace(found, loss_nats=loss, perplexity=math.exp(min(loss, _MOST)))

    async def _ranked(self, pairs: Sequence[Group], batch: Batch, on_group: Callable[[Group], None]) -> Sequence[Group]:
        """Return the chosen answers, graded by whether their score is the higher one, and by how much."""
        scores = (await self.learner.score(batch, {"values"})).bootstrap
        assert scores is not None, "values come with it"
        found = []
        # Rows alternate: the chosen answer, then the rejected one; values are (2 * pairs,).
        for pair, (chosen, other) in zip(pairs, scores.double().view(-1, 2).tolist(), strict=True):
            accuracy = float(chosen > other) + float(chosen == other) / 2
            grade = Grade(accuracy, {"accuracy": accuracy, "margin": chosen - other})
            found.append(Group(pair.task, (replace(pair.rollouts[0], grade=grade),)))
            on_group(found[-1])
        return found


def macro_average(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation of several sets together: each set counts the same, whatever its size.

    The first score is the mean of the sets' first scores, under their name if they share one, else "score"; "reward" is
    that of their rewards. pass@k and maj@k are there for each k that all sets have.
    """
    first = parts[0]
    headings = {next(iter(part.scores)) for part in parts}
    heading = headings.pop() if len(headings) == 1 else "score"
    rows = [part.answered for part in parts]
    scores = {heading: _macro([part.headline.mean for part in parts], rows, "avg")}
    rewards = [part.scores["reward"].mean for part in parts if "reward" in part.scores]
    if heading != "reward" and len(rewards) == len(parts):
        mean = sum(rewards) / len(rewards)
        is_same = all(part.scores["reward"] == part.headline for part in parts)
        ends = [(part.scores["reward"].low, part.scores["reward"].high) for part in parts]
        scores["reward"] = scores[heading] if is_same else EvalScore(mean, *_within(ends))
    # pass@k and maj@k are averaged only where every set has them.
    curves = {name: [part.intervals.get(name) for part in parts] for name in first.intervals}
    shared = [name for name, ends in curves.items() if None not in ends]
    macro = {name: _macro([_value(part, name) for part in parts], rows, name) for name in shared}
    samples = sum(part.prompts * part.samples for part in parts)
    return Evaluation(
        step=first.step,
        task="+".join(part.task for part in parts),
        prompts=sum(part.prompts for part in parts),
        samples=max(part.samples for part in parts),
        scores=scores,
        pass_at=_means_at("pass@", macro),
        maj_at=_means_at("maj@", macro),
        length_tokens_mean=sum(p.length_tokens_mean * p.prompts * p.samples for p in parts) / max(samples, 1),
        truncated_fraction=sum(p.truncated_fraction * p.prompts * p.samples for p in parts) / max(samples, 1),
        errors=sum(part.errors for part in parts),
        seconds=sum(part.seconds for part in parts),
        intervals={name: (s.low, s.high) for name, s in macro.items() if name not in ("tokens", "truncated")},
        answered=tuple(
            replace(row, prompt_id=f"{part.task}/{row.prompt_id}") for part in parts for row in part.answered
        ),
        drawn="; ".join(dict.fromkeys(part.drawn for part in parts)),
        parts=tuple(parts),
    )


def _means_at(kind: str, curves: Mapping[str, EvalScore]) -> dict[str, float]:
    return {name.removeprefix(kind): score.mean for name, score in curves.items() if name.startswith(kind)}


def _value(part: Evaluation, name: str) -> float:
    kind, _, k = name.partition("@")
    known = {"pass": part.pass_at, "maj": part.maj_at}.get(kind, {})
    return known[k] if k else part.length_tokens_mean if name == "tokens" else part.truncated_fraction


def _macro(means: Sequence[float], rows: Sequence[Sequence[EvalRecord]], measure: str) -> EvalScore:
    """Return the mean of the sets' means with its interval; no interval where a set has no graded sample."""
    groups = [[v for row in answered if (v := row.measure(measure)) is not None] for answered in rows]
    mean = sum(means) / len(means)
    if not all(groups):
        return EvalScore(mean, 0.0, 1.0)
    interval = macro_interval(groups)
    return EvalScore(mean, min(interval.low, mean), max(interval.high, mean))


def _within(ends: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return bounds of a mean of means: the means of their lower and upper ends, which is wider than need be."""
    return sum(low for low, _ in ends) / len(ends), sum(high for _, high in ends) / len(ends)


def summarize(groups: Sequence[Group], step: int, task: str, samples: int, order: Sequence[str] = ()) -> Evaluation:
    """Return what graded groups, one a prompt, amount to.

    Args:
        order: Names of the parts of the reward as the experiment has them. The first that applies to any sample is the
            score, whichever applies to the first prompt; a sample that it does not apply to is in no score.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    count = max(len(rollouts), 1)
    # Samples that could not be graded are in no score; a prompt with none left counts in no mean.
    graded = [g for g in ([r for r in group.rollouts if r.grade.error is None] for group in groups) if g]
    found = dict.fromkeys(name for g in graded for r in g for name in r.grade.parts)
    names = [*(name for name in order if name in found), *(name for name in found if name not in order)]
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
        pass_at=_means_at("pass@", curves),
        maj_at=_means_at("maj@", curves),
        length_tokens_mean=sum(r.length for r in rollouts) / count,
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
        # Other parts that are 0 or 1 are conditions such as the right format.
        if set(values) <= {0.0, 1.0} and 1.0 in values:
            chosen = [[r.grade.parts for r in g if r.grade.parts[other] == 1.0] for g in graded]
            scored = [[parts[names[0]] for parts in g if names[0] in parts] for g in chosen]
            if any(scored):
                found[f"{names[0]} given {other}"] = _score(scored)
    return found


def _score(values: Sequence[Sequence[float]]) -> EvalScore:
    means = [sum(v) / len(v) for v in values if v]
    return _mean(means) if means else EvalScore()


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
