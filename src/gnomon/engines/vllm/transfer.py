"""Weights from the learner's device to vLLM's without a detour, by vLLM's own weight transfer.

The learner's rank 0 and every process that holds a part of an engine meet in one group of NCCL's, and each publication
is one broadcast: rank 0 sends tensor after tensor, as it is gathered, and vLLM loads each as it comes. What is asked of
engines beside that (meet, begin, receive, finish) goes by whatever way the engines are reached.

Nothing is looked at twice: both ends compute a tensor's fingerprint while they have it.

Source: vLLM 0.32, ``vllm.distributed.weight_transfer``. Ours: the fingerprints; engines that are no data-parallel
copies of one, which vLLM's own client would all give the same ranks.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from gnomon.core.errors import ConfigError, unknown
from gnomon.core.redaction import without_secrets
from gnomon.engines.vllm.setup import FIXED, USUAL
from gnomon.models.transfer.fingerprint import Fingerprint, fingerprint

BACKEND = "nccl"
_ASK = """
import json, sys
from gnomon.engines.vllm.transfer import _backends
print()
print(json.dumps(sorted(_backends(sys.argv[1]))))
"""
MEET, BEGIN, RECEIVE, FINISH = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""What vLLM's workers can be told, in this order; the last three once a publication."""

Call = Callable[[str, Mapping[str, Any]], None]
"""Tells one engine something, with arguments by name, and waits until it was done."""


def check_backend(backend: str) -> None:
    """Refuse a backend that vLLM here does not know, before anything is loaded.

    Another process is asked, so that this one does not import vLLM for it; NCCL's is always there.

    Raises:
        ConfigError: If vLLM does not list it.
    """
    if backend == BACKEND:
        return
    command = [sys.executable, "-c", _ASK, backend]
    ran = subprocess.run(command, env={**USUAL, **os.environ, **FIXED}, capture_output=True, text=True)
    try:
        known = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except ValueError:
        said = without_secrets(ran.stderr).strip()[-300:] or f"exit code {ran.returncode}"
        raise ConfigError(f"cluster.transfer = '{backend}': vLLM here cannot be asked for it: {said}") from None
    _check(backend, known)


def rendezvous(address: str, parts: Sequence[int], rank: int = 0, backend: str = BACKEND, lasting: bool = True) -> Any:
    """Return vLLM's description of a group: this learner's rank 0, and so many processes of each engine.

    Args:
        address: Address of rank 0's machine, where rank 0 chooses a port; the other ranks do not take part.
        rank: Rank of this process in the learner.
        backend: By which they send; one that is not vLLM's own is a plugin's, and is described as NCCL's is.
        lasting: Tensors stay what they are when the next is asked for. vLLM then packs a GiB of them before it sends;
            what is gathered layer by layer would be gone by then, and is sent tensor by tensor.

    Raises:
        ConfigError: vLLM here knows no such backend.
    """
    known = _backends(backend)
    _check(backend, known)
    port = 0
    if rank == 0:
        # The port is free again when NCCL opens it a moment later; another program could take it, and the run would
        # then fail here.
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            port = free.getsockname()[1]
    return known[backend]().init_info_cls(address, port, 1 + sum(parts), rank=rank, packed=lasting)


def _check(backend: str, known: Collection[str]) -> None:
    if backend not in known:
        raise ConfigError(f"cluster.transfer: {unknown('weight transfer of vLLM', backend, known)}")


