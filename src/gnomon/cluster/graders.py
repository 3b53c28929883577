"""Graders in a cluster: a pool of actors, each with a grading pool on its own machine."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gnomon.cluster.engines import Actors, error_of
from gnomon.cluster.ray import cause_of
from gnomon.cluster.weight_store import awaited
from gnomon.core.errors import GnomonError, GradingError, UserError
from gnomon.core.processes import codec
from gnomon.core.processes.client import Limits
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, from_json, to_json
from gnomon.rewards.grading_worker import from_sample, to_sample
from gnomon.training.reward_models import load_scorer

RETURNS = 3
"""Restarts of one grader in a run."""
TRIES = 3
"""After so many graders have died while grading a sample, the sample is an error: it may have killed them."""
# A grader that takes longer over a sample is asked for a heartbeat, and has as long as the next number to give it.
_LOOK_SECONDS = 10.0
_SILENT_SECONDS = 20.0
_STARTING_SECONDS = 120.0

Said = tuple[Any, tuple[str, str] | None]
"""An actor's reply: a value, or the name and text of an error."""


@dataclass(frozen=True)
class GraderSpec:
    """How an actor builds its grading pool.

    Attributes:
        grading: The rewards, as JSON.
        folder: The run's working directory.
        search: The run's import path.
        environment: The run's variables that ``limits`` lets rewards read.
    """

    grading: str
    limits: Limits
    folder: str
    search: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, grading: Grading, limits: Limits) -> "GraderSpec":
        """Return the spec for this grading, with directory, import path and environment of this process."""
        environment = {name: os.environ[name] for name in limits.environment if name in os.environ}
        return cls(to_json(grading), limits, os.getcwd(), tuple(p for p in sys.path if p), environment)


class GraderActor:
    """Holds a `GradingPool`. Errors become replies instead of exceptions.

    The actor imports the rewards and tests their sandbox on its own machine. The user's files must have the same paths
    as on the run's machine; relative paths start at the same working directory, if it exists.
    """

    def __init__(self, spec: GraderSpec) -> None:
        self._spec = spec
        self._pool: GradingPool | None = None

    async def open(self) -> Said:
        """Import the rewards and fork the workers; reply with host name and process id."""
        spec, home = self._spec, (socket.gethostname(), os.getpid())
        # Before the rewards are imported, since user code may read a variable at import.
        os.environ.update(spec.environment)
        if Path(spec.folder).is_dir():
            os.chdir(spec.folder)
        sys.path.extend(folder for folder in spec.search if folder not in sys.path and Path(folder).exists())
        try:
            pool = GradingPool(from_json(spec.grading), spec.limits, load_scorer)
            await pool.start()
        except GnomonError as error:
            return None, (type(error).__name__, f"on the cluster's machine {home[0]}: {error}")
        self._pool = pool
        return home, None

    async def grade(self, sample: bytes) -> Said:
        """Return the grade of one sample, encoded by `core.processes.codec`."""
        assert self._pool is not None, "it is opened first"
        try:
            return await self._pool.grade(to_sample(codec.decode(sample))), None
        except GnomonError as error:
            return None, (type(error).__name__, str(error))

    async def grade_together(self, samples: bytes) -> Said:
        """Return the grades of all responses to one prompt, encoded by `core.processes.codec`."""
        assert self._pool is not None, "it is opened first"
        try:
            listed = [to_sample(fields) for fields in codec.decode(samples)["samples"]]
            return await self._pool.grade_together(listed), None
        except GnomonError as error:
            return None, (type(error).__name__, str(error))

    async def status(self) -> None:
        """Heartbeat."""


@dataclass(eq=False)
class GraderHandle:
    """One grader.

    Attributes:
        home: Host name and process id.
        busy: Samples in flight.
        cause: Why the grader gets no samples; None while it works.
        returns: Restarts so far.
        is_out: Whether the grader will not be restarted again.
    """

    place: int
    actor: Any = None
    home: tuple[str, int] | None = None
    busy: int = 0
    cause: str | None = "it was not started"
    returns: int = 0
    is_out: bool = False


