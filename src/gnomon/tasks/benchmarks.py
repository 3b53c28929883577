"""Published test sets by name: where each lies on the hub, which columns it has, how its answers are judged."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from gnomon.core.errors import ConfigError, DatasetError, unknown
from gnomon.rewards.exact import Boxed, Numeric, Parsable
from gnomon.rewards.grading import WeightedReward
from gnomon.rewards.math import Mathematics
from gnomon.tasks.question import ListDataset, Question
from gnomon.tasks.tables import TableTask, is_file_name

_AT_THE_END = "\nReason step by step, and give the final answer, a number, at the very end."
_IN_A_BOX = "\n\nReason step by step, and put the final answer in \\boxed{}."
_BOX = WeightedReward(Parsable(extract="boxed"), weight=0.0, name="format")


@dataclass(frozen=True)
class Benchmark:
    """One published test set.

    Attributes:
        hub: Name on the Hugging Face hub.
        subset, split: Subset and split on the hub.
        prompt_column, answer_column: Columns with question and answer.
        suffix: Text that follows each question.
        rewards: How an answer is judged; the first is its score.
        reference: What a row's answer is, in words and as a pattern of the whole text.
    """

    hub: str
    subset: str | None
    split: str
    prompt_column: str
    answer_column: str
    suffix: str
    rewards: tuple[WeightedReward, ...]
    reference: tuple[str, str]


_ANY = ("a text", r".*\S.*")
_NUMBER_LAST = ("a solution that ends in a number, such as '#### 72'", r".*\d.*")
_AIME = ("a whole number from 0 to 999", r"\s*0*\d{1,3}(\.0*)?\s*")
_WHOLE = ("a whole number", r"\s*-?\d+(\.0*)?\s*")


# GSM8K's answer is a worked solution that ends in "#### 72". MATH-500 and AIME 2024 have a worked ``solution`` beside
# the bare ``answer``. Answers of AIME are whole numbers from 0 to 999, sometimes written with leading zeros; those of
# BeyondAIME are whole numbers too, stored as such.
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "gsm8k": Benchmark(
            "openai/gsm8k", "main", "test", "question", "answer", _AT_THE_END,
            (
                WeightedReward(Numeric(must_end=True), name="answer"),
                WeightedReward(Parsable(extract="last_number"), weight=0.0, name="format"),
            ),
            _NUMBER_LAST,
        ),
        "math-500": Benchmark(
            "HuggingFaceH4/MATH-500", None, "test", "problem", "answer", _IN_A_BOX,
            (WeightedReward(Mathematics(), name="answer"), _BOX), _ANY,
        ),
        "aime-24": Benchmark(
            "HuggingFaceH4/aime_2024", None, "train", "problem", "answer", _IN_A_BOX,
            (WeightedReward(Boxed(), name="answer"), _BOX), _AIME,
        ),
        "aime-25": Benchmark(
            "math-ai/aime25", None, "test", "problem", "answer", _IN_A_BOX,
            (WeightedReward(Boxed(), name="answer"), _BOX), _AIME,
        ),
        "beyond-aime": Benchmark(
            "ByteDance-Seed/BeyondAIME", None, "test", "problem", "answer", _IN_A_BOX,
            (WeightedReward(Boxed(), name="answer"), _BOX), _WHOLE,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class BenchmarkTask:
    """A published test set, whole and in its own order. It is evaluated on and never trained on.

    Attributes:
        benchmark: Name of the test set in `BENCHMARKS`.
        kind: "benchmark".
        path: A local copy with the same columns (a file, or a folder that ``save_to_disk`` wrote). None fetches the set
            from the hub once, which needs a network.
    """

    benchmark: str
    kind: Literal["benchmark"] = "benchmark"
    path: str | None = None

    def __post_init__(self) -> None:
        if self.benchmark not in BENCHMARKS:
            raise ConfigError(unknown("benchmark", self.benchmark, BENCHMARKS))

    @property
    def name(self) -> str:
        """The benchmark's name."""
        return self.benchmark

    @property
    def rewards(self) -> tuple[WeightedReward, ...]:
        """How its answers are judged."""
        return BENCHMARKS[self.benchmark].rewards

    def questions(self) -> ListDataset:
        """Return its questions.

        Raises:
            DatasetError: The data set cannot be fetched, or rows are not as published; the message says how a local
                copy is used.
        """
        published = BENCHMARKS[self.benchmark]
        read = TableTask(
            self.path or published.hub,
            prompt_column=published.prompt_column,
            answer_column=published.answer_column,
        )
        if self.path is None or not is_file_name(self.path):
            read = replace(read, split=published.split, subset=published.subset if self.path is None else None)
        try:
            found = read.questions()
        except DatasetError as error:
            raise DatasetError(str(error) if self.path else f"{error}\n{self._how}") from error
        self._check_answers(found.questions)
        asked = (replace(q, content=q.text + published.suffix) for q in found.questions)
        return ListDataset(self.name, tuple(asked))

    def _check_answers(self, asked: Sequence[Question]) -> None:
        """Refuse rows whose answer is none that this test set can have: nothing could ever be right there."""
        column, (words, pattern) = BENCHMARKS[self.benchmark].answer_column, BENCHMARKS[self.benchmark].reference
        flaws = [q for q in asked if re.fullmatch(pattern, str(q.columns.get(column)), re.DOTALL) is None]
        if flaws:
            shown = ", ".join(f"{q.id}: {str(q.columns.get(column))[:40]!r}" for q in flaws[:3])
            raise DatasetError(
                f"{self.path or self.benchmark}: the column '{column}' of '{self.benchmark}' is {words}, and "
                f"{len(flaws)} of {len(asked)} rows have something else ({shown}{', ...' if len(flaws) > 3 else ''}); "
                "correct the rows, or remove them"
            )

    @property
    def _how(self) -> str:
        published = BENCHMARKS[self.benchmark]
        where = ":".join(part for part in (published.hub, published.subset) if part)
        return (
            f"'{self.benchmark}' is the split '{published.split}' of {where} on the Hugging Face hub, which is fetched "
            f"once and needs a network; without one, bring a copy as JSONL with the columns "
            f"'{published.prompt_column}' and '{published.answer_column}', and name it as {self.benchmark}=FILE.jsonl"
        )


def benchmark_named(name: str) -> BenchmarkTask | None:
    """Return the benchmark that ``name`` means: its name in any spelling, or on the hub, each with =PATH or without.

    >>> benchmark_named("AIME24=copy.jsonl")
    BenchmarkTask(benchmark='aime-24', kind='benchmark', path='copy.jsonl')
    """
    said, _, path = name.partition("=")
    for known, published in BENCHMARKS.items():
        if _spelled(said) in (_spelled(known), _spelled(published.hub)):
            return BenchmarkTask(known, path=path or None)
    return None


def _spelled(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
