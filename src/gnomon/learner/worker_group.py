"""Ranks in processes of this machine, reached through socket pairs; tensors lie in memory files that all map."""

import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from gnomon.core.atomic_files import real_path
from gnomon.core.processes.client import exit_reason
from gnomon.core.processes.server import Channel, is_stopped
from gnomon.core.processes.stop_signals import stop_signals_blocked
from gnomon.core.redaction import tail, without_secrets
from gnomon.learner.serialization import packed, unpacked
from gnomon.models.device import resolve_device


class WorkerLost(Exception):
    """A rank is gone, or stands still. Its args: the rank, and the end of a sentence ("is gone: it was killed")."""


@dataclass(frozen=True)
class WorkerAnswer:
    """The answer of a rank: a value, or the ``kind`` and text (``said``) of the error that it raised."""

    value: Any
    error: Mapping[str, str] | None = None


class WorkerGroup(Protocol):
    """The ranks of one learner, each a `worker.LearnerWorker` in a process of its own, and the way to them.

    Attributes:
        size: Number of ranks.
        device: "cpu" or "cuda": where each rank computes.
        is_shelving: Whether weights are put where engines of other machines find them ("shelve"), rather than handed to
            the run ("weights").
    """

    size: int
    device: str
    is_shelving: bool

    @property
    def is_sending(self) -> bool:
        """Whether shelving brings the weights to the engines, which then have that version and no other."""

    @property
    def rendezvous(self) -> str:
        """Address of the rendezvous (`mesh.init_mesh`); known after `open`."""

    @property
    def scratch(self) -> Path:
        """A folder of the run for temporary files; it is removed with the run."""

    @property
    def load_groups(self) -> Sequence[Sequence[int]]:
        """The ranks that load the model together, one group after the other."""

    def open(self) -> None:
        """Start the ranks.

        Raises:
            LearnerError, UserError: They cannot be started.
        """

    def send(self, ranks: Collection[int], do: str, arguments: Mapping[str, Any]) -> None:
        """Send the command ``do`` to these ranks, without waiting.

        Raises:
            WorkerLost: A rank is gone.
            TypeError: An argument cannot be serialized.
        """

    def poll(self, waiting: Collection[int], seconds: float) -> Mapping[int, WorkerAnswer]:
        """Return the answers that have come, by rank; wait at most so many seconds for the first.

        Raises:
            WorkerLost: A rank is gone.
        """

    def check_alive(self) -> None:
        """Check that every rank lives, while no command is under way.

        Raises:
            WorkerLost: A rank is gone.
        """

    def can_read(self, folder: Path) -> bool:
        """Whether every rank reads and writes the run's ``folder`` under this name."""

    def output_dir(self, folder: Path) -> str:
        """Return the folder in which rank 0 shall write what is to be in ``folder`` in the end."""

    def fetch_output(self, written: str, folder: Path) -> None:
        """Move what rank 0 wrote into ``written`` to ``folder``, where that is another folder."""

    def kill(self) -> None:
        """End all ranks at once."""

    def close(self) -> None:
        """Shut the workers down and wait for their end. Idempotent."""


STILL_SECONDS = 40.0
"""A process that was stopped for so long counts as dead."""
# How long a rank whose channel is closed may take to end before it is killed.
_EXIT_SECONDS = 5.0
# How much of a rank's log the message of its end has.
_TAIL = 1500
_LOG = "process-{}.log"


@dataclass(frozen=True)
class LocalWorkerHandle:
    """One process: its rank, the program, the run's end of its socket, and the file with its standard error."""

    rank: int
    program: "subprocess.Popen[bytes]"
    connection: socket.socket
    channel: Channel
    log: IO[bytes]

    def end(self, seconds: float = 0.0) -> str:
        """Kill it, if it lives after so many seconds, and return how it ended, with the last lines that it wrote."""
        try:
            self.program.wait(seconds)
        except subprocess.TimeoutExpired:
            self.program.kill()
            self.program.wait()
        self.log.seek(0)
        said = tail(self.log.read(), _TAIL)
        return exit_reason(self.program.returncode) + (f"; it said last:\n{said}" if said else "")


