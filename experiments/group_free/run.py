"""Does a batch without groups really train 4.35 times as many rollouts a second? Simulated, and on real processes.

    python -m experiments.group_free.run simulate > experiments/group_free/simulated.json
    python -m experiments.group_free.run measure > experiments/group_free/measured.json
    python experiments/group_free/draw.py experiments/group_free

Everything waits in gnomon's own `RolloutScheduler`. `simulate` runs it on a virtual clock, `measure` on the wall clock
with a process that sleeps, as a tool does, for each answer.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache

from experiments.group_free.waiting import Latency, LogNormal, QueueSetting, Waited, answering_after, measure, simulate

from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.scripted import ScriptedEngine

BATCH, GENERATIONS, BOUND = 64, 8, 16
TAILS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
SIZES = (2, 4, 8, 16, 32)
POOLS = (2, 4, 8)
BOUNDS = (1, 4, 16, 64)
STEPS, FILLING = 30, 10
AGENT = 1.0
"""Sigma of a run with tools: one rollout in a hundred takes ten times the median."""


def contenders(generations: int = GENERATIONS, pool: int = 2, bound: int = BOUND) -> dict[str, QueueSetting]:
    """Return the ways of waiting that are compared; the first is what the others are divided by."""
    return {
        "group-synchronous": QueueSetting(BATCH, generations),
        "groups that wait for themselves": QueueSetting(BATCH, generations, pool, bound),
        "group-free": QueueSetting(BATCH, 1, pool, bound),
        "group-free, the slow dropped": QueueSetting(BATCH, 1, pool, pool - 1, "drop"),
        "group-synchronous, as many at once": QueueSetting(BATCH * pool, generations),
    }


def compared(settings: Mapping[str, QueueSetting], latency: LogNormal) -> dict[str, dict[str, float]]:
    """Return name to what was measured, over 30 steps after 10 that fill the pool."""
    found = {name: _simulated(setting, latency) for name, setting in settings.items()}
    return {name: row(waited, next(iter(found.values())), latency) for name, waited in found.items()}


@cache
def _simulated(setting: QueueSetting, latency: LogNormal) -> Waited:
    return simulate(setting, latency, STEPS, FILLING)


def row(waited: Waited, base: Waited, latency: LogNormal) -> dict[str, float]:
    """Return the numbers of one contender."""
    return {
        "rollouts_per_second": round(waited.rollouts_per_second, 3),
        "speed_up": round(waited.rollouts_per_second / base.rollouts_per_second, 2),
        "staleness_mean": round(waited.staleness_mean, 2),
        "staleness_max": waited.staleness_max,
        "latency_of_trained_over_all": round(waited.latency_mean / latency.mean, 3),
    }


def simulated() -> dict[str, object]:
    """Return the speed-up as a function of the tail, the group size, the pool and the bound on staleness."""
    agent = LogNormal(AGENT)
    by_bound = {f"group-free, bound {bound}": QueueSetting(BATCH, 1, 2, bound) for bound in BOUNDS}
    base = {"group-synchronous": QueueSetting(BATCH, GENERATIONS)}
    return {
        "setting": {"batch": BATCH, "generations": GENERATIONS, "pool": 2, "bound": BOUND, "sigma": AGENT},
        "tail": {sigma: compared(contenders(), LogNormal(sigma)) for sigma in TAILS},
        "group_size": {size: compared(contenders(size), agent) for size in SIZES},
        "pool": {pool: compared(contenders(pool=pool), agent) for pool in POOLS},
        "bound": {sigma: compared(base | by_bound, LogNormal(sigma)) for sigma in (0.5, 1.0, 1.5)},
    }


@dataclass
class SleepingTools:
    """An engine whose every answer waits for a process of its own, which sleeps; implements `Engine`."""

    latency: Latency
    inner: ScriptedEngine = field(init=False)

    def __post_init__(self) -> None:
        self.inner = answering_after(self.latency)
        self.inner.latency_seconds = 0.0

    @property
    def version(self) -> int:
        """Version of the weights that answer now."""
        return self.inner.version

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return the answers when the last of their tools has ended."""
        answers = await self.inner.generate(prompt, keys, sampling)
        await asyncio.gather(*(self._sleep(self.latency(tuple(prompt), key)) for key in keys))
        return answers

    async def _sleep(self, seconds: float) -> None:
        tool = await asyncio.create_subprocess_exec("sleep", f"{seconds:.4f}")
        try:
            await tool.wait()
        except asyncio.CancelledError:
            tool.kill()
            await tool.wait()
            raise

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return that everything was certain."""
        return [0.0] * len(response)

    async def fingerprints(self) -> None:
        """Return that there are no weights."""
        return None

    async def load(self, snapshot: Snapshot) -> None:
        """Take on the snapshot's version."""
        await self.inner.load(snapshot)

    async def close(self) -> None:
        """Refuse later calls."""
        await self.inner.close()


def measured() -> dict[str, object]:
    """Return seconds on the wall clock beside those that the virtual clock foretells for the same draws."""
    latency, steps = LogNormal(AGENT, median=0.15), 10
    settings = {
        "group-synchronous": QueueSetting(16, 4),
        "groups that wait for themselves": QueueSetting(16, 4, 2, BOUND),
        "group-free": QueueSetting(16, 1, 2, BOUND),
        "group-free, the slow dropped": QueueSetting(16, 1, 2, 1, "drop"),
    }
    rows = {}
    for name, setting in settings.items():
        real, foretold = asyncio.run(measure(setting, SleepingTools(latency), steps)), simulate(setting, latency, steps)
        rows[name] = {"seconds": round(real.seconds, 3), "foretold_seconds": round(foretold.seconds, 3)}
        rows[name] |= {"rollouts": real.trained, "staleness_max": real.staleness_max}
    base = rows["group-synchronous"]["seconds"]
    for numbers in rows.values():
        numbers["speed_up"] = round(base / numbers["seconds"], 2)
    return {"median_seconds": 0.15, "sigma": AGENT, "steps": steps, "settings": _tables(settings), "found": rows}


def _tables(settings: Mapping[str, QueueSetting]) -> dict[str, object]:
    return {name: asdict(setting) for name, setting in settings.items()}


if __name__ == "__main__":
    print(json.dumps({"simulate": simulated, "measure": measured}[sys.argv[1]](), indent=1))
