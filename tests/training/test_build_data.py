"""Which objects an algorithm gets for choosing prompts and remembering how they went."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnomon.algorithms import A_STAR_PO, GRPO, SPO, Greso, OptimalValue, Prioritized, SelfImitationBuffer, TrackerConfig
from gnomon.config.experiment import load, to_toml
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Task
from gnomon.models.tiny import BOS, save_tiny
from gnomon.rollouts.curriculum.drift import NoDrift, RescoredDrift
from gnomon.rollouts.curriculum.samplers import GresoCurriculum, PrioritizedCurriculum, UniformCurriculum
from gnomon.rollouts.curriculum.tracker import FixedValues, ValueTracker
from gnomon.tasks.question import dataset_fingerprint
from gnomon.training.build_data import build_curriculum, grading_of, questions


class Three(Sequence[Task]):
    """Three tasks that count how often they were built."""

    name = "three"
    built = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        self.built += 1
        return Task(f"t{index}", (1,), "")


def test_a_group_baseline_needs_no_memory():
    """GRPO gets shuffled epochs, no tracker and no buffer, and no task is built to be remembered."""
    tasks = Three()
    chosen = build_curriculum(GRPO, tasks, seed=0)

    assert isinstance(chosen.curriculum, UniformCurriculum)
    assert isinstance(chosen.drift, NoDrift)
    assert (chosen.tracker, chosen.replay, tasks.built) == (None, None, 0)


def test_a_tracked_baseline_gets_a_tracker_and_its_drift():
    """SPO gets the sampler that reads the tracker."""
    chosen = build_curriculum(SPO, Three(), seed=0)

    assert isinstance(chosen.curriculum, PrioritizedCurriculum)
    assert isinstance(chosen.tracker, ValueTracker)
    assert isinstance(chosen.drift, RescoredDrift)


def test_a_sampler_gets_its_tracker_without_a_tracked_baseline():
    """Prompts by the uncertainty of their success rate, advantages by group: the rate is tracked for the sampler."""
    algorithm = replace(GRPO, sampler=Prioritized(), tracker=TrackerConfig(drift="constant"))
    chosen = build_curriculum(algorithm, Three(), seed=0)

    assert isinstance(chosen.curriculum, PrioritizedCurriculum)
    assert isinstance(chosen.tracker, ValueTracker)


def test_skipping_needs_no_tracker():
    """GRESO remembers streaks itself, and goes with any baseline."""
    grouped = build_curriculum(replace(GRPO, sampler=Greso()), Three(), seed=0)
    tracked = build_curriculum(replace(SPO, sampler=Greso(), num_generations=2), Three(), seed=0)

    assert isinstance(grouped.curriculum, GresoCurriculum)
    assert grouped.tracker is None
    assert isinstance(tracked.curriculum, GresoCurriculum)
    assert isinstance(tracked.tracker, ValueTracker)


def test_optimal_values_are_fixed_and_forget_nothing(tmp_path: Path):
    """A table that starts from samples, or from a file, with no drift to measure."""
    path = tmp_path / "values.json"
    path.write_text(json.dumps({"t1": 0.75}))
    sampled = build_curriculum(A_STAR_PO, Three(), seed=0)
    loaded = build_curriculum(replace(A_STAR_PO, tracker=OptimalValue(initial=str(path))), Three(), seed=0)

    assert isinstance(sampled.tracker, FixedValues)
    assert isinstance(sampled.drift, NoDrift)
    assert loaded.tracker is not None
    assert loaded.tracker.baseline([1]).tolist() == [0.75]
    with pytest.raises(DatasetError, match="cannot be read from prior"):
        build_curriculum(replace(A_STAR_PO, tracker=OptimalValue(initial="prior")), Three(), seed=0)


def test_replay_gets_a_buffer():
    """Empty at first, beside whatever chooses the prompts."""
    chosen = build_curriculum(replace(GRPO, replay=SelfImitationBuffer()), Three(), seed=0)

    assert chosen.replay is not None
    assert len(chosen.replay) == 0


def test_prompts_cannot_be_weighed_by_optimal_values():
    """They are no success rates; the composition is refused before anything is assembled."""
    with pytest.raises(ConfigError, match="the sampler Prioritized needs a tracker"):
        replace(A_STAR_PO, sampler=Prioritized())


def test_dynamic_sampling_by_a_component_that_nothing_rewards_is_refused():
    """A misspelled component ends before anything is loaded, naming the one that there is."""
    experiment = load("tiny", ["algorithm=dapo", "algorithm.keep.part=anwser"]).experiment

    with pytest.raises(ConfigError, match="did you mean 'answer'"):
        grading_of(experiment)


CLOCK = "It is {{ strftime_now('%d %b %Y') }}. {% for m in messages %}{{ m.content }}{% endfor %} So: "


@pytest.mark.parametrize("date", ["2025-01-01", "2024-02-29"])
def test_prompts_of_a_template_with_a_clock_have_the_experiments_day(tmp_path: Path, date: str):
    """What is written down is read again as the same prompts, whenever it is; the day is said, and is a setting."""
    folder = save_tiny(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CLOCK)
    experiment = replace(load("tiny").experiment, model=str(folder), template_date=date)

    asked = questions(experiment)
    (tmp_path / "again.toml").write_text(to_toml(experiment))
    again = questions(load(str(tmp_path / "again.toml")).experiment)

    shown = asked.tokenizer.spelled(asked.split.train[0].prompt)
    assert shown.startswith("It is 01 Jan 2025." if date == "2025-01-01" else "It is 29 Feb 2024.")
    assert dataset_fingerprint(again.split.train) == dataset_fingerprint(asked.split.train)
    assert any(f"reads the clock: every prompt has the date {date}" in said for said in asked.remarks)
    assert any("reads the clock" in said for said in asked.said)


@pytest.mark.parametrize("date", ["", "today", "2025-13-01", "26 Jul 2024", "2025-1-1"])
def test_a_day_that_is_none_is_refused(date: str):
    """With what is wanted."""
    with pytest.raises(ConfigError, match="template_date must be a day as YYYY-MM-DD, such as '2025-01-01', got"):
        replace(load("tiny").experiment, template_date=date)


def test_a_model_without_an_end_is_said_unless_the_experiment_has_one(tmp_path: Path):
    """Its answers all go on to the longest length; sampling.stop_ids ends them."""
    folder = save_tiny(tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        stated = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in stated.items() if not k.startswith("eos_token")}))
    experiment = replace(load("tiny").experiment, model=str(folder))

    endless = questions(experiment)
    ended = questions(replace(experiment, sampling=replace(experiment.sampling, stop_ids=(257,))))

    assert endless.sampling.stop_ids == ()
    assert any("names an end token: every answer goes on" in said for said in endless.said)
    assert not any("end token" in said for said in ended.said)


def test_a_reward_that_is_named_must_be_one():
    """In a requirement and in a condition; the weights of the others are kept in order."""
    several = ['rewards=[{kind = "numeric"}, {kind = "parsable", weight = 0.5}]', "algorithm=gdpo"]
    fine = load("tiny", [*several, 'algorithm.advantage.of.requires=[{reward = "parsable", on = "numeric"}]'])
    wrong = load("tiny", [*several, 'algorithm.advantage.of.requires=[{reward = "parsabel", on = "numeric"}]'])

    grading = grading_of(fine.experiment)
    assert grading is not None
    assert grading.weights == {"numeric": 1.0, "parsable": 0.5}
    with pytest.raises(ConfigError, match=r"algorithm.advantage.of: unknown component of the reward 'parsabel'"):
        grading_of(wrong.experiment)


@pytest.mark.parametrize(
    ("system", "own", "said"),
    [
        ("Be brief.", range(30), "`system` is not before 20 of 20 questions, which bring a system message"),
        ("Be brief.", [7], "`system` is not before 1 of 20 questions, which bring a system message"),
        ("Be brief.", [], None),
        ("", range(30), None),
    ],
)
def test_rows_whose_own_system_message_replaces_the_experiments_are_said(
    tmp_path: Path, system: str, own: Sequence[int], said: str | None
):
    """Text that a person sets and that reaches no prompt is never left out in silence, of whichever side."""
    brings = [{"role": "system", "content": "Be long."}]
    rows = [
        {"messages": [*(brings if n in own else []), {"role": "user", "content": f"{n} + 1 ="}], "answer": str(n + 1)}
        for n in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"task={tmp_path / 'rows.jsonl'}", "held_out.size=3", "held_out.fraction=0.3", f"system={system}"]
    remarks = questions(load("tiny", [*settings, "rollouts_per_step=16", "rewards=[{kind='numeric'}]"]).experiment).said

    assert [remark for remark in remarks if "`system`" in remark] == ([said] if said else [])


@pytest.mark.parametrize(
    ("asked", "is_said"),
    [
        (BOS + "user\n{n} + 1 =", True),
        ([{"role": "user", "content": BOS + "user\n{n} + 1 ="}], True),
        ("<|start_header_id|>user<|end_header_id|>\n\n{n} + 1 =", False),
        ("{n} + 1 =", False),
    ],
)
def test_questions_that_are_in_a_chats_form_already_are_said(tmp_path: Path, asked: Any, is_said: bool):
    """Their marks stay plain text within the user's turn, which is another prompt than they were meant to be."""
    rows = (json.dumps({"prompt": asked, "answer": "{m}"}) for _ in range(30))
    lines = [row.replace("{n}", str(n)).replace("{m}", str(n + 1)) for n, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = [f"task={tmp_path / 'rows.jsonl'}", "held_out.size=3", "held_out.fraction=0.3", "rollouts_per_step=16"]
    remarks = questions(load("tiny", [*settings, "rewards=[{kind='numeric'}]"]).experiment).said

    said = [remark for remark in remarks if re.match(r"(\d+) of \1 questions hold control tokens of the mo", remark)]
    assert len(said) == is_said


@pytest.mark.parametrize(
    ("weights", "is_said"), [([0.0], True), ([0.0, 0.0], True), ([0.0, 1.0], False), ([-1.0], False)]
)
def test_rewards_that_all_have_weight_0_are_said(weights: list[float], is_said: bool):
    """All answers would earn 0, and the run would look alive."""
    rewards = ", ".join(f"{{kind='numeric', weight={weight}, name='r{n}'}}" for n, weight in enumerate(weights))
    remarks = questions(load("tiny", [f"rewards=[{rewards}]"]).experiment).said

    assert any("every reward has weight 0" in remark for remark in remarks) == is_said


@pytest.mark.parametrize(
    ("weights", "is_said"), [([-1.0], True), ([-0.5, 0.0], True), ([-1.0, 0.1], False), ([0.0], False)]
)
def test_rewards_of_which_none_has_a_weight_above_0_are_said(weights: list[float], is_said: bool):
    """The right answer would earn the least, which may be meant of a count of faults."""
    rewards = ", ".join(f"{{kind='numeric', weight={weight}, name='r{n}'}}" for n, weight in enumerate(weights))
    remarks = questions(load("tiny", [f"rewards=[{rewards}]"]).experiment).said

    wanted = f"no reward has a weight above 0, so the answer that does best at 'r0' ({weights[0]:g}) earns the least"
    assert any(wanted in remark for remark in remarks) == is_said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.graders=4"], "cluster.graders = 4 changes nothing without a cluster"),
        (["cluster.placement=spread"], "cluster.placement = 'spread' changes nothing without a cluster"),
        (["cluster.start_seconds=5"], "cluster.start_seconds = 5.0 changes nothing without a cluster"),
        (["staleness.stragglers=drop"], "staleness.stragglers = 'drop' changes nothing without max_staleness above 0"),
        (["staleness.limit=4"], 'staleness.limit = 4 changes nothing without max_staleness = "measured"'),
        (["max_staleness=2", "staleness.ess_floor=0.9"], "staleness.ess_floor = 0.9 changes nothing without max_"),
        (["engine.kept_gib=5"], "engine.kept_gib = 5.0 changes nothing without an [environment]"),
        (["cluster=ray", "cluster.graders=4"], ""),
        (["max_staleness=2", "staleness.stragglers=drop"], ""),
        (["max_staleness=measured", "staleness.ess_floor=0.9", "staleness.limit=4"], ""),
        (["environment.use=guess.py:Guess", "engine.kept_gib=5"], ""),
        ([], ""),
    ],
)
def test_a_setting_that_changes_nothing_is_said(overrides: list[str], said: str):
    """A person who sets one takes it to have an effect."""
    idle = load("tiny", overrides).experiment.idle

    assert len(idle) == bool(said)
    assert said in "".join(idle)


def test_packages_that_no_program_can_import_are_said():
    """Neither a reward nor a tool runs programs here; with the Python tool nothing is said."""
    packages, tools = 'packages=["numpy"]', 'environment={kind="tools", tools=["python"]}'

    assert any(
        "packages = ['numpy'] changes nothing" in each for each in questions(load("tiny", [packages]).experiment).said
    )
    assert not any("packages" in each for each in questions(load("tiny", [packages, tools]).experiment).said)


def test_what_changes_nothing_is_among_what_is_said_at_start():
    """In plan, train and evaluate alike."""
    remarks = questions(load("tiny", ["cluster.graders=4"]).experiment).said

    assert any("cluster.graders = 4 changes nothing" in remark for remark in remarks)
