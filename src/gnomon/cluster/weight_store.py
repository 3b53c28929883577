"""Weights through a cluster's object store: put there once, in pieces, and fetched by every engine that lacks them.

A piece is a list of whole tensors as bytes. On the machine where it was put, engines map the same memory and nothing is
copied; to another machine the cluster moves it, several at a time, and there it is mapped likewise.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gnomon.core.threads import elsewhere
from gnomon.core.types import Adapted, Snapshot
from gnomon.models.lora import merged
from gnomon.models.transfer.fingerprint import Fingerprint, expected, fingerprint
from gnomon.models.transfer.remote_weights import PIECE_BYTES, changed, from_bytes, share, to_bytes

Sending = Callable[[Snapshot], Snapshot]
Item = tuple[str, Tensor, Fingerprint]
Piece = Sequence[Any]
_How = tuple[float, bool, Fingerprint]
_BASE, _UP, _DOWN = "|base", "|up", "|down"


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies: ``place`` in the piece that ``ref`` is of. print: which tensor it is."""

    ref: Any
    place: int
    print: Fingerprint


@dataclass(frozen=True)
class AdapterRef:
    """Where a weight's base and adapter lie, which whoever needs the weight merges. print: which tensor that gives."""

    base: TensorRef
    up: TensorRef
    down: TensorRef
    scale: float
    is_transposed: bool
    print: Fingerprint


@dataclass(frozen=True)
class FetchedWeights:
    """What was fetched: weights, in memory that nobody may write to. kept: pieces with bases, for the next time.

    size, tensors: bytes and number of what was brought here for it.
    """

    weights: Mapping[str, Tensor]
    kept: Mapping[Any, Piece]
    size: int
    tensors: int


