from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.build import MixtureTask, WeightedTask, _split
from gnomon.tasks.mixture import Mixture, schedule
from gnomon.tasks.question import ListDataset, Question
from gnomon.tasks.split import HeldOut

SUMS = ArithmeticTask(size=100)
PRODUCTS = ArithmeticTask(size=100, operators=("*",))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 200))
def test_every_beginning_is_in_proportion(weights: list[float], size: int) -> None:
    """No part is ever a whole task ahead of its share, and never more behind than there are other parts."""
    places = schedule(weights, size)

    for end in range(1, size + 1):
        counts = Counter(places[:end])
        for part, weight in enumerate(weights):
            share = weight / sum(weights) * end
            assert counts[part] < share + 1
            assert counts[part] > share - len(weights)


def test_parts_of_one_name_keep_their_ids_apart() -> None:
    """Two parts with the same ids give a mixture whose ids are all different, and the same each time."""
    mixture, again = (Mixture([(1, SUMS), (1, SUMS)], size=100, seed=3) for _ in range(2))

    ids = [mixture[i].id for i in range(len(mixture))]

    assert len(set(ids)) == 100
    assert ids == [again[i].id for i in range(100)]
    assert {name.split(":")[0] for name in ids} == {"arithmetic", "arithmetic#2"}


def test_weights_decide_how_many() -> None:
    """With weights 3 and 1, 60 of 80 are sums; each question of a part is taken at most once."""
    mixture = Mixture([(3, SUMS), (1, PRODUCTS)], size=80, seed=0)

    questions = [mixture[i] for i in range(80)]

    assert sum("+" in q.text for q in questions) == 60
    assert len({q.id for q in questions}) == 80


def test_another_seed_takes_other_questions() -> None:
    """Within a part the order is shuffled by the seed."""
    first, second = (Mixture([(1, SUMS)], size=20, seed=s) for s in (0, 1))

    assert [first[i].id for i in range(20)] != [second[i].id for i in range(20)]


def test_a_part_that_is_too_small_or_empty_handed_is_refused() -> None:
    """The message says what is needed, what there is, and the size that would fit."""
    with pytest.raises(ConfigError, match=r"needs 200 of part 0 .* which has 100; lower the mixture's size to 100"):
        Mixture([(1, SUMS)], size=200)
    with pytest.raises(ConfigError, match="has none of part 1"):
        Mixture([(1, SUMS), (0.001, PRODUCTS)], size=10)


def test_nothing_is_held_out_of_a_mixture() -> None:
    """With held_out.size = 0 all of it is trained on, as of one set."""
    parts = tuple(WeightedTask(ArithmeticTask(lowest=low, highest=low + 9)) for low in (0, 30))
    trained, kept = _split(MixtureTask(parts, size=20), HeldOut(size=0))
    assert (len(trained), len(kept)) == (20, 0)


def made(name: str, *ids: str) -> ListDataset:
    return ListDataset(name, tuple(Question(each, f"{name} {each}?", f"{name} {each}?") for each in ids))


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ([made("a", "b:1", "2"), made("a:b", "1", "3")], ("a", "a:b")),
        ([made("a:b", "3", "1"), made("a", "2", "b:1")], ("a:b", "a")),
        ([made("a", "b:c:1"), made("x", "1"), made("a:b:c", "1")], ("a", "a:b:c")),
        ([made("a:b", "c:1"), made("a", "x"), made("a:b:c", "1")], ("a:b", "a:b:c")),
        ([made("a", "1"), made("a", "b:1"), made("a#2:b", "1")], ("a#2", "a#2:b")),
    ],
)
def test_parts_of_one_id_are_refused_by_name(parts: list[ListDataset], names: tuple[str, str]) -> None:
    """An id begins with its part's name, so "b:1" of a part "a" is "1" of a part "a:b"."""
    with pytest.raises(ConfigError, match=r"both have the question .*rename the file of one") as caught:
        Mixture([(1, part) for part in parts], size=sum(map(len, parts)))
    assert all(f"'{name}'" in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("parts", "ids"),
    [
        ([made("a", "1", "b:2"), made("a:b", "1", "3")], {"a:1", "a:b:2", "a:b:1", "a:b:3"}),
        ([made("a", "1"), made("a#2", "1"), made("a", "1")], {"a:1", "a#2:1", "a#3:1"}),
        ([made("a", "1"), made("a", "1"), made("a#2", "1")], {"a:1", "a#2:1", "a#2#2:1"}),
        ([made("a#2", "1"), made("a", "1"), made("a", "1"), made("a#3", "1")], {"a#2:1", "a:1", "a#3:1", "a#3#2:1"}),
    ],
)
def test_other_names_that_begin_alike_are_one_mixture(parts: list[ListDataset], ids: set[str]) -> None:
    """Names may begin alike where no id meets, and a part that is called as another's second is told apart too."""
    mixture = Mixture([(1, part) for part in parts], size=sum(map(len, parts)))

    assert {mixture[index].id for index in range(len(mixture))} == ids
