"""What conversations say about themselves."""

from collections.abc import Sequence
from typing import get_args

from gnomon.metrics import Max, Mean, Measure, Metrics
from gnomon.types import EndedBy, Rollout


def measure_turns(rollouts: Sequence[Rollout]) -> Metrics:
    """Return ``turns/mean``, ``turns/max``, ``turns/reply_tokens_mean`` and ``turns/ended_by_*_fraction``.

    The fractions are of all conversations and add up to 1 (`types.Ending` says what each cause is). Nothing without
    conversations.
    """
    endings = [r.ending for r in rollouts if r.ending is not None]
    if not endings:
        return Metrics()
    count = len(endings)
    replied = sum(len(r.mask) - sum(r.mask) for r in rollouts if r.ending is not None)
    measures: dict[str, Measure] = {
        "turns/mean": Mean(sum(e.turns for e in endings), count),
        "turns/max": Max(max(e.turns for e in endings)),
        "turns/reply_tokens_mean": Mean(replied, count),
    }
    for by in get_args(EndedBy):
        measures[f"turns/ended_by_{by}_fraction"] = Mean(sum(e.by == by for e in endings), count)
    return Metrics.of(measures)
