"""Columns of a row that mean input: what goes into the prompt beside the question, or is refused. No torch."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import ConfigError, on_one_line, shortened
from gnomon.core.sections import check_braces
from gnomon.tasks.base import Content, Further

MEDIA = ("images", "image", "videos", "video", "audio", "audios")
"""Columns that a model of text cannot be given."""
SWITCHES = ("documents", "enable_thinking", "reasoning_effort")
"""Columns that are variables of chat templates by their own name."""
TOLD = ("system", "system_prompt")
"""Columns of text that other programs put before the question, as a system message."""
TOOLS, KWARGS = "tools", "chat_template_kwargs"
OFTEN_INPUT = (
    "choices", "options", "context", "passage", "instruction", "input", "image_path", "image_paths", "audio_path",
    "video_path",
)  # fmt: skip
"""Columns that are input in many datasets, and something else in others."""
LETTERS = ("A", "B", "C", "D", "E")
RESERVED = frozenset(
    (
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    )
)
"""Variables that the rendering of a prompt sets itself."""
_ELSE = "or name it in task.reward_columns where only rewards read it"


# A name in braces that follows no letter, brace, ^, _ or backslash: \boxed{x} and x^{n} are TeX and no columns.
_FIELD = re.compile(r"(?<![A-Za-z}^_\\])\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_QUESTION = "question"
# What datasets write before the name of a right answer.
_RIGHT = re.compile(r"(expected|final|correct|gold|golden|reference|true|right)[_ -]")


@dataclass(frozen=True)
class Wording:
    """The text around a question, as a table has it.

    Attributes:
        prefix: Text before it.
        suffix: Text after it.
        template: Text with {question} and columns of the row; "" is the question alone.
    """

    prefix: str = ""
    suffix: str = ""
    template: str = ""

    @property
    def columns(self) -> list[str]:
        """Names in braces in the template."""
        return _FIELD.findall(self.template)

    def check(self, answer_column: str | None) -> None:
        """Raise ConfigError for a template without its question, or with the answer."""
        if not self.template:
            return
        names = self.columns
        check_braces("task.template", self.template)
        if _QUESTION not in names:
            raise ConfigError(
                f"task.template = {self.template[:60]!r} has no {{question}}, so every row would ask the same; write "
                "{question} where the question stands"
            )
        shown = [name for name in names if name in ("answer", "solution", answer_column)]
        if shown:
            raise ConfigError(f"task.template shows {{{shown[0]}}}, the answer, to the model; leave it out")

    def around(self, content: Content, values: Mapping[str, Any]) -> Content:
        r"""Return the question within the text; of a conversation, its last message.

        Raises:
            KeyError: The row has no column that the template names.

        >>> Wording("Q: ", " Use \\boxed{x}.", "({topic}) {question}").around("1+1=?", {"topic": "sums"})
        'Q: (sums) 1+1=? Use \\boxed{x}.'
        """
        if not isinstance(content, str):
            last = content[-1]
            return (*content[:-1], {**last, "content": self._around(last["content"], values)})
        return self._around(content, values)

    def _around(self, text: str, values: Mapping[str, Any]) -> str:
        filled = _FIELD.sub(lambda found: _filled(found[1], text, values), self.template) if self.template else text
        return f"{self.prefix}{filled}{self.suffix}"


def _filled(name: str, question: str, values: Mapping[str, Any]) -> str:
    if name == _QUESTION:
        return question
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is None:
        raise KeyError(name)
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def further_of(values: Mapping[str, Any], reward_columns: Sequence[str] = ()) -> tuple[Further, str | None]:
    """Return what a row gives its prompt beside the question, and what is wrong with that.

    Args:
        values: The columns of a row. A column that is null or empty counts as absent.
        reward_columns: Columns that only rewards read.

    >>> further_of({"prompt": "2+2=", "images": ["cat.png"]})[1].partition(";")[0]
    'images: gnomon trains on text alone'
    """
    # A null or empty column is no input: Arrow gives every row every column.
    given = {name: value for name, value in values.items() if name not in reward_columns and not _is_empty(value)}
    media = [name for name in MEDIA if name in given]
    if media:
        return Further(), f"{media[0]}: gnomon trains on text alone; remove the column, {_ELSE}"
    tools, flaw = _tools(given.get(TOOLS))
    if flaw is not None:
        return Further(), f"{TOOLS}: {flaw}, {_ELSE}"
    further, flaw = _mapping(given.get(KWARGS))
    if flaw is not None:
        return Further(), f"{KWARGS}: {flaw}, {_ELSE}"
    if isinstance(given.get("documents"), str):
        return Further(), f"documents: a list of objects with title and text is wanted, got text, {_ELSE}"
    # A column of its own wins over the same name in chat_template_kwargs.
    own = {name: _without_nulls(given[name]) for name in SWITCHES if name in given}
    if own.get("enable_thinking", True) not in (True, False):
        return Further(), f"enable_thinking: true or false is wanted, got {own['enable_thinking']!r}, {_ELSE}"
    return Further(tools=tuple(tools), switches={**further, **own}), None


def untold_flaw(values: Mapping[str, Any], content: Content, reward_columns: Sequence[str] = ()) -> str | None:
    """Return which column tells the model something and is not in the row's prompt, or None.

    >>> untold_flaw({"system": "Be brief."}, "2+2=").partition(";")[0]
    'system: reaches no prompt'
    >>> untold_flaw({"system": "Be brief."}, "Be brief. 2+2=")
    """
    said = content if isinstance(content, str) else "\n".join(message["content"] for message in content)
    for name in (name for name in TOLD if isinstance(values.get(name), str) and name not in reward_columns):
        if values[name].strip() not in said:
            return f'{name}: reaches no prompt; set task.template = "{{{name}}} {{question}}", write messages, {_ELSE}'
    if not _is_empty(values.get("functions")) and "functions" not in reward_columns:
        return f"functions: reaches no prompt; the column of schemas is {TOOLS}: rename it, {_ELSE}"
    return None


def untold_inputs(values: Mapping[str, Any], content: Content) -> list[str]:
    """Return the columns that usually mean input and of which a row's prompt lacks a text.

    >>> untold_inputs({"choices": ["red", "blue"], "context": "It rains."}, "It rains. red?")
    ['choices']
    """
    said = content if isinstance(content, str) else "\n".join(message["content"] for message in content)
    letters = LETTERS if values.keys() >= {*LETTERS[:2]} else ()
    return [
        name
        for name in (*OFTEN_INPUT, *letters)
        if (value := values.get(name)) is not None
        and value != values.get("answer")
        and not all(text.strip() in said for text in _texts(value))
    ]


def _texts(value: Any) -> list[str]:
    """Return the texts of a column; of an object those under ``text``, as ARC has its choices."""
    found = value.get("text") if isinstance(value, Mapping) else value
    return [str(each) for each in (found if isinstance(found, list | tuple) else [found]) if each is not None]


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


def names_in(values: Mapping[str, Any], setting: str | None = None, known: Sequence[str] = ()) -> str:
    """Return the names of a row's columns, and the setting that takes one that is almost named as a known one.

    Args:
        values: The row.
        setting: The setting of a task that names a column.
        known: The columns that are taken without it.

    >>> names_in({"prompts": "1+1="}, "prompt_column", ("prompt", "question"))
    'prompts; task.prompt_column = "prompts" takes that one'
    """
    shown = (on_one_line(name) if name and name == name.strip() else repr(name) for name in values)
    said = shortened(", ".join(shown), 200) or "nothing"
    new = [name for name, value in values.items() if setting and value is not None and name not in known]
    near = next((n for n in new if difflib.get_close_matches(_RIGHT.sub("", n.strip().lower()), known, 1, 0.8)), None)
    return said if near is None else f"{said}; task.{setting} = {json.dumps(near, ensure_ascii=False)} takes that one"
