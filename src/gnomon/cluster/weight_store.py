"""Weights in a cluster's object store: put there once in pieces, and fetched by every engine that lacks them.

A piece is a list of whole tensors as bytes. On the machine that put the piece, engines map the same memory and copy
nothing. The cluster moves a piece to other machines, where engines map it as well.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gnomon.core.threads import run_in_thread
from gnomon.core.types import Adapted, Snapshot
from gnomon.models.lora import merged
from gnomon.models.transfer.fingerprint import Fingerprint, expected, fingerprint
from gnomon.models.transfer.remote_weights import PIECE_BYTES, changed, from_bytes, share, to_bytes

SnapshotTransform = Callable[[Snapshot], Snapshot]
Item = tuple[str, Tensor, Fingerprint]
Piece = Sequence[Any]
_How = tuple[float, bool, Fingerprint]
_BASE, _UP, _DOWN = "|base", "|up", "|down"


@dataclass(frozen=True)
class TensorRef:
    """Position of a tensor: index ``place`` in the piece of ``ref``, with the tensor's fingerprint."""

    ref: Any
    place: int
    print: Fingerprint


@dataclass(frozen=True)
class AdapterRef:
    """Positions of a weight's base and adapter, which the reader merges, with the merged weight's fingerprint."""

    base: TensorRef
    up: TensorRef
    down: TensorRef
    scale: float
    is_transposed: bool
    print: Fingerprint


@dataclass(frozen=True)
class FetchedWeights:
    """The result of a fetch.

    Attributes:
        weights: Read-only tensors.
        kept: Pieces with bases, for the next fetch.
        size: Bytes that were fetched.
        tensors: Tensors that were fetched.
    """

    weights: Mapping[str, Tensor]
    kept: Mapping[Any, Piece]
    size: int
    tensors: int


