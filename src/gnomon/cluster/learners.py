"""The ranks of the learner as actors of a cluster."""

import os
import platform
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnomon.cluster.broadcast import Broadcast, Receivers, Sent
from gnomon.cluster.engines import BroadcastGroup
from gnomon.cluster.ray import Cluster, cause_of, import_ray
from gnomon.cluster.weight_store import WeightsRef, WeightStore
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, LearnerError
from gnomon.core.redaction import tail
from gnomon.core.threads import run_in_thread
from gnomon.learner import mesh
from gnomon.learner.serialization import boxed, unboxed
from gnomon.learner.worker import LearnerWorker, error_payload
from gnomon.learner.worker_group import STILL_SECONDS, WorkerAnswer, WorkerLost
from gnomon.models.transfer.remote_weights import Bytes
from gnomon.models.transfer.rounding import rounded
from gnomon.records.run_card import installed

# The actor of one rank of the learner.

_INTERFACE_ADDRESS = 0x8915
_PACKAGES = ("gnomon", "torch", "transformers")


@dataclass(frozen=True)
class ActorLocation:
    """Where an actor runs.

    Attributes:
        node: Ray's id of the machine.
        address: The machine's address.
        number: Process id.
        versions: Package name to version.
        log: The machine's file with the actor's standard error; "" if Ray does not say.
    """

    node: str
    address: str
    number: int
    versions: Mapping[str, str]
    log: str = ""


@dataclass(frozen=True)
class LearnerReply:
    """An answer: a boxed value, an error, or a weights reference, which only Ray can carry."""

    text: str
    memory: Bytes
    error: Mapping[str, str] | None = None
    shelved: WeightsRef | Sent | None = None


