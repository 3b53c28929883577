"""Write each step and evaluation to the files of the run, to trackers, and to the console."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from shlex import quote
from typing import Any

from gnomon.core.errors import RunError, shortened
from gnomon.core.failpoints import failpoint
from gnomon.core.metrics import Last, Max, Mean, Metrics
from gnomon.core.sections import DoctorConfig
from gnomon.core.types import Batch, Group, Rollout
from gnomon.core.user_code import Misbehaved, sharing_nothing
from gnomon.diagnosis.catalog import chosen
from gnomon.diagnosis.current_findings import CurrentFindings
from gnomon.diagnosis.doctor import Doctor
from gnomon.diagnosis.finding import SEVERITIES, Finding
from gnomon.diagnosis.recorded import groups_of, replay
from gnomon.diagnosis.text_metrics import measure_answers
from gnomon.learner.base import Learner
from gnomon.records.background import Background
from gnomon.records.batches import BatchLog
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.eval_records import AnswerLog
from gnomon.records.jsonl import JsonLines, JsonlSink, Warn
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RolloutLog, TokenStats
from gnomon.records.sinks import Sink
from gnomon.rollouts.dataset_rollouter import as_recorded
from gnomon.rollouts.metrics import describe_failures, peak_memory_bytes
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch
from gnomon.training.evaluate import Evaluation

# Log-probabilities and entropies of each token, for a few rollouts of some steps.


@dataclass(frozen=True)
class NoTokenProbe:
    """No-op: return nothing and compute nothing."""

    async def probe(self, batch: Batch, step: int) -> tuple[TokenStats | None, Metrics]:
        """Return nothing."""
        return None, Metrics()


@dataclass(frozen=True)
class SampledTokenProbe:
    """Computes log-probability and entropy of each token of a few answers, in a pass of their own without gradient.

    A step with one update never scores its answers before it, and of an answer whose group is alike it computes nothing
    at all; but those are among the ones that a person reads.

    Attributes:
        most: Answers of one step, and no more than one in ``one_in`` of those that are trained, but one at least.
        every: Steps between probes, the first of which is in step 0. A report shows a handful of answers from a whole
            run, so all probes together take less than a hundredth of the time (docs/report.md).
    """

    learner: Learner
    most: int
    every: int = 8
    one_in: int = 8

    async def probe(self, batch: Batch, step: int) -> tuple[TokenStats | None, Metrics]:
        """Return the statistics of the best, the worst, the most surprising, and the first answers."""
        began = time.perf_counter()
        rows = [] if step % self.every else representative_rows(batch, self.most, self.one_in)
        if not rows:
            return None, Metrics()
        logprobs, entropy = await self.learner.token_stats(batch.rows(rows))
        seconds = time.perf_counter() - began
        return TokenStats(tuple(rows), logprobs, entropy), Metrics.of({"time/glimpse_seconds": Mean(seconds, 1)})


TokenProbe = SampledTokenProbe | NoTokenProbe
"""What the training loop calls for statistics of single tokens."""


def representative_rows(batch: Batch, most: int, one_in: int = 1) -> list[int]:
    """Return the numbers of the rows that a report would show first, in turn: best, worst, most surprising, first.

    Of each kind one answer to each question comes before a second one to any. A function of the batch alone.
    """
    # Rows that were trained and graded; (rows,).
    rows = (batch.mask.any(1) & batch.is_graded).nonzero()[:, 0].tolist()
    rewards, groups = batch.rewards.tolist(), batch.group.tolist()
    # "Surprising" is the distance from the baseline of the prompt, or from the mean of the group.
    expected = _means(rows, rewards, groups) if batch.baseline is None else dict(enumerate(batch.baseline.tolist()))
    orders = (
        sorted(rows, key=lambda row: -rewards[row]),
        sorted(rows, key=lambda row: rewards[row]),
        sorted(rows, key=lambda row: -abs(rewards[row] - expected[row])),
        rows,
    )
    in_turn = chain.from_iterable(zip_longest(*(_varied(order, groups) for order in orders)))
    chosen = list(dict.fromkeys(row for row in in_turn if row is not None))
    return chosen[: min(most, max(1, len(rows) // one_in))]


def _means(rows: Sequence[int], rewards: Sequence[float], groups: Sequence[int]) -> dict[int, float]:
    """Return for each row the mean reward of its group."""
    members: dict[int, list[float]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(rewards[row])
    return {row: sum(members[groups[row]]) / len(members[groups[row]]) for row in rows}


def _varied(rows: Sequence[int], groups: Sequence[int]) -> Iterator[int]:
    # Reversed, so that the first row of each group stays in the dictionary.
    firsts = {groups[row]: row for row in reversed(rows)}
    among = set(firsts.values())
    yield from (row for row in rows if row in among)
    yield from (row for row in rows if row not in among)


# The diagnosis of a run that trains: the rules look at each step, and each finding is written down once.


@dataclass
class LiveDiagnosis:
    """Writes findings down when they are new or have become graver, says them once, and remembers which end the run.

    Attributes:
        findings: The file of all findings as they are now.
        warn: Is told of each finding that is no note, and again when it becomes severe.
        stop_on: Severities and rules.
        go_on: The command that resumes the run.
        reason_to_stop: The first finding to stop for, in a sentence.
    """

    doctor: Doctor
    file: JsonLines
    findings: CurrentFindings
    warn: Warn
    stop_on: Sequence[str] = ()
    go_on: str = ""
    reason_to_stop: str = ""
    _groups: Sequence[Group] = ()

    def observe(self, step: int, values: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Take the metrics and the answers of a step."""
        self._groups = groups
        self._hear(self.doctor.observe(step, values, lambda _: self._groups))

    def observe_evaluation(self, row: Mapping[str, Any]) -> None:
        """Take an evaluation, made after the last step."""
        self._hear(self.doctor.observe_evaluation(row, lambda _: self._groups))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _hear(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.file.append(finding.as_row())
            if finding.severity != "note":
                self.warn(f"{finding.rule} ({finding.severity}): {finding.summary}")
            if not self.reason_to_stop and self._is_reason(finding):
                self.reason_to_stop = (
                    f"the diagnosis found {finding.rule} ({finding.severity}), which doctor.stop_on names: "
                    f"{finding.summary}. Try: {finding.advice[0]}. To go on all the same: {self.go_on}"
                )
        # The whole list each time; `CurrentFindings` writes it only when something has changed.
        self.findings.write(self.doctor.findings)

    def _is_reason(self, finding: Finding) -> bool:
        grave = [SEVERITIES.index(name) for name in self.stop_on if name in SEVERITIES]
        return finding.rule in self.stop_on or any(SEVERITIES.index(finding.severity) >= rank for rank in grave)


def live_diagnosis(directory: RunDirectory, plan: DoctorConfig, warn: Warn) -> LiveDiagnosis | None:
    """Return the diagnosis of a run, which knows what is written down of it already; None where it is off.

    What was found before is known again, so it is neither written nor said twice, and ends no run twice.
    """
    if not plan.on:
        return None
    record = RunRecord(directory.path)
    doctor = Doctor(record.experiment(), chosen(plan.rules))
    # Rules look back over many steps, so a resumed run feeds them all of these first.
    replay(doctor, record.metrics(), record.evaluations(), lambda step: groups_of(record.rollouts(step)))
    findings = CurrentFindings(directory.diagnosis, warn)
    findings.write(doctor.findings)
    go_on = f"gnomon resume {quote(str(directory.path))}"
    return LiveDiagnosis(doctor, JsonLines(directory.findings), findings, warn, plan.stops, go_on)


# Where a step's seconds go.


class StepTimer:
    """Wall-clock seconds between laps; each lap ends the stage that it names."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._began = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Give the seconds since the last lap to ``stage``."""
        now = time.perf_counter()
        self._stages[stage] = now - self._last
        self._last = now

    def metrics(self, watch: RolloutTimer) -> Metrics:
        """Return ``time/STAGE_seconds`` and ``time/step_seconds``; grading is the wait after the last completion."""
        stages = dict(self._stages)
        # Generation and grading overlap: only the wait after the last completion counts as grading.
        stages["grade"] = min(watch.grade_seconds, stages.get("generate", 0.0))
        stages["generate"] = stages.get("generate", 0.0) - stages["grade"]
        stages["step"] = self._last - self._began
        return Metrics.of({f"time/{stage}_seconds": Mean(seconds, 1) for stage, seconds in stages.items()})


UNTRAINED = {"loss/policy": 0.0, "learner/gradient_norm": 0.0}
"""What a step says in which no token had a gradient; ratios, entropy and mismatch were not measured, and are absent."""


@dataclass(frozen=True)
class FinishedStep:
    """What a callback is told after a step.

    Attributes:
        number: The step, from 1.
        metrics: What the step measured.
        rollouts: The graded rollouts that the step was trained on.
    """

    number: int
    metrics: Mapping[str, float]
    rollouts: tuple[Rollout, ...]


_SUPERVISED = (
    "critic/", "loss/policy", "loss/preference_", "loss/entropy_nats", "rollout/length_tokens_mean",
    "rollout/length_tokens_max", "tokens/computed", "tokens/generated", "tokens/generated_total", "tokens/trained",
    "learner/", "time/", "memory/", "routing/",
)  # fmt: skip


@dataclass(frozen=True)
class SupervisedMetrics:
    """What a step on the dataset's own answers says: rewards, ratios and the sampler's part mean nothing there.

    Attributes:
        rows: Rows of the dataset that are trained on.
        each: Rows of a step.
        is_likelihood: Whether the loss is a negative log-likelihood, which has a perplexity.
    """

    rows: int
    each: int
    is_likelihood: bool = True

    def __call__(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return what has a meaning, with the perplexity and the passes over the dataset so far."""
        kept = {name: value for name, value in values.items() if name.startswith(_SUPERVISED)}
        kept["tokens/epochs"] = step * self.each / self.rows
        if "critic/loss" in kept:  # a reward model's: no policy learns
            kept["loss/policy"], kept["learner/gradient_norm"] = kept["critic/loss"], values["critic/gradient_norm"]
        if self.is_likelihood:
            # exp overflows a float above 709.
            kept["loss/perplexity"] = math.exp(min(values.get("loss/policy", math.nan), 700.0))
        return kept


@dataclass
class RunLogger:
    """Writes each step and each evaluation down.

    Attributes:
        sinks: Take the metrics; the run's own file is one of them.
        evaluations: The file of evaluations.
        answers: How each prompt was answered in them.
        rollouts, batches: None when they are not wanted.
        critic: The file of value pre-training, None where there is no such phase.
        serving: What the engines measured since they were last asked.
        diagnosis: Looks at all of it, None when it is not wanted.
        callbacks: A program's own functions, called last.
        supervised: Measures the loss where the dataset's own answers are trained on, None elsewhere.
        recorder: Writes rollouts and batches while the next step goes on: a step of 512 answers of 8,192 tokens has
            100 MB and more.
    """

    console: Console
    sinks: Sequence[Sink]
    evaluations: JsonLines
    answers: AnswerLog | None = None
    rollouts: RolloutLog | None = None
    batches: BatchLog | None = None
    critic: JsonlSink | None = None
    serving: Callable[[], Metrics] = Metrics
    diagnosis: LiveDiagnosis | None = None
    callbacks: Sequence[Callable[[FinishedStep], None]] = ()
    supervised: SupervisedMetrics | None = None
    recorder: Background = field(default_factory=lambda: Background(is_asynchronous=False))
    _is_warned: bool = False

    def write(self, step: int, metrics: Metrics, finished: RolloutBatch, batch: Batch, seen: TokenStats | None) -> None:
        """Write down what training step number ``step`` (from 1) measured.

        Args:
            seen: Values of some of its answers' tokens.
        """
        # A step in which no group had a difference trains no token and reports no loss.
        absent = {name: Last(value) for name, value in UNTRAINED.items() if name not in set(metrics)}
        metrics += measure_answers(finished.generated)
        metrics += self.serving() + Metrics.of({**absent, "memory/peak_bytes": Max(peak_memory_bytes())})
        values = metrics.values() if self.supervised is None else self.supervised(step, metrics.values())
        if self.supervised is not None:
            finished, batch = as_recorded(finished), batch.with_fields(advantages=None)
        for sink in self.sinks:
            sink.write(step, values)
        failpoint("record")
        if self.rollouts is not None or self.batches is not None:
            # In the background; `Run.finish_step` waits for it before a checkpoint counts this step as done.
            self.recorder.begin(partial(self._record, step, finished, batch, seen))
        self.console.step(step, values)
        self._warn_of_failures(finished)
        if self.diagnosis is not None:
            self.diagnosis.observe(step, values, finished.generated)
        if self.callbacks:
            # A callback may read the files of its step.
            self.recorder.settle()
            told = FinishedStep(step, values, tuple(r for group in finished.trained for r in group.rollouts))
            for callback in self.callbacks:
                try:
                    with sharing_nothing(f"the callback {shortened(repr(callback))}", may_fork=True):
                        callback(told)
                except Misbehaved as error:
                    raise RunError(str(error)) from error

    def _record(self, step: int, finished: RolloutBatch, batch: Batch, seen: TokenStats | None) -> None:
        if self.rollouts is not None:
            learned = None if finished.is_refused else batch
            self.rollouts.write(step, finished.trained, finished.wasted, learned, seen)
        if self.batches is not None:
            self.batches.write(step, batch)

    @property
    def reason_to_stop(self) -> str:
        """What the diagnosis found that is to end the run, in a sentence; "" for nothing."""
        return "" if self.diagnosis is None else self.diagnosis.reason_to_stop

    def _warn_of_failures(self, finished: RolloutBatch) -> None:
        said = describe_failures([rollout for group in finished.generated for rollout in group.rollouts])
        if said is not None and not self._is_warned:
            self._is_warned = True
            self.console.warn(said)

    @contextmanager
    def evaluating(self, step: int, prompts: int) -> Iterator[Callable[[Group], None]]:
        """Show an evaluation's progress; call what this yields as each group arrives."""
        with self.console.phase(f"evaluating after step {step}", prompts) as phase:
            yield lambda group: phase.advance()

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation down and show it."""
        self.evaluations.append(evaluation.as_row())
        if self.answers is not None:
            self.answers.write(evaluation.step, evaluation.answered)
        name = next(iter(evaluation.scores))
        ungraded = f" ({evaluation.ungraded})" if evaluation.errors else ""
        loss, perplexity = evaluation.loss_nats, evaluation.perplexity
        said = "" if loss is None else f"loss {loss:.4f} nats a token, perplexity {perplexity:.4g}, "
        self.console.evaluated(f"{said}{name} {evaluation.headline} after step {evaluation.step}{ungraded}")
        if self.diagnosis is not None:
            self.diagnosis.observe_evaluation(evaluation.as_row())

    @contextmanager
    def pretraining(self, limit: int, done: int) -> Iterator[Callable[[int, Metrics], None]]:
        """Show value pre-training from batch ``done`` to ``limit`` at most; what this yields writes a batch down."""
        with self.console.phase("teaching the critic", limit - done, is_brief=True) as phase:

            def write(batch: int, metrics: Metrics) -> None:
                values = metrics.values()
                if self.critic is not None:
                    self.critic.write(batch, values)
                explained = values.get("critic/explained_variance", 0.0)
                phase.text = f"teaching the critic, explained variance {explained:.2f}"
                phase.advance()

            yield write
        self.console.say(f"{phase.text} in the last of {done + phase.done} batches")

    def close(self) -> None:
        """Close every file and tracker."""
        for sink in self.sinks:
            sink.close()
        self.evaluations.close()
        if self.diagnosis is not None:
            self.diagnosis.close()
        if self.critic is not None:
            self.critic.close()
        self.console.close()
