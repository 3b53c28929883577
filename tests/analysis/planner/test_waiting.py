"""Waiting, worked out by hand; and what must hold whatever the latencies are."""

import pytest
from experiments.group_free.waiting import LogNormal, QueueSetting, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError

SECONDS = (1.0, 9.0, 2.0, 4.0, 3.0, 3.0, 3.0, 3.0)


def by_hand(prompt: tuple[int, ...], key: int) -> float:
    """Return the seconds of the tasks in the order in which they are asked; later ones take 3."""
    return (*SECONDS, *(3.0,) * 100)[prompt[0]]


def test_the_synchronous_batch_waits_for_its_slowest():
    """Batches of 2: max(1, 9) + max(2, 4) + max(3, 3) = 16 seconds, of 4 rounds' weights none is old."""
    found = simulate(QueueSetting(batch=2), by_hand, steps=3)

    assert found.seconds == pytest.approx(16.0)
    assert (found.trained, found.staleness_max) == (6, 0)
    assert found.latency_mean == pytest.approx((1 + 9 + 2 + 4 + 3 + 3) / 6)


def test_group_free_takes_whoever_is_ready():
    """Two batches of 2 on their way, nobody too old.

    Asked at 0: 1, 9, 2, 4 s. At 2 the first and the third are ready: step 1. Two of 3 s are asked, ready at 5; the
    fourth was ready at 4, so with the older of those two: step 2 at 5. Two more of 3 s are asked, ready at 8; one that
    was ready at 5 and one of them: step 3 at 8. The one of 9 s has not ended yet, and held up nobody.
    """
    found = simulate(QueueSetting(batch=2, pool=2, bound=8), by_hand, steps=3)

    assert found.seconds == pytest.approx(8.0)
    assert found.trained == 6
    assert found.latency_mean == pytest.approx((1 + 2 + 4 + 3 + 3 + 3) / 6)
    assert found.staleness_max == 1


def test_the_bound_waits_for_a_straggler_or_drops_it():
    """At most one step old: the one of 9 s is trained at step 2, at 9 s; dropped, it costs nothing."""
    waits = simulate(QueueSetting(batch=2, pool=2, bound=1), by_hand, steps=2)
    drops = simulate(QueueSetting(batch=2, pool=2, bound=1, stragglers="drop"), by_hand, steps=2)

    assert waits.seconds == pytest.approx(9.0)
    assert drops.seconds == pytest.approx(5.0)
    assert drops.latency_mean < waits.latency_mean


def test_a_group_waits_for_itself_only():
    """Prompts of two equal answers each: 1 s and 9 s asked together; the next group, of 2 s, overtakes the slow one."""
    found = simulate(QueueSetting(batch=2, generations=2, pool=2, bound=8), by_hand, steps=2)

    # The group of 1 s at 1, the group of 2 s asked at 1 and ready at 3; that of 9 s is still on its way.
    assert found.seconds == pytest.approx(3.0)
    assert found.latency_mean == pytest.approx(1.5)


def test_an_update_overlaps_with_answers_that_are_on_their_way():
    """With updates of 3 s and answers of 3 s: 6 s a step in turn; at a pool of 2 the next batch is ready meanwhile."""
    in_turn = simulate(QueueSetting(2, update_seconds=3.0), lambda prompt, key: 3.0, steps=4)
    ahead = simulate(QueueSetting(2, pool=2, bound=1, update_seconds=3.0), lambda prompt, key: 3.0, steps=4)

    assert in_turn.seconds == pytest.approx(24.0)
    assert ahead.seconds == pytest.approx(15.0)


def test_latencies_are_log_normal_and_fixed_by_the_key():
    """Of 4,000 keys half lie above the median, 1% above exp(2.326 sigma); a key always has the same latency."""
    latency = LogNormal(sigma=1.0, median=2.0)
    drawn = sorted(latency((), key * 12345678910111213) for key in range(4000))

    assert drawn[2000] == pytest.approx(2.0, rel=0.1)
    assert drawn[3960] == pytest.approx(2.0 * 10.24, rel=0.25)
    assert latency((), 7) == latency((1,), 7) != latency((), 8)


@settings(max_examples=25, deadline=None)
@given(
    sigma=st.floats(0.0, 2.0),
    generations=st.sampled_from([1, 2, 4]),
    pool=st.integers(1, 3),
    bound=st.integers(0, 6),
    stragglers=st.sampled_from(["wait", "drop"]),
)
def test_whatever_waits_the_bound_holds_and_every_step_is_full(
    sigma: float, generations: int, pool: int, bound: int, stragglers: str
):
    """No rollout is older than the bound, and each step has its batch."""
    setting = QueueSetting(8, generations, min(pool, bound + 1), bound, stragglers)
    found = simulate(setting, LogNormal(sigma), steps=6)

    assert found.trained == 48
    assert found.staleness_max <= bound


def test_a_setting_that_does_not_fit_is_refused():
    """A pool of two batches cannot be at staleness 0, and a batch is made of whole groups."""
    with pytest.raises(ConfigError, match=r"setting\.pool must be from 1 to bound \+ 1 = 1, got 2"):
        QueueSetting(8, pool=2)
    with pytest.raises(ConfigError, match=r"setting\.batch must be a multiple of generations = "):
        QueueSetting(8, generations=3)
