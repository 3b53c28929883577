"""Engines in a cluster: actors behind the `Engine` protocol, restarted when lost."""

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import torch

from gnomon.cluster.broadcast import Receivers, Sent
from gnomon.cluster.ray import Cluster, cause_of
from gnomon.cluster.weight_store import Piece, WeightCache, WeightsRef, awaited
from gnomon.core.errors import EngineError, GnomonError, named
from gnomon.core.metrics import Mean, Metrics, Sum
from gnomon.core.progress import show_progress
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.pool import EnginePool
from gnomon.engines.vllm.transfer import BEGIN, FINISH
from gnomon.models.transfer.fingerprint import Fingerprint

# The actor that holds one engine, and the messages between the actor and the run.


@dataclass(frozen=True)
class ActorReply:
    """An engine's reply to one call.

    Attributes:
        number: Replies count upward, because a later reply can arrive first.
        version: Version of the engine's weights.
        beats: The engine's progress count.
        fault: Name and text of the error that the engine raised, if any.
    """

    value: Any
    number: int
    version: int
    beats: int
    fault: tuple[str, str] | None = None


@dataclass(frozen=True)
class FetchStats:
    """The cost of one load, or of several.

    Attributes:
        size: Fetched bytes.
        tensors: Fetched tensors.
        seconds: Duration of the fetch.
        overlapped: Seconds of the fetch during which the engine also decoded.
    """

    size: int = 0
    tensors: int = 0
    seconds: float = 0.0
    overlapped: float = 0.0

    def __add__(self, other: "FetchStats") -> "FetchStats":
        return FetchStats(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def metrics(self) -> Metrics:
        """The metrics of these loads."""
        return Metrics.of(
            {
                "weights/sent_bytes": Sum(self.size),
                "weights/sent_tensors": Sum(self.tensors),
                "weights/overlap_fraction": Mean(self.overlapped, self.seconds),
            }
        )


@dataclass(frozen=True)
class EngineSpec:
    """How an actor builds its engine.

    Attributes:
        make: Builds the engine in the actor's process.
        takes_parts: Whether the engine accepts changed tensors alone (`Snapshot.since`).
        threads: Torch threads; None keeps the default.
        receives: vLLM's name of the transfer method for broadcasts; "" if the engine fetches weights.
        parts: Processes that hold the model together.
    """

    make: Callable[[], Engine]
    takes_parts: bool = False
    threads: int | None = None
    receives: str = ""
    parts: int = 1


class EngineActor:
    """Holds one engine. Errors of the engine become replies instead of exceptions.

    The actor fetches new weights while the engine decodes. The engine exchanges its weights between two tokens, once
    all new tensors are on the machine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine: Engine | None = None
        self._taken: Mapping[str, Fingerprint] = {}
        self._kept: Mapping[Any, Piece] = {}
        self._loading = asyncio.Lock()
        self._began = 0.0
        self._received = FetchStats()
        self._fault: EngineError | None = None
        self._numbers = itertools.count(1)
        self._clock = _Clock()

    async def open(self) -> ActorReply:
        """Build the engine; reply with host name and process id."""
        return await self._said(asyncio.to_thread(self._make))

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> ActorReply:
        """Reply as `Engine.generate` does."""
        with self._clock:
            return await self._said(self._here().generate(prompt, keys, sampling))

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> ActorReply:
        """Reply as `Engine.score` does."""
        return await self._said(self._here().score(prompt, response, temperature))

    async def load(self, weights: WeightsRef | Sent) -> ActorReply:
        """Fetch missing tensors and load them, or confirm a broadcast; reply with `FetchStats`."""
        return await self._said(self._took(weights) if isinstance(weights, Sent) else self._load(weights))

    async def transfer(self, what: str, told: Mapping[str, Any], version: int) -> ActorReply:
        """Do one part of a broadcast that the learner's rank 0 leads, to weights of ``version``; see `VllmEngine`."""
        return await self._said(self._transfer(what, told, version))

    async def fingerprints(self) -> ActorReply:
        """Reply as `Engine.fingerprints` does."""
        return await self._said(self._here().fingerprints())

    async def sleep(self) -> ActorReply:
        """Release the engine's weights, keys and values; the next load brings all weights."""
        return await self._said(self._sleep())

    async def status(self) -> ActorReply:
        """Reply with version and progress count, or with a failed broadcast's error."""
        return await self._said(self._state())

    def _make(self) -> tuple[str, int]:
        if self._spec.threads is not None:
            torch.set_num_threads(self._spec.threads)
        self._engine = self._spec.make()
        return socket.gethostname(), os.getpid()

    def _here(self) -> Engine:
        assert self._engine is not None, "it is opened first"
        return self._engine

    async def _state(self) -> None:
        if self._fault is not None:
            raise self._fault

    async def _sleep(self) -> None:
        engine: Any = self._here()
        async with self._loading:
            # A sleeping engine holds no weights, so the next load brings all of them.
            self._taken = {}
            await engine.sleep()

    async def _transfer(self, what: str, told: Mapping[str, Any], version: int) -> None:
        engine: Any = self._here()
        if what == BEGIN:
            self._began = time.perf_counter()
        try:
            await engine.transfer(what, told, version)
        except EngineError as error:
            self._fault = error
            raise
        if what == FINISH:
            seconds, prints = time.perf_counter() - self._began, await engine.fingerprints()
            # The engine does not decode during a broadcast.
            self._received = FetchStats(sum(print_.nbytes for print_ in prints.values()), len(prints), seconds, 0.0)

    async def _took(self, sent: Sent) -> FetchStats:
        if self._here().version != sent.version:
            raise EngineError(f"it has weights of version {self._here().version}, and was sent {sent.version}")
        return self._received

    async def _load(self, shelved: WeightsRef) -> FetchStats:
        async with self._loading:
            engine = self._here()
            is_part = self._spec.takes_parts and bool(self._taken)
            names = shelved.lacking(self._taken) if is_part else list(shelved.spots)
            began, busy = time.perf_counter(), self._clock.seconds
            brought = await shelved.fetch(names, self._kept)
            seconds, overlapped = time.perf_counter() - began, self._clock.seconds - busy
            since = engine.version if is_part else None
            await engine.load(Snapshot(shelved.version, lambda: iter(brought.weights.items()), since=since))
            # Only after the load: if that fails, the next one fetches everything that the engine lacks.
            self._taken = {name: spot.print for name, spot in shelved.spots.items()}
            # Pieces with a reference stay in this machine's object store.
            self._kept = brought.kept
            return FetchStats(brought.size, brought.tensors, seconds, min(seconds, overlapped))

    async def _said(self, work: Awaitable[Any]) -> ActorReply:
        value, fault = None, None
        try:
            value = await work
        except GnomonError as error:
            fault = (type(error).__name__, str(error))
        except Exception as error:
            # Any other error's class may not exist in the run's process, so only its text travels.
            fault = (EngineError.__name__, f"{type(error).__name__}: {error}")
        version, beats = (-1, 0) if self._engine is None else (self._engine.version, self._engine.beats)
        return ActorReply(value, next(self._numbers), version, beats, fault)


class _Clock:
    """Measures the time during which at least one caller is inside the context."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = self._before = 0.0

    def __enter__(self) -> None:
        if self._inside == 0:
            self._since = time.perf_counter()
        self._inside += 1

    def __exit__(self, *failure: Any) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._before += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Seconds with at least one caller inside."""
        return self._before + (time.perf_counter() - self._since if self._inside else 0.0)


STARTING_SECONDS = 600.0
"""Time limit for loading a model."""
RETURNS = 3
"""Restarts of one engine in a run; a place where an engine dies again and again is broken."""
# The pause before a restart, times the number of restarts so far.
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
        spec: How the actor builds the engine.
        cache: Puts weights where the engine fetches them.
        fetched: Receives the cost of each load.
        look_seconds: Seconds between two progress questions.
    """

    def __init__(
        self,
        actors: Actors,
        place: int,
        spec: EngineSpec,
        cache: WeightCache,
        fetched: Callable[[FetchStats], None] = lambda fetched: None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self.version = -1
        self.home: tuple[str, int] | None = None
        self._actors = actors
        self._cache = cache
        self._fetched = fetched
        self._look_seconds = look_seconds
        self.actor = actors.actor(place, EngineActor, spec)
        # Asked at once, so that all engines are built while the learner loads.
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
        shelved = await run_in_thread(lambda: self._cache.of(snapshot))
        with show_progress("loading weights into an engine" if self.home else "starting an engine", is_brief=True):
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
            # One listener for all calls in flight, from the first to the last.
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
            # The cluster is gone: Ray would never finish the call.
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
        # Replies of calls that ended in another order would set version and progress back.
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


class RemoteEngines:
    """Starts and restarts the engines of a run in their places."""

    def __init__(self, actors: Actors, places: Mapping[str, int], spec: EngineSpec, timeout_seconds: float) -> None:
        self._fetched = FetchStats()
        self._actors, self._places, self._spec = actors, places, spec
        self._cache = WeightCache()
        self._look_seconds = min(_LOOK_SECONDS, timeout_seconds / _LOOKS)
        self._returns = dict.fromkeys(places, 0)

    def start(self, name: str) -> RemoteEngine:
        """Start the engine of that name and return at once."""
        place = self._places[name]
        return RemoteEngine(self._actors, place, self._spec, self._cache, self._count, self._look_seconds)

    def take_metrics(self) -> Metrics:
        """Return the metrics of all loads since the last call, over all engines."""
        taken, self._fetched = self._fetched.metrics, FetchStats()
        return taken

    def _count(self, fetched: FetchStats) -> None:
        self._fetched += fetched

    async def restart(self, name: str) -> Engine:
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
            # Longer each time: a machine that is out of memory needs a while to recover.
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
    spec: EngineSpec,
    timeout_seconds: float,
    vocabulary_size: int | None,
    warn: Callable[[str], None],
) -> tuple[EnginePool, Callable[[], Metrics], Mapping[str, RemoteEngine]]:
    """Start the engines of a run.

    Args:
        actors: The cluster.
        places: Engine names to indices of resource bundles.
        spec: How an engine is built. If engines receive broadcasts, they are bound together and never restarted.
        timeout_seconds: As in `EnginePool`.
        vocabulary_size: As in `EnginePool`.
        warn: As in `EnginePool`.

    Returns:
        The pool, the metrics of weight transfers, and the engines by name.
    """
    engines = RemoteEngines(actors, places, spec, timeout_seconds)
    started = {name: engines.start(name) for name in places}
    # A broadcast group cannot take in a new member.
    restart = None if spec.receives else engines.restart
    pool = EnginePool(started, timeout_seconds, vocabulary_size, warn, restart, all_required=bool(spec.receives))
    return pool, engines.take_metrics, started


def error_of(kind: str, said: str) -> Exception:
    """Rebuild an error that another process raised, from its name and text."""
    return named(kind, said) or EngineError(f"{kind}: {said}")


# The engines of a broadcast group: watched together and ended together.

_BEAT_SECONDS = 1.0
# A heartbeat that is later than this is named in the message of an overdue broadcast.
_LATE_SECONDS = 3.0
# A run that did not look for so long was stopped itself.
_PAUSED_SECONDS = 5.0
_ADVICE = "Go on from the newest checkpoint with gnomon resume"


@dataclass
class _Watched:
    """One engine with its pending heartbeat and the time since which the heartbeat is due."""

    name: str
    engine: RemoteEngine
    ping: Any = None
    asked: float = field(default_factory=time.monotonic)


class BroadcastGroup:
    """All engines of a run that receives weights by broadcast. Any thread may call, one at a time.

    No process can leave or join a running broadcast, so a dead engine would block all others. While the run waits for
    its learner, it asks every engine for a heartbeat once a second. The first engine that dies, hangs or fails in a
    broadcast ends the run. Lost engines are not restarted.

    Attributes:
        seconds: Time limit of a heartbeat and of a broadcast.
    """

    def __init__(self, cluster: Cluster, engines: Mapping[str, RemoteEngine], spec: EngineSpec, seconds: float) -> None:
        self._cluster, self._spec, self._seconds = cluster, spec, seconds
        self._watched = [_Watched(name, engine) for name, engine in engines.items()]
        self._is_made = False
        self._began: float | None = None
        self._looked = time.monotonic()

    def receivers(self, address: str) -> Receivers:
        """Wait until all engines are built, and return them.

        Args:
            address: Where the group meets.

        Raises:
            EngineError: If an engine dies or is not ready in time.
            UserError: As building an engine does.
        """
        until = time.monotonic() + STARTING_SECONDS
        for one in self._watched:
            try:
                self._heard(one, one.engine.opened, until - time.monotonic())
            except TimeoutError:
                raise EngineError(f"engine {one.name} was not there after {STARTING_SECONDS:g} s") from None
            one.asked = time.monotonic()
        self._is_made, self._looked = True, time.monotonic()
        actors = tuple(one.engine.actor for one in self._watched)
        return Receivers(actors, (self._spec.parts,) * len(actors), self._spec.receives, address)

    def begin(self, is_publication: bool) -> None:
        """Record a new request to the learner, and whether the request needs the engines to receive weights."""
        self._began = time.monotonic() if is_publication else None
        self._looked = time.monotonic()

    def check_alive(self) -> None:
        """Check heartbeats and the running broadcast.

        Raises:
            EngineError: If an engine is lost or the broadcast is overdue.
        """
        if not self._is_made:
            return
        now = time.monotonic()
        if now - self._looked > _PAUSED_SECONDS:
            # The run itself was paused, so no engine is late.
            for one in self._watched:
                one.asked = now
        for one in self._watched:
            self._feel(one, now)
        self._looked = now
        if self._began is not None and now - self._began > self._seconds:
            raise EngineError(
                f"new weights did not reach all engines in {self._seconds:g} s (engine.timeout_seconds); "
                f"{self._silent(now)}. Nobody can leave a broadcast, so the run ends. {_ADVICE}"
            )

    def _feel(self, one: _Watched, now: float) -> None:
        if one.ping is None:
            if now - one.asked > _BEAT_SECONDS:
                one.ping, one.asked = one.engine.actor.status.remote(), now
        elif self._cluster.ready([one.ping], 0):
            self._heard(one, one.ping, self._seconds)
            one.ping, one.asked = None, now
        elif now - one.asked > self._seconds:
            raise EngineError(f"{self._lost(one)} stood still for {self._seconds:g} s (engine.timeout_seconds)")

    def _heard(self, one: _Watched, reference: Any, seconds: float) -> None:
        """Wait for a reply.

        Raises:
            EngineError: If the engine is gone or reports a failure.
            TimeoutError: If there is no reply in time.
        """
        from ray.exceptions import RayError

        try:
            reply: ActorReply = self._cluster.get(reference, seconds)
        except RayError as error:
            raise EngineError(f"{self._lost(one)} is gone: {cause_of(error)} {_ADVICE}") from error
        if reply.fault is not None:
            kind, said = reply.fault
            raise error_of(kind, f"engine {one.name}: {said}")

    def _lost(self, one: _Watched) -> str:
        return f"engine {one.name}, one of {len(self._watched)} that are sent weights together, {one.engine.where}"

    def _silent(self, now: float) -> str:
        late = [one.name for one in self._watched if one.ping is not None and now - one.asked > _LATE_SECONDS]
        return f"no sign of life from {', '.join(late)}" if late else "all of them, and the learner, live"
