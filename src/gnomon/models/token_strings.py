"""Token ids as the texts that they stand for, one by one, so that each can be colored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gnomon.core.errors import ModelError, UserError, refusal_of

# Files of a model are read by libraries, which raise errors of any kind; a caller gets a ModelError.


@contextmanager
def parsed(said: str, *passing: type[Exception]) -> Iterator[None]:
    """Turn any error of the block into a ModelError that begins with ``said``; one of ours, or ``passing``, stays.

    What the operating system refused (a full disk, a limit) stays as well: the model is not to blame.
    A damaged config.json alone makes transformers raise nine kinds of error, from OSError to ZeroDivisionError; the
    panic of a library in Rust (tokenizers, of a token that a template names and nothing has) is no Exception.
    """
    stays: tuple[type[Exception], ...] = (UserError, MemoryError, *passing)
    try:
        yield
    except stays:
        raise
    except BaseException as error:
        is_panic = type(error).__module__ == "pyo3_runtime"
        if refusal_of(error) is not None or not (is_panic or isinstance(error, Exception)):
            raise
        raise ModelError(f"{said}: {first_line(error)}") from error


@contextmanager
def untrusted(who: str, key: str) -> Iterator[None]:
    """Say of a model whose own code was not run which ``key`` would let it; any other error passes."""
    try:
        yield
    except ModelError as error:
        # transformers says so in words alone.
        if "custom code" not in str(error):
            raise
        raise ModelError(
            f"{who} brings its own code, which is not run; read it, and set {key} = true if you trust it"
        ) from error


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says, with the next where that one only announces it.

    >>> first_line(ValueError("a\\nb")), first_line(TypeError("field:\\n  none\\nb")), first_line(KeyError())
    ('ValueError: a', 'TypeError: field: none', 'KeyError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Tokens that one character may be cut into, and then some."""
_ANCHOR = "a"


class Backend(Protocol):
    """What is needed of a tokenizer of the ``tokenizers`` library."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        """Return an encoding, which has ``ids``."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ``ids``."""


@dataclass
class Vocabulary:
    """The text of each token, as it reads in the middle of a text."""

    backend: Backend
    _known: dict[int, str] = field(default_factory=dict)
    _anchor: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._anchor = list(self.backend.encode(_ANCHOR, add_special_tokens=False).ids)

    def pieces(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Return texts, and the number of tokens of each: several if a character was split into tokens.

        A token without text becomes its number in angle brackets.
        """
        found: list[tuple[str, int]] = []
        place = 0
        while place < len(tokens):
            text, count = self._text(tokens[place : place + 1]), 1
            # A replacement character says that a character's bytes are not all there; further tokens may bring them.
            while _BROKEN in text and count < _LONGEST_CHARACTER and place + count < len(tokens):
                longer = self._text(tokens[place : place + count + 1])
                count += 1
                if _BROKEN not in longer:
                    text = longer
                    break
            else:
                count = 1
            found.append((text, count))
            place += count
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` with control tokens."""
        return self.backend.decode(list(tokens), skip_special_tokens=False)

    def _text(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1 and tokens[0] in self._known:
            return self._known[tokens[0]]
        # After a letter: many tokenizers leave out a blank at the beginning of a text.
        before, whole = self.text(self._anchor), self.text([*self._anchor, *tokens])
        text = whole.removeprefix(before) or f"⟨{', '.join(map(str, tokens))}⟩"
        if len(tokens) == 1:
            self._known[tokens[0]] = text
        return text


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the tokens of a model's folder; None if ``tokenizer.json`` is missing or damaged.

    The function reads only this file, without transformers, in milliseconds, and executes nothing.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None

    try:
        return Vocabulary(Tokenizer.from_file(str(path)))
    except Exception:
        # The boundary of a library that raises nothing narrower for a damaged file.
        return None
