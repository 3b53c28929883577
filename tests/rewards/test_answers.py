import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.rewards.answers import Extract, extract, last_boxed


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ("last_number", "3, then 1,234", "1234"),
        ("first_number", "3 and 1,234", "3"),
        ("only_number", "it is 3", "3"),
        ("only_number", "3 and 1,234", None),
        ("last_number", "none", None),
        ("last_line", "first\n  second \n\n", "second"),
        ("last_line", " \n ", None),
        ("boxed", r"so \boxed{ 7 }", "7"),
        ("boxed", "so 7", None),
        ("tags", "<answer>a</answer> no, <answer>\nb\n</answer>", "b"),
        ("tags", "<answer>a <answer>b</answer>", "b"),
        ("tags", "<answer>never closed", None),
        ("tags", "<answer>  </answer>", None),
        ("whole", "  all of it ", "all of it"),
        ("whole", "", None),
    ],
)
def test_the_answer_stands_where_it_is_looked_for(how: Extract, text: str, answer: str | None):
    """Each way finds its answer without surrounding whitespace, or none."""
    assert extract(text, how) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{}", ""),
        (r"\boxed 5", "5"),
        (r"\boxed x", None),
        (r"} {\boxed{5}", "5"),
        (r"\boxed{1 \boxed{2}}", "2"),
    ],
)
def test_the_last_balanced_box_counts(text: str, content: str | None):
    """Unbalanced boxes are passed over, escaped braces are text, the innermost of nested ones is the last."""
    assert last_boxed(text) == content


def test_a_hundred_thousand_open_boxes_take_one_pass():
    """No quadratic search: 700,000 characters without a closing brace hold no box."""
    assert last_boxed("\\boxed{" * 100_000) is None


@given(st.text(alphabet="\\boxed{}12 ", max_size=200))
def test_a_box_is_never_invented(text: str):
    """What is found stands in the text, inside a box; nothing is so close that the box is a part of it."""
    text = text.replace("\\boxed", " \\boxed").replace("}", "} ")
    content = last_boxed(text)

    assert content is None or f"\\boxed{{{content}}}" in text
