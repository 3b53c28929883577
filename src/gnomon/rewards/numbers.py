r"""Numbers in text, as exact rationals.

What is a number: signs, thousands commas, decimals, exponents, fractions a/b and LaTeX's \frac{a}{b}, mixed numbers:

    -5   1,234.50   .5   6.02e23   3 \times 10^4   3/4   3 / 4   -\frac{1}{2}   \frac34   1 1/2   10{,}000   $5   50%

What is not: digits glued to a letter or a point before them (x2, H2O, the 3 of version 1.2.3). A minus after
a word, a digit or a closing bracket subtracts: 5-3 holds 5 and 3. A comma before exactly three digits belongs
to the number, so 100,200 is one number and 100, 200 are two. 3,14 and 1.234,56 are no number: who writes so and
who means two numbers cannot be told apart.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from gnomon.core.tables import packaged_toml

# How people and TeX write numbers, made plain: signs, spaces, thousands, fractions, powers of ten, wrappers.
#
# Every step is one pass over the text whatever is in it: an answer of 700,000 braces costs no more than one of words.

_TABLE = packaged_toml("gnomon.rewards", "numbers.toml")
_WIDE = {0xFEE0 + code: chr(code) for code in map(ord, "0123456789.,/%()[]{}+=$<>:")}
_CHARACTERS = _WIDE | {ord(sign): plain for sign, plain in _TABLE["characters"].items()}
_CHARACTERS |= {ord(sign): plain for plain, signs in _TABLE["alike"].items() for sign in signs}
_CHARACTERS |= {ord(sign): f"\\frac{{{part[0]}}}{{{part[-1]}}}" for sign, part in _TABLE["fractions"].items()}

_PLAIN_TEXT = re.compile(r"[^\\~{'\x80-\U0010ffff]*")
_SEPARATOR = r"(?:\{,\}|['\u2019]|,\\!|\\,|\\!|\\ |\\;|\\:|~|,\\,|[\u00a0\u2007\u2009\u202f])"
# The lookbehinds keep decimals out: the 234 567 of 0.234 567 is no group of thousands.
_THOUSANDS = re.compile(rf"(?<![0-9.,\\])(?<![0-9]\\[,!])[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?![0-9])")
_GROUPS = re.compile(_SEPARATOR)
_WRAPPERS = re.compile(
    r"\\(?:text|text(?:bf|it|rm|sf|tt|normal)|math(?:rm|bf|it|sf|tt)|mbox|hbox|operatorname|emph|underline|bm|"
    r"boldsymbol|ensuremath|textcolor\s?\{[^{}]*\})\s*\{([^{}]*)\}"
)
_NOTHING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|scriptstyle|tiny|small|large|Large|LARGE|huge|Huge|"
    r"rm|bf|limits|hfill|!)(?![a-zA-Z])|\\!|(?<!\\)\{\}|\\(?:phantom|color)\s?\{[^{}]*\}"
)
_SPACING = re.compile(r"(?<!\\)\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;:> ]|~")
_RUNS = re.compile(" {2,}")
CURRENCIES = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd"
_MONEY = re.compile(rf"(?<![\w)\]}}])- ?([{CURRENCIES}])(?=[0-9.])")
_MONIES = {spelling: sign for sign, others in _TABLE["money"].items() for spelling in others.split()}
_MONEY_BEFORE = re.compile(
    rf"(?<![A-Za-z\\])({'|'.join(map(re.escape, sorted(_MONIES, reverse=True)))})(?![A-Za-z])\.? ?(?=[-0-9.])"
)
_SAID_SIGN = re.compile(r"(?<![-\w])(?:(negative)|minus) (?=[$\\]?[0-9.])", re.I)
_SIGN_BEFORE = re.compile(r"((?:[=:([{]|(?<=###)#|(?<=\*)\*|(?<![^\s$(=:])\$|\b(?:is|equals|get)) ?)- (?=[0-9.$\\])")
_SCALES = {"hundred": "e2", "thousand": "e3", "million": "e6", "billion": "e9", "trillion": "e12"}
_SCALED = re.compile(rf"(?<![0-9/.,])([0-9][0-9,]{{0,20}}(?:\.[0-9]{{1,20}})?) ?({'|'.join(_SCALES)})(?![A-Za-z])")
_OVER = re.compile(
    r"\{\s?([^{}\\]{1,20}?)\s?\\over(?![a-z])\s?([^{}\\]{1,20}?)\s?\}|(?<![\w.])(\d{1,9})\s?\\over\s?(\d{1,9})"
)
_BARE_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])")
_DEGREE = re.compile(r"\s*\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])|\s*\^\s*\\degree")
_SCALE = re.compile("\u00b0 *([CFK])(?![a-zA-Z])")
_TENTH = re.compile(r"\\(?:[dtcsx]|nice)frac(?![a-zA-Z])")
_TWINS = re.compile(
    r"\\(?P<open>lbrace)(?![a-zA-Z])|\\(?P<close>rbrace)(?![a-zA-Z])|\\varnothing(?![a-zA-Z])|\\\{\s?\\\}"
)
_ROOT = re.compile(r"\u221a ?(?:\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?|[a-zA-Z]))")
_REPEATING = re.compile(r"(?<![0-9.,])([0-9]{0,18})\.([0-9]{0,18})\\overline ?\{([0-9]{1,18})\}(?![0-9.])")

_PLAIN_NOTATION = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?"
_FRACTION = re.compile(
    rf"\\frac\s{{0,3}}(?:\{{\s{{0,3}}(?P<top>[-+]?{_PLAIN_NOTATION})\s{{0,3}}\}}|(?P<t>[0-9]))"
    rf"\s{{0,3}}(?:\{{\s{{0,3}}(?P<bottom>[-+]?{_PLAIN_NOTATION})\s{{0,3}}\}}|(?P<b>[0-9]))"
)
_POWER = (
    r"10\s{0,3}(?:\^|\*\*)\s{0,3}(?:\{\s{0,3}(?P<braced>[-+]?[0-9]{1,9})\s{0,3}\}|(?P<bare>[-+]?[0-9]{1,9}))(?![0-9^!])"
)
_SCIENTIFIC = re.compile(rf"(?<=[0-9])\s{{0,3}}(?:\\times|\\cdot|\*|[xX])\s{{0,3}}{_POWER}")
_POWER_ALONE = re.compile(rf"(?<![\w.,^_/*\\}})-])(?<![-+*/^] ){_POWER}")


def tidy(text: str) -> str:
    r"""Return ``text`` with one spelling for each sign, space, wrapper and thousands mark; fractions stay as they are.

    >>> tidy("\\$32,\\!348"), tidy("90^{\\circ}"), tidy("\\text{(C)}"), tidy("1\u00bd")
    ('$32,348', '90°', ' (C) ', '1\\frac{1}{2}')
    """
    # Most answers are plain words and digits: one match spares them all of these passes.
    if not _PLAIN_TEXT.fullmatch(text):
        # Thousands marks come first, while they can still be told from spaces and TeX's spacing commands.
        text = _THOUSANDS.sub(lambda match: _GROUPS.sub(",", match[0]), text)
        text = text.translate(_CHARACTERS)
        # Twice, for a wrapper within a wrapper. The spaces keep the words inside apart from their neighbors.
        text = _WRAPPERS.sub(r" \1 ", _WRAPPERS.sub(r" \1 ", text))
        text = _NOTHING.sub("", text)
        text = _SCALE.sub("\u00b0\\1", _DEGREE.sub("\u00b0", text))
        text = _SPACING.sub(" ", text)
        text = _TWINS.sub(lambda m: "\\{" if m["open"] else "\\}" if m["close"] else "\\emptyset", text)
        text = _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2]}}}", _REPEATING.sub(_repeating, text))
        text = _TENTH.sub(r"\\frac", _OVER.sub(r"\\frac{\1\3}{\2\4}", text))
        text = text.replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
        text = _RUNS.sub(" ", text)
    text = _MONEY_BEFORE.sub(lambda match: _MONIES[match[1]], _SAID_SIGN.sub(_sign, text)).replace("\t", " ")
    if "pi" in text:
        text = _BARE_PI.sub(r"\\pi ", text)
    return _MONEY.sub(r"\1-", _SIGN_BEFORE.sub(r"\1-", text)) if "-" in text else text


def plain(text: str) -> str:
    r"""Return ``text`` tidied, fractions of numbers as a/b and powers of ten as exponents.

    >>> plain(r"-\frac{3}{4}"), plain(r"\frac{-3}4"), plain(r"3.2 \times 10^{5}"), plain(r"2\frac12")
    ('-3/4', '-3/4', '3.2e5', '2 1/2')
    """
    # "3 million" becomes 3e6 before powers of ten are read, so both end up in one spelling.
    text = _SCALED.sub(lambda match: match[1] + _SCALES[match[2]], tidy(text))
    if "10" in text:
        text = _SCIENTIFIC.sub(lambda m: f"e{m['braced'] or m['bare']}", text)
        text = _POWER_ALONE.sub(lambda m: f"1e{m['braced'] or m['bare']}", text)
    if "\\frac" in text:
        text = _FRACTION.sub(_fraction, text)
    return text


def _sign(match: "re.Match[str]") -> str:
    """Write a sign that stands there in words; a minus behind a word may subtract, as a dash does."""
    return "-" if match[1] or match.start() == 0 else "- "


def _repeating(match: "re.Match[str]") -> str:
    r"""Write a repeating decimal as the fraction that it is: 0.\overline{3} is 3/9."""
    whole, once, again = match[1] or "0", match[2], match[3]
    # 0.1\overline{6}: (16 - 1) / 90. Subtracting the part that does not repeat leaves as many nines as digits that do.
    top = int(whole + once + again) - int(whole + once)
    return f"\\frac{{{top}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def _fraction(match: "re.Match[str]") -> str:
    """Write a fraction in one line; a space keeps 2\\frac{1}{2} from becoming 21/2, a sign stays at its number."""
    top, bottom = match["top"] or match["t"], match["bottom"] or match["b"]
    sign = "-" if top.startswith("-") != bottom.startswith("-") else ""
    before = match.string[max(0, match.start() - 1) : match.start()]
    if sign and before in ("-", "+"):
        return match[0]  # two signs in a row: nobody's plain number
    return f"{'' if before in ('-', '+', '') else ' '}{sign}{top.lstrip('+-')}/{bottom.lstrip('+-')}"


# Units that stand beside a number, each under one name whatever its spelling.

_SPELLINGS: Mapping[str, str] = _TABLE["units"]
_NAMES = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others.split())}
_JOINING = frozenset(_TABLE["joining"].split())
_UNIT = re.compile(rf"(?:(?:square|cubic|sq|cu)\.? +)?([A-Za-z%\u00b0'{CURRENCIES}]+)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]{2,}){0,3}")
_POWERS = {"squared": "2", "cubed": "3"}
_ATTACHED = re.compile(r"^\s*(?:\^\s*\{?\s*([23])\s*\}?|(squared|cubed))?$")
_RATE = re.compile(r"\s*(?:/|\bper\b)\s*")


def unit_of(rest: str, is_known: bool = False) -> str | None:
    """Return the one name of the unit that ``rest``, what stands behind a number, is; None when it is none.

    A word that the table does not know is a unit of its own (apples), unless ``is_known`` asks for those of the
    table; one that joins, multiplies or divides is none.

    >>> unit_of(" inches^2"), unit_of("square inches"), unit_of(" km/h"), unit_of(" apples"), unit_of(" or 7")
    ('in^2', 'in^2', 'kph', 'apple', None)
    """
    # No unit is so long, and the patterns below backtrack.
    if len(rest) > 60:
        return None
    if rest.strip()[:1] == "(" and rest.strip()[-1:] == ")":
        rest, is_known = f" {rest.strip()[1:-1].strip()}", True
    names = [_single(part, is_glued=not rest[:1].isspace()) for part in _RATE.split(rest.strip().rstrip("."))]
    # The power is cut off for the look-up: in^2 is known by in.
    if is_known and not all(name and name.partition("^")[0] in _SPELLINGS for name in names):
        return None
    if None in names or len(names) > 2:
        return None
    joined = "/".join(filter(None, names))
    # Two units have a name of their own for the quotient.
    return {"mi/h": "mph", "km/h": "kph"}.get(joined, joined)


def _single(text: str, is_glued: bool) -> str | None:
    found = _UNIT.match(text)
    if found is not None and (name := _NAMES.get(found[1].lower())) is not None:
        if is_glued and len(found[1]) == 1 and found[1].isalpha():
            return None  # 5m may be five times m
        attached = _ATTACHED.match(text[found.end() :])
        if attached is not None:
            prefix = text[:2].lower() if found.start(1) else ""
            power = attached[1] or _POWERS.get(attached[2] or "") or {"sq": "2", "cu": "3"}.get(prefix)
            return f"{name}^{power}" if power else name
    words = text.lower()
    if is_glued or not _WORDS.fullmatch(words) or _JOINING.intersection(re.split("[ -]", words)):
        return None
    return words.removesuffix("s")


Which = Literal["last", "first", "only"]

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
_WHOLE_PART = re.compile(r"[-+]?[0-9][0-9,]*")
_SIMPLE = re.compile(r"\s*\+?(-?[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*", re.ASCII)
_BELOW_ONE = re.compile(r"([0-9]{1,9})[ ]?/[ ]?([0-9]{1,9})")
_DELIMITERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")),
    *((mark, mark) for mark in ("`", "'", '"', "''")),
)

# What makes of a number a part of something else, before it and behind it.
_COMMANDS = (
    r"sqrt|frac|binom|pi|times|cdot|div|pm|mp|log|ln|sin|cos|tan|exp|leq?|geq?|neq?|lt|gt|infty|cup|cap|in|pmod|bmod|"
    r"mod|ldots|dots|theta|alpha|beta|lambda|mu|max|min|lfloor|lceil"
)
_PART_BEFORE = re.compile(
    rf"(?:\^\{{?|_\{{?|\\(?:{_COMMANDS})(?![a-zA-Z])(?:\[[^\]]{{0,9}}\])? ?\{{?|"
    r"(?:[0-9)\]}]\$?|(?<![a-zA-Z])[a-zA-Z]) ?[-+/] ?|[0-9)\]}] ?\* ?|"
    r"[0-9][.,:]|[0-9]e[0-9]{1,2} (?:and )?|[({\[] ?[^\s(){}\[\]]{1,20}, ?|[a-zA-Z0-9]\(|\\\{ ?|\u221a\(?|\} ?\{ ?|"
    r"[0-9] or (?:[a-zA-Z] ?= ?)?|(?:[0-9)\]}]|(?<![\w.</\"'])[a-zA-Z]|[a-z]{2} ) ?[<>]=? ?|\+ ?/? ?- ?|"
    r"(?<![a-zA-Z])mod ?|[0-9]\$?(?:[,;]| and) ?)\$?[-+]?$"
)
_PART_BEHIND = re.compile(
    rf" ?\^|_[0-9a-zA-Z{{]|[-/+*][0-9a-zA-Z\\(](?!\*)| ?[-/+*] ?[0-9\\(]|"
    rf" ?[-/+*] [b-zB-HJ-Z](?![a-zA-Z])| ?\\(?:{_COMMANDS})(?![a-zA-Z])|[.,:][0-9]|"
    r" ?, ?[-+]?[0-9.]{1,20} ?[)\]}\\]|\(| ?\\[{}]|(?!am|pm|st|nd|rd|th)[a-zA-Z]{1,2}(?![a-zA-Z])| ?\u221a|"
    r"!!?(?= ?[$)\]}\\*/^+=-])| (?:thousand|million|billion|trillion|hundred|dozen|and a half)(?![a-z])"
)
_THOUSAND = re.compile(r"(?<![0-9.,])[0-9]{1,3} $")
_UNIT_BEHIND = re.compile(
    r" ?\$? ?(?:(?:square|cubic) )?(?:[A-Za-z]+|[%\u00b0])(?: ?\^ ?\{?[23]\}?)?(?:(?:/| per )[A-Za-z]+)?"
)
_ENDS = re.compile(r"\s*(?:[.$)\]}*]|\\[)\]]|$)")
_CONTEXT, _LAYERS = 40, 6


@dataclass(frozen=True)
class Number:
    """A number as found: its plain text (no commas, no spaces, no plus), its value and the unit beside it.

    Attributes:
        value: Exact; None when it is none (a division by zero) or absurdly long, which then equals nothing.
        unit: One name for all spellings of a unit, see `unit_of`; None without one.
    """

    text: str
    value: Fraction | None
    unit: str | None = None

    @property
    def canonical(self) -> str:
        """The one text of all numbers of this value: a fraction in lowest terms; without a value the text as found.

        >>> [n.canonical for n in find_numbers("0.50, 2/4, 1e3")]
        ['1/2', '1/2', '1000']
        """
        return self.text if self.value is None else str(self.value)

    def equals(self, gold: "Number", tolerance: float = 0.0) -> bool:
        """Whether the two differ by at most ``tolerance``, without rounding, and in no unit.

        Where only one has a unit it is not looked at: 12 km is 12, 50% is 50. A percentage is its hundredth as well.
        Two units that are not the same make two answers: 12 km is not 12 m, and nothing is converted.
        """
        if self.value is None or gold.value is None:
            return False
        # A bare degree sign agrees with degrees Celsius and Fahrenheit, which do not agree with each other.
        units = {self.unit, gold.unit} - {None}
        if len(units) == 2 and not units <= {"\u00b0", "\u00b0c"} and not units <= {"\u00b0", "\u00b0f"}:
            return False
        if self.value == gold.value:
            return True
        # All in rationals: in floats 0.1 + 0.2 would differ from 0.3.
        near = exact(tolerance)
        if abs(self.value - gold.value) <= near:
            return True
        if (self.unit, gold.unit) == ("%", None):
            return abs(self.value / 100 - gold.value) <= near
        return (self.unit, gold.unit) == (None, "%") and abs(self.value - gold.value / 100) <= near


def find_numbers(text: str) -> list[Number]:
    r"""Return the numbers in ``text``, from left to right.

    >>> [n.text for n in find_numbers(r"1,234 - 5 is \frac{3}{4}, so x2 = -.5.")]
    ['1234', '5', '3/4', '-.5']
    """
    return [span.number for span in _spans(plain(text))]


def choose_number(text: str, which: Which) -> Number | None:
    r"""Return the last, the first or the only number of ``text``; None without one, with several, or for a part.

    A number that is a part of something else is no answer, whatever it is a part of: the 2 of \sqrt{2}, x^2, 3+2, 2\pi,
    (1, 2], 1 or 2, 1.234,2 and 12 000 2, the 7 of 5 ft 7 in, x > 7, 3 \pm 7 and 2 mod 7.

    >>> choose_number(r"so x = \frac{3}{4} km", "last")
    Number(text='3/4', value=Fraction(3, 4), unit='km')
    >>> choose_number(r"so it is 2\sqrt{3}", "last") is None
    True
    """
    text = plain(text)
    found = list(_spans(text))
    # In "12 m^2" the last number is the 2 of the unit.
    if which == "last" and len(found) > 1 and _is_power_of_unit(text, found[-2].end, found[-1].end):
        found.pop()
    if not found or (which == "only" and len(found) > 1):
        return None
    chosen = found[-1] if which == "last" else found[0]
    if _is_part(text, chosen.start, chosen.end):
        return None
    unit = _unit_next_to(text, chosen.start, chosen.end)
    if which == "last" and len(found) > 1:
        # Two lengths in a row with different units, feet and inches, make one quantity that neither number gives.
        between = unit_of(text[found[-2].end : chosen.start].removesuffix("and ").rstrip(" ,"), is_known=True)
        own = "in" if between == "ft" and text.startswith(" in", chosen.end) else unit
        if between and own not in (None, between):
            return None  # 5 ft 7 in is one length
    return replace(chosen.number, unit=unit)


def parse_number(text: str) -> Number | None:
    r"""Return the number that ``text`` is, its unit, sign of money or of percent included; None if it is none.

    >>> parse_number(" $1,000 ").text, parse_number(r"864 \mbox{ inches}^2").unit
    ('1000', 'in^2')
    >>> parse_number("2 or 3") is None
    True
    """
    # The second length is asked only if the first is too large: stripping copies the text.
    if len(text) > 10 * LONGEST and len(text.strip()) > 10 * LONGEST:
        return None
    # The most frequent form of an answer needs none of the steps below.
    simple = _SIMPLE.fullmatch(text)
    if simple is not None:
        return Number(simple[1], Fraction(simple[1]))
    bare = unwrapped(plain(text))
    money = bare[:1] if bare[:1] and bare[0] in CURRENCIES else None
    bare = bare.lstrip(CURRENCIES).lstrip(" ")
    # -(5) and (5) are numbers. Of brackets around more, such as (1,
    # 2), a rest remains behind the first number that is no unit.
    sign = bare[:1] if bare[:2] in ("-(", "+(") and bare[2:3].isdigit() else ""
    if bare.startswith(f"{sign}(") and bare.endswith(")"):
        bare = sign + bare[len(sign) + 1 : -1].strip()
    if bare[:2] in ("- ", "+ "):
        bare = bare[0] + bare[2:].lstrip()
    found = next(_spans(bare), None)
    if found is None or found.start != 0:
        return None
    end, number = found.end, found.number
    rest = bare[end:].rstrip(". ")
    if not rest:
        return Number(number.text, number.value, money)
    unit = unit_of(bare[end:])
    return None if unit is None or (money and unit != money) else Number(number.text, number.value, unit)


def exact(value: int | float) -> Fraction:
    """Return a float as the decimal that a person wrote: 0.1 is 1/10, not the nearest binary fraction."""
    return Fraction(repr(value))


@dataclass(frozen=True)
class _Span:
    """Where a number stands.

    Attributes:
        whole: What stands before its fraction, of a mixed number.
    """

    match: "re.Match[str]"
    whole: "re.Match[str] | None" = None

    @property
    def start(self) -> int:
        return (self.whole or self.match).start()

    @property
    def end(self) -> int:
        return self.match.end()

    @property
    def number(self) -> Number:
        return _number(self.match) if self.whole is None else _mixed(self.whole, self.match)


def _spans(text: str) -> Iterator[_Span]:
    """Yield each number of a plain text; a whole before a/b with a < b is one with it."""
    before: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        if before is not None:
            # A number is held back until the next one is seen, since 2 1/2 is one number and not two.
            if _is_mixed(text, before, match):
                yield _Span(match, before)
                before = None
                continue
            yield _Span(before)
        before = match
    if before is not None:
        yield _Span(before)


def _is_mixed(text: str, whole: "re.Match[str]", part: "re.Match[str]") -> bool:
    # Up to four spaces may lie between the whole and its fraction, and nothing else.
    gap = part.start() - whole.end()
    if not (0 < gap <= 4) or text[whole.end() : part.start()].strip(" ") or part["sign"]:
        return False
    below = _BELOW_ONE.fullmatch(part[0])
    if below is None or _WHOLE_PART.fullmatch(whole[0]) is None or len(whole[0]) > LONGEST:
        return False
    # Only a proper fraction goes with a whole: in "2 3/2" there are two numbers.
    return 0 < int(below[1]) < int(below[2])


def _mixed(whole: "re.Match[str]", part: "re.Match[str]") -> Number:
    sign = -1 if whole["sign"] == "-" else 1
    units = whole["top"].replace(",", "")
    top, bottom = part["top"], part["bottom"]
    value = sign * (Fraction(units) + Fraction(int(top), int(bottom)))
    return Number(f"{'-' if sign < 0 else ''}{units} {top}/{bottom}", value)


def _number(match: "re.Match[str]") -> Number:
    sign = "-" if match["sign"] == "-" else ""
    top = sign + match["top"].replace(",", "")
    bottom = (match["bottom"] or "").replace(",", "")
    text = f"{top}/{bottom}" if bottom else top
    # Fraction("1e999999999") would fill the memory before anything compares it.
    if len(text) > LONGEST or _exponent(top) > LARGEST_EXPONENT:
        return Number(text, None)
    below = Fraction(bottom) if bottom else Fraction(1)
    return Number(text, Fraction(top) / below if below else None)


def _exponent(text: str) -> int:
    exponent = text.lower().partition("e")[2]
    return abs(int(exponent)) if exponent else 0


def _is_part(text: str, start: int, end: int) -> bool:
    """Whether the number from ``start`` to ``end`` is a part of something larger."""
    before, behind = text[max(0, start - _CONTEXT) : start], text[end : end + _CONTEXT]
    if before[-1:] in ("-", "+") and text[start] in "-+":
        return True
    # A unit behind a number looks like a factor (3m) and is none.
    if _unit_behind(behind) is None and _PART_BEHIND.match(behind) is not None:
        return True
    if _THOUSAND.search(before) is not None and re.fullmatch("[0-9]{3}", text[start:end]) is not None:
        return True  # 32 348 may be one number
    found = _PART_BEFORE.search(before)
    if found is None:
        return False
    # "In 2023, 5 were left" is a sentence; "1, 2, 3" at the end is a list.
    is_list = re.fullmatch(r"[0-9]\$?(?:[,;]| and) \$?[-+]?", found[0]) is not None
    return not is_list or _ENDS.match(behind) is not None


def _unit_next_to(text: str, start: int, end: int) -> str | None:
    money = text[max(0, start - 2) : start].strip()[-1:]
    if money and money in CURRENCIES and not (money == "$" and _is_delimiter(text, start, end)):
        return money
    return _unit_behind(text[end : end + _CONTEXT])


def _unit_behind(behind: str) -> str | None:
    """Return the unit of the table that stands behind a number; any other word may begin a sentence."""
    found = _UNIT_BEHIND.match(behind)
    if found is None or found[0].strip() == "in":  # "5 in total"
        return None
    return unit_of(found[0].replace("$", " "), is_known=True)


def _is_power_of_unit(text: str, end: int, last: int) -> bool:
    """Whether the number that ends at ``last`` is the exponent of a unit: the 2 of 12 m^2."""
    behind = text[end : end + _CONTEXT]
    found = _UNIT_BEHIND.match(behind)
    return (
        found is not None
        and found[0][-2:].strip("}").endswith(("2", "3"))
        and (end + found.end() - found[0].endswith("}") == last and _unit_behind(behind) is not None)
    )


def _is_delimiter(text: str, start: int, end: int) -> bool:
    """Whether the dollar before a number opens TeX's mathematics: another one closes it on the same line."""
    return "$" in text[end : end + _CONTEXT].partition("\n")[0]