class LearnerActor:
    """One rank. A single thread does the work, while the actor's event loop answers heartbeats.

    Args:
        rank: This rank.
        size: Number of ranks.
        path: The run's import path.
        threads: Torch threads.
    """

    def __init__(self, rank: int, size: int, path: list[str], threads: int) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._number, self._size = rank, size
        self._rank = LearnerWorker()
        self._store = WeightStore(rank, size)
        self._broadcast: Broadcast | None = None
        self._commands: Mapping[str, Callable[..., Any]] = {
            **self._rank.commands,
            "connect": self._connect,
            "shelve": self._shelve,
            "logprobs": self._logprobs,
        }
        # Torch counts threads for each thread that asks.
        self._thread = ThreadPoolExecutor(1, "rank", initializer=partial(torch.set_num_threads, threads))
        self._written: Path | None = None

    async def where(self) -> ActorLocation:
        """Return where the actor runs."""
        ray: Any = import_ray()
        versions = {"python": platform.python_version(), **installed(_PACKAGES)}
        node = ray.get_runtime_context().get_node_id()
        # Ray sends a worker's standard error to the file of this name.
        log = os.path.realpath("/proc/self/fd/2")
        log = log if log.endswith(".err") else ""
        return ActorLocation(node, ray.util.get_node_ip_address(), os.getpid(), versions, log)

    async def can_read(self, probe: str, wanted: str) -> bool:
        """Return whether this process can read the file ``probe`` with the content ``wanted``."""
        try:
            return Path(probe).read_text(encoding="ascii") == wanted
        except OSError:
            return False

    async def host(self, address: str) -> str:
        """Open the rendezvous of all ranks; see `mesh.init_store`."""
        rendezvous: str = await self._in_thread(partial(mesh.init_store, address, self._size))
        return rendezvous

    async def set_interface(self, address: str) -> None:
        """Make gloo and NCCL use the network interface with this address."""
        name = interface_of(address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name

    async def ping(self) -> None:
        """Heartbeat."""

    async def call(self, do: str, text: str, memory: Bytes, carried: Mapping[str, Any]) -> LearnerReply:
        """Run a command of `LearnerWorker`, or put weights where engines find them.

        Args:
            do: Name of the command.
            text: Boxed arguments: structure.
            memory: Boxed arguments: bytes of the tensors.
            carried: Arguments that cannot be boxed, by name.
        """
        said: LearnerReply = await self._in_thread(partial(self._run_command, do, text, memory, carried))
        return said

    async def output_dir(self, probe: str, wanted: str) -> str:
        """Return the folder of ``probe`` if this machine can read that file, otherwise a new temporary folder."""
        if await self.can_read(probe, wanted):
            return str(Path(probe).parent)
        self._written = Path(tempfile.mkdtemp(prefix="gnomon-model-"))
        return str(self._written)

    async def written(self) -> list[tuple[str, int]]:
        """Return the files of the temporary folder, each with its size in bytes."""
        assert self._written is not None, "asked for after `room`"
        files = [path for path in sorted(self._written.rglob("*")) if path.is_file()]
        return [(str(path.relative_to(self._written)), path.stat().st_size) for path in files]

    async def read_chunk(self, name: str, start: int, size: int) -> Bytes:
        """Return ``size`` bytes of one of these files, from byte ``start``."""
        assert self._written is not None, "asked for after `room`"
        return np.fromfile(self._written / name, dtype=np.uint8, count=size, offset=start)

    async def cleanup(self) -> None:
        """Remove the temporary folder."""
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._written = None

    def _run_command(self, do: str, text: str, memory: Bytes, carried: Mapping[str, Any]) -> LearnerReply:
        try:
            value = self._commands[do](**unboxed(text, memory), **carried)
        except Exception as raised:
            return LearnerReply(*boxed(None), error=error_payload(raised))
        # References that only Ray can carry go beside the boxed value.
        if isinstance(value, WeightsRef | Sent):
            return LearnerReply(*boxed(None), shelved=value)
        return LearnerReply(*boxed(value))

    def _connect(self, receivers: Receivers) -> None:
        learner = self._rank.learner
        self._broadcast = Broadcast(
            receivers, self._number, mesh.current_mesh().is_whole, lambda: learner.snapshot().tensors()
        )

    def _shelve(self, version: int, kind: Any, axes: Mapping[str, int]) -> WeightsRef | Sent:
        if self._broadcast is not None:
            return self._broadcast.send(version)
        snapshot = self._rank.learner.snapshot()
        # Rounded before they are put, so that the store holds, and engines fetch, the rounded numbers.
        if kind != "none":
            snapshot = rounded(snapshot, kind, axes)
        found = self._store.put(version, (snapshot.parts or snapshot.tensors)(), lasting=mesh.current_mesh().is_whole)
        self._rank.give_way()
        return found

    def _logprobs(self, batch: Any, version: int, weights: Any) -> Any:
        lent = dict(weights.tensors()) if isinstance(weights, WeightsRef) else weights
        return self._rank.commands["logprobs"](batch=batch, version=version, weights=lent)

    async def _in_thread(self, work: Any) -> Any:
        return await run_in_thread(work, self._thread)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address; None if there is none.

    >>> interface_of("127.0.0.1") in ("lo", None)
    True
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR: the kernel's structure has the name in its first 16 bytes and an IPv4 address in bytes
                # 20 to 24.
                said = fcntl.ioctl(asking.fileno(), _INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(said[20:24]) == address:
                return name
    return None


_LOOPBACK = "127.0.0.1"
_STARTING_SECONDS = 300.0
# How often a working rank is asked for a heartbeat.
_BEAT_SECONDS = 5.0
_PIECE_BYTES = 1 << 26
# Arguments up to this size travel within the call.
_INLINE_BYTES = 1 << 16
_PROBE, _RENDEZVOUS = ".gnomon-probe", "rendezvous"
_TAIL = 1500
_CARRIED = (WeightsRef, Sent, Receivers)
# Lines with which Ray begins a worker's log.
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


@dataclass
class RayWorkerHandle:
    """One rank with its actor, its location and its pending heartbeat."""

    rank: int
    actor: Any
    at: ActorLocation | None = None
    ping: Any = None
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
        group: The engines that receive broadcasts, watched together with the ranks; None without broadcasts.
    """

    is_shelving = True

    def __init__(self, cluster: Cluster, device: str, group: BroadcastGroup | None = None) -> None:
        self._cluster = cluster
        self._group = group
        self._address = _LOOPBACK
        self._places = cluster.of("learner")
        self.size, self.device, self.rendezvous = len(self._places), device, ""
        self.load_groups: Sequence[Sequence[int]] = []
        self.members: list[RayWorkerHandle] = []
        self.scratch = Path(tempfile.mkdtemp(prefix="learner-", dir=cluster.folder))
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
        # Loopback suffices on one machine, and no other machine can reach it.
        is_far = len({at.address for at in found}) > 1 or (self.is_sending and self._cluster.nodes > 1)
        self._address = found[0].address if is_far else _LOOPBACK
        for member, at in zip(self.members, found, strict=True):
            self._asked(member, member.actor.set_interface.remote(at.address if is_far else _LOOPBACK))
        self.rendezvous = self._rendezvous_place(self._address)
        nodes: dict[str, list[int]] = {}
        for rank, where in enumerate(found):
            nodes.setdefault(where.node, []).append(rank)
        # One rank of each machine loads at a time: every machine has room for one full copy of the model.
        self.load_groups = [[r for r in turn if r is not None] for turn in zip_longest(*nodes.values())]

    @property
    def is_sending(self) -> bool:
        """Whether weights are broadcast to engines instead of being put into the store."""
        return self._group is not None

    def receivers(self) -> Receivers:
        """Return the engines that rank 0 sends weights to, once all are built; see `BroadcastGroup.receivers`."""
        assert self._group is not None, "asked for where `is_sending`"
        return self._group.receivers(self._address)

    def _rendezvous_place(self, address: str) -> str:
        """Return the rendezvous: a file in the run's private folder, if every rank can read that folder.

        Otherwise the rendezvous is a port of rank 0 at ``address``, which requires no key.
        """
        if self.can_read(self.scratch):
            return str(self.scratch / _RENDEZVOUS)
        first = self.members[0]
        place: str = self._asked(first, first.actor.host.remote(address))
        return place

    def can_read(self, folder: Path) -> bool:
        """Whether every rank reads a file that is written there now."""
        # The folder itself may not exist yet; what lies above it is on the same disk.
        there = next(place for place in (folder, *folder.parents) if place.is_dir())
        probe, wanted = real_path(there) / _PROBE, secrets.token_hex(16)
        # A random content: another machine may have a file of the same name, left by another run.
        probe.write_text(wanted, encoding="ascii")
        try:
            asked = [(member, member.actor.can_read.remote(str(probe), wanted)) for member in self.members]
            return all(self._asked(member, reference) for member, reference in asked)
        finally:
            probe.unlink()

    def send(self, ranks: Collection[int], do: str, arguments: Mapping[str, Any]) -> None:
        """Send a command to ranks: boxed arguments, and weights references as they are."""
        carried = {name: value for name, value in arguments.items() if isinstance(value, _CARRIED)}
        text, memory = boxed({name: value for name, value in arguments.items() if name not in carried})
        if self._group is not None:
            self._group.begin(is_publication=do == "shelve")
        self._cluster.check()
        self._looked = time.monotonic()
        # Large arguments lie in the store once for all ranks; small ones travel faster within the call.
        sent = self._cluster.put(memory) if memory.nbytes > _INLINE_BYTES else memory
        for rank in ranks:
            member = self.members[rank]
            member.ping, member.asked = None, time.monotonic()
            self._waiting[rank] = member.actor.call.remote(do, text, sent, carried)

    def poll(self, waiting: Collection[int], seconds: float) -> Mapping[int, WorkerAnswer]:
        """Return the answers that have arrived.

        Raises:
            WorkerLost: If a rank died or gives no heartbeat.
            EngineError: If an engine of the broadcast group is lost.
        """
        if self._group is not None:
            self._group.check_alive()
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
                self._check_heartbeat(self.members[rank])
        self._looked = time.monotonic()
        return found

    def check_alive(self) -> None:
        """Ask each rank for a heartbeat; a dead rank raises its end. Raises ClusterError if the cluster is gone."""
        self._cluster.check()
        if self._group is not None:
            self._group.check_alive()
        for member in self.members:
            if member.ping is not None and self._cluster.ready([member.ping], 0):
                self._asked(member, member.ping)
            self._check_heartbeat(member)
        self._looked = time.monotonic()

    def output_dir(self, folder: Path) -> str:
        """Return the folder itself if rank 0 can read it, otherwise a temporary folder on rank 0's disk."""
        folder.mkdir(parents=True, exist_ok=True)
        probe, wanted = real_path(folder) / _PROBE, secrets.token_hex(16)
        probe.write_text(wanted, encoding="ascii")
        try:
            first = self.members[0]
            output_dir: str = self._asked(first, first.actor.output_dir.remote(str(probe), wanted))
            return output_dir
        finally:
            probe.unlink()

    def fetch_output(self, written: str, folder: Path) -> None:
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
                    # In chunks of 64 MiB, since each one passes through the object store whole.
                    file.write(self._asked(first, first.actor.read_chunk.remote(name, start, count)).data)
        self._asked(first, first.actor.cleanup.remote())

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
                # In pieces of a second, so that a cluster that is gone is noticed while the answer is waited for.
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

    def _check_heartbeat(self, member: RayWorkerHandle) -> None:
        """Ask for a heartbeat now and then, and raise if the last one is overdue."""
        now = time.monotonic()
        if now - self._looked > _BEAT_SECONDS:
            # The run itself was paused, so the rank is not late.
            member.asked = now
        if member.ping is None:
            if now - member.asked > _BEAT_SECONDS:
                member.ping, member.asked = member.actor.ping.remote(), now
        elif self._cluster.ready([member.ping], 0):
            member.ping, member.asked = None, now
        elif now - member.asked > STILL_SECONDS:
            how = f"stood still for {STILL_SECONDS:g} s{member}"
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
