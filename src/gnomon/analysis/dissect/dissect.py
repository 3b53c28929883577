"""Dissect one recorded batch: an algorithm's advantages, loss and gradient, without a model and without an update."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.algorithms import Algorithm, resolve
from gnomon.algorithms.ratios import masked
from gnomon.algorithms.segments import Segments
from gnomon.algorithms.validate import uses_tracker
from gnomon.core.errors import ConfigError
from gnomon.core.types import Batch
from gnomon.records.batches import RecordedBatch, read_batch

_REMEDY: Mapping[str, str] = {
    "reference": "log-probabilities of the frozen reference, or set the coefficient that reads them to 0",
    "sharpened": "log-probabilities of the proximal policy at half the temperature",
    "values": "the critic's value before each token",
    "component_rewards": "each reward by itself, an object of names and numbers",
    "turn": "which answer of the conversation each token belongs to, from 0",
    "state": "the state that each token's answer was given in, a number or a text",
    "role": "who the policy was, a text",
    "teacher": "log-probabilities of the teacher",
    "baseline": "the prompt's tracked value (a-star-po: V*), read before this batch",
}


@dataclass(frozen=True)
class Dissection:
    """An algorithm's computation on one optimizer step. Matrices are Float64[B T] and 0 at masked positions.

    Attributes:
        gradient: d loss / d current.
        ratio: To the algorithm's anchor, per token or sequence.
        push: Factor of the ratio after all bounds: d policy loss / d current is -weight * push * advantage. Without a
            bound the push is the ratio.
        loss: With regularizers, without the value loss.
        policy_loss: Without either.
        value_loss: Of the recorded values against the algorithm's targets; None without a critic.
        trust: One text per row, one letter per position: ``.`` the push is the ratio, ``x`` no push, ``-`` less, ``+``
            more, ``0`` advantage 0, space not trained.
        estimates_entropy: Whether a term reads the entropy. A batch gives an estimate: -log current with the slope
            -(1 + log current), unbiased for samples of the current policy.
        statistics: By name. ``clipped_fraction`` counts trained tokens for which a bound strictly won,
            ``out_of_band_fraction`` tokens outside the bound whatever the sign of their advantage, ``capped_fraction``
            tokens with a bounded weight; ``ess_fraction`` is the effective sample size of current / behavior.
    """

    algorithm: Algorithm
    advantages: Tensor
    gradient: Tensor
    ratio: Tensor
    push: Tensor
    loss: float
    policy_loss: float
    value_loss: float | None
    trust: tuple[str, ...]
    estimates_entropy: bool
    statistics: Mapping[str, float]


def dissect(
    batch: str | Path | RecordedBatch | Batch, algorithm: Algorithm | str, current: Tensor | None = None
) -> tuple[float, Tensor, Dissection]:
    """Compute an algorithm's loss and gradient on one step.

    Args:
        batch: A file as runs record it, a `RecordedBatch`, or a batch of tensors.
        algorithm: An algorithm or its name.
        current: Log-probabilities Float[B T] at which the loss is computed; by default the recorded ones, or for
            tensors ``proximal`` or ``behavior``.

    Returns:
        The loss, the gradient d loss / d current Float64[B T], and the full dissection.

    Raises:
        DatasetError: If the file is not a batch.
        ConfigError: If an argument is something else, or the batch lacks a field that the algorithm needs.

    >>> import gnomon.testing
    >>> batch = gnomon.testing.make_batch([1.0, 0.0], [[1, 1], [1]])
    >>> loss, gradient, report = dissect(batch, "dr-grpo")
    >>> round(loss, 6), (gradient * 6000).round(decimals=6).tolist(), report.trust
    (-8.3e-05, [[-0.5, -0.5], [0.5, 0.0]], ('..', '. '))
    """
    if isinstance(batch, str | Path):
        batch = read_batch(Path(batch))
    if isinstance(batch, RecordedBatch):
        current = batch.current if current is None else current
        batch = batch.batch
    if not isinstance(batch, Batch):
        raise ConfigError(
            f"batch is {type(batch).__name__}; give a file that a run recorded (RUN/batches/step-3.json), a "
            "RecordedBatch or a Batch"
        )
    if current is None:
        current = batch.behavior if batch.proximal is None else batch.proximal
    if not isinstance(current, Tensor):
        raise ConfigError(f"current is {type(current).__name__}; give a tensor Float[B T], or leave it out")
    if current.shape != batch.mask.shape:
        raise ConfigError(f"current has shape {tuple(current.shape)}, and the batch is {tuple(batch.mask.shape)}")
    chosen = algorithm if isinstance(algorithm, Algorithm) else resolve(algorithm)
    found = decompose(chosen, batch, current)
    return found.loss, found.gradient, found


def decompose(algorithm: Algorithm, batch: Batch, current: Tensor) -> Dissection:
    """Compute the algorithm on the whole batch as one optimizer step.

    Args:
        algorithm: The algorithm.
        batch: The batch.
        current: Log-probabilities Float[B T] at which the loss is computed.

    Raises:
        ConfigError: If the batch lacks a field that the algorithm needs.
    """
    # In float64 the gradient can be compared with formulas to ten digits, and a bound that won is told from rounding.
    batch = _in_float64(batch)
    _check_needs(algorithm, batch)
    # A rollout may be cut into several rows. Losses are defined on whole
    # rollouts, so rows are joined, computed, and cut again at the end.
    segments, rows = Segments.of(batch), batch.mask
    batch, current = segments.whole(batch), segments.join(current)
    weighed = algorithm.weigh(algorithm.prepare(batch))
    assert weighed.weights is not None, "weigh gives them"
    # The log-probabilities themselves are the leaf, in the place of a model's
    # weights: d loss / d log-probability is what an algorithm adds to any model.
    mask, leaf = weighed.mask, current.detach().double().requires_grad_()
    entropy = _estimated_entropy(masked(leaf, mask))
    # Whole-step numbers such as an effective sample size come before the loss that reads them, as in training.
    statistics = algorithm.statistics(leaf, weighed, entropy)
    loss = algorithm.loss(leaf, entropy, weighed, statistics)
    view = algorithm.view(leaf, entropy, weighed, statistics)
    per_token = algorithm.surrogate(view)[0]
    if algorithm.correction is not None:
        per_token = algorithm.correction(view)[0] * per_token
    # The policy's part alone, without regularizers, so that the push is what the ratio's bound did.
    policy = _slope((weighed.weights * masked(per_token, mask)).sum(), leaf)
    gradient, advantages = _slope(loss.total, leaf), masked(view.advantages, mask)
    # d policy loss / d current = -weight * push * advantage;
    # tokens without advantage or weight have no push to speak of.
    pushed = weighed.weights * advantages
    push = masked(-policy / pushed, pushed != 0)
    ratio = masked(view.log_ratio.detach().exp(), mask)
    measured = {name.removeprefix("loss/"): value for name, value in loss.metrics.values().items()}
    # Renamed, because this is an estimate from one token a position and training measures whole distributions.
    measured["entropy_estimate_nats"] = measured.pop("entropy_nats", 0.0)
    measured = _complete(measured, gradient, (push == 0) & (pushed != 0), mask)
    gradient, advantages, push, ratio = (segments.cut(matrix) for matrix in (gradient, advantages, push, ratio))
    return Dissection(
        algorithm=algorithm,
        advantages=advantages,
        gradient=gradient,
        ratio=ratio,
        push=push,
        loss=float(loss.total.detach()),
        policy_loss=loss.parts["policy"],
        value_loss=_value_loss(algorithm, weighed),
        trust=_letters(rows, advantages, push, ratio),
        estimates_entropy=bool(_slope(loss.total, entropy).any()),
        statistics=measured,
    )


def cosines(found: Mapping[str, Dissection]) -> dict[str, dict[str, float]]:
    """Return the cosine between each two gradients by name; nan if one of them is 0."""
    flat = {name: d.gradient.flatten() for name, d in found.items()}
    table: dict[str, dict[str, float]] = {name: {} for name in flat}
    for left, right in itertools.product(flat, flat):
        # Scale first, because the square of a gradient of 1e-200 underflows to 0.
        a, b = _scaled(flat[left]), _scaled(flat[right])
        norms = float(a.norm() * b.norm())
        table[left][right] = max(-1.0, min(1.0, float(a @ b) / norms)) if norms > 0 else math.nan
    return table


def as_row(recorded: RecordedBatch, found: Mapping[str, Dissection]) -> dict[str, Any]:
    """Return the JSON object of `gnomon dissect --json`; numbers that are not finite become null."""
    lengths = [int(n) for n in recorded.batch.lengths - recorded.batch.prompt_lengths]

    def rows(matrix: Tensor) -> list[list[float | None]]:
        return [[_finite(x) for x in row[:length]] for row, length in zip(matrix.tolist(), lengths, strict=True)]

    algorithms = {
        name: {
            "loss": _finite(d.loss),
            "policy_loss": _finite(d.policy_loss),
            "value_loss": None if d.value_loss is None else _finite(d.value_loss),
            "advantages": rows(d.advantages),
            "gradient": rows(d.gradient),
            "trust": [letters[:length] for letters, length in zip(d.trust, lengths, strict=True)],
            "statistics": {key: _finite(value) for key, value in d.statistics.items()},
        }
        for name, d in found.items()
    }
    table = {left: {right: _finite(c) for right, c in row.items()} for left, row in cosines(found).items()}
    return {"algorithms": algorithms, "cosine": table}


def _in_float64(batch: Batch) -> Batch:
    # A batch that records one policy was scored on policy: proximal is behavior.
    there = {"proximal": batch.behavior}
    there |= {name: t for name, t in vars(batch).items() if isinstance(t, Tensor) and t.is_floating_point()}
    return batch.with_fields(**{name: t.double() for name, t in there.items()})


def _check_needs(algorithm: Algorithm, batch: Batch) -> None:
    """Refuse a batch that lacks fields of the algorithm, naming all of them, or has no answers of its kind."""
    # Tensors cannot be asked for their truth; of other fields an empty one counts as missing.
    there = {name for name, value in vars(batch).items() if isinstance(value, Tensor) or value}
    needed: list[str] = [name for name in _REMEDY if name in algorithm.needs - there]
    if uses_tracker(algorithm) and batch.baseline is None:
        needed.append("baseline")
    if needed:
        wanted = "; ".join(f'"{name}", {_REMEDY[name]}' for name in needed)
        raise ConfigError(
            f"algorithm '{algorithm.name}' reads what the batch does not hold. Give each sequence {wanted}. Or leave "
            f"'{algorithm.name}' out"
        )
    name, rewards = f"algorithm '{algorithm.name}'", batch.rewards[batch.is_graded]
    if algorithm.ranks_pairs:
        raise ConfigError(f"{name} teaches a critic alone, and a batch has log-probabilities of a policy; leave it out")
    # Answers of one prompt, where an answer in several rows counts once.
    largest = max(Counter(Segments.of(batch).whole(batch).group.tolist()).values(), default=0)
    if algorithm.samples == "pairs" and largest > 2:
        raise ConfigError(f"{name} compares a chosen answer with a rejected one, and a prompt_id has {largest} answers")
    if algorithm.samples == "labels" and not bool((rewards.abs() == 1).all()):
        raise ConfigError(f"{name} reads labels: give each sequence the reward 1 for a good answer, -1 for a bad one")


def _slope(total: Tensor, leaf: Tensor) -> Tensor:
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (slope,) = torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if slope is None else slope


def _estimated_entropy(current: Tensor) -> Tensor:
    """Return -log current with the slope -(1 + log current); the means of both over samples are those of the entropy.

    A batch knows the log-probability of one token per position. The plain slope of the value, -1, has mean 0 and would
    have no effect.
    """
    now = current.detach()
    return -now - (1 + now) * (current - now)


def _value_loss(algorithm: Algorithm, batch: Batch) -> float | None:
    if algorithm.critic is None or batch.values is None or batch.returns is None:
        return None
    taught = algorithm.valued(batch)
    # The token mean over the whole batch, as the reference computes it.
    weights = taught.mask.double() / max(int(taught.mask.sum()), 1)
    return float(algorithm.critic.loss(batch.values, taught.with_fields(weights=weights))[0])


def _letters(mask: Tensor, advantages: Tensor, push: Tensor, ratio: Tensor) -> tuple[str, ...]:
    # (rows, positions), each a letter; "." stands for a push that is the ratio itself.
    letters = [["."] * mask.shape[1] for _ in range(mask.shape[0])]
    # Later marks win. A push that differs from its ratio only in the tenth digit is rounded, not bounded.
    marks = {
        "-": push < ratio * (1 - 1e-10),
        "+": push > ratio * (1 + 1e-10),
        "x": push == 0,
        "0": advantages == 0,
        " ": ~mask,
    }
    for letter, where in marks.items():
        for row, position in where.nonzero().tolist():
            letters[row][position] = letter
    return tuple("".join(row) for row in letters)


def _complete(measured: Mapping[str, float], gradient: Tensor, stopped: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the pieces' statistics, completed where a user's piece measured nothing."""
    tokens = max(int(mask.sum()), 1)
    # A user's surrogate may measure nothing: then a token that has
    # weight and advantage but no push was stopped by a bound.
    clipped = measured.get("clipped_fraction", float(stopped.sum()) / tokens)
    always = {
        "clipped_fraction": clipped,
        "out_of_band_fraction": measured.get("out_of_band_fraction", clipped),
        "capped_fraction": measured.get("capped_fraction", 0.0),
        "ess_fraction": measured.get("ess_fraction", 1.0),
        "gradient_norm": float(_norm(gradient)),
        "zero_gradient_token_fraction": float(((gradient == 0) & mask).sum()) / tokens,
    }
    return {**always, **{name: value for name, value in measured.items() if name not in always}}


def _norm(gradient: Tensor) -> float:
    largest = float(gradient.abs().max()) if gradient.numel() else 0.0
    # Scaled by its largest number, because squares of tiny or huge gradients leave float64.
    return largest * float(_scaled(gradient).norm()) if 0 < largest < math.inf else largest


def _scaled(gradient: Tensor) -> Tensor:
    largest = float(gradient.abs().max()) if gradient.numel() else 0.0
    return gradient / largest if largest > 0 else gradient


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
