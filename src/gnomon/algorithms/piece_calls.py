"""Calls of pieces in training: what one of a user's own returns, raises and changes is looked at each time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

from gnomon.algorithms.protocols import LossInputs
from gnomon.algorithms.user_pieces import FunctionPiece, piece_name
from gnomon.core.errors import GnomonError, LearnerError
from gnomon.core.optional import Tensor, torch
from gnomon.core.tables import packaged_toml
from gnomon.core.types import Batch
from gnomon.core.user_code import Misbehaved, sharing_nothing

_WITH_METRICS = ("Surrogate", "Correction", "Regularizer")


@dataclass(frozen=True)
class ArrayForm:
    """A protocol in one line, for messages and docs/pieces.md.

    Attributes:
        parts: What a piece must have beside a call.
    """

    line: str
    parts: tuple[str, ...] = ()

    def lacks(self, piece: Any) -> list[str]:
        """Return what ``piece`` does not have of it. A property that raises is had; it is tried later."""
        lacks = [name for name in self.parts if name not in dir(piece)]
        return lacks if callable(piece) and not isinstance(piece, type) else [*lacks, "__call__"]


FORMS: Mapping[str, ArrayForm] = {
    name: ArrayForm(form["line"], tuple(form.get("parts", ())))
    for name, form in packaged_toml("gnomon.algorithms", "protocols.toml").items()
}


def ask(slot: str, piece: Any, like: Tensor, *given: Any) -> Any:
    """Return what a piece returns for ``given``. A piece of a user's own was tried, but on one batch.

    Args:
        slot: Its protocol.
        like: Float[B T] of the rows that it is asked about, with a gradient where a loss has one.

    Raises:
        LearnerError: A piece that is not gnomon's, or has a part that is not, raises, returns something else than its
            protocol's tensor, or changes what it is given or what all code shares. The message has the protocol's line.
    """
    # gnomon's own pieces are tested by the laws, and pay nothing here.
    if not holds_own(piece):
        return piece(*given)
    # torch counts in-place changes of a tensor in `_version`, so no copy has to be compared.
    before = _versions(given)
    try:
        with sharing_nothing("a call"):
            found = piece(*given)
        wrong = _fault(slot, found, like)
    except Misbehaved as error:
        wrong = str(error).removeprefix("a call ")
    except (GnomonError, KeyboardInterrupt, SystemExit, MemoryError, torch.OutOfMemoryError):
        # Errors with a message of their own, and those that are not the piece's fault.
        raise
    except BaseException as error:
        raise LearnerError(_said(slot, piece, f"raised {cause_of(error)}")) from error
    if wrong is None and (changed := [name for name, now in _versions(given).items() if now != before[name]]):
        wrong = f"changed {changed[0]} in place"
    if wrong is not None:
        raise LearnerError(_said(slot, piece, wrong))
    return found


def _said(slot: str, piece: Any, wrong: str) -> str:
    return f"algorithm: {said_of(piece)} {wrong}; {article(slot)} is `{FORMS[slot].line}`"


def _fault(slot: str, found: Any, like: Tensor) -> str | None:
    """Return how what a piece returned is not its protocol's; None where it is."""
    if slot in (*_WITH_METRICS, "Advantage"):
        if not isinstance(found, tuple) or len(found) != 2:
            return f"returned {type(found).__name__}, and not two values"
        found = found[0]
    if not isinstance(found, Tensor):
        return f"returned {type(found).__name__} for {list(like.shape)}"
    if found.shape != like.shape or found.layout != torch.strided or found.device != like.device:
        kind = str(found.layout).removeprefix("torch.")
        return f"returned a {kind} tensor of shape {list(found.shape)} on {found.device} for {list(like.shape)}"
    if slot in ("Surrogate", "Regularizer"):
        if found.dtype not in (torch.float32, torch.float64):
            return f"returned {str(found.dtype).removeprefix('torch.')}"
        if like.requires_grad and torch.is_grad_enabled() and not found.requires_grad:
            return "returned numbers without a gradient"
    return None


def _versions(given: tuple[Any, ...]) -> dict[str, int]:
    """Return how often each tensor was changed in place."""
    # Tensors of inference mode have no version counter, and refuse changes themselves.
    return {name: 0 if found.is_inference() else found._version for name, found in tensors_of(given)}


def is_own(piece: Any) -> bool:
    """Whether a piece is not gnomon's."""
    return isinstance(piece, FunctionPiece) or not type(piece).__module__.startswith("gnomon.")


def holds_own(piece: Any) -> bool:
    """Whether a piece, or a part of it, is not gnomon's."""
    if isinstance(piece, tuple):
        return any(map(holds_own, piece))
    if not is_dataclass(piece):
        return callable(piece) and is_own(piece)
    return is_own(piece) or any(holds_own(getattr(piece, part.name)) for part in fields(piece))


def tensors_of(value: Any, name: str = "its tensor") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in what a piece is given or returns, with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for inner in value:
            yield from tensors_of(inner, name)
    elif isinstance(value, Batch | LossInputs):
        for part in fields(value):
            yield from tensors_of(getattr(value, part.name), f"{type(value).__name__}.{part.name}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_of(inner, f"{name}[{key!r}]")


def cause_of(error: BaseException) -> str:
    """Return type, message and the place where it was raised."""
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(last.filename).name}:{last.lineno})"


def said_of(piece: Any) -> str:
    """Return what a piece is called in messages."""
    if isinstance(piece, FunctionPiece) and callable(piece.function):
        return f"`{piece.name}`"
    return f"`{piece_name(piece)}`"


def article(name: str) -> str:
    """Return the name with its article.

    >>> article("Advantage"), article("RatioBound")
    ('an Advantage', 'a RatioBound')
    """
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"
