"""Whether a prompt says what its row says: texts put in on purpose must be found in what the template wrote.

A chat template is a program, and may leave out a system message, a turn, or tools, without a word. Two looks find
that: each text of a row is looked for in its prompt; and for every order of roles, and every form of tools and
documents, one conversation of words that occur nowhere else is rendered, so that no text is taken for another that is
like it. White space at both ends of a text does not count (templates trim), nor do thoughts of earlier answers
(templates leave them out, as such models were trained), nor the switches ``/think`` and ``/no_think``, which templates
read; around a switch white space does not count either.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.core.errors import ConfigError
from gnomon.core.types import Message

_SWITCHES = re.compile(r"(?<!\S)/(no_think|think|system_override)(?!\S)")
THOUGHTS = {"<think>": "</think>", "<thinking>": "</thinking>", "<thought>": "</thought>", "[THINK]": "[/THINK]"}
"""How models begin and end a thought."""
_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_IDS = ("id", "doc_id", "document_id")
"""Fields of a document that name it, and need not be in the prompt."""
SHOWN = "documents"
"""The variable of a template whose texts must be in the prompt."""


class Template(Protocol):
    """A tokenizer's chat template."""

    def template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        switches: Mapping[str, Any] | None = None,
        begins_answer: bool = True,
    ) -> str | None:
        """Return the messages as the model's chat text, ready for its answer; None without a template."""

    def names_switch(self, name: str, has_tools: bool = False) -> bool:
        """Whether the template reads a variable of this name."""


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
        """Return the place of the first message that is not in the prompt, or what is lost of tools; None for none.

        Raises:
            ConfigError: If the template writes turns in another order.
        """
        # First look: every text of this row must stand in its prompt.
        found = _without_switches(rendered)
        for place, message in enumerate(messages):
            if not any(_is_in(way, found) for way in _ways(message)):
                return place
        for tool in tools:
            if _squeezed(name_of(tool)) not in _squeezed(rendered):
                return _said(tool, "its name")
        # Second look: the same roles with words that occur nowhere else. A message that
        # repeats another's text would pass the first look though the template left it out.
        roles = tuple(message["role"] for message in messages)
        places = {f"gnomon{place}probe": place for place in range(len(roles))}
        missing = self._absent(roles, places, tools[:1], switches, [*places])
        if missing:
            return places[missing[0]]
        self._check_order(roles, [*places], tools[:1], switches)
        for tool in tools:
            words: dict[str, str] = {}
            missing = self._absent(roles, words, [_worded_tool(tool, words)], switches)
            if missing:
                return _said(tool, words[missing[0]])
        return None

    def lost_of_documents(self, messages: Sequence[Message], switches: Mapping[str, Any]) -> str | None:
        """Return the field of the row's documents that is not in the prompt; None for none."""
        words: dict[str, str] = {}
        given = {**switches, SHOWN: _worded(switches.get(SHOWN), words)}
        missing = self._absent(tuple(message["role"] for message in messages), words, (), given) if words else []
        return words[missing[0]] if missing else None

    def idle(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]
    ) -> str | None:
        """Return the first of ``switches`` that changes nothing in what the template writes; None when all do."""
        for name, value in switches.items():
            key = (name, repr(value), bool(tools))
            if key not in self._tried:
                # Named in the template and changing what it writes: a switch
                # may be read in a branch that this conversation never takes.
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
        # Without it, or with another value: a switch that is set to
        # the template's default changes nothing when it is left out.
        contrary = {**without, name: not value if isinstance(value, bool) else "gnomonother"}
        written = self.tokenizer.template(messages, tools, switches)
        with contextlib.suppress(ConfigError):
            return any(self.tokenizer.template(messages, tools, other) != written for other in (without, contrary))
        return True

    def _absent(
        self,
        roles: Sequence[str],
        words: Iterable[str],
        tools: Sequence[Mapping[str, Any]],
        switches: Mapping[str, Any],
        contents: Sequence[str] = (),
    ) -> list[str]:
        """Return those of ``words`` that a conversation of these roles does not show; tried once for each form.

        Args:
            contents: The messages' contents, where they are known.
        """
        # With given contents the presence of tools is enough; otherwise tools and documents are what is looked for.
        key = (roles, (bool(contents) and bool(tools)) or json.dumps([tools, switches.get(SHOWN)], default=str))
        if key not in self._tried:
            said = contents or [f"gnomon{place}asked" for place in range(len(roles))]
            messages = [{"role": role, "content": word} for role, word in zip(roles, said, strict=True)]
            # A template may refuse made-up words where it took the row: nothing is then known, and nothing is missing.
            with contextlib.suppress(ConfigError):
                rendered = self.tokenizer.template(messages, tools, switches) or ""
                self._tried[key] = [word for word in words if word not in rendered]
        missing: list[str] = self._tried.setdefault(key, [])
        return missing

    def _check_order(
        self,
        roles: Sequence[str],
        words: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        switches: Mapping[str, Any],
    ) -> None:
        """Look whether turns stand in their order; a system message may stand anywhere.

        Raises:
            ConfigError: If they do not.
        """
        key = ("order", roles, bool(tools))
        if key in self._tried:
            return
        self._tried[key] = True
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        rendered = ""
        with contextlib.suppress(ConfigError):
            rendered = self.tokenizer.template(messages, tools, switches) or ""
        turns = [place for place, role in enumerate(roles) if role not in ("system", "developer")]
        for earlier, later in itertools.pairwise(turns):
            # Last place against first: a template may write a message twice.
            if rendered.rfind(words[later]) < rendered.find(words[earlier]):
                raise ConfigError(
                    f"the model's chat template writes message {later + 1} of {len(roles)}, the {roles[later]}'s, "
                    f"before message {earlier + 1}, the {roles[earlier]}'s; correct it (chat_template.jinja or "
                    "tokenizer_config.json)"
                )


