"""The ranks of the learner as actors of a cluster."""

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from gnomon.cluster.broadcast import Receivers, Sent
from gnomon.cluster.engine_group import BroadcastGroup
from gnomon.cluster.learner_actor import ActorLocation, LearnerActor, LearnerReply
from gnomon.cluster.ray import Cluster, cause_of
from gnomon.cluster.weight_store import WeightsRef
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, LearnerError
from gnomon.core.redaction import tail
from gnomon.learner.serialization import boxed, unboxed
from gnomon.learner.worker_group import STILL_SECONDS, WorkerAnswer, WorkerLost

_LOOPBACK = "127.0.0.1"
_STARTING_SECONDS = 300.0
_BEAT_SECONDS = 5.0
_PIECE_BYTES = 1 << 26
_INLINE_BYTES = 1 << 16
_PROBE, _MEETING = ".gnomon-probe", "meeting"
_TAIL = 1500
_CARRIED = (WeightsRef, Sent, Receivers)
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


@dataclass
class RayWorkerHandle:
    """One rank with its actor, its location and its pending heartbeat."""

    rank: int
    actor: Any
    at: ActorLocation | None = None
    beat: Any = None
    asked: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        """Return the location in brackets, once it is known."""
        return "" if self.at is None else f" (on {self.at.address}, pid {self.at.number})"


