"""Engines in a cluster: actors behind the `Engine` protocol, restarted when lost."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gnomon.cluster.engine_actor import ActorReply, EngineActor, EngineSpec, FetchStats
from gnomon.cluster.ray import cause_of
from gnomon.cluster.weight_store import WeightCache, awaited
from gnomon.core.errors import EngineError, named
from gnomon.core.metrics import Mean, Metrics, Sum
from gnomon.core.progress import working
from gnomon.core.threads import elsewhere
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.pool import EnginePool
from gnomon.models.transfer.fingerprint import Fingerprint

STARTING_SECONDS = 600.0
"""Time limit for loading a model."""
RETURNS = 3
"""Restarts of one engine in a run; a place where an engine dies again and again is broken."""
_PAUSE_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_LOOKS = 8


class Actors(Protocol):
    """What engines and graders need of a cluster; see `cluster.ray.Cluster`. Any thread may call."""

    @property
    def fault(self) -> str:
        """Why the cluster is gone; "" while it is there."""

    def actor(self, place: int, kind: type, *arguments: Any) -> Any:
        """Start an actor in a place and return at once."""

    def end(self, actor: Any) -> None:
        """Kill the actor, if it lives."""


class RemoteEngine:
    """An engine in another process of the cluster; implements `Engine`.

    The caller continues while the actor is built; the first call waits. During calls, the engine is asked for its
    progress once a second. When an actor dies, its callers fail as soon as the cluster knows: at once on a live
    machine, after Ray's health checks on a silent one.

    Args:
        actors: The cluster.
        place: Index of the resource bundle.
        order: How the actor builds the engine.
        stock: Puts weights where the engine fetches them.
        fetched: Receives the cost of each load.
        look_seconds: Seconds between two progress questions.
    """

    def __init__(
        self,
        actors: Actors,
        place: int,
        order: EngineSpec,
        stock: WeightCache,
        fetched: Callable[[FetchStats], None] = lambda fetched: None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self.version = -1
        self.home: tuple[str, int] | None = None
        self._actors = actors
        self._stock = stock
        self._fetched = fetched
        self._look_seconds = look_seconds
        self.actor = actors.actor(place, EngineActor, order)
        self.opened = self.actor.open.remote()
        self._until = time.monotonic() + STARTING_SECONDS
        self._is_closed = False
        self._calls = self._ticks = self._beats = self._latest = 0
        self._listening: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] | None = None

    @property
    def beats(self) -> int:
        """The engine's last progress count plus the seconds in which the engine was built."""
        return self._ticks + self._beats

    async def ready(self) -> None:
        """Wait until the engine is built.

        Raises:
            EngineError: If the actor died.
            UserError: As building the engine does.
        """
        await self._call(None)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``. Cancelling the caller frees the engine's rows.

        Raises:
            EngineError: If the actor or its machine is gone, or the engine fails.
            ConfigError: As the engine does.
        """
        done: list[Completion] = await self._call(self.actor.generate, tuple(prompt), tuple(keys), sampling)
        return done

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response``, in nats; raises as `generate` does."""
        scores: list[float] = await self._call(self.actor.score, tuple(prompt), tuple(response), temperature)
        return scores

    async def load(self, snapshot: Snapshot) -> None:
        """Load the snapshot. The engine fetches missing tensors and decodes meanwhile.

        After a broadcast the engine has the weights already and only confirms the version. Raises as `generate` does.
        """
        self._check_open()
        shelved = await elsewhere(lambda: self._stock.of(snapshot))
        with working("loading weights into an engine" if self.home else "starting an engine", is_brief=True):
            self._fetched(await self._call(self.actor.load, shelved))

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the fingerprints of the engine's weights; see `Engine`. Raises as `generate` does."""
        held: Mapping[str, Fingerprint] | None = await self._call(self.actor.fingerprints)
        return held

    async def sleep(self) -> None:
        """Release the engine's memory until the next load; see `SleepingEngine`. Raises as `generate` does."""
        await self._call(self.actor.sleep)

    async def close(self) -> None:
        """Kill the actor; later calls raise EngineError."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._actors.end, self.actor)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        """Return the actor's answer once the actor is open; ask for progress until then."""
        self._check_open()
        if self._calls == 0:
            self._gone = asyncio.get_running_loop().create_future()
            self._listening = asyncio.ensure_future(self._listen(self._gone))
        self._calls += 1
        try:
            if self.home is None:
                self.home = await self._answer(self.opened, is_ours=False)
            return None if method is None else await self._answer(method.remote(*arguments))
        finally:
            self._calls -= 1
            if self._calls == 0 and self._listening is not None:
                self._listening.cancel()

    async def _answer(self, ref: Any, is_ours: bool = True) -> Any:
        """Return the value of a reply. If ``is_ours``, cancelling the caller cancels the remote call."""
        import ray

        assert self._gone is not None, "made with the first call"
        asked = awaited(ref)
        try:
            either: set[asyncio.Future[Any]] = {asked, self._gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise EngineError(self._actors.fault)
            reply: ActorReply = asked.result()
        except asyncio.CancelledError:
            if is_ours:
                ray.cancel(ref)
            raise
        except ray.exceptions.RayError as error:
            self._check_open()
            raise EngineError(f"{self.where} is gone: {cause_of(error)}") from error
        finally:
            asked.cancel()
        if reply.number > self._latest:
            self._latest, self.version, self._beats = reply.number, reply.version, reply.beats
        if reply.fault is not None:
            raise error_of(*reply.fault)
        return reply.value

    async def _listen(self, gone: "asyncio.Future[None]") -> None:
        """Ask for the progress count now and then; errors go to the callers instead."""
        while True:
            await asyncio.sleep(self._look_seconds)
            if self._actors.fault:
                gone.set_result(None)
                return
            if self.home is None:
                # An engine that is being built has no count; its process is not known to be dead.
                self._ticks += time.monotonic() < self._until
                continue
            try:
                await self._answer(self.actor.status.remote(), is_ours=False)
            except EngineError:
                return

    @property
    def where(self) -> str:
        """The engine's process, for messages."""
        return "its process" if self.home is None else "process {1} on {0}".format(*self.home)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")


@dataclass
class Tally:
    """The cost of all loads since the last call of `take`."""

    size: int = 0
    tensors: int = 0
    seconds: float = 0.0
    overlapped: float = 0.0

    def add(self, fetched: FetchStats) -> None:
        """Count one load."""
        self.size += fetched.size
        self.tensors += fetched.tensors
        self.seconds += fetched.seconds
        self.overlapped += fetched.overlapped

    def take(self) -> Metrics:
        """Return the metrics since the last call, over all engines, and reset them."""
        taken = Metrics.of(
            {
                "weights/sent_bytes": Sum(self.size),
                "weights/sent_tensors": Sum(self.tensors),
                "weights/overlap_fraction": Mean(self.overlapped, self.seconds),
            }
        )
        self.size = self.tensors = 0
        self.seconds = self.overlapped = 0.0
        return taken


class RemoteEngines:
    """Starts and restarts the engines of a run in their places."""

    def __init__(self, actors: Actors, places: Mapping[str, int], order: EngineSpec, timeout_seconds: float) -> None:
        self.tally = Tally()
        self._actors, self._places, self._order = actors, places, order
        self._stock = WeightCache()
        self._look_seconds = min(_LOOK_SECONDS, timeout_seconds / _LOOKS)
        self._returns = dict.fromkeys(places, 0)

    def start(self, name: str) -> RemoteEngine:
        """Start the engine of that name and return at once."""
        place = self._places[name]
        return RemoteEngine(self._actors, place, self._order, self._stock, self.tally.add, self._look_seconds)

    async def again(self, name: str) -> Engine:
        """Restart the engine of that name and wait until it is ready.

        Raises:
            EngineError: If the engine was restarted three times, or the cluster is gone.
            UserError: If the engine cannot be built.
        """
        cause = "it was lost again each time"
        while self._returns[name] < RETURNS:
            if self._actors.fault:
                raise EngineError(self._actors.fault)
            self._returns[name] += 1
            await asyncio.sleep(_PAUSE_SECONDS * self._returns[name])
            engine = await asyncio.to_thread(self.start, name)
            is_ready = False
            try:
                await asyncio.wait_for(engine.ready(), STARTING_SECONDS)
                is_ready = True
                return engine
            except (EngineError, TimeoutError) as error:
                cause = str(error) or f"it was not there after {STARTING_SECONDS:g} s"
            finally:
                if not is_ready:
                    await engine.close()
        raise EngineError(f"it was started {RETURNS} times more, and that is the most; {cause}")


def serve_remotely(
    actors: Actors,
    places: Mapping[str, int],
    order: EngineSpec,
    timeout_seconds: float,
    vocabulary_size: int | None,
    warn: Callable[[str], None],
) -> tuple[EnginePool, Callable[[], Metrics], Mapping[str, RemoteEngine]]:
    """Start the engines of a run.

    Args:
        actors: The cluster.
        places: Engine names to indices of resource bundles.
        order: How an engine is built. If engines receive broadcasts, they are bound together and never restarted.
        timeout_seconds: As in `EnginePool`.
        vocabulary_size: As in `EnginePool`.
        warn: As in `EnginePool`.

    Returns:
        The pool, the metrics of weight transfers, and the engines by name.
    """
    engines = RemoteEngines(actors, places, order, timeout_seconds)
    started = {name: engines.start(name) for name in places}
    again = None if order.receives else engines.again
    pool = EnginePool(started, timeout_seconds, vocabulary_size, warn, again, are_bound=bool(order.receives))
    return pool, engines.tally.take, started


def error_of(kind: str, said: str) -> Exception:
    """Rebuild an error that another process raised, from its name and text."""
    return named(kind, said) or EngineError(f"{kind}: {said}")
