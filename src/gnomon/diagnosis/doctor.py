"""Diagnose a run step by step: report each finding once, and again when its severity rises."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gnomon.core.redaction import shortened
from gnomon.core.types import Group
from gnomon.diagnosis.catalog import RULES, SUPERVISED
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.finding import SEVERITIES, Finding, FindingSample
from gnomon.diagnosis.history import REWARD, History, Point
from gnomon.diagnosis.rule import Alarm, Rule

SAMPLES, LONGEST = 5, 400

Answers = Callable[[int], Sequence[Group]]
"""Returns the rollouts of a step; called only for findings with samples."""


def nothing_recorded(step: int) -> Sequence[Group]:
    """Return no rollouts."""
    return ()


class Doctor:
    """Applies rules to each step and each evaluation of a run, in order.

    The state depends only on the rows. So a resumed run, and a diagnosis of a finished run, come to the findings of the
    run itself. A step calls each rule once, over windows of bounded length: well below a millisecond for all rules
    (docs/diagnosis.md).

    Args:
        table: The resolved experiment.
        rules: The rules.
    """

    def __init__(self, table: Mapping[str, Any], rules: Sequence[Rule] = tuple(RULES.values())) -> None:
        self.history = History()
        self._facts = Facts.of(table)
        # Most rules are about the answers that a run samples; the dataset's and logged ones are none.
        self._rules = tuple(rule for rule in rules if not self._facts.is_supervised or rule.name in SUPERVISED)
        self._known: dict[str, Finding] = {}

    def observe(self, step: int, values: Mapping[str, Any], answers: Answers = nothing_recorded) -> list[Finding]:
        """Add the metrics of a step and return new or more severe findings.

        Args:
            step: The step.
            values: Metrics by name.
            answers: Returns the step's rollouts, for samples.
        """
        self.history.add(step, values)
        return self._look(answers)

    def observe_evaluation(self, row: Mapping[str, Any], answers: Answers = nothing_recorded) -> list[Finding]:
        """Add a row of held-out scores after the last observed step; return findings as `observe` does."""
        self.history.evaluations.append(row)
        return self._look(answers)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, the most severe first, then in the order of the rules."""
        found = [self._known[rule.name] for rule in self._rules if rule.name in self._known]
        return tuple(sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)))

    def unable(self) -> dict[str, str]:
        """Return the rules that found nothing to look at, each with the metric or setting that it needs first."""
        found = {}
        for rule in self._rules:
            history = _AskedHistory(self.history)
            # The rule is called again on a history that notes what it reads: what it asked for and did not get is what
            # it lacks.
            if rule.name not in self._known and rule(history, self._facts) is None:
                missing = [name for name in history.asked if not history.has(name)]
                if not history.asked:
                    found[rule.name] = "settings of the run"
                elif len(missing) == len(history.asked) or missing[:1] == history.asked[:1]:
                    # Everything is missing, or what the rule looks at first.
                    found[rule.name] = missing[0]
        return found

    def _look(self, answers: Answers) -> list[Finding]:
        raised = []
        for rule in self._rules:
            alarm = rule(self.history, self._facts)
            if alarm is not None and self._learn(rule.name, alarm, answers):
                raised.append(self._known[rule.name])
        return raised

    def _learn(self, name: str, alarm: Alarm, answers: Answers) -> bool:
        """Take note of an alarm; return whether the alarm is new or more severe."""
        known, step = self._known.get(name), self.history.step
        rank, reached = SEVERITIES.index(alarm.severity), -1 if known is None else SEVERITIES.index(known.severity)
        # A finding keeps its worst severity; a milder alarm only says that it still holds.
        if known is not None and rank < reached:
            self._known[name] = replace(known, step=step)
            return False
        is_told = known is not None and rank == reached
        self._known[name] = Finding(
            rule=name,
            severity=alarm.severity,
            first_step=alarm.since if known is None else known.first_step,
            step=step,
            summary=alarm.summary,
            # Six digits: the rest is rounding, and differs between machines.
            evidence={key: float(f"{value:.6g}") for key, value in alarm.evidence.items()},
            meaning=alarm.meaning,
            advice=tuple(advice for advice in alarm.advice if not self._facts.has(advice)),
            samples=known.samples if known is not None and is_told else _samples(step, alarm, answers(step)),
        )
        return not is_told


class _AskedHistory(History):
    """A history that notes, in order, what a rule asks it for."""

    def __init__(self, history: History) -> None:
        # The same data, not a copy: rules only read.
        self.__dict__.update(history.__dict__)
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("rewards", "evaluations"):
            self.asked.append(REWARD if name == "rewards" else "evaluations with answers")
        return super().__getattribute__(name)

    def latest(self, name: str, count: int) -> list[Point]:
        self.asked.append(name)
        return super().latest(name, count)

    def first(self, name: str, count: int) -> list[Point]:
        self.asked.append(name)
        return super().first(name, count)

    def has(self, name: str) -> bool:
        """Whether any row had it."""
        return name in self._latest or (name.startswith("evaluations") and bool(self.__dict__["evaluations"]))


def _samples(step: int, alarm: Alarm, groups: Sequence[Group]) -> tuple[FindingSample, ...]:
    return tuple(
        FindingSample(
            step=step,
            task_id=group.task.id,
            question=shortened(group.task.text, LONGEST),
            response=shortened(rollout.text, LONGEST),
            reward=rollout.grade.reward,
            error=None if rollout.grade.error is None else shortened(rollout.grade.error, LONGEST),
        )
        for group, rollout in list(alarm.pick(groups))[:SAMPLES]
    )
