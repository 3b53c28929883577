"""Which experts every position of every row that is being decoded went to, piece by piece."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Trace:
    """A piece Int16[n L K] for each forward pass that a row took part in; None where nothing was recorded.

    Rows are in slots as in `Decoder`.
    """

    def __init__(self) -> None:
        self._rows: list[list[Tensor | None]] = []

    def join(self, rows: int) -> None:
        """Append rows that have not been through the model."""
        self._rows += [[] for _ in range(rows)]

    def extend(self, pieces: Sequence[Tensor | None] | Tensor | None, first: int = 0) -> None:
        """Add a piece to each row from slot ``first`` on, in slot order; None adds nothing known to any."""
        rows = self._rows[first:]
        for row, piece in zip(rows, [None] * len(rows) if pieces is None else pieces, strict=True):
            row.append(piece)

    def is_new(self, slot: int) -> bool:
        """Whether the row has not been through the model."""
        return not self._rows[slot]

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""
        self._rows[slot] = self._rows[-1]
        self._rows.pop()

    def of(self, slot: int) -> Tensor | None:
        """Return all of a row's pieces as one, on the CPU; None when one is not known."""
        pieces = [piece for piece in self._rows[slot] if piece is not None]
        return torch.cat(pieces).cpu() if pieces and len(pieces) == len(self._rows[slot]) else None
