r"""Whether two answers are the same, as far as that can be told without algebra.

`boxed` takes "cannot be told" for different, `Mathematics` asks math-verify then: so the two agree wherever this file
decides, on numbers, lists, sets, pairs, intervals, words and letters of choices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gnomon.rewards.numbers import (
    LONGEST,
    Number,
    Which,
    choose_number,
    closes_at_end,
    parse_number,
    tidy,
    unit_of,
    unwrapped,
)

# Where in a completion the answer stands.

Extract = Literal["last_number", "first_number", "only_number", "last_line", "boxed", "tags", "whole"]

_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}$")
_BOX_LENGTH = len(r"\boxed") + 3
# Characters on each side of a box that are looked at: a search for a pattern
# that ends in "$" tries every position, so its cost must not grow with the text.
_NEAR = 32
# What may enclose a box without changing its value except by brackets: \left(\boxed{7}\right), \text{\boxed{7}}.
_AROUND = re.compile(r"(\\left\(|\(|\\(?:text|textbf|mathbf|underline|bm|boldsymbol)\s?\{)$")
_CLOSINGS = {"(": re.compile(r"\\right\)|\)"), "{": re.compile(r"\}")}
# What makes the box a part of something larger when it stands directly
# before: a sign, a factor, a base of a power, a root, a function, a fraction.
_BEFORE = re.compile(
    r"(?:(?:^|(?<=[\s=($:,{\[*>]))(?P<sign>[-\u2212]|\\pm ?)(?:\\\$)?|[0-9]|[0-9a-zA-Z)]{0,6}[\^_]\{?|"
    r"\\(?:sqrt|[dtc]?frac|log|ln|sin|cos|tan|exp)(?![a-zA-Z])(?:\[[^\]]{0,9}\])?\s?\{?|"
    r"\\[dtc]?frac\s?(?:\{[^{}]{1,20}\}|[0-9])\s?\{?)$"
)
# The same behind it: a power (but not degrees), an index, a divisor, decimals, a product, a
# factor. The letters that may follow as a factor leave out units of one letter such as m, s and h.
_BEHIND = re.compile(
    r"\s?\^(?!\s?\{?\s?\\circ)\s?(?:\{[^{}]{1,20}\}|\\?[a-zA-Z0-9]+)|"
    r"_\{?[0-9]+\}?|/\s?(?:[0-9.]+|[a-z](?![a-z])(?<![hs]))|[.,][0-9]+|"
    r"(?P<product>\s?\\(?:times|cdot|div)(?![a-zA-Z])[^\n$=]{1,20})|[abceiknxyz](?![a-zA-Z])|"
    r"\s?\\(?:pi(?![a-zA-Z])|sqrt\s?(?:\{[^{}]{1,20}\}|[0-9a-z])|[dtc]?frac\s?\{[^{}]{1,20}\}\s?\{[^{}]{1,20}\})"
)
_ATOM = re.compile(r"[0-9]+(?:[.,][0-9]+)*|[a-zA-Z]|\(.*\)|\\[a-zA-Z]+")
_PRODUCT = re.compile(r"[^-+,;<>=\s]+")
_GROUP = re.compile(r"\s?(?:\{[^{}]{1,20}\}|[0-9])")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}([-+]?[0-9]+(?:[.,/][0-9]+)*)")


Where = Literal["anywhere", "after_thinking", "answer_line", "last_box"]

_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought)>|\[(/?)THINK\]")
# "Answer:", "**Final answer:**", "> The final answer is: 5"; the repetitions
# are bounded, so a line of a million stars costs no more than its length.
_ANSWER_LINE = re.compile(
    r"^[^\S\n]*[#>*_\s-]{0,8}(?:the )?(?:final )?answer(?: is)?[*_]{0,2}[^\S\n]*[:=][*_]{0,2}[^\S\n]*(\S[^\n]*)$",
    re.I | re.M,
)


def after_thinking(text: str) -> str | None:
    """Return what follows the thought; the whole text where there is none, None where the thought has no end.

    The end of a thought without its beginning counts, since a template may open it; so does the last of several.

    >>> after_thinking("<think>7?</think> So 8."), after_thinking("8"), after_thinking("<think>It may be 7")
    (' So 8.', '8', None)
    """
    marks = list(_THOUGHT.finditer(text))
    if not marks:
        return text
    last = marks[-1]
    return text[last.end() :] if last[1] or last[2] else None


def thought_of(text: str) -> tuple[int, bool]:
    """Return how many characters of a text are its thought, and whether that has an end.

    >>> thought_of("<think>7?</think> So 8."), thought_of("8"), thought_of("<think>It")
    ((17, True), (0, True), (9, False))
    """
    after = after_thinking(text)
    return (len(text), False) if after is None else (len(text) - len(after), True)


def answer_in(text: str, where: Where) -> str | None:
    r"""Return the part of a completion that is judged; None where it has no such part.

    anywhere: everything. after_thinking: what follows the thought. answer_line: after the thought, what the last line
    says that begins with "Answer:" or "The final answer is:". last_box: after the thought, the content of the last box.

    >>> answer_in(r"<think>\boxed{7}</think> **Answer:** 34", "answer_line"), answer_in(r"<think>\boxed{7}", "last_box")
    ('34', None)
    """
    if where == "anywhere":
        return text
    after = after_thinking(text)
    if after is None or where == "after_thinking":
        return after
    if where == "last_box":
        return last_boxed(after)
    lines = _ANSWER_LINE.findall(after)
    return (str(lines[-1]).strip().strip("*_").strip() or None) if lines else None


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

    A space before the brace is TeX's as well; an escaped brace is no brace; a number needs none (``\boxed 7``). What
    makes of the box a part of something else belongs to it: a sign, a factor, a root or a fraction around it, a power.
    One pass over the text, whatever is in it. None when there is no such box.

    >>> last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    >>> last_boxed(r"so x = -\boxed{7}"), last_boxed(r"\boxed{7}^2"), last_boxed(r"\sqrt{\boxed{7}}")
    ('-7', '7^2', '\\sqrt{7}')
    """
    found = _last_box(text)
    return None if found is None else found[2]


