"""The tokens between an answer's end and the next answer's beginning. No torch.

A conversation is never rendered twice: rendering it anew would re-tokenize what was sampled, and templates leave
things out of earlier turns (thoughts, for one). Instead the part of the template *between* two answers is measured, by
rendering a question, an answer that is a probe, and the reply, and cutting behind the probe. In ChatML:

    <|im_start|>user ... <|im_end|> <|im_start|>assistant PROBE
    <|im_end|> <|im_start|>tool 42 <|im_end|> <|im_start|>assistant         this is what follows an answer

What a policy sampled stays as it was sampled; replies are encoded so that no text in them becomes a control token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.types import Message
from gnomon.tasks.chat import ChatTokenizer, hide
from gnomon.tasks.tools import ToolCall, find_calls

_ASKED, _SAID = "gnomonasked", "gnomonsaid"
_DUMMY = {"type": "function", "function": {"name": "gnomontool", "arguments": {"x": "1"}}}


@dataclass(frozen=True)
class TurnTokenizer:
    """Replies to token ids.

    Attributes:
        has_tool_role: Whether the template shows messages of the role "tool"; they are the user's otherwise. Without a
            template a reply is its text on a line of its own.
        switches: The row's own variables of the chat template. No empty mapping, since a run holds this object, and its
            audit counts whatever can change.
    """

    tokenizer: ChatTokenizer
    has_tool_role: bool = True
    switches: Mapping[str, Any] | None = None

    @classmethod
    def over(cls, tokenizer: ChatTokenizer) -> "TurnTokenizer":
        """Return the bridge of a model, its template tried out.

        Raises:
            ConfigError: The template cannot show a second message of the user.
        """
        turn_tokenizer = cls(tokenizer, _shows(tokenizer, "tool"))
        if not _shows(tokenizer, "user"):
            raise ConfigError("the model's chat template does not show a reply to an answer, so it cannot be talked to")
        return turn_tokenizer

    def reply(self, messages: Sequence[tuple[str, str]], is_ended: bool) -> tuple[int, ...]:
        """Return what follows an answer: its end of turn, the messages as (role, text), and the next beginning.

        Args:
            is_ended: The answer's last token is one of the tokenizer's own stop tokens, which stands for the end of
                turn, whichever it is: it is not written twice. Otherwise (a token of ``sampling.stop_ids``, a stop
                string, a budget) the end of turn is written here; the policy did not choose it.
        """
        replies = self._messages(messages)
        # A probe stands for the answer; what the template writes behind it is the same for every answer.
        dialogue = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}, *replies]
        hidden = hide(self.tokenizer, dialogue, (), self.switches)
        rendered = self.tokenizer.template(hidden.messages, (), hidden.switches)
        if rendered is None:
            return self._lines(replies)
        tail = rendered.partition(_SAID)[2]
        return tuple(hidden.encode(self._after_end(tail) if is_ended else tail))

    def observed(self, prompt: Sequence[int], messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Return a rendered question with further messages behind it, before the first answer.

        Raises:
            ConfigError: The template refuses two messages in a row, or does not end as it does elsewhere.
        """
        if not messages:
            return tuple(prompt)
        question: list[Message] = [{"role": "user", "content": _ASKED}]
        hidden = hide(self.tokenizer, [*question, *self._messages(messages)], (), self.switches)
        plain, whole = (self.tokenizer.template(m, (), hidden.switches) for m in (question, hidden.messages))
        if plain is None or whole is None:
            return (*prompt, *self._lines(self._messages(messages)))
        # The prompt ends with the header of the answer's turn. The observation belongs
        # before that header, so the end is cut off and written again behind it.
        ending = tuple(self.tokenizer.encode(plain.partition(_ASKED)[2]))
        if tuple(prompt[len(prompt) - len(ending) :]) != ending:
            raise ConfigError("an observation cannot be put behind this prompt; put it into the question instead")
        return (*prompt[: len(prompt) - len(ending)], *hidden.encode(whole.partition(_ASKED)[2]))

    def _messages(self, messages: Sequence[tuple[str, str]]) -> list[Message]:
        return [
            {"role": "user" if role == "tool" and not self.has_tool_role else role, "content": text}
            for role, text in messages
        ]

    def _lines(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_plain("".join(f"\n{message['content']}" for message in messages) + "\n"))

    def _after_end(self, tail: str) -> str:
        """Return ``tail`` behind the control string that ends an answer, which is the first in it."""
        controls = self.tokenizer.control_strings
        # The earliest, and of those at one place the longest.
        places = [(place, -len(c), c) for c in controls if c and (place := tail.find(c)) >= 0]
        if not places:
            return tail
        place, _, control = min(places)
        return tail[place + len(control) :]


def tells_tools(tokenizer: ChatTokenizer, schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the template tells the model about tools, and has it call them in the form that `find_calls` reads.

    Measured: the names are in what it renders, and a call that it renders is read back.
    """
    question: list[Message] = [{"role": "user", "content": _ASKED}]
    # A template may list tools and have calls written in a form
    # that is not read here: the rendered call must be read back.
    called: list[Any] = [*question, {"role": "assistant", "content": "", "tool_calls": [_DUMMY]}, *question]
    try:
        offered, call = tokenizer.template(question, schemas), tokenizer.template(called)
    except (ConfigError, TypeError):
        return False
    if offered is None or call is None:
        return False
    names = [str(schema["function"]["name"]) for schema in schemas]
    return all(name in offered for name in names) and find_calls(call) == [ToolCall("gnomontool", {"x": "1"})]


def _shows(tokenizer: ChatTokenizer, role: str) -> bool:
    turns = [("user", _ASKED), ("assistant", _SAID), (role, "gnomonreply")]
    try:
        rendered = tokenizer.template([{"role": r, "content": text} for r, text in turns])
    except ConfigError:
        return False
    return rendered is None or "gnomonreply" in rendered.partition(_SAID)[2]
