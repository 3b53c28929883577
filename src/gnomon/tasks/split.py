"""What is never trained on, and the check that it is not.

Two questions are the same when their text is the same after whitespace and case are normalized. Held-out
questions win: training gives up what both sides would ask.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Generic

from gnomon.core.errors import ConfigError, DatasetError, bounded
from gnomon.core.progress import track
from gnomon.core.types import answer_of
from gnomon.tasks.question import Dataset, Item, Question, comparison_key, digest

_COMPARING = "comparing questions"
_DEFAULT_SIZE = 200
RESERVED = range(20_260_101, 20_260_201)
"""Seeds of generators that no training task may have: questions made from them are never trained on."""


@dataclass(frozen=True)
@bounded("held_out", size="at least 0", fraction="above 0 and below 1")
class HeldOut:
    """How many questions are kept for evaluation.

    Attributes:
        size: Number of different questions that are evaluated; 0 holds out none, and the run is not evaluated. None is
            200, or as many as ``fraction`` is of a table if these are fewer.
        fraction: Share of a table's questions, above 0 and below 1, that is kept from training; ``size`` of them are
            asked, and more are kept where ``size`` needs more. A task that generates questions makes held-out ones from
            ``seed`` instead.
        seed: Seed of the held-out questions. Runs with different training seeds are evaluated on the same questions. No
            training task may have a seed that is `RESERVED`.

    Raises:
        ConfigError: A number is out of range.
    """

    size: int | None = None
    fraction: float = 0.1
    seed: int = RESERVED.start

    @property
    def most(self) -> int:
        """Questions that are asked where there are enough."""
        return _DEFAULT_SIZE if self.size is None else self.size


@dataclass(frozen=True)
class Subset(Generic[Item]):
    """Some of a set's questions or tasks, in their order, with their ids.

    Attributes:
        indices: Positions of the questions in ``source``.
    """

    source: Dataset[Item]
    indices: tuple[int, ...]

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.name

    @property
    def dropped(self) -> int:
        """How many of the source are not in this view."""
        return len(self.source) - len(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Item:
        return self.source[self.indices[index]]


def unique(items: Dataset[Item]) -> Subset[Item]:
    """Return the first of each question; repetitions are dropped."""
    first: dict[str, int] = {}
    for index in track(range(len(items)), _COMPARING, len(items)):
        first.setdefault(comparison_key(items[index].text), index)
    return Subset(items, tuple(first.values()))


def first(items: Subset[Item], size: int) -> Subset[Item]:
    """Return the first ``size`` items, or all when there are fewer."""
    return Subset(items.source, items.indices[:size])


def repeated(kept: Dataset[Question]) -> str:
    """Return, in words, which rows were left out of a set by `unique` since an earlier one asks the same; "" for none.

    Such rows may differ in case or spaces, and in their answers, of which the first row's counts.
    """
    if not isinstance(kept, Subset):
        return ""
    asked = {comparison_key(kept[i].text): kept[i] for i in range(len(kept))}
    chosen = set(kept.indices)
    others = [kept.source[i] for i in range(len(kept.source)) if i not in chosen]
    again = [(asked[key], q) for q in others if (key := comparison_key(q.text)) in asked]
    if not again:
        return ""
    said = (
        f"{len(again):,} of {len(kept.source):,} rows of '{kept.name}' ask what an earlier row asks, case and spaces "
        "aside, and are left out"
    )
    contrary = [q.id for was, q in again if answer_of(was.columns) != answer_of(q.columns)]
    if not contrary:
        return said
    shown = f"{', '.join(contrary[:3])}{', ...' if len(contrary) > 3 else ''}"
    return f"{said}, {len(contrary):,} of them with another answer ({shown}): the first row's counts"


def disjoint(train: Dataset[Item], held_out: Dataset[Item], least: int = 1) -> Subset[Item]:
    """Return ``train`` without the questions that ``held_out`` asks; ``dropped`` says how many those were.

    Looks at every question of both sets once: a generator that needs 20 ms for an item needs 20 s for 1,000.

    Raises:
        ConfigError: Fewer than ``least`` remain.
    """
    kept_back = _keys(held_out)
    places = track(range(len(train)), _COMPARING, len(train))
    keep = tuple(i for i in places if comparison_key(train[i].text) not in kept_back)
    if len(keep) < least:
        raise ConfigError(
            f"'{train.name}' keeps {len(keep)} of its {len(train)} training tasks after {len(held_out)} "
            f"held-out tasks are taken out, and needs at least {least}; hold out fewer, or widen the task"
        )
    return Subset(train, keep)


def check_disjoint(train: Dataset[Item], held_out: Dataset[Item]) -> None:
    """Raise DatasetError naming the tasks whose question is in both sets; do nothing when there is none."""
    # A second pass over finished sets, by their texts alone: it does not trust how they were made.
    kept_back = _keys(held_out)
    common = [t.id for t in _each(train) if comparison_key(t.text) in kept_back]
    if common:
        raise DatasetError(
            f"{len(common)} of {len(train)} training tasks are also held out, so the evaluation would "
            f"measure memory: {', '.join(common[:10])}{', ...' if len(common) > 10 else ''}"
        )


def by_content(items: Dataset[Item], held_out: HeldOut) -> tuple[Subset[Item], Subset[Item]]:
    """Return (training, held-out): a hash of its text decides where each question goes.

    The same question lands on one side however often it occurs and in whatever order. A ``fraction`` of the different
    questions is kept from training, in expectation, so that adding rows to a file moves none across; where that is
    fewer than are asked, the kept ones are exactly as many as are asked.

    Returns:
        The rows to train on, and the different questions to ask.

    Raises:
        ConfigError: No question is left for training.
    """
    places: dict[str, list[int]] = {}
    for index in track(range(len(items)), _COMPARING, len(items)):
        places.setdefault(comparison_key(items[index].text), []).append(index)
    # Ranked by a hash of the text, so that rows that are added to a file do not move the others across.
    ranked = sorted(places, key=lambda key: _position(key, held_out.seed))
    asked = min(held_out.most, max(1, int(held_out.fraction * len(places)))) if held_out.size is None else held_out.size
    if asked >= len(places):
        # A tenth is what the message suggests; with one question nothing can be held out.
        fitting = max(1, len(places) // 10) if len(places) > 1 else 0
        raise ConfigError(
            f"'{items.name}' has {len(places)} different questions, and holding out {asked} leaves none to train on; "
            f"set held_out.size = {fitting}, or name a separate file with evaluation.task"
        )
    share = sum(_position(key, held_out.seed) < held_out.fraction for key in ranked) if asked else 0
    kept = set(ranked[: max(asked, min(share, len(places) - 1))])
    train = sorted(index for key in ranked if key not in kept for index in places[key])
    different = sorted(places[key][0] for key in kept)[:asked]
    return Subset(items, tuple(train)), Subset(items, tuple(different))


def _position(key: str, seed: int) -> float:
    """Return where ``key`` falls in [0, 1), uniform over keys."""
    hashed = hashlib.blake2b(f"{seed}/{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "big") / 2**64


def _each(items: Dataset[Item]) -> Iterable[Item]:
    return (items[index] for index in track(range(len(items)), _COMPARING, len(items)))


def _keys(items: Dataset[Item]) -> set[str]:
    return {comparison_key(item.text) for item in _each(items)}


_SHOWN = 3
_ASKED_TOO = ("tools", "images", "videos", "audio")
NUMBERING = ("id", "index", "idx", "uuid", "extra_info", "__index_level_0__")
"""Columns that number rows and say nothing of the question."""


@dataclass
class Repetitions:
    """Rows of a table that ask exactly what an earlier row asks.

    A question and its answer are one prompt: published tables repeat rows (DAPO-Math-17k a hundred times), and whatever
    remembers prompts would meet each copy once. A question with another answer stays a prompt of its own and is named,
    for the answer may be what tells two games apart, or one of them may be wrong.

    Attributes:
        name: Name of the table.
        is_merging: Whether repetitions are left out.
    """

    name: str
    is_merging: bool
    _first: dict[str, int] = field(default_factory=dict)
    _answered: dict[str, tuple[int, Question]] = field(default_factory=dict)
    _again: list[tuple[int, int]] = field(default_factory=list)
    _repeating: int = 0
    _contrary: list[tuple[int, int]] = field(default_factory=list)
    _differing: dict[str, int] = field(default_factory=dict)
    _rows: int = 0

    def is_kept(self, question: Question, number: int, copies: Sequence[int] = ()) -> bool:
        """Return whether the row ``number`` is a prompt of its own, its ``copies`` being none."""
        self._rows += 1 + len(copies)
        columns = question.columns
        asked = digest(question.content, [columns.get(name) for name in _ASKED_TOO])
        answer = answer_of(columns)
        # Without an answer, all columns together say what a row is.
        compared = {k: v for k, v in columns.items() if k not in NUMBERING} if answer is None else answer
        if question.turns:
            compared = [compared, question.turns]
        earlier, same = self._answered.setdefault(digest(asked, compared), (number, question))
        # The row itself, if an equal one came before it, and its copies in any case.
        again = [other for other in (number, *copies) if other != earlier]
        self._repeating += len(again)
        # The lowest row numbers are shown, whatever the order in which rows arrive.
        self._again = nsmallest(_SHOWN, [*self._again, *((other, earlier) for other in again[:_SHOWN])])
        if earlier == number:
            first = self._first.setdefault(asked, number)
            if first != number and answer is not None:
                self._contrary.append((number, first))
            return True
        if self.is_merging and columns != same.columns:
            for name in {*columns, *same.columns}.difference(NUMBERING):
                if columns.get(name) != same.columns.get(name):
                    self._differing[name] = self._differing.get(name, 0) + len(again)
        return not self.is_merging

    @property
    def said(self) -> str:
        """Which rows ask the same, in words; "" for none."""
        said = []
        if self._repeating:
            kept = self._rows - self._repeating
            merged = f"are merged: {kept:,} prompts remain (task.repeated)" if self.is_merging else "are trained on too"
            said.append(
                f"{self._repeating:,} of {self._rows:,} rows of '{self.name}' ask the same as an earlier row "
                f"({_pairs(self._again, self._repeating)}) and {merged}"
            )
        if self._differing:
            named = ", ".join(f"'{name}' in {count:,}" for name, count in sorted(self._differing.items())[:3])
            said.append(f"merged rows differ in {named}, and the first row's counts")
        if self._contrary:
            said.append(
                f"{len(self._contrary):,} of {self._rows:,} rows of '{self.name}' ask what an earlier row asks and "
                f"have another answer ({_pairs(self._contrary, len(self._contrary))}): one is wrong, and each stays a "
                "prompt"
            )
        return "; ".join(said)


def _pairs(pairs: Sequence[tuple[int, int]], count: int) -> str:
    shown = [f"row {number} as row {earlier}" for number, earlier in pairs[:_SHOWN]]
    return ", ".join(shown) + (", ..." if count > _SHOWN else "")
