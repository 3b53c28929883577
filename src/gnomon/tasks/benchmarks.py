"""Published test sets by name: where each lies on the hub, which columns it has, how its answers are judged."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from types import MappingProxyType
from typing import Any, Literal

from gnomon.core.errors import ConfigError, DatasetError, bounded, unknown
from gnomon.core.tables import build, packaged_toml
from gnomon.rewards.code.published import PRIVATE, PUBLIC, unpacked
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.instructions import LANGUAGE
from gnomon.tasks.base import Content
from gnomon.tasks.question import ListDataset, Question
from gnomon.tasks.readers import is_file_name
from gnomon.tasks.tables import TableTask

Columns = Mapping[str, Any]


def _nothing(columns: Columns) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One published test set.

    Attributes:
        hub: Name on the Hugging Face hub.
        subset, split: Subset and split on the hub.
        prompt_column, answer_column: Columns with question and answer; no answer where tests or instructions judge.
        suffix: Text that follows each question.
        rewards: How an answer is judged; the first is its score.
        reference: What a row's answer is, in words and as a pattern of the whole text.
        shown: Text of a row between question and suffix.
        left_out: Why a row cannot be judged, in words; "" for one that can.
        tests: Cases of a row, which become its column ``tests``; None where a column holds them.
        is_dated: Whether rows have the day of their contest, so that a window can be asked.
        files: Files of the hub that hold the rows, where no library reads them from there.
    """

    hub: str
    subset: str | None = None
    split: str
    prompt_column: str
    answer_column: str | None = None
    suffix: str
    rewards: tuple[WeightedReward, ...]
    reference: tuple[str, str]
    shown: Callable[[Columns], str] = _nothing
    left_out: Callable[[Columns], str] = _nothing
    tests: Callable[[Columns], list[dict[str, Any]]] | None = None
    is_dated: bool = False
    files: str = ""


def _described(columns: Columns) -> str:
    is_described = columns.get("answer_type") == "description"
    return "have an answer in words, which only a judging model can compare (the others are AMO-Bench-P)" * is_described


def _in_a_language(columns: Columns) -> str:
    asked = columns.get("instruction_id_list") or ()
    return "ask for a language, which takes a trained classifier to tell" if LANGUAGE in asked else ""


def _asserts(columns: Columns) -> str:
    return "\n\nIt should pass these tests:\n" + "\n".join(map(str, columns.get("test_list") or ()))


_STARTER = "\n\nUse this starter code:\n```python\n{}\n```"


