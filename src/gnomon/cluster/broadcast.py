"""Weights by one broadcast: the learner's rank 0 sends, all processes of all engines receive, in a group that met once.

What lies nowhere cannot be fetched later, so what travels between run, ranks and engines beside the tensors is which
engines there are, and afterwards the fingerprints of what was sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gnomon.core.errors import EngineError, LearnerError
from gnomon.engines.vllm.transfer import Sender, rendezvous
from gnomon.models.transfer.fingerprint import Fingerprint


@dataclass(frozen=True)
class Receivers:
    """Whom rank 0 sends weights to. actors: one for each engine. parts: processes of each. backend: vLLM's name of how.

    address: of rank 0's machine, where the group meets; whoever reaches its port there can disturb that.
    """

    actors: tuple[Any, ...]
    parts: tuple[int, ...]
    backend: str
    address: str


@dataclass(frozen=True)
class Sent:
    """Weights of a version that were sent; implements `transport.stored.Stored` as far as what is gone can."""

    version: int
    prints: Mapping[str, Fingerprint]

    @classmethod
    def joined(cls, parts: Sequence["Sent"]) -> "Sent":
        """Return what rank 0 says, of what all ranks say: it alone sends."""
        return parts[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raise LearnerError: they lie nowhere, and what would read them is refused before a run begins."""
        raise LearnerError(f"the weights of version {self.version} were sent to engines, and lie nowhere else")

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        """Return the fingerprints of what was sent; an engine's are of what it received, before any cast."""
        return self.prints


class Broadcast:
    """A rank's end of the group. Made in all ranks, which gather together; rank 0 tells engines what to do.

    lasting: see `vllm_transfer.meeting`. named: see `vllm_transfer.Sender`.
    Raises: ConfigError when vLLM, or such a backend, is not here; EngineError as engines do.
    """

    def __init__(
        self, receivers: Receivers, rank: int, lasting: bool, named: Callable[[], Iterator[tuple[str, Tensor]]]
    ) -> None:
        self._version = -1
        told = rendezvous(receivers.address, receivers.parts, rank, receivers.backend, lasting)
        self._end = Sender(told, [partial(self._tell, actor) for actor in receivers.actors], receivers.parts, named)

    def send(self, version: int) -> Sent:
        """Let all engines answer with the weights as they are now; see `vllm_transfer.Sender.send`."""
        self._version = version
        return Sent(version, self._end.send())

    def _tell(self, actor: Any, what: str, told: Mapping[str, Any]) -> None:
        import ray

        reply = ray.get(actor.transfer.remote(what, dict(told), self._version))
        if reply.fault is not None:
            raise EngineError(reply.fault[1])
