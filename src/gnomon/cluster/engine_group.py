"""The engines of a broadcast group: watched together and ended together."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gnomon.cluster.broadcast import Receivers
from gnomon.cluster.engine_actor import ActorReply, EngineSpec
from gnomon.cluster.engines import STARTING_SECONDS, RemoteEngine, error_of
from gnomon.cluster.ray import Cluster, cause_of
from gnomon.core.errors import EngineError

_BEAT_SECONDS = 1.0
_LATE_SECONDS = 3.0
_PAUSED_SECONDS = 5.0
_ADVICE = "Go on from the newest checkpoint with gnomon resume"


@dataclass
class _Watched:
    """One engine with its pending heartbeat and the time since which the heartbeat is due."""

    name: str
    engine: RemoteEngine
    beat: Any = None
    asked: float = field(default_factory=time.monotonic)


class BroadcastGroup:
    """All engines of a run that receives weights by broadcast. Any thread may call, one at a time.

    No process can leave or join a running broadcast, so a dead engine would block all others. While the run waits for
    its learner, it asks every engine for a heartbeat once a second. The first engine that dies, hangs or fails in a
    broadcast ends the run. Lost engines are not restarted.

    Attributes:
        seconds: Time limit of a heartbeat and of a broadcast.
    """

    def __init__(
        self, cluster: Cluster, engines: Mapping[str, RemoteEngine], order: EngineSpec, seconds: float
    ) -> None:
        self._cluster, self._order, self._seconds = cluster, order, seconds
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
        return Receivers(actors, (self._order.parts,) * len(actors), self._order.receives, address)

    def begin(self, is_publication: bool) -> None:
        """Record a new request to the learner, and whether the request needs the engines to receive weights."""
        self._began = time.monotonic() if is_publication else None
        self._looked = time.monotonic()

    def look(self) -> None:
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
        if one.beat is None:
            if now - one.asked > _BEAT_SECONDS:
                one.beat, one.asked = one.engine.actor.status.remote(), now
        elif self._cluster.ready([one.beat], 0):
            self._heard(one, one.beat, self._seconds)
            one.beat, one.asked = None, now
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
        late = [one.name for one in self._watched if one.beat is not None and now - one.asked > _LATE_SECONDS]
        return f"no sign of life from {', '.join(late)}" if late else "all of them, and the learner, live"
