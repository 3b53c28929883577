"""Metrics of a whole prepared batch: its advantages, its lambdas and the critic's values."""

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.protocols import Advantage, parts_of
from gnomon.algorithms.returns import Gae, last_trained
from gnomon.algorithms.segments import Segments
from gnomon.core.metrics import Last, Max, Mean, Metrics
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch

# Thresholds of SPO (arXiv 2509.13232), in rewards.
NEAR_ZERO = 0.02
NEGLIGIBLE = 1e-4


def measure_values(batch: Batch) -> Metrics:
    """Return how well a critic that had not seen the prepared ``batch`` foretold it; nothing without values.

    critic/explained_variance: 1 - Var(target - V) / Var(target) over trained tokens: 1 is perfect, 0 a constant, below
    0 worse than that; 0 when every target is the same. critic/value_first_mean, critic/value_last_mean: before the
    first and the last trained token.
    """
    if batch.values is None or batch.returns is None or not bool(batch.mask.any()):
        return Metrics()
    mask = batch.mask
    values, targets = batch.values[mask].double(), batch.returns[mask].double()
    spread = float(targets.var(correction=0))
    explained = 1 - float((targets - values).var(correction=0)) / spread if spread > 0 else 0.0
    rows = mask.any(1).nonzero().squeeze(1)
    # argmax returns the first of equal values.
    first = mask.int().argmax(1)[rows]
    last = last_trained(mask)[rows]

    def mean(numbers: Tensor) -> Mean:
        return Mean(float(numbers.double().sum()), len(numbers))

    return Metrics.of(
        {
            "critic/explained_variance": Last(explained),
            "critic/value_mean": mean(values),
            "critic/return_mean": mean(targets),
            "critic/value_first_mean": mean(batch.values[rows, first]),
            "critic/value_last_mean": mean(batch.values[rows, last]),
        }
    )


def measure_lambdas(advantage: Advantage, batch: Batch) -> Metrics:
    """Return the lambdas that `Gae` gives the policy, and how often 0 is the least that it may give."""
    rows = batch.mask.any(1)
    inside = next((part for _, part in parts_of(advantage) if isinstance(part, Gae)), None)
    if inside is None or not bool(rows.any()):
        return Metrics()
    lambdas = inside.lambdas(batch)[rows]
    count = len(lambdas)
    return Metrics.of(
        {
            "advantage/lambda_mean": Mean(float(lambdas.sum()), count),
            "advantage/lambda_min": Last(float(lambdas.min())),
            "advantage/lambda_max": Max(float(lambdas.max())),
            "advantage/lambda_floored_fraction": Mean(float((lambdas == 0).sum()), count),
        }
    )


def measure_advantages(algorithm: Algorithm, batch: Batch) -> Metrics:
    """Return how much the prepared ``batch`` has to teach, counted in graded responses with trained tokens.

    advantage/std: of r - baseline, before any scale, population. advantage/near_zero_fraction and
    advantage/negligible_fraction: responses with |r - baseline| <= 0.02 and <= 0.0001 on every token.
    advantage/exact_zero_fraction: responses whose final advantages are all exactly 0, so that they train
    nothing; for group baselines these are the degenerate groups. advantage/taught_fraction: responses of which the
    reference policy was asked with a hint; the others had no answer of the group to be shown.
    Source: SPO, arXiv 2509.13232 (the two thresholds).
    """
    batch = Segments.of(batch).whole(batch)
    rows = batch.is_graded & batch.mask.any(1)
    if batch.advantages is None or not bool(rows.any()):
        return Metrics()
    # Before any scale: a normalized advantage has deviation 1 whatever the rewards were.
    centered = algorithm.advantage.center(batch)
    values = centered[batch.mask & rows[:, None]].double()
    # Responses count once each, however long they are.
    per_row = (centered.sum(1) / batch.mask.sum(1).clamp(min=1))[rows].double()
    largest = centered.abs().amax(1)[rows]
    final = batch.advantages.abs().amax(1)[rows]
    count = int(rows.sum())

    def share(condition: Tensor) -> Mean:
        return Mean(float(condition.sum()), count)

    taught = {} if batch.hint_lengths is None else {"advantage/taught_fraction": share(batch.is_taught[rows])}
    return Metrics.of(
        taught
        | {
            "advantage/mean": Mean(float(per_row.sum()), count),
            "advantage/std": Last(float(per_row.std(correction=0))),
            "advantage/abs_max": Max(float(values.abs().max())),
            "advantage/near_zero_fraction": share(largest <= NEAR_ZERO),
            "advantage/negligible_fraction": share(largest <= NEGLIGIBLE),
            "advantage/exact_zero_fraction": share(torch.eq(final, 0)),
        }
    ) + measure_lambdas(algorithm.advantage, batch)
