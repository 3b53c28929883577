"""A count of everything in a run that can change."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from gnomon.core.types import State
from gnomon.records.state_audit import unsaved_generators, unsaved_state


@dataclass(frozen=True)
class Fixed:
    """What cannot change itself, and holds something."""

    inner: object = None


@dataclass
class Counter:
    """What changes."""

    count: int = 0

    def state(self) -> State:
        return State(values={"count": self.count})

    def restore(self, state: State) -> None:
        self.count = int(state.values["count"])

    def tell(self) -> int:
        return self.count


class Slotted:
    """What has no dictionary."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = [1]


def closing_over(item: object) -> Callable[[], object]:
    return lambda: item


def defaulting_to(item: object) -> Callable[..., object]:
    return lambda given=item: given


HIDDEN = {
    "itself": lambda item: item,
    "in a tuple": lambda item: (1, (2, item)),
    "in a frozen dataclass": lambda item: Fixed(Fixed(item)),
    "in a closure": closing_over,
    "in a default": defaulting_to,
    "in a partial function": lambda item: partial(print, item, end=""),
    "in a keyword": lambda item: partial(print, file=item),
    "in a bound method": lambda item: item.tell,
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_can_change_is_found_wherever_it_is(hidden: str):
    """And it is found no more once it is a part, or of a type that is known to be stateless."""
    counter = Counter()
    root = Fixed(HIDDEN[hidden](counter))

    (found,) = unsaved_state(root, [], {})
    assert found.startswith("run.inner")
    assert found.endswith("Counter)")
    assert unsaved_state(root, [counter], {}) == []
    assert unsaved_state(root, [], {Counter: "for the test"}) == []


@pytest.mark.parametrize(
    "item",
    [[1], {"a": 1}, {1}, bytearray(b"a"), np.zeros(2), torch.zeros(2), Random(0), np.random.default_rng(0), Slotted()],
    ids=lambda item: type(item).__name__,
)
def test_containers_arrays_and_generators_can_change(item: object):
    """Nothing is taken on trust: what is not known to be fixed can change."""
    assert len(unsaved_state(Fixed(item), [], {})) == 1


def test_constants_cannot_change():
    """Numbers, texts, types, functions, and frozen dataclasses and tuples of them."""
    items = (None, 1, 2.0, "a", b"b", int, len, Fixed(), frozenset({1}), torch.float32, closing_over(3), Fixed.__init__)

    assert unsaved_state(Fixed(items), [], {}) == []


def test_an_heir_of_a_stateless_type_is_another_type():
    """It may remember what its parent does not."""

    class Heir(Counter):
        pass

    assert len(unsaved_state(Fixed(Heir()), [], {Counter: "for the test"})) == 1


@dataclass
class Drawing:
    """A part that draws from a generator of its own, and saves it or not."""

    generator: Any
    look: Callable[[Any], Any]
    more: list[object] = field(default_factory=list)

    def state(self) -> State:
        return State(values={"generator": self.look(self.generator)})

    def restore(self, state: State) -> None:
        return


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Random": (lambda: Random(0), lambda g: list(g.getstate()[1])),
    "Generator": (lambda: np.random.default_rng(0), lambda g: g.bit_generator.state["state"]["state"]),
    "RandomState": (lambda: np.random.RandomState(0), lambda g: [int(g.get_state()[2])]),
    "torch": (torch.Generator, lambda g: g.get_state().tolist()),
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_part_that_draws_saves_its_generator(kind: str):
    """A generator whose place is in the state is fine; one whose place is not is named; both are left as they were."""
    make, look = WAYS[kind]
    saves, forgets = Drawing(make(), look), Drawing(make(), lambda generator: 0)
    before = look(saves.generator), look(forgets.generator)

    assert unsaved_generators({"part": saves}) == []
    (found,) = unsaved_generators({"part": forgets})
    assert found.startswith("part.generator (")
    assert (look(saves.generator), look(forgets.generator)) == before


def test_a_generator_deep_within_a_part_is_found():
    """Behind a list, a dictionary and an object."""
    part = Drawing(Random(0), lambda generator: list(generator.getstate()[1]))
    part.more = [{"deep": Drawing(Random(1), lambda generator: 0)}]

    assert unsaved_generators({"part": part}) == ["part.more.0.deep.generator (random.Random)"]


def test_a_part_answers_for_its_own_generator_alone():
    """One part that holds another is not asked for the other's."""
    inner = Drawing(Random(0), lambda generator: list(generator.getstate()[1]))
    outer = Drawing(inner, lambda generator: 0)

    assert unsaved_generators({"inner": inner, "outer": outer}) == []
    assert unsaved_generators({"outer": outer}) == ["outer.generator.generator (random.Random)"]
