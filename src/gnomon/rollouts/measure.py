"""What a round and its batch say about themselves."""

import statistics
from collections.abc import Sequence

import torch

from gnomon.metrics import Max, Mean, Measure, Metrics, Sum
from gnomon.rollouts.stream import Round
from gnomon.types import Batch, Group, Rollout


def measure_round(finished: Round, version: int) -> Metrics:
    """Return ``rollout/*``, ``stream/*`` and ``tokens/generated`` of everything that was generated, kept or not.

    version: of the weights about to be trained; staleness is counted in steps from the oldest token of a rollout.
    """
    groups = finished.groups + finished.dropped
    rollouts = [r for g in groups for r in g.rollouts]
    graded = [r.grade.reward for r in rollouts if r.grade.reward is not None]
    count = len(rollouts)
    stale = [version - r.oldest_version for r in _rollouts(finished.groups)]
    measures: dict[str, Measure] = {
        "rollout/reward_mean": Mean(sum(graded), len(graded)),
        "rollout/reward_std": Mean(statistics.pstdev(graded) if graded else 0.0, 1),
        "rollout/length_tokens_mean": Mean(sum(len(r.response) for r in rollouts), count),
        "rollout/length_tokens_max": Max(max((len(r.response) for r in rollouts), default=0)),
        "rollout/truncated_fraction": Mean(sum(r.is_truncated for r in rollouts), count),
        "rollout/error_fraction": Mean(sum(r.grade.error is not None for r in rollouts), count),
        "rollout/degenerate_group_fraction": Mean(sum(g.is_degenerate for g in groups), len(groups)),
        "rollout/all_equal_best_fraction": Mean(sum(_is_all(g, 1.0) for g in groups), len(groups)),
        "rollout/all_equal_zero_fraction": Mean(sum(_is_all(g, 0.0) for g in groups), len(groups)),
        "rollout/discarded_groups": Sum(len(finished.dropped)),
        "stream/staleness_steps_mean": Mean(sum(stale), len(stale)),
        "stream/staleness_steps_max": Max(max(stale, default=0)),
        "tokens/generated": Sum(sum(len(r.response) for r in rollouts)),
    }
    for name in sorted({name for r in rollouts for name in r.grade.parts}):
        parts = [r.grade.parts[name] for r in rollouts if name in r.grade.parts]
        measures[f"reward/{name}_mean"] = Mean(sum(parts), len(parts))
    return Metrics.of(measures)


def measure_trained(finished: Round, batch: Batch) -> Metrics:
    """Return how many of the generated tokens have a gradient, on the prepared batch.

    A token is wasted when its advantage is exactly zero, or when it is masked, errored or discarded.
    """
    assert batch.advantages is not None, "prepare comes first"
    trained = int(((batch.advantages != 0) & batch.mask).sum())
    generated = sum(len(r.response) for g in finished.groups + finished.dropped for r in g.rollouts)
    return Metrics.of(
        {
            "tokens/trained": Sum(trained),
            "tokens/wasted_fraction": Mean(generated - trained, generated),
        }
    )


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
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