def with_open_box(text: str) -> str:
    r"""Return ``text`` with its last box, and what that is a part of, written without the box.

    >>> with_open_box(r"so x = -\boxed{7}."), with_open_box(r"so x = \boxed{7}.")
    ('so x = -7.', 'so x = \\boxed{7}.')
    """
    found = _last_box(text) if "\\boxed" in text or "\\fbox" in text else None
    if found is None or found[2] in text[found[0] + len("\\fbox") : found[1]]:
        return text
    return text[: found[0]] + found[2] + text[found[1] :]


def _last_box(text: str) -> tuple[int, int, str] | None:
    """Return where the last box begins and ends, with what it is a part of, and what that says without the box."""
    opened: list[int] = []
    best: tuple[int, int, int] | None = None  # the command, its content's beginning and end
    index = 0
    while index < len(text):
        character = text[index]
        # An escaped brace or backslash is skipped as a pair, or "\\{" would count as an opening brace.
        if character == "\\" and text[index + 1 : index + 2] in ("{", "}", "\\"):
            index += 1
        elif character == "{":
            opened.append(index)
        elif character == "}" and opened:
            start = opened.pop()
            # Braces close from the inside out: a box within the best box
            # so far is later and wins, a box around it does not.
            is_later = best is None or start >= best[1]
            if is_later and (found := _BOX.search(text[max(0, start - _BOX_LENGTH) : start])):
                best = start - len(found[0]), start + 1, index
        index += 1
    # A box without braces counts only behind, or inside, the last one with braces.
    for bare in _BARE_BOX.finditer(text, best[1] if best else 0):
        best = bare.start(), bare.start(1), bare.end()
    if best is None:
        return None
    command, start, end = best
    return _with_neighbors(text, command, start, end, end + (text[end : end + 1] == "}"))


