"""Messages to token ids; text can never inject a control token.

A chat template renders messages to one text in which turns are marked by control strings such as
``<|im_end|>``, and the tokenizer turns each control string into its control token, wherever it came from. A
question that contains ``<|im_end|>`` would therefore end its own turn. Here every control string that came
from content is encoded as plain text instead, and everything else exactly as the model was trained on it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.core.errors import ConfigError, DatasetError, UserError, on_one_line, shortened
from gnomon.core.types import Message
from gnomon.tasks.base import Further, RenderedConversation
from gnomon.tasks.rendered import THOUGHTS, Looks, Template, is_kept_whole, name_of

_NOTHING = Further()
_SHOWN = 80
ROLES = ("system", "developer", "user", "assistant", "tool")
# Characters without a meaning of their own: no tokenizer or template treats them specially.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


class ChatTokenizer(Template, Protocol):
    """What tasks need of a tokenizer."""

    @property
    def control_strings(self) -> tuple[str, ...]:
        """Every text that `encode` may turn into a control token."""

    @property
    def begin(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text: nothing, or some control tokens."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and completion together; None when the model does not say."""

    def encode(self, text: str) -> list[int]:
        """Return ids; control strings in ``text`` become control tokens; nothing is added in front."""

    def encode_plain(self, text: str) -> list[int]:
        """Return ids, none of which is a control token, whatever ``text`` says."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without its end of turn; marks that are control tokens stay."""

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text of any ids, control tokens spelled out."""


@dataclass(frozen=True)
class ChatRenderer:
    """Turns a question into prompt ids with the model's chat template.

    A string is one user message; messages are taken as they are. Without a template (a base model) one message is its
    bare text; several become ``role: content`` lines and end in ``assistant:``. No messages at all are a text that
    begins at its first token, without any template.

    Attributes:
        system: A system message for questions that bring none of their own; None adds none.
        tools: JSON schemas that the template itself tells the model about (`tasks/turn_tokens.py` asks whether it
            does).
        note: What every system message ends with, and one is made for: tools that the template does not tell about.

    Raises:
        DatasetError: A message has no role or content, or an unknown role; or something of a row is not in the rendered
            prompt (`tasks/rendered.py`).
        ConfigError: The system message is not in the rendered prompt.
    """

    tokenizer: ChatTokenizer
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    note: str | None = None
    _looks: list[Looks] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, question: str | Sequence[Message], further: Further = _NOTHING) -> tuple[int, ...]:
        """Return the prompt's ids."""
        if not isinstance(question, str) and not question:
            raise DatasetError(
                f"{further.where}: it is a text, which asks nothing, so no answer is generated; remove the rewards"
            )
        messages = self._messages(question)
        # Control strings of the content are hidden before the template runs, and put back as plain text after it.
        hidden = hide(self.tokenizer, messages, self._tools(further), further.switches)
        with _naming(further.where):
            rendered = self.tokenizer.template(hidden.messages, hidden.tools, hidden.switches)
        if rendered is None:
            self._check_plain(further)
        else:
            self._check(rendered, hidden, question, further)
        with _naming(further.where):
            return self._plain(messages) if rendered is None else tuple(hidden.encode(rendered))

    def pieces(self, question: str | Sequence[Message], further: Further, mark: str) -> tuple[tuple[int, ...], ...]:
        """Return a prompt's ids in pieces, between which ``mark`` stands in it. Raises as a call does."""
        messages = self._messages(question)
        hidden = hide(self.tokenizer, messages, self._tools(further), further.switches)
        with _naming(further.where):
            rendered = self.tokenizer.template(hidden.messages, hidden.tools, hidden.switches)
            if rendered is not None:
                return tuple(tuple(hidden.encode(piece)) for piece in rendered.split(mark))
            plain = [tuple(self.tokenizer.encode_plain(piece)) for piece in transcript(messages).split(mark)]
            # Only the first piece begins the text; the others stand within it.
            return ((*self.tokenizer.begin, *plain[0]), *plain[1:])

    def conversation(
        self,
        question: str | Sequence[Message],
        turns: Sequence[Message],
        further: Further = _NOTHING,
        with_tail: bool = False,
    ) -> RenderedConversation:
        """Return the ids of a question and of what follows it, with a mask of what an assistant is to write.

        Each answer is what the template writes behind the prompt that asks for it, up to the token that ends the turn.
        A model without a template has one answer: its text, and an end token. So has a text without a question, whose
        first token is read and not trained on: nothing stands before it, unless the tokenizer puts a token there.

        Args:
            question: As in a call.
            turns: The messages that follow, from an assistant's to an assistant's.
            further: As in a call.
            with_tail: Whether what the template writes behind the last end token follows too, where scores are read.

        Raises:
            DatasetError: There is no answer; the template writes an answer otherwise than it asks for it, changes it,
                or writes no end behind it; or as in a call.
        """
        if not turns:
            raise DatasetError(f"{further.where}: it has no answer to train on; give it one, or leave the row out")
        if not question:
            return self._text(turns[0]["content"], further)
        # The call checks the prompt, and makes the looks that are asked below.
        prompt, asked = self(question, further), self._messages(question)
        hidden = hide(self.tokenizer, [*asked, *turns], self._tools(further), further.switches)
        with _naming(further.where):
            whole = self.tokenizer.template(hidden.messages, hidden.tools, hidden.switches, False)
            if whole is None:
                response = self._plain_answer(turns, further)
                return RenderedConversation(prompt, response, (True,) * len(response))
            lost = self._looks[0].lost(whole, hidden.messages, hidden.tools, hidden.switches)
            if isinstance(lost, int):
                raise _left_out(hidden.messages, lost, further, is_ours=False)
            ids: list[int] = []
            mask: list[bool] = []
            pieces = [*self._pieces(whole, hidden, len(asked), further.where)]
            for text, is_answer in pieces if with_tail else pieces[:-1]:
                piece = hidden.encode(text)
                ids, mask = ids + piece, mask + [is_answer] * len(piece)
        return RenderedConversation(prompt, tuple(ids), tuple(mask))

    def is_one_text(
        self, question: str | Sequence[Message], turns: Sequence[Message], further: Further = _NOTHING
    ) -> bool:
        """Return whether every answer stands in the whole conversation as a model would be asked for it.

        Templates of models that think write an earlier answer without its thought, and the last one with it.
        """
        asked = self._messages(question)
        hidden = hide(self.tokenizer, [*asked, *turns], self._tools(further), further.switches)
        with _naming(further.where):
            whole = self.tokenizer.template(hidden.messages, hidden.tools, hidden.switches, False)
            answers = [n for n, m in enumerate(hidden.messages) if n >= len(asked) and m["role"] == "assistant"]
            return whole is None or all(
                whole.startswith(after) and after.startswith(before)
                for before, after in (self._around(hidden, place) for place in answers)
            )

    def _around(self, hidden: "Hidden", place: int) -> tuple[str, str]:
        """Return what a model would be asked with for the answer at ``place``, and what the template writes of it."""
        before = self.tokenizer.template(hidden.messages[:place], hidden.tools, hidden.switches)
        after = self.tokenizer.template(hidden.messages[: place + 1], hidden.tools, hidden.switches, False)
        return before or "", after or ""

    def _text(self, text: str, further: Further) -> RenderedConversation:
        """Return the ids of a text and an end token, the first of which has nothing before it."""
        found = [string for string in self.tokenizer.control_strings if string in text]
        if found:
            raise DatasetError(
                f"{further.where}: the text holds {found[0]!r}, which would be trained on as letters and not as the "
                "token; give a conversation as messages, which the model's chat template writes"
            )
        # The first token has nothing before it to be predicted from: it
        # becomes the prompt, unless the tokenizer puts a token in front.
        ids = (*self.tokenizer.begin, *self.tokenizer.encode_plain(text), *self.tokenizer.stop_ids[:1])
        start = len(self.tokenizer.begin) or 1
        return RenderedConversation(ids[:start], ids[start:], (True,) * len(ids[start:]))

    def _pieces(self, whole: str, hidden: "Hidden", first: int, where: str) -> Iterator[tuple[str, bool]]:
        """Yield what stands behind the question: each answer with its end, what is between answers, and the rest."""
        answers = [n for n, m in enumerate(hidden.messages) if n >= first and m["role"] == "assistant"]
        begun = None
        for place in answers:
            before, after = self._around(hidden, place)
            named = f"{where}: the model's chat template"
            content = hidden.messages[place]["content"]
            # A template may open the thought in the prompt and drop the thought of a finished answer. With one
            # answer the text can be put together here; with several, later ones would follow a changed history.
            thought = None if after.startswith(before) or len(answers) > 1 else _behind_thought(before, content)
            if thought is not None:
                stops = (self.tokenizer.spelled([i]) for i in self.tokenizer.stop_ids)
                after = whole = before + thought + next((stop for stop in stops if after.endswith(stop)), "")
            if not after.startswith(before):
                raise DatasetError(
                    f"{named} asks for an answer with {before[-_SHOWN:]!r} and does not write it behind that; "
                    "where that opens a thought, begin the answer with one; or set chat_template_kwargs "
                    "(enable_thinking), or use a template that does"
                )
            if not whole.startswith(after):
                raise DatasetError(
                    f"{named} writes an answer otherwise when more follows it (message {place + 1} of "
                    f"{len(hidden.messages)}), so not every turn can be trained on; make a row of each answer, with "
                    "the messages before it as its prompt and the answer as its completion"
                )
            text = after[len(before) :]
            if thought is None and not is_kept_whole(content, text):
                raise DatasetError(
                    f"{named} leaves out or changes the answer {shortened(repr(content), _SHOWN)}, which would be "
                    "trained on as it writes it; remove what it leaves out (thoughts), or use a template that shows it"
                )
            end = self._end_of_answer(text, named)
            # What stands between two answers (end of turn, the user's message, the header) is read and not trained on.
            if begun is not None:
                yield whole[begun : len(before)], False
            yield text[:end], True
            begun = len(before) + end
        yield whole[begun:], False

    def _end_of_answer(self, text: str, named: str) -> int:
        """Return where the token that ends a turn ends in what the template wrote of an answer."""
        stops = [s for i in self.tokenizer.stop_ids if (s := self.tokenizer.spelled([i])) in text and s]
        if not stops:
            raise DatasetError(
                f"{named} writes no end token behind an answer (it ends with {text[-_SHOWN:]!r}), so a model would "
                "learn never to end; use a template that writes one, or name it in generation_config.json"
            )
        return min(text.find(stop) + len(stop) for stop in stops)

    def _plain_answer(self, turns: Sequence[Message], further: Further) -> tuple[int, ...]:
        if len(turns) > 1:
            raise DatasetError(
                f"{further.where}: it has {len(turns)} messages behind its question, and the model has no chat "
                "template to write them with; use a model with one, or rows with one answer"
            )
        return (*self.tokenizer.encode_plain(turns[0]["content"]), *self.tokenizer.stop_ids[:1])

    def _tools(self, further: Further) -> tuple[Mapping[str, Any], ...]:
        names = {name_of(tool) for tool in self.tools}
        return (*self.tools, *(tool for tool in further.tools if name_of(tool) not in names))

    def _check(self, rendered: str, hidden: "Hidden", question: str | Sequence[Message], further: Further) -> None:
        """Refuse a prompt that lacks what its row or the experiment says."""
        if not self._looks:
            self._looks.append(Looks(self.tokenizer))
        looks, messages = self._looks[0], hidden.messages
        lost = looks.lost(rendered, messages, hidden.tools, hidden.switches)
        if isinstance(lost, str):
            raise DatasetError(
                f"{further.where}: the model's chat template does not show tools: {lost} is not in the prompt; say it "
                "in the tool's description, remove it, or name the column in task.reward_columns where only rewards "
                "read it"
            )
        if lost is not None:
            has_system = not isinstance(question, str) and any(m["role"] == "system" for m in question)
            raise _left_out(messages, lost, further, is_ours=messages[lost]["role"] == "system" and not has_system)
        idle = looks.idle(messages, hidden.tools, hidden.switches)
        if idle is not None:
            raise DatasetError(
                f"{further.where}: {idle} = {further.switches[idle]!r} changes nothing, for the model's chat template "
                "does not read it so; remove it, or name its column in task.reward_columns where only rewards read it"
            )
        field_lost = looks.lost_of_documents(messages, hidden.switches)
        if field_lost is not None:
            raise DatasetError(
                f"{further.where}: the model's chat template does not show '{field_lost}' of documents; put it into "
                "the fields that the template shows, or remove it"
            )

    def _check_plain(self, further: Further) -> None:
        given = ["tools"] if further.tools else list(further.switches)
        if given:
            raise DatasetError(
                f"{further.where}: {given[0]} reaches no prompt, for the model has no chat template; remove it, or "
                "name its column in task.reward_columns where only rewards read it"
            )

    def _messages(self, question: str | Sequence[Message]) -> list[Message]:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        for message in messages:
            flaw = message_flaw(message)
            if flaw:
                raise DatasetError(f"a message cannot be rendered: {flaw}; got {dict(message)!r}")
        if self.system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return [*messages] if self.note is None else _with_note(messages, self.note)

    def _plain(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (*self.tokenizer.begin, *self.tokenizer.encode_plain(transcript(messages)))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Name the row of what the tokenizer refuses.

    Raises:
        DatasetError: For a ConfigError.
    """
    try:
        yield
    except ConfigError as error:
        raise DatasetError(f"{where}: {error}") from error


@dataclass(frozen=True)
class Hidden:
    """Messages in which every control string is one private-use character that occurs nowhere else.

    The template sees, trims and moves such a character like any other text; `encode` then makes plain text of it.

    Attributes:
        tools: Schemas, in the same form.
        switches: Variables of the template, such as documents, in the same form.
        originals: The character to the control string that it stands for.
    """

    tokenizer: ChatTokenizer
    messages: list[Message]
    originals: Mapping[str, str]
    tools: tuple[Mapping[str, Any], ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of rendered text: what the template wrote with control tokens, what it was given without."""
        if not self.originals:
            return list(self.tokenizer.encode(rendered))
        ids: list[int] = []
        # The split keeps the stand-ins as pieces of their own. Each piece is encoded
        # by itself, so no token spans what the template wrote and what it was given.
        for piece in re.split(f"([{''.join(self.originals)}])", rendered):
            if piece in self.originals:
                ids += self.tokenizer.encode_plain(self.originals[piece])
            elif piece:
                ids += self.tokenizer.encode(piece)
        return ids


def hide(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    switches: Mapping[str, Any] | None = None,
) -> Hidden:
    """Return messages, tools and variables with the control strings in them hidden; unchanged where there are none."""
    given = switches or {}
    # Roles need no look: they are from a fixed list.
    texts = [message["content"] for message in messages]
    texts += [json.dumps([tools, given], ensure_ascii=False, default=str)] if tools or given else []
    found = [c for c in tokenizer.control_strings if c and any(c in text for text in texts)]
    if not found:
        return Hidden(tokenizer, [*messages], {}, tuple(tools), given)
    stand_ins = dict(zip(found, _unused_characters(texts, len(found)), strict=True))
    # longest first, so that of two control strings beginning alike the one really there is matched
    pattern = re.compile("|".join(re.escape(c) for c in sorted(found, key=len, reverse=True)))

    def hidden(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {hidden(key): hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [hidden(item) for item in value]
        return pattern.sub(lambda match: stand_ins[match[0]], value) if isinstance(value, str) else value

    shown = [{**m, "content": hidden(m["content"])} for m in messages]
    return Hidden(
        tokenizer,
        [*shown],
        {stand_in: control for control, stand_in in stand_ins.items()},
        tuple(hidden(tool) for tool in tools),
        hidden(given),
    )


def _behind_thought(before: str, content: str) -> str | None:
    r"""Return an answer without the tag that its prompt ends with; None where the prompt opens no thought of it.

    >>> _behind_thought("Hi<think>\n", "<think>\nhm</think>Salve"), _behind_thought("Hi<think>\n", "Salve")
    ('hm</think>Salve', None)
    """
    # Both must open the thought: else the answer would lose a tag that the prompt does not have.
    tag = next((tag for tag in THOUGHTS if before.rstrip().endswith(tag)), None)
    opens = tag is not None and content.lstrip().startswith(tag)
    return content.lstrip().removeprefix(str(tag)).lstrip("\n") if opens else None


def _left_out(messages: Sequence[Message], place: int, further: Further, is_ours: bool) -> UserError:
    """Return the error for a message that is not in the prompt."""
    message = messages[place]
    text = message["content"] if len(message["content"]) <= _SHOWN else f"{message['content'][:_SHOWN]}..."
    if is_ours:
        return ConfigError(
            f"the model's chat template leaves out the system message {text!r}: no prompt would have it; remove "
            "`system` and put the text into the questions, or use a model whose template shows system messages"
        )
    way = "put the text into the user's last message, or remove it"
    if place == len(messages) - 1:
        way = "correct the template (chat_template.jinja or tokenizer_config.json), or write the text as it keeps it"
    return DatasetError(
        f"{further.where}: the model's chat template leaves out or changes message {place + 1} of {len(messages)}, the "
        f"{message['role']}'s: {text!r} is not in the prompt; {way}"
    )


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
        return f"role must be one of {', '.join(ROLES)}, got {shortened(repr(message.get('role')))}"
    content = message.get("content")
    if isinstance(content, list):
        return ("content must be text, got a list of parts; write the text of its parts as one text (images, audio and "
                "files among them reach no model here)")  # fmt: skip
    if not isinstance(content, str):
        return f"content must be text, got {type(content).__name__}; write a text, or leave the message out"
    others = [str(key) for key, value in message.items() if key not in ("role", "content") and value is not None]
    said = shortened(on_one_line(", ".join(others)))
    return (
        f"only role and content are understood, got also {said}; write it into content or remove it" if said else None
    )


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


def _unused_characters(texts: Sequence[str], count: int) -> list[str]:
    used = set().union(*texts)
    free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
    return [character for character, _ in zip(free, range(count), strict=False)]