def cases_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the public and private cases of a row.

    Args:
        columns: ``public_test_cases`` as JSON; ``private_test_cases`` as JSON, or packed as published (`unpacked`).

    Raises:
        ValueError: The cases are in another form.
    """
    return [*_listed(columns.get(PUBLIC)), *_listed(columns.get(PRIVATE))]


def _listed(cases: Any) -> list[dict[str, Any]]:
    found = cases
    if isinstance(cases, str):
        found = json.loads(cases if cases.lstrip()[:1] == "[" else unpacked(cases))
    if not isinstance(found, list) or not all(isinstance(case, dict) for case in found):
        raise ValueError("the cases are no list of objects")
    return found


def starter_of(columns: Mapping[str, Any]) -> str:
    """Return what follows the question: the code that an answer begins with, or where input and output are."""
    code = str(columns.get("starter_code") or "").rstrip()
    return _STARTER.format(code) if code else "\n\nRead from standard input and write to standard output."


def is_in_window(columns: Mapping[str, Any], since: date | None, until: date | None) -> bool:
    """Whether a row's contest was on ``since`` or later, and before ``until``.

    Raises:
        DatasetError: The row has no date.
    """
    if since is None and until is None:
        return True
    try:
        day = date.fromisoformat(str(columns.get("contest_date"))[:10])
    except ValueError as error:
        raise DatasetError(f"contest_date is no date: {columns.get('contest_date')!r}") from error
    return (since is None or day >= since) and (until is None or day < until)


_TABLE = packaged_toml("gnomon.tasks", "published.toml")
_REWARDS = {name: build(Grading, {"rewards": rewards}).rewards for name, rewards in _TABLE["rewards"].items()}
_OF_ROWS: Mapping[str, Mapping[str, Any]] = {
    "amo-bench": {"left_out": _described},
    "mbpp": {"shown": _asserts},
    "livecodebench": {"shown": starter_of, "tests": cases_of},
    "ifeval": {"left_out": _in_a_language},
}


def published_sets(kind: str) -> dict[str, dict[str, Any]]:
    """Return the sets of published.toml by name, "benchmarks" or "training", with what their entries name."""
    return {
        name: {
            **known,
            "suffix": _TABLE["suffixes"][known["suffix"]],
            # A number or a box within a thought is no answer of a model that thinks; for others nothing changes.
            "rewards": tuple(replace(reward, within="after_thinking") for reward in _REWARDS[known["rewards"]]),
            "reference": tuple(_TABLE["references"][known["reference"]]),
        }
        for name, known in _TABLE[kind].items()
    }


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {name: Benchmark(**known, **_OF_ROWS.get(name, {})) for name, known in published_sets("benchmarks").items()}
)
REFUSED: Mapping[str, str] = MappingProxyType(_TABLE["refused"])
"""Sets that are known and cannot be asked, each with the reason."""


@dataclass(frozen=True)
class SetTable(TableTask):
    """The rows of a set that is known by its name: its columns are those that it was published with."""

    set: str = ""

    @property
    def _remedy(self) -> str:
        columns = " and ".join(f"'{name}'" for name in (self.prompt_column, self.answer_column) if name)
        return f"bring a copy of '{self.set}' as it was published, with {columns}; another table goes by its file alone"


@dataclass(frozen=True)
@bounded("task")
class BenchmarkTask:
    """A published test set, whole and in its own order. It is evaluated on and never trained on.

    Attributes:
        benchmark: Name of the test set in `BENCHMARKS`.
        kind: "benchmark".
        path: A local copy with the same columns (a file, or a folder that ``save_to_disk`` wrote). None fetches the set
            from the hub once, which needs a network.
        since: First day of the window of contests that is asked, as "2024-08-01"; none begins with the first.
        until: Day before which the window ends; none ends with the last.
    """

    benchmark: str
    kind: Literal["benchmark"] = "benchmark"
    path: str | None = None
    since: str | None = None
    until: str | None = None

    def __post_init__(self) -> None:
        for name, why in REFUSED.items():
            if spelled(self.benchmark) == name:
                raise ConfigError(f"'{self.benchmark}' cannot be asked: {why}")
        if self.benchmark not in BENCHMARKS:
            raise ConfigError(unknown("benchmark", self.benchmark, BENCHMARKS))
        if (self.since or self.until) and not BENCHMARKS[self.benchmark].is_dated:
            raise ConfigError(
                f"'{self.benchmark}' has no dates, so there is no window from {self.since} to {self.until}"
            )
        days = [_day(text) for text in (self.since, self.until)]
        if days[0] is not None and days[1] is not None and days[0] >= days[1]:
            raise ConfigError(f"the window of '{self.benchmark}' from {self.since} to {self.until} has no day in it")

    @property
    def name(self) -> str:
        """The benchmark's name, with its window."""
        window = f"@{self.since or ''}..{self.until or ''}" if self.since or self.until else ""
        return f"{self.benchmark}{window}"

    @property
    def rewards(self) -> tuple[WeightedReward, ...]:
        """How its answers are judged."""
        return BENCHMARKS[self.benchmark].rewards

    def questions(self) -> ListDataset:
        """Return its questions, and in words which rows cannot be judged and are left out.

        Raises:
            DatasetError: The data set cannot be fetched, or rows are not as published; the message says how a local
                copy is used.
        """
        published = BENCHMARKS[self.benchmark]
        if self.path is None and published.files:
            raise DatasetError(f"{self._how}; no library reads them from there: the set comes with a loading script")
        read = SetTable(
            self.path or published.hub,
            prompt_column=published.prompt_column,
            answer_column=published.answer_column,
            require_answer=published.answer_column is not None,
            # A test set is asked whole: numbers are comparable with published ones only if every row counts.
            repeated="keep",
            set=self.benchmark,
        )
        # A single file has no split, and a local folder no subset.
        if self.path is None or not is_file_name(self.path):
            read = replace(read, split=published.split, subset=published.subset if self.path is None else None)
        try:
            found = read.questions()
        except DatasetError as error:
            raise DatasetError(str(error) if self.path else f"{error}\n{self._how}") from error
        since, until = _day(self.since), _day(self.until)
        asked = [q for q in found.questions if is_in_window(q.columns, since, until)]
        if not asked:
            raise DatasetError(f"no question of '{self.name}' is in its window of dates")
        reasons = [published.left_out(q.columns) for q in asked]
        kept = [q for q, why in zip(asked, reasons, strict=True) if not why]
        if not kept:
            raise DatasetError(f"no row of '{self.name}' can be judged: they {reasons[0]}")
        if published.answer_column is not None:
            self._check_answers(kept)
        return ListDataset(self.name, tuple(map(self._asked, kept)), _said(reasons, self.name))

    def _asked(self, question: Question) -> Question:
        """Return the question with what its set shows after it, and with its cases."""
        published = BENCHMARKS[self.benchmark]
        content: Content = question.text + published.shown(question.columns) + published.suffix
        columns = dict(question.columns)
        if published.tests is not None:
            try:
                columns["tests"] = published.tests(question.columns)
            except ValueError as error:
                raise DatasetError(f"{self.path or self.benchmark}: question '{question.id}': {error}") from error
            # The packed cases may be megabytes a row, and `tests` holds them unpacked.
            for column in (PUBLIC, PRIVATE):
                columns.pop(column, None)
        return replace(question, content=content, columns=columns)

    def _check_answers(self, asked: Sequence[Question]) -> None:
        """Refuse rows whose answer is none that this test set can have: nothing could ever be right there."""
        column, (words, pattern) = BENCHMARKS[self.benchmark].answer_column, BENCHMARKS[self.benchmark].reference
        flaws = [q for q in asked if not is_answered(q, column or "", pattern)]
        if flaws:
            raise DatasetError(
                f"{self.path or self.benchmark}: the column '{column}' of '{self.benchmark}' is {words}, and "
                f"{len(flaws)} of {len(asked)} rows have something else ({examples(flaws, column or '')}); correct the "
                "rows, or remove them"
            )

    @property
    def _how(self) -> str:
        published = BENCHMARKS[self.benchmark]
        where = ":".join(part for part in (published.hub, published.subset) if part)
        if published.files:
            return (
                f"'{self.benchmark}' is {published.files} of {where} on the Hugging Face hub; download them, join them "
                f"to one file, and name it as {self.benchmark}=FILE.jsonl"
            )
        columns = " and ".join(f"'{name}'" for name in (published.prompt_column, published.answer_column) if name)
        return (
            f"'{self.benchmark}' is the split '{published.split}' of {where} on the Hugging Face hub, which is fetched "
            f"once and needs a network; without one, bring a copy as JSONL with the columns {columns}, and name it as "
            f"{self.benchmark}=FILE.jsonl"
        )


