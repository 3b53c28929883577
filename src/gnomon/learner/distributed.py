"""A learner whose weights are sharded over processes: the run's side of it.

The run keeps the loop. Each call of its learner is one command to every process, and the answers are put together. A
`worker_group` carries commands and answers and notices a dead process: on this machine, or on a cluster.
"""

import asyncio
import errno
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.protocols import Need
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, LearnerError, named, refusal_of
from gnomon.core.metrics import Metrics
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Batch, Scores, Shares, Snapshot, State
from gnomon.learner.allocator import is_out_of_memory
from gnomon.learner.mesh import ELSEWHERE
from gnomon.learner.spec import LearnerSpec
from gnomon.learner.worker_group import WorkerGroup, WorkerLost

# How long the other ranks may take to answer after the first error, before they are ended.
_GRACE_SECONDS = 10.0
# How long one poll waits for an answer.
_LOOK_SECONDS = 1.0
# How often the ranks are checked while no command is under way.
_WATCH_SECONDS = 2.0
_STORE_SECONDS = 0.02


@dataclass(frozen=True)
class Rounding:
    """The format that weights are rounded to before engines read them; see `models.transfer.rounding.rounded`."""

    kind: str = "none"
    axes: Mapping[str, int] = field(default_factory=dict)


class DistributedLearner:
    """Implements `SavableLearner` with the processes of a worker group.

    They are started by `open`, load the model in turns (a machine holds a whole copy only for so long), and end with
    `close`, or with the run, however that ends. A process that dies, or stands still, ends all of them, and the call at
    hand raises.

    The weights are collected once after they have changed, when a snapshot is first read: into memory of the run, or
    where the engines of a cluster find them.

    Args:
        rounding: Rounding of weights that engines of the cluster read; otherwise the sender rounds them.
        waiting: This learner's own folder for models on their way into a checkpoint, on the disk of the checkpoints;
            what an earlier learner left there is removed. None is the worker group's temporary folder.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        worker_group: WorkerGroup,
        rounding: Rounding | None = None,
        waiting: Path | None = None,
    ) -> None:
        self._spec = spec
        self.worker_group = worker_group
        self._rounding = rounding or Rounding()
        self._waiting = waiting
        self._version = 0
        self._can_read_run = True
        self._weights: Any = None
        # One command at a time: snapshots are read by another thread than the one that updates.
        self._lock = threading.RLock()
        self._fault = "the processes of the learner were not started"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    def open(self) -> None:
        """Start the processes and let them load the model.

        Raises:
            UserError: The model cannot be loaded.
            LearnerError: A worker died.
            ConfigError: The algorithm has a part that cannot be told to another process.
        """
        worker_group, spec = self.worker_group, replace(self._spec, device=self.worker_group.device)
        self._forget()
        try:
            try:
                worker_group.open()
            except WorkerLost as gone:
                raise self._lost(gone) from None
            self._fault = ""
            ranks = range(worker_group.size)
            rendezvous = {"spec": spec, "rendezvous": worker_group.rendezvous, "size": worker_group.size}
            # Commands are sent to all before any is awaited: `join` returns only when every rank has come.
            for rank in ranks:
                self._send([rank], "join", {**rendezvous, "rank": rank})
            self._answers(ranks)
            self._can_read_run = worker_group.can_read(self._waiting or worker_group.scratch)
            # A rank loads the full model before it keeps its shard, so ranks of one machine load one after the other.
            for turn in worker_group.load_groups:
                self._send(turn, "load", {})
                self._answers(turn)
        # Raised while the spec is serialized: a piece of the algorithm that no other process could import.
        except TypeError as error:
            self.close()
            raise ConfigError(f"learner.processes = {worker_group.size}: {error}; set learner.processes = 1") from error
        except BaseException:
            self.close()
            raise

    def connect(self, receivers: Any) -> None:
        """Connect the processes with the engines that rank 0 broadcasts weights to; called once.

        Raises:
            LearnerError: A worker died, or raised the error.
            EngineError: A receiver is lost.
        """
        self._ask("connect", receivers=receivers)

    @property
    def version(self) -> int:
        """Finished training steps."""
        return self._version

    @property
    def model_bytes(self) -> int:
        """0: a copy waits on the disk."""
        return 0

    async def score(self, batch: Batch, needs: Set[Need], first: Mapping[Need, Tensor] | None = None) -> Scores:
        """Return what is asked for; see `TorchLearner.score`. No process keeps a graph, so ``first`` says nothing."""
        found: Scores = await self._run(lambda: self._ask("score", batch=batch, needs=sorted(needs))[0])
        return found

    async def logprobs(self, batch: Batch, weights: Snapshot | None = None) -> Tensor:
        """Return log-probabilities of the trained weights, or of ``weights``."""

        def ask() -> Any:
            lent: Any = None
            if weights is not None:
                # A snapshot that already lies in the cluster's store goes as a reference; else its tensors travel with
                # the command.
                is_there = self.worker_group.is_shelving and weights.stored is not None
                lent = weights.stored() if is_there and weights.stored else dict(weights.tensors())
            version = 0 if weights is None else weights.version
            return self._ask("logprobs", batch=batch, version=version, weights=lent)[0]

        found: Tensor = await self._run(ask)
        return found

    async def token_stats(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the trained weights."""
        found: tuple[Tensor, Tensor] = await self._run(lambda: self._ask("token_stats", batch=batch)[0])
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
        if self.worker_group.is_sending:
            self._weights = None

    def snapshot(self) -> Snapshot:
        """Return the weights, collected when they are first read; read them before the next update."""
        if self.worker_group.is_shelving:
            return Snapshot(self._version, lambda: self._collected().tensors(), self._collected)
        return Snapshot(self._version, lambda: iter(self._collected().items()))

    def state(self) -> State:
        """Return what `TorchLearner.state` returns in one process; any number of processes can go on from it."""
        state: State = self._ask("state")[0]
        return State(state.tensors, {**state.values, "version": self._version})

    def lend(self) -> State:
        """Return `state` for a writer: each process writes its own share, while it goes on with whatever is asked.

        Where the processes do not all see the run's folder, it is `state`, collected.
        """
        if not self._can_read_run:
            return self.state()
        lent = self._ask("lend")
        values = {**lent[0]["values"], "version": self._version}
        return State({}, values, shares=Shares(sum(share["bytes"] for share in lent), self._store))

    def _store(self, folder: Path) -> Mapping[Path, str]:
        self._ask("store", folder=str(real_path(folder)))
        # Asked again and again instead of waiting in one command, since a command blocks the process for all others.
        while None in (found := self._ask("stored")):
            time.sleep(_STORE_SECONDS)
        return {folder / Path(path).name: digest for path, digest in found}

    def restore(self, state: State) -> None:
        """Become the learner that returned ``state``, in whatever number of processes.

        Raises:
            CheckpointError: As `TorchLearner.restore`; nothing was changed then.
        """
        self._weights = None
        if not self._can_read_run:
            # A stored tensor is a place in a file of the run; ranks that cannot read the file need the numbers.
            state = State({name: tensor[...] for name, tensor in state.tensors.items()}, state.values)
        self._ask("restore", state=state)
        self._version = int(state.values["version"])

    def keep(self) -> None:
        """Let each process copy its own share of what a step may change; nothing is collected."""
        self._ask("keep")

    def undo(self) -> None:
        """Let each process put its own share back, bit for bit; see `TorchLearner.undo`."""
        self._weights = None
        self._ask("undo")

    def write_model(self, folder: Path) -> Mapping[Path, str]:
        """Write the model, and its critic, as `TorchLearner.write_model` does: rank 0 gets one tensor at a time."""
        try:
            with self._lock:
                output_dir = self.worker_group.output_dir(folder)
                hashes: Mapping[str, str] = self._ask("write", folder=output_dir)[0]
                self.worker_group.fetch_output(output_dir, folder)
        except WorkerLost as gone:
            raise self._lost(gone) from None
        return {folder / name: digest for name, digest in hashes.items()}

    def model_writer(self) -> Callable[[Path], Mapping[Path, str]]:
        """Return what moves the model into a folder; it is written to the disk before this returns.

        Raises:
            OSError: ENOSPC: the disk is full.
        """
        place = self._waiting or self.worker_group.scratch
        place.mkdir(parents=True, exist_ok=True)
        # Written now and moved later: the weights of other processes cannot be read while they train on.
        copy = Path(tempfile.mkdtemp(dir=place))
        try:
            hashes = self.write_model(copy)
        except BaseException as error:
            shutil.rmtree(copy, ignore_errors=True)
            refused = refusal_of(error) if isinstance(error, LearnerError) else None
            if refused is not None and refused.errno == errno.ENOSPC:
                what = f"no space in {place} for the model on its way to a checkpoint"
                raise OSError(errno.ENOSPC, f"{what}: {error}; make room, then `gnomon resume`") from error
            raise

        def move(folder: Path) -> Mapping[Path, str]:
            for path in copy.iterdir():
                shutil.move(path, folder / path.name)
            copy.rmdir()
            return {folder / path.relative_to(copy): digest for path, digest in hashes.items()}

        return move

    async def watch(self) -> None:
        """Check the processes every two seconds, also while no command is under way; never return.

        Raises:
            LearnerError: One is gone or stands still, within seconds of when the worker group can tell.
        """
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            await asyncio.to_thread(self._check_workers)

    def _check_workers(self) -> None:
        # While a command is under way, the call that waits for its answer notices a lost process.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._fault:
                self.worker_group.check_alive()
        except WorkerLost as gone:
            raise self._lost(gone) from None
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the processes."""
        self._fault = self._fault or "the learner was closed"
        self.worker_group.close()
        self._forget()
        self._thread.shutdown(wait=False)

    def _forget(self) -> None:
        """Remove models that wait in `waiting` and will not be moved into a checkpoint."""
        if self._waiting is not None:
            shutil.rmtree(self._waiting, ignore_errors=True)

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await run_in_thread(work, self._thread)

    async def _change(self, do: str, **arguments: Any) -> Metrics:
        self._weights = None
        measured: list[Metrics] = await self._run(lambda: self._ask(do, **arguments))
        return sum(measured, Metrics())

    def _collected(self) -> Any:
        """Return the weights by name, or references to them, collected again if they have changed."""
        with self._lock:
            if self._weights is None and self.worker_group.is_shelving:
                kind, axes = self._rounding.kind, dict(self._rounding.axes)
                shares = self._ask("shelve", version=self._version, kind=kind, axes=axes)
                self._weights = shares[0].joined(shares)
            if self._weights is None:
                self._weights = self._ask("weights")[0]
            return self._weights

    def _ask(self, do: str, **arguments: Any) -> list[Any]:
        """Return what every process answers, by rank.

        Raises:
            LearnerError: A process is gone.
            GnomonError: A process raised it.
        """
        with self._lock:
            ranks = range(self.worker_group.size)
            self._send(ranks, do, arguments)
            return self._answers(ranks)

    def _send(self, ranks: Collection[int], do: str, arguments: Mapping[str, Any]) -> None:
        if self._fault:
            raise LearnerError(self._fault)
        try:
            self.worker_group.send(ranks, do, arguments)
        except WorkerLost as gone:
            raise self._lost(gone) from None

    def _answers(self, ranks: Collection[int]) -> list[Any]:
        values: dict[int, Any] = {}
        faults: list[Mapping[str, str]] = []
        until = math.inf
        while waiting := [rank for rank in ranks if rank not in values]:
            try:
                answered = self.worker_group.poll(waiting, _LOOK_SECONDS)
            except WorkerLost as gone:
                raise self._lost(gone) from None
            for rank, answer in answered.items():
                values[rank] = answer.value
                if answer.error is not None:
                    faults.append(answer.error)
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
            # A process that raised in the middle of an exchange leaves the others waiting there for ever, so they are
            # ended soon after the first error instead of after torch.distributed's ten minutes.
            if time.monotonic() > until and (missing := [rank for rank in ranks if rank not in values]):
                raise self._abandoned(faults[0], missing)
        if faults:
            # All processes raise together; the one with the cause says more than those that heard of it.
            raise _error(min(faults, key=lambda fault: ELSEWHERE in fault["said"]))
        return [values[rank] for rank in ranks]

    def _lost(self, gone: WorkerLost) -> LearnerError:
        rank, how = gone.args
        self._fault = (
            f"process {rank} of the learner's {self.worker_group.size} {how}\nThe run cannot go on without its part of "
            "the weights; go on from the newest checkpoint with gnomon resume"
        )
        self.worker_group.kill()
        return LearnerError(self._fault)

    def _abandoned(self, fault: Mapping[str, str], waiting: Collection[int]) -> Exception:
        ranks = ", ".join(map(str, waiting))
        error = _error(fault)
        self._fault = f"{error} (processes {ranks} of the learner waited for the one that raised this, and were ended)"
        self.worker_group.kill()
        return type(error)(self._fault)


def _error(fault: Mapping[str, str]) -> Exception:
    said = fault["said"]
    own = named(fault["kind"], said)
    if own is not None:
        return own
    if fault["kind"] in ("OutOfMemoryError", "MemoryError") or is_out_of_memory(RuntimeError(said)):
        return LearnerError(
            f"a process of the learner is out of memory: {said}. Set learner.max_tokens_per_micro_batch lower, "
            "learner.gradient_checkpointing = true, learner.processes higher, or use lora"
        )
    return LearnerError(f"a process of the learner failed: {fault['kind']}: {said}")
