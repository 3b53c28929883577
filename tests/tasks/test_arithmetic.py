import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.tasks.arithmetic import ArithmeticTask


@given(
    st.integers(1, 5), st.integers(0, 9), st.integers(0, 90),
    st.lists(st.sampled_from("+-*"), min_size=1, unique=True), st.integers(0, 99),
)  # fmt: skip
def test_answers_are_the_values_of_the_expressions(
    terms: int, lowest: int, more: int, operators: list[str], seed: int
) -> None:
    """Python's own evaluation of the expression gives the answer, and its numbers are in range."""
    task = ArithmeticTask(
        terms=terms, lowest=lowest, highest=lowest + more, operators=tuple(operators), size=3, seed=seed
    )

    for index in range(len(task)):
        expression = task[index].text.removesuffix("=")
        assert task[index].columns["answer"] == str(eval(expression))
        numbers = [int(n) for n in expression.replace("-", "+").replace("*", "+").split("+")]
        assert len(numbers) == terms
        assert all(lowest <= n <= lowest + more for n in numbers)


def test_a_larger_set_begins_with_the_smaller_one() -> None:
    """The question at an index does not depend on size."""
    small, large = ArithmeticTask(size=5), ArithmeticTask(size=50)

    assert [small[i] for i in range(5)] == [large[i] for i in range(5)]


def test_seeds_and_settings_have_their_own_ids() -> None:
    """Ids differ between seeds, between settings and between indices; the set ends with IndexError."""
    tasks = [ArithmeticTask(size=2), ArithmeticTask(size=2, seed=1), ArithmeticTask(size=2, highest=8)]

    assert len({task[i].id for task in tasks for i in range(2)}) == 6
    with pytest.raises(IndexError, match="out of range"):
        tasks[0][2]


def test_the_phrase_surrounds_the_expression() -> None:
    """The braces of the phrase are replaced by the expression: 5 alone when there is one term from 5 to 5."""
    assert ArithmeticTask(terms=1, lowest=5, highest=5, phrase="What is {}?")[0].text == "What is 5?"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"terms": 0}, "terms must be at least 1, got 0"),
        ({"lowest": 5, "highest": 4}, "lowest must be from 0 to highest = 4, got 5"),
        ({"operators": ("/",)}, "operators must be some of"),
        ({"operators": ()}, "operators must be some of"),
        ({"phrase": "?"}, "phrase must be a text with {} in it once, got"),
        ({"size": 0}, "size must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], reason: str) -> None:
    """Each broken claim is named."""
    with pytest.raises(ConfigError, match=reason):
        ArithmeticTask(**settings)  # type: ignore[arg-type]
