"""How many seeds would settle what is undecided, and how a protocol says that seeds were added."""

import math
from collections.abc import Callable, Sequence

from experiments.claims.estimates import Estimate, student_t

from gnomon.core.statistics import wilson_interval

MOST = 1000


def seeds_to_settle(found: Estimate, above: float, below: float) -> str:
    """Return, in words, with how many seeds Student's interval would lie on one side if mean and spread stayed.

    n is the least for which t(n - 1) s / sqrt(n) is no more than the way from the mean to the bound, t being Student's
    97.5% point; the mean tells which bound that is: inside of what is expected every bound that the interval reaches,
    outside of it the one that was crossed. Of an interval that is not symmetric (of a mean of logarithms) the side
    that faces the bound counts. With the true mean where the estimate is, so many decide about every second time.
    "" for one seed, whose spread nobody knows.

    >>> seeds_to_settle(Estimate(0.1, -0.1, 0.3, 4), above=0.0, below=math.inf)
    'about 9 seeds'
    """
    if found.seeds < 2:
        return ""
    ways = _ways(found, above, below)
    scale = math.sqrt(found.seeds) / student_t(found.seeds - 1)
    return _first(lambda n: all(student_t(n - 1) / math.sqrt(n) * scale * side <= gap for gap, side in ways), found)


def rates_to_settle(found: Estimate, above: float, below: float) -> str:
    """Return the same of a share of seeds, which Wilson's interval judges, if the share stayed.

    >>> rates_to_settle(Estimate(0.0, 0.0, 0.56, 3), above=-math.inf, below=0.5)
    'about 4 seeds'
    """

    def is_settled(count: int) -> bool:
        interval = wilson_interval(found.mean * count, count)
        is_inside = above < interval.low and interval.high < below
        return is_inside or interval.high <= above or interval.low >= below

    return _first(is_settled, found)


def fresh_alone(seen: Sequence[int], fresh: Sequence[int], day: str, undecided: str) -> str:
    """Return the sentences of a protocol whose seeds were chosen after others had been looked at.

    seen, fresh: seeds. day: on which that was written down. undecided: what the seen ones left open, with its numbers.

    >>> fresh_alone(range(3), range(3, 5), "2026-11-23", "the gain (0.1 [-0.1, 0.3])").split(". ")[0]
    'Seeds 0 to 2 had been run before and left undecided the gain (0.1 [-0.1, 0.3])'
    """
    return (
        f"Seeds {seen[0]} to {seen[-1]} had been run before and left undecided {undecided}. Therefore, written down on "
        f"{day} before any of them was run: {len(fresh)} fresh seeds, {fresh[0]} to {fresh[-1]}, a number that is "
        "fixed and after which nothing is added, with nothing else changed; they alone judge, since whoever adds seeds "
        "where few left something open has looked at those few."
    )


def _ways(found: Estimate, above: float, below: float) -> list[tuple[float, float]]:
    """Return for each bound that is to be cleared how far the mean is from it, and the interval from the mean on."""
    down, up = found.mean - found.low, found.high - found.mean
    if found.mean <= above:
        return [(above - found.mean, up)]
    if found.mean >= below:
        return [(found.mean - below, down)]
    return [(found.mean - above, down), (below - found.mean, up)]


def _first(is_settled: Callable[[int], bool], found: Estimate) -> str:
    for count in range(max(2, found.seeds), MOST + 1):
        if is_settled(count):
            return f"about {count if count <= 100 else math.ceil(count / 10) * 10} seeds"
    return f"over {MOST:,} seeds"
