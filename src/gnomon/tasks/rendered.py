"""Whether a prompt says what its row says: texts put in on purpose must be found in what the template wrote.

A chat template is a program, and may leave out a system message, a turn, or tools, without a word. Two looks find
that: each text of a row is looked for in its prompt; and for every order of roles one conversation of words that occur
nowhere else is rendered, so that no text is taken for another that is like it. White space does not count (templates
trim), nor do thoughts of earlier answers (templates leave them out, as such models were trained), nor the switches
``/think`` and ``/no_think``, which templates read.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.core.errors import ConfigError
from gnomon.core.types import Message

_SWITCHES = re.compile(r"(?<!\S)/(no_think|think|system_override)(?!\S)")
_THOUGHT_ENDS = ("</think>", "</thinking>", "</thought>", "[/THINK]")
_NAMES = ("gnomontool", "gnomonpurpose", "gnomonparameter")
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAMES[0],
        "description": _NAMES[1],
        "parameters": {
            "type": "object",
            "properties": {_NAMES[2]: {"type": "string", "description": "what"}},
            "required": [_NAMES[2]],
        },
    },
}


class Template(Protocol):
    """A tokenizer's chat template."""

    def template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        switches: Mapping[str, Any] | None = None,
        begins_answer: bool = True,
    ) -> str | None:
        """Return the messages as text; None without a template."""
        ...

    def names_switch(self, name: str, has_tools: bool = False) -> bool:
        """Whether the template reads a variable of this name."""
        ...


@dataclass
class Looks:
    """Looks at prompts, and remembers which orders of roles and which switches it has tried."""

    tokenizer: Template
    _tried: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def lost(
        self,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        switches: Mapping[str, Any],
    ) -> int | str | None:
        """Return the place of the first message that is not in the prompt, or a lost tool's name; None for none."""
        found = _squeezed(rendered)
        for place, message in enumerate(messages):
            if not any(_squeezed(way) in found for way in _ways(message)):
                return place
        for tool in tools:
            if _squeezed(name_of(tool)) not in found:
                return name_of(tool)
        key = (tuple(message["role"] for message in messages), bool(tools))
        if key not in self._tried:
            self._tried[key] = self._lost_of(*key, switches)
        lost: int | str | None = self._tried[key]
        return name_of(tools[0]) if isinstance(lost, str) else lost

    def idle(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]
    ) -> str | None:
        """Return the first of ``switches`` that changes nothing in what the template writes; None when all do."""
        for name, value in switches.items():
            key = (name, repr(value), bool(tools))
            if key not in self._tried:
                self._tried[key] = self.tokenizer.names_switch(name, bool(tools)) and self._works(
                    name, messages, tools, switches
                )
            if not self._tried[key]:
                return name
        return None

    def _works(
        self, name: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]
    ) -> bool:
        value = switches[name]
        without = {key: other for key, other in switches.items() if key != name}
        contrary = {**without, name: not value if isinstance(value, bool) else "gnomonother"}
        written = self.tokenizer.template(messages, tools, switches)
        with contextlib.suppress(ConfigError):
            return any(self.tokenizer.template(messages, tools, other) != written for other in (without, contrary))
        return True

    def _lost_of(self, roles: Sequence[str], has_tools: bool, switches: Mapping[str, Any]) -> int | str | None:
        words = [f"gnomon{place}probe" for place in range(len(roles))]
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        with contextlib.suppress(ConfigError):
            rendered = self.tokenizer.template(messages, [_TOOL] if has_tools else (), switches) or ""
            lost = [place for place, word in enumerate(words) if word not in rendered]
            names = [name for name in _NAMES if has_tools and name not in rendered]
            return lost[0] if lost else names[0] if names else None
        return None


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool's schema."""
    return str(tool.get("function", tool).get("name"))


def _ways(message: Message) -> Iterator[str]:
    """Yield how a template may write the message: as it is, escaped, or without the thought of an answer."""
    content = message["content"]
    yield content
    if message["role"] == "assistant":
        for mark in _THOUGHT_ENDS:
            if mark in content:
                yield content.rpartition(mark)[2]
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield json.dumps(content)[1:-1]
    yield repr(content)[1:-1]


def _squeezed(text: str) -> str:
    return "".join((_SWITCHES.sub("", text) if "/" in text else text).split())
