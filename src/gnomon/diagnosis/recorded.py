"""Diagnose a run from its files."""

import statistics
from collections.abc import Sequence
from typing import Any

from gnomon.core.progress import track
from gnomon.core.statistics import mean_interval
from gnomon.core.types import Group, Task
from gnomon.diagnosis.catalog import chosen
from gnomon.diagnosis.doctor import Answers, Doctor, nothing_recorded
from gnomon.diagnosis.finding import Finding
from gnomon.diagnosis.rules.policy import CLIPPED
from gnomon.diagnosis.text_metrics import measure_answers
from gnomon.records.foreign import ForeignRun
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


def diagnose_foreign(run: ForeignRun) -> tuple[tuple[Finding, ...], dict[str, str]]:
    """Return the findings of another library's run, and of each rule that could not look what it needs.

    What the files do not log but the answers show (groups, parts of the reward, repetition, marked results) is measured
    as gnomon does, in words where gnomon counts tokens.

    Args:
        run: The run.
    """
    rows: list[dict[str, Any]] = []
    generations, answers, parts = 1, 1, set()
    for row in run.rows:
        groups = run.groups(row["step"])
        # What the library logged itself counts more than what is computed here.
        rows.append({**(_measured(groups) if groups else {}), **row})
        if groups:
            count = sum(len(group.rollouts) for group in groups)
            generations, answers = max(generations, round(count / len(groups))), max(answers, count)
            parts |= {name for group in groups for r in group.rollouts for name in r.grade.parts}
    clipped = [value for row in rows if (value := row.get(CLIPPED)) is not None]
    doctor = Doctor(
        {
            "steps": run.steps or run.last_step,
            "rollouts_per_step": answers,
            "algorithm": {
                "num_generations": generations,
                "surrogate": {"trust": {"piece": "Clip" if clipped else ""}},
                # Ratios leave 1 only where a batch is trained on more than once, or is stale.
                "updates": {"minibatches": 2 if any(clipped) else 1},
            },
            "rewards": [{"name": name} for name in sorted(parts)],
        }
    )
    evaluations = [_evaluated(step, run.groups(step, is_held_out=True)) for step in run.answered[True]]
    replay(doctor, rows, [row for row in evaluations if row], run.groups)
    return doctor.findings, doctor.unable()


# Without log-probabilities nobody knows which copies chance explains; TRL and verl do not mark answers that were cut.
_UNKNOWN = {"rollout/duplicate_pair_fraction", "rollout/duplicate_pair_expected_fraction"}
_CUT = {"rollout/complete_reward_mean", "rollout/truncated_reward_mean"}


def _measured(groups: Sequence[Group]) -> dict[str, float]:
    """Return what a step's answers say of groups and texts."""
    rewards = [reward for group in groups for reward in group.rewards]
    several = [group for group in groups if len(group.rollouts) > 1]
    found = {"rollout/error_fraction": 1 - len(rewards) / sum(len(group.rollouts) for group in groups)}
    if rewards:
        found |= {"rollout/reward_mean": statistics.fmean(rewards), "rollout/reward_std": statistics.pstdev(rewards)}
        found |= {
            name: statistics.fmean(set(group.rewards) == {level} for group in groups)
            for name, level in (("rollout/all_equal_best_fraction", 1.0), ("rollout/all_equal_zero_fraction", 0.0))
        }
    if several:
        found["rollout/degenerate_group_fraction"] = statistics.fmean(group.is_degenerate for group in several)
    measured = measure_answers(groups).values()
    unknown = _UNKNOWN if measured.keys() >= _CUT else _UNKNOWN | _CUT
    return found | {name: value for name, value in measured.items() if name not in unknown}


def _evaluated(step: int, groups: Sequence[Group]) -> dict[str, Any]:
    means = [statistics.fmean(group.rewards) for group in groups if group.rewards]
    if not means:
        return {}
    scores = {"mean": statistics.fmean(means), "high": mean_interval(means).high}
    return {"step": step, "scores": {"reward": scores}}


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
    for row in track(rows, "diagnosing", len(rows), is_brief=True):
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
