import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.algorithms.sections import Greso
from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.records.checkpoints import read_states, write_states
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.samplers import GresoCurriculum, UniformCurriculum

GOLDEN = vectors()["greso"]
RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


def visit(index: int, rewards: tuple[float | None, ...]) -> Group:
    grades = [Grade(None, error="hung") if reward is None else Grade(reward) for reward in rewards]
    rollouts = tuple(Rollout(f"t{index}", (1,), (2,), (True,), (0.0,), (0.0,), "", g, 0, 0, "stop") for g in grades)
    return Group(Task(f"t{index}", (1,), ""), rollouts)


def curriculum(size: int, seed: int = 0, **plan: float) -> GresoCurriculum:
    return GresoCurriculum(TaskIndex(f"t{index}" for index in range(size)), Greso(**plan), seed)


def visited(chosen: GresoCurriculum, index: int, *outcomes: tuple[float | None, ...]) -> float:
    """Let one task be visited with these rewards, and return its chance then."""
    for rewards in outcomes:
        chosen.observe([visit(index, rewards)])
    return chosen.chance(index)


@pytest.mark.parametrize("rewards", [RIGHT, WRONG])
def test_skip_probabilities_follow_the_reference(rewards: tuple[float, ...]):
    """1 - max(0.5^z, 0.01) after z = 0, 1, 2, 3 and 8 visits in a row, all right or all wrong."""
    skipped = [1 - visited(curriculum(1), 0, *[rewards] * streak) for streak in GOLDEN["streak"]]

    assert skipped == pytest.approx(GOLDEN["skip_prob"], abs=1e-12)


def test_easy_and_hard_visits_are_counted_apart():
    """A visit of the other kind begins at one, rewards that differ begin at none."""
    assert visited(curriculum(1), 0, RIGHT, RIGHT, WRONG) == 0.5
    assert visited(curriculum(1), 0, WRONG, WRONG, RIGHT, RIGHT) == 0.25
    assert visited(curriculum(1), 0, WRONG, WRONG, MIXED) == 1.0


def test_visits_that_say_nothing_change_nothing():
    """One graded rollout, or none, is equal to itself only; the streak stays."""
    assert visited(curriculum(1), 0, WRONG, (0.0, None), (None, None)) == 0.5


@pytest.mark.parametrize(
    ("best", "worst"), [((1.0, 1.0), (0.1, 0.1)), ((1.0, 1.0), (-1.0, -1.0)), ((10.0, 10.0), (3.0, 3.0))]
)
def test_right_is_nearer_the_best_reward_seen(best: tuple[float, ...], worst: tuple[float, ...]):
    """A floor for the format is wrong, and so is 3 of 10: easy and hard are those of the rewards' own range."""
    chosen = curriculum(3)
    chosen.observe([visit(0, best)])
    metrics = chosen.observe([visit(0, best), visit(1, worst), visit(2, (best[0], worst[0]))])

    assert metrics["greso/easy_fraction"] == pytest.approx(1 / 3)
    assert metrics["greso/hard_fraction"] == pytest.approx(1 / 3)


def test_nothing_adapts_in_the_first_epoch():
    """p stays where it began until every task has been asked once, then moves by one step an observation."""
    chosen = curriculum(4)
    chosen.take(4)
    first = chosen.observe([visit(index, RIGHT) for index in range(4)])
    chosen.take(1)
    second = chosen.observe([visit(0, RIGHT)])

    assert (first["greso/p_easy"], first["greso/p_hard"]) == (0.5, 0.5)
    assert (second["greso/p_easy"], second["greso/p_hard"]) == (0.49, 0.51)


@pytest.mark.parametrize(
    ("easy", "hard", "p_easy", "p_hard"), [(1, 2, 0.49, 0.49), (0, 1, 0.51, 0.51), (1, 1, 0.49, 0.51)]
)
def test_p_falls_where_the_target_is_reached(easy: int, hard: int, p_easy: float, p_hard: float):
    """A third of the tolerated quarter of 12 groups is one easy group, two thirds are two hard ones."""
    chosen = curriculum(12)
    chosen.take(12)
    chosen.take(1)
    outcomes = [RIGHT] * easy + [WRONG] * hard + [MIXED] * (12 - easy - hard)
    metrics = chosen.observe([visit(index, rewards) for index, rewards in enumerate(outcomes)])

    assert (metrics["greso/p_easy"], metrics["greso/p_hard"]) == pytest.approx((p_easy, p_hard))


def test_p_stays_between_its_bounds():
    """However long it falls or rises."""
    chosen = curriculum(2, step=0.2)
    chosen.take(2)
    chosen.take(1)
    for _ in range(10):
        metrics = chosen.observe([visit(0, RIGHT)])

    assert (metrics["greso/p_easy"], metrics["greso/p_hard"]) == (0.05, 0.95)


