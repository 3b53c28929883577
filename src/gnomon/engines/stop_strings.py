"""Texts that end an answer, found over the borders of tokens."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from gnomon.core.errors import ConfigError
from gnomon.core.sections import SamplingConfig
from gnomon.core.types import Completion
from gnomon.engines.base import Sampling
from gnomon.models.load import load_tokenizer
from gnomon.models.tokenizer import TokenBytes, Tokenizer


@dataclass(frozen=True, eq=False)
class StopStrings:
    """Finds the token that completes a stop string.

    An answer ends at the first token with which its text holds one of the strings, wherever the string begins and ends
    within tokens. Bytes are compared, so a character that is cut into tokens is none. The prompt is not looked at:
    neither a string in it ends an answer, nor one that begins in it.

    Attributes:
        strings: The strings in UTF-8, one at least.
        known: The bytes of each token.
    """

    strings: tuple[bytes, ...]
    known: TokenBytes

    @classmethod
    def of(cls, sampling: Sampling) -> Self | None:
        """Return those of ``sampling``, None where it has none; the tokenizer is read once a process.

        Raises:
            ConfigError: No tokenizer is named.
            ModelError: There is no such tokenizer.
        """
        if not sampling.stop_strings:
            return None
        if not sampling.tokenizer:
            raise ConfigError(
                f"sampling.stop = {list(sampling.stop_strings)} needs the model whose tokens spell it; set "
                "Sampling(tokenizer=FOLDER) to the model's folder or name"
            )
        known = _token_bytes(sampling.tokenizer, sampling.trust_remote_code)
        return cls(tuple(string.encode() for string in sampling.stop_strings), known)

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest string."""
        return max(map(len, self.strings))

    def are_completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a string: in it, or in it and what stands before it.

        Looks at as many tokens as the longest string has bytes, so the time does not grow with the answer.
        """
        known, place = self.known, len(tokens) - 1
        window = known[tokens[place]]
        # A string that ends in the last token begins at most longest - 1 bytes before that token.
        enough = len(window) + self.longest - 1
        while place > 0 and len(window) < enough:
            place -= 1
            window = known[tokens[place]] + window
        return any(string in window for string in self.strings)

    def first(self, tokens: Sequence[int]) -> int | None:
        """Return the place of the first token that completes a string, None where none does."""
        # One search of the whole text first: most answers hold no stop string.
        if not any(string in b"".join(map(self.known.__getitem__, tokens)) for string in self.strings):
            return None
        return next(place for place in range(len(tokens)) if self.are_completed_by(tokens[: place + 1]))


@functools.cache
def _token_bytes(tokenizer: str, trust_remote_code: bool) -> TokenBytes:
    return TokenBytes(load_tokenizer(tokenizer, trust_remote_code))


def check_stop_strings(sampling: SamplingConfig, tokenizer: Tokenizer) -> None:
    """Refuse a stop string that the tokenizer's tokens never spell.

    Raises:
        ConfigError: The message has the string, and what the tokenizer makes of it.
    """
    known = TokenBytes(tokenizer)
    for string in sampling.stop_strings:
        spelled = b"".join(known[token] for token in tokenizer.encode_plain(string))
        if string.encode() not in spelled:
            raise ConfigError(
                f"sampling.stop has {string!r}, which the model's tokenizer spells {spelled.decode(errors='replace')!r}"
                ": no answer would end at it; write it so, or leave it out"
            )


def cut_at_stop(text: str, done: Completion, sampling: SamplingConfig) -> str:
    r"""Return an answer's text as rewards and environments see it: up to the stop string that ended it, or without it.

    Of several strings the one that ends first counts; of several that end there, the one that begins first.

    >>> done = Completion((52, 60, 62), (0.0,) * 3, (0.0,) * 3, 0, 0, "stop")
    >>> cut_at_stop("4</answer>\n\n", done, SamplingConfig(stop="</answer>"))
    '4'
    """
    # An answer that ended by its length may hold the beginning of a stop string, and no whole one.
    if done.stop != "stop" or not sampling.stop_strings:
        return text
    ended = _cut(text, sampling)
    if ended is None and done.tokens[-1] not in sampling.stop_ids:
        # The tokenizer left out the blank at the beginning of the text, and of the string.
        ended = _cut(f" {text}", sampling)
    return text if ended is None else ended


def until_stop(text: str, sampling: SamplingConfig) -> str:
    """Return what rewards would see of an answer that says ``text``.

    >>> until_stop("It is 3.5.", SamplingConfig(stop="."))
    'It is 3'
    """
    ended = _cut(text, sampling)
    return text if ended is None else ended


def _cut(text: str, sampling: SamplingConfig) -> str | None:
    found = [(place + len(s), place) for s in sampling.stop_strings if (place := text.find(s)) >= 0]
    if not found:
        return None
    # The string that ends first; of several that end there, the one that begins first.
    end, begin = min(found)
    return text[: end if sampling.include_stop else begin]
