"""Engines with something wrong with them: real ones, with real weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

import gnomon.training.build
import gnomon.training.build_workers
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.training.build_workers import load_network
from gnomon.training.resolve import Resolved
from gnomon.training.weight_sync import PlainWeightSync


class Frozen(LocalEngine):
    """Keeps the weights that it was given first, and says that it has the new ones."""

    first: tuple[tuple[str, Tensor], ...] = ()

    async def load(self, snapshot: Snapshot) -> None:
        """Load the first weights again, under the new version."""
        self.first = self.first or tuple((name, tensor.clone()) for name, tensor in snapshot.tensors())
        await super().load(Snapshot(snapshot.version, lambda: iter(self.first)))


class Copying(LocalEngine):
    """Answers a prompt once and hands out copies, as a cache does that does not look at the seed."""

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Draw for the first key alone."""
        return (await super().generate(prompt, keys[:1], sampling)) * len(keys)


ENGINES: dict[str, type[LocalEngine]] = {"frozen": Frozen, "copying": Copying}


@contextmanager
def faulty(kind: str) -> Iterator[None]:
    """Let runs in this block be answered by such an engine, without the proof of arrival that would stop them."""
    if not kind:
        yield
        return

    def serve(resolved: Resolved, trained: nn.Module, warn: Callable[[str], None]) -> EnginePool:
        return EnginePool({kind: ENGINES[kind](load_network(resolved), shared=False)}, warn=warn)

    kept = gnomon.training.build_workers.serve, gnomon.training.build._weight_sync
    gnomon.training.build_workers.serve, gnomon.training.build._weight_sync = serve, lambda *given: PlainWeightSync()  # type: ignore[assignment]
    try:
        yield
    finally:
        gnomon.training.build_workers.serve, gnomon.training.build._weight_sync = kept