@settings(max_examples=20)
@given(streaks=st.lists(st.integers(-6, 6), min_size=2, max_size=6), seed=st.integers(0, 3))
def test_each_task_is_asked_as_often_as_its_chance_says(streaks: list[int], seed: int):
    """Over many epochs every task is asked max(p^z, floor) of the times its turn comes, so none is ever lost."""
    chosen = curriculum(len(streaks), seed, initial=0.7, floor=0.1)
    for index, streak in enumerate(streaks):
        visited(chosen, index, *[RIGHT if streak > 0 else WRONG] * abs(streak))
    asked: Counter[int] = Counter()
    epochs = 400
    while chosen.state().values["epochs"]["epoch"] < epochs:
        asked.update(chosen.take(1))

    for index in range(len(streaks)):
        chance = chosen.chance(index)
        # A take that skipped everything asks the next task: at most this often in an epoch.
        forced = math.prod(1 - chosen.chance(other) for other in range(len(streaks)))
        assert abs(asked[index] / epochs - chance) < 5 * math.sqrt(chance * (1 - chance) / epochs) + forced + 2 / epochs
        assert asked[index] > 0


@given(
    size=st.integers(1, 10),
    takes=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 2)), max_size=25),
    seed=st.integers(0, 3),
)
def test_takes_end_and_repeat_nothing(size: int, takes: list[tuple[int, int]], seed: int):
    """A take of at most all tasks holds each once, even when everything is almost always skipped."""
    chosen = curriculum(size, seed, initial=0.01, lowest=0.005, floor=1e-9)

    for count, outcome in takes:
        taken = chosen.take(min(count, size))
        assert len(set(taken)) == len(taken) == min(count, size)
        chosen.observe([visit(index, (RIGHT, WRONG, MIXED)[outcome]) for index in taken])
        assert len(chosen.state().values["epochs"]["passed_over"]) <= 2 * size


def test_without_streaks_it_is_shuffled_epochs():
    """As long as every visit teaches something, tasks come as `UniformCurriculum` asks them."""
    chosen, plain = curriculum(7, seed=3), UniformCurriculum(7, seed=3)

    assert [chosen.take(3) for _ in range(9)] == [plain.take(3) for _ in range(9)]


def test_more_than_all_tasks_repeat():
    """Asking 7 of 3 tasks gives 7."""
    assert len(curriculum(3).take(7)) == 7


def test_metrics_count_from_one_observation_to_the_next():
    """Looked at and skipped since the last time; after everything was hard once, about half."""
    chosen = curriculum(400)
    taken = chosen.take(400)
    assert chosen.observe([visit(index, WRONG) for index in taken])["greso/skipped_fraction"] == 0.0

    chosen.take(200)
    assert chosen.observe([])["greso/skipped_fraction"] == pytest.approx(0.5, abs=0.1)
    assert chosen.observe([])["greso/skipped_fraction"] == 0.0


def test_effective_prompts_are_the_perplexity_of_the_chances():
    """All equal: all of them. Chances 1, 1, 0.5 and 0.25: exp of their entropy."""
    chosen = curriculum(4)
    assert chosen.effective_prompts() == pytest.approx(4.0)
    chosen.observe([visit(0, RIGHT), visit(1, WRONG), visit(1, WRONG)])

    shares = [chance / 2.75 for chance in (0.5, 0.25, 1.0, 1.0)]
    assert chosen.effective_prompts() == pytest.approx(math.exp(-sum(s * math.log(s) for s in shares)))


@given(
    size=st.integers(1, 8),
    before=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=8),
    after=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=8),
)
def test_resuming_equals_going_on(
    size: int, before: list[tuple[int, int]], after: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
):
    """Prompts and metrics after a state was written to files and read again are what they would have been."""

    def walk(chosen: GresoCurriculum, steps: list[tuple[int, int]]) -> list[tuple[list[int], dict[str, float]]]:
        seen = []
        for count, outcome in steps:
            taken = chosen.take(count)
            groups = [visit(index, (RIGHT, WRONG, MIXED)[(outcome + index) % 3]) for index in taken]
            seen.append((taken, chosen.observe(groups).values()))
        return seen

    first, second = curriculum(size), curriculum(size)
    walk(first, before)
    first.take(2)
    folder = tmp_path_factory.mktemp("state")
    write_states(folder, {"curriculum": first.state()})

    second.restore(read_states(folder)["curriculum"])

    assert walk(second, after) == walk(first, after)


def test_the_state_of_other_tasks_is_refused():
    """Streaks are kept by task, so they fit one task set only."""
    with pytest.raises(ConfigError, match="the saved curriculum belongs to another task set"):
        curriculum(3).restore(curriculum(2).state())


def test_an_unknown_task_is_refused():
    """A group of a task that is not in the set is somebody's mistake."""
    with pytest.raises(DatasetError, match="'t5' is not in the task set"):
        curriculum(2).observe([visit(5, RIGHT)])
