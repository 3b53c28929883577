"""Several sets as one, in fixed proportions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from random import Random

from gnomon.core.errors import ConfigError
from gnomon.tasks.question import Question, QuestionSet


def schedule(weights: Sequence[float], size: int) -> tuple[int, ...]:
    """Return which part each of ``size`` places belongs to.

    Every place goes to the part that is furthest behind its share, so each beginning of the mixture, not
    only the whole, holds the parts in proportion to within one task or so.

    >>> schedule([3, 1], 8)
    (0, 0, 1, 0, 0, 0, 1, 0)
    """
    total = sum(weights)
    counts = [0] * len(weights)
    places = []
    for place in range(size):
        behind = [weight / total * (place + 1) - count for weight, count in zip(weights, counts, strict=True)]
        part = max(range(len(weights)), key=behind.__getitem__)
        counts[part] += 1
        places.append(part)
    return tuple(places)


class Mixture:
    """``size`` questions from several sets, in proportion to their weights; none is taken twice.

    Within a part the order is shuffled by ``seed``. Ids become ``NAME:id`` with the part's name, and parts of one name
    are told apart by #2, #3, so ids stay unique.

    Raises:
        ConfigError: A part holds fewer questions than its share, or has no share at all, or two parts have one id.
    """

    def __init__(self, parts: Sequence[tuple[float, QuestionSet]], size: int, seed: int = 0) -> None:
        self.name = "+".join(dict.fromkeys(part.name for _, part in parts))
        self._parts = [part for _, part in parts]
        self._labels = labels_of([part.name for part in self._parts])
        places = schedule([weight for weight, _ in parts], size)
        _check_shares(self._parts, Counter(places))
        orders = []
        for label, part in zip(self._labels, self._parts, strict=True):
            order = list(range(len(part)))
            # Seeded by the part's name: another part that is added changes no order of the others.
            Random(f"mixture/{seed}/{label}").shuffle(order)
            orders.append(iter(order))
        self._where = [(part, next(orders[part])) for part in places]
        self._refuse_equal_ids()

    @property
    def parts(self) -> tuple[QuestionSet, ...]:
        """The sets that it is of; a part may be a view of one."""
        return tuple(self._parts)

    def _refuse_equal_ids(self) -> None:
        # Only where one label begins another can ids meet: "b:1" of a part "a" and "1" of a part "a:b".
        labels = list(enumerate(self._labels))
        meeting = {part for n, one in labels for m, two in labels if two.startswith(f"{one}:") for part in (n, m)}
        found: dict[str, int] = {}
        for index, (part, _) in enumerate(self._where):
            other = found.setdefault(self[index].id, part) if part in meeting else part
            if other != part:
                names = self._labels[other], self._labels[part]
                raise ConfigError(
                    f"mixture: the parts '{names[0]}' and '{names[1]}' both have the question {self[index].id!r}, for "
                    "the name of one begins that of the other; rename the file of one of them, such as "
                    f"{max(names, key=len).replace(':', '-')}"
                )

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> Question:
        part, place = self._where[index]
        question = self._parts[part][place]
        return replace(question, id=f"{self._labels[part]}:{question.id}")


def _check_shares(parts: Sequence[QuestionSet], shares: Counter[int]) -> None:
    for number, part in enumerate(parts if shares else ()):  # held_out.size = 0 keeps nothing back of any part
        share = shares[number]
        if share == 0:
            raise ConfigError(
                f"mixture of {shares.total()} tasks has none of part {number} ('{part.name}'): "
                "raise its weight or the mixture's size, or leave it out"
            )
        if share > len(part):
            fits = shares.total() * len(part) // share
            raise ConfigError(
                f"mixture of {shares.total()} tasks needs {share} of part {number} ('{part.name}'), "
                f"which has {len(part)}; lower the mixture's size to {fits}, or the part's weight"
            )


def labels_of(names: Sequence[str]) -> list[str]:
    """Return what the ids of each part begin with, from the parts' names.

    >>> labels_of(["a", "b", "a", "a"])
    ['a', 'b', 'a#2', 'a#3']
    """
    labels: list[str] = []
    for name in names:
        others = (f"{name}#{number}" for number in range(2, len(names) + 2))
        # A part may itself be called "a#2".
        labels.append(next(label for label in chain([name], others) if label not in labels))
    return labels
