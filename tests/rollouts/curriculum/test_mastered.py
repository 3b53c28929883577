"""Prompts that are mastered are asked no more, also after a resume and on another task set."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.algorithms import SCALERL, resolve
from gnomon.algorithms.sections import NoPositiveResampling
from gnomon.core.errors import ConfigError
from gnomon.core.types import GIVEN, Grade, Group, Rollout, State, Task
from gnomon.records.checkpoints import read_states, write_states
from gnomon.rollouts.curriculum.base import PromptKeys, TaskIndex
from gnomon.rollouts.curriculum.samplers import NoPositiveCurriculum, UniformCurriculum

ALL_RIGHT, MOST, HALF = (1.0,) * 10, (1.0,) * 9 + (0.0,), (1.0, 0.0)


def visit(index: int, rewards: tuple[float | None, ...], answer: float | None = None) -> Group:
    parts = {} if answer is None else {"answer": answer}
    grades = [Grade(None, error="hung") if reward is None else Grade(reward, parts) for reward in rewards]
    rollouts = tuple(Rollout(f"t{index}", (1,), (2,), (True,), (0.0,), (0.0,), "", g, 0, 0, "stop") for g in grades)
    return Group(Task(f"t{index}", (1,), ""), rollouts)


def curriculum(size: int, seed: int = 0, **plan: object) -> NoPositiveCurriculum:
    return NoPositiveCurriculum(
        TaskIndex(f"t{index}" for index in range(size)), replace(NoPositiveResampling(), **plan), seed
    )


@pytest.mark.parametrize(
    ("rewards", "is_dropped"),
    [(ALL_RIGHT, True), (MOST, True), (HALF, False), ((1.0, None), True), ((None, None), False), ((0.99,) * 9, False)],
)
def test_a_prompt_is_dropped_by_the_pass_rate_of_a_visit(rewards: tuple[float | None, ...], is_dropped: bool):
    """9 of 10 answers are enough, errors are no answers, and 0.99 is no success; a dropped prompt never comes again."""
    chosen = curriculum(4)
    said = chosen.observe([visit(2, rewards)])
    asked = [index for _ in range(10) for index in chosen.take(1)]

    assert (2 not in asked) is is_dropped
    assert said["sampler/dropped_fraction"] == (0.25 if is_dropped else 0)


def test_a_demonstration_is_no_answer_that_passed():
    """Eight of nine sampled answers are too few, also where a tenth that is right was given."""
    seen = visit(0, (*MOST[1:], 1.0))
    given_row = replace(seen.rollouts[-1], oldest_version=GIVEN, newest_version=GIVEN)

    assert curriculum(4).observe([replace(seen, rollouts=(*seen.rollouts[:-1], given_row))]) == curriculum(4).observe(
        [replace(seen, rollouts=seen.rollouts[:-1])]
    )
    assert curriculum(4).observe([seen])["sampler/dropped_fraction"] == 0.25


def test_success_and_part_say_what_passes():
    """A reward of 3 of 10 is no success where 10 is; a part decides whatever penalties made of the reward."""
    easy, strict = curriculum(2), curriculum(2, success=10.0)
    for chosen in (easy, strict):
        chosen.observe([visit(0, (3.0, 3.0))])
    by_part = curriculum(2, part="answer")
    by_part.observe([visit(0, (0.2, 0.3), answer=1.0), visit(1, (1.5, 1.5), answer=0.0)])

    assert [0 in c.take(1) + c.take(1) for c in (easy, strict, by_part)] == [False, True, False]
    assert by_part.take(1) == [1]


def test_without_a_mastered_prompt_it_is_shuffled_epochs():
    """Tasks come as `UniformCurriculum` asks them."""
    chosen, plain = curriculum(7, seed=3), UniformCurriculum(7, seed=3)

    assert [chosen.take(3) for _ in range(9)] == [plain.take(3) for _ in range(9)]


@given(size=st.integers(1, 8), dropped=st.sets(st.integers(0, 7)), counts=st.lists(st.integers(0, 8), max_size=8))
def test_takes_end_and_repeat_nothing(size: int, dropped: set[int], counts: list[int]):
    """Also when fewer prompts are left than a take asks for, or none; more than all tasks repeat."""
    chosen = curriculum(size)
    chosen.observe([visit(index, ALL_RIGHT) for index in dropped if index < size])

    for count in counts:
        taken = chosen.take(min(count, size))
        assert len(set(taken)) == len(taken) == min(count, size)
        if count <= size - len([index for index in dropped if index < size]):
            assert not dropped & set(taken)
    assert len(chosen.take(size + 2)) == size + 2


@given(before=st.lists(st.integers(0, 2), max_size=6), after=st.lists(st.integers(0, 2), max_size=6))
def test_resuming_equals_going_on(before: list[int], after: list[int], tmp_path_factory: pytest.TempPathFactory):
    """Prompts and metrics after a state was written to files and read again are what they would have been."""

    def walk(chosen: NoPositiveCurriculum, steps: list[int]) -> list[tuple[list[int], dict[str, float]]]:
        seen = []
        for outcome in steps:
            taken = chosen.take(2)
            groups = [visit(index, (ALL_RIGHT, MOST, HALF)[(outcome + index) % 3]) for index in taken]
            seen.append((taken, chosen.observe(groups).values()))
        return seen

    first, second = curriculum(6), curriculum(6)
    walk(first, before)
    folder = tmp_path_factory.mktemp("state")
    write_states(folder, {"curriculum": first.state()})

    second.restore(read_states(folder)["curriculum"])

    assert walk(second, after) == walk(first, after)
    with pytest.raises(ConfigError, match="the saved curriculum belongs to another task set"):
        curriculum(3).restore(first.state())


def test_another_task_set_keeps_what_was_dropped():
    """A prompt that moved stays dropped, and a new one is asked."""
    tasks = [Task(f"t{index}", (index,), f"question {index}") for index in range(4)]
    former, now = PromptKeys.of(tasks[:3]), PromptKeys.of(tasks[1:])
    first = NoPositiveCurriculum(TaskIndex(former.ids), NoPositiveResampling(), 0)
    first.observe([visit(1, ALL_RIGHT)])
    second = NoPositiveCurriculum(TaskIndex(now.ids), NoPositiveResampling(), 0)

    second.restore(second.moved(first.state(), now.kept_of(former)))

    assert second.state().tensors["dropped"].tolist() == [True, False, False]
    assert not second.moved(State(), None).tensors["dropped"].tolist()[1]


def test_one_answer_is_no_pass_rate():
    """The composition is refused with what to set; scalerl has it as the paper does."""
    assert SCALERL.sampler == NoPositiveResampling(0.9)
    with pytest.raises(ConfigError, match="one response passes by chance"):
        resolve({"preset": "scalerl", "num_generations": 1, "keep": None, "advantage": "Returns"})
