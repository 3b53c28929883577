from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.rewards.numbers import exact, find_numbers, parse_number


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("5 - 3 = 2", ["5", "3", "2"]),
        ("5-3", ["5", "3"]),
        ("x = -3, y=+4", ["-3", "4"]),
        ("(-2) and \u22127", ["-2", "-7"]),
        ("1,234,567.50 dollars", ["1234567.5"]),
        ("1, 2, 3", ["1", "2", "3"]),
        ("1,2345", ["1", "2345"]),
        ("half is .5.", ["1/2"]),
        ("3/4 or 3 / 4", ["3/4", "3/4"]),
        (r"$-\frac{1}{2}$ and \dfrac{3}{4}", ["-1/2", "3/4"]),
        (r"10{,}000 and 10,\!000", ["10000", "10000"]),
        ("1.5e3 and 2E-2", ["1500", "1/50"]),
        ("5kg at $6 is 50%", ["5", "6", "50"]),
        ("H2O, x_2, v1.2", []),
        ("wait...42", ["42"]),
        ("**42**.", ["42"]),
        ("none at all", []),
    ],
)
def test_numbers_are_found_as_a_person_reads_them(text: str, values: list[str]):
    """Signs, commas, decimals, fractions, exponents and LaTeX; digits that belong to a word are no number."""
    assert [n.value for n in find_numbers(text)] == [Fraction(v) for v in values]


def test_a_mixed_number_is_one_number():
    r"""2\frac{1}{2} is 5/2, never 21/2 nor 2 and a half by itself; a whole before an improper fraction is two."""
    assert [n.value for n in find_numbers(r"2\frac{1}{2}")] == [Fraction(5, 2)]
    assert [n.value for n in find_numbers("-1 1/2")] == [Fraction(-3, 2)]
    assert [n.value for n in find_numbers("3 5/2")] == [3, Fraction(5, 2)]


@pytest.mark.parametrize("text", ["1/0", "9" * 5000, "1e999999999", "1e-999999999"])
def test_what_cannot_be_a_value_has_none(text: str):
    """A division by zero, a number of 5000 digits and an exponent of a billion cost nothing and equal nothing."""
    assert [n.value for n in find_numbers(text)] == [None]


@pytest.mark.parametrize("text", [" $1,000 ", "1000.", "1000%", "€1000", "1e3", "2000/2", "1000 apples", "1000 km"])
def test_a_text_that_is_one_number_is_parsed(text: str):
    """Whitespace, a currency or percent sign, a unit and a final point aside."""
    found = parse_number(text)

    assert found is not None
    assert found.value == 1000


@pytest.mark.parametrize("text", ["", "two", "2 or 3", "2 dozen", "1 2", "1,23", "2x", "2\\pi", "(1,2]"])
def test_a_text_that_is_more_than_one_number_is_none(text: str):
    """Anything beside the number makes it a sentence."""
    assert parse_number(text) is None


def test_a_float_is_the_decimal_that_was_written():
    """0.1 is 1/10."""
    assert exact(0.1) == Fraction(1, 10)


@given(st.integers(-(10**12), 10**12), st.booleans())
def test_every_integer_is_found_again(number: int, commas: bool):
    """Written with or without thousands commas, alone or in a sentence."""
    text = f"{number:,}" if commas else str(number)

    assert [n.value for n in find_numbers(f"so it is {text}, I think")] == [number]


@given(st.text(max_size=300))
def test_any_text_has_numbers_or_none(text: str):
    """Nothing makes the search raise, and every number's plain text parses to its value."""
    for number in find_numbers(text):
        again = parse_number(number.text)
        assert again is not None
        assert again.value == number.value
