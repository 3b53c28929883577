"""Where in a completion the answer stands."""

import re
from typing import Literal

from gnomon.verifiers.numbers import Which, choose_number

Extract = Literal["last_number", "first_number", "only_number", "last_line", "boxed", "tags", "whole"]

_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}$")
_BOX_LENGTH = len(r"\boxed") + 3


def extract(text: str, how: Extract) -> str | None:
    r"""Return the answer that ``text`` gives, without surrounding whitespace; None when it gives none.

    last_number, first_number, only_number: that number's plain text (1,234 is "1234"); "only" wants just one; none
    where that number is a part of something else (the 2 of x^2).
    last_line: the last line that is not blank. boxed: the content of the last balanced \boxed{...}.
    tags: between the last <answer> and its </answer>. whole: everything.

    >>> extract("I think <answer> 1,200 </answer>", "tags"), extract("... so 1,200 apples.", "last_number")
    ('1,200', '1200')
    """
    if how == "last_number" or how == "first_number" or how == "only_number":
        number = choose_number(text, _WHICH[how])
        return number.text if number else None
    if how == "boxed":
        found = last_boxed(text)
    elif how == "tags":
        found = next(reversed(_TAGS.findall(text)), None)
    else:
        lines = text.strip().splitlines() if how == "last_line" else [text]
        found = lines[-1] if lines else None
    return (found or "").strip() or None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces balance.

    A space before the brace is TeX's as well; an escaped brace is no brace. One pass over the text, whatever is in it.
    None when there is no such box.

    >>> last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    opened: list[int] = []
    best: tuple[int, int] | None = None
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\" and text[index + 1 : index + 2] in ("{", "}", "\\"):
            index += 1
        elif character == "{":
            opened.append(index)
        elif character == "}" and opened:
            start = opened.pop()
            is_later = best is None or start > best[0]
            if is_later and _BOX.search(text[max(0, start - _BOX_LENGTH) : start]):
                best = (start, index)
        index += 1
    return text[best[0] + 1 : best[1]] if best else None


def final_answer(text: str) -> str | None:
    """Return what a worked solution says is its answer: what follows the last ####, else the content of its last box.

    None when it has neither, as a bare answer.

    >>> final_answer("24 + 48 = 72 #### 72"), final_answer("72")
    (' 72', None)
    """
    return text.rpartition("####")[2] if "####" in text else last_boxed(text)


_WHICH: dict[str, Which] = {"last_number": "last", "first_number": "first", "only_number": "only"}
