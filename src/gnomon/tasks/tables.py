"""Prompts and answers from the rows of a table, with the columns of TRL and verl."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from gnomon.core.errors import ConfigError, DatasetError, bounded, shortened, unknown
from gnomon.core.progress import track
from gnomon.core.tables import value_at
from gnomon.core.types import Message
from gnomon.tasks.base import Content
from gnomon.tasks.chat import message_flaw, readable
from gnomon.tasks.question import ListDataset, Question, digest
from gnomon.tasks.readers import LISTED, is_file_name, read_rows
from gnomon.tasks.row_inputs import Wording, further_of, names_in, untold_flaw
from gnomon.tasks.row_values import Row, number_text
from gnomon.tasks.split import NUMBERING, Repetitions

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "conversations")
ANSWER_COLUMNS = (
    "solution", "answer", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "label",
)  # fmt: skip
_COLUMN_SETTINGS = ("prompt_column", "answer_column", "completion_column", "rejected_column", "label_column")
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""What a label may be, as text: CSV has no other."""
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""")
_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
             "observation": "tool"}  # fmt: skip
"""ShareGPT's names of roles."""
_NOTHING = frozenset(("nan", "none", "null", "<na>", "n/a", "nat"))
"""What programs write for no value, in lower case."""


@dataclass(frozen=True)
@bounded("task")
class TableTask:
    """Questions from the rows of a table.

    Attributes:
        path: A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder that ``save_to_disk`` wrote, or a dataset
            on the hub as NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.
        kind: "table".
        subset: Subset of a dataset; a single file has none.
        split: Split of a dataset; a single file has none.
        prompt_column: Column with the question, as text or chat messages. None takes the first of prompt, question,
            problem, messages, conversations. Messages may be ShareGPT's (``from``, ``value``).
        answer_column: Column with the answer; dots reach into objects. None takes the first of solution, answer,
            ground_truth, reward_model.ground_truth, reward_spec.ground_truth, label that is not null. A row in which
            several of them differ is a bad row: where worked solutions stand beside bare answers, say
            ``answer_column = "answer"``. The answer (a number as its text) becomes the column ``answer`` and replaces
            one of that name.
        require_answer: Whether a row without an answer is a bad row.
        prefix: Text before each question; in a conversation, before its last message.
        suffix: Text after each question, such as where the answer is to stand.
        template: The question within other text, as {question} and further columns of the row as {NAME}: "Topic:
            {type}. {question}". A name directly after a letter, as in \\boxed{x}, is text. "" is the question alone.
        repeated: What becomes of a row that asks the same with the same answer as an earlier row: "merge" makes both
            one prompt, "keep" trains on each. Rows without an answer are the same if all their columns are.
        completion_column: Column with the answer that `gnomon sft` trains on, as text or chat messages. "auto" takes
            completion, else what follows the question in chat messages, every assistant's message of them, else the
            answer column, else, where a row has no question, the whole of its ``text``. None, which `gnomon sft` takes
            for "auto", reads none.
        rejected_column: Column with the answer that the one in completion_column is preferred to; None reads none.
            Preferences (algorithm "dpo") read ``chosen`` and ``rejected`` where nothing is said: two answers, or two
            conversations with one beginning, which is the question then.
        label_column: Column with true or false for a good or a bad answer; None reads none. Algorithm "kto" reads
            ``label``, with ``completion``, where nothing is said.
        reward_columns: Columns that only rewards read, though their names mean input. Otherwise ``tools``,
            ``documents``, ``enable_thinking`` and ``chat_template_kwargs`` go into the prompt through the model's chat
            template, and images, videos and audio are refused (`tasks/row_inputs.py`).

    All other columns stay what they are. ``data_source`` is the table's name where a row has none. An id is the row's
    ``id`` where it has one, else a hash of its prompt and its row number.
    """

    path: str
    kind: Literal["table"] = "table"
    subset: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    require_answer: bool = True
    prefix: str = ""
    suffix: str = ""
    template: str = ""
    repeated: Literal["merge", "keep"] = "merge"
    reward_columns: tuple[str, ...] = ()
    completion_column: str | None = None
    rejected_column: str | None = None
    label_column: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a column without a name, or a template that cannot be filled."""
        self.wording.check(self.answer_column)
        for key in _COLUMN_SETTINGS:
            column = getattr(self, key)
            if column is not None and not column.strip():
                raise ConfigError(f"task.{key} is {column!r}; name a column, or leave {key} out")

    @property
    def name(self) -> str:
        """The file's name without ending, or the dataset's."""
        return Path(self.path).stem if is_file_name(self.path) else self.path.rstrip("/")

    @property
    def wording(self) -> Wording:
        """The text around each question."""
        return Wording(self.prefix, self.suffix, self.template)

    def questions(self) -> ListDataset:
        """Read and check every row.

        Raises:
            DatasetError: A row is bad. The message names file, row, field and reason of the first three, and the
                numbers of the others.
        """
        questions: list[Question] = []
        flaws: list[tuple[int, str]] = []
        seen: dict[str, int] = {}
        name = self.name
        repetitions = Repetitions(name, self.repeated == "merge")
        rows = read_rows(self.path, self.subset, self.split, self._numbering)
        for row in track(rows, f"checking the rows of {name}", len(rows)):
            question, flaw = self._question(row, name)
            if question is not None and not repetitions.is_kept(question, row.number, row.copies):
                continue
            if question is not None and question.id in seen:
                flaw = f"id: {_shown(question.id)} is already the id of row {seen[question.id]}"
            if flaw is not None:
                flaws += [(number, flaw) for number in (row.number, *row.copies)]
            elif question is not None:
                seen[question.id] = row.number
                questions.append(question)
        total = len(rows) + sum(len(row.copies) for row in rows)
        if flaws:
            raise DatasetError(self._report(sorted(flaws), total))
        said = (repetitions.said, *self._doubts(rows, total, questions))
        return ListDataset(name, tuple(questions), "; ".join(filter(None, said)))

    @property
    def _numbering(self) -> frozenset[str] | None:
        """Columns in which rows that become one prompt may differ; None where each row is a prompt."""
        if self.repeated == "keep":
            return None
        named = (getattr(self, key) for key in _COLUMN_SETTINGS)
        read = {str(name).partition(".")[0] for name in (*named, *self.wording.columns)}
        return frozenset(NUMBERING) - read

    def _doubts(self, rows: Sequence[Row], total: int, questions: Sequence[Question]) -> list[str]:
        """Return, in words, what may be meant and may be a slip.

        Args:
            rows: The table's different rows.
            total: Number of all its rows.
            questions: What they ask.

        Raises:
            ConfigError: ``reward_columns`` names a column that no row has.
        """
        names = dict.fromkeys(name for row in rows for name in row.values)
        for name in self.reward_columns:
            if name not in names:
                raise ConfigError(f"task.reward_columns: {unknown('column', name, names)}")
        said = []
        several = [row for row in rows if not self.prompt_column and len(_prompts(row)) > 1]
        if several:
            used, other, *_ = _prompts(several[0])
            count = sum(1 + len(row.copies) for row in several)
            said.append(
                f"the prompts {used!r} and {other!r} differ in {count:,} of {total:,} rows of '{self.name}' "
                f"(row {several[0].number}), and {used!r} is asked; task.prompt_column names another"
            )
        answers = [str(q.columns.get("answer")) for q in questions if q.columns.get("answer") is not None]
        given = (self.answer_column,) if self.answer_column else ANSWER_COLUMNS
        coded = next((name for name in given if name.partition(".")[0] in rows[0].coded), None)
        if coded and answers:
            said.append(f"the answers of '{self.name}' are names of the classes of {coded!r}, as {answers[0]!r}, whose "
                        f"numbers the rewards' column {coded!r} holds; `cast_column({coded!r}, Value('int64'))` of "
                        "datasets makes the numbers the answers")  # fmt: skip
        missing = [answer for answer in answers if answer.strip().lower() in _NOTHING]
        if missing:
            said.append(f"{len(missing):,} of {total:,} answers of '{self.name}' are the text {missing[0]!r}, "
                        "which programs write for no answer: remove these rows unless it is one")  # fmt: skip
        return said

    def _question(self, row: Row, name: str) -> tuple[Question | None, str | None]:
        """Return the row's question, or None and what is wrong with it."""
        if row.flaw is not None:
            return None, row.flaw
        chats = {*PROMPT_COLUMNS, "completion", self.prompt_column, self.completion_column, self.rejected_column}
        # Only columns that may be a conversation: a reward's own column with the keys from and value stays what it is.
        row = replace(row, values={k: _as_messages(v) if k in chats else v for k, v in row.values.items()})
        if self.rejected_column is not None and self.prompt_column is None:
            row = replace(row, values=_with_prompt(row.values, str(self.completion_column), self.rejected_column))
        column = self.prompt_column or next((c for c in PROMPT_COLUMNS if row.values.get(c) is not None), None)
        is_read = self.completion_column == "auto" and self.prompt_column is None
        if is_read and column is None and isinstance(text := row.values.get("text"), str):
            return self._text(row, text)
        if is_read and row.values.get("completion") is None:
            whole = (c for c in ("messages", "conversations") if _first_answer(row.values.get(c)) is not None)
            column = next(whole, column)  # a prompt beside them is the first of them
        if column is None or row.values.get(column) is None:
            column = column or next((c for c in PROMPT_COLUMNS if c in row.values), "prompt")
            near = names_in(row.values, None if self.prompt_column else "prompt_column", PROMPT_COLUMNS)
            return None, f"{column}: {'null' if column in row.values else 'missing'}; the row has {near}"
        value, turns, flaw = self._completed(row.values, column)
        if flaw is not None:
            return None, flaw
        content, flaw = _content(value)
        if flaw is not None:
            return None, f"{column}: {flaw}"
        rejected, flaw = self._rejected(row.values, turns)
        if flaw is not None:
            return None, flaw
        given = True if self.label_column is None else row.values.get(self.label_column)
        label = _LABELS.get(str(given).strip().lower())
        if label is None:
            said = "is not there" if given is None else f"must be true or false, got {_shown(given)}"
            return None, f"{self.label_column}: {said}; another column with labels is task.label_column"
        answer, flaw = self._answer(row)
        if flaw is not None and not turns:
            return None, flaw
        if (flaw := _id_flaw(row)) is not None:
            return None, flaw
        further, flaw = further_of(row.values, self.reward_columns)
        if flaw is not None:
            return None, flaw
        text = content if isinstance(content, str) else readable(content)
        try:
            content = self.wording.around(content, row.values)
        except KeyError as error:
            return None, f"task.template: no column {error}; the row has {names_in(row.values)}"
        if (flaw := untold_flaw(row.values, content, self.reward_columns)) is not None:
            return None, flaw
        columns = {k: v for k, v in {**row.values, **row.coded}.items() if k not in ("id", column)}
        columns["data_source"] = columns.get("data_source") or name
        if answer is not None:
            columns["answer"] = _told(columns.get("answer"), answer)
        return Question(_id(row, content), content, text, columns, further, turns, rejected, label), None

    def _text(self, row: Row, text: str) -> tuple[Question | None, str | None]:
        """Return a row of text, which is trained on as a whole, or None and what is wrong with it."""
        if not text.strip():
            return None, "text: empty"
        if self.wording != Wording():
            return None, "text: asks nothing, so task.prefix, suffix and template have no place; remove them"
        if (flaw := _id_flaw(row)) is not None:
            return None, flaw
        told = {**row.values, **row.coded, "data_source": self.name}
        columns = {k: v for k, v in told.items() if k not in ("id", "text")}
        return Question(_id(row, text), (), text, columns, turns=({"role": "assistant", "content": text},)), None

    def _completed(self, values: Mapping[str, Any], column: str) -> tuple[Any, tuple[Message, ...], str | None]:
        """Return the row's question, the messages that follow it, and what is wrong with them."""
        asked, name = values[column], self.completion_column
        if name is None:
            return asked, (), None
        given = values.get("completion" if name == "auto" else name)
        if given is None and name != "auto":
            return asked, (), f"{name}: missing; the row has {names_in(values)}"
        if given is None:
            first = _first_answer(asked)
            if first is None:
                return asked, (), None
            asked, name, given = asked[:first], column, asked[first:]
        turns, flaw = _turns(given)
        return asked, turns, None if flaw is None else f"{'completion' if name == 'auto' else name}: {flaw}"

    def _rejected(self, values: Mapping[str, Any], chosen: Sequence[Message]) -> tuple[tuple[Message, ...], str | None]:
        """Return the messages of the answer that the chosen one is preferred to, and what is wrong with them."""
        name = self.rejected_column
        if name is None or values.get(name) is None:
            return (), None if name is None else f"{name}: missing; the row has {names_in(values)}"
        turns, flaw = _turns(values[name])
        if flaw is None and turns == chosen:
            flaw = f"is the same as {self.completion_column}, so neither is preferred; remove the row"
        return turns, None if flaw is None else f"{name}: {flaw}"

    def _answer(self, row: Row) -> tuple[Any, str | None]:
        """Return the answer (None when there is none and none is needed), and what is wrong with it."""
        columns = (self.answer_column,) if self.answer_column else ANSWER_COLUMNS
        found = {c: _as_answer(a) for c in columns if (a := row.values.get(c, value_at(row.values, c))) is not None}
        if not found:
            near = names_in(row.values, None if self.answer_column else "answer_column", ANSWER_COLUMNS)
            missing = f"{columns[0] if self.answer_column else 'answer'}: missing; the row has {near}"
            # The hint to do without an answer would mislead where a misspelt column is the likely cause.
            is_needed = " takes " in near or self.completion_column is not None
            reason = missing + ("" if is_needed else " (task.require_answer = false does without)")
            return None, reason if self.require_answer else None
        # Several columns may hold the answer. Which one is meant is not guessed where they differ.
        (column, answer), *others = found.items()
        for other, value in others:
            if value != answer:
                return None, (
                    f"{other} and {column}: differ, {_shown(value)} and {_shown(answer)}; say which is the answer: "
                    f'task.answer_column = "{other}"'
                )
        # A prompt or a reward may use such a value; as an answer it cannot be compared.
        if column in row.unsure:
            return None, f"{column}: {answer} {row.unsure[column]}; write the answer as text"
        if isinstance(answer, str) and self.require_answer and not answer.strip():
            return None, f"{column}: empty"
        return answer, None

    def _report(self, flaws: Sequence[tuple[int, str]], rows: int) -> str:
        listed = "\n  ".join(f"{self.path}:{number}: {flaw}" for number, flaw in flaws[:LISTED])
        rest = [str(number) for number, _ in flaws[LISTED:]]
        numbers = f"{', '.join(rest[:10])}{', ...' if len(rest) > 10 else ''}"
        more = f"and {len(rest)} more, rows {numbers}; " if rest else ""
        return (f"{len(flaws)} of {rows} rows of {self.path} cannot be used:\n  {listed}\n"
                f"{more}correct these rows, or {self._remedy}")  # fmt: skip

    @property
    def _remedy(self) -> str:
        named = [key for key in ("completion", "rejected", "label") if getattr(self, f"{key}_column") is not None]
        read = ["prompt", *(["answer"] if self.completion_column in (None, "auto") else []), *named]
        return "name other columns with " + ", ".join(f"task.{key}_column" for key in read)


