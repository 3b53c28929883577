"""Diagnose a run from its files."""

from collections.abc import Sequence
from typing import Any

from gnomon.core.progress import counted
from gnomon.core.types import Group, Task
from gnomon.diagnosis.catalog import chosen
from gnomon.diagnosis.doctor import Answers, Doctor, nothing_recorded
from gnomon.diagnosis.finding import Finding
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RecordedRollout


def diagnose(record: RunRecord, rules: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return a run's findings, the most severe first: the findings that the run itself reports.

    Args:
        record: The run, live or finished. Missing and damaged lines are skipped; rollouts are read only for samples.
        rules: Names as in `doctor.rules`; by default all rules, also those that the experiment leaves out.
    """
    doctor = Doctor(record.experiment(), chosen(rules))
    replay(doctor, record.metrics(), record.evaluations(), lambda step: groups_of(record.rollouts(step)))
    return doctor.findings


def replay(
    doctor: Doctor,
    rows: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]] = (),
    answers: Answers = nothing_recorded,
) -> list[Finding]:
    """Apply a doctor to recorded rows in their order, each evaluation after its step.

    Returns:
        Each finding when it was new, and again when it became more severe.
    """
    raised: list[Finding] = []
    waiting = sorted(evaluations, key=lambda row: row["step"])
    while waiting and waiting[0]["step"] <= 0:
        raised += doctor.observe_evaluation(waiting.pop(0), answers)
    for row in counted(rows, "diagnosing", len(rows), is_brief=True):
        raised += doctor.observe(row["step"], row, answers)
        while waiting and waiting[0]["step"] <= row["step"]:
            raised += doctor.observe_evaluation(waiting.pop(0), answers)
    return raised


def groups_of(recorded: Sequence[RecordedRollout]) -> list[Group]:
    """Return the recorded groups in the order of asking."""
    by_number: dict[int, list[RecordedRollout]] = {}
    for rollout in recorded:
        by_number.setdefault(rollout.group, []).append(rollout)
    return [
        Group(
            Task(members[0].rollout.task_id, members[0].rollout.prompt, members[0].question),
            tuple(member.rollout for member in members),
        )
        for members in by_number.values()
    ]
