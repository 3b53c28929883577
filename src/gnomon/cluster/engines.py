"""Engines in a cluster: actors that the run asks as it asks engines of its own; lost ones are started anew."""

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
"""How long an engine may load its model before it counts as dead."""
RETURNS = 3
"""How often an engine is started anew in one run; a place where it dies again and again is no good."""
_PAUSE_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_LOOKS = 8


class Actors(Protocol):
    """What engines and graders need of a cluster; see `cluster.ray.Cluster`. Any thread."""

    @property
    def fault(self) -> str:
        """What became of the cluster; "" while it is there."""
        ...

    def actor(self, place: int, kind: type, *arguments: Any) -> Any:
        """Return an actor in a place, at once; it is made meanwhile."""
        ...

    def end(self, actor: Any) -> None:
        """Kill it, if it lives."""
        ...


class RemoteEngine:
    """An engine in another process, on any machine of the cluster; implements `Engine`.

    Its actor is made while the caller goes on; the first call waits for that. While anything is asked of it, it is
    asked once a second whether it drew something. An actor that dies, with its machine or alone, fails its callers as
    soon as the cluster knows: at once on a machine that lives, after Ray's health checks on one that is silent.

    actor, opened: the actor, and what it says once it has made the engine.
    actors: where it is made, at ``place``. stock: puts weights where it fetches them. fetched: is told what came with
    each load. look_seconds: between two questions whether it works.
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
        """What the engine last said of its beats, and before that seconds in which it was being made."""
        return self._ticks + self._beats

    async def ready(self) -> None:
        """Wait until the engine is made. Raises: EngineError when it died; UserError as making it does."""
        await self._call(None)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``; a caller that is cancelled frees its rows there.

        Raises: EngineError when it died, its machine is gone, or it fails; ConfigError as the engine does.
        """
        done: list[Completion] = await self._call(self.actor.generate, tuple(prompt), tuple(keys), sampling)
        return done

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response``; see `Engine`. Raises: as `generate` does."""
        scores: list[float] = await self._call(self.actor.score, tuple(prompt), tuple(response), temperature)
        return scores

    async def load(self, snapshot: Snapshot) -> None:
        """Answer with these weights from now on; it fetches what it lacks, and answers meanwhile.

        Weights that a broadcast brought are there already, and it only says so. Raises: as `generate` does.
        """
        self._check_open()
        shelved = await elsewhere(lambda: self._stock.of(snapshot))
        with working("loading weights into an engine" if self.home else "starting an engine", is_brief=True):
            self._fetched(await self._call(self.actor.load, shelved))

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the fingerprints of the weights that answer there; see `Engine`. Raises: as `generate` does."""
        held: Mapping[str, Fingerprint] | None = await self._call(self.actor.fingerprints)
        return held

    async def close(self) -> None:
        """Kill the actor; later calls raise EngineError."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._actors.end, self.actor)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        """Return what the actor answers, once it is open; listen for its beats until then."""
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
        """Return the value of a reply. is_ours: nobody else waits for it, so that it ends with its caller."""
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
        """Ask it for its beats now and then; what is wrong with it, its callers are told themselves."""
        while True:
            await asyncio.sleep(self._look_seconds)
            if self._actors.fault:
                gone.set_result(None)
                return
            if self.home is None:
                # All that can be known of one that is being made: its process was not found to be dead.
                self._ticks += time.monotonic() < self._until
                continue
            try:
                await self._answer(self.actor.status.remote(), is_ours=False)
            except EngineError:
                return

    @property
    def where(self) -> str:
        """Which process it is, in words."""
        return "its process" if self.home is None else "process {1} on {0}".format(*self.home)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")


@dataclass
class Tally:
    """What engines were sent, and how much of it while they answered."""

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
        """Return what was counted since the last call, over all engines."""
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
    """The engines of a run: started in their places, and anew when they were lost."""

    def __init__(self, actors: Actors, places: Mapping[str, int], order: EngineSpec, timeout_seconds: float) -> None:
        self.tally = Tally()
        self._actors, self._places, self._order = actors, places, order
        self._stock = WeightCache()
        self._look_seconds = min(_LOOK_SECONDS, timeout_seconds / _LOOKS)
        self._returns = dict.fromkeys(places, 0)

    def start(self, name: str) -> RemoteEngine:
        """Return the engine of that name, which is being made."""
        place = self._places[name]
        return RemoteEngine(self._actors, place, self._order, self._stock, self.tally.add, self._look_seconds)

    async def again(self, name: str) -> Engine:
        """Return another engine of that name, made.

        Raises: EngineError when it was started too often; UserError when it cannot be made; as `Actors.actor`.
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
    """Return engines at ``places`` behind one protocol, what measures the weights that they are sent, and each by name.

    order: how each is made; one that says how all are sent weights together binds them to each other, and nobody who is
    lost returns. timeout_seconds, vocabulary_size, warn: as `EnginePool` has them.
    """
    engines = RemoteEngines(actors, places, order, timeout_seconds)
    started = {name: engines.start(name) for name in places}
    again = None if order.receives else engines.again
    pool = EnginePool(started, timeout_seconds, vocabulary_size, warn, again, are_bound=bool(order.receives))
    return pool, engines.tally.take, started


def error_of(kind: str, said: str) -> Exception:
    """Return the error of that name, as it was raised in another process."""
    return named(kind, said) or EngineError(f"{kind}: {said}")