@dataclass(frozen=True)
class WeightsRef:
    """All weights of a version, as positions in the store.

    Implements `models.transfer.remote_weights.Stored` in any process of the cluster. The pieces live as long as a
    process holds a reference, and as long as the process that put them.
    """

    version: int
    spots: Mapping[str, TensorRef | AdapterRef]

    @classmethod
    def joined(cls, parts: Sequence["WeightsRef"]) -> "WeightsRef":
        """Return the weights of several ranks as one reference."""
        return cls(parts[0].version, {name: spot for part in parts for name, spot in part.spots.items()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, read-only, one piece after the other."""
        yield from self._read(self.spots)

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        """Return the fingerprints of the weights in the precision of ``held``."""
        prints = {name: spot.print for name, spot in self.spots.items()}
        # Only these are read: the fingerprint of a cast needs the numbers, that of equal types does not.
        cast = [name for name, print_ in prints.items() if name in held and held[name].dtype != print_.dtype]
        return {**prints, **expected(self._read(cast), held)}

    def lacking(self, taken: Mapping[str, Fingerprint]) -> list[str]:
        """Return the names of tensors whose fingerprints differ from ``taken``."""
        return [name for name, spot in self.spots.items() if taken.get(name) != spot.print]

    async def fetch(self, names: Collection[str], kept: Mapping[Any, Piece]) -> FetchedWeights:
        """Fetch weights and merge adapters, once all pieces are on this machine.

        Args:
            names: Weights to fetch.
            kept: Pieces that are on this machine already.
        """
        lacking = [spot for name in names for spot in _single(self.spots[name]) if spot.ref not in kept]
        refs = list(dict.fromkeys(spot.ref for spot in lacking))
        pieces = {**kept, **dict(zip(refs, await asyncio.gather(*map(awaited, refs)), strict=True))}
        # In a thread, because the engine decodes meanwhile.
        weights = await run_in_thread(lambda: {name: _weight(self.spots[name], pieces) for name in names})
        # Bases never change, so their pieces stay here; the next load fetches the small adapters alone.
        bases = {spot.base.ref for spot in self.spots.values() if isinstance(spot, AdapterRef)}
        size = sum(spot.print.nbytes for spot in lacking)
        return FetchedWeights(weights, {ref: pieces[ref] for ref in bases & pieces.keys()}, size, len(lacking))

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights piece by piece; the small adapters are fetched first."""
        import ray

        names = list(names)
        adapted = [spot for name in names if isinstance(spot := self.spots[name], AdapterRef)]
        adapters = {ref: ray.get(ref) for ref in dict.fromkeys(r for s in adapted for r in (s.up.ref, s.down.ref))}
        for ref, inside in _by_piece(self.spots, names).items():
            pieces = {**adapters, ref: ray.get(ref)}
            yield from ((name, _weight(self.spots[name], pieces)) for name in inside)


class WeightStore:
    """Puts trained weights into the store; unchanged weights are not put again.

    After a layer was gathered, every rank of the learner has all of it. So each rank puts a share and compares only
    that share with the version before. For a weight with an adapter, the base is put once and then only the adapter,
    with the fingerprint of the merged weight, which has the same bits on every machine. A replaced piece is freed as
    soon as no engine reads it. A piece of which less than half is in use is put again without the rest, so the store
    holds at most twice the weights, besides the version before.

    Ours: peers send everything, or adapters to an engine that computes with them. The verified weight sync needs the
    fingerprints anyway.

    Args:
        rank: Rank in the learner.
        size: Number of ranks.
        piece_bytes: See `models.transfer.remote_weights.PIECE_BYTES`.
    """

    def __init__(self, rank: int = 0, size: int = 1, piece_bytes: int = PIECE_BYTES) -> None:
        self._rank, self._size, self._piece_bytes = rank, size, piece_bytes
        self._spots: dict[str, TensorRef] = {}
        self._sizes: dict[Any, int] = {}

    def put(self, version: int, named: Iterable[tuple[str, Tensor | Adapted]], lasting: bool = True) -> WeightsRef:
        """Put this rank's share of all weights and return its positions.

        Args:
            version: Version of the weights.
            named: All weights, in an order that is the same in all ranks.
            lasting: Whether tensors keep their values until this returns; otherwise changed tensors are copied at once.
        """
        known = {name: spot.print for name, spot in self._spots.items()}
        sums: dict[str, _How] = {}
        ours = share(named, self._rank, self._size, self._piece_bytes)
        spots: dict[str, TensorRef] = {}
        piece, size = list[Item](), 0
        for name, tensor, print_, is_new in changed(_separate(ours, sums), known):
            if not is_new:
                spots[name] = self._spots[name]
                continue
            piece.append((name, tensor if lasting else tensor.detach().to("cpu", copy=True), print_))
            size += tensor.nbytes
            if size >= self._piece_bytes:
                spots |= self._put(piece)
                piece, size = [], 0
        spots |= self._put(piece)
        self._spots = spots | self._put(self._left(spots))
        # Ray frees a piece when the last reference is gone; the sizes here must not keep one alive.
        in_use = {spot.ref for spot in self._spots.values()}
        self._sizes = {ref: size for ref, size in self._sizes.items() if ref in in_use}
        return WeightsRef(version, self._together(sums))

    def _together(self, sums: Mapping[str, _How]) -> dict[str, TensorRef | AdapterRef]:
        """Return the position of each weight."""
        parts = {name + part for name in sums for part in (_BASE, _UP, _DOWN)}
        found: dict[str, TensorRef | AdapterRef] = {
            name: spot for name, spot in self._spots.items() if name not in parts
        }
        for name, how in sums.items():
            base, up, down = (self._spots[name + part] for part in (_BASE, _UP, _DOWN))
            found[name] = AdapterRef(base, up, down, *how)
        return found

    def _put(self, piece: Sequence[Item]) -> dict[str, TensorRef]:
        """Put a piece and return the positions of its tensors."""
        if not piece:
            return {}
        import ray

        arrays = [to_bytes(tensor) for _, tensor, _ in piece]
        ref = ray.put(arrays)
        self._sizes[ref] = sum(array.nbytes for array in arrays)
        return {name: TensorRef(ref, place, print_) for place, (name, _, print_) in enumerate(piece)}

    def _left(self, spots: Mapping[str, TensorRef]) -> list[Item]:
        """Return the tensors of pieces that are mostly unused."""
        found: list[Item] = []
        for ref, names in _by_piece(spots, spots).items():
            # One tensor in use keeps its whole piece in memory.
            if 2 * sum(spots[name].print.nbytes for name in names) < self._sizes[ref]:
                left = WeightsRef(0, {name: spots[name] for name in names})
                found += [(name, tensor, spots[name].print) for name, tensor in left.tensors()]
        return found


class WeightCache:
    """One weight store in the run's own process, for all engines. Any thread may call."""

    def __init__(self) -> None:
        self._store = WeightStore()
        self._lock = threading.Lock()
        self._latest: tuple[Snapshot, WeightsRef] | None = None

    def of(self, snapshot: Snapshot) -> WeightsRef:
        """Return the positions of a snapshot's weights; a new snapshot is put into the store once."""
        if snapshot.stored is not None:
            # Weights that a step did not change are in the store under an earlier version.
            shelved: WeightsRef = snapshot.stored()
            return replace(shelved, version=snapshot.version)
        with self._lock:
            if self._latest is None or self._latest[0] is not snapshot:
                named = (snapshot.parts or snapshot.tensors)()
                self._latest = snapshot, self._store.put(snapshot.version, named)
            return self._latest[1]

    def sending(self, sending: SnapshotTransform | None = None) -> SnapshotTransform:
        """Return a transform that puts a snapshot into the store when it is sent, after ``sending``."""

        def send(snapshot: Snapshot) -> Snapshot:
            snapshot = snapshot if sending is None else sending(snapshot)
            return replace(snapshot, stored=lambda: self.of(snapshot))

        return send


def awaited(ref: Any) -> "asyncio.Future[Any]":
    """Return an asyncio future for a Ray reference. Awaiting it can raise ray.exceptions.RayError."""
    return asyncio.wrap_future(ref.future())


def _separate(named: Iterable[tuple[str, Tensor | Adapted]], sums: dict[str, _How]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and a weight with an adapter as its three; record in ``sums`` the merged fingerprint."""
    for name, weight in named:
        if isinstance(weight, Tensor):
            yield name, weight
            continue
        # Merged here once for the fingerprint, although the merged weight does not travel: every reader must make the
        # same bits.
        sums[name] = weight.scale, weight.is_transposed, fingerprint(merged(weight))
        yield from ((name + _BASE, weight.base), (name + _UP, weight.up), (name + _DOWN, weight.down))


def _by_piece(spots: Mapping[str, TensorRef | AdapterRef], names: Iterable[str]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault(_single(spots[name])[0].ref, []).append(name)
    return found


def _single(spot: TensorRef | AdapterRef) -> tuple[TensorRef, ...]:
    return (spot.base, spot.up, spot.down) if isinstance(spot, AdapterRef) else (spot,)


def _weight(spot: TensorRef | AdapterRef, pieces: Mapping[Any, Piece]) -> Tensor:
    tensors = [from_bytes(pieces[one.ref][one.place], one.print) for one in _single(spot)]
    if isinstance(spot, TensorRef):
        return tensors[0]
    base, up, down = tensors
    return merged(Adapted(base, up, down, spot.scale, spot.is_transposed))
