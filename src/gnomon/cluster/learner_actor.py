"""The actor of one rank of the learner."""

import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnomon.cluster.broadcast import Broadcast, Receivers, Sent
from gnomon.cluster.ray import import_ray
from gnomon.cluster.weight_store import WeightsRef, WeightStore
from gnomon.core.threads import elsewhere
from gnomon.learner import mesh
from gnomon.learner.serialization import boxed, unboxed
from gnomon.learner.worker import LearnerWorker, fault_of
from gnomon.models.transfer.remote_weights import Bytes
from gnomon.models.transfer.rounding import rounded
from gnomon.records.run_card import installed

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
            "meet": self._meet,
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

    async def sees(self, probe: str, wanted: str) -> bool:
        """Return whether this process can read the file ``probe`` with the content ``wanted``."""
        try:
            return Path(probe).read_text(encoding="ascii") == wanted
        except OSError:
            return False

    async def host(self, address: str) -> str:
        """Open the rendezvous of all ranks; see `mesh.host`."""
        meeting: str = await self._in_thread(partial(mesh.host, address, self._size))
        return meeting

    async def talk_by(self, address: str) -> None:
        """Make gloo and NCCL use the network interface with this address."""
        name = interface_of(address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name

    async def beat(self) -> None:
        """Heartbeat."""

    async def obey(self, do: str, text: str, memory: Bytes, carried: Mapping[str, Any]) -> LearnerReply:
        """Run a command of `LearnerWorker`, or put weights where engines find them.

        Args:
            do: Name of the command.
            text: Boxed arguments: structure.
            memory: Boxed arguments: bytes of the tensors.
            carried: Arguments that cannot be boxed, by name.
        """
        said: LearnerReply = await self._in_thread(partial(self._obey, do, text, memory, carried))
        return said

    async def room(self, probe: str, wanted: str) -> str:
        """Return the folder of ``probe`` if this machine can read that file, otherwise a new temporary folder."""
        if await self.sees(probe, wanted):
            return str(Path(probe).parent)
        self._written = Path(tempfile.mkdtemp(prefix="gnomon-model-"))
        return str(self._written)

    async def written(self) -> list[tuple[str, int]]:
        """Return the files of the temporary folder, each with its size in bytes."""
        assert self._written is not None, "asked for after `room`"
        files = [path for path in sorted(self._written.rglob("*")) if path.is_file()]
        return [(str(path.relative_to(self._written)), path.stat().st_size) for path in files]

    async def piece(self, name: str, start: int, size: int) -> Bytes:
        """Return ``size`` bytes of one of these files, from byte ``start``."""
        assert self._written is not None, "asked for after `room`"
        return np.fromfile(self._written / name, dtype=np.uint8, count=size, offset=start)

    async def forget(self) -> None:
        """Remove the temporary folder."""
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._written = None

    def _obey(self, do: str, text: str, memory: Bytes, carried: Mapping[str, Any]) -> LearnerReply:
        try:
            value = self._commands[do](**unboxed(text, memory), **carried)
        except Exception as raised:
            return LearnerReply(*boxed(None), error=fault_of(raised))
        if isinstance(value, WeightsRef | Sent):
            return LearnerReply(*boxed(None), shelved=value)
        return LearnerReply(*boxed(value))

    def _meet(self, receivers: Receivers) -> None:
        learner = self._rank.learner
        self._broadcast = Broadcast(receivers, self._number, mesh.here().is_whole, lambda: learner.snapshot().tensors())

    def _shelve(self, version: int, kind: Any, axes: Mapping[str, int]) -> WeightsRef | Sent:
        if self._broadcast is not None:
            return self._broadcast.send(version)
        snapshot = self._rank.learner.snapshot()
        if kind != "none":
            snapshot = rounded(snapshot, kind, axes)
        found = self._store.put(version, (snapshot.parts or snapshot.tensors)(), lasting=mesh.here().is_whole)
        self._rank.give_way()
        return found

    def _logprobs(self, batch: Any, version: int, weights: Any) -> Any:
        lent = dict(weights.tensors()) if isinstance(weights, WeightsRef) else weights
        return self._rank.commands["logprobs"](batch=batch, version=version, weights=lent)

    async def _in_thread(self, work: Any) -> Any:
        return await elsewhere(work, self._thread)


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
                said = fcntl.ioctl(asking.fileno(), _INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(said[20:24]) == address:
                return name
    return None
