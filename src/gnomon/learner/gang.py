"""A learner in processes of their own, each with a part of the model: the run's end of it.

The run keeps the loop; whatever it asks of its learner is asked of every process, and what they answer is put together.
What travels is described in `parcel`: a batch is written to memory once and mapped by all.
"""

import asyncio
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from gnomon import errors
from gnomon.algorithms.algorithm import Algorithm, Need
from gnomon.errors import ConfigError, GnomonError, LearnerError
from gnomon.learner.memory import is_out_of_memory
from gnomon.learner.mesh import ELSEWHERE
from gnomon.learner.parcel import packed, unpacked
from gnomon.learner.recipe import Recipe
from gnomon.metrics import Metrics
from gnomon.models.device import resolve_device
from gnomon.types import Batch, Scores, Snapshot, State
from gnomon.verifiers.nursery import obituary
from gnomon.verifiers.worker import Channel

STILL_SECONDS = 40.0
"""A process that was stopped for so long counts as dead."""
_GRACE_SECONDS = 10.0
_NEVER = math.inf
_EXIT_SECONDS = 5.0
_TAIL = 1500


@dataclass(frozen=True)
class Member:
    """One process: its rank, the program, the run's end of its socket, and the file with its standard error."""

    rank: int
    program: "subprocess.Popen[bytes]"
    connection: socket.socket
    channel: Channel
    log: IO[bytes]

    def is_stopped(self) -> bool:
        """Whether the system lets it stand still, by a signal or a debugger; False where the system does not say.

        Signs of life from the process itself would not do: one that waits for another gives none either.
        """
        try:
            stat = Path(f"/proc/{self.program.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "tT"

    def end(self, seconds: float = 0.0) -> str:
        """Kill it, if it lives after so many seconds, and return how it ended, with the last lines that it wrote."""
        try:
            self.program.wait(seconds)
        except subprocess.TimeoutExpired:
            self.program.kill()
            self.program.wait()
        self.log.seek(0)
        said = self.log.read()[-_TAIL:].decode(errors="replace").strip()
        return obituary(self.program.returncode) + (f"; it said last:\n{said}" if said else "")


class Gang:
    """Implements `Writing` with ``recipe.plan.processes`` processes.

    They are started by `open`, load the model one after the other (a whole copy is in memory only for so long), and end
    with `close`, or with the run, however that ends. A process that dies, or stands still, ends all of them, and the
    call at hand raises.

    The weights are collected once after they have changed, when a snapshot is first read, into memory of the run.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._members: list[Member] = []
        self._folder: Path | None = None
        self._version = 0
        self._weights: Mapping[str, Tensor] | None = None
        self._lock = threading.RLock()
        self._fault = "the processes of the learner were not started"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    def open(self) -> None:
        """Start the processes and let them load the model.

        Raises: UserError as loading does; LearnerError when one dies; ConfigError when the algorithm has a part that
            cannot be told to another process.
        """
        size, device = self._recipe.plan.processes, resolve_device(self._recipe.device)
        self._folder = folder = Path(tempfile.mkdtemp(prefix="gnomon-learner-"))
        recipe = replace(self._recipe, device=device.type)
        try:
            for rank in range(size):
                self._members.append(_start(rank, size, device, folder))
            self._fault = ""
            meeting = {"recipe": recipe, "meeting": str(folder / "meeting"), "size": size}
            for member in self._members:
                self._tell([member], "join", {**meeting, "rank": member.rank})
            self._answers(self._members)
            for member in self._members:
                self._tell([member], "load", {})
                self._answers([member])
        except TypeError as error:
            self.close()
            raise ConfigError(f"learner.processes = {size}: {error}; set learner.processes = 1") from error
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Finished training steps."""
        return self._version

    @property
    def model_bytes(self) -> int:
        """Nothing: a copy waits on the disk."""
        return 0

    async def score(self, batch: Batch, needs: Set[Need]) -> Scores:
        """Return what is asked for; see `TorchLearner.score`."""
        found: Scores = await self._run(lambda: self._ask("score", batch=batch, needs=sorted(needs))[0])
        return found

    async def logprobs(self, batch: Batch, weights: Snapshot | None = None) -> Tensor:
        """Return log-probabilities of the trained weights, or of ``weights``."""

        def ask() -> Any:
            lent = None if weights is None else dict(weights.tensors())
            version = 0 if weights is None else weights.version
            return self._ask("logprobs", batch=batch, version=version, weights=lent)[0]

        found: Tensor = await self._run(ask)
        return found

    async def update(self, minibatch: Batch, algorithm: Algorithm, step: int, rate: float = 1.0) -> Metrics:
        """Make one optimizer step together, or none; see `TorchLearner.update`."""
        return await self._change("update", minibatch=minibatch, algorithm=algorithm, step=step, rate=rate)

    async def fit(self, minibatch: Batch, algorithm: Algorithm, step: int | None, one_sided: bool = False) -> Metrics:
        """Make one optimizer step of the critic together, or none; see `TorchLearner.fit`."""
        return await self._change("fit", minibatch=minibatch, algorithm=algorithm, step=step, one_sided=one_sided)

    def advance(self) -> None:
        """Count one finished training step."""
        self._version += 1

    def snapshot(self) -> Snapshot:
        """Return the weights, collected when they are first read; read them before the next update."""
        return Snapshot(self._version, self._collected)

    def state(self) -> State:
        """Return what `TorchLearner.state` returns in one process; any number of processes can go on from it."""
        state: State = self._ask("state")[0]
        return State(state.tensors, {**state.values, "version": self._version})

    def restore(self, state: State) -> None:
        """Become the learner that returned ``state``, in whatever number of processes.

        Raises: CheckpointError as `TorchLearner.restore`; nothing was changed then.
        """
        self._weights = None
        self._ask("restore", state=state)
        self._version = int(state.values["version"])

    def write_model(self, folder: Path) -> None:
        """Write the model, and its critic, as `TorchLearner.write_model` does."""
        self._ask("write", folder=str(folder.resolve()))

    def model_writer(self) -> Callable[[Path], None]:
        """Return what moves the model into a folder; it is written to the disk before this returns."""
        copy = Path(tempfile.mkdtemp(dir=self._folder))
        self.write_model(copy)

        def move(folder: Path) -> None:
            for path in copy.iterdir():
                shutil.move(path, folder / path.name)
            copy.rmdir()

        return move

    def close(self) -> None:
        """End the processes."""
        self._fault = self._fault or "the learner was closed"
        for member in self._members:
            member.connection.close()
        for member in self._members:
            member.end(_EXIT_SECONDS)
            member.log.close()
            if member.program.stdin is not None:
                member.program.stdin.close()
        self._members = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _change(self, do: str, **arguments: Any) -> Metrics:
        self._weights = None
        measured: list[Metrics] = await self._run(lambda: self._ask(do, **arguments))
        return sum(measured, Metrics())

    def _collected(self) -> Iterator[tuple[str, Tensor]]:
        with self._lock:
            if self._weights is None:
                self._weights = self._ask("weights")[0]
            return iter(self._weights.items())

    def _ask(self, do: str, **arguments: Any) -> list[Any]:
        """Return what every process answers, by rank.

        Raises: what they raised; LearnerError when one is gone.
        """
        with self._lock:
            self._tell(self._members, do, arguments)
            return self._answers(self._members)

    def _tell(self, members: list[Member], do: str, arguments: Mapping[str, Any]) -> None:
        if self._fault:
            raise LearnerError(self._fault)
        with packed(arguments) as (text, file):
            for member in members:
                try:
                    member.channel.send({"do": do, "text": text}, file)
                except OSError:
                    raise self._lost(member, "is gone") from None

    def _answers(self, members: list[Member]) -> list[Any]:
        waiting = {member.connection: member for member in members}
        values: dict[int, Any] = {}
        faults: list[Mapping[str, str]] = []
        stopped: dict[int, float] = {}
        until = _NEVER
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 1.0)
            for connection in ready:
                member = waiting.pop(connection)
                answer, files = _heard(member)
                if answer is None:
                    raise self._lost(member, "is gone")
                values[member.rank] = unpacked(answer["text"], files[0])
                if answer["error"] is not None:
                    faults.append(answer["error"])
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
            for member in waiting.values():
                now = time.monotonic()
                stopped[member.rank] = min(stopped.get(member.rank, _NEVER), now) if member.is_stopped() else _NEVER
                if now - stopped[member.rank] > STILL_SECONDS:
                    raise self._lost(member, f"stood still for {STILL_SECONDS:g} s")
            if waiting and time.monotonic() > until:
                raise self._abandoned(faults[0], waiting.values())
        if faults:
            raise _error(min(faults, key=lambda fault: ELSEWHERE in fault["said"]))
        return [values[member.rank] for member in members]

    def _lost(self, member: Member, how: str) -> LearnerError:
        # One that hung up is on its way out, and its own end says more than a kill.
        end = member.end(0.0 if member.is_stopped() else _EXIT_SECONDS)
        self._fault = (
            f"process {member.rank} of the learner's {self._recipe.plan.processes} {how}: it {end}\nThe run cannot go "
            "on without its part of the weights; go on from the newest checkpoint with gnomon resume"
        )
        self._kill()
        return LearnerError(self._fault)

    def _abandoned(self, fault: Mapping[str, str], waiting: Any) -> Exception:
        ranks = ", ".join(str(member.rank) for member in waiting)
        error = _error(fault)
        self._fault = f"{error} (processes {ranks} of the learner waited for the one that raised this, and were ended)"
        self._kill()
        return type(error)(self._fault)

    def _kill(self) -> None:
        for member in self._members:
            member.program.kill()


