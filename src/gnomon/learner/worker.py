"""The program of one process that holds a part of a learner: ``python -m gnomon.learner.worker FD FOLDER``.

The run sends every process the same commands in the same order (`distributed`). The process answers each command with a
value, or with an error's name and text. It ends when the run does: standard input, which nobody writes to, then ends.
"""

import asyncio
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.core.atomic_files import sync_file
from gnomon.core.failpoints import failpoint
from gnomon.core.processes.server import Channel
from gnomon.core.tensor_files import SHARE, write_tensors
from gnomon.core.threads import give_way
from gnomon.core.types import Loan, Snapshot, State
from gnomon.learner import mesh
from gnomon.learner.learner import TorchLearner
from gnomon.learner.serialization import packed, unpacked
from gnomon.learner.spec import LearnerSpec
from gnomon.models.device import give_back, resolve_device


class LearnerWorker:
    """One process's learner and its commands. ``learner`` exists once the model was loaded."""

    def __init__(self) -> None:
        self._spec: LearnerSpec
        self._lent = State()
        self._writer = ThreadPoolExecutor(1, "share", initializer=give_way)
        self._storing: Future[list[str]]
        self.learner: TorchLearner
        self.commands: Mapping[str, Callable[..., Any]] = {
            # By name: the same names travel through sockets and through Ray.
            "join": self._join,
            "load": self._load,
            "score": lambda batch, needs: self._in_first(asyncio.run(self.learner.score(batch, set(needs)))),
            "logprobs": self._logprobs,
            "token_stats": lambda batch: self._in_first(asyncio.run(self.learner.token_stats(batch))),
            "update": lambda **given: asyncio.run(self.learner.update(**given)),
            "fit": lambda **given: asyncio.run(self.learner.fit(**given)),
            "weights": self._weights,
            "state": lambda: self._in_first(self.learner.state()),
            "restore": lambda state: self.learner.restore(state),
            "lend": self._lend,
            "store": self._store,
            "stored": self._stored,
            "keep": lambda: self.learner.keep(),
            "undo": lambda: self.learner.undo(),
            "write": self._write,
        }

    def _join(self, spec: LearnerSpec, rendezvous: str, rank: int, size: int) -> None:
        self._spec = spec
        if spec.plan.is_sharded:
            mesh.init_mesh(rendezvous, rank, size, resolve_device(spec.device), spec.plan.offload)

    def _load(self) -> None:
        # Onto the CPU: parted, each goes to its device, which has no room for the whole.
        spec, cpu = self._spec, torch.device("cpu")
        device = cpu if spec.plan.is_sharded else resolve_device(spec.device)
        self.learner = spec.learner(spec.network(device), device)

    def _logprobs(self, batch: Any, version: int, weights: Mapping[str, Any] | None) -> Any:
        snapshot = None if weights is None else Snapshot(version, lambda: iter(weights.items()))
        return self._in_first(asyncio.run(self.learner.logprobs(batch, snapshot)))

    def _weights(self) -> Any:
        is_first, found = mesh.current_mesh().rank == 0, {}
        for name, tensor in self.learner.snapshot().tensors():
            if is_first:
                found[name] = tensor.detach().to("cpu", copy=True)
            failpoint("collect")
        self.give_way()
        return found

    def give_way(self) -> None:
        """Release cached memory for the engine that shares the device and wakes next."""
        if self._spec.yields_device:
            give_back(resolve_device(self._spec.device))

    def _lend(self) -> Any:
        self._lent = self.learner.lend()
        return {"bytes": self._lent.nbytes, "values": self._in_first(dict(self._lent.values))}

    def _store(self, folder: str) -> None:
        """Begin to write what was lent, in a thread, while further commands are answered."""
        path, lent = Path(folder) / SHARE.format(mesh.current_mesh().rank + 1), self._lent
        self._lent = State()
        tensors: dict[str, Tensor | Loan] = {**lent.tensors, **lent.lent}
        self._storing = self._writer.submit(_write_share, path, tensors)

    def _stored(self) -> Any:
        """Return path and hash of the written share; None while the writing goes on."""
        return self._storing.result() if self._storing.done() else None

    def _write(self, folder: str) -> Any:
        place = Path(folder)
        written = self.learner.write_model(place if mesh.current_mesh().rank == 0 else None)
        failpoint("model")
        return {str(path.relative_to(place)): digest for path, digest in written.items()}

    def _in_first(self, value: Any) -> Any:
        return value if mesh.current_mesh().rank == 0 else None


def _write_share(path: Path, tensors: Mapping[str, Tensor | Loan]) -> list[str]:
    found = write_tensors(path, tensors)
    failpoint("share")
    sync_file(path)
    return [str(path), found]


def error_payload(error: Exception) -> dict[str, str]:
    """Return the name and text of an error for the run; the trace goes to standard error."""
    traceback.print_exception(error)
    return {"kind": type(error).__name__, "said": str(error)}


def serve(channel: Channel) -> None:
    """Run commands until the run closes the channel."""
    worker = LearnerWorker()
    while True:
        order, files = channel.receive()
        if order is None:
            return
        try:
            arguments = unpacked(order["text"], files[0])
            value, error = worker.commands[order["do"]](**arguments), None
        # Errors go to the run as answers, so that one wrong command does not end the process.
        except Exception as raised:
            value, error = None, error_payload(raised)
        with packed(value) as (text, file):
            channel.send({"text": text, "error": error}, file)


def _watch(folder: str) -> None:
    """Wait until the run is gone, however it went; then leave nothing behind."""
    while os.read(0, 1 << 10):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Serve on the socket that was inherited."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A child of this process that kept the socket open would hide this process's end from the run.
    connection.set_inheritable(False)
    # A thread of its own, since the main thread may be in an exchange that never ends when the run is killed.
    threading.Thread(target=_watch, args=(sys.argv[2],), name="gnomon-guard", daemon=True).start()
    serve(Channel(connection))
    # Not an ordinary exit: torch.distributed's shutdown would wait for processes that may be gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