class LocalWorkerGroup:
    """Implements `WorkerGroup`. The processes end with `close`, or with the run, however that ends.

    Args:
        asked: A device, see `resolve_device`; each process has its own GPU, from that one on.
        kept: Folder for the processes' logs when one of them is lost; None keeps nothing.
    """

    is_shelving = is_sending = False

    def __init__(self, size: int, asked: str = "cpu", kept: Path | None = None) -> None:
        self.size, self._kept = size, kept
        self.load_groups = [[rank] for rank in range(size)]
        self.members: list[LocalWorkerHandle] = []
        self._first = resolve_device(asked)
        self.device = self._first.type
        self._folder: Path | None = None
        self._stopped: dict[int, float] = {}

    @property
    def rendezvous(self) -> str:
        """The file in which they find each other."""
        return str(self.scratch / "rendezvous")

    @property
    def scratch(self) -> Path:
        """The folder of rendezvous and logs; the last process to end removes it."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gnomon-learner-"))
        return self._folder

    def open(self) -> None:
        """Start the processes."""
        for rank in range(self.size):
            self.members.append(_start(rank, self.size, self._first, self.scratch))

    def send(self, ranks: Collection[int], do: str, arguments: Mapping[str, Any]) -> None:
        """Send it to each, with one file for all."""
        with packed(arguments) as (text, file):
            for rank in ranks:
                try:
                    # One memory file for all ranks: each maps it, and the arguments exist once.
                    self.members[rank].channel.send({"do": do, "text": text}, file)
                except OSError:
                    raise self._lost(self.members[rank], "is gone") from None

    def poll(self, waiting: Collection[int], seconds: float) -> Mapping[int, WorkerAnswer]:
        """Return the answers that came through the sockets; check that the other processes are not stopped."""
        members = {self.members[rank].connection: self.members[rank] for rank in waiting}
        found: dict[int, WorkerAnswer] = {}
        # Not select.select, which refuses file numbers above 1,023.
        for connection in wait(list(members), seconds):
            assert isinstance(connection, socket.socket)
            member = members.pop(connection)
            answer, files = _received(member)
            if answer is None:
                raise self._lost(member, "is gone")
            found[member.rank] = WorkerAnswer(unpacked(answer["text"], files[0]), answer["error"])
        for member in members.values():
            self._check_running(member)
        return found

    def check_alive(self) -> None:
        """Ask the system of each process."""
        for member in self.members:
            if member.program.poll() is not None:
                raise self._lost(member, "is gone")
            self._check_running(member)

    def can_read(self, folder: Path) -> bool:
        """Return True: they are on this machine."""
        return True

    def output_dir(self, folder: Path) -> str:
        """Return the folder itself."""
        return str(real_path(folder))

    def fetch_output(self, written: str, folder: Path) -> None:
        """Leave it where it is."""

    def kill(self) -> None:
        """Kill the processes."""
        for member in self.members:
            member.program.kill()

    def close(self) -> None:
        """Hang up, and wait until they are gone."""
        for member in self.members:
            # All hang up first, so that the ranks end at the same time.
            member.connection.close()
        for member in self.members:
            member.end(_EXIT_SECONDS)
            member.log.close()
            if member.program.stdin is not None:
                member.program.stdin.close()
        self.members = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check_running(self, member: LocalWorkerHandle) -> None:
        """Raise WorkerLost when a process has been stopped for too long."""
        now = time.monotonic()
        # The time at which it was first seen stopped; infinity forgets that as soon as it runs again.
        since = min(self._stopped.get(member.rank, math.inf), now) if is_stopped(member.program.pid) else math.inf
        self._stopped[member.rank] = since
        if now - since > STILL_SECONDS:
            raise self._lost(member, f"stood still for {STILL_SECONDS:g} s")

    def _lost(self, member: LocalWorkerHandle, how: str) -> WorkerLost:
        # One that hung up is on its way out, and its own end says more than a kill.
        end = member.end(0.0 if is_stopped(member.program.pid) else _EXIT_SECONDS)
        return WorkerLost(member.rank, f"{how}: it {end}{self._keep_logs(member)}")

    def _keep_logs(self, lost: LocalWorkerHandle) -> str:
        """Keep the logs of all, since another process may have the cause; return the place of the lost one's log."""
        if self._kept is None:
            return ""
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
            for member in self.members:
                said = (self.scratch / _LOG.format(member.rank)).read_text(encoding="utf-8", errors="replace")
                (self._kept / _LOG.format(member.rank)).write_text(without_secrets(said), encoding="utf-8")
        except OSError as error:
            return f"\nwhat the processes wrote could not be kept: {error}"
        return f"\nall that it wrote is in {self._kept / _LOG.format(lost.rank)}, with those of the others beside it"


def _start(rank: int, size: int, device: torch.device, folder: Path) -> LocalWorkerHandle:
    ours, theirs = socket.socketpair()
    log = (folder / _LOG.format(rank)).open("w+b", buffering=0)
    with theirs, stop_signals_blocked():
        program = subprocess.Popen(
            [sys.executable, "-P", "-m", "gnomon.learner.worker", str(theirs.fileno()), str(folder)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, **_environment(size, rank, device)},
            # Stop signals stay blocked in it: the run answers them, and needs every rank to finish the current step.
            start_new_session=True,
        )
    return LocalWorkerHandle(rank, program, ours, Channel(ours), log)


def _received(member: LocalWorkerHandle) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        return member.channel.receive()
    except OSError:
        return None, []


def _environment(processes: int, rank: int, device: torch.device) -> dict[str, str]:
    """Return a process's environment: threads, its GPU, and the loopback interface for gloo and NCCL."""
    found = {
        # The ranks compute at the same time: each with all threads would be slower than each with its share.
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes)),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    if sys.platform == "linux":
        # Gloo otherwise looks up the host's name, which in many containers leads nowhere or to an interface without a
        # route.
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        number = (device.index or 0) + rank
        # Each rank sees one GPU, as number 0: no rank allocates on another one's GPU by accident.
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return found