def _with_neighbors(text: str, command: int, start: int, end: int, after: int) -> tuple[int, int, str]:
    """Return a box with what stands so close to it that it is a part of that, and what it then says."""
    first, said, last = command, text[start:end], after
    while (around := _AROUND.search(text[max(0, first - _NEAR) : first])) is not None:
        closing = _CLOSINGS[around[1][-1]].match(text, last)
        if closing is None:
            break
        first, last = first - len(around[0]), closing.end()
        if around[1] in ("(", "\\left("):
            said = f"({said})"
    before, behind = _BEFORE.search(text[max(0, first - _NEAR) : first]), _BEHIND.match(text, last)
    if behind is not None and behind["product"] and "=" in text[behind.end() : behind.end() + _NEAR].partition("\n")[0]:
        behind = None  # a box that was filled in: \boxed{7} \times 3 = 21
    if before is None and behind is None:
        return command, after, text[start:end]
    factor, tail = "" if before is None else before["sign"] or before[0], "" if behind is None else behind[0]
    # The box is the argument of a command, \sqrt{\boxed{7}}: its closing
    # brace belongs to the answer, and for \frac a second group follows.
    if factor.endswith("{"):
        said, last = f"{said}}}", last + (text[last : last + 1] == "}")
        group = _GROUP.match(text, last) if "frac" in factor and not factor.endswith("}{") else None
        tail, last = (group[0], group.end()) if group else ("", last)
    else:
        # Brackets are added only where leaving them out would change
        # the value: 2\boxed{x+1} is 2(x+1), 2\boxed{x} is 2x.
        bare = said[1:-1] if said.startswith("(") and _ATOM.fullmatch(said[1:-1]) and not tail else said
        is_atom = (_ATOM if tail or not before else _PRODUCT).fullmatch(bare) and not factor[-1:].isalnum()
        said = bare if is_atom else f"{{{bare}}}" if factor[-1:].isalpha() or factor[-1:] in "^_]" else f"({bare})"
        last += len(tail)
    factor = "-" if factor == "\u2212" else factor
    return first - (0 if before is None else len(before[0])), last, factor + said + tail


def final_answer(text: str) -> str | None:
    """Return what a worked solution says is its answer: what follows the last ####, else the content of its last box.

    None when it has neither, as a bare answer.

    >>> final_answer("24 + 48 = 72 #### 72"), final_answer("72")
    (' 72', None)
    """
    return text.rpartition("####")[2] if "####" in text else last_boxed(text)


_WHICH: dict[str, Which] = {"last_number": "last", "first_number": "first", "only_number": "only"}