def is_answered(question: Question, column: str, pattern: str) -> bool:
    """Return whether the whole text of a column is what ``pattern`` says; a row without a value has none."""
    value = question.columns.get(column)
    return value is not None and re.fullmatch(pattern, str(value), re.DOTALL) is not None


def examples(questions: Sequence[Question], column: str) -> str:
    """Return the values of a column in the first three of ``questions``, each with its row, in words."""
    shown = [f"{q.id}: {str(q.columns.get(column))[:40]!r}" for q in questions[:3]]
    return ", ".join(shown + ["..."] * (len(questions) > 3))


def _said(reasons: Sequence[str], name: str) -> str:
    """Return which rows are left out, in words; "" for none."""
    why = next(filter(None, reasons), "")
    count = sum(map(bool, reasons))
    return f"{count:,} of {len(reasons):,} rows of '{name}' {why}, and are left out" if count else ""


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"a day of a window is written as 2024-08-01, got {text!r}") from error


def benchmark_named(name: str) -> BenchmarkTask | None:
    """Return the benchmark that ``name`` means: its name in any spelling, or on the hub, each with =PATH or without.

    A window of dates stands after an @, as in livecodebench@2024-08-01..2025-02-01.

    >>> benchmark_named("AIME24=copy.jsonl")
    BenchmarkTask(benchmark='aime-24', kind='benchmark', path='copy.jsonl', since=None, until=None)
    """
    said, _, path = name.partition("=")
    said, _, window = said.partition("@")
    since, _, until = window.partition("..")
    for known, published in BENCHMARKS.items():
        if spelled(said) in (spelled(known), spelled(published.hub)):
            return BenchmarkTask(known, path=path or None, since=since or None, until=until or None)
    return BenchmarkTask(said) if spelled(said) in REFUSED else None


def spelled(name: str) -> str:
    """Return a name without case, hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")