def _with_prompt(values: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a row of two conversations as their common beginning, in ``prompt``, and what follows it in each."""
    first, second = (values.get(name) for name in names)
    if not (isinstance(first, list) and isinstance(second, list) and _first_answer(first) and _first_answer(second)):
        return values
    same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])
    return {**values, "prompt": first[:same], names[0]: first[same:], names[1]: second[same:]}


def _prompts(row: Row) -> list[str]:
    """Return the columns that may be the prompt and hold different things; a chat that repeats a text is no other."""
    given = {name: _content(_as_messages(value)) for name in PROMPT_COLUMNS if (value := row.values.get(name))}
    # Some sets hold the question as text and, in another column, as messages: the same question twice is no doubt.
    texts = {n: said if isinstance(said, str) else readable(said) for n, (said, flaw) in given.items() if flaw is None}
    first = {text: name for name, text in reversed(texts.items())}
    chats = {name for name, (said, _) in given.items() if not isinstance(said, str)}
    return [
        name
        for name in PROMPT_COLUMNS
        if name in first.values()
        and not (name in chats and any(text.strip() in texts[name] for other, text in texts.items() if other != name))
    ]


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


def _as_answer(value: Any) -> Any:
    """Return a number as its text, and all else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_text(value) if is_number else value


def _told(own: Any, answer: Any) -> Any:
    """Return what rewards are told: a column ``answer`` of numbers as the row has it, since functions compare them.

    A whole number has no point, so that its text is the answer's: 7 for 7.0, which equals it.
    """
    if _as_answer(own) != answer or own == answer:
        return answer
    return int(own) if answer.lstrip("-").isdecimal() else own


def _content(value: Any) -> tuple[Content, str | None]:
    """Return text or messages, and what is wrong with them."""
    if isinstance(value, str):
        if _MESSAGES.match(value):
            return "", "text that holds a list of messages; write the list itself (JSONL and Parquet can hold one)"
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


def _as_messages(value: Any) -> Any:
    """Return ShareGPT's messages as the others have them, and all else as it is.

    >>> _as_messages([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Salve"}])
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Salve'}]
    """
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and {"from", "value"} <= {*m} for m in value):
        return value
    rest = [{k: v for k, v in m.items() if k not in ("from", "value")} for m in value]
    return [
        {"role": _SHAREGPT.get(str(m["from"]).lower(), m["from"]), "content": m["value"], **more}
        for m, more in zip(value, rest, strict=True)
    ]