_VARIABLE = re.compile(
    r"\s*([A-Za-z]|\((?:[a-z],? ?){1,6}\)|[A-Za-z]\([a-z]\)|\\[a-z]+|[A-Za-z]_\{?\w+\}?)\s?(=|\\in(?![a-z]))\s*(?=\S)"
)
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|in)(?![a-zA-Z])")
_CHOICE = re.compile(r"[(\[]?\s?([A-Za-z])\s?[)\].:]?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z][A-Za-z'-]*)*")
_WRITTEN = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{")
_BASED = re.compile(r"[0-9A-Fa-f]+ ?_ ?(?:\{[0-9]+\}|[0-9]+)")
_BASES = [
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen",
]  # fmt: skip
_BASE = re.compile(rf"(?<=[0-9A-F]) ?_ ?(?:\{{ ?(?:base )?)?({'|'.join(sorted(_BASES, reverse=True))})(?![a-z]) ?\}}?")
_OPTION = re.compile(
    r"(?:(?i:option|choice) )?(?:\(([A-J])\)|([A-J])(?:\)|[.:](?! [a-z])))"
    r"(?: (?!\\(?:c[ua]p|times|cdot|subset|to|in|[gln]eq?)(?![a-z])|[+*/=^_<>,)]|- |and |or )(\S.*))?|"
    r"(?i:option|choice) ([A-J])",
    re.DOTALL,
)
_BUILDER = re.compile(
    r"\\?\{ ?([a-z]) ?(?:\\in ?\\mathbb ?\{?R\}? ?)?(?:[:|]|\\(?:mid|vert)(?![a-z])) ?(?=[^{}|]*\1)([^{}|]+?)\\?\}"
)
_GAP, _UNIT_IN_TEX = r"(?<=[\w)}\]])(?:\\[,; ]|\s|~)*", r"\\(?:text|textrm|mathrm|mbox)\s?\{([^{}]{1,40})\}"
_POWER = r"(\s?\^\s?\{?[23]\}?)?"
_UNIT_AT_END = re.compile(rf"{_GAP}(?:{_UNIT_IN_TEX}|(?<=\s)([a-z]{{2,20}})){_POWER}[\s.$]*$")
_UNIT_BEFORE_END = re.compile(rf"{_GAP}{_UNIT_IN_TEX}{_POWER}(?=[\s.]*(?:\$|\\[)\]]))")
_ONE_SIDED = re.compile(r"[<>]|\\(?:[lg]e|[lg]eq|[lg]eqslant|[lgn]t|neq?)(?![a-zA-Z])")
_OPENING, _CLOSING = "([{", ")]}"
_MOST_PARTS, _MOST_BRACKETS = 200, 50
_SAID = frozenset(["yes", "no", "true", "false", "even", "odd", "none", "one", "two", "both", "all", "east", "west"])


@dataclass(frozen=True)
class _Listed:
    """Several answers.

    Attributes:
        brackets: "()", "(]", "{}" and such; "" for a bare list, whose order does not count.
    """

    brackets: str
    parts: tuple[str, ...]

    @property
    def is_ordered(self) -> bool:
        return self.brackets not in ("", "{}")


def same_answer(found: str, gold: str, tolerance: float = 0.0) -> bool | None:
    r"""Return whether the two are the same answer; None when only algebra could tell.

    >>> same_answer(r"\frac34", "0.75"), same_answer("(1,2]", "(1,2)"), same_answer("2, 1", r"\{1,2\}")
    (True, False, True)
    >>> same_answer("x+1", "1+x") is None
    True
    """
    # The order of the rules matters: two numbers are compared as numbers, choices come
    # before texts, and units and variable names are taken off before shapes are compared.
    ours, theirs = parse_number(found), parse_number(gold)
    if not (ours and theirs) and (options := [_option(text) for text in (found, gold)]) != [None, None]:
        return _same_option(options, (found, gold), tolerance)
    if ours and theirs:
        # A division by zero or a number of thousands of digits has no value to compare by.
        if theirs.value is None:
            return squeezed(found) == squeezed(gold)
        return ours.equals(theirs, tolerance)
    if squeezed(found) == squeezed(gold):
        return True
    # The rules below split and match by patterns; no real answer is so long.
    if len(found) > LONGEST or len(gold) > LONGEST:
        return None
    (unit, measured), (gold_unit, gold_measured) = without_unit(found), without_unit(gold)
    if unit or gold_unit:
        return False if unit and gold_unit and unit != gold_unit else same_answer(measured, gold_measured, tolerance)
    named, bare = _variable(found)
    gold_named, gold_bare = _variable(gold)
    # x = 5 is not y = 5. Names with brackets, f(x) or (x, y), are spelt in too many ways to tell apart.
    if named and gold_named and named != gold_named and "(" not in named + gold_named:
        return False
    if named or gold_named:
        return same_answer(bare, gold_bare, tolerance)
    return _same_shape(found, gold, ours or theirs, tolerance)


def _option(text: str) -> tuple[str, str] | None:
    """Return the letter and the content of a choice, (C) 12 or Option C; None for anything else, a bare letter too."""
    match = _OPTION.fullmatch(readable(text)) if len(text) <= LONGEST else None
    return None if match is None else (match[1] or match[2] or match[4], (match[3] or "").strip())


def _same_option(options: list[tuple[str, str] | None], texts: tuple[str, str], tolerance: float) -> bool | None:
    """Compare choices: by their letters, and by their contents where both have one; a content alone is the choice."""
    # A bare letter counts as a choice here because the other side is one for certain.
    parts = []
    for option, text in zip(options, texts, strict=True):
        letter = _CHOICE.fullmatch(readable(text))
        parts.append(option or ((letter[1].upper(), "") if letter else ("", text)))
    (our_letter, ours), (their_letter, theirs) = parts
    if our_letter and their_letter and our_letter != their_letter:
        return False
    if ours and theirs:
        return same_answer(ours, theirs, tolerance)
    return bool(our_letter and our_letter == their_letter)


def without_unit(text: str) -> tuple[str | None, str]:
    r"""Return the unit that stands as a word behind an expression, and the expression.

    >>> without_unit(r"12\pi \text{ cm}^2"), without_unit(r"12\pi")
    (('cm^2', '12\\pi'), (None, '12\\pi'))
    """
    found = _UNIT_AT_END.search(text)
    if found is None or found[2] == "in":
        return None, text
    unit = unit_of(f" {(found[1] or found[2]).strip()}{found[3] or ''}", is_known=bool(found[2]))
    return (unit, text[: found.start()].lstrip("$ ")) if unit else (None, text)


def without_units(text: str) -> str:
    r"""Return a text without the units, set as text, that end its formulas.

    >>> without_units(r"It is $12\pi \text{ cm}^2$, for $x \text{ in } A$.")
    'It is $12\\pi$, for $x \\text{ in } A$.'
    """
    return _UNIT_BEFORE_END.sub(lambda found: "" if without_unit(f"1{found[0]}")[0] else found[0], text)


def readable(text: str) -> str:
    r"""Return an answer tidied and without what stands around it; a set given by a condition is that condition.

    >>> readable(r"$\{x \mid x > 2\}$"), readable(r"\textbf{(C)}\ 12")
    ('x > 2', '(C) 12')
    """
    bare = _BASE.sub(lambda match: f"_{{{_BASES.index(match[1]) + 2}}}", unwrapped(tidy(text)))
    built = _BUILDER.fullmatch(bare) if bare[-1:] == "}" else None
    return re.sub(r"(?<=[\w)])\*\*(?=[\w(])", "^", bare) if built is None else built[2].strip()


def squeezed(text: str) -> str:
    r"""Return ``text`` without what TeX sets between and around its signs, in one spelling.

    >>> squeezed(r"\left( 1,\, \sqrt{2} \right)"), squeezed(r"\text{Paris}."), squeezed(r"$\dfrac{\pi}2$")
    ('(1,\\sqrt2)', 'Paris', '\\frac\\pi2')
    """
    # The order of the substitutions matters: relations and
    # products are spelt out before braces of one sign are dropped.
    bare = _unspaced(readable(text))
    bare = re.sub(r"\\([lgn]e)(?:q|qslant)(?![a-zA-Z])", r"\\\1", bare).replace("<=", "\\le").replace(">=", "\\ge")
    bare = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", "*", bare).replace("$", "")
    bare = re.sub(r"(?<![0-9a-zA-Z)\]}])\+(?=\\infty)", "", bare)
    bare = re.sub(r"(?<![0-9])\*|\*(?![0-9])", "", bare)
    # \begin{x} needs its braces, and {7} anywhere else is 7.
    bare = re.sub(r"(?<!\\begin)(?<!\\end)\{([0-9a-zA-Z]|\\[a-zA-Z]+)\}", r"\1", bare)
    return re.sub(r"(?<=[_^][0-9]) (?=[0-9])", "", bare).rstrip(".")


def _unspaced(text: str) -> str:
    """Leave out spaces, except between two digits: 2 1/2 is not 21/2."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text.strip())


def _variable(text: str) -> tuple[str, str]:
    """Return what ``text`` names in front of one equals sign, and the rest: x = 5 is an answer 5 named x."""
    bare = readable(text)
    match = _VARIABLE.match(bare)
    if match is None or _RELATION.search(bare, match.end()):
        return "", text
    return match[1], bare[match.end() :]


def _same_shape(found: str, gold: str, number: Number | None, tolerance: float) -> bool | None:
    """Compare two answers of which at most one is a number."""
    texts = [readable(text) for text in (found, gold)]
    if number is not None:
        # Exactly one of the two is a number, and the other one is compared with that number.
        other, text = (texts[0], gold) if parse_number(found) is None else (texts[1], found)
        return _against_number(other, number, text, tolerance)
    choices = [_CHOICE.fullmatch(text) for text in texts]
    if choices[0] and choices[1]:
        return choices[0][1].casefold() == choices[1][1].casefold()
    if all(_WORDS.fullmatch(text) for text in texts):
        ours, theirs = (" ".join(text.split()).casefold() for text in texts)
        # "ab" and "ba" may be products, equal by algebra. Text set as text, several words, long words, common answers
        # and three capitals or more, which name points or a sequence (ABC, HTH), are no products.
        is_prose = _WRITTEN.search(found + gold) or any(" " in t or len(t) > 4 or t in _SAID for t in (ours, theirs))
        is_prose = is_prose or (len(texts[1]) > 2 and texts[1].isupper())
        return ours == theirs if is_prose else None
    # Equal ones were equal as texts before; 11_2 and 3_4 are
    # different spellings, and a question about bases asks for one.
    if all(_BASED.fullmatch(text) for text in texts):
        return False
    unions = [tuple(text.split("\\cup")) for text in texts]
    if min(map(len, unions)) > 1:
        # Whether parts that touch or overlap make the same set only algebra can tell.
        return (len(unions[0]) == len(unions[1]) and _same_sets(unions[0], unions[1], tolerance)) or None
    lists = [_listed(text) for text in texts]
    if lists[0] and lists[1]:
        return _same_lists(lists[0], lists[1], tolerance)
    said = [_sentence(text) for text in texts]
    return said[0] == said[1] if said[0] and said[1] else None


def _sentence(text: str) -> list[str]:
    """Return the words and numbers of a time, a date or a sentence with numbers; none for mathematics."""
    if re.fullmatch("[0-9]+(?::[0-9]+){2,}|[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return [text]
    bare = re.sub(r"(?<![a-z])([ap])\.?\s?m(?![a-z])\.?", r"\1m", text.casefold())
    is_said = re.search("[a-z]{3}|[0-9 ][ap]m(?![a-z])", bare) and re.search(r"[a-z] ?[0-9]|[0-9] [a-z]|[ap]m", bare)
    if not is_said or re.search(r"[\\^_=<>+*{}()]", bare):
        return []
    return re.findall("[a-z]+|[0-9]+(?:[.:/,-][0-9]+)*", bare)


def _against_number(other: str, number: Number, text: str, tolerance: float) -> bool | None:
    """Compare a number, and its text, with what is none: several answers, words, or digits to a base."""
    if _ONE_SIDED.match(other) or _BASED.fullmatch(other) or (_WORDS.fullmatch(other) and len(other) > 4):
        return False
    several = _listed(other)
    if several is None:
        return None
    if len(several.parts) == 1 and several.brackets == "{}":
        return same_answer(several.parts[0], text, tolerance)
    return False if len(several.parts) > 1 and number.value is not None else None


def _listed(text: str) -> _Listed | None:
    r"""Return the parts of a list, set, pair, vector or interval; None for anything else."""
    bare = text.replace("\\{", "{").replace("\\}", "}").strip()
    # Nested lists are compared recursively; the bound keeps a made-up answer of brackets cheap.
    if sum(map(bare.count, _OPENING)) > _MOST_BRACKETS or "\\begin" in bare:
        return None
    brackets = ""
    if len(bare) > 1 and bare[0] in _OPENING and bare[-1] in _CLOSING and closes_at_end(bare, _OPENING, _CLOSING):
        brackets, bare = bare[0] + bare[-1], bare[1:-1]
    parts = _parts(bare)
    if parts is None or not all(part.strip() for part in parts) or len(parts) > _MOST_PARTS:
        return None
    # A pair of brackets around one thing is mathematics; {5} is a set with one member.
    if len(parts) == 1 and brackets != "{}":
        return None
    return _Listed(brackets, tuple(part.strip() for part in parts))


def _parts(text: str) -> list[str] | None:
    """Split at commas (and "and", "or") outside of all brackets; a comma of thousands is none. None if unbalanced."""
    parts, depth, start = [], 0, 0
    text = re.sub(r",? (?:and|or) ", ", ", text)
    for index, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            return None
        if character in ",;" and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return None if depth else [*parts, text[start:]]


def _same_lists(found: _Listed, gold: _Listed, tolerance: float) -> bool | None:
    if found.is_ordered != gold.is_ordered or (found.is_ordered and found.brackets != gold.brackets):
        return False
    if len(found.parts) != len(gold.parts):
        return False
    if found.is_ordered:
        judged = [same_answer(ours, theirs, tolerance) for ours, theirs in zip(found.parts, gold.parts, strict=True)]
        return False if False in judged else None if None in judged else True
    return _same_sets(found.parts, gold.parts, tolerance)


def _same_sets(found: tuple[str, ...], gold: tuple[str, ...], tolerance: float) -> bool | None:
    """Match each part with one of the other side, in any order."""
    # Matching in any order takes a quadratic number of comparisons.
    if len(found) > 20:
        return True if sorted(map(squeezed, found)) == sorted(map(squeezed, gold)) else None
    judged = [[same_answer(ours, theirs, tolerance) for theirs in gold] for ours in found]
    # With a tolerance 1.1 may be both 1.0 and 1.2, and the first that fits may be another's only one.
    if _is_matched([[verdict is True for verdict in row] for row in judged]):
        return True
    return None if _is_matched([[verdict is not False for verdict in row] for row in judged]) else False


def _is_matched(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can have a column of its own among those that fit; there are as many of both."""
    owners: dict[int, int] = {}

    def placed(row: int, tried: set[int]) -> bool:
        for column in (c for c, fit in enumerate(fits[row]) if fit and c not in tried):
            tried.add(column)
            if column not in owners or placed(owners[column], tried):
                owners[column] = row
                return True
        return False

    return all(placed(row, set()) for row in range(len(fits)))