def _start(rank: int, size: int, device: torch.device, folder: Path) -> Member:
    ours, theirs = socket.socketpair()
    log = (folder / f"rank-{rank}.log").open("w+b", buffering=0)
    with theirs:
        program = subprocess.Popen(
            [sys.executable, "-P", "-m", "gnomon.learner.rank", str(theirs.fileno()), str(folder)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, **_environment(size, rank, device)},
            # A signal from the keyboard is the run's, which stops after the step at hand.
            start_new_session=True,
        )
    return Member(rank, program, ours, Channel(ours), log)


def _heard(member: Member) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        return member.channel.receive()
    except OSError:
        return None, []


def _error(fault: Mapping[str, str]) -> Exception:
    kind, said = vars(errors).get(fault["kind"]), fault["said"]
    if isinstance(kind, type) and issubclass(kind, GnomonError):
        return kind(said)
    if fault["kind"] in ("OutOfMemoryError", "MemoryError") or is_out_of_memory(RuntimeError(said)):
        return LearnerError(
            f"a process of the learner is out of memory: {said}. Set learner.max_tokens_per_micro_batch lower, "
            "learner.gradient_checkpointing = true, learner.processes higher, or use lora"
        )
    return LearnerError(f"a process of the learner failed: {fault['kind']}: {said}")


def _environment(processes: int, rank: int, device: torch.device) -> dict[str, str]:
    """Return what a process is told by its environment: threads, its GPU, and to talk to the others on this machine."""
    found = {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes)),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    if sys.platform == "linux":
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        number = (device.index or 0) + rank
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return found
