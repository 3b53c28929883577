"""Text to token ids and back, with any Hugging Face tokenizer."""

import contextlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from gnomon.core.errors import ConfigError
from gnomon.core.sections import DATE
from gnomon.core.types import Message
from gnomon.models.attention import edge_note, rotary_edge
from gnomon.models.folder import CLOCK, DRAWS, check_template, names_switch, render

_UNSET_LENGTH = 10**9  # transformers writes about 1e30 where a tokenizer states no length
_PROBE = "gnomonprobe"
_PLAIN = "If  A:\n\n\treturn b"
_FORMS = "x\u00b2 \u00bd"
"""A square and a half, of which compatibility forms (NFKC) make x2 and 1/2."""


@dataclass(frozen=True)
class Tokenizer:
    """Token ids of text, with two ways to read a control string.

    `encode` is for our own text (a rendered template): ``<|im_end|>`` becomes the control token. `encode_plain` is for
    foreign text (a dataset, a tool): ``<|im_end|>`` stays plain characters.

    Attributes:
        backend: The transformers tokenizer, used only inside `models`.
        control: Every special token's string and id.
        bos: The token for the beginning of a text, or None.
        begin: Tokens that the tokenizer puts before a text: none, ``bos``, or several. Tokens that it puts after a text
            are dropped, because a response follows.
        stop_ids: Ids that end a turn: eos of tokenizer and generation config, and the chat template's end of turn.
        context_length: Most tokens of prompt and completion together; None if neither architecture nor tokenizer says.
        vocab_size: Width of the logits, which may exceed the number of named tokens.
        switches: Variables for every rendering of the chat template, such as ``enable_thinking``.
        context_note: Reason for the context length, for messages.
        date: The day that a chat template reads from its clock, as YYYY-MM-DD.
        said: Sentences about the model's generation settings.
    """

    backend: Any
    control: Mapping[str, int]
    bos: int | None
    begin: tuple[int, ...]
    stop_ids: tuple[int, ...]
    context_length: int | None
    vocab_size: int
    switches: Mapping[str, Any] = field(default_factory=dict)
    context_note: str = ""
    date: str = DATE
    said: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what is unusual in the tokenizer, its chat template, or the model's generation settings."""
        found = list(self.said)
        if self.names_switch(CLOCK):
            found.append(
                f"the model's chat template reads the clock: every prompt has the date {self.date}, whenever it is "
                "written (template_date sets another)"
            )
        if any(self.names_switch(name) for name in DRAWS):
            found.append("the model's chat template draws at random: a row's prompt has the same draws every time")
        if self.spelled(self.encode_plain(_FORMS)) == unicodedata.normalize("NFKC", _FORMS):
            found.append("the tokenizer writes compatibility forms (NFKC): x\u00b2 in a text is x2 to the model")
        # A tokenizer that drops spaces or newlines cannot write code, whatever the model learns.
        if (read := self.spelled(self.encode_plain(_PLAIN))) != _PLAIN:
            found.append(f"the tokenizer changes texts: {_PLAIN!r} becomes {read!r}, and answers cannot be otherwise")
        return tuple(found)

    @property
    def control_strings(self) -> tuple[str, ...]:
        """The strings that `encode` turns into control tokens, longest first."""
        return tuple(sorted(self.control, key=lambda text: (-len(text), text)))

    def difference(self, other: "Tokenizer") -> str | None:
        """Return in words why ``other`` cannot read this one's token ids; None where every id is the same text."""
        mine, theirs = ({i: text for text, i in t.backend.get_vocab().items()} for t in (self, other))
        wrong = next((i for i in sorted(mine) if theirs.get(i) != mine[i]), None)
        if wrong is not None:
            return f"token {wrong} is {mine[wrong]!r} and there {theirs.get(wrong, 'nothing')!r}"
        if other.vocab_size < self.vocab_size:
            return f"its logits have {other.vocab_size} tokens, and the model's {self.vocab_size}"
        return None

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; control strings become control tokens, and nothing is added in front.

        Raises:
            ConfigError: If the model has no embedding for a token of it.
        """
        return self._embedded(self.backend.encode(text, add_special_tokens=False, split_special_tokens=False))

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of ``text`` as plain text: no id is a control token.

        The ids are the tokenizer's own if the text has no control string; the tokenizer's own switch does the rest. If
        a vocabulary spells a control string as one ordinary piece (Unigram does), the text is cut after the string's
        first character, or else into characters. ``decode`` gives the same text back wherever it does for harmless
        text.

        Raises:
            ConfigError: If the model has no embedding for a token of it.
        """
        # Almost every text: the tokenizer's own ids, by its fast path.
        if not any(string in text for string in self.control):
            ids = self.encode(text)
            if self._is_plain(ids, text):
                return ids
        ids = self._encode_split(text)
        if self._is_plain(ids, text):
            return ids
        # Cut after its first character, a control string is in no piece as a whole.
        ids = [i for piece in self._cut(text) for i in self._encode_split(piece)]
        if self._is_plain(ids, text):
            return ids
        return [i for character in text for i in self._encode_split(character)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, with control tokens that carry meaning.

        Leading begin and pad tokens and trailing end and pad tokens are removed. Marks of thoughts and tool calls, and
        all other tokens between, stay in the text.
        """
        pad = self.backend.pad_token_id
        first, last = 0, len(ids)
        while last > 0 and (ids[last - 1] in self.stop_ids or ids[last - 1] == pad):
            last -= 1
        while first < last and ids[first] in (self.bos, pad):
            first += 1
        return self.spelled(ids[first:last])

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with every control token spelled out, U+FFFD for each id without a token."""
        runs = itertools.groupby(ids, self._unnamed.__contains__)
        return "".join("\N{REPLACEMENT CHARACTER}" * len(list(run)) if bare else self._text(run) for bare, run in runs)

    def _text(self, ids: Iterable[int]) -> str:
        text = self.backend.decode(
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return cast(str, text)

    @cached_property
    def _unnamed(self) -> frozenset[int]:
        """Ids that have a logit and no token, as in a padded vocabulary; a tokenizer writes nothing for them."""
        free, size = set(range(self.vocab_size)).difference(self.backend.get_vocab().values()), len(self.backend)
        return frozenset(i for i in free if i >= size or self.backend.convert_ids_to_tokens(i) is None)

    def template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        switches: Mapping[str, Any] | None = None,
        begins_answer: bool = True,
    ) -> str | None:
        """Return ``messages`` in the model's chat format; None without a template.

        Args:
            messages: The conversation.
            tools: JSON schemas for the template; many templates ignore them.
            switches: Variables of the template, in addition to this tokenizer's own.
            begins_answer: End where the response begins.

        Raises:
            ConfigError: If the template refuses the messages (an unknown role, a wrong order), fails, or does not end.
        """
        if self.backend.chat_template is None:
            return None
        given = {**self.switches, **(switches or {})}
        return render(self.backend, messages, tools, given, begins_answer, self.date)

    def names_switch(self, name: str, has_tools: bool = False) -> bool:
        """Whether the chat template reads this variable."""
        return self.backend.chat_template is not None and names_switch(self.backend, name, has_tools)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, so that transformers and `load_tokenizer` read them back."""
        self.backend.save_pretrained(str(folder))

    def _encode_split(self, text: str) -> list[int]:
        return self._embedded(self.backend.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _embedded(self, ids: list[int]) -> list[int]:
        beyond = max(ids, default=0)
        if beyond >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer gives {self.backend.convert_ids_to_tokens(beyond)!r} the id {beyond}, and the model "
                f"has embeddings for 0 to {self.vocab_size - 1}: leave that text out, give the model's own tokenizer, "
                "or enlarge the model (resize_token_embeddings)"
            )
        return ids

    def _is_plain(self, ids: Sequence[int], text: str) -> bool:
        unknown = self.backend.unk_token
        # The token for unknown characters is a control token of many vocabularies, and plain text may have such
        # characters.
        harmless = {self.control[unknown]} if unknown in self.control and unknown not in text else set()
        return not (set(ids) & set(self.control.values()) - harmless)

    def _cut(self, text: str) -> list[str]:
        cuts = {0, len(text)}
        for string in self.control_strings:
            start = text.find(string)
            while start >= 0:
                cuts.add(start + 1)
                start = text.find(string, start + 1)
        places = sorted(cuts)
        return [text[a:b] for a, b in itertools.pairwise(places)]


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds to a text, in UTF-8; read from the tokenizer when first asked for, then kept.

    A token may hold a part of a character. Byte-level vocabularies spell each byte as a visible character, others as
    ``<0xE2>``. The bytes of a whole response are those of its tokens, one after the other.

    Args:
        tokenizer: The tokenizer.

    >>> from gnomon.models.tiny import tiny_tokenizer
    >>> known = TokenBytes(tiny_tokenizer())
    >>> b"".join(known[token] for token in tiny_tokenizer().encode("\u00e9!"))
    b'\xc3\xa9!'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # Many tokenizers leave out a blank at the beginning of a text, so each token stands behind a letter.
        self._anchor = tokenizer.encode_plain("a")
        self._before = tokenizer.spelled(self._anchor)

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.spelled([*self._anchor, token]).removeprefix(self._before)
        self[token] = found = self._part(token, text) if "\N{REPLACEMENT CHARACTER}" in text else text.encode()
        return found

    def _part(self, token: int, text: str) -> bytes:
        """Return the bytes of a token whose text is not whole."""
        name = self._tokenizer.backend.convert_ids_to_tokens(token)
        if isinstance(name, bytes):
            return name
        if numbered := re.fullmatch("<0x([0-9A-F]{2})>", str(name)):
            return bytes([int(numbered[1], 16)])
        if set(str(name)) <= _BYTE_OF.keys():
            made = bytes(_BYTE_OF[character] for character in str(name))
            # The bytes are right only if they read as the tokenizer reads the token.
            if made.decode(errors="replace") == text:
                return made
        return text.encode()


def wrap(backend: Any, config: Any, generation_eos: Sequence[int] = (), said: Sequence[str] = ()) -> Tokenizer:
    """Return the `Tokenizer` for a transformers tokenizer, with additions from the model's config.

    Args:
        backend: The transformers tokenizer.
        config: The model's transformers config.
        generation_eos: End tokens of its generation config.
        said: Sentences about its generation settings.
    """
    if backend.chat_template is not None:
        check_template(backend)
    # Two sources, since some tokenizers name a special token that they did not mark as one, and the other way round.
    added = {str(t.content): int(i) for i, t in backend.added_tokens_decoder.items() if t.special}
    named = {str(text): int(backend.convert_tokens_to_ids(text)) for text in backend.all_special_tokens}
    control = {**added, **named}
    size = int(config.get_text_config().vocab_size)
    turn_end = _end_of_turn(backend, control)
    # All three end an answer: base models have the first, chat models often only the third in their template.
    ends = [backend.eos_token_id, *generation_eos, turn_end]
    lacking = turn_end is not None and generation_eos and turn_end not in generation_eos
    if lacking:
        said = [
            *said,
            f"answers end at {backend.convert_ids_to_tokens(turn_end)!r}, as in the model's chat template; its "
            f"generation_config.json ends them at {sorted(generation_eos)} alone, so other programs may go on behind "
            f"it (add {turn_end} to eos_token_id there)",
        ]
    beyond = sorted({int(i) for i in ends if i is not None and int(i) >= size})
    if beyond:
        said = [
            *said,
            f"the end token {backend.convert_ids_to_tokens(beyond[0])!r} has the id {beyond[0]}, and the model draws 0 "
            f"to {size - 1}: it ends no answer (resize_token_embeddings gives it an embedding)",
        ]
    return Tokenizer(
        backend=backend,
        control=control,
        bos=backend.bos_token_id,
        begin=_begin(backend, control),
        stop_ids=tuple(sorted({int(i) for i in ends if i is not None and int(i) < size})),
        context_length=context_of(config, backend.model_max_length),
        context_note=edge_note(config, context_of(config)),
        vocab_size=size,
        said=tuple(said),
    )


def context_of(config: Any, stated: int | None = None) -> int | None:
    """Return the positions that a model's config allows, else the tokenizer's limit, else None.

    The result is never beyond the length at which rotary positions change (`rotary_edge`).
    """
    text, edge = config.get_text_config(), rotary_edge(config)
    # GPT-2 and others have the number under another name, which transformers maps.
    positions = vars(text).get(text.attribute_map.get("max_position_embeddings", "max_position_embeddings"))
    stated = None if stated is None or stated >= _UNSET_LENGTH else stated
    longest = stated if positions is None else positions
    limits = [int(limit) for limit in (longest, edge) if limit is not None]
    return min(limits, default=None)


def byte_characters() -> list[str]:
    """Return the visible character that byte-level tokenizers write for each byte (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}


def _begin(backend: Any, control: Mapping[str, int]) -> tuple[int, ...]:
    """Return what the tokenizer puts before a text of its own accord."""
    special = set(control.values())
    own = list(backend.encode(_PROBE, add_special_tokens=True))
    return tuple(itertools.takewhile(lambda i: i in special, own))


def _end_of_turn(backend: Any, control: Mapping[str, int]) -> int | None:
    """Return the control token that the chat template writes after a response, found by rendering."""
    if backend.chat_template is None:
        return None
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    with contextlib.suppress(ConfigError):
        _, found, tail = render(backend, turns, begins_answer=False).rpartition(_PROBE)
        # A template that leaves responses out says nothing of their end; its first token would be that of a text.
        places = {tail.find(text): i for text, i in control.items() if found and text in tail}
        return places[min(places)] if places else None
    return None
