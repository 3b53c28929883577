"""Were the runs asked the same questions in the same order? Looked up in what they recorded, not assumed.

A curriculum of shuffled epochs is a fixed row of questions that depends on the seed alone. Algorithms that ask several
answers a question walk along it more slowly: with 8 answers a question 64 answers are 8 questions, with one they are
64. "The same order" therefore means that the shorter row is the beginning of the longer one. Two things may stand
otherwise in it, and both are told: where an epoch ends within a step, a question that the step holds already is put off
to the next; and groups that dynamic sampling refused are recorded after those that were kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gnomon.studies.compare_runs import Trained


@dataclass(frozen=True)
class Order:
    """What two runs of one seed have in common in what they asked.

    verdict: "same", question by question; "same but for the ends of epochs"; "same, step by step" where only the set of
    questions that were asked up to the end of each step can be compared; "other"; "unknown" without recorded rollouts,
    or where both refused groups.
    questions: that were compared.
    """

    first: str
    second: str
    seed: int
    verdict: str
    questions: int

    @property
    def is_same(self) -> bool:
        """Whether the questions were the same, in the sense that the verdict says."""
        return self.verdict.startswith("same")


def order_of(first: Trained, second: Trained, epoch: int) -> Order:
    """Return whether two runs of one seed asked the same questions in the same order. epoch: training questions."""
    one, other = ([task for step in run.asked for task in step] for run in (first, second))
    count = min(len(one), len(other))
    if not count:
        verdict = "unknown"
    elif one[:count] == other[:count]:
        verdict = "same"
    elif _are_ends(one[:count], other[:count], epoch, _largest(first, second)):
        verdict = "same but for the ends of epochs"
    elif first.is_filtered and second.is_filtered:
        verdict = "unknown"
    elif (first.is_filtered or second.is_filtered) and _are_sets(first, second):
        verdict = "same, step by step"
    else:
        verdict = "other"
    return Order(first.algorithm, second.algorithm, first.seed, verdict, count)


def _largest(*runs: Trained) -> int:
    return max(len(step) for run in runs for step in run.asked)


def _are_ends(one: Sequence[str], other: Sequence[str], epoch: int, step: int) -> bool:
    """Whether each question comes within a step of where the other row has it, and those that move do so at an end.

    The last step of the rows is left out: what is put off from it comes behind their end.
    """
    left, right = _visits(one), _visits(other)
    for visit, place in left.items():
        found = right.get(visit, place + len(one))
        is_end = abs(place - max(1, round(place / epoch)) * epoch) <= 2 * step
        is_far = abs(place - found) > step and min(place, found) < len(one) - step
        if place != found and (not is_end or is_far):
            return False
    return True


def _visits(row: Sequence[str]) -> dict[tuple[str, int], int]:
    """Return where each question stands for the first, the second, and every further time."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], int] = {}
    for place, task in enumerate(row):
        found[task, seen[task]] = place
        seen[task] += 1
    return found


def _are_sets(first: Trained, second: Trained) -> bool:
    """Whether at the end of each step of the one that refused, it had asked what the row of the other begins with."""
    filtered, plain = (first, second) if first.is_filtered else (second, first)
    row = [task for step in plain.asked for task in step]
    asked: Counter[str] = Counter()
    ends = list(accumulate(len(step) for step in filtered.asked))
    for step, end in zip(filtered.asked, ends, strict=True):
        asked.update(step)
        if end <= len(row) and asked != Counter(row[:end]):
            return False
    return bool(ends) and ends[0] <= len(row)
