"""The diagnosis as it goes on: once each, graver if graver, the same again from the files, and never in the way."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis.rows import group, rollout

from gnomon.diagnosis import Finding, diagnose
from gnomon.diagnosis.catalog import RULES
from gnomon.diagnosis.doctor import Doctor
from gnomon.diagnosis.recorded import replay
from gnomon.diagnosis.rule import _remedies
from gnomon.diagnosis.rules.policy import PARTS, STAGES
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import JsonLines
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RolloutLog

GROUPS = {"algorithm": {"num_generations": 8}, "steps": 40, "rollouts_per_step": 64}


def broken(steps: int, since: int, share: float = 0.05) -> list[dict[str, float]]:
    """Return metrics of a run whose verifier fails on a share of answers from a step on."""
    return [
        {"step": step, "rollout/reward_mean": 0.3, "rollout/error_fraction": share if step >= since else 0.0}
        for step in range(1, steps + 1)
    ]


def test_a_finding_is_heard_once_and_again_when_it_is_graver():
    """5% of errors from step 3: .05 of 8 steps is above 1% at step 8; 100% from step 20 is severe at once."""
    doctor, heard = Doctor(GROUPS), []
    for row in (*broken(19, 3), *({**row, "step": row["step"] + 19} for row in broken(10, 1, 1.0))):
        heard += doctor.observe(int(row["step"]), row)

    assert [(f.rule, f.severity, f.first_step, f.step) for f in heard] == [
        ("verifier-errors", "warning", 3, 8),
        ("verifier-errors", "severe", 3, 20),
    ]
    (now,) = doctor.findings
    assert (now.first_step, now.step) == (3, 29)


def test_what_is_over_stays_known():
    """A verifier that is mended at step 12 was broken all the same, and was last seen so 6 steps later."""
    doctor = Doctor(GROUPS)
    replay(doctor, [*broken(11, 1), *({**row, "step": row["step"] + 11} for row in broken(20, 99))])

    assert [(f.rule, f.step) for f in doctor.findings] == [("verifier-errors", 17)]


def test_samples_show_what_is_meant():
    """At most five answers that could not be judged, long ones without their middle, and no others."""
    answers = [group(*(rollout([n] * 300, None if n else 1.0) for n in range(8)))]
    doctor = Doctor(GROUPS)
    found = [f for row in broken(8, 1) for f in doctor.observe(int(row["step"]), row, lambda step: answers)]

    (finding,) = found
    assert len(finding.samples) == 5
    assert all(s.error == "broken" and s.reward is None and len(s.response) < 440 for s in finding.samples)


def test_a_finding_is_a_row_and_back():
    """What is written into findings.jsonl is read again as it was; another row is none."""
    doctor = Doctor(GROUPS)
    (found,) = replay(doctor, broken(8, 1), answers=lambda step: [group(rollout([1], None))])
    row = json.loads(json.dumps(found.as_row()))
    again = Finding.of_row(row)

    assert again == found
    assert Finding.of_row({"rule": "verifier-errors"}) is None


def recorded(folder: Path, rows: list[dict[str, float]]) -> RunRecord:
    """Return a run directory with these metrics, and one answer a step that could not be judged."""
    folder.mkdir()
    directory = RunDirectory(folder)
    directory.experiment.write_text("steps = 40\n[algorithm]\nnum_generations = 8\n")
    lines = JsonLines(directory.metrics)
    for row in rows:
        lines.append(row)
        RolloutLog(directory.rollouts).write(int(row["step"]), [group(rollout([1, 2], None))])
    lines.close()
    return RunRecord.of(folder)


def test_the_files_say_what_the_run_said(tmp_path: Path):
    """From metrics and rollouts on disk come the findings that the run made, samples included."""
    live, rows = Doctor(GROUPS), broken(20, 3)
    replay(live, rows, answers=lambda step: [group(rollout([1, 2], None))])

    assert diagnose(recorded(tmp_path / "run", rows)) == live.findings
    assert live.findings[0].samples[0].response == "1 2"


def test_a_damaged_run_is_diagnosed_as_far_as_it_can_be_read(tmp_path: Path):
    """Without rollouts there are no samples; with lines that are none there are fewer steps; with nothing, nothing."""
    record = recorded(tmp_path / "run", broken(20, 3))
    for path in record.files.rollouts.iterdir():
        path.write_text("nonsense\n")
    record.files.metrics.write_text("{\n[]\n" + record.files.metrics.read_text() + '{"step": 21, "a": 1')
    record.files.evaluations.write_text('{"step": 1, "scores": 3}\n{"step": 9, "scores": {"reward": {"mean": "x"}}}\n')
    (found,) = diagnose(record)

    assert found.rule == "verifier-errors"
    assert found.samples == ()
    record.files.metrics.unlink()
    assert diagnose(record) == ()


NAMES = sorted(
    {
        "rollout/reward_mean", "rollout/degenerate_group_fraction", "rollout/all_equal_zero_fraction",
        "critic/explained_variance",
        "rollout/all_equal_best_fraction", "learner/gradient_norm", "loss/entropy_nats", "loss/clipped_fraction",
        "loss/out_of_band_fraction", "mismatch/k3_nats", "mismatch/ess_fraction", "mismatch/engine_abs_nats",
        "rollout/length_tokens_mean", "rollout/length_reward_correlation", "rollout/truncated_fraction",
        "rollout/duplicate_pair_fraction", "rollout/duplicate_pair_expected_fraction", "tracker/squared_error_mean",
        "rollout/repetition_fraction", "time/step_seconds", "tokens/generated", "rollout/error_fraction",
        "reward/a_std", "reward/a_mean", "reward/a_leverage", "rollout/reward_std", "learner/refused_steps",
    }
)  # fmt: skip
VALUES = st.one_of(st.none(), st.floats(), st.integers(), st.just(10**400), st.text(max_size=2), st.just(0.0))
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "steps": VALUES,
        "algorithm": st.one_of(VALUES, st.dictionaries(st.sampled_from(["num_generations", "updates"]), VALUES)),
        "rewards": st.one_of(
            VALUES, st.lists(st.dictionaries(st.sampled_from(["name", "weight"]), VALUES), max_size=3)
        ),
        "max_staleness": VALUES,
        "rollouts_per_step": VALUES,
    },
)


@settings(deadline=None, max_examples=40)
@given(TABLES, st.dictionaries(st.sampled_from(NAMES), VALUES), st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_no_number_and_no_table_stops_the_diagnosis(table, first, later):
    """Whatever stands in a file of metrics or in an experiment, every rule has an answer."""
    doctor = Doctor(table)
    for step in range(1, 41):
        doctor.observe(step, first if step <= 20 else later)
        doctor.observe_evaluation(
            {"step": step, "scores": {"reward": {"mean": first.get("rollout/reward_mean"), "high": 1}}}
        )

    assert all(isinstance(finding, Finding) for finding in doctor.findings)


@settings(max_examples=25)
@given(st.integers(1, 39), st.integers(1, 40))
def test_a_run_that_is_shown_again_is_the_same(cut, since):
    """Shown the rows up to any step again, and then the rest, a doctor knows what one that saw them once knows."""
    rows = broken(40, since)
    once, again = Doctor(GROUPS), Doctor(GROUPS)
    heard = replay(once, rows)
    before = replay(again, rows[:cut])
    after = replay(again, rows[cut:])

    assert again.findings == once.findings
    assert [*before, *after] == heard


def test_a_step_costs_little_however_long_the_run():
    """A hundred metrics and all rules are some two thousand calls a step, after 300 steps as after 4,000.

    Calls are counted, and not seconds, which are those of whatever else the machine does.
    """
    row = dict.fromkeys(NAMES, 0.5) | {f"other/{n}_mean": 1.0 for n in range(80)}

    def calls_after(steps: int) -> float:
        doctor, calls = Doctor(GROUPS), 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for step in range(1, steps + 1):
            doctor.history.add(step, {"rollout/reward_mean": 0.5})
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for step in range(steps + 1, steps + 101):
                doctor.observe(step, row | {"rollout/reward_mean": (step % 7) / 7})
        finally:
            sys.setprofile(before)
        return calls / 100

    early, late = calls_after(300), calls_after(4000)
    assert early < 4_000
    assert late < 1.5 * early


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_where_it_comes_from(name):
    """Every rule has a docstring with its source, and a name of words and hyphens."""
    assert "References:" in (type(RULES[name]).__doc__ or "")
    assert name == name.lower().replace(" ", "-")


def test_every_remedy_is_asked_for_and_there():
    """remedies.toml has an entry for whatever a rule names, and no other but for what the cases of a rule share."""
    named = {f"throughput.{stage}" for stage in STAGES} | {f"degenerate-groups.{w}" for w in ("alike", "easy", "hard")}
    named |= {f"tracker-starves.{w}" for w in ("both", "useless")}
    named |= {f"mismatch.{part}" for part in PARTS} | {f"length-reward.{w}" for w in ("longer", "shorter")}
    for name, rule in RULES.items():
        source = inspect.getsource(type(rule))
        named |= {name} if "self.name" in source else set()
        named |= set(re.findall(rf'"({name}\.[a-z]+)"', source))

    assert named <= _remedies().keys() <= named | {name.partition(".")[0] for name in named}
    for key in named:
        said = {**_remedies().get(key.partition(".")[0], {}), **_remedies()[key]}
        assert said["says"], key
        assert said["means"], key
        assert said.get("try") or said.get("always"), key