def unwrapped(text: str) -> str:
    r"""Return a plain ``text`` without what may stand around a whole answer: dollars, braces, stars, a final point."""
    # Each pass takes off one layer, **$5$** has two; the bound ends texts that are made of nothing but layers.
    for _ in range(_LAYERS):
        bare = text.strip().removesuffix("\\\\").rstrip(".,;: ").removeprefix("=").strip()
        for opening, closing in _DELIMITERS:
            is_around = bare.startswith(opening) and bare.endswith(closing) and len(bare) > len(opening + closing)
            if is_around and opening not in bare[len(opening) : -len(closing)]:
                bare = bare[len(opening) : -len(closing)]
                break
        else:
            if not is_one_group(bare):
                return bare
            bare = bare[1:-1]
        text = bare
    return text.strip()


def is_one_group(text: str) -> bool:
    """Whether the text's first character is a brace that its last one closes."""
    # "{1} + {2}" begins and ends with braces that are not a pair: hence the count in `closes_at_end`.
    is_between = text.startswith("{") and text.endswith("}") and not text.endswith("\\}")
    return is_between and closes_at_end(text, "{", "}")


def closes_at_end(text: str, opening: str, closing: str) -> bool:
    """Whether the bracket that a text begins with is closed by its last character, and not before."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in opening) - (character in closing)
        if depth == 0:
            return index == len(text) - 1
    return False
