"""What conversations say about themselves."""

from collections import Counter
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


def said_of_failures(rollouts: Sequence[Rollout]) -> str | None:
    """Return in words that more than half of the conversations ended in a reply that failed; None when fewer did.

    A policy may break its tools, and is graded on what it said until then. When most of them break, it is more likely
    that somebody's code is at fault, which no metric of rewards would show.
    """
    endings = [r.ending for r in rollouts if r.ending is not None]
    failed = [e for e in endings if e.by in ("timeout", "flood", "fault")]
    if 2 * len(failed) <= len(endings):
        return None
    cause, _ = Counter(e.cause for e in failed).most_common(1)[0]
    return (
        f"{len(failed)} of {len(endings)} conversations of a step ended in a reply that failed, most often: {cause}; "
        "they are trained on as far as they went. If the environment is at fault and not the answers, stop and mend it"
    )
