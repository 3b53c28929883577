"""Compare two evaluations of the same prompts, paired prompt by prompt.

from gnomon.analysis.paired import compare, read_answered

before, after = (read_answered(run / "evaluations" / f"step-{n:06d}.jsonl") for n in (0, 24))
print(compare(before, after).words)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gnomon.core.errors import ConfigError
from gnomon.core.statistics import MCNEMAR, SIGN_FLIP, Difference, paired_difference
from gnomon.records.eval_records import EvalRecord, read_answered, write_answered

__all__ = ["Difference", "EvalRecord", "compare", "read_answered", "write_answered"]


def compare(first: Sequence[EvalRecord], second: Sequence[EvalRecord], measure: str = "avg") -> Difference:
    """Test whether ``second`` did better than ``first`` on the prompts that both answered.

    A prompt is paired if both sides have the measure; other prompts are counted as ``left_out``. Which prompts are left
    out may depend on the answers (errors of grading), so many of them are a reason for doubt. For several comparisons,
    correct the p-values with `gnomon.core.statistics.holm`.

    Args:
        first: One record per prompt.
        second: One record per prompt.
        measure: "avg" (accuracy), "pass@K", "maj@K", "tokens" or "truncated", see `EvalRecord.measure`. A mean length
            is between 0 and the longest response of both sides.

    Raises:
        ConfigError: If no prompt can be paired, one id stands for two prompts, a side answers a prompt twice, or the
            measure is unknown.
    """
    for side in (first, second):
        _refuse_twice(side)
    left, right = ({row.prompt_id: row for row in rows} for rows in (first, second))
    shared = [name for name in left if name in right]
    other = [name for name in shared if left[name].question != right[name].question]
    if other:
        raise ConfigError(
            f"the two evaluations asked different questions under the same name ({other[0]}"
            f"{f' and {len(other) - 1} more' if len(other) > 1 else ''}), so they cannot be paired; "
            "evaluate both on the same file or generator"
        )
    pairs = [(left[name].measure(measure), right[name].measure(measure)) for name in shared]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not both:
        raise ConfigError(
            f"no prompt has '{measure}' on both sides ({len(left)} and {len(right)} prompts, {len(shared)} of them "
            "shared); evaluate both on the same prompts, with as many samples as the measure needs"
        )
    limits = (0.0, float(max((length for row in (*first, *second) for length in row.lengths), default=0)))
    values = [a for a, _ in both], [b for _, b in both]
    found = paired_difference(*values, limits=limits if measure == "tokens" else None)
    if found.test == MCNEMAR and measure == "avg" and any(row.samples > 1 for row in (*first, *second)):
        # McNemar's test is for pairs of single answers, not for means that happen to be 0 or 1.
        found = replace(found, test=SIGN_FLIP)
    drawn = tuple(sorted({row.samples for row in side}) for side in (first, second))
    return replace(
        found,
        left_out=len(left.keys() | right.keys()) - len(both),
        samples="" if drawn[0] == drawn[1] else " and ".join(_span(each) for each in drawn),
    )


def _refuse_twice(side: Sequence[EvalRecord]) -> None:
    names = Counter(row.prompt_id for row in side)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError(
            f"one side answers {len(twice)} of {len(names)} prompts more than once ({', '.join(twice[:3])}), so it is "
            "unclear which is meant; keep one line a prompt"
        )


def _span(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
