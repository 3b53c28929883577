"""What training and held-out questions have in common beyond the identical ones, which training gives up anyway.

*The same words*: texts that are equal once case, spaces, quotes and prose punctuation are set aside; operators and
brackets count, since 3-5 and 3+5 are two questions. *Words in a row*: a held-out question that shares n consecutive
words with a training question. As in GPT-3's study n is the length in words that 95% of the held-out questions reach,
at least 8 and at most 13; a shorter question has no such row and is compared by the first measure alone.

What stands in more than 10 training questions is a template ("Solve the following problem. Answer with ..."), not a
copy, and is no evidence; this rule is ours.
Source: Brown et al. 2020, arXiv 2005.14165, appendix C.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gnomon.core.progress import track
from gnomon.tasks.question import Dataset, HasText, comparison_key

SHORTEST, LONGEST = 8, 13
"""Words in a row that count: fewer collide by chance, more are not needed."""
TEMPLATE = 10
_SHOWN = 3
_WORD = re.compile(r"\d+(?:\.\d+)?|\w+|[^\w\s]")
_PROSE = frozenset(".,;:?'\"`\u2018\u2019\u201c\u201d")


@dataclass(frozen=True)
class Pair:
    """A held-out question and the first training question that is like it, by their ids."""

    held_out: str
    trained: str


@dataclass(frozen=True)
class Overlap:
    """How many held-out questions training has seen something of.

    Attributes:
        held_out: Number of held-out questions.
        same: Number of held-out questions whose words training asks too.
        near: Number of others that share ``words`` words in a row with a training question.
        compared: Number of questions that are long enough for that comparison.
    """

    held_out: int = 0
    same: tuple[Pair, ...] = ()
    near: tuple[Pair, ...] = ()
    words: int = LONGEST
    compared: int = 0

    @property
    def said(self) -> tuple[str, ...]:
        """One sentence for each kind that was found; none when nothing was."""
        found = []
        if self.same:
            found.append(
                f"contamination: {len(self.same)} of {self.held_out} held-out questions are trained on as well, case "
                f"and punctuation aside ({_listed(self.same)}): the evaluation measures memory there; remove them from "
                "one side"
            )
        if self.near:
            found.append(
                f"contamination: {len(self.near)} of {self.held_out} held-out questions share {self.words} words in a "
                f"row with a training question ({_listed(self.near)}): they may be copies, and the evaluation may "
                "measure memory; look at them"
            )
        return tuple(found)


def overlap(train: Dataset[HasText], held_out: Dataset[HasText]) -> Overlap:
    """Return what the two sets have in common; looks at every question of both once.

    A question that is identical on both sides counts as ``same``: of a run's own split there is none.
    """
    texts = [held_out[index] for index in range(len(held_out))]
    words = [_words(item.text) for item in texts]
    length = _row_length([len(w) for w in words])
    whole: dict[tuple[str, ...], list[int]] = defaultdict(list)
    rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, own in enumerate(words):
        whole[tuple(own)].append(index)
        # A set: a row that repeats within one question counts once.
        for row in set(_rows(own, length)):
            rows[row].append(index)
    same: dict[int, str] = {}
    seen: dict[tuple[str, ...], list[int]] = defaultdict(list)
    # A row of n words can be shared only where all n occur in some held-out question:
    # long training texts are cut to such stretches, which spares most of the hashing.
    known = {word for own in words for word in own}
    for number in track(range(len(train)), "comparing questions", len(train)):
        item = train[number]
        own = _words(item.text)
        if tuple(own) in whole:
            same |= {index: item.id for index in whole[tuple(own)] if index not in same}
            continue
        for row in {row for stretch in _stretches(own, known) for row in _rows(stretch, length)}:
            # One more than the bound is recorded, to tell a template from a copy, and no further ones, to bound memory.
            if row in rows and len(seen[row]) <= TEMPLATE:
                seen[row].append(number)
    near: dict[int, int] = {}
    for row, trained in seen.items():
        if len(trained) <= TEMPLATE:
            # Numbers are in training order, so the first is the least: the
            # earliest question that a held-out one resembles is shown.
            near |= {index: min(near.get(index, trained[0]), trained[0]) for index in rows[row]}
    return Overlap(
        held_out=len(texts),
        same=tuple(Pair(texts[i].id, same[i]) for i in sorted(same)),
        near=tuple(Pair(texts[i].id, train[near[i]].id) for i in sorted(near.keys() - same.keys())),
        words=length,
        compared=sum(len(own) >= length for own in words),
    )


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(comparison_key(text)) if word not in _PROSE]


def _row_length(lengths: Sequence[int]) -> int:
    ordered = sorted(lengths) or [LONGEST]
    # The 5th percentile: 95% of the held-out questions are at least so long, as in GPT-3's study.
    return max(SHORTEST, min(LONGEST, ordered[int(0.05 * (len(ordered) - 1))]))


def _rows(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _stretches(words: Sequence[str], known: set[str]) -> Iterator[list[str]]:
    """Yield the stretches of words that held-out questions have too: no shared row reaches beyond one."""
    stretch: list[str] = []
    for word in words:
        if word in known:
            stretch.append(word)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _listed(pairs: Sequence[Pair]) -> str:
    shown = ", ".join(f"{_plain(p.held_out)} and {_plain(p.trained)}" for p in pairs[:_SHOWN])
    return f"{shown}{', ...' if len(pairs) > _SHOWN else ''}"


def _plain(name: str) -> str:
    """Return an id as it may be shown: a data set's own text, so nothing in it reaches a terminal as a command."""
    return "".join(c if c.isprintable() else "?" for c in name[:40])
