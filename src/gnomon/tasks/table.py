"""Prompts and answers from a file or a Hugging Face dataset, with the columns of TRL and verl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gnomon.errors import DatasetError, on_one_line, shortened
from gnomon.progress import counted
from gnomon.tasks.chat import message_flaw, readable
from gnomon.tasks.inputs import further_of
from gnomon.tasks.question import Content, Listed, Question, digest
from gnomon.tasks.sources import Row, is_file_name, read_rows
from gnomon.tasks.values import number_text

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = (
    "solution", "answer", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "label",
)  # fmt: skip
_ASKED_TOO = ("tools", "images", "videos", "audio")
LISTED = 3


@dataclass(frozen=True)
class TableTask:
    """Questions from rows.

    path: a .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder that ``save_to_disk`` wrote, or a dataset on
        the hub as NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.
    subset, split: of a dataset; a single file has neither.
    prompt_column: text or chat messages; None takes the first of prompt, question, problem, messages.
    answer_column: dots reach into objects; None takes the first of solution, answer, ground_truth,
        reward_model.ground_truth, reward_spec.ground_truth, label that is not null; a row in which several of
        them differ is a bad row: with worked solutions and bare answers side by side, say
        ``answer_column = "answer"``. It becomes the column ``answer`` (a number as its text), replacing one of
        that name.
    require_answer: whether a row without answer is a bad row.
    reward_columns: columns that only rewards read, though their names mean input: ``tools``, ``documents``,
        ``enable_thinking`` and ``chat_template_kwargs`` go into the prompt by the model's chat template, and images,
        videos and audio are refused (`tasks/inputs.py`).

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
    reward_columns: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name without ending, or the dataset's."""
        return Path(self.path).stem if is_file_name(self.path) else self.path.rstrip("/")

    def questions(self) -> Listed:
        """Read and check every row.

        Raises: DatasetError that names bad rows as file:row: field: reason (the first 3, and the numbers of others).
        """
        questions: list[Question] = []
        flaws: list[tuple[int, str]] = []
        seen: dict[str, int] = {}
        name = self.name
        rows = read_rows(self.path, self.subset, self.split)
        for row in counted(rows, f"checking the rows of {name}", len(rows)):
            question, flaw = self._question(row, name)
            if question is not None and question.id in seen:
                flaw = f"id: {_shown(question.id)} is already the id of row {seen[question.id]}"
            if flaw is not None:
                flaws.append((row.number, flaw))
            elif question is not None:
                seen[question.id] = row.number
                questions.append(question)
        if flaws:
            raise DatasetError(self._report(flaws, len(rows)))
        return Listed(name, tuple(questions), again(name, questions, [*seen.values()]))

    def _question(self, row: Row, name: str) -> tuple[Question | None, str | None]:
        """Return the row's question, or None and what is wrong with it."""
        if row.flaw is not None:
            return None, row.flaw
        column = self.prompt_column or next((c for c in PROMPT_COLUMNS if row.values.get(c) is not None), None)
        if column is None or row.values.get(column) is None:
            return None, f"{column or 'prompt'}: missing; the row has {_names(row.values)}"
        content, flaw = _content(row.values[column])
        if flaw is not None:
            return None, f"{column}: {flaw}"
        answer, flaw = self._answer(row)
        if flaw is not None:
            return None, flaw
        number = row.values.get("id")
        if number is not None and not _is_id(number):
            return None, f"id: must be text or a whole number, got {_shown(number)}"
        further, flaw = further_of(row.values, self.reward_columns)
        if flaw is not None:
            return None, flaw
        text = content if isinstance(content, str) else readable(content)
        columns = {k: v for k, v in row.values.items() if k not in ("id", column)}
        columns["data_source"] = columns.get("data_source") or name
        if answer is not None:
            columns["answer"] = answer
        return Question(str(number) if number is not None else f"{digest(content)}-{row.number}",
                        content, text, columns, further), None  # fmt: skip

    def _answer(self, row: Row) -> tuple[Any, str | None]:
        """Return the answer (None when there is none and none is needed), and what is wrong with it."""
        columns = (self.answer_column,) if self.answer_column else ANSWER_COLUMNS
        found = {c: _as_answer(a) for c in columns if (a := _reach(row.values, c)) is not None}
        if not found:
            missing = f"{columns[0] if self.answer_column else 'answer'}: missing"
            reason = f"{missing}; the row has {_names(row.values)} (require_answer = false does without)"
            return None, reason if self.require_answer else None
        (column, answer), *others = found.items()
        for other, value in others:
            if value != answer:
                return None, (
                    f"{other} and {column}: differ, {_shown(value)} and {_shown(answer)}; say which is the answer: "
                    f'task.answer_column = "{other}"'
                )
        if column in row.times:
            return None, f"{column}: {answer} is a time, which can be written in many ways; write the answer as text"
        if isinstance(answer, str) and self.require_answer and not answer.strip():
            return None, f"{column}: empty"
        return answer, None

    def _report(self, flaws: Sequence[tuple[int, str]], rows: int) -> str:
        listed = "\n  ".join(f"{self.path}:{number}: {flaw}" for number, flaw in flaws[:LISTED])
        rest = [str(number) for number, _ in flaws[LISTED:]]
        numbers = f"{', '.join(rest[:10])}{', ...' if len(rest) > 10 else ''}"
        more = f"and {len(rest)} more, rows {numbers}; " if rest else ""
        return (f"{len(flaws)} of {rows} rows of {self.path} cannot be used:\n  {listed}\n"
                f"{more}correct these rows, or name the columns with prompt_column and answer_column")  # fmt: skip