@dataclass(frozen=True)
class WeightsRef:
    """All weights of a version, by where they lie; implements `transport.stored.Stored` in any process of the cluster.

    What it names lives as long as somebody has it, and the process that put it there.
    """

    version: int
    spots: Mapping[str, TensorRef | AdapterRef]

    @classmethod
    def joined(cls, parts: Sequence["WeightsRef"]) -> "WeightsRef":
        """Return what several ranks put, as one."""
        return cls(parts[0].version, {name: spot for part in parts for name, spot in part.spots.items()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, in memory that nobody may write to; piece after piece is brought here."""
        yield from self._read(self.spots)

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        """Return the fingerprints of what lies here, in the precision of ``held``; see `transport.stored.Stored`."""
        prints = {name: spot.print for name, spot in self.spots.items()}
        cast = [name for name, print_ in prints.items() if name in held and held[name].dtype != print_.dtype]
        return {**prints, **expected(self._read(cast), held)}

    def lacking(self, taken: Mapping[str, Fingerprint]) -> list[str]:
        """Return the names of tensors that are others than those that were ``taken``."""
        return [name for name, spot in self.spots.items() if taken.get(name) != spot.print]

    async def fetch(self, names: Collection[str], kept: Mapping[Any, Piece]) -> FetchedWeights:
        """Return weights, once all of their pieces are on this machine, those with adapters merged.

        kept: pieces that are here already.
        """
        lacking = [spot for name in names for spot in _single(self.spots[name]) if spot.ref not in kept]
        refs = list(dict.fromkeys(spot.ref for spot in lacking))
        pieces = {**kept, **dict(zip(refs, await asyncio.gather(*map(awaited, refs)), strict=True))}
        # Engines answer meanwhile, in a thread of their own.
        weights = await elsewhere(lambda: {name: _weight(self.spots[name], pieces) for name in names})
        bases = {spot.base.ref for spot in self.spots.values() if isinstance(spot, AdapterRef)}
        size = sum(spot.print.nbytes for spot in lacking)
        return FetchedWeights(weights, {ref: pieces[ref] for ref in bases & pieces.keys()}, size, len(lacking))

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, piece after piece; adapters, which are small, are brought here first."""
        import ray

        names = list(names)
        adapted = [spot for name in names if isinstance(spot := self.spots[name], AdapterRef)]
        adapters = {ref: ray.get(ref) for ref in dict.fromkeys(r for s in adapted for r in (s.up.ref, s.down.ref))}
        for ref, inside in _by_piece(self.spots, names).items():
            pieces = {**adapters, ref: ray.get(ref)}
            yield from ((name, _weight(self.spots[name], pieces)) for name in inside)


class WeightStore:
    """Puts weights where they are trained; what did not change since the last time is not put again.

    After a layer was gathered every rank of a learner has all of it. So each puts a share, and looks for changes in
    that share alone. Of a weight with an adapter the base is put once and then the adapter alone, beside the
    fingerprint of what they merge to, which has the same bits wherever it is merged. What is replaced is given back as
    soon as no engine reads it any more. A piece of which less than half is still in use is put anew without the rest,
    so at most twice the weights lie there, beside those of the version before.

    rank, size: of the learner's. piece_bytes: see `transport.stored.PIECE_BYTES`.
    Ours: peers send everything, or adapters to an engine that computes with them; a fingerprint is needed for the proof
    of arrival anyway.
    """

    def __init__(self, rank: int = 0, size: int = 1, piece_bytes: int = PIECE_BYTES) -> None:
        self._rank, self._size, self._piece_bytes = rank, size, piece_bytes
        self._spots: dict[str, TensorRef] = {}
        self._sizes: dict[Any, int] = {}

    def put(self, version: int, named: Iterable[tuple[str, Tensor | Adapted]], lasting: bool = True) -> WeightsRef:
        """Put this rank's share of all weights, in any order that is the same in all ranks, and return where it lies.

        lasting: tensors stay what they are until this returns; otherwise what changed is copied as it comes.
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
        in_use = {spot.ref for spot in self._spots.values()}
        self._sizes = {ref: size for ref, size in self._sizes.items() if ref in in_use}
        return WeightsRef(version, self._together(sums))

    def _together(self, sums: Mapping[str, _How]) -> dict[str, TensorRef | AdapterRef]:
        """Return where each weight lies."""
        parts = {name + part for name in sums for part in (_BASE, _UP, _DOWN)}
        found: dict[str, TensorRef | AdapterRef] = {
            name: spot for name, spot in self._spots.items() if name not in parts
        }
        for name, how in sums.items():
            base, up, down = (self._spots[name + part] for part in (_BASE, _UP, _DOWN))
            found[name] = AdapterRef(base, up, down, *how)
        return found

    def _put(self, piece: Sequence[Item]) -> dict[str, TensorRef]:
        """Put a piece, and return where each of it lies."""
        if not piece:
            return {}
        import ray

        arrays = [to_bytes(tensor) for _, tensor, _ in piece]
        ref = ray.put(arrays)
        self._sizes[ref] = sum(array.nbytes for array in arrays)
        return {name: TensorRef(ref, place, print_) for place, (name, _, print_) in enumerate(piece)}

    def _left(self, spots: Mapping[str, TensorRef]) -> list[Item]:
        """Return what is left in pieces that are mostly out of use."""
        found: list[Item] = []
        for ref, names in _by_piece(spots, spots).items():
            if 2 * sum(spots[name].print.nbytes for name in names) < self._sizes[ref]:
                left = WeightsRef(0, {name: spots[name] for name in names})
                found += [(name, tensor, spots[name].print) for name, tensor in left.tensors()]
        return found


class WeightCache:
    """One shelf in the run's own process, for all engines that are sent weights from here. Any thread."""

    def __init__(self) -> None:
        self._store = WeightStore()
        self._lock = threading.Lock()
        self._latest: tuple[Snapshot, WeightsRef] | None = None

    def of(self, snapshot: Snapshot) -> WeightsRef:
        """Return where a snapshot lies; what lies nowhere yet is put there, once."""
        if snapshot.stored is not None:
            # Weights that a step did not change were put there under an earlier version.
            shelved: WeightsRef = snapshot.stored()
            return replace(shelved, version=snapshot.version)
        with self._lock:
            if self._latest is None or self._latest[0] is not snapshot:
                named = (snapshot.parts or snapshot.tensors)()
                self._latest = snapshot, self._store.put(snapshot.version, named)
            return self._latest[1]

    def sending(self, sending: Sending | None = None) -> Sending:
        """Return what puts a snapshot there as it is sent, after ``sending``."""

        def send(snapshot: Snapshot) -> Snapshot:
            snapshot = snapshot if sending is None else sending(snapshot)
            return replace(snapshot, stored=lambda: self.of(snapshot))

        return send


def awaited(ref: Any) -> "asyncio.Future[Any]":
    """Return a future of this event loop for what ``ref`` is of. Raises, awaited: ray.exceptions.RayError."""
    return asyncio.wrap_future(ref.future())


def _separate(named: Iterable[tuple[str, Tensor | Adapted]], sums: dict[str, _How]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, a weight with an adapter as its three, and note in ``sums`` what they merge to."""
    for name, weight in named:
        if isinstance(weight, Tensor):
            yield name, weight
            continue
        sums[name] = weight.scale, weight.is_transposed, fingerprint(merged(weight))
        yield from ((name + _BASE, weight.base), (name + _UP, weight.up), (name + _DOWN, weight.down))


def _by_piece(spots: Mapping[str, TensorRef | AdapterRef], names: Iterable[str]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault(_first(spots[name]).ref, []).append(name)
    return found


def _first(spot: TensorRef | AdapterRef) -> TensorRef:
    return spot.base if isinstance(spot, AdapterRef) else spot


def _single(spot: TensorRef | AdapterRef) -> tuple[TensorRef, ...]:
    return (spot.base, spot.up, spot.down) if isinstance(spot, AdapterRef) else (spot,)


def _weight(spot: TensorRef | AdapterRef, pieces: Mapping[Any, Piece]) -> Tensor:
    tensors = [from_bytes(pieces[one.ref][one.place], one.print) for one in _single(spot)]
    if isinstance(spot, TensorRef):
        return tensors[0]
    base, up, down = tensors
    return merged(Adapted(base, up, down, spot.scale, spot.is_transposed))
