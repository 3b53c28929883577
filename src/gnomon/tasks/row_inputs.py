"""Columns of a row that mean input: what goes into the prompt beside the question, or is refused. No torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.tasks.base import Further

UNSEEN = ("images", "image", "videos", "video", "audio", "audios")
"""Columns that a model of text cannot be given."""
SWITCHES = ("documents", "enable_thinking")
"""Columns that are variables of chat templates by their own name."""
TOOLS, KWARGS = "tools", "chat_template_kwargs"
RESERVED = frozenset(
    (
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    )
)
"""Variables that the rendering of a prompt sets itself."""
_ELSE = "or name it in task.reward_columns where only rewards read it"


def further_of(values: Mapping[str, Any], reward_columns: Sequence[str] = ()) -> tuple[Further, str | None]:
    """Return what a row gives its prompt beside the question, and what is wrong with that.

    Args:
        values: The columns of a row. A column that is null or empty counts as absent.
        reward_columns: Columns that only rewards read.

    >>> further_of({"prompt": "2+2=", "images": ["cat.png"]})[1].partition(";")[0]
    'images: gnomon trains on text alone'
    """
    given = {name: value for name, value in values.items() if name not in reward_columns and not _is_empty(value)}
    unseen = [name for name in UNSEEN if name in given]
    if unseen:
        return Further(), f"{unseen[0]}: gnomon trains on text alone; remove the column, {_ELSE}"
    tools, flaw = _tools(given.get(TOOLS))
    if flaw is not None:
        return Further(), f"{TOOLS}: {flaw}, {_ELSE}"
    further, flaw = _mapping(given.get(KWARGS))
    if flaw is not None:
        return Further(), f"{KWARGS}: {flaw}, {_ELSE}"
    if isinstance(given.get("documents"), str):
        return Further(), f"documents: a list of objects with title and text is wanted, got text, {_ELSE}"
    own = {name: _without_nulls(given[name]) for name in SWITCHES if name in given}
    if own.get("enable_thinking", True) not in (True, False):
        return Further(), f"enable_thinking: true or false is wanted, got {own['enable_thinking']!r}, {_ELSE}"
    return Further(tools=tuple(tools), switches={**further, **own}), None


def reserved_flaw(switches: Mapping[str, Any]) -> str | None:
    """Return which variable of a chat template cannot be set, or None."""
    taken = [name for name in switches if name in RESERVED or not name.isidentifier()]
    return f"{taken[0]!r} is no variable that can be set" if taken else None


def _tools(value: Any) -> tuple[list[Mapping[str, Any]], str | None]:
    """Return JSON schemas with names, each as {"type": "function", "function": {...}}."""
    found, flaw = _read(value)
    if flaw is not None or found is None:
        return [], flaw
    listed = found if isinstance(found, list) else [found]
    schemas: list[Mapping[str, Any]] = []
    for number, tool in enumerate(listed, start=1):
        read, flaw = _read(tool)
        inner = read.get("function", read) if isinstance(read, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"].strip():
            return [], flaw or f"tool {number} must be a JSON schema with a name, got {str(tool)[:60]!r}"
        schemas.append(_without_nulls({"type": "function", **read} if inner is not read else _wrapped(inner)))
    return schemas, None


def _wrapped(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": dict(schema)}


def _mapping(value: Any) -> tuple[Mapping[str, Any], str | None]:
    found, flaw = _read(value)
    if flaw is not None or found is None:
        return {}, flaw
    if not isinstance(found, Mapping):
        return {}, f"an object is wanted, got {type(found).__name__}"
    return {name: item for name, item in found.items() if item is not None}, reserved_flaw(found)


def _read(value: Any) -> tuple[Any, str | None]:
    """Return a value, or what a text of JSON says."""
    if not isinstance(value, str):
        return value, None
    try:
        return json.loads(value), None
    except (ValueError, RecursionError) as error:
        return None, f"no JSON ({error}): {value[:60]!r}"


def _without_nulls(value: Any) -> Any:
    """Return the value without null fields, which Arrow writes for whatever another row has."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _is_empty(value: Any) -> bool:
    if isinstance(value, str | list | tuple | Mapping | bytes):
        return len(value) == 0 or (isinstance(value, str) and not value.strip())
    return value is None
