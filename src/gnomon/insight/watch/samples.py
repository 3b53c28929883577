"""The best and the worst answers of a step, and those that could not be judged."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.core.atomic_files import open_plain
from gnomon.diagnosis import FindingSample
from gnomon.records.jsonl import is_step, parsed

MOST = 4
_MOST_BYTES = 32 << 20
# Written by `records.rollouts`: what follows is as long as the answer and shown to nobody. Inside of a text its quotes
# would be escaped, so these bytes end what is wanted and are in no text.
_TOKENS = b', "prompt": ['


@dataclass(frozen=True)
class Samples:
    """What is shown of a step's rollouts.

    Attributes:
        count: Rollouts that were read.
        is_part: Whether the step has more.
        best: The rollouts of the highest reward, each of another prompt where there are enough, the most telling first.
        worst: The rollouts of the lowest reward, likewise.
        failed: Without one.
    """

    step: int = 0
    count: int = 0
    is_part: bool = False
    best: tuple[FindingSample, ...] = ()
    worst: tuple[FindingSample, ...] = ()
    failed: tuple[FindingSample, ...] = ()


def read_samples(path: Path, step: int) -> Samples:
    """Return the samples of the rollout file at ``path``, none where it cannot be read.

    Token ids and log-probabilities are passed over unparsed, and of a larger file the first 32 MiB are read.
    """
    try:
        with open_plain(path) as file:
            rows = list(_rows(file))
            is_part = bool(file.read(1))
    except OSError:
        return Samples(step)
    return choose(rows, step, is_part)


def choose(rows: Sequence[tuple[int, FindingSample]], step: int, is_part: bool = False) -> Samples:
    """Return which of ``rows``, each with the number of its group, are worth a look."""
    judged = [(group, sample) for group, sample in rows if sample.reward is not None]
    ranked = sorted(judged, key=lambda row: -(row[1].reward or 0.0))
    best = _spread(ranked)
    # Of equal rewards the last ones, so that a step without a difference shows other answers below than above.
    worst = [sample for sample in _spread(list(reversed(ranked))) if sample not in best] or best[1:]
    failed = [sample for _, sample in rows if sample.error is not None]
    return Samples(step, len(rows), is_part, tuple(best), tuple(worst), tuple(failed[:MOST]))


def _spread(ranked: Iterable[tuple[int, FindingSample]]) -> list[FindingSample]:
    """Return the first of each group, then others, `MOST` in all."""
    seen: set[int] = set()
    firsts: list[FindingSample] = []
    others: list[FindingSample] = []
    for group, sample in ranked:
        (others if group in seen else firsts).append(sample)
        seen.add(group)
        if len(firsts) == MOST:
            break
    return [*firsts, *others][:MOST]


def _rows(file: Iterable[bytes]) -> Iterator[tuple[int, FindingSample]]:
    left = _MOST_BYTES
    for line in file:
        place = line.find(_TOKENS)
        row = parsed(line if place < 0 else line[:place] + b"}")
        sample = None if row is None else FindingSample.of_row({**row, "response": row.get("text")})
        if row is not None and sample is not None:
            yield row["group"] if is_step(row.get("group")) else 0, sample
        left -= len(line)
        if left <= 0:
            return
