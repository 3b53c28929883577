"""Weight sync by one broadcast: the learner's rank 0 sends, and all processes of all engines receive.

Broadcast weights are stored nowhere and cannot be fetched later. Besides the tensors, only the list of engines and the
fingerprints of the sent tensors travel between run, ranks and engines.
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
    """The engines to which rank 0 sends weights.

    Attributes:
        actors: One actor per engine.
        parts: Processes of each engine.
        backend: vLLM's name of the transfer method.
        address: Address of rank 0's machine, where the group meets. A process that reaches the port can disturb the
            group.
    """

    actors: tuple[Any, ...]
    parts: tuple[int, ...]
    backend: str
    address: str


@dataclass(frozen=True)
class Sent:
    """The weights of a version after a broadcast: fingerprints without stored tensors."""

    version: int
    prints: Mapping[str, Fingerprint]

    @classmethod
    def joined(cls, parts: Sequence["Sent"]) -> "Sent":
        """Return rank 0's result, because only rank 0 sends."""
        return parts[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raise LearnerError: broadcast weights are not stored. Such experiments are refused before a run."""
        raise LearnerError(f"the weights of version {self.version} were sent to engines, and lie nowhere else")

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        """Return the fingerprints of the sent tensors; an engine computes its own before any cast."""
        return self.prints


class Broadcast:
    """One rank's end of the broadcast group. All ranks make one and gather together; rank 0 also instructs the engines.

    Args:
        receivers: The engines.
        rank: This process's rank in the learner.
        lasting: See `engines.vllm.transfer.rendezvous`.
        named: See `engines.vllm.transfer.Sender`.

    Raises:
        ConfigError: If vLLM or the backend is missing.
        EngineError: If an engine fails.
    """

    def __init__(
        self, receivers: Receivers, rank: int, lasting: bool, named: Callable[[], Iterator[tuple[str, Tensor]]]
    ) -> None:
        self._version = -1
        told = rendezvous(receivers.address, receivers.parts, rank, receivers.backend, lasting)
        self._end = Sender(told, [partial(self._tell, actor) for actor in receivers.actors], receivers.parts, named)

    def send(self, version: int) -> Sent:
        """Send the current weights to all engines; see `engines.vllm.transfer.Sender.send`."""
        self._version = version
        return Sent(version, self._end.send())

    def _tell(self, actor: Any, what: str, told: Mapping[str, Any]) -> None:
        import ray

        # Without a time limit: `BroadcastGroup` watches the engines, and ends the run if one of them hangs.
        reply = ray.get(actor.transfer.remote(what, dict(told), self._version))
        if reply.fault is not None:
            raise EngineError(reply.fault[1])
