"""Prompts and answers from a file or a Hugging Face dataset, with the columns of TRL and verl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gnomon.errors import DatasetError
from gnomon.progress import counted
from gnomon.tasks.chat import message_flaw, readable
from gnomon.tasks.plain import json_safe
from gnomon.tasks.question import Content, Listed, Question, digest
from gnomon.tasks.sources import Row, is_file_name, read_rows

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = (
    "solution", "answer", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "label",
)  # fmt: skip
LISTED = 20


@dataclass(frozen=True)
class TableTask:
    """Questions from rows.

    path: a .jsonl, .json or .parquet file, a folder that ``save_to_disk`` wrote, or a dataset on the hub as
        NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.
    subset, split: of a dataset; a single file has neither.
    prompt_column: text or chat messages; None takes the first of prompt, question, problem, messages.
    answer_column: dots reach into objects; None takes the first of solution, answer, ground_truth,
        reward_model.ground_truth, reward_spec.ground_truth, label that is not null. It becomes the column
        ``answer`` (a number as its text), replacing one of that name: with worked solutions and bare answers
        side by side, say ``answer_column = "answer"``.
    require_answer: whether a row without answer is a bad row.

    All other columns stay what they are; ``data_source`` is the table's name where a row has none. An id is
    the row's ``id`` where it has one, else a hash of its prompt and its row number.
    """

    path: str
    kind: Literal["table"] = "table"
    subset: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    require_answer: bool = True

    @property
    def name(self) -> str:
        """The file's name without ending, or the dataset's."""
        return Path(self.path).stem if is_file_name(self.path) else self.path.rstrip("/")

    def questions(self) -> Listed:
        """Read and check every row.

        Raises: DatasetError that lists all bad rows as file:row: field: reason (the first 20, and how many).
        """
        questions: list[Question] = []
        flaws: list[str] = []
        seen: dict[str, int] = {}
        name = self.name
        rows = read_rows(self.path, self.subset, self.split)
        for row in counted(rows, f"checking the rows of {name}", len(rows)):
            question, flaw = self._question(row, name)
            if question is not None and question.id in seen:
                flaw = f"id: '{question.id}' is already the id of row {seen[question.id]}"
            if flaw is not None:
                flaws.append(f"{self.path}:{row.number}: {flaw}")
            elif question is not None:
                seen[question.id] = row.number
                questions.append(question)
        if flaws:
            raise DatasetError(self._report(flaws, len(rows)))
        return Listed(name, tuple(questions))

    def _question(self, row: Row, name: str) -> tuple[Question | None, str | None]:
        """Return the row's question, or None and what is wrong with it."""
        if row.flaw is not None:
            return None, row.flaw
        column = self.prompt_column or next((c for c in PROMPT_COLUMNS if row.values.get(c) is not None), None)
        if column is None or row.values.get(column) is None:
            return None, f"{column or 'prompt'}: missing; the row has {', '.join(row.values) or 'nothing'}"
        content, flaw = _content(row.values[column])
        if flaw is not None:
            return None, f"{column}: {flaw}"
        answer, flaw = self._answer(row.values)
        if flaw is not None:
            return None, flaw
        number = row.values.get("id")
        if number is not None and not _is_id(number):
            return None, f"id: must be text or a whole number, got {number!r}"
        text = content if isinstance(content, str) else readable(content)
        columns = {k: json_safe(v) for k, v in row.values.items() if k not in ("id", column)}
        columns["data_source"] = columns.get("data_source") or name
        if answer is not None:
            columns["answer"] = answer
        return Question(str(number) if number is not None else f"{digest(content)}-{row.number}",
                        content, text, columns), None  # fmt: skip

    def _answer(self, values: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return the answer (None when there is none and none is needed), and what is wrong with it."""
        columns = (self.answer_column,) if self.answer_column else ANSWER_COLUMNS
        column, answer = next(((c, a) for c in columns if (a := _reach(values, c)) is not None), (None, None))
        if column is None or answer is None:
            missing = f"{columns[0] if self.answer_column else 'answer'}: missing"
            reason = f"{missing}; the row has {', '.join(values)} (require_answer = false does without)"
            return None, reason if self.require_answer else None
        if isinstance(answer, str):
            empty = self.require_answer and not answer.strip()
            return answer, f"{column}: empty" if empty else _text_flaw(answer, column)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            return str(answer), None
        return json_safe(answer), None

    def _report(self, flaws: Sequence[str], rows: int) -> str:
        listed = "\n  ".join(flaws[:LISTED])
        more = f"\n  ... and {len(flaws) - LISTED} more" if len(flaws) > LISTED else ""
        return (f"{len(flaws)} of {rows} rows of {self.path} cannot be used:\n  {listed}{more}\n"
                "correct these rows, or name the columns with prompt_column and answer_column")  # fmt: skip


def _content(value: Any) -> tuple[Content, str | None]:
    """Return text or messages, and what is wrong with them."""
    if isinstance(value, str):
        return value, _text_flaw(value) if value.strip() else "empty"
    if not isinstance(value, list):
        return "", f"must be text or a list of messages, got {type(value).__name__}"
    flaw = _messages_flaw(value)
    if flaw is not None:
        return "", flaw
    return tuple({"role": m["role"], "content": m["content"]} for m in value), None


def _messages_flaw(messages: Sequence[Any]) -> str | None:
    if not messages:
        return "empty list of messages"
    for number, message in enumerate(messages, start=1):
        flaw = message_flaw(message) or _text_flaw(message["content"])
        if flaw is not None:
            return f"message {number}: {flaw}"
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        return f"the last message must be the user's, or nothing is asked; it is the {last['role']}'s"
    return None if last["content"].strip() else "the last message is empty"


def _text_flaw(text: str, column: str | None = None) -> str | None:
    """Return why ``text`` cannot be encoded; JSON can spell half of a surrogate pair, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"half a surrogate pair at character {error.start + 1}"
        return f"{column}: {reason}" if column else reason
    return None


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _reach(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None; a column whose own name has dots comes first."""
    if path in values:
        return values[path]
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
