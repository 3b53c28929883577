import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import ConfigError
from gnomon.rollouts.curriculum.base import TaskIndex, philox
from gnomon.rollouts.curriculum.samplers import PrioritizedCurriculum, gumbel_keys
from gnomon.rollouts.curriculum.tracker import DecayRule, ValueTracker

VECTORS = vectors()
SPO = VECTORS["spo"]
PAPER = DecayRule(0.875, 0.96, 0.06)


def tracker(size: int, values=None, n_eff=None, prior: float = 0.5) -> ValueTracker:
    """Return a tracker of ``size`` tasks that believes ``values``."""
    tracked = ValueTracker(TaskIndex(map(str, range(size))), PAPER, prior=prior)
    state = tracked.state()
    if values is not None:
        state.tensors["value"][:] = state.tensors["value"].new_tensor(values)
    if n_eff is not None:
        state.tensors["n_eff"][:] = state.tensors["n_eff"].new_tensor(n_eff)
    tracked.restore(state)
    return tracked


def curriculum(tracked: ValueTracker, epsilon: float = 0.05, gamma: float = 0.0, seed: int = 0):
    return PrioritizedCurriculum(tracked, epsilon, gamma, seed)


def test_weights_follow_the_reference():
    """sqrt(v (1 - v)) + 0.05 for v = 0.5/9, 2.5/9, 5.5/9, 8.5/9, and the chances they make."""
    weights = curriculum(tracker(4, SPO["v0_code_jeffreys"])).weights(range(4))

    assert weights.tolist() == pytest.approx(SPO["weights_gamma0"], abs=1e-12)
    assert (weights / weights.sum()).tolist() == pytest.approx(SPO["prob_gamma0"], abs=1e-12)


def test_gamma_divides_by_what_is_known():
    """sqrt(v (1 - v)) / sqrt(n_eff) + 0.05 with n_eff = 8, 20, 12, 8: epsilon stays outside the fraction."""
    tracked = tracker(4, SPO["v0_code_jeffreys"], SPO["n_eff_example"])
    weights = curriculum(tracked, gamma=0.5).weights(range(4))

    assert weights.tolist() == pytest.approx(SPO["weights_gamma0p5"], abs=1e-12)
    assert (weights / weights.sum()).tolist() == pytest.approx(SPO["prob_gamma0p5"], abs=1e-12)


def test_gumbel_keys_follow_the_reference():
    """log w - log(-log u), and the three largest of five."""
    golden = VECTORS["sampling_without_replacement"]
    keys = gumbel_keys(np.array(golden["weights"]), np.array(golden["uniform"]))

    assert keys.tolist() == pytest.approx(golden["gumbel_keys"], abs=1e-12)
    assert sorted(np.argsort(-keys)[:3].tolist()) == golden["top3"]


@given(
    values=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    epsilon=st.floats(1e-3, 1),
    gamma=st.floats(0, 1),
)
def test_every_task_has_a_chance(values, epsilon: float, gamma: float):
    """Even at a success rate of exactly 0 or 1 the weight is at least epsilon."""
    weights = curriculum(tracker(len(values), values), epsilon, gamma).weights(range(len(values)))

    assert (weights >= epsilon).all()


def test_values_outside_zero_to_one_get_epsilon():
    """Rewards of another scale have no Bernoulli spread; they stay possible."""
    assert curriculum(tracker(2, [-3.0, 7.0])).weights([0, 1]).tolist() == [0.05, 0.05]


