"""Rollouts per second through the real scheduler, with an engine whose responses take given times."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal

from gnomon.analysis.planner.simulate import InOrder, run_virtually, weights
from gnomon.core.errors import check_bounds
from gnomon.core.types import Grade, Rollout
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.rng import uniforms
from gnomon.engines.scripted import ScriptedEngine
from gnomon.rewards.base import Sample
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler

Latency = Callable[[tuple[int, ...], int], float]
MILLISECOND = 1e-3


@dataclass(frozen=True)
class LogNormal:
    """Seconds of a response: median * exp(sigma * z), with a standard normal z that the response's key fixes.

    Attributes:
        sigma: Of the logarithm; the 99th percentile is exp(2.33 sigma) times the median, 10 times at sigma 1.
        median: Seconds.
    """

    sigma: float
    median: float = 1.0

    @property
    def mean(self) -> float:
        """Seconds, over all answers: median * exp(sigma^2 / 2)."""
        return self.median * math.exp(self.sigma**2 / 2)

    def __call__(self, prompt: tuple[int, ...], key: int) -> float:
        """Return the seconds of the answer with this key."""
        uniform = float(uniforms(key, 1)[0])
        return self.median * math.exp(self.sigma * NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12)))


@dataclass(frozen=True)
class QueueSetting:
    """How the scheduler of a run waits.

    Attributes:
        batch: Rollouts that a step trains on.
        generations: Rollouts per prompt; 1 is group-free.
        pool: Steps' worth of rollouts in flight or ready; 1 is synchronous.
        bound: Largest staleness in steps.
        stragglers: "wait" for a rollout at the bound, or "drop" the rollout.
        update_seconds: Seconds of training before the next step; rollouts in flight continue meanwhile.

    Raises:
        ConfigError: If the numbers do not fit together.
    """

    batch: int
    generations: int = 1
    pool: int = 1
    bound: int = 0
    stragglers: Literal["wait", "drop"] = "wait"
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(
            "setting",
            self,
            batch=(self.batch % self.generations == 0, f"a multiple of generations = {self.generations}"),
            pool=(1 <= self.pool <= self.bound + 1, f"from 1 to bound + 1 = {self.bound + 1}"),
        )


@dataclass(frozen=True)
class Waited:
    """The result of a setting, over the counted steps.

    Attributes:
        seconds: In all.
        trained: Rollouts.
        staleness_mean: Steps between the weights that answered and the weights that are trained.
        staleness_max: The largest such difference.
        latency_mean: Mean seconds of the trained rollouts; below the engine's mean, fast responses are overrepresented.
    """

    seconds: float
    trained: int
    staleness_mean: float
    staleness_max: int
    latency_mean: float

    @property
    def rollouts_per_second(self) -> float:
        """Trained rollouts per second."""
        return self.trained / self.seconds


def answering_after(latency: Latency) -> ScriptedEngine:
    """Return an engine whose responses take ``latency``; a response's one token is its latency in milliseconds."""
    return ScriptedEngine(
        lambda prompt, key: [round(latency(prompt, key) / MILLISECOND)], latency_seconds=latency, logprob=0.0
    )


def simulate(setting: QueueSetting, latency: Latency, steps: int, skipped: int = 0) -> Waited:
    """Measure ``setting`` in virtual time, over ``steps`` steps after the first ``skipped``.

    The scheduler is the one that training uses; only clock, engine and update are simulated.
    """
    return run_virtually(measure(setting, answering_after(latency), steps, skipped))


def said(rollout: Rollout) -> float:
    """Return the seconds of a response of `answering_after`."""
    return rollout.response[0] * MILLISECOND


async def measure(
    setting: QueueSetting,
    engine: Engine,
    steps: int,
    skipped: int = 0,
    seed: int = 0,
    took: Callable[[Rollout], float] = said,
) -> Waited:
    """Measure ``setting`` on the clock of the running loop.

    Args:
        setting: How the scheduler waits.
        engine: Answers the prompts.
        steps: Counted steps.
        skipped: Steps before them, which fill the pool.
        seed: Of the draws.
        took: The cost of a response, by default its seconds.
    """
    asked, clock = InOrder(), asyncio.get_running_loop().time
    rollouter = Rollouter(engine, _Free(), lambda ids: "", Sampling(), setting.generations, seed)
    stream = RolloutScheduler(
        asked,
        asked,
        rollouter,
        setting.batch // setting.generations,
        setting.bound,
        stragglers=setting.stragglers,
        slack=setting.bound + 1 - setting.pool,
    )
    began, ages, costs = 0.0, list[int](), list[float]()
    await engine.load(weights(0))
    async with stream:
        for step in range(skipped + steps):
            if step == skipped:
                began = clock()
            rollouts = [rollout for group in (await stream.next_batch()).groups for rollout in group.rollouts]
            if step >= skipped:
                ages += [step - rollout.oldest_version for rollout in rollouts]
                costs += [took(rollout) for rollout in rollouts]
            await asyncio.sleep(setting.update_seconds)
            await engine.load(weights(step + 1))
        waited = clock() - began
    return Waited(waited, len(ages), fmean(ages), max(ages), fmean(costs))


class _Free:
    """Grades at once: what is measured is waiting for answers."""

    async def grade(self, sample: Sample) -> Grade:
        return Grade(0.0)