def is_kept_whole(content: str, written: str) -> bool:
    """Whether all of an answer is in what a template wrote of it, thoughts too; white space aside.

    >>> is_kept_whole("<think>a</think>b", "<think>\\na\\n</think>\\nb"), is_kept_whole("<think>a</think>b", "b")
    (True, False)
    """
    return _squeezed(content) in _squeezed(written)


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool's schema."""
    return str(tool.get("function", tool).get("name"))


def _said(tool: Mapping[str, Any], what: str) -> str:
    return f"{what} of '{name_of(tool)}'"


def _worded_tool(tool: Mapping[str, Any], words: dict[str, str]) -> Mapping[str, Any]:
    """Return a tool of the same form whose name, purposes, parameters and allowed values are words of their own.

    Args:
        words: Is given each word with what it stands for.
    """
    inner = tool.get("function", tool)
    made = {**_worded_schema(inner, words), "name": _word(words, "its name")}
    return {**tool, "function": made} if "function" in tool else made


def _worded_schema(node: Any, words: dict[str, str], where: str = "") -> Any:
    if isinstance(node, list | tuple):
        return [_worded_schema(part, words, where) for part in node]
    if not isinstance(node, Mapping):
        return node
    place = f" of '{where}'" if where else ""
    made: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    for key, value in node.items():
        if key == "description" and isinstance(value, str) and value.strip():
            made[key] = _word(words, f"the purpose{place}")
        elif key == "enum" and isinstance(value, list | tuple):
            made[key] = [_word(words, f"the value {v!r}{place}") if isinstance(v, str) and v else v for v in value]
        elif key == "const" and isinstance(value, str) and value:
            made[key] = _word(words, f"the value {value!r}{place}")
        elif key == "properties" and isinstance(value, Mapping):
            # Parameters are renamed too: their names are part of what a model must be told.
            renamed = {name: _word(words, f"the parameter '{name}'") for name in value}
            made[key] = {renamed[name]: _worded_schema(part, words, str(name)) for name, part in value.items()}
        elif key in _SUBSCHEMAS and isinstance(value, Mapping):
            made[key] = {name: _worded_schema(part, words, str(name)) for name, part in value.items()}
        else:
            made[key] = _worded_schema(value, words, where) if isinstance(value, Mapping | list | tuple) else value
    if isinstance(required := made.get("required"), list | tuple):
        made["required"] = [renamed.get(name, name) for name in required]
    return made


def _worded(node: Any, words: dict[str, str], where: str = "text") -> Any:
    """Return documents of the same form whose texts are words of their own."""
    if isinstance(node, Mapping):
        return {key: value if key in _IDS else _worded(value, words, str(key)) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_worded(part, words, where) for part in node]
    return _word(words, where) if isinstance(node, str) and node.strip() else node


def _word(words: dict[str, str], meaning: str) -> str:
    word = f"gnomonword{len(words)}x"
    words[word] = meaning
    return word


def _is_in(text: str, rendered: str) -> bool:
    """Whether a text is in the prompt, with its white space; white space around a switch aside."""
    bare = _without_switches(text)
    return bare.strip() in rendered if bare == text else _squeezed(bare) in _squeezed(rendered)


def _without_switches(text: str) -> str:
    return _SWITCHES.sub("", text) if "/" in text else text


def _ways(message: Message) -> Iterator[str]:
    """Yield how a template may write the message: as it is, escaped, or without the thought of an answer."""
    content = message["content"]
    yield content
    if message["role"] == "assistant":
        for mark in THOUGHTS.values():
            if mark in content:
                yield content.rpartition(mark)[2]
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield json.dumps(content)[1:-1]
    yield repr(content)[1:-1]


def _squeezed(text: str) -> str:
    return "".join(text.split())