class RayWorkerGroup:
    """Implements `WorkerGroup` with one actor per rank. Arguments are put into the object store once for all ranks.

    Each actor answers heartbeats while it works. An actor without a heartbeat for 40 s counts as dead: the actor, its
    machine or the network has stopped. Ray notices a dead actor at once, and a dead machine within 20 s.

    Args:
        cluster: The cluster.
        device: "cpu" or "cuda"; an actor sees its own GPU only.
        still_seconds: Time limit of a heartbeat.
        group: The engines that receive broadcasts, watched together with the ranks; None without broadcasts.
    """

    is_shelving = True

    def __init__(
        self, cluster: Cluster, device: str, still_seconds: float = STILL_SECONDS, group: BroadcastGroup | None = None
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._address = _LOOPBACK
        self._places = cluster.of("learner")
        self.size, self.device, self.meeting = len(self._places), device, ""
        self.turns: Sequence[Sequence[int]] = []
        self.members: list[RayWorkerHandle] = []
        self.scratch = Path(tempfile.mkdtemp(prefix="learner-", dir=cluster.folder))
        self._still_seconds = still_seconds
        self._waiting: dict[int, Any] = {}
        self._looked = time.monotonic()

    def open(self) -> None:
        """Start the actors, compare their versions, and choose the rendezvous.

        Raises:
            ConfigError: If machines have different versions.
            LearnerError: If an actor cannot start.
        """
        threads = max(1, torch.get_num_threads() // self.size)
        for rank, place in enumerate(self._places):
            actor = self._cluster.actor(place, LearnerActor, rank, self.size, [p for p in sys.path if p], threads)
            self.members.append(RayWorkerHandle(rank, actor))
        for member in self.members:
            member.at = self._asked(member, member.actor.where.remote(), _STARTING_SECONDS)
        found: list[ActorLocation] = [member.at for member in self.members if member.at is not None]
        _check_versions(found)
        is_far = len({at.address for at in found}) > 1 or (self.is_sending and self._cluster.nodes > 1)
        self._address = found[0].address if is_far else _LOOPBACK
        for member, at in zip(self.members, found, strict=True):
            self._asked(member, member.actor.talk_by.remote(at.address if is_far else _LOOPBACK))
        self.meeting = self._meeting_place(self._address)
        nodes: dict[str, list[int]] = {}
        for rank, where in enumerate(found):
            nodes.setdefault(where.node, []).append(rank)
        self.turns = [[r for r in turn if r is not None] for turn in zip_longest(*nodes.values())]

    @property
    def is_sending(self) -> bool:
        """Whether weights are broadcast to engines instead of being put into the store."""
        return self._group is not None

    def receivers(self) -> Receivers:
        """Return the engines that rank 0 sends weights to, once all are built; see `BroadcastGroup.receivers`."""
        assert self._group is not None, "asked for where `is_sending`"
        return self._group.receivers(self._address)

    def _meeting_place(self, address: str) -> str:
        """Return the rendezvous: a file in the run's private folder, if every rank can read that folder.

        Otherwise the rendezvous is a port of rank 0 at ``address``, which requires no key.
        """
        if self.sees(self.scratch):
            return str(self.scratch / _MEETING)
        first = self.members[0]
        place: str = self._asked(first, first.actor.host.remote(address))
        return place

    def sees(self, folder: Path) -> bool:
        """Whether every rank reads a file that is written there now."""
        there = next(place for place in (folder, *folder.parents) if place.is_dir())
        probe, wanted = real_path(there) / _PROBE, secrets.token_hex(16)
        probe.write_text(wanted, encoding="ascii")
        try:
            asked = [(member, member.actor.sees.remote(str(probe), wanted)) for member in self.members]
            return all(self._asked(member, reference) for member, reference in asked)
        finally:
            probe.unlink()

    def tell(self, ranks: Collection[int], do: str, arguments: Mapping[str, Any]) -> None:
        """Send a command to ranks: boxed arguments, and weights references as they are."""
        carried = {name: value for name, value in arguments.items() if isinstance(value, _CARRIED)}
        text, memory = boxed({name: value for name, value in arguments.items() if name not in carried})
        if self._group is not None:
            self._group.begin(is_publication=do == "shelve")
        self._cluster.check()
        self._looked = time.monotonic()
        sent = self._cluster.put(memory) if memory.nbytes > _INLINE_BYTES else memory
        for rank in ranks:
            member = self.members[rank]
            member.beat, member.asked = None, time.monotonic()
            self._waiting[rank] = member.actor.obey.remote(do, text, sent, carried)

    def heard(self, waiting: Collection[int], seconds: float) -> Mapping[int, WorkerAnswer]:
        """Return the answers that have arrived.

        Raises:
            WorkerLost: If a rank died or gives no heartbeat.
            EngineError: If an engine of the broadcast group is lost.
        """
        if self._group is not None:
            self._group.look()
        references = {self._waiting[rank]: rank for rank in waiting}
        ready = self._cluster.ready(list(references), seconds)
        found: dict[int, WorkerAnswer] = {}
        for reference in ready:
            rank = references[reference]
            said: LearnerReply = self._asked(self.members[rank], reference)
            value = unboxed(said.text, said.memory) if said.shelved is None else said.shelved
            found[rank] = WorkerAnswer(value, said.error)
        for rank in waiting:
            if rank not in found:
                self._feel(self.members[rank])
        self._looked = time.monotonic()
        return found

    def look(self) -> None:
        """Ask each rank for a heartbeat; a dead rank raises its end. Raises ClusterError if the cluster is gone."""
        self._cluster.check()
        if self._group is not None:
            self._group.look()
        for member in self.members:
            if member.beat is not None and self._cluster.ready([member.beat], 0):
                self._asked(member, member.beat)
            self._feel(member)
        self._looked = time.monotonic()

    def room(self, folder: Path) -> str:
        """Return the folder itself if rank 0 can read it, otherwise a temporary folder on rank 0's disk."""
        folder.mkdir(parents=True, exist_ok=True)
        probe, wanted = real_path(folder) / _PROBE, secrets.token_hex(16)
        probe.write_text(wanted, encoding="ascii")
        try:
            first = self.members[0]
            room: str = self._asked(first, first.actor.room.remote(str(probe), wanted))
            return room
        finally:
            probe.unlink()

    def bring(self, written: str, folder: Path) -> None:
        """Fetch the files from rank 0's disk in pieces."""
        if written == str(real_path(folder)):
            return
        first = self.members[0]
        for name, size in self._asked(first, first.actor.written.remote()):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for start in range(0, size, _PIECE_BYTES):
                    count = min(_PIECE_BYTES, size - start)
                    file.write(self._asked(first, first.actor.piece.remote(name, start, count)).data)
        self._asked(first, first.actor.forget.remote())

    def kill(self) -> None:
        """End the actors."""
        for member in self.members:
            self._cluster.end(member.actor)

    def close(self) -> None:
        """End the actors and free their bundles."""
        self.kill()
        self.members = []
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _asked(self, member: RayWorkerHandle, reference: Any, seconds: float = STILL_SECONDS) -> Any:
        """Return an answer.

        Raises:
            WorkerLost: If the actor died or gives no answer.
            LearnerError: If the actor raised an error.
        """
        from ray.exceptions import RayError, RayTaskError

        until = time.monotonic() + seconds
        while True:
            try:
                return self._cluster.get(reference, seconds=1.0)
            except TimeoutError:
                if time.monotonic() > until:
                    how = f"gave no answer for {seconds:g} s{member}"
                    raise WorkerLost(member.rank, f"{how}{self._last_words(member)}") from None
            except RayTaskError as error:
                raise LearnerError(f"process {member.rank} of the learner{member} failed: {error}") from error
            except RayError as error:
                raise WorkerLost(
                    member.rank, f"is gone{member}: {cause_of(error)}{self._last_words(member)}"
                ) from error

    def _last_words(self, member: RayWorkerHandle) -> str:
        """Return the end of the actor's log, or the log's location on a cluster that outlives the run."""
        if member.at is None or not member.at.log:
            return ""
        if not self._cluster.is_own:
            return f"; what it wrote is in {member.at.log} on {member.at.address}"
        # The file is removed with the run's own cluster, so read it now.
        try:
            lines = tail(Path(member.at.log).read_bytes(), _TAIL).splitlines()
        except OSError:
            return ""
        said = "\n".join(line for line in lines if not line.startswith(_MARKS)).strip()
        return f"; it wrote last:\n{said}" if said else "; it wrote nothing before"

    def _feel(self, member: RayWorkerHandle) -> None:
        """Ask for a heartbeat now and then, and raise if the last one is overdue."""
        now = time.monotonic()
        if now - self._looked > _BEAT_SECONDS:
            # The run itself was paused, so the rank is not late.
            member.asked = now
        if member.beat is None:
            if now - member.asked > _BEAT_SECONDS:
                member.beat, member.asked = member.actor.beat.remote(), now
        elif self._cluster.ready([member.beat], 0):
            member.beat, member.asked = None, now
        elif now - member.asked > self._still_seconds:
            how = f"stood still for {self._still_seconds:g} s{member}"
            raise WorkerLost(member.rank, f"{how}{self._last_words(member)}")


def _check_versions(found: Sequence[ActorLocation]) -> None:
    first = found[0]
    for other in found[1:]:
        if other.versions != first.versions:
            differs = [name for name in first.versions if first.versions[name] != other.versions.get(name)]
            raise ConfigError(
                f"machines of the cluster differ in {', '.join(differs)}: {dict(first.versions)} on {first.address}, "
                f"{dict(other.versions)} on {other.address}; install the same on all of them"
            )
