"""The program of one process that holds a part of a learner: ``python -m gnomon.learner.worker FD FOLDER``.

It obeys the run, which sends every process the same commands in the same order (`distributed`), and answers each: with
a value
or with an error's name and text. It ends when the run does: standard input, which nobody writes to, then ends as well.
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
    """One process's learner, and what it can be told. learner: once the model was loaded."""

    def __init__(self) -> None:
        self._recipe: LearnerSpec
        self._lent = State()
        self._writer = ThreadPoolExecutor(1, "share", initializer=give_way)
        self._storing: Future[list[str]]
        self.learner: TorchLearner
        self.commands: Mapping[str, Callable[..., Any]] = {
            "join": self._join,
            "load": self._load,
            "score": self._score,
            "logprobs": self._logprobs,
            "look": self._look,
            "update": self._update,
            "fit": self._fit,
            "weights": self._weights,
            "state": self._state,
            "restore": self._restore,
            "lend": self._lend,
            "store": self._store,
            "stored": self._stored,
            "keep": self._keep,
            "undo": self._undo,
            "write": self._write,
        }

    def _join(self, recipe: LearnerSpec, rendezvous: str, rank: int, size: int) -> None:
        self._recipe = recipe
        if recipe.plan.is_sharded:
            mesh.join(rendezvous, rank, size, resolve_device(recipe.device), recipe.plan.offload)

    def _load(self) -> None:
        # Onto the CPU: parted, each goes to its device, which has no room for the whole.
        recipe, cpu = self._recipe, torch.device("cpu")
        device = cpu if recipe.plan.is_sharded else resolve_device(recipe.device)
        self.learner = recipe.learner(recipe.network(device), device)

    def _score(self, batch: Any, needs: list[Any]) -> Any:
        return self._in_first(asyncio.run(self.learner.score(batch, set(needs))))

    def _logprobs(self, batch: Any, version: int, weights: Mapping[str, Any] | None) -> Any:
        snapshot = None if weights is None else Snapshot(version, lambda: iter(weights.items()))
        return self._in_first(asyncio.run(self.learner.logprobs(batch, snapshot)))

    def _look(self, batch: Any) -> Any:
        return self._in_first(asyncio.run(self.learner.look(batch)))

    def _update(self, minibatch: Any, algorithm: Any, step: int, rate: float) -> Any:
        return asyncio.run(self.learner.update(minibatch, algorithm, step, rate))

    def _fit(self, minibatch: Any, algorithm: Any, step: int | None, one_sided: bool) -> Any:
        return asyncio.run(self.learner.fit(minibatch, algorithm, step, one_sided))

    def _weights(self) -> Any:
        is_first, found = mesh.here().rank == 0, {}
        for name, tensor in self.learner.snapshot().tensors():
            if is_first:
                found[name] = tensor.detach().to("cpu", copy=True)
            failpoint("collect")
        self.give_way()
        return found

    def give_way(self) -> None:
        """Give memory that nothing uses any more to the engine that shares the device, and now wakes."""
        if self._recipe.yields_device:
            give_back(resolve_device(self._recipe.device))

    def _state(self) -> Any:
        return self._in_first(self.learner.state())

    def _lend(self) -> Any:
        self._lent = self.learner.lend()
        return {"bytes": self._lent.nbytes, "values": self._in_first(dict(self._lent.values))}

    def _store(self, folder: str) -> None:
        """Begin to write what was lent, beside whatever is asked next."""
        path, lent = Path(folder) / SHARE.format(mesh.here().rank + 1), self._lent
        self._lent = State()
        tensors: dict[str, Tensor | Loan] = {**lent.tensors, **lent.lent}
        self._storing = self._writer.submit(_write_share, path, tensors)

    def _stored(self) -> Any:
        """Return path and hash of what was written; nothing while that goes on."""
        return self._storing.result() if self._storing.done() else None

    def _restore(self, state: State) -> None:
        self.learner.restore(state)

    def _keep(self) -> None:
        self.learner.keep()

    def _undo(self) -> None:
        self.learner.undo()

    def _write(self, folder: str) -> Any:
        place = Path(folder)
        written = self.learner.write_model(place if mesh.here().rank == 0 else None)
        failpoint("model")
        return {str(path.relative_to(place)): digest for path, digest in written.items()}

    def _in_first(self, value: Any) -> Any:
        return value if mesh.here().rank == 0 else None


def _write_share(path: Path, tensors: Mapping[str, Tensor | Loan]) -> list[str]:
    found = write_tensors(path, tensors)
    failpoint("share")
    sync_file(path)
    return [str(path), found]


def error_payload(error: Exception) -> dict[str, str]:
    """Return what is told of something that was raised; its trace goes to standard error."""
    traceback.print_exception(error)
    return {"kind": type(error).__name__, "said": str(error)}


def serve(channel: Channel) -> None:
    """Obey until the run hangs up."""
    rank = LearnerWorker()
    while True:
        order, files = channel.receive()
        if order is None:
            return
        try:
            arguments = unpacked(order["text"], files[0])
            value, error = rank.commands[order["do"]](**arguments), None
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
    connection.set_inheritable(False)
    threading.Thread(target=_watch, args=(sys.argv[2],), name="gnomon-guard", daemon=True).start()
    serve(Channel(connection))
    # The others may be gone already; there is nothing to say goodbye to.
    os._exit(0)


if __name__ == "__main__":
    main()
