"""Groups to a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Batch, Group, Rollout


def collate(groups: Sequence[Group], temperature: float, baseline: Callable[[str], float] | None = None) -> Batch:
    """Return the groups' rollouts as one `Batch`, group after group.

    A rollout with an error keeps its row, with an empty mask: it is counted, enters no statistic and no loss.

    Args:
        baseline: Task id to tracked value, read before these groups are observed; None without a tracker.

    Raises:
        ConfigError: If there is no rollout at all.
        EngineError: If some answers have their likeliest tokens and others not.
    """
    pairs = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    if not pairs:
        raise ConfigError("there is nothing to collate: no group has a rollout")
    rollouts = [rollout for _, rollout in pairs]
    width = max(len(r.response) for r in rollouts)
    graded = [r.grade.reward is not None for r in rollouts]
    top_tokens, top_logprobs = _top(rollouts, width)
    return Batch(
        tokens=_pad([r.prompt + r.response for r in rollouts], torch.long),
        prompt_lengths=torch.tensor([len(r.prompt) for r in rollouts]),
        lengths=torch.tensor([len(r.prompt) + len(r.response) for r in rollouts]),
        mask=_pad([_trained(r) for r in rollouts], torch.bool, width),
        rewards=torch.tensor([r.grade.reward or 0.0 for r in rollouts], dtype=torch.float64),
        is_graded=torch.tensor(graded),
        is_truncated=torch.tensor([r.is_truncated for r in rollouts]),
        group=torch.tensor([number for number, _ in pairs]),
        version=torch.tensor([r.oldest_version for r in rollouts]),
        behavior=_pad([r.logprobs for r in rollouts], torch.float32, width),
        full_behavior=_pad([r.full_logprobs for r in rollouts], torch.float32, width),
        temperature=temperature,
        task_ids=tuple(r.task_id for r in rollouts),
        baseline=None
        if baseline is None
        else torch.tensor([baseline(r.task_id) for r in rollouts], dtype=torch.float64),
        routing=_routing(rollouts),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
    )


def _top(rollouts: Sequence[Rollout], width: int) -> tuple[Tensor | None, Tensor | None]:
    """Return Int32[B T N] and Float32[B T N], 0 for padding; None when no rollout has any."""
    known = [(row, r.top) for row, r in enumerate(rollouts) if r.top is not None]
    if not known:
        return None, None
    lacking = sum(r.top is None and any(_trained(r)) for r in rollouts)
    if lacking:
        raise EngineError(
            f"{lacking} of {len(rollouts)} answers came without the likeliest tokens that were asked for "
            "(Sampling.top_logprobs, Completion.top)"
        )
    padded = [part.new_zeros((len(rollouts), width, part.shape[1])) for part in known[0][1]]
    for row, top in known:
        for merged, part in zip(padded, top, strict=True):
            merged[row, : len(part)] = part
    return padded[0], padded[1]


def _routing(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Return Int16[B S L K], -1 for padding and for rollouts without routing; None when none has any."""
    known = [(row, r.routing) for row, r in enumerate(rollouts) if r.routing is not None]
    if not known:
        return None
    width = max(len(r.prompt) + len(r.response) for r in rollouts)
    padded = torch.full((len(rollouts), width, *known[0][1].shape[1:]), -1, dtype=torch.int16)
    for row, routing in known:
        padded[row, : len(routing)] = routing
    return padded


def _trained(rollout: Rollout) -> tuple[bool, ...]:
    return rollout.mask if rollout.grade.error is None else (False,) * len(rollout.mask)


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, width: int | None = None) -> Tensor:
    wide = max(len(row) for row in rows) if width is None else width
    padded = torch.zeros(len(rows), wide, dtype=dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
