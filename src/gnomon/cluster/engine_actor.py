"""The actor that holds one engine, and the messages between the actor and the run."""

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gnomon.cluster.broadcast import Sent
from gnomon.cluster.weight_store import Piece, WeightsRef
from gnomon.core.errors import EngineError, GnomonError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.vllm.transfer import BEGIN, FINISH
from gnomon.models.transfer.fingerprint import Fingerprint


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
    """The cost of one load.

    Attributes:
        size: Fetched bytes.
        tensors: Fetched tensors.
        seconds: Duration of the fetch.
        overlapped: Seconds of the fetch during which the engine also decoded.
    """

    size: int
    tensors: int
    seconds: float
    overlapped: float


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
        all
    new tensors are on the machine.
    """

    def __init__(self, order: EngineSpec) -> None:
        self._order = order
        self._engine: Engine | None = None
        self._taken: Mapping[str, Fingerprint] = {}
        self._kept: Mapping[Any, Piece] = {}
        self._loading = asyncio.Lock()
        self._began = 0.0
        self._received = FetchStats(0, 0, 0.0, 0.0)
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
        if self._order.threads is not None:
            torch.set_num_threads(self._order.threads)
        self._engine = self._order.make()
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
            is_part = self._order.takes_parts and bool(self._taken)
            names = shelved.lacking(self._taken) if is_part else list(shelved.spots)
            began, busy = time.perf_counter(), self._clock.seconds
            brought = await shelved.fetch(names, self._kept)
            seconds, overlapped = time.perf_counter() - began, self._clock.seconds - busy
            since = engine.version if is_part else None
            await engine.load(Snapshot(shelved.version, lambda: iter(brought.weights.items()), since=since))
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