class Graders:
    """Grade samples on a cluster, with the interface of `GradingPool`; the grader with the fewest samples is next.

    A grader that dies, or gives no heartbeat for 20 s, loses no sample: another grader takes its samples, and the
    grader is restarted in its place, three times in a run. A sample over which three graders died is an error.

    Args:
        actors: The cluster.
        places: Indices of the resource bundles.
        grading: The rewards.
        limits: Limits of the worker processes.
        warn: Receives one line for each lost grader, and one if no restart is left.
    """

    def __init__(
        self, actors: Actors, places: Sequence[int], grading: Grading, limits: Limits, warn: Callable[[str], None]
    ) -> None:
        self._actors = actors
        self._spec = GraderSpec.of(grading, limits)
        self.handles = [GraderHandle(place) for place in places]
        self._warn = warn
        self._changed = asyncio.Event()
        self._replacements: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start all graders and wait until each has imported the rewards.

        Raises:
            RewardError: If a reward does not work on a machine of the cluster.
            GradingError: If no grader starts.
        """
        try:
            await asyncio.gather(*(self._begin(handle) for handle in self.handles))
            await self._free()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every grader and all processes that the grader started. Idempotent."""
        self._is_closed = True
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        self._changed.set()
        actors = [handle.actor for handle in self.handles if handle.actor is not None]
        await asyncio.gather(*(asyncio.to_thread(self._actors.end, actor) for actor in actors))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def grade(self, sample: Sample) -> Grade:
        """Return a reward or an error; a bad sample never raises.

        Raises:
            GradingError: If no grader is left, with each grader's cause; or after `close`.
        """
        found = await self._graded("grade", from_sample(sample))
        return found if isinstance(found, Grade) else Grade(None, error=found)

    async def grade_together(self, samples: Sequence[Sample]) -> list[Grade]:
        """Return the grades of all responses to one prompt. Raises as `grade` does."""
        found = await self._graded("grade_together", {"samples": [from_sample(sample) for sample in samples]})
        return [Grade(None, error=found)] * len(samples) if isinstance(found, str) else list(found)

    async def _graded(self, method: str, message: dict[str, Any]) -> Any:
        """Return a grader's value for a message, or the reason why there is none."""
        try:
            # As between local processes, so that a sample that cannot travel is refused alike.
            line = codec.encode(message)
        except (TypeError, RecursionError) as error:
            return f"the sample cannot be sent to a grading process: {error}"
        cause = ""
        # A sample that kills its grader would otherwise kill one after another.
        for _ in range(TRIES):
            handle = await self._free()
            try:
                return await self._ask(handle, line, method)
            except _Gone as gone:
                cause = str(gone)
        return f"{TRIES} graders died while they judged it: {cause}"

    async def _free(self) -> GraderHandle:
        """Return the grader with the fewest samples; if none works, wait for a restart."""
        while True:
            self._check()
            working = [handle for handle in self.handles if handle.cause is None]
            if working:
                return min(working, key=lambda handle: handle.busy)
            self._changed.clear()
            await self._changed.wait()

    async def _ask(self, handle: GraderHandle, line: bytes, method: str) -> Any:
        """Return a grader's value. Raises _Gone if the grader died, and the grader's own errors."""
        actor = handle.actor
        handle.busy += 1
        asked = awaited(getattr(actor, method).remote(line))
        try:
            # A grader may take long over a sample; every 10 s a heartbeat tells that from a dead one.
            while not asked.done():
                await asyncio.wait({asked}, timeout=_LOOK_SECONDS)
                if asked.done():
                    break
                # It was lost and restarted meanwhile; this call's actor is gone.
                if handle.actor is not actor:
                    # Another call lost this grader first, and its actor will never answer.
                    raise _Gone(handle.cause or "it was started anew")
                await self._look(handle)
            return _value(await _answer(asked))
        except (_Gone, GradingError) as error:
            self._lose(handle, actor, str(error))
            raise _Gone(str(error)) from error
        finally:
            handle.busy -= 1
            asked.cancel()

    async def _look(self, handle: GraderHandle) -> None:
        """Ask a grader for a heartbeat. Raises _Gone without one, and GradingError without a cluster."""
        self._check()
        try:
            await asyncio.wait_for(_answer(awaited(handle.actor.status.remote())), _SILENT_SECONDS)
        except TimeoutError:
            raise _Gone(f"it answered nothing for {_SILENT_SECONDS:g} s") from None

    def _lose(self, handle: GraderHandle, actor: Any, cause: str) -> None:
        """Start a replacement for a lost grader, once."""
        # All calls in flight notice the loss, and only the first may start a replacement.
        if handle.actor is not actor or self._is_closed:
            return
        handle.actor, handle.cause = None, cause
        self._warn(f"lost the grader at place {handle.place}: {cause}; {self._heir(handle)}")
        task = asyncio.ensure_future(self._replace_worker(handle, actor))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    def _heir(self, lost: GraderHandle) -> str:
        """Say which grader takes the samples of a lost one."""
        working = sum(handle.cause is None for handle in self.handles)
        if working:
            return f"what it had is judged by {'the other one' if working == 1 else 'the others'}"
        if lost.returns < RETURNS:
            return "what it had is judged by the one that is started in its place"
        return "no other one works at the moment"

    async def _begin(self, handle: GraderHandle) -> None:
        """Start a grader for the first time. Raises UserError if the rewards do not work on its machine."""
        try:
            await self._spawn(handle)
        except _Gone as gone:
            self._lose(handle, handle.actor, str(gone))

    async def _replace_worker(self, handle: GraderHandle, actor: Any) -> None:
        """Restart a grader until one works or no restart is left."""
        while handle.returns < RETURNS and not self._actors.fault:
            # The former actor may hang and still hold the bundle's resources.
            await asyncio.to_thread(self._actors.end, actor)
            handle.returns += 1
            try:
                await self._spawn(handle)
                return
            except _Gone as gone:
                actor, handle.cause = handle.actor, str(gone)
            except UserError as error:
                handle.cause = str(error)
                break
        handle.is_out = True
        self._changed.set()
        self._warn(f"the grader at place {handle.place} does not come back: {handle.cause}")

    async def _spawn(self, handle: GraderHandle) -> None:
        """Start a grader and wait until it works.

        Raises:
            UserError: If the rewards do not work on its machine.
            _Gone: If the actor dies or cannot start its workers.
        """
        handle.actor = await asyncio.to_thread(self._actors.actor, handle.place, GraderActor, self._spec)
        try:
            said = await asyncio.wait_for(_answer(awaited(handle.actor.open.remote())), _STARTING_SECONDS)
            handle.home = _value(said)
        except (GradingError, TimeoutError) as error:
            raise _Gone(str(error) or f"it was not there after {_STARTING_SECONDS:g} s") from error
        handle.cause = None
        self._changed.set()

    def _check(self) -> None:
        if self._is_closed:
            raise GradingError("the graders are closed")
        if self._actors.fault:
            raise GradingError(self._actors.fault)
        if all(handle.is_out for handle in self.handles):
            causes = "; ".join(f"place {handle.place}: {handle.cause}" for handle in self.handles)
            raise GradingError(f"no grader is left in the cluster ({causes})")


class _Gone(Exception):
    """The grader died; another grader takes the sample."""


async def _answer(asked: "asyncio.Future[Any]") -> Any:
    """Wait for an actor's reply. Raises _Gone if the actor is dead."""
    import ray

    try:
        return await asked
    except ray.exceptions.RayError as error:
        raise _Gone(cause_of(error)) from error


def _value(said: Said) -> Any:
    value, fault = said
    if fault is not None:
        raise error_of(*fault)
    return value