def again(name: str, questions: Sequence[Question], numbers: Sequence[int]) -> str:
    """Return, in words, which rows ask exactly what an earlier row asks; "" for none.

    numbers: the rows of the questions.
    """
    first: dict[str, int] = {}
    repeated: list[tuple[int, int]] = []
    for place, question in enumerate(questions):
        beside = [question.columns.get(name) for name in _ASKED_TOO]
        earlier = first.setdefault(digest(question.content, beside), place)
        if earlier != place:
            repeated.append((earlier, place))
    if not repeated:
        return ""
    contrary = [pair for pair in repeated if _answers(questions, pair[0]) != _answers(questions, pair[1])]
    said = f"{len(repeated):,} of {len(questions):,} rows of '{name}' ask the same as an earlier row"
    said += f" ({_pairs(repeated, numbers)}) and are trained on as often"
    if contrary:
        said += f"; {len(contrary):,} have another answer than that row ({_pairs(contrary, numbers)}): one is wrong"
    return said


def _answers(questions: Sequence[Question], place: int) -> Any:
    return questions[place].columns.get("answer")


def _pairs(pairs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> str:
    shown = [f"row {numbers[place]} as row {numbers[earlier]}" for earlier, place in pairs[:LISTED]]
    return ", ".join(shown) + (", ..." if len(pairs) > LISTED else "")


def _names(values: Mapping[str, Any]) -> str:
    return shortened(", ".join(on_one_line(name) or "''" for name in values), 200) or "nothing"


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


def _as_answer(value: Any) -> Any:
    """Return a number as its text, and all else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_text(value) if is_number else value


def _content(value: Any) -> tuple[Content, str | None]:
    """Return text or messages, and what is wrong with them."""
    if isinstance(value, str):
        return value, None if value.strip() else "empty"
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
        flaw = message_flaw(message)
        if flaw is not None:
            return f"message {number}: {flaw}"
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        return (f"the last message must be the user's, or nothing is asked; it is the {last['role']}'s: remove it (an "
                "answer goes into the column answer; answers cannot be begun for the model)")  # fmt: skip
    return None if last["content"].strip() else "the last message is empty"


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip() != ""


def _reach(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None; a column whose own name has dots comes first."""
    if path in values:
        return values[path]
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
