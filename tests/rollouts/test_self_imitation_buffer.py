"""What the replay buffer keeps, draws and remembers."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.core.types import GIVEN, Grade, Group, Rollout, Task
from gnomon.records.checkpoints import read_states, write_states
from gnomon.rollouts.self_imitation_buffer import SelfImitationReplay

Answer = tuple[int, int, float | None]  # prompt, response token, reward
ANSWERS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, -1.0, 0.0, 0.5, 1.0])), max_size=20
)


def rollout(
    prompt: int, tokens: tuple[int, ...], reward: float | None, mask: tuple[bool, ...] | None = None
) -> Rollout:
    logprobs = (-1.5,) * len(tokens)
    grade = Grade(None, error="hung") if reward is None else Grade(reward, {"answer": reward})
    chosen = mask or (True,) * len(tokens)
    return Rollout(f"t{prompt}", (prompt, 9), tokens, chosen, logprobs, logprobs, "text", grade, 3, 4, "length")


def groups(answers: list[Answer]) -> list[Group]:
    return [Group(Task(f"t{p}", (p, 9), "asked", {"a": 1}), (rollout(p, (token, 7), r),)) for p, token, r in answers]


def buffer(seed: int = 0, **plan: float) -> SelfImitationReplay:
    return SelfImitationReplay(SelfImitationBuffer(**plan), seed)


def kept(held: SelfImitationReplay) -> list[tuple[str, int, float]]:
    """Return prompt, first token and reward of everything, best first."""
    found = [g.rollouts[0] for g in held.draw(0)]
    return sorted(((r.task_id, r.response[0], r.grade.reward or 0.0) for r in found), key=lambda k: (-k[2], k[:2]))


@pytest.mark.parametrize("masks", [False, True])
def test_only_what_the_policy_may_learn_from_enters(masks: bool):
    """A demonstration is none of its own responses, and a truncated one is left out where the loss leaves it out."""
    whole, cut = replace(rollout(0, (1, 2), 1.0), stop="stop"), rollout(0, (3, 4), 1.0)
    shown = replace(rollout(0, (5, 6), 1.0), stop="stop", oldest_version=GIVEN, newest_version=GIVEN)
    held = SelfImitationReplay(SelfImitationBuffer(per_prompt=9), 0, mask_truncated=masks)
    held.observe([Group(Task("t0", (0, 9), "asked"), (whole, cut, shown))])

    assert [token for _, token, _ in kept(held)] == [1, 3][: 2 - masks]


def test_only_rewards_above_the_bound_enter():
    """A wrong response and one that could not be graded are nothing to imitate."""
    held = buffer(per_prompt=9)
    held.observe(groups([(0, 1, 1.0), (1, 2, 0.0), (2, 3, None), (3, 4, 0.5)]))

    assert kept(held) == [("t0", 1, 1.0), ("t3", 4, 0.5)]


def test_the_segments_of_a_response_are_kept_together():
    """Of two responses of two segments the better one is kept whole, though a prompt has one place."""
    held = buffer(per_prompt=1, capacity=1)
    for token, reward in ((1, 0.5), (3, 1.0), (5, 0.7)):
        whole = replace(rollout(0, (token,), reward), segments=(rollout(0, (token + 1,), reward),))
        held.observe([Group(Task("t0", (0, 9), "asked"), (whole,))])
    again = buffer(per_prompt=1, capacity=1)
    again.restore(held.state())

    assert kept(held) == kept(again) == [("t0", 3, 1.0), ("t0", 4, 1.0)]


def test_the_best_of_a_prompt_is_kept_and_the_newer_among_equals():
    """One place a prompt: 0.5 gives way to 1, and that to another 1."""
    held = buffer()
    for token, reward in enumerate((0.5, 1.0, 1.0, 0.7)):
        held.observe(groups([(0, token, reward)]))

    assert kept(held) == [("t0", 2, 1.0)]


def test_a_full_buffer_drops_the_worst_and_then_the_oldest():
    """Three places for four prompts."""
    held = buffer(capacity=3)
    held.observe(groups([(0, 1, 1.0), (1, 1, 0.5), (2, 1, 1.0), (3, 1, 1.0)]))
    assert kept(held) == [("t0", 1, 1.0), ("t2", 1, 1.0), ("t3", 1, 1.0)]

    held.observe(groups([(1, 2, 1.0)]))
    assert kept(held) == [("t1", 2, 1.0), ("t2", 1, 1.0), ("t3", 1, 1.0)]


def test_the_same_response_is_kept_once():
    """Saying it twice does not make it two examples."""
    held = buffer(per_prompt=4)
    held.observe(groups([(0, 1, 1.0), (0, 1, 1.0), (0, 2, 1.0)]))

    assert kept(held) == [("t0", 1, 1.0), ("t0", 2, 1.0)]


def test_a_response_without_a_trained_token_is_no_example():
    """Its mask is empty, so nothing of it could be imitated."""
    held = buffer()
    held.observe([Group(Task("t0", (0, 9), ""), (rollout(0, (1, 2), 1.0, (False, False)),))])

    assert len(held) == 0


@given(answers=ANSWERS, cuts=st.lists(st.integers(0, 20), max_size=3), capacity=st.integers(1, 6))
def test_how_the_stream_is_cut_changes_nothing(answers: list[Answer], cuts: list[int], capacity: int):
    """Answers seen a few at a time leave the same buffer as all at once: nothing that was dropped is missed."""
    whole, pieces = buffer(capacity=capacity, per_prompt=2), buffer(capacity=capacity, per_prompt=2)
    whole.observe(groups(answers))
    bounds = sorted({0, len(answers), *(min(cut, len(answers)) for cut in cuts)})
    for start, end in pairwise(bounds):
        pieces.observe(groups(answers[start:end]))

    assert pieces.draw(0) == whole.draw(0)
    assert pieces.rewards == whole.rewards == sorted(whole.rewards, reverse=True)


@given(answers=ANSWERS, capacity=st.integers(1, 6), per_prompt=st.integers(1, 3))
def test_the_bounds_hold(answers: list[Answer], capacity: int, per_prompt: int):
    """Never more than the capacity, nor more of a prompt than allowed, and nothing left out without need."""
    held = buffer(capacity=capacity, per_prompt=per_prompt)
    held.observe(groups(answers))
    good = {(p, token) for p, token, reward in answers if reward is not None and reward > 0}
    of_prompt = Counter(prompt for prompt, _ in good)

    assert len(held) == min(capacity, sum(min(count, per_prompt) for count in of_prompt.values()))
    assert max(Counter(task_id for task_id, *_ in kept(held)).values(), default=0) <= per_prompt


def test_draws_are_uniform_and_without_replacement():
    """Two of five, two thousand times: no draw holds one twice, and each comes 800 times, give or take 5 deviations."""
    held = buffer(rows=2)
    held.observe(groups([(p, 1, 1.0) for p in range(5)]))
    drawn = [[g.task.id for g in held.draw(number)] for number in range(2000)]
    counts = Counter(task_id for pair in drawn for task_id in pair)

    assert all(len(set(pair)) == 2 for pair in drawn)
    assert all(abs(count - 800) < 5 * (2000 * 0.4 * 0.6) ** 0.5 for count in counts.values())
    assert len(counts) == 5


def test_a_draw_depends_on_seed_and_number_alone():
    """Drawing leaves no trace, and another seed or number draws others."""
    held, other = buffer(rows=3), buffer(seed=1, rows=3)
    for each in (held, other):
        each.observe(groups([(p, 1, 1.0) for p in range(40)]))

    assert held.draw(7) == held.draw(7)
    assert held.draw(7) != held.draw(8)
    assert held.draw(7) != other.draw(7)


def test_a_small_buffer_is_drawn_whole():
    """Fewer responses than rows: each once. None: nothing."""
    held = buffer(rows=64)
    assert held.draw(0) == []
    held.observe(groups([(0, 1, 1.0), (1, 1, 1.0)]))

    assert len(held.draw(0)) == 2


def test_what_sampled_a_response_is_forgotten():
    """Tokens, mask, reward and version stay; log-probabilities, text, columns and parts of the reward do not."""
    held = buffer()
    held.observe(groups([(0, 1, 1.0)]))
    (group,) = held.draw(0)
    (only,) = group.rollouts

    assert (only.prompt, only.response, only.mask, only.oldest_version) == ((0, 9), (1, 7), (True, True), 3)
    assert (only.logprobs, only.text, dict(only.grade.parts), dict(group.task.columns)) == ((0.0, 0.0), "", {}, {})


@given(before=ANSWERS, after=ANSWERS)
def test_resuming_equals_going_on(before: list[Answer], after: list[Answer], tmp_path_factory: pytest.TempPathFactory):
    """A buffer read from files keeps and draws what the one that was written does, also when it was empty."""
    first, second = buffer(capacity=4, rows=3, per_prompt=2), buffer(capacity=4, rows=3, per_prompt=2)
    first.observe(groups(before))
    folder = tmp_path_factory.mktemp("state")
    write_states(folder, {"replay": first.state()})

    second.restore(read_states(folder)["replay"])

    assert second.draw(3) == first.draw(3)
    for each in (first, second):
        each.observe(groups(after))
    assert second.draw(4) == first.draw(4)
    assert second.state().values == first.state().values


def test_masks_and_lengths_come_back(tmp_path: Path):
    """Responses of different lengths, one with tokens that a tool wrote."""
    held, again = buffer(), buffer()
    rows = (rollout(0, (1, 2, 3), 1.0, (True, False, True)), rollout(1, (4,), 0.5))
    held.observe([Group(Task(r.task_id, r.prompt, ""), (r,)) for r in rows])
    write_states(tmp_path, {"replay": held.state()})

    again.restore(read_states(tmp_path)["replay"])

    assert again.draw(0) == held.draw(0)
    assert {g.rollouts[0].mask for g in again.draw(0)} == {(True, False, True), (True,)}


def test_a_smaller_plan_keeps_the_best_of_a_larger_one():
    """Resuming with a lower capacity drops the worst."""
    held, smaller = buffer(), buffer(capacity=1)
    held.observe(groups([(0, 1, 0.5), (1, 1, 1.0)]))

    smaller.restore(held.state())

    assert smaller.rewards == [1.0]
