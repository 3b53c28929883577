"""Messages to token ids; text can never inject a control token.

A chat template renders messages to one text in which turns are marked by control strings such as
``<|im_end|>``, and the tokenizer turns each control string into its control token, wherever it came from. A
question that contains ``<|im_end|>`` would therefore end its own turn. Here every control string that came
from content is encoded as plain text instead, and everything else exactly as the model was trained on it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gnomon.errors import DatasetError
from gnomon.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


class Tokenizer(Protocol):
    """What tasks need of a tokenizer."""

    @property
    def control_strings(self) -> tuple[str, ...]:
        """Every text that `encode` may turn into a control token."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that begins a text without template; None when the model has none."""
        ...

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and completion together; None when the model does not say."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return ids; control strings in ``text`` become control tokens; nothing is added in front."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Return ids, none of which is a control token, whatever ``text`` says."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without control tokens."""
        ...

    def template(self, messages: Sequence[Message]) -> str | None:
        """Return the messages as the model's chat text, ready for its answer; None without a template."""
        ...


@dataclass(frozen=True)
class ChatRenderer:
    """Turns a question into prompt ids with the model's chat template.

    A string is one user message; messages are taken as they are. Without a template (a base model) one
    message is its bare text; several become ``role: content`` lines and end in ``assistant:``.

    system: a system message for questions that bring none of their own; None adds none.
    Raises: DatasetError for a message without role or content, or with a role that is not known.
    """

    tokenizer: Tokenizer
    system: str | None = None

    def __call__(self, question: str | Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt's ids."""
        messages = self._messages(question)
        found = [c for c in self.tokenizer.control_strings if c and any(c in m["content"] for m in messages)]
        if found:
            return self._without_injection(messages, found)
        rendered = self.tokenizer.template(messages)
        return self._plain(messages) if rendered is None else tuple(self.tokenizer.encode(rendered))

    def _messages(self, question: str | Sequence[Message]) -> list[Message]:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        for message in messages:
            flaw = message_flaw(message)
            if flaw:
                raise DatasetError(f"a message cannot be rendered: {flaw}; got {dict(message)!r}")
        if self.system is None or any(message["role"] == "system" for message in messages):
            return [*messages]
        return [{"role": "system", "content": self.system}, *messages]

    def _plain(self, messages: Sequence[Message]) -> tuple[int, ...]:
        begin = () if self.tokenizer.bos is None else (self.tokenizer.bos,)
        return (*begin, *self.tokenizer.encode_plain(transcript(messages)))

    def _without_injection(self, messages: Sequence[Message], found: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of messages whose content holds control strings.

        Each such string is rendered as one private-use character that occurs nowhere else, so that the
        template sees, trims and moves it like any other text; after rendering it is encoded as plain text.
        """
        stand_ins = dict(zip(found, _unused_characters(messages, len(found)), strict=True))
        # longest first, so that of two control strings beginning alike the one really there is matched
        pattern = re.compile("|".join(re.escape(c) for c in sorted(found, key=len, reverse=True)))
        hidden = [{**m, "content": pattern.sub(lambda match: stand_ins[match[0]], m["content"])} for m in messages]
        rendered = self.tokenizer.template(hidden)
        if rendered is None:
            return self._plain(messages)
        originals = {stand_in: control for control, stand_in in stand_ins.items()}
        ids: list[int] = []
        for piece in re.split(f"([{''.join(originals)}])", rendered):
            if piece in originals:
                ids += self.tokenizer.encode_plain(originals[piece])
            elif piece:
                ids += self.tokenizer.encode(piece)
        return tuple(ids)


def message_flaw(message: object) -> str | None:
    """Return what is wrong with a chat message, or None.

    >>> message_flaw({"role": "usr", "content": "Hi"})
    "role must be one of system, developer, user, assistant, tool, got 'usr'"
    """
    if not isinstance(message, Mapping):
        return f"a message is an object with role and content, got {type(message).__name__}"
    if message.get("role") not in ROLES:
        return f"role must be one of {', '.join(ROLES)}, got {message.get('role')!r}"
    content = message.get("content")
    if not isinstance(content, str):
        return f"content must be text, got {type(content).__name__}"
    others = [str(key) for key, value in message.items() if key not in ("role", "content") and value is not None]
    return f"only role and content are understood, got also {', '.join(others)}" if others else None


def transcript(messages: Sequence[Message]) -> str:
    r"""Return messages as text for a model without chat template.

    >>> transcript([{"role": "user", "content": "3+4="}])
    '3+4='
    >>> transcript([{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}])
    'system: Add.\nuser: 3+4=\nassistant:'
    """
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join([*(f"{m['role']}: {m['content']}" for m in messages), "assistant:"])


def readable(messages: Sequence[Message]) -> str:
    r"""Return the question in ``messages`` as a person reads it; system messages are left out.

    >>> readable([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    '2+2?'
    """
    asked = [m for m in messages if m["role"] not in ("system", "developer")]
    if len(asked) == 1:
        return asked[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in asked)


def _unused_characters(messages: Sequence[Message], count: int) -> list[str]:
    used = set().union(*(m["content"] for m in messages))
    free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
    return [character for character, _ in zip(free, range(count), strict=False)]
