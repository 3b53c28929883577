"""Hostile text on a screen obeys nothing and has the width that it is given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gnomon.insight.watch.lines import cut, filled, one_line, tame, wrapped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("over\rwritten\x08", "over\\rwritten\\x08"),
        ("abc\u202edcba\u2066x", "abc\\u202edcba\\u2066x"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\ud800", "\\ud800"),
        ("[bold red]no markup[/]", "[bold red]no markup[/]"),
        ("漢字 and é", "漢字 and é"),
        ("\U000f0000", "\ufffd"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text: str, shown: str):
    """Escapes, C1 controls, carriage returns, bidi marks, characters without width; markup and wide text stay."""
    assert tame(text) == shown


def test_marks_do_not_pile_up():
    """A letter keeps two of a hundred accents, so that no other line is covered."""
    assert tame("a" + "\u0301" * 100 + "b") == "a\u0301\u0301b"


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    """What a variable of the environment keeps, and what has the form of a provider's key."""
    monkeypatch.setenv("JUDGE_API_KEY", "1234567890abc")

    assert tame("the key is 1234567890abc") == "the key is [JUDGE_API_KEY]"


def test_the_middle_of_a_long_text_is_left_out():
    """Of 10,000 characters the first and the last 3,000 stay, with a word on how many do not."""
    shown = tame("a" * 5000 + "b" * 5000)

    assert shown.startswith("a" * 3000 + " [... 4,000 characters ...] ")
    assert shown.endswith("b" * 3000)


@given(text=st.text(), width=st.integers(0, 30))
def test_no_line_is_wider_than_it_may_be(text: str, width: int):
    """A law over any characters: a cut, filled or folded line has at most (or exactly) its cells, and no controls."""
    lines = wrapped(text, width)
    line = one_line(text, width)

    assert all(cell_len(row) <= max(width, 2) for row in lines)
    assert cell_len(line) <= width
    assert cell_len(filled(tame(text).replace("\n", " "), width)) == width
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for row in [*lines, line] for c in row)


@given(st.text(alphabet="ab 漢\n", max_size=60), st.integers(2, 12))
def test_folding_loses_nothing(text: str, width: int):
    """A law: the letters of the folded lines are the letters of the text, in order."""
    assert "".join("".join(wrapped(text, width)).split()) == "".join(text.split())


def test_a_wide_character_is_not_halved():
    """Three cells hold one character of two cells and an ellipsis, not one and a half."""
    assert cut("漢字漢字", 4) == "漢…"
    assert filled("漢字漢字", 4) == "漢… "
