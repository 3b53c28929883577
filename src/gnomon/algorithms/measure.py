"""What is measured on the way: fractions of trained tokens, ratios, and the advantages of a whole batch."""

import torch
from torch import Tensor

from gnomon.algorithms.algorithm import Algorithm, LossView
from gnomon.metrics import Last, Max, Mean, Metrics
from gnomon.types import Batch

NEAR_ZERO = 0.02
NEGLIGIBLE = 1e-4


def ratio_metrics(view: LossView) -> Metrics:
    """Return the largest ratio of a cut; nothing when no token is trained."""
    if not bool(view.batch.mask.any()):
        return Metrics()
    return Metrics.of({"loss/ratio_max": Max(float(view.log_ratio.detach()[view.batch.mask].max().exp()))})


def measure_advantages(algorithm: Algorithm, batch: Batch) -> Metrics:
    """Return how much the prepared ``batch`` has to teach, counted in graded responses with trained tokens.

    advantage/std: of r - baseline, before any scale, population. advantage/near_zero_fraction and
    advantage/negligible_fraction: responses with |r - baseline| <= 0.02 and <= 0.0001 on every token.
    advantage/exact_zero_fraction: responses whose final advantages are all exactly 0, so that they train
    nothing; for group baselines these are the degenerate groups.
    Source: SPO, arXiv 2509.13232 (the two thresholds).
    """
    rows = batch.is_graded & batch.mask.any(1)
    if batch.advantages is None or not bool(rows.any()):
        return Metrics()
    centered = algorithm.advantage.center(batch)
    values = centered[batch.mask & rows[:, None]].double()
    per_row = (centered.sum(1) / batch.mask.sum(1).clamp(min=1))[rows].double()
    largest = centered.abs().amax(1)[rows]
    final = batch.advantages.abs().amax(1)[rows]
    count = int(rows.sum())

    def share(condition: Tensor) -> Mean:
        return Mean(float(condition.sum()), count)

    return Metrics.of(
        {
            "advantage/mean": Mean(float(per_row.sum()), count),
            "advantage/std": Last(float(per_row.std(correction=0))),
            "advantage/abs_max": Max(float(values.abs().max())),
            "advantage/near_zero_fraction": share(largest <= NEAR_ZERO),
            "advantage/negligible_fraction": share(largest <= NEGLIGIBLE),
            "advantage/exact_zero_fraction": share(torch.eq(final, 0)),
        }
    )
