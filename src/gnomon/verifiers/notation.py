r"""How people and TeX write numbers, made plain: signs, spaces, thousands, fractions, powers of ten, wrappers.

Every step is one pass over the text whatever is in it: an answer of 700,000 braces costs no more than one of words.
"""

import re

_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u205f\u3000\t"), " ")
_WIDE = {0xFEE0 + code: chr(code) for code in map(ord, "0123456789.,/%()[]{}+=$<>:")}
_OTHERS = {
    ord("\u00ba"): "\u00b0", ord("\u02da"): "\u00b0", ord("\u2044"): "/", ord("\u2215"): "/", ord("\u200b"): "",
    ord("\u2062"): "", ord("\ufeff"): "", ord("\u03c0"): r"\pi ", ord("\u221e"): r"\infty ", ord("\u2264"): r"\le ",
    ord("\u2265"): r"\ge ", ord("\u222a"): r"\cup ", ord("\u2208"): r"\in ", ord("\u00d7"): r"\times ",
    ord("\u00b7"): r"\cdot ", ord("\u22c5"): r"\cdot ", ord("\u00f7"): r"\div ", ord("\u00b1"): r"\pm ",
    ord("\u00b2"): "^2", ord("\u00b3"): "^3", ord("\u2032"): "'",
}  # fmt: skip
_HALVES = "\u00bd 1/2 \u2153 1/3 \u2154 2/3 \u00bc 1/4 \u00be 3/4 \u2155 1/5 \u2156 2/5 \u2157 3/5 \u2158 4/5 "
_EIGHTHS = "\u2159 1/6 \u215a 5/6 \u215b 1/8 \u215c 3/8 \u215d 5/8 \u215e 7/8"
_PARTS = (_HALVES + _EIGHTHS).split()
_FRACTIONS = {
    ord(sign): f"\\frac{{{value[0]}}}{{{value[-1]}}}" for sign, value in zip(_PARTS[::2], _PARTS[1::2], strict=True)
}
_CHARACTERS = {**_SIGNS, **_SPACES, **_WIDE, **_OTHERS, **_FRACTIONS}

_SEPARATOR = r"(?:\{,\}|,\\!|\\,|\\!|\\ |\\;|\\:|~|,\\,|[\u00a0\u2007\u2009\u202f])"
_THOUSANDS = re.compile(rf"(?<![0-9.,\\])(?<![0-9]\\[,!])[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?![0-9])")
_GROUPS = re.compile(_SEPARATOR)
_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)\s*"
    r"\{([^{}]*)\}"
)
_NOTHING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|rm|bf|limits|hfill|!)(?![a-zA-Z])|\\!|\u2061"
)
_SPACING = re.compile(r"(?<!\\)\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;:> ]|~")
_RUNS = re.compile(" {2,}")
_MONEY = re.compile("(?<![\\w)\\]}])- ?([$\u20ac\u00a3\u00a5])(?=[0-9.])")
_DEGREE = re.compile(r"\s*\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])|\s*\^\s*\\degree")
_TENTH = re.compile(r"\\[dtc]frac(?![a-zA-Z])")

_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?"
_FRACTION = re.compile(
    rf"\\frac\s{{0,3}}(?:\{{\s{{0,3}}(?P<top>[-+]?{_PLAIN})\s{{0,3}}\}}|(?P<t>[0-9]))"
    rf"\s{{0,3}}(?:\{{\s{{0,3}}(?P<bottom>[-+]?{_PLAIN})\s{{0,3}}\}}|(?P<b>[0-9]))"
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
    if "\\" in text or not text.isascii() or "~" in text or "{" in text:
        text = _THOUSANDS.sub(lambda match: _GROUPS.sub(",", match[0]), text)
        text = text.translate(_CHARACTERS)
        text = _WRAPPERS.sub(r" \1 ", _WRAPPERS.sub(r" \1 ", text))
        text = _NOTHING.sub("", text)
        text = _DEGREE.sub("\u00b0", text)
        text = _SPACING.sub(" ", text)
        text = _TENTH.sub(r"\\frac", text).replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
        text = _RUNS.sub(" ", text)
    return _MONEY.sub(r"\1-", text).replace("\t", " ") if "-" in text else text.replace("\t", " ")


def plain(text: str) -> str:
    r"""Return ``text`` tidied, fractions of numbers as a/b and powers of ten as exponents.

    >>> plain(r"-\frac{3}{4}"), plain(r"\frac{-3}4"), plain(r"3.2 \times 10^{5}"), plain(r"2\frac12")
    ('-3/4', '-3/4', '3.2e5', '2 1/2')
    """
    text = tidy(text)
    if "10" in text:
        text = _SCIENTIFIC.sub(lambda m: f"e{m['braced'] or m['bare']}", text)
        text = _POWER_ALONE.sub(lambda m: f"1e{m['braced'] or m['bare']}", text)
    if "\\frac" in text:
        text = _FRACTION.sub(_fraction, text)
    return text


def _fraction(match: "re.Match[str]") -> str:
    """Write a fraction in one line; a space keeps 2\\frac{1}{2} from becoming 21/2, a sign stays at its number."""
    top, bottom = match["top"] or match["t"], match["bottom"] or match["b"]
    sign = "-" if top.startswith("-") != bottom.startswith("-") else ""
    before = match.string[max(0, match.start() - 1) : match.start()]
    if sign and before in ("-", "+"):
        return match[0]  # two signs in a row: nobody's plain number
    return f"{'' if before in ('-', '+', '') else ' '}{sign}{top.lstrip('+-')}/{bottom.lstrip('+-')}"
