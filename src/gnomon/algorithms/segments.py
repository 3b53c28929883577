"""Rollouts in several rows: the segments of one rollout end to end in one row, and back.

A conversation may be trained in segments, each with a prompt of its own, when what the policy saw changed on the way
(a summary in place of the history, thoughts left out). What an algorithm says of a rollout (its baseline, its length,
its ratio) is then said of the row of all of its tokens, so a conversation has the same loss and gradient however it is
cut.
"""

from dataclasses import dataclass

from gnomon.core.optional import Tensor, torch
from gnomon.core.types import TOKEN_FIELDS, Batch


@dataclass(frozen=True)
class Segments:
    """Where the tokens of B segments lie in the rows of R rollouts.

    Attributes:
        rollout (Int[B]): Row of each segment's rollout, from 0. None: every row is a rollout, and nothing moves.
        place (Int[B T]): Position of each token in the R U positions of all rollouts, -1 for padding.
        width: U, the most tokens of a rollout.
    """

    rollout: Tensor | None = None
    place: Tensor | None = None
    width: int = 0

    @classmethod
    def of(cls, batch: Batch) -> "Segments":
        """Return the segments of ``batch``; rows of one rollout follow each other as they do in the batch."""
        if batch.rollout_id is None:
            return cls()
        # Ids may be any numbers; rows of rollouts count from 0.
        rollout = torch.unique(batch.rollout_id, return_inverse=True)[1]
        lengths, order = batch.lengths - batch.prompt_lengths, torch.argsort(rollout, stable=True)
        # Offset of a segment in its rollout: tokens of the segments before it, in the order of the batch.
        ends = lengths[order].cumsum(0)
        total = torch.zeros_like(lengths).index_add(0, rollout, lengths)
        before = torch.empty_like(lengths).index_copy(0, order, ends - lengths[order])
        offset = before - (total.cumsum(0) - total)[rollout]
        width = max(int(total.max()), 1) if len(total) else 1
        column = torch.arange(batch.width, device=lengths.device)
        # Flat position in the (R, U) matrix.
        place = rollout[:, None] * width + offset[:, None] + column
        return cls(rollout, torch.where(column < lengths[:, None], place, -1), width)

    @property
    def count(self) -> int:
        """R, the number of rollouts."""
        return 0 if self.rollout is None or not len(self.rollout) else int(self.rollout.max()) + 1

    def join(self, tensor: Tensor) -> Tensor:
        """Return [R U ...], the rollouts' rows of ``tensor`` [B T ...], with its gradient; zeros after their ends."""
        if self.place is None:
            return tensor
        inside, rest = self.place >= 0, tensor.shape[2:]
        whole = tensor.new_zeros((self.count * self.width, *rest))
        # index_put keeps the gradient, which runs back to each segment's row.
        return whole.index_put((self.place[inside],), tensor[inside]).reshape(self.count, self.width, *rest)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return [B T], the segments' rows of ``tensor`` [R U]; zeros for padding."""
        if self.place is None:
            return tensor
        return torch.where(self.place >= 0, tensor.flatten()[self.place.clamp(min=0)], torch.zeros_like(tensor[:1, :1]))

    def any(self, rows: Tensor) -> Tensor:
        """Return Bool[B]: whether ``rows`` Bool[B] holds for any segment of the row's rollout."""
        if self.rollout is None:
            return rows
        counts = torch.zeros(self.count, device=rows.device).index_add(0, self.rollout, rows.float())
        return (counts > 0)[self.rollout]

    def whole(self, batch: Batch) -> Batch:
        """Return the batch of R rollouts. What it holds for a row is that of the first segment.

        A rollout is truncated where a segment is; the value after its last token is the last segment's, and its weights
        are as old as the oldest. It has no tokens to be read, only their number.
        """
        if self.rollout is None:
            return batch
        rows = torch.arange(len(batch), device=self.rollout.device)
        # Row of the first and of the last segment of each rollout.
        first = torch.full((self.count,), len(batch), device=rows.device).scatter_reduce(0, self.rollout, rows, "amin")
        last = torch.zeros_like(first).scatter_reduce(0, self.rollout, rows, "amax")
        fields = {name: value for name in TOKEN_FIELDS if (value := getattr(batch, name)) is not None}
        found = batch.rows(first)
        total = torch.zeros_like(first).index_add(0, self.rollout, batch.lengths - batch.prompt_lengths)
        oldest = batch.version.max().expand(self.count).scatter_reduce(0, self.rollout, batch.version, "amin")
        return found.with_fields(
            **{name: self.join(value) for name, value in fields.items()},
            own_weights={name: self.join(value) for name, value in batch.own_weights.items()},
            tokens=self.place.new_zeros(self.count, self.width) if self.place is not None else found.tokens,
            prompt_lengths=torch.zeros_like(total),
            lengths=total,
            is_truncated=self.any(batch.is_truncated)[first],
            version=oldest,
            bootstrap=None if batch.bootstrap is None else batch.bootstrap[last],
            # Experts belong to rows that are computed; a joined row never is.
            routing=None,
            free_routing=None,
            rollout_id=None,
        )
