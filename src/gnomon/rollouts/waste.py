"""What became of every generated token: trained on, or wasted, and why."""

from gnomon.metrics import Mean, Measure, Metrics, Sum
from gnomon.rollouts.measure import failed, rollouts_of, tokens_of, untrained
from gnomon.rollouts.stream import Round
from gnomon.types import Batch, Group

STOPPED = "loss/stopped_token_fraction"


def measure_waste(finished: Round, batch: Batch, learned: Metrics) -> Metrics:
    """Return how many of the generated tokens had a gradient, and what became of the others, each with one cause.

    batch: as it was trained on, prepared. learned: what its updates measured.

    ``tokens/trained`` had one; ``idle`` is of a trained group and had none; ``failed``, ``refused``, ``surplus`` and
    ``distrusted`` as in `measure_stream`. They add up to what was generated. ``tokens/wasted_fraction`` is the share
    without a gradient, and these are its parts, of all generated tokens:

    waste/degenerate_fraction: all rewards of the group are equal, whether it was trained on or refused.
    waste/zero_advantage_fraction: an advantage of exactly 0 for another reason: a baseline met the reward.
    waste/clipped_fraction: an advantage, and a loss without a slope: the clip, a mask of the correction, or a weight of
        0, averaged over the step's updates. A cap bounds a push and takes none away (``loss/capped_fraction``).
    waste/truncated_fraction: masked because the response was cut off.
    waste/stale_fraction: the policy had moved too far (admission).
    waste/errored_fraction: no reward. waste/refused_fraction: kept out by a filter, though rewards differ.
    waste/surplus_fraction: finished too late for a place.

    Of several causes the first counts: that of a group that is not trained on, then errored, truncated, degenerate or
    zero_advantage, clipped. What was generated of a rollout that was withdrawn is not known, and is in none of them. A
    regularizer's pull on a token that the reward says nothing about is no use of the rollout: such a token is wasted.
    """
    groups = untrained(finished)
    wasted = {name: tokens_of(rollouts_of(each)) for name, each in groups.items()} | {
        "failed": tokens_of(failed(finished))
    }
    causes = _silent(finished, batch)
    share = learned[STOPPED] if STOPPED in set(learned) else 0.0
    causes["clipped"] = round(share * int(batch.mask.sum()))
    wasted["idle"] = sum(causes.values())
    of_refused = tokens_of(rollouts_of([group for group in groups["refused"] if _is_alike(group)]))
    causes["degenerate"] += of_refused
    causes |= {
        "refused": wasted["refused"] - of_refused,
        "surplus": wasted["surplus"],
        "stale": wasted["distrusted"],
        "errored": wasted["failed"],
    }
    trained = tokens_of(rollouts_of(finished.groups)) - wasted["failed"] - wasted["idle"]
    generated = trained + sum(wasted.values())
    measures: dict[str, Measure] = {f"tokens/{name}": Sum(count) for name, count in wasted.items()}
    measures |= {f"waste/{cause}_fraction": Mean(count, generated) for cause, count in causes.items()}
    measures |= {"tokens/trained": Sum(trained), "tokens/wasted_fraction": Mean(generated - trained, generated)}
    return Metrics.of(measures)


def _silent(finished: Round, batch: Batch) -> dict[str, int]:
    """Return the tokens of trained groups that were never to have a gradient, by cause; those without a reward apart.

    Rows of the batch are the rollouts, group after group.
    """
    assert batch.advantages is not None, "prepare comes first"
    counted = batch.mask.sum(1).tolist()
    zero = ((batch.advantages == 0) & batch.mask).sum(1).tolist()
    causes = {"degenerate": 0, "zero_advantage": 0, "truncated": 0}
    row = 0
    for group in finished.groups:
        why = "degenerate" if _is_alike(group) else "zero_advantage"
        for rollout in group.rollouts:
            if rollout.grade.error is None:
                causes["truncated"] += sum(rollout.mask) - counted[row]
                causes[why] += zero[row]
            row += 1
    return causes


def _is_alike(group: Group) -> bool:
    """Whether several rewards are all equal; a group of one has none to be compared with."""
    return len(group.rewards) > 1 and group.is_degenerate
