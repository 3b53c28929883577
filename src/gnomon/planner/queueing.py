"""Who waits for whom: rollouts a second through the real stream, with an engine whose answers take given times."""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal, TypeVar

from gnomon.core.errors import check_bounds
from gnomon.core.metrics import Metrics
from gnomon.core.types import Grade, Group, Rollout, Snapshot, State, Task
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.rng import uniforms
from gnomon.engines.scripted import ScriptedEngine
from gnomon.rewards.base import Sample
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler

# An event loop whose clock jumps: hours of waiting in milliseconds, and the same result every time.

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Where a loop would sleep until the next timer, moves the clock to it instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; without a timer there is nothing to jump to, so that is waited for."""
        ready = super().select(timeout if timeout is None else 0)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes time, and computing takes none.

    `loop.time()` begins at 0 and is exactly the time of the timer that is due. What waits for other threads or
    processes must not run in it: the clock jumps past their timeouts while they work.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end on a clock of its own.

    >>> async def wait() -> float:
    ...     await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
    ...     return asyncio.get_running_loop().time()
    >>> run_virtually(wait())
    7200.0
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


Latency = Callable[[tuple[int, ...], int], float]
MILLISECOND = 1e-3


@dataclass(frozen=True)
class LogNormal:
    """Seconds of an answer: median * exp(sigma * z), z standard normal and fixed by the key of the answer.

    sigma: of the logarithm; 0 makes all equal. The 99th percentile is exp(2.33 sigma) times the median: 10 times at 1.
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
    """How a run waits.

    batch: rollouts that a step trains on. generations: rollouts a prompt; 1 is group-free. pool: steps' worth of
    rollouts that are on their way or ready at most; 1 is synchronous. bound: steps that a rollout may be older than the
    weights it trains. stragglers: "wait" for one whose time is over, or "drop" it. update_seconds: that training takes
    before the next step asks; what is on its way goes on meanwhile.
    Raises: ConfigError when the numbers do not fit together.
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
    """What came of a setting, over the steps that were counted.

    seconds: in all. trained: rollouts. staleness_mean, staleness_max: steps between the weights that answered and those
    that are trained. latency_mean: seconds that the trained rollouts took; where it is below the mean of the engine,
    quick answers are trained on more often than they are given.
    """

    seconds: float
    trained: int
    staleness_mean: float
    staleness_max: int
    latency_mean: float

    @property
    def rollouts_per_second(self) -> float:
        """Throughput, of what is trained on."""
        return self.trained / self.seconds


def answering_after(latency: Latency) -> ScriptedEngine:
    """Return an engine whose every answer takes ``latency``, and says so: its one token is that in milliseconds."""
    return ScriptedEngine(
        lambda prompt, key: [round(latency(prompt, key) / MILLISECOND)], latency_seconds=latency, logprob=0.0
    )


def simulate(setting: QueueSetting, latency: Latency, steps: int, skipped: int = 0) -> Waited:
    """Return what ``setting`` comes to in virtual time, over ``steps`` steps after the first ``skipped``.

    The stream is the one that training uses; only the clock, the engine and the update are not real.
    """
    return run_virtually(measure(setting, answering_after(latency), steps, skipped))


def said(rollout: Rollout) -> float:
    """Return the seconds that an answer of `answering_after` says it took."""
    return rollout.response[0] * MILLISECOND


async def measure(
    setting: QueueSetting,
    engine: Engine,
    steps: int,
    skipped: int = 0,
    seed: int = 0,
    took: Callable[[Rollout], float] = said,
) -> Waited:
    """Return the same on the clock of the loop that runs.

    seed: of the draws. took: what an answer cost, in a unit of yours; seconds, as `answering_after` says them.
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


class InOrder:
    """Endlessly many tasks, each asked once."""

    name = "in order"

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> Task:
        return Task(f"t{index}", (index,), "")

    def take(self, count: int) -> list[int]:
        """Return the next ones."""
        self._next += count
        return list(range(self._next - count, self._next))

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Learn nothing."""
        return Metrics()

    def state(self) -> State:
        """Return which is next."""
        return State(values={"next": self._next})

    def restore(self, state: State) -> None:
        """Go on from there."""
        self._next = int(state.values["next"])


class _Free:
    """Grades at once: what is measured is waiting for answers."""

    async def grade(self, sample: Sample) -> Grade:
        return Grade(0.0)


def weights(version: int) -> Snapshot:
    """Return a snapshot without any."""
    return Snapshot(version, lambda: iter(()))
