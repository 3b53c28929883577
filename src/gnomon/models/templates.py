"""Chat templates rendered with an end: a template is a program of somebody else's, and runs within bounds."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import TemplateError

from gnomon.errors import ConfigError
from gnomon.types import Message

MOST_LINES = 1_000_000
"""Lines of a template that one rendering may execute; a long conversation takes some ten thousand."""
MOST_CHARACTERS = 10_000_000
"""Characters that one rendering may write, or ten times what it was given."""
_SECONDS = 10.0
_ROOM = 2**30
_LARGEST = 1_000_000
_LOOK = 1024
_tried = set[int]()


class EndlessTemplate(Exception):
    """A template executed more lines than `MOST_LINES`, or for too long."""


def render(
    backend: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    switches: Mapping[str, Any] | None = None,
    begins_answer: bool = True,
) -> str:
    """Return ``messages`` as the tokenizer's chat template writes them.

    switches: further variables of the template. begins_answer: up to where the model's answer begins.
    The first rendering of a template gets a gibibyte of memory: no model is loaded yet that needs more beside it.
    Raises: ConfigError when the template refuses the messages, is no template, does not end, or fills the memory.
    """
    plain = [dict(message) for message in messages]
    given = {**(switches or {}), "tools": [dict(tool) for tool in tools] or None}
    roles = [message.get("role") for message in plain]
    template = hash(str(backend.chat_template))
    try:
        with nullcontext() if template in _tried else _little_memory():
            said = _within_bounds(
                lambda: str(
                    backend.apply_chat_template(plain, tokenize=False, add_generation_prompt=begins_answer, **given)
                )
            )
        _tried.add(template)
        if len(said) > max(MOST_CHARACTERS, 10 * len(str((plain, given)))):
            raise MemoryError
        return said
    except MemoryError as error:
        raise ConfigError(
            f"the model's chat template writes more than {MOST_CHARACTERS:,} characters, or fills {_ROOM >> 30} GiB of "
            f"memory, for {len(plain)} messages; correct it (chat_template.jinja or tokenizer_config.json)"
        ) from error
    except EndlessTemplate as error:
        raise ConfigError(
            f"the model's chat template does not end: more than {MOST_LINES:,} of its lines, or {_SECONDS:g} s, for "
            f"{len(plain)} messages; correct it (chat_template.jinja or tokenizer_config.json)"
        ) from error
    except TemplateError as error:
        raise ConfigError(f"the model's chat template refuses messages with roles {roles}: {error}") from error
    except Exception as error:
        # A template is a foreign program: it raises whatever it likes.
        raise ConfigError(
            f"the model's chat template fails for messages with roles {roles}: {type(error).__name__}: {error}"
        ) from error


def check_template(backend: Any) -> None:
    """Refuse a chat template that computes without bound in one expression, before it is compiled.

    Raises: ConfigError for a power, and for a whole number above a million.
    """
    template = backend.chat_template
    for text in template.values() if isinstance(template, Mapping) else [template]:
        for part in _parts(str(text)):
            is_large = part[1] == "integer" and int(part[2].replace("_", ""), 0) > _LARGEST
            if part[1:] == ("operator", "**") or is_large:
                raise ConfigError(
                    f"the model's chat template has {part[2][:20]!r} in line {part[0]}, which may not end: no power "
                    f"and no number above {_LARGEST:,} is taken; correct it (chat_template.jinja or "
                    "tokenizer_config.json)"
                )


def names_switch(backend: Any, name: str, has_tools: bool) -> bool:
    """Whether the chat template reads a variable of this name."""
    template = backend.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use" if has_tools and "tool_use" in template else "default", "")
    return any(part[1:] == ("name", name) for part in _parts(str(template)))


def _parts(template: str) -> list[tuple[int, str, str]]:
    """Return the template's parts as (line, kind, text); none of one that is no template."""
    try:
        return list(jinja2.Environment().lex(template))
    except TemplateError:
        return []


def _within_bounds(work: Callable[[], str]) -> str:
    """Return what ``work`` returns; counts the lines that templates execute, which are Python compiled by jinja.

    Raises: EndlessTemplate.
    """
    lines, began = 0, time.monotonic()

    def line(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > MOST_LINES or (lines % _LOOK == 0 and time.monotonic() - began > _SECONDS):
            raise EndlessTemplate
        return line

    def call(frame: FrameType, event: str, given: Any) -> Any:
        return line if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        return work()
    finally:
        sys.settrace(before)


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process take `_ROOM` bytes more and no others meanwhile, where Linux tells how many it has."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = int(sizes.read_text().split()[0]) * resource.getpagesize() + _ROOM
    bound = bound if soft == resource.RLIM_INFINITY else min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
