"""What a round and its batch say about themselves."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import torch

from gnomon.core.metrics import Last, Max, Mean, Measure, Metrics, Sum
from gnomon.core.types import GIVEN, Batch, EndedBy, Group, Rollout
from gnomon.rewards.answers import thought_of
from gnomon.rollouts.scheduler import Fate, RolloutBatch

# What became of every generated token: trained on, or wasted, and why.

_MOST_ROLES = 8
STOPPED = "loss/stopped_token_fraction"


def measure_waste(finished: RolloutBatch, batch: Batch, learned: Metrics) -> Metrics:
    """Return how many of the generated tokens had a gradient, and what became of the others, each with one cause.

    ``tokens/trained`` had one; ``idle`` is of a trained group and had none; ``failed``, ``refused``, ``surplus`` and
    ``distrusted`` as in `measure_stream`. They add up to what was generated. ``tokens/wasted_fraction`` is the share
    without a gradient, and these are its parts, of all generated tokens:

    waste/degenerate_fraction: all rewards of the group are equal, whether it was trained on or refused.
    waste/zero_advantage_fraction: an advantage of exactly 0 for another reason: a baseline met the reward.
    waste/clipped_fraction: an advantage, and a loss without a slope: the clip, a mask of the correction, or a weight of
        0, averaged over the step's updates. A cap bounds a push and takes none away (``loss/capped_fraction``).
    waste/truncated_fraction: masked because the response was cut off.
    waste/off_policy_fraction: the policy had moved too far (staleness filter); recorded as stale_fraction before.
    waste/errored_fraction: no reward. waste/refused_fraction: kept out by a filter, though rewards differ.
    waste/surplus_fraction: finished too late for a place.

    Of several causes the first counts: that of a group that is not trained on, then errored, truncated, degenerate or
    zero_advantage, clipped. What was generated of a rollout that was withdrawn is not known, and is in none of them. A
    regularizer's pull on a token that the reward says nothing about is no use of the rollout: such a token is wasted.

    Args:
        batch: As it was trained on, prepared.
        learned: What its updates measured.
    """
    groups = untrained(finished)
    wasted = {fate: tokens_of(rollouts_of(each)) for fate, each in groups.items()}
    wasted[Fate.ERRORED] = tokens_of(failed(finished))
    causes = _silent(finished, batch)
    share = learned[STOPPED] if STOPPED in set(learned) else 0.0
    # The share is a mean over updates, so the count is rounded to whole tokens: the causes must add up.
    causes["clipped"] = round(share * int(batch.mask.sum()))
    wasted[Fate.IDLE] = sum(causes.values())
    # A refused group of equal rewards counts as degenerate, as it does where it is trained on.
    of_refused = tokens_of(rollouts_of([group for group in groups[Fate.FILTERED] if _is_alike(group)]))
    causes["degenerate"] += of_refused
    causes |= {
        "refused": wasted[Fate.FILTERED] - of_refused,
        "surplus": wasted[Fate.LATE],
        "off_policy": wasted[Fate.OFF_POLICY],
        "errored": wasted[Fate.ERRORED],
    }
    trained = tokens_of(rollouts_of(finished.trained)) - wasted[Fate.ERRORED] - wasted[Fate.IDLE]
    generated = trained + sum(wasted.values())
    measures: dict[str, Measure] = {f"tokens/{name}": Sum(count) for name, count in wasted.items()}
    measures |= {f"waste/{cause}_fraction": Mean(count, generated) for cause, count in causes.items()}
    measures |= {"tokens/trained": Sum(trained), "tokens/wasted_fraction": Mean(generated - trained, generated)}
    return Metrics.of(measures)


def _silent(finished: RolloutBatch, batch: Batch) -> dict[str, int]:
    """Return the tokens of trained groups that were never to have a gradient, by cause; those without a reward apart.

    Rows of the batch are the segments of the rollouts, group after group.
    """
    assert batch.advantages is not None, "prepare comes first"
    counted = batch.mask.sum(1).tolist()
    zero = ((batch.advantages == 0) & batch.mask).sum(1).tolist()
    causes = {"degenerate": 0, "zero_advantage": 0, "truncated": 0}
    row = 0
    for group in finished.trained:
        why = "degenerate" if _is_alike(group) else "zero_advantage"
        for rollout in (segment for whole in group.rollouts for segment in whole.rows):
            if rollout.grade.error is None:
                # The policy's own tokens that are in no mask of the batch: `mask_truncated` took them out.
                causes["truncated"] += sum(rollout.mask) - counted[row]
                causes[why] += zero[row]
            row += 1
    return causes


def _is_alike(group: Group) -> bool:
    """Whether several rewards are all equal; a group of one has none to be compared with."""
    return len(group.rewards) > 1 and group.is_degenerate


# What conversations say about themselves.


def measure_turns(rollouts: Sequence[Rollout]) -> Metrics:
    """Return means of turns, reply tokens and segments, the most turns, and ``turns/ended_by_*_fraction``.

    Where agents called the policy by several roles, each of the commonest has ``turns/role_*`` with answers, tokens and
    reward of a rollout in which it was called.
    The fractions are of all conversations and add up to 1 (`types.Ending` says what each cause is). Nothing without
    conversations.
    """
    endings = [r.ending for r in rollouts if r.ending is not None]
    if not endings:
        return Metrics()
    count = len(endings)
    # Tokens that the policy did not choose.
    replied = sum(len(s.mask) - sum(s.mask) for r in rollouts if r.ending is not None for s in r.rows)
    measures: dict[str, Measure] = {
        "turns/mean": Mean(sum(e.turns for e in endings), count),
        "turns/max": Max(max(e.turns for e in endings)),
        "turns/reply_tokens_mean": Mean(replied, count),
        "turns/segments_mean": Mean(sum(len(r.rows) for r in rollouts if r.ending is not None), count),
    }
    for by in get_args(EndedBy):
        measures[f"turns/ended_by_{by}_fraction"] = Mean(sum(e.by == by for e in endings), count)
    rows = [row for rollout in rollouts for row in rollout.rows]
    roles = Counter(row.role for row in rows)
    for role, _ in roles.most_common(_MOST_ROLES) if len(roles) > 1 else ():
        name, played = role or "none", [row for row in rows if row.role == role]
        count = sum(any(row.role == role for row in r.rows) for r in rollouts)
        measures[f"turns/role_{name}_answers_mean"] = Mean(sum(len(row.turn_ends) for row in played), count)
        measures[f"turns/role_{name}_tokens_mean"] = Mean(sum(sum(row.mask) for row in played), count)
        measures[f"turns/role_{name}_reward_mean"] = Mean(sum(sum(row.turn_rewards) for row in played), count)
    return Metrics.of(measures)


def measure_thoughts(rollouts: Sequence[Rollout]) -> Metrics:
    """Return how much of the answers is thought; nothing where no answer has one."""
    thoughts = [thought_of(rollout.text) for rollout in rollouts]
    if not any(length for length, _ in thoughts):
        return Metrics()
    return Metrics.of(
        {
            "rollout/thought_fraction": Mean(sum(n for n, _ in thoughts), sum(len(r.text) for r in rollouts)),
            "rollout/unfinished_thought_fraction": Mean(sum(not ended for _, ended in thoughts), len(thoughts)),
        }
    )


def describe_failures(rollouts: Sequence[Rollout]) -> str | None:
    """Return in words that more than half of the conversations ended in a reply that failed; None when fewer did.

    A policy may break its tools, and is graded on what it said until then. When most of them break, it is more likely
    that the user's code is at fault, which no metric of rewards would show.
    """
    endings = [r.ending for r in rollouts if r.ending is not None]
    failed = [e for e in endings if e.by in ("timeout", "flood", "fault")]
    # Half or fewer may be the policy's own doing.
    if 2 * len(failed) <= len(endings):
        return None
    cause, _ = Counter(e.cause for e in failed).most_common(1)[0]
    return (
        f"{len(failed)} of {len(endings)} conversations of a step ended in a reply that failed, most often: {cause}; "
        "they are trained on as far as they went. If the environment is at fault and not the answers, stop and fix it"
    )


def measure_round(finished: RolloutBatch, version: int) -> Metrics:
    """Return ``rollout/*``, ``stream/*`` and ``tokens/generated`` of everything that was generated, kept or not.

    Answers that were given are no part of it, but for groups whose rewards are all equal, of which nothing is learned.

    Args:
        version: Version of the weights about to be trained; staleness is counted in steps from the oldest
            token of a rollout.
    """
    groups = finished.generated
    several = [group for group in groups if len(group.rollouts) > 1]
    rollouts = [r for r in rollouts_of(groups) if r.oldest_version != GIVEN]
    graded = [r.grade.reward for r in rollouts if r.grade.reward is not None]
    count, lengths = len(rollouts), [r.length for r in rollouts]
    stale = [version - r.oldest_version for r in rollouts_of(finished.trained) if r.oldest_version != GIVEN]
    measures: dict[str, Measure] = {
        "rollout/reward_mean": Mean(sum(graded), len(graded)),
        "rollout/reward_std": Mean(statistics.pstdev(graded) if graded else 0.0, 1),
        "rollout/length_tokens_mean": Mean(sum(lengths), count),
        "rollout/length_tokens_max": Max(max(lengths, default=0)),
        "rollout/truncated_fraction": Mean(sum(r.is_truncated for r in rollouts), count),
        "rollout/error_fraction": Mean(sum(r.grade.error is not None for r in rollouts), count),
        "rollout/degenerate_group_fraction": Mean(sum(g.is_degenerate for g in several), len(several)),
        "rollout/all_equal_best_fraction": Mean(sum(_is_all(g.sampled, 1.0) for g in groups), len(groups)),
        "rollout/all_equal_zero_fraction": Mean(sum(_is_all(g.sampled, 0.0) for g in groups), len(groups)),
        "rollout/discarded_groups": Sum(len(finished.refused)),
        "stream/staleness_steps_mean": Mean(sum(stale), len(stale)),
        "stream/staleness_steps_max": Max(max(stale, default=0)),
        "tokens/generated": Sum(tokens_of(rollouts)),
    }
    for name in sorted({name for r in rollouts for name in r.grade.parts}):
        parts = [r.grade.parts[name] for r in rollouts if name in r.grade.parts]
        measures[f"reward/{name}_mean"] = Mean(sum(parts), len(parts))
    return Metrics.of(measures) + measure_stream(finished) + measure_turns(rollouts) + measure_thoughts(rollouts)


def measure_stream(finished: RolloutBatch) -> Metrics:
    """Return how long the step waited, what stays behind, and the rollouts that came to nothing, each with one cause.

    stream/refused_rollouts: by the filter. surplus: finished too late for a place. distrusted: removed by the
    staleness filter. stale: withdrawn unfinished. failed: in a group that is trained on, but without a reward. A
    group's cause goes before that of its rollouts, so with the trained ones they are all that were asked and are no
    longer pending.
    """
    counts = {name: sum(len(g.rollouts) for g in groups) for name, groups in untrained(finished).items()}
    counts |= {Fate.CANCELLED: finished.cancelled, Fate.ERRORED: len(failed(finished))}
    measures: dict[str, Measure] = {f"stream/{name}_rollouts": Sum(count) for name, count in counts.items()}
    measures |= {
        "time/wait_seconds": Mean(finished.wait_seconds, 1),
        "stream/in_flight_groups": Last(finished.in_flight),
        "stream/finished_groups": Last(finished.finished),
        "stream/steps_ahead": Last(finished.ahead),
    }
    return Metrics.of(measures)


def untrained(finished: RolloutBatch) -> dict[Fate, tuple[Group, ...]]:
    """Return the groups that were finished and are not trained on, by cause."""
    return {Fate.FILTERED: finished.refused, Fate.LATE: finished.late, Fate.OFF_POLICY: finished.off_policy}


def failed(finished: RolloutBatch) -> list[Rollout]:
    """Return the rollouts of trained groups that have no reward."""
    return [r for r in rollouts_of(finished.trained) if r.grade.error is not None]


def tokens_of(rollouts: Sequence[Rollout]) -> int:
    """Return how many tokens the policy chose."""
    return sum(sum(segment.mask) for r in rollouts for segment in r.rows)


def rollouts_of(groups: Sequence[Group]) -> list[Rollout]:
    """Return the rollouts of all groups, in order."""
    return [r for g in groups for r in g.rollouts]


def _is_all(group: Group, value: float) -> bool:
    return bool(group.rewards) and all(reward == value for reward in group.rewards)


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far, plus what a GPU held at most."""
    import resource
    import sys

    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return resident + (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
