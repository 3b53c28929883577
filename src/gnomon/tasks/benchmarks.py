"""Published test sets by name: where each lies on the hub, which columns it has, how its answers are judged."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from types import MappingProxyType
from typing import Any, Literal

from gnomon.core.errors import ConfigError, DatasetError, unknown
from gnomon.rewards.answers import Where
from gnomon.rewards.code.published import PRIVATE, PUBLIC
from gnomon.rewards.code.reward import Code
from gnomon.rewards.exact import Boxed, Numeric, Parsable
from gnomon.rewards.grading import WeightedReward
from gnomon.rewards.instructions import LANGUAGE, Instructions
from gnomon.rewards.math import Mathematics
from gnomon.tasks.base import Content
from gnomon.tasks.livecodebench import cases_of, is_in_window, starter_of
from gnomon.tasks.question import ListDataset, Question
from gnomon.tasks.tables import TableTask, is_file_name

AT_THE_END = "\nReason step by step, and give the final answer, a number, at the very end."
IN_A_BOX = "\n\nReason step by step, and put the final answer in \\boxed{}."
_IN_A_BLOCK = "\n\nGive the whole program in one ```python block."
_AFTER: Where = "after_thinking"
_BOX = WeightedReward(Parsable(extract="boxed"), weight=0.0, name="format", within=_AFTER)

Columns = Mapping[str, Any]


def _nothing(columns: Columns) -> str:
    return ""


@dataclass(frozen=True)
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
    subset: str | None
    split: str
    prompt_column: str
    answer_column: str | None
    suffix: str
    rewards: tuple[WeightedReward, ...]
    reference: tuple[str, str]
    shown: Callable[[Columns], str] = _nothing
    left_out: Callable[[Columns], str] = _nothing
    tests: Callable[[Columns], list[dict[str, Any]]] | None = None
    is_dated: bool = False
    files: str = ""


_ANY = ("a text", r".*\S.*")
_NUMBER_LAST = ("a solution that ends in a number, such as '#### 72'", r".*\d.*")
_AIME = ("a whole number from 0 to 999", r"\s*0*\d{1,3}(\.0*)?\s*")
_WHOLE = ("a whole number", r"\s*-?\d+(\.0*)?\s*")
_NUMBER = ("a number", r"\s*-?\d+(\.\d+)?(/\d+)?\s*")


def _contest(hub: str, split: str, reference: tuple[str, str], prompt_column: str = "problem") -> Benchmark:
    """Return a set of bare answers: whole numbers are compared by `Boxed`, all else by `Mathematics`."""
    judge = Mathematics() if reference is _ANY else Boxed()
    rewards = (WeightedReward(judge, name="answer", within=_AFTER), _BOX)
    return Benchmark(hub, None, split, prompt_column, "answer", IN_A_BOX, rewards, reference)


def _described(columns: Columns) -> str:
    is_described = columns.get("answer_type") == "description"
    return "have an answer in words, which only a judging model can compare (the others are AMO-Bench-P)" * is_described


def _in_a_language(columns: Columns) -> str:
    asked = columns.get("instruction_id_list") or ()
    return "ask for a language, which takes a trained classifier to tell" if LANGUAGE in asked else ""


def _asserts(columns: Columns) -> str:
    return "\n\nIt should pass these tests:\n" + "\n".join(map(str, columns.get("test_list") or ()))


# GSM8K's answer is a worked solution that ends in "#### 72". MATH-500, AIME 2024 and AMO-Bench have a worked
# ``solution`` beside the ``answer``. Answers of AIME are whole numbers from 0 to 999, sometimes written with leading
# zeros; those of BeyondAIME are whole numbers too, stored as such; AMC's are numbers, whole ones with ".0" in some
# copies. Those of MathArena (AIME 2026, BRUMO, HMMT) are numbers or LaTeX.
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "gsm8k": Benchmark(
            "openai/gsm8k", "main", "test", "question", "answer", AT_THE_END,
            (
                WeightedReward(Numeric(must_end=True), name="answer", within=_AFTER),
                WeightedReward(Parsable(extract="last_number"), weight=0.0, name="format", within=_AFTER),
            ),
            _NUMBER_LAST,
        ),
        "math-500": _contest("HuggingFaceH4/MATH-500", "test", _ANY),
        "aime-24": _contest("HuggingFaceH4/aime_2024", "train", _AIME),
        "aime-25": _contest("math-ai/aime25", "test", _AIME),
        "aime-26": _contest("MathArena/aime_2026", "train", _AIME),
        "beyond-aime": _contest("ByteDance-Seed/BeyondAIME", "test", _WHOLE),
        "amc-23": _contest("math-ai/amc23", "test", _NUMBER, "question"),
        "brumo-25": _contest("MathArena/brumo_2025", "train", _ANY),
        "hmmt-25": _contest("MathArena/hmmt_feb_2025", "train", _ANY),
        "amo-bench": replace(_contest("meituan-longcat/AMO-Bench", "test", _ANY, "prompt"), left_out=_described),
        "humaneval": Benchmark(
            "openai/openai_humaneval", None, "test", "prompt", "canonical_solution", _IN_A_BLOCK,
            (WeightedReward(Code(column="test"), name="answer", within=_AFTER),), _ANY,
        ),
        "mbpp": Benchmark(
            "google-research-datasets/mbpp", "full", "test", "text", "code", _IN_A_BLOCK,
            (WeightedReward(Code(column="test_list"), name="answer", within=_AFTER),), _ANY, shown=_asserts,
        ),
        "livecodebench": Benchmark(
            "livecodebench/code_generation_lite", None, "test", "question_content", None, _IN_A_BLOCK,
            (WeightedReward(Code(case_seconds=6.0, total_seconds=60.0), name="answer", within=_AFTER),), _ANY,
            shown=starter_of, tests=cases_of, is_dated=True, files="test.jsonl to test6.jsonl",
        ),
        "ifeval": Benchmark(
            "google/IFEval", None, "train", "prompt", None, "",
            (
                WeightedReward(Instructions(), name="answer", within=_AFTER),
                WeightedReward(Instructions(credit="each"), weight=0.0, name="instructions", within=_AFTER),
            ),
            _ANY, left_out=_in_a_language,
        ),
    }
)  # fmt: skip

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "codeforces": "its cases are not published, so only Codeforces itself judges an answer, and a rating needs the "
        "standings of its contests; gnomon submits nothing. Take livecodebench, or a table with cases of your own",
    }
)
"""Sets that are known and cannot be asked, each with the reason."""


@dataclass(frozen=True)
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
        read = TableTask(
            self.path or published.hub,
            prompt_column=published.prompt_column,
            answer_column=published.answer_column,
            require_answer=published.answer_column is not None,
            repeated="keep",
        )
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
