"""What a round and its batch say about themselves."""

import statistics
from collections.abc import Sequence

import torch

from gnomon.metrics import Last, Max, Mean, Measure, Metrics, Sum
from gnomon.rollouts.measure_turns import measure_turns
from gnomon.rollouts.stream import Round
from gnomon.types import Group, Rollout


def measure_round(finished: Round, version: int) -> Metrics:
    """Return ``rollout/*``, ``stream/*`` and ``tokens/generated`` of everything that was generated, kept or not.

    version: of the weights about to be trained; staleness is counted in steps from the oldest token of a rollout.
    """
    groups = finished.generated
    several = [group for group in groups if len(group.rollouts) > 1]
    rollouts = rollouts_of(groups)
    graded = [r.grade.reward for r in rollouts if r.grade.reward is not None]
    count = len(rollouts)
    stale = [version - r.oldest_version for r in rollouts_of(finished.groups)]
    measures: dict[str, Measure] = {
        "rollout/reward_mean": Mean(sum(graded), len(graded)),
        "rollout/reward_std": Mean(statistics.pstdev(graded) if graded else 0.0, 1),
        "rollout/length_tokens_mean": Mean(sum(len(r.response) for r in rollouts), count),
        "rollout/length_tokens_max": Max(max((len(r.response) for r in rollouts), default=0)),
        "rollout/truncated_fraction": Mean(sum(r.is_truncated for r in rollouts), count),
        "rollout/error_fraction": Mean(sum(r.grade.error is not None for r in rollouts), count),
        "rollout/degenerate_group_fraction": Mean(sum(g.is_degenerate for g in several), len(several)),
        "rollout/all_equal_best_fraction": Mean(sum(_is_all(g, 1.0) for g in groups), len(groups)),
        "rollout/all_equal_zero_fraction": Mean(sum(_is_all(g, 0.0) for g in groups), len(groups)),
        "rollout/discarded_groups": Sum(len(finished.dropped)),
        "stream/staleness_steps_mean": Mean(sum(stale), len(stale)),
        "stream/staleness_steps_max": Max(max(stale, default=0)),
        "tokens/generated": Sum(tokens_of(rollouts)),
    }
    for name in sorted({name for r in rollouts for name in r.grade.parts}):
        parts = [r.grade.parts[name] for r in rollouts if name in r.grade.parts]
        measures[f"reward/{name}_mean"] = Mean(sum(parts), len(parts))
    return Metrics.of(measures) + measure_stream(finished) + measure_turns(rollouts)


def measure_stream(finished: Round) -> Metrics:
    """Return how long the step waited, what stays behind, and the rollouts that came to nothing, each with one cause.

    stream/refused_rollouts: by the filter. surplus: finished too late for a place. distrusted: removed by admission.
    stale: withdrawn unfinished. failed: in a group that is trained on, but without a reward. A group's cause goes
    before that of its rollouts, so with the trained ones they are all that were asked and are no longer pending.
    """
    counts = {name: sum(len(g.rollouts) for g in groups) for name, groups in untrained(finished).items()}
    counts |= {"stale": finished.stale, "failed": len(failed(finished))}
    measures: dict[str, Measure] = {f"stream/{name}_rollouts": Sum(count) for name, count in counts.items()}
    measures |= {
        "time/wait_seconds": Mean(finished.wait_seconds, 1),
        "stream/in_flight_groups": Last(finished.in_flight),
        "stream/finished_groups": Last(finished.finished),
        "stream/steps_ahead": Last(finished.ahead),
    }
    return Metrics.of(measures)


def untrained(finished: Round) -> dict[str, tuple[Group, ...]]:
    """Return the groups that were finished and are not trained on, by cause."""
    return {"refused": finished.dropped, "surplus": finished.surplus, "distrusted": finished.distrusted}


def failed(finished: Round) -> list[Rollout]:
    """Return the rollouts of trained groups that have no reward."""
    return [r for r in rollouts_of(finished.groups) if r.grade.error is not None]


def tokens_of(rollouts: Sequence[Rollout]) -> int:
    """Return how many tokens the policy chose."""
    return sum(sum(r.mask) for r in rollouts)


def rollouts_of(groups: Sequence[Group]) -> list[Rollout]:
    """Return the rollouts of all groups, in order."""
    return [r for g in groups for r in g.rollouts]


def _is_all(group: Group, value: float) -> bool:
    return bool(group.rewards) and all(reward == value for reward in group.rewards)


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far, plus what a GPU held at most."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return resident + (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
