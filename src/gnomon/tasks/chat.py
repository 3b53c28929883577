"""Messages to token ids; text can never inject a control token.

A chat template renders messages to one text in which turns are marked by control strings such as
``<|im_end|>``, and the tokenizer turns each control string into its control token, wherever it came from. A
question that contains ``<|im_end|>`` would therefore end its own turn. Here every control string that came
from content is encoded as plain text instead, and everything else exactly as the model was trained on it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    def begin(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text: nothing, or some control tokens."""
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
        """Return the text of an answer, without its end of turn; marks that are control tokens stay."""
        ...

    def template(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """Return the messages as the model's chat text, ready for its answer; None without a template."""
        ...


@dataclass(frozen=True)
class ChatRenderer:
    """Turns a question into prompt ids with the model's chat template.

    A string is one user message; messages are taken as they are. Without a template (a base model) one
    message is its bare text; several become ``role: content`` lines and end in ``assistant:``.

    system: a system message for questions that bring none of their own; None adds none.
    tools: JSON schemas that the template itself tells the model about (`tasks/bridge.py` asks whether it does).
    told: what every system message ends with, and one is made for: tools that the template does not tell about.
    Raises: DatasetError for a message without role or content, or with a role that is not known.
    """

    tokenizer: Tokenizer
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    told: str | None = None

    def __call__(self, question: str | Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt's ids."""
        messages = self._messages(question)
        hidden = hide(self.tokenizer, messages)
        rendered = self._rendered(hidden.messages)
        return self._plain(messages) if rendered is None else tuple(hidden.encode(rendered))

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        return self.tokenizer.template(messages, self.tools) if self.tools else self.tokenizer.template(messages)

    def _messages(self, question: str | Sequence[Message]) -> list[Message]:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        for message in messages:
            flaw = message_flaw(message)
            if flaw:
                raise DatasetError(f"a message cannot be rendered: {flaw}; got {dict(message)!r}")
        if self.system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return [*messages] if self.told is None else _with_note(messages, self.told)

    def _plain(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (*self.tokenizer.begin, *self.tokenizer.encode_plain(transcript(messages)))


@dataclass(frozen=True)
class Hidden:
    """Messages in which every control string is one private-use character that occurs nowhere else.

    The template sees, trims and moves such a character like any other text; `encode` then makes plain text of it.
    originals: the character to the control string that it stands for.
    """

    tokenizer: Tokenizer
    messages: list[Message]
    originals: Mapping[str, str]

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of rendered text: what the template wrote with control tokens, what it was given without."""
        if not self.originals:
            return list(self.tokenizer.encode(rendered))
        ids: list[int] = []
        for piece in re.split(f"([{''.join(self.originals)}])", rendered):
            if piece in self.originals:
                ids += self.tokenizer.encode_plain(self.originals[piece])
            elif piece:
                ids += self.tokenizer.encode(piece)
        return ids


def hide(tokenizer: Tokenizer, messages: Sequence[Message]) -> Hidden:
    """Return the messages with the control strings in them hidden; unchanged where there are none."""
    found = [c for c in tokenizer.control_strings if c and any(c in m["content"] for m in messages)]
    if not found:
        return Hidden(tokenizer, [*messages], {})
    stand_ins = dict(zip(found, _unused_characters(messages, len(found)), strict=True))
    # longest first, so that of two control strings beginning alike the one really there is matched
    pattern = re.compile("|".join(re.escape(c) for c in sorted(found, key=len, reverse=True)))
    hidden = [{**m, "content": pattern.sub(lambda match: stand_ins[match[0]], m["content"])} for m in messages]
    return Hidden(tokenizer, [*hidden], {stand_in: control for control, stand_in in stand_ins.items()})


def _with_note(messages: Sequence[Message], note: str) -> list[Message]:
    """Return the messages with ``note`` behind the system message, which is made if there is none."""
    for place, message in enumerate(messages):
        if message["role"] == "system":
            noted = {**message, "content": f"{message['content']}\n\n{note}"}
            return [*messages[:place], noted, *messages[place + 1 :]]
    return [{"role": "system", "content": note}, *messages]


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
