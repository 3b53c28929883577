from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.tasks.question import ListDataset, Question, comparison_key
from gnomon.tasks.split import HeldOut, by_content, check_disjoint, disjoint, first, repeated, unique


def asked(name: str, texts: list[str]) -> ListDataset:
    return ListDataset(name, tuple(Question(f"{name}{n}", text, text) for n, text in enumerate(texts)))


texts = st.lists(st.sampled_from(["a", " A", "b", "b\n", "c c", "c  C", "d", "e"]), max_size=12)


@given(texts, texts)
def test_disjoint_drops_what_is_held_out_and_only_that(train: list[str], held_out: list[str]) -> None:
    """The rest keeps its order and ids; dropped counts the others; then the check passes."""
    keys = {comparison_key(text) for text in held_out}

    kept = disjoint(asked("t", train), asked("h", held_out), least=0)

    assert [kept[i].id for i in range(len(kept))] == [
        f"t{n}" for n, text in enumerate(train) if comparison_key(text) not in keys
    ]
    assert kept.dropped == len(train) - len(kept)
    check_disjoint(kept, asked("h", held_out))


def test_an_overlap_is_named() -> None:
    """check_disjoint names the training tasks that are held out."""
    with pytest.raises(DatasetError, match=r"1 of 2 training tasks are also held out.*: t1"):
        check_disjoint(asked("t", ["a", "B  b"]), asked("h", ["b b"]))


def test_too_few_training_tasks_are_refused() -> None:
    """Training keeps 1 of 3 tasks and needs 2."""
    with pytest.raises(ConfigError, match=r"keeps 1 of its 3 training tasks after 2 held-out .* at least 2"):
        disjoint(asked("t", ["a", "b", "c"]), asked("h", ["a", "b"]), least=2)


def test_unique_keeps_the_first_of_each() -> None:
    """Case and whitespace do not make another question."""
    view = unique(asked("t", ["a b", "A  b ", "c", "a b"]))

    assert [view[i].id for i in range(len(view))] == ["t0", "t2"]
    assert view.dropped == 2
    assert len(first(view, 1)) == 1


@given(st.sets(st.integers(0, 400), min_size=30, max_size=40), st.randoms(), st.integers(0, 5))
def test_a_question_lands_on_one_side(chosen: set[int], random: Random, seed: int) -> None:
    """However often it occurs and in whatever order, a question is on one side; held-out ones differ."""
    held_out = HeldOut(size=1, fraction=0.5, seed=seed)
    numbers = random.sample(sorted(chosen) * 3, k=3 * len(chosen))
    shuffled = random.sample(numbers, k=len(numbers))

    train, kept = by_content(asked("t", [str(n) for n in numbers]), held_out)
    again, _ = by_content(asked("t", [str(n) for n in shuffled]), held_out)

    kept_texts = [kept[i].text for i in range(len(kept))]
    train_texts = [train[i].text for i in range(len(train))]
    assert len(set(kept_texts)) == len(kept_texts)
    assert not set(kept_texts) & set(train_texts)
    assert set(kept_texts) | set(train_texts) <= {str(n) for n in numbers}
    assert sorted(train_texts) == sorted(again[i].text for i in range(len(again)))


def test_the_held_out_fraction_is_about_what_was_asked() -> None:
    """Of 2,000 questions a fraction of 0.1 is 200, within four standard deviations of 13.4."""
    train, kept = by_content(asked("t", [str(n) for n in range(2000)]), HeldOut(size=1))

    assert abs(2000 - len(train) - 200) < 54
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("rows", "held_out", "count"),
    [
        (10, HeldOut(), 1), (60, HeldOut(), 6), (1999, HeldOut(), 199), (2500, HeldOut(), 200),
        (25, HeldOut(size=3), 3), (25, HeldOut(fraction=0.3), 7), (3, HeldOut(size=2), 2), (25, HeldOut(size=0), 0),
        (2, HeldOut(), 1),
    ],
)  # fmt: skip
def test_as_many_are_held_out_as_were_asked(rows: int, held_out: HeldOut, count: int) -> None:
    """The default is the smaller of 200 and a tenth; a size is exact; 0 trains on everything."""
    train, kept = by_content(asked("t", [str(n) for n in range(rows)]), held_out)

    assert len(kept) == count
    assert len(train) >= 1
    assert count or len(train) == rows
    assert not {train[i].text for i in range(len(train))} & {kept[i].text for i in range(len(kept))}


def test_what_leaves_nothing_to_train_on_is_refused() -> None:
    """Ten rows cannot hold out 200 questions; the message has a number that works."""
    with pytest.raises(ConfigError, match=r"10 different questions, and holding out 200 leaves none .*size = 1"):
        by_content(asked("t", [str(n) for n in range(10)]), HeldOut(size=200))


@pytest.mark.parametrize("settings", [{"size": -1}, {"fraction": 0.0}, {"fraction": 1.0}])
def test_settings_that_hold_out_less_than_nothing_or_all_are_refused(settings: dict[str, float]) -> None:
    """The held-out size is not negative; the fraction is above 0 and below 1."""
    with pytest.raises(ConfigError, match=r"held_out\.(size|fraction) must be (at least 0|above 0 and below 1)"):
        HeldOut(**settings)  # type: ignore[arg-type]


def test_rows_that_ask_the_same_are_counted() -> None:
    """Of five rows three repeat one, two of them with another answer; those of what is not asked do not count."""
    rows = [("1+1=", "2"), ("1+1= ", "2"), ("1+1=", "3"), ("A?", "1"), ("a?", "2")]
    listed = ListDataset("t", tuple(Question(f"q{i}", q, q, {"answer": a}) for i, (q, a) in enumerate(rows)))
    kept = unique(listed)

    assert repeated(kept) == (
        "3 of 5 rows of 't' ask what an earlier row asks, case and spaces aside, and are left out, 2 of them with "
        "another answer (q2, q4): the first row's counts"
    )
    assert repeated(first(kept, 1)).startswith("2 of 5 rows of 't' ask")
    assert repeated(unique(ListDataset("t", listed.questions[2:4]))) == ""
    assert repeated(listed) == ""
