"""Instructions that a program can check: whether an answer has so many words, ends in a phrase, is JSON (IFEval).

Source: IFEval, arXiv 2311.07911; the ids and arguments are those of the data set google/IFEval.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from gnomon.rewards.base import Sample, Verifier, VerifierError, column

LANGUAGE = "language:response_language"
"""The one instruction that no rule tells: which language a text is in takes a trained classifier."""

# Points that end no sentence: after a title or an initial, and within a number.
_ABBREVIATIONS = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|No|Fig|[A-Z])\.(?=\s)|(?<=\d)\.(?=\d)"
)
_SENTENCE = re.compile(r"[^.!?\n]*[^\s.!?][^.!?\n]*(?:[.!?]+[\"')\]\u201d]*|\n|$)")
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

Given = Mapping[str, Any]


def sentences(text: str) -> int:
    """Return how many sentences a text has: a line break ends one, a point after an abbreviation does not.

    The data set's own program asks NLTK's trained splitter, which differs where abbreviations are rare.

    >>> sentences("Dr. Ann has 3.5 pens. She lost one! Why?")
    3
    """
    return len(_SENTENCE.findall(_ABBREVIATIONS.sub(lambda found: found[0].replace(".", ""), text)))


def _holds(count: int, relation: Any, wanted: Any) -> bool:
    if relation not in ("at least", "less than"):
        raise VerifierError(f"a relation is 'at least' or 'less than', got {relation!r}")
    return count >= int(wanted) if relation == "at least" else count < int(wanted)


def _words(word: str, text: str) -> list[str]:
    return re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)


def _existence(text: str, given: Given) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in given["keywords"])


def _frequency(text: str, given: Given) -> bool:
    count = len(re.findall(re.escape(str(given["keyword"])), text, re.IGNORECASE))
    return _holds(count, given["relation"], given["frequency"])


def _letters(text: str, given: Given) -> bool:
    return _holds(text.lower().count(str(given["letter"]).lower()), given["let_relation"], given["let_frequency"])


def _paragraphs(text: str, given: Given) -> bool:
    """Paragraphs are divided by ***; only the first and the last piece may be empty."""
    # Counts and patterns in these functions are those of the data set's own checkers, oddities
    # included: another count would grade answers otherwise than the published numbers do.
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1]
    count = sum(bool(part.strip()) for part in parts)
    return all(part.strip() for part in inner) and count == int(given["num_paragraphs"])


def _first_word(text: str, given: Given) -> bool:
    """The n-th paragraph, divided by blank lines, begins with a word, and there are so many paragraphs."""
    parts, place = re.split(r"\n\n", text), int(given["nth_paragraph"])
    if not 1 <= place <= len(parts) or not parts[place - 1].strip():
        return False
    first = parts[place - 1].split()[0].lstrip("'\"")
    word = re.split(r"[.,?!'\"]", first)[0].lower()
    count = sum(bool(part.strip()) for part in parts)
    return count == int(given["num_paragraphs"]) and word == str(given["first_word"]).lower()


def _postscript(text: str, given: Given) -> bool:
    marker = str(given["postscript_marker"])
    # The two common markers may be written with spaces; any other must stand there as asked for.
    forms = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = forms.get(marker, rf"\s*{re.escape(marker.lower())}.*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def _bullets(text: str, given: Given) -> bool:
    starred = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashed = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(starred) + len(dashed) == int(given["num_bullets"])


def _highlights(text: str, given: Given) -> bool:
    # **word** also matches as an empty pair of single stars on each side, which the strip leaves out.
    single = [h for h in re.findall(r"\*[^\n\*]*\*", text) if h.strip("*").strip()]
    double = [h for h in re.findall(r"\*\*[^\n\*]*\*\*", text) if h.removeprefix("**").removesuffix("**").strip()]
    return len(single) + len(double) >= int(given["num_highlights"])


def _sections(text: str, given: Given) -> bool:
    parts = re.split(rf"\s?{re.escape(str(given['section_spliter']))}\s?\d+\s?", text)
    return len(parts) - 1 >= int(given["num_sections"])


def _json(text: str, given: Given) -> bool:
    bare = text.strip()
    for mark in ("```json", "```Json", "```JSON", "```"):
        bare = bare.removeprefix(mark)
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, given: Given) -> bool:
    return any(t.lstrip("<").rstrip(">").strip() for t in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str, given: Given) -> bool:
    """Two different answers with ****** between them; only the first and the last piece may be empty."""
    parts = text.split("******")
    said = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def _repeats(text: str, given: Given) -> bool:
    return text.strip().lower().startswith(str(given["prompt_to_repeat"]).strip().lower())


def _ends(text: str, given: Given) -> bool:
    return text.strip().strip('"').lower().endswith(str(given["end_phrase"]).strip().lower())


def _quoted(text: str, given: Given) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _capital_words(text: str, given: Given) -> bool:
    words = re.findall(r"[\w'-]*[A-Za-z][\w'-]*", text)
    return _holds(sum(word.isupper() for word in words), given["capital_relation"], given["capital_frequency"])


CHECKS: Mapping[str, Callable[[str, Given], bool]] = MappingProxyType(
    {
        "keywords:existence": _existence,
        "keywords:frequency": _frequency,
        "keywords:forbidden_words": lambda text, given: not any(_words(w, text) for w in given["forbidden_words"]),
        "keywords:letter_frequency": _letters,
        "length_constraints:number_sentences": lambda text, given: _holds(
            sentences(text), given["relation"], given["num_sentences"]
        ),
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:number_words": lambda text, given: _holds(
            len(re.findall(r"\w+", text)), given["relation"], given["num_words"]
        ),
        "length_constraints:nth_paragraph_first_word": _first_word,
        "detectable_content:number_placeholders": lambda text, given: (
            len(re.findall(r"\[.*?\]", text)) >= int(given["num_placeholders"])
        ),
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _bullets,
        "detectable_format:constrained_response": lambda text, given: any(c in text for c in _CHOICES),
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:json_format": _json,
        "detectable_format:title": _title,
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _repeats,
        "startend:end_checker": _ends,
        "startend:quotation": _quoted,
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": lambda text, given: text.isupper(),
        "change_case:english_lowercase": lambda text, given: text.islower(),
        "punctuation:no_comma": lambda text, given: "," not in text,
    }
)
"""The instructions that are checked, by their ids; `LANGUAGE` is not among them."""


@dataclass(frozen=True)
class Instructions(Verifier):
    """1.0 if an answer follows every instruction of its row, else 0.0 (IFEval's strict accuracy of prompts).

    Differs from the data set's program in two: sentences are split by rules, and all capitals or all small letters are
    not asked to be English as well. An empty answer follows nothing.

    Attributes:
        kind: "instructions".
        credit: "all" wants every instruction; "each" gives the share that is followed (accuracy of instructions).
        is_loose: Whether an answer also counts without its first or last line or its asterisks (loose accuracy).
        column: Column with the list of instruction ids; their arguments are in ``kwargs``, a table each.

    Source: arXiv 2311.07911, sections 2 and 3.
    """

    kind: Literal["instructions"] = field(default="instructions", kw_only=True)
    credit: Literal["all", "each"] = "all"
    is_loose: bool = False
    column: str = "instruction_id_list"

    def __call__(self, sample: Sample) -> float:
        """Check each instruction."""
        asked = self._asked(sample)
        forms = [form for form in self._forms(sample.completion) if form.strip()]
        # Loose accuracy takes each instruction in whichever form follows
        # it. Blank forms are left out: an empty text follows "no comma".
        followed = [any(_is_followed(name, form, given) for form in forms) for name, given in asked]
        return float(all(followed)) if self.credit == "all" else sum(followed) / len(followed)

    def stated(self, sample: Sample) -> None:
        """Return None: no row has an answer.

        Raises:
            VerifierError: For an instruction that cannot be checked.
        """
        for name, given in self._asked(sample):
            _is_followed(name, "A text, of 2 sentences. So it is.", given)

    def _asked(self, sample: Sample) -> list[tuple[str, Given]]:
        names, given = column(sample, self.column), column(sample, "kwargs")
        if not isinstance(names, list | tuple) or not isinstance(given, list | tuple) or len(names) != len(given):
            raise VerifierError(f"'{self.column}' and 'kwargs' should be lists of one length")
        if not names:
            raise VerifierError(f"'{self.column}' holds no instruction")
        return [(str(name), each if isinstance(each, Mapping) else {}) for name, each in zip(names, given, strict=True)]

    def _forms(self, text: str) -> Iterator[str]:
        lines = text.split("\n")
        cuts = [text, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])] if self.is_loose else [text]
        for cut in cuts:
            yield cut
            if self.is_loose:
                yield cut.replace("*", "")


def _is_followed(name: str, text: str, given: Given) -> bool:
    if name not in CHECKS:
        what = "takes a trained classifier of languages" if name == LANGUAGE else "is no known one"
        raise VerifierError(f"the instruction '{name}' {what}; remove the row")
    try:
        return CHECKS[name](text, given)
    except (KeyError, TypeError, ValueError) as error:
        raise VerifierError(
            f"the arguments of '{name}' are not its own: {error!r} in {str(dict(given))[:80]}"
        ) from error
