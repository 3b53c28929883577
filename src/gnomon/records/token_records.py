"""Per-token records: what a step made of each rollout that it trained on.

What lies in the prepared batch anyway is written for every rollout, so that it costs nothing but the writing; what the
learner has to be asked for, for a few. Numbers are rounded: log-probabilities, entropies and values to 5 decimals,
advantages to 5 digits of the largest of the step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.core.errors import ConfigError
from gnomon.core.types import Batch, Rollout

DECIMALS = 5


@dataclass(frozen=True)
class TokenRecord:
    """What a step made of one rollout. Each list has a number a response token, or is empty where nothing is known.

    Attributes:
        advantages: After `Algorithm.prepare`; empty for a rollout that was not trained on, 0 where a token is masked.
        proximal: Log-probabilities of the learner when the step began, where an algorithm asked for them or the rollout
            was looked at.
        entropy: Of the learner's distribution of the token then, in nats, where it was looked at.
        reference: Log-probabilities of the reference policy or teacher, where an algorithm asked for them.
        values: Of the critic, before each token.
        baseline: The tracked value of the task, read before this visit; None without a tracker.
    """

    advantages: tuple[float, ...] = ()
    proximal: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    baseline: float | None = None
    entropy: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenStats:
    """What the learner said of N rows of a batch when the step began.

    Attributes:
        logprobs: Float[N T].
        entropy: Float[N T].
    """

    rows: tuple[int, ...]
    logprobs: Tensor
    entropy: Tensor


def taught_rows(batch: Batch, rollouts: Sequence[Rollout], seen: TokenStats | None = None) -> Iterator[dict[str, Any]]:
    """Yield the fields of each rollout's line, in order; no field for a rollout that ``batch`` has no row of.

    A row belongs to the rollout with its task id and its tokens, whatever the order of rows.

    Args:
        seen: Of some rows of it. A proximal policy that the algorithm asked for is never replaced by what was seen: it
            may be an average of weights. ``advantages`` is one number where it is the same on every trained token, as
            without a critic it is.

    Raises:
        ConfigError: A row of ``batch`` belongs to none of the rollouts.
    """
    found = _rows_of(batch, rollouts)
    is_trained = batch.mask.any(1).tolist()
    scored = {"proximal": batch.proximal, "reference": batch.reference, "values": batch.values}
    matrices = {name: _rows(m) for name, m in scored.items() if m is not None}
    advantages = None if batch.advantages is None else _advantages(batch.advantages, batch.mask)
    baseline = None if batch.baseline is None else _rows(batch.baseline)
    looked = {} if seen is None else _looked(seen)
    for row, rollout in zip(found, rollouts, strict=True):
        if row is None:
            yield {}
            continue
        length = len(rollout.response)
        fields: dict[str, Any] = {name: _finite(lists[row][:length]) for name, lists in matrices.items()}
        if advantages is not None and is_trained[row]:
            one = advantages[row]
            fields["advantages"] = _finite(one[:length]) if isinstance(one, list) else _finite([one])[0]
        if baseline is not None:
            fields["baseline"] = _finite([baseline[row]])[0]
        if row in looked:
            proximal, entropy = looked[row]
            fields = {"proximal": _finite(proximal[:length])} | fields | {"entropy": _finite(entropy[:length])}
        yield fields


def _rows_of(batch: Batch, rollouts: Sequence[Rollout]) -> list[int | None]:
    """Return the row of each rollout, None where the batch has none."""
    if len(batch.task_ids) != len(batch):
        raise ConfigError("a batch without task ids cannot be recorded beside its rollouts")
    rows: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    pairs = zip(batch.task_ids, batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
    for row, (task_id, tokens, length) in enumerate(pairs):
        rows.setdefault((task_id, tuple(tokens[:length])), []).append(row)
    found: list[int | None] = []
    for rollout in rollouts:
        same = rows.get((rollout.task_id, rollout.prompt + rollout.response))
        found.append(same.pop(0) if same else None)
    strange = [task_id for (task_id, _), left in rows.items() for _ in left]
    if strange:
        raise ConfigError(f"{len(strange)} of {len(batch)} rows belong to no rollout of the step: {strange[:5]}")
    return found


def _looked(seen: TokenStats) -> dict[int, tuple[list[float], list[float]]]:
    pairs = zip(_rows(seen.logprobs), _rows(seen.entropy), strict=True)
    return dict(zip(seen.rows, pairs, strict=True))


def read_taught(row: Mapping[str, Any]) -> TokenRecord:
    """Return what a line says.

    Raises:
        TypeError, ValueError: For fields that `taught_rows` does not write.
    """
    length = len(row["response"])
    said = row.get("advantages", [])
    advantages = said if isinstance(said, list) else [said] * length
    baseline = row.get("baseline")
    if baseline is not None and type(baseline) not in (int, float):
        raise TypeError(f"the field baseline is a {type(baseline).__name__}")
    return TokenRecord(
        advantages=_read("advantages", advantages, length),
        proximal=_read("proximal", row.get("proximal", []), length),
        values=_read("values", row.get("values", []), length),
        baseline=None if baseline is None else float(baseline),
        entropy=_read("entropy", row.get("entropy", []), length),
        reference=_read("reference", row.get("reference", []), length),
    )


def _read(name: str, values: Any, length: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) not in (0, length):
        raise ValueError(f"the field {name} should be a list of {length} numbers")
    if any(value is not None and type(value) not in (int, float) for value in values):
        raise TypeError(f"the field {name} holds what is no number")
    return tuple(math.nan if value is None else float(value) for value in values)


def _advantages(advantages: Tensor, mask: Tensor) -> list[float | list[float]]:
    """Return one number for each row where it is constant, else its list; 0 where masked."""
    known = torch.where(mask, advantages.detach().double(), 0.0)
    finite = known[known.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    decimals = DECIMALS - 1 - (math.floor(math.log10(largest)) if largest > 0 else 0)
    rounded = torch.round(known, decimals=max(0, min(decimals, 15)))
    least = torch.where(mask, rounded, math.inf).amin(1).tolist()
    most = torch.where(mask, rounded, -math.inf).amax(1).tolist()
    alike = [low == high for low, high in zip(least, most, strict=True)]
    return [low if same else row for low, same, row in zip(least, alike, rounded.tolist(), strict=True)]


def _rows(matrix: Tensor) -> list[Any]:
    rows: list[Any] = torch.round(matrix.detach().double(), decimals=DECIMALS).tolist()
    return rows


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