def _backends(backend: str) -> Any:
    """Return what vLLM can send by; of plugins, which run code, where another than its usual one is wanted."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    if backend != BACKEND:
        # As vLLM itself does where engines are made; who names another backend has it installed.
        load_general_plugins()
    return WeightTransferTrainerFactory._registry


class Sender:
    """The learner's end of a weight transfer. Every rank makes one and calls `send`: all gather, rank 0 sends.

    Args:
        told: What `rendezvous` returned.
        engines: Calls each engine with a message.
        parts: Number of processes of each engine.
        named: Yields all weights by the names of the model's files, the same names, types and shapes in the same order
            each time.
    """

    def __init__(
        self,
        told: Any,
        engines: Sequence[Call],
        parts: Sequence[int],
        named: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._source = _source(named, told.is_sender)
        self._end = WeightTransferTrainerFactory.trainer_init(
            told, client=TransferEngines(engines, parts), source=self._source
        )

    def send(self) -> Mapping[str, Fingerprint]:
        """Let all engines answer with the weights as they are now; return the fingerprints of what this rank sent.

        Blocks until all have them. An engine that dies meanwhile leaves the others and this one waiting: the
        caller must end the processes of all.
        """
        self._source.prints = {}
        self._end.send_weights()
        return dict(self._source.prints)

    def close(self) -> None:
        """Leave the group."""
        self._end.shutdown()


class TransferEngines:
    """Forwards the calls of vLLM's sending end to all engines at the same time; implements vLLM's sync client.

    A call returns when all have done it, and raises what the first one raised.
    """

    def __init__(self, calls: Sequence[Call], parts: Sequence[int]) -> None:
        self._calls, self._parts = calls, parts

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let them meet: the ranks of each engine come after those of the one before."""
        first, told = init_info["rank_offset"], []
        for count in self._parts:
            told.append({"init_info": {**init_info, "rank_offset": first}})
            first += count
        self._tell(MEET, told)

    def start_weight_update(self) -> None:
        """Let them answer nothing until they were told to finish."""
        self._tell(BEGIN, [{}] * len(self._calls))

    def update_weights(self, update_info: Any) -> None:
        """Let them receive."""
        self._tell(RECEIVE, [{"update_info": update_info}] * len(self._calls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let them answer with what they received."""
        self._tell(FINISH, [{}] * len(self._calls))

    def _tell(self, what: str, told: Sequence[Mapping[str, Any]]) -> None:
        # At the same time, since a broadcast begins only when all ranks have come.
        with ThreadPoolExecutor(max_workers=max(1, len(self._calls))) as threads:
            asked = [threads.submit(call, what, one) for call, one in zip(self._calls, told, strict=True)]
            for one in asked:
                one.result()


def _source(named: Callable[[], Iterator[tuple[str, Tensor]]], is_sender: bool) -> Any:
    """Return vLLM's view of weights. What comes is read once, and known from then on: gathering is all ranks' work.

    A class made in a function, for its base exists only where vLLM is installed.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]
        """Notes the fingerprint of each tensor that is sent."""

        def __init__(self) -> None:
            self.prints: dict[str, Fingerprint] = {}
            self._known: list[Any] = []

        def metadata(self) -> list[Any]:
            """Return names, types and shapes."""
            self._known = self._known or [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in named()]
            return self._known

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named():
                # Only rank 0's fingerprints are compared, and hashing costs a pass over the memory.
                if is_sender:
                    self.prints[name] = fingerprint(tensor)
                yield name, tensor

    return Source()


def note(worker: Any) -> None:
    """Let a worker of vLLM's note the fingerprints of what is loaded from now on, and what is left out."""
    model = worker.model_runner.get_model()
    load = model.load_weights
    prints: dict[str, Fingerprint] = {}
    missed = {name for name, _ in model.named_parameters()}

    def noting(weights: Any) -> Any:
        loaded = load(_noted(weights, prints))
        missed.difference_update(missed if loaded is None else loaded)
        return loaded

    # On the model, since the function that reads them is another call in the worker's process.
    model.load_weights, model.gnomon_noted = noting, (prints, missed)


def noted(worker: Any) -> tuple[dict[str, Fingerprint], list[str]]:
    """Return them, with the names of the worker's weights that nothing was loaded into, and note no more."""
    model = worker.model_runner.get_model()
    prints, missed = model.gnomon_noted
    del model.load_weights, model.gnomon_noted
    return prints, sorted(missed)


def _noted(weights: Any, prints: dict[str, Fingerprint]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        prints[name] = fingerprint(tensor)
        yield name, tensor
