"""Simulate a run on a virtual clock: the scheduler and rollouter are real, everything else only takes time."""

import asyncio
import heapq
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.analysis.planner.deployment import PlannedJob
from gnomon.analysis.planner.layout import DecodingPace
from gnomon.core.metrics import Metrics
from gnomon.core.types import Completion, Grade, Group, Snapshot, State, Task
from gnomon.engines.base import Sampling
from gnomon.engines.rng import uniforms
from gnomon.models.transfer.fingerprint import Fingerprint
from gnomon.rewards.base import Sample
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler

# A virtual clock for asyncio, and the stand-ins that a simulated run needs: tasks and empty weights.
#
# The clock jumps from timer to timer, so hours of waiting take milliseconds and every run gives the same result.

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """A selector that advances the clock to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance to the next timer and return no event; without a timer, wait for an event as usual."""
        # No timer is due: only a thread could wake the loop, and none works here.
        if timeout is None:
            return super().select()
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes time.

    `loop.time()` begins at 0 and equals the due time of the current timer. Coroutines that wait for threads or
    processes must not run in this loop, because the clock jumps past their timeouts.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end in a `VirtualLoop`.

    >>> async def wait() -> float:
    ...     await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
    ...     return asyncio.get_running_loop().time()
    >>> run_virtually(wait())
    7200.0
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class InOrder:
    """An endless dataset and curriculum in which each task occurs once."""

    name = "in order"

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> Task:
        return Task(f"t{index}", (index,), "")

    def take(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` tasks."""
        self._next += count
        # Each task once: a simulation measures waiting and not learning.
        return list(range(self._next - count, self._next))

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Ignore the groups."""
        return Metrics()

    def state(self) -> State:
        """Return the index of the next task."""
        return State(values={"next": self._next})

    def restore(self, state: State) -> None:
        """Continue with the stored index."""
        self._next = int(state.values["next"])


def weights(version: int) -> Snapshot:
    """Return a snapshot without tensors."""
    return Snapshot(version, lambda: iter(()))


@dataclass(frozen=True)
class Timing:
    """The duration of everything.

    Attributes:
        pace: Decoding speed of an engine.
        engines: Number of engines.
        most: Most responses that an engine decodes at once.
        grade: Seconds of grading one response.
        learn: Tokens of a step's responses to seconds of updating.
        publish: Seconds until the engines have new weights.
        pause: Seconds of ``publish`` during which engines stand still.
    """

    pace: DecodingPace
    engines: int
    most: int
    grade: float
    learn: Callable[[float], float]
    publish: float
    pause: float = 0.0


@dataclass(frozen=True)
class Flow:
    """The result of a simulation, over the counted steps.

    Attributes:
        seconds: Of all steps.
        steps: Counted steps.
        trained: Trained tokens of responses.
        generated: Generated tokens of responses.
        answering: Share of the time during which engines decoded.
        filled: Mean share of an engine's rows that were in use.
        learning: Share of the time during which the learner updated or published.
        staleness_mean: Steps between the weights that answered and the weights that are trained.
        staleness_max: The largest such difference.
        answer_mean: Tokens of a trained response.
    """

    seconds: float
    steps: int
    trained: float
    generated: float
    answering: float
    filled: float
    learning: float
    staleness_mean: float
    staleness_max: int
    answer_mean: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second."""
        return self.trained / self.seconds


class SimulatedEngine:
    """An engine that decodes its rows together; `DecodingPace` gives the seconds of a step.

    Between two events the rows stay the same and their contexts grow by one token per step, so k steps take a k + b k^2
    / 2 seconds. This is solved exactly, so the cost does not depend on the number of tokens.
    """

    def __init__(self, pace: DecodingPace, most: int) -> None:
        self.pace, self.most = pace, most
        self.drawn = self.busy = self.row_seconds = 0.0
        self.asked = 0
        self._tokens = self._at = self._stall = self._offset = 0.0
        self._rows: list[tuple[float, int, asyncio.Future[None], float]] = []
        self._waiting: deque[tuple[float, float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._is_paused = False

    async def answer(self, prompt: float, lengths: Sequence[float]) -> None:
        """Return when all responses to one prompt are complete."""
        loop = asyncio.get_running_loop()
        self._advance()
        # Computing a prompt delays all rows of the engine, as prefill and decoding take turns.
        self._stall += self.pace.prompt
        done = [loop.create_future() for _ in lengths]
        self._waiting.extend((prompt, length, future) for length, future in zip(lengths, done, strict=True))
        self.asked += len(lengths)
        self._go_on()
        await asyncio.gather(*done)
        self.asked -= len(lengths)

    def pause(self, is_paused: bool) -> None:
        """Stop or continue decoding."""
        self._advance()
        self._is_paused = is_paused
        self._go_on()

    def settle(self) -> None:
        """Update the counts to the current time."""
        self._advance()
        self._go_on()

    def _slopes(self) -> tuple[float, float]:
        rows = len(self._rows)
        # Every row's context grows by one a step, so the sum is kept as an offset
        # and a common count: an event costs the same however many rows there are.
        context = self._offset + rows * self._tokens
        return self.pace.fixed(rows) + self.pace.cached * context, self.pace.cached * rows

    def _advance(self) -> None:
        """Count the tokens decoded since the last event."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        if self._is_paused or not self._rows:
            return
        self.busy += passed
        self.row_seconds += passed * len(self._rows)
        # Time goes to waiting prompts first, and decoding has the rest.
        computed = min(passed, self._stall)
        self._stall -= computed
        passed -= computed
        if passed <= 0:
            return
        first, more = self._slopes()
        # The steps k that fit into the time t: first k + more k^2 / 2 = t, solved for k.
        steps = passed / first if more == 0 else (math.sqrt(first**2 + 2 * more * passed) - first) / more
        self.drawn += steps * len(self._rows)
        self._tokens += steps

    def _go_on(self) -> None:
        """Complete rows that are due, fill free rows, and set the timer for the next completion."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A heap by the count at which each row ends. The timer's rounding may leave a row a billionth of a token short.
        while self._rows and self._rows[0][0] <= self._tokens + _ROUNDING * max(1.0, self._tokens):
            _, _, future, offset = heapq.heappop(self._rows)
            self._offset -= offset
            if not future.done():
                future.set_result(None)
        while self._waiting and len(self._rows) < self.most:
            prompt, length, future = self._waiting.popleft()
            if future.cancelled():
                continue
            self._count += 1
            # The row's context minus the common count, which is added again in `_slopes`.
            offset = prompt - self._tokens
            self._offset += offset
            heapq.heappush(self._rows, (self._tokens + length, self._count, future, offset))
        if self._is_paused or not self._rows:
            return
        first, more = self._slopes()
        steps = max(0.0, self._rows[0][0] - self._tokens)
        # When the next row ends, if nothing else happens before: any event cancels this timer and sets another.
        seconds = self._stall + first * steps + more * steps**2 / 2
        self._timer = asyncio.get_running_loop().call_later(seconds, self.settle)


_ROUNDING = 1e-9


@dataclass
class SimulatedEngines:
    """A pool of simulated engines; implements `engines.base.Engine`.

    A prompt goes to the engine with the fewest rows. A response has one token, whose id is the response's length.
    """

    timing: Timing
    job: PlannedJob
    version: int = -1
    beats: int = 0
    engines: list[SimulatedEngine] = field(init=False)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.engines = [SimulatedEngine(self.timing.pace, self.timing.most) for _ in range(self.timing.engines)]

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return the responses when the longest is complete."""
        await self._awake.wait()
        oldest = self.version
        # A response's length follows from its key, as its tokens do in
        # a real engine, so layouts are compared on the same lengths.
        lengths = [self.job.answers.of(float(uniforms(key, 1)[0])) for key in keys]
        engine = min(self.engines, key=lambda engine: engine.asked)
        await engine.answer(self.job.prompt, lengths)
        self._ended.set()
        # One token whose id is the length: the rollouter moves it through unchanged, and memory stays small.
        return [Completion((n,), (0.0,), (0.0,), oldest, self.version, "stop") for n in lengths]

    async def sleep(self) -> None:
        """Return when all was answered; what is asked from now on waits for the next weights."""
        self._awake.clear()
        while any(engine.asked for engine in self.engines):
            self._ended.clear()
            await self._ended.wait()

    async def load(self, snapshot: Snapshot) -> None:
        """Pause the engines while they load weights."""
        for engine in self.engines:
            engine.pause(True)
        await asyncio.sleep(self.timing.pause)
        for engine in self.engines:
            engine.pause(False)
        self.version = snapshot.version
        self._awake.set()

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return zeros."""
        return [0.0] * len(response)

    async def fingerprints(self) -> dict[str, Fingerprint] | None:
        """Return None, because there are no weights."""
        return None

    async def close(self) -> None:
        """Do nothing."""


class SimulatedGraders:
    """Graders with a fixed duration and a limited number of processes."""

    def __init__(self, seconds: float, count: int) -> None:
        self._seconds, self._free = seconds, asyncio.Semaphore(count)

    async def grade(self, sample: Sample) -> Grade:
        """Return a reward after waiting for a free process and grading."""
        if self._seconds > 0:
            async with self._free:
                await asyncio.sleep(self._seconds)
        return Grade(0.0)


def simulate(job: PlannedJob, timing: Timing, steps: int, skipped: int = 0, seed: int = 0) -> Flow:
    """Simulate ``steps`` steps after ``skipped`` steps that fill the scheduler."""
    return run_virtually(_run(job, timing, steps, skipped, seed))


async def _run(job: PlannedJob, timing: Timing, steps: int, skipped: int, seed: int) -> Flow:
    asked, pool, clock = InOrder(), SimulatedEngines(timing, job), asyncio.get_running_loop().time
    graders = SimulatedGraders(timing.grade, job.graders)
    rollouter = Rollouter(pool, graders, lambda ids: "", Sampling(), job.generations, seed)
    stream = RolloutScheduler(
        asked,
        asked,
        rollouter,
        job.prompts,
        job.staleness,
        stragglers="drop" if job.is_dropping else "wait",
        slack=job.slack,
        rest=pool.sleep if job.is_sleeping else None,
    )
    count = _Count()
    await pool.load(weights(0))
    async with stream:
        for step in range(skipped + steps):
            # The first steps fill the engines and the queue, so counting begins after them.
            if step == skipped:
                count = _Count(clock(), *_counted(pool))
            rollouts = [rollout for group in (await stream.next_batch()).groups for rollout in group.rollouts]
            tokens = sum(rollout.response[0] for rollout in rollouts)
            began = clock()
            await asyncio.sleep(timing.learn(tokens))
            # The part of the publication during which engines go on answering; `load` waits for the rest.
            await asyncio.sleep(timing.publish - timing.pause)
            await pool.load(weights(step + 1))
            count.ages += [step - rollout.oldest_version for rollout in rollouts]
            count.trained += tokens
            count.learned += clock() - began
        return count.flow(clock(), steps, pool)


def _counted(pool: SimulatedEngines) -> tuple[float, float, float]:
    for engine in pool.engines:
        engine.settle()
    drawn = sum(engine.drawn for engine in pool.engines)
    return drawn, sum(engine.busy for engine in pool.engines), sum(engine.row_seconds for engine in pool.engines)


@dataclass
class _Count:
    began: float = 0.0
    drawn: float = 0.0
    busy: float = 0.0
    row_seconds: float = 0.0
    trained: float = 0.0
    learned: float = 0.0
    ages: list[int] = field(default_factory=list)

    def flow(self, now: float, steps: int, pool: SimulatedEngines) -> Flow:
        drawn, busy, row_seconds = _counted(pool)
        seconds = now - self.began
        whole = seconds * len(pool.engines)
        return Flow(
            seconds=seconds,
            steps=steps,
            trained=self.trained,
            generated=drawn - self.drawn,
            answering=(busy - self.busy) / whole,
            filled=(row_seconds - self.row_seconds) / (whole * pool.timing.most),
            learning=self.learned / seconds,
            staleness_mean=sum(self.ages) / len(self.ages),
            staleness_max=max(self.ages),
            answer_mean=self.trained / len(self.ages),
        )
