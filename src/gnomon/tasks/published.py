"""Published training sets by name: where each lies on the hub, its columns, its words, how its answers are judged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from gnomon.core.errors import ConfigError, DatasetError, bounded, unknown
from gnomon.rewards.grading import WeightedReward
from gnomon.tasks.benchmarks import SetTable, examples, is_answered, published_sets, spelled
from gnomon.tasks.question import ListDataset, Question

_MOST_WITHOUT = 0.01
"""Share of rows without an answer that a published set may have; more say that it is another table."""


@dataclass(frozen=True)
class TrainingSet:
    """One published training set.

    Attributes:
        hub: Name on the Hugging Face hub, with subset and split where it needs them.
        prompt_column, answer_column: Columns with question and answer.
        suffix: Text that follows each question where the rows do not say it themselves.
        rewards: How an answer is judged; the first is its score.
        reference: What a row's answer is, as a pattern of the whole text. Rows with another are left out.
    """

    hub: str
    prompt_column: str
    answer_column: str
    suffix: str
    rewards: tuple[WeightedReward, ...]
    reference: str


PUBLISHED: Mapping[str, TrainingSet] = MappingProxyType(
    {
        name: TrainingSet(**{**known, "reference": known["reference"][1]})
        for name, known in published_sets("training").items()
    }
)


@dataclass(frozen=True)
@bounded("task")
class PublishedTask:
    """A published training set by its name, with its columns, its words and its reward.

    Attributes:
        set: Name of the training set; `gnomon tasks` lists them.
        kind: "published".
        path: A local copy as it was published (a file, or a folder that ``save_to_disk`` wrote). None fetches the set
            from the hub once, which needs a network.
        prefix: Text before each question.
        suffix: Text after each question; None is the set's own.
        template: The question within other text, as in a table.
        repeated: What becomes of rows that ask the same with the same answer, as in a table.
    """

    set: str
    kind: Literal["published"] = "published"
    path: str | None = None
    prefix: str = ""
    suffix: str | None = None
    template: str = ""
    repeated: Literal["merge", "keep"] = "merge"

    def __post_init__(self) -> None:
        if self.set not in PUBLISHED:
            raise ConfigError(unknown("training set", self.set, PUBLISHED))
        self.table.wording.check(PUBLISHED[self.set].answer_column)

    @property
    def name(self) -> str:
        """The set's name."""
        return self.set

    @property
    def rewards(self) -> tuple[WeightedReward, ...]:
        """How its answers are judged where the experiment names no reward."""
        return PUBLISHED[self.set].rewards

    @property
    def table(self) -> SetTable:
        """The set as the table that it is."""
        known = PUBLISHED[self.set]
        return SetTable(
            self.path or known.hub,
            prompt_column=known.prompt_column,
            answer_column=known.answer_column,
            require_answer=False,
            prefix=self.prefix,
            suffix=known.suffix if self.suffix is None else self.suffix,
            template=self.template,
            repeated=self.repeated,
            set=self.set,
        )

    def questions(self) -> ListDataset:
        """Return its questions; rows without an answer are left out, and a line says how many.

        Raises:
            DatasetError: The set cannot be fetched, or the rows are not as published; the message says how a local copy
                is used.
        """
        try:
            found = self.table.questions()
        except DatasetError as error:
            raise DatasetError(str(error) if self.path else f"{error}\n{self._how}") from error
        known = PUBLISHED[self.set]
        answered: list[Question] = []
        flaws: list[Question] = []
        for question in found.questions:
            (answered if is_answered(question, "answer", known.reference) else flaws).append(question)
        # A few rows without an answer are known of published sets; many mean that this is another table under the name.
        if len(flaws) > max(1, _MOST_WITHOUT * len(found)):
            raise DatasetError(
                f"{self.path or self.set}: {len(flaws)} of {len(found)} rows have no answer of '{self.set}' in the "
                f"column '{known.answer_column}' ({examples(flaws, 'answer')}), so this is another table; name its "
                'columns: task = {kind = "table", path = ..., prompt_column = ..., answer_column = ...}'
            )
        count = f"{len(flaws):,} of {len(found):,} rows of '{self.name}'"
        said = f"{count} have no answer and are left out" if flaws else ""
        named = (replace(q, columns={**q.columns, "data_source": self._source(q)}) for q in answered)
        return ListDataset(self.name, tuple(named), "; ".join(filter(None, (found.repeated, said))))

    def _source(self, question: Question) -> str:
        """Return the row's own source; a table gives its path to a row that has none."""
        source = str(question.columns["data_source"])
        return self.set if source == self.table.name else source

    @property
    def _how(self) -> str:
        known = PUBLISHED[self.set]
        return (
            f"'{self.set}' is {known.hub} on the Hugging Face hub, which is fetched once and needs a network; without "
            f"one, bring its Parquet or JSON file, with the columns '{known.prompt_column}' and "
            f"'{known.answer_column}', and name it as task={self.set}=FILE"
        )


def published_named(name: str) -> PublishedTask | None:
    """Return the training set that ``name`` means, in any spelling, with =PATH or without.

    >>> found = published_named("DAPO17k=copy.parquet"); found.set, found.path
    ('dapo-17k', 'copy.parquet')
    """
    said, _, path = name.partition("=")
    for known, published in PUBLISHED.items():
        if spelled(said) in (spelled(known), spelled(published.hub.partition(":")[0])):
            return PublishedTask(known, path=path or None)
    return None