def _first_answer(content: Any) -> int | None:
    """Return the place of the first assistant's message of a chat; None where there is none."""
    messages = content if isinstance(content, list) else []
    return next((n for n, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "assistant"), None)


def _turns(given: Any) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages that answer a question, of text or messages, and what is wrong with them."""
    turns = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
    if not isinstance(turns, list) or not turns:
        return (), f"must be text or a list of messages, got {_shown(turns)}"
    for number, message in enumerate(turns, start=1):
        flaw = message_flaw(message)
        if flaw is not None:
            return (), f"message {number} of the answer: {flaw}"
    # Messages of the user or a tool may stand between answers, but not at the ends.
    for end in (turns[0], turns[-1]):
        if end["role"] != "assistant" or not end["content"].strip():
            said = "is empty" if end["role"] == "assistant" else f"is the {end['role']}'s"
            return (), f"an answer begins and ends with an assistant's message that has text, and one of them {said}"
    return tuple({"role": m["role"], "content": m["content"]} for m in turns), None


def _id_flaw(row: Row) -> str | None:
    given = row.values.get("id")
    is_id = isinstance(given, str | int) and not isinstance(given, bool) and str(given).strip() != ""
    return None if given is None or is_id else f"id: must be text or a whole number, got {_shown(given)}"


def _id(row: Row, content: Content) -> str:
    """Return the row's own id, else one that only this prompt in this row has."""
    given = row.values.get("id")
    return str(given) if given is not None else f"{digest(content)}-{row.number}"