def largest_keys(size: int, weights: np.ndarray, count: int, seed: int, take: int) -> list[int]:
    """Return the tasks of largest key, computed one by one for all tasks."""
    words = philox(seed, "priority", take).random_raw((size + 1) // 2).view("<u4")[:size]
    keys = [math.log(w) - math.log(-math.log((int(r) + 0.5) / 2**32)) for w, r in zip(weights, words, strict=True)]
    return sorted(range(size), key=lambda i: -keys[i])[:count]


@pytest.mark.parametrize(("size", "count"), [(2000, 3), (1999, 1), (140_001, 64), (50, 50), (7, 2), (1, 1)])
@pytest.mark.parametrize("gamma", [0.0, 0.7])
@pytest.mark.parametrize(("certain", "epsilon"), [(0.0, 0.05), (0.99, 0.001), (1.0, 0.05)])
def test_the_short_cut_finds_the_largest_keys(size: int, count: int, gamma: float, certain: float, epsilon: float):
    """Keys of few candidates give what keys of all tasks give, also when few tasks have most weight."""
    generator = np.random.Generator(np.random.Philox(size))
    values = np.where(generator.random(size) < certain, 0.0, generator.random(size))
    drawn = curriculum(tracker(size, values, 1 + 24 * generator.random(size)), epsilon, gamma, seed=5)

    for take in range(2):
        expected = largest_keys(size, drawn.weights(np.arange(size)), count, seed=5, take=take)
        assert drawn.take(count) == expected


def inclusion(weights: list[float], count: int) -> list[float]:
    """Return each task's chance to be among ``count`` drawn one after the other without putting back."""
    chances = [0.0] * len(weights)
    for sequence in itertools.permutations(range(len(weights)), count):
        chance, left = 1.0, sum(weights)
        for task in sequence:
            chance *= weights[task] / left
            left -= weights[task]
        for task in sequence:
            chances[task] += chance
    return chances


@pytest.mark.parametrize("count", [1, 2, 3])
def test_drawing_is_without_replacement_by_weight(count: int):
    """In 8000 takes each task is drawn as often as in sequential sampling, within 4 sigma (P29)."""
    drawn = curriculum(tracker(5, [0.01, 0.5, 0.2, 0.9, 1.0]), seed=11)
    expected = inclusion(drawn.weights(range(5)).tolist(), count)
    takes = 8000

    seen = Counter(task for _ in range(takes) for task in drawn.take(count))

    for task, chance in enumerate(expected):
        assert abs(seen[task] / takes - chance) < 4 * math.sqrt(chance * (1 - chance) / takes)


def test_the_first_of_a_take_is_drawn_by_weight_as_well():
    """Tasks come in the order in which one after the other would have been drawn, within 4 sigma."""
    drawn = curriculum(tracker(4, [0.5, 0.1, 0.0, 0.99]), seed=2)
    weights = drawn.weights(range(4))
    takes = 8000
    first = Counter(drawn.take(4)[0] for _ in range(takes))

    for task, chance in enumerate((weights / weights.sum()).tolist()):
        assert abs(first[task] / takes - chance) < 4 * math.sqrt(chance * (1 - chance) / takes)


@given(size=st.integers(1, 40), count=st.integers(0, 100), seed=st.integers(0, 3))
def test_no_take_repeats_a_task_before_all_were_taken(size: int, count: int, seed: int):
    """A take is distinct up to the number of tasks, and whole rounds beyond it."""
    taken = Counter(curriculum(tracker(size), seed=seed).take(count))

    assert taken.total() == count
    assert max(taken.values(), default=0) == math.ceil(count / size)


def test_resuming_equals_going_on(group):
    """Fresh objects that restore curriculum and tracker draw what the first ones would have drawn."""

    def walk(drawn: PrioritizedCurriculum, tracked: ValueTracker, steps: range) -> list[list[int]]:
        taken = []
        for step in steps:
            taken.append(drawn.take(4))
            groups = [group(str(i), [float((i * step) % 3 == 0)]) for i in taken[-1]]
            tracked.observe(groups, {g.task.id: 0.01 for g in groups})
            drawn.observe(groups)
        return taken

    first_tracker, second_tracker = tracker(30), tracker(30)
    first, second = curriculum(first_tracker, gamma=0.5), curriculum(second_tracker, gamma=0.5)
    walk(first, first_tracker, range(10))

    second.restore(first.state())
    second_tracker.restore(first_tracker.state())

    assert walk(second, second_tracker, range(10, 20)) == walk(first, first_tracker, range(10, 20))


def test_takes_differ():
    """Each take draws anew, and another seed draws otherwise."""
    drawn = curriculum(tracker(1000))

    assert drawn.take(10) != drawn.take(10)
    assert curriculum(tracker(1000), seed=1).take(10) != curriculum(tracker(1000), seed=2).take(10)


def test_observed_certainty_lowers_the_chance(group):
    """The weights follow the tracker: after ten successes a task has less than half its chance."""
    tracked = tracker(2)
    drawn = curriculum(tracked)
    before = drawn.weights([0, 1])
    for _ in range(10):
        tracked.observe([group("0", [1.0])], {})

    assert drawn.weights([0])[0] < before[0] / 2
    assert drawn.weights([1])[0] == before[1]


@pytest.mark.parametrize(
    ("epsilon", "gamma", "message"),
    [
        (0.0, 0.0, "epsilon must be > 0 or some prompts are never asked, got 0.0"),
        (0.05, 1.5, r"gamma must be in \[0, 1\], got 1.5"),
    ],
)
def test_what_cannot_be_meant_is_refused(epsilon: float, gamma: float, message: str):
    """Without epsilon, tasks at 0 or 1 would never be asked again."""
    with pytest.raises(ConfigError, match=message):
        curriculum(tracker(2), epsilon, gamma)


def test_dividing_by_no_evidence_is_refused(group):
    """With prior 0 and gamma above 0, tasks need samples first; then all is well."""
    tracked = tracker(2, prior=0.0)
    drawn = curriculum(tracked, gamma=0.5)
    with pytest.raises(ConfigError, match=r"gamma 0.5 divides by n_eff, .* set tracker.prior = 0.5 or gamma = 0"):
        drawn.take(1)

    tracked.initialize([group("0", [1.0, 0.0]), group("1", [0.0])])

    assert len(drawn.take(2)) == 2
