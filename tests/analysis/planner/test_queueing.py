"""Virtual time: nothing waits, and everything happens when it should."""

import asyncio
import time

import pytest

from gnomon.analysis.planner.simulate import run_virtually


def test_hours_pass_in_no_time_and_in_order():
    """Three sleepers wake in the order of their times, at exactly these; nobody waits for a whole day."""
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time()))

    async def day() -> float:
        await asyncio.gather(sleeper("c", 86400.0), sleeper("a", 0.1), sleeper("b", 3600.0))
        return asyncio.get_running_loop().time()

    assert run_virtually(day()) == 86400.0
    assert woken == [("a", 0.1), ("b", 3600.0), ("c", 86400.0)]


def test_computing_takes_no_virtual_time():
    """Work between two sleeps is not counted, however long it is."""

    async def work() -> float:
        await asyncio.sleep(1.0)
        time.sleep(0.05)
        await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == 2.0


def test_timeouts_and_cancellation_keep_to_the_clock():
    """A timeout fires at its virtual time, and what it cancels sleeps no longer."""

    async def work() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(1e9), 30.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == 30.0


def test_many_small_steps_do_not_stick():
    """A timer that is due by less than the clock can tell still fires: 10,000 sleeps of 0.1 s are 1,000 s."""

    async def work() -> float:
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == pytest.approx(1000.0)
