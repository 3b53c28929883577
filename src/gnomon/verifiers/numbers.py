r"""Numbers in text, as exact rationals.

What is a number: signs, thousands commas, decimals, exponents, fractions a/b and LaTeX's \frac{a}{b}:

    -5   1,234.50   .5   6.02e23   3/4   3 / 4   -\frac{1}{2}   10{,}000   10,\!000   $5   5kg   50%

What is not: digits glued to a letter or a point before them (x2, H2O, the 3 of version 1.2.3). A minus after
a word, a digit or a closing bracket subtracts: 5-3 holds 5 and 3. A comma before exactly three digits belongs
to the number, so 100,200 is one number and 100, 200 are two.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

# Nobody's answer is longer, and Python's own conversion of long digit strings takes quadratic time.
LONGEST = 400
LARGEST_EXPONENT = 400

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)"
_PLAIN = rf"(?:(?<![A-Za-z_0-9])(?<![0-9]\.){_WHOLE}(?:\.[0-9]++)?|(?<![\w.])\.[0-9]++)"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-+])?"
    rf"(?P<top>{_PLAIN}(?:[eE][-+]?[0-9]++)?)"
    rf"(?:[ ]?/[ ]?(?P<bottom>{_WHOLE}(?:\.[0-9]++)?))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]++)\}\{([0-9]++)\}")


@dataclass(frozen=True)
class Number:
    """A number as found: its plain text (no commas, no spaces, no plus) and its value.

    value: exact; None when it is none (a division by zero) or absurdly long, which then equals nothing.
    """

    text: str
    value: Fraction | None

    @property
    def canonical(self) -> str:
        """The one text of all numbers of this value: a fraction in lowest terms; without a value the text as found.

        >>> [n.canonical for n in find_numbers("0.50, 2/4, 1e3")]
        ['1/2', '1/2', '1000']
        """
        return self.text if self.value is None else str(self.value)


def find_numbers(text: str) -> list[Number]:
    r"""Return the numbers in ``text``, from left to right.

    >>> [n.text for n in find_numbers(r"1,234 - 5 is \frac{3}{4}, so x2 = -.5.")]
    ['1234', '5', '3/4', '-.5']
    """
    return [_number(match) for match in _NUMBER.finditer(_without_latex(text))]


def parse_number(text: str) -> Number | None:
    """Return the number that ``text`` is, a currency or percent sign aside; None if it is none.

    >>> parse_number(" $1,000 ").text
    '1000'
    >>> parse_number("2 apples") is None
    True
    """
    bare = _without_latex(text).strip().strip("$€£%\\ ").rstrip(".")
    match = _NUMBER.fullmatch(bare)
    return _number(match) if match else None


def exact(value: int | float) -> Fraction:
    """Return a float as the decimal that a person wrote: 0.1 is 1/10, not the nearest binary fraction."""
    return Fraction(repr(value))


def _number(match: "re.Match[str]") -> Number:
    sign = "-" if match["sign"] == "-" else ""
    top = sign + match["top"].replace(",", "")
    bottom = (match["bottom"] or "").replace(",", "")
    text = f"{top}/{bottom}" if bottom else top
    if len(text) > LONGEST or _exponent(top) > LARGEST_EXPONENT:
        return Number(text, None)
    below = Fraction(bottom) if bottom else Fraction(1)
    return Number(text, Fraction(top) / below if below else None)


def _exponent(text: str) -> int:
    exponent = text.lower().partition("e")[2]
    return abs(int(exponent)) if exponent else 0


def _without_latex(text: str) -> str:
    plain = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "")
    # A space keeps 2\frac{1}{2} from becoming 21/2; a sign must stay next to its number.
    return _FRACTION.sub(lambda m: f"{'' if _follows_sign(plain, m.start()) else ' '}{m[1]}/{m[2]}", plain)


def _follows_sign(text: str, index: int) -> bool:
    return index > 0 and text[index - 1] in "+-"
