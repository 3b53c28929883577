"""Questions before they are tokens.

Every task set is built in two stages. First come *questions*: text or chat messages with the dataset's
columns, read and checked without any tokenizer, so that a bad file is reported before a model loads.
`TokenizedDataset` then turns a question into a `Task` each time it is asked for. Mixing, splitting and
comparing happen on questions and therefore never wait for a tokenizer.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from gnomon.core.errors import DatasetError
from gnomon.core.progress import track
from gnomon.core.types import Message, Task, answer_of
from gnomon.tasks.base import Content, Further, Renderer, TaskSet
from gnomon.tasks.row_inputs import Wording

MOST = 20_000
_KEPT = 1024
Answers = Literal["", "data", "pairs", "labels"]
"""Which answers of a dataset its tasks have: none, each row's own, a chosen and a rejected one, or one with a label."""
_SIBLING = "\ue0ff"
"""Stands in a hint where another answer of the group will."""


def dataset_fingerprint(tasks: TaskSet) -> str:
    """Return a digest of the number of tasks and of id, prompt tokens, text and columns of each.

    Of more than 20,000 tasks so many are read, evenly spaced: no more than seconds are spent. Another row, another
    order, another tokenizer or chat template, or a generator of another version gives another stamp.
    """
    digest = hashlib.blake2b(str(len(tasks)).encode(), digest_size=16)
    # A step rounded up, so at most MOST are read; `or 1` is for an empty set.
    places = range(0, len(tasks), -(-len(tasks) // MOST) or 1)
    for index in track(places, "stamping prompts", len(places)):
        task = tasks[index]
        content = [task.id, task.prompt, task.text, dict(task.columns)]
        # Appended only where there is one: fingerprints of runs without answers stay what they were.
        content += [task.response, task.mask] if task.response else []
        content += [task.contrast, task.contrast_mask] if task.contrast else []
        digest.update(json.dumps(content, sort_keys=True, default=str).encode(errors="backslashreplace"))
    return digest.hexdigest()


@dataclass(frozen=True)
class Question:
    """One question, not yet rendered.

    Attributes:
        id: Stable and unique within its set.
        content: What is rendered: text, or chat messages; () for a text that is trained on and asks nothing.
        text: What a person reads and what two questions are compared by; without suffix, system prompt and template.
        columns: Everything else that a reward may look at.
        further: What the row gives its prompt beside it.
        turns: What follows the question in the dataset, from an assistant's message to an assistant's; () where a row
            has none, or where they are not read.
        rejected: The same of the answer that ``turns`` is preferred to; () where a row has none.
        is_desired: Whether the row's label says that its answer is good; true without a label.
    """

    id: str
    content: Content
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    further: Further = Further()
    turns: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    is_desired: bool = True

    @property
    def answered(self) -> tuple[Message, ...]:
        """The turns, or the column ``answer`` as one; () where neither is there."""
        answer = answer_of(self.columns)
        is_text = isinstance(answer, str) and answer.strip() != ""
        return self.turns or (({"role": "assistant", "content": answer},) if is_text else ())


class HasText(Protocol):
    """What a `Question` and a `Task` have in common: enough to compare and to filter."""

    @property
    def id(self) -> str:
        """Stable and unique within its set."""

    @property
    def text(self) -> str:
        """The question as a person reads it."""


Item = TypeVar("Item", bound=HasText)
ItemOut = TypeVar("ItemOut", bound=HasText, covariant=True)


class Dataset(Protocol[ItemOut]):
    """A finite, indexable, deterministic set of questions or of tasks."""

    @property
    def name(self) -> str:
        """What it is called in messages and metrics."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int, /) -> ItemOut:
        """Return the one at ``index``; the same index always gives the same one. IndexError past the end."""


QuestionSet = Dataset[Question]


@dataclass(frozen=True)
class ListDataset:
    """Questions that are held in memory.

    Attributes:
        repeated: Which ask what an earlier one asks, in words; "" for none.

    >>> ListDataset("two", (Question("a", "1+1=", "1+1="), Question("b", "2+2=", "2+2=")))[1].id
    'b'
    """

    name: str
    questions: tuple[Question, ...]
    repeated: str = ""

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]


@dataclass(frozen=True)
class TokenizedDataset:
    """A set of questions as a `TaskSet`; a prompt is rendered when it is asked for.

    Rendering takes well under a millisecond. The tasks of a small set are kept, since checks, stamps and steps read
    each of them several times; of a large table the first 1,024 alone are, so that it costs no second copy as ids.

    Attributes:
        answers: Which of the dataset's answers tasks have too.
        hint: What the reference policy is asked in place of the question, `ReferencePolicy.prompt`; "" asks the same.
    """

    questions: QuestionSet
    renderer: Renderer
    answers: Answers = ""
    hint: str = ""
    _kept: dict[int, Task] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name of the questions."""
        return self.questions.name

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Task:
        if index not in self._kept:
            task = self._rendered(index)
            # Tasks are read in random order, so a cache of the most recent ones of a large table would rarely hit.
            if len(self._kept) >= _KEPT:
                return task
            self._kept[index] = task
        return self._kept[index]

    def _rendered(self, index: int) -> Task:
        question = self.questions[index]
        further = replace(question.further, where=f"{self.name}: question '{question.id}'")
        messages = question.content if isinstance(question.content, tuple) else ()
        hint = self._hint(question, further)
        if self.answers:
            tail = self.answers == "pairs"
            rendered = self.renderer.conversation(question.content, question.answered, further, tail)
            task = Task(question.id, rendered.prompt, question.text, question.columns, messages, *rendered.answer, hint)
            if self.answers == "data":
                return task
            turns = question.rejected
            rewards: tuple[float | None, ...] = (1.0, 0.0)
            if self.answers == "labels":
                # KTO's reference point needs an answer that does not belong to the question: the
                # one half the set away is another row for every index, as long as there are two.
                turns = self.questions[(index + len(self) // 2) % len(self)].answered
                rewards = (1.0 if question.is_desired else -1.0, None)
            other = self.renderer.conversation(question.content, turns, further, tail)
            return replace(task, contrast=other.response, contrast_mask=other.mask, given_rewards=rewards)
        prompt = self.renderer(question.content, further)
        own = further.switches
        return Task(question.id, prompt, question.text, question.columns, messages, hint=hint, switches=own)

    def _hint(self, question: Question, further: Further) -> tuple[tuple[int, ...], ...]:
        if not self.hint:
            return ()
        try:
            shown = Wording(template=self.hint).around(question.content, {"sibling": _SIBLING, **question.columns})
        except KeyError as error:
            raise DatasetError(
                f"{further.where}: algorithm.reference.prompt names {{{error.args[0]}}}, and the row has "
                f"{', '.join(question.columns) or 'no further column'}"
            ) from error
        return self.renderer.pieces(shown, further, _SIBLING)


def one_answer_each(asked: QuestionSet, renderer: Renderer) -> tuple[QuestionSet, str]:
    """Return questions whose answers the chat template can write in one text, and what was changed for it, in words.

    A conversation of several answers that it cannot becomes a question for each of them, with what stands before the
    answer as its prompt: that is how a model is asked for it.

    Returns:
        The questions, and a sentence; the same questions and "" where no conversation is changed.
    """
    made: list[Question] = []
    changed = 0
    for number in track(range(len(asked)), f"looking at the answers of {asked.name}", len(asked)):
        question = asked[number]
        places = [place for place, turn in enumerate(question.turns) if turn["role"] == "assistant"]
        further = replace(question.further, where=f"{asked.name}: question '{question.id}'")
        # One answer is always written as the model is asked for it.
        if len(places) < 2 or renderer.is_one_text(question.content, question.turns, further):
            made.append(question)
            continue
        changed += 1
        before = question.content
        before = ({"role": "user", "content": before},) if isinstance(before, str) else before
        for place in places:
            content, turns = (*before, *question.turns[:place]), question.turns[place : place + 1]
            made.append(replace(question, id=f"{question.id}/{place + 1}", content=content, turns=turns))
    if not changed:
        return asked, ""
    said = (
        f"{changed:,} of {len(asked):,} rows of '{asked.name}' become {len(made) - len(asked) + changed:,}, one for "
        "each answer: the model's chat template writes an earlier answer otherwise than the last (no thought), and "
        "each is trained on as the model is asked for it"
    )
    return ListDataset(asked.name, tuple(made)), said


def comparison_key(text: str) -> str:
    r"""Return what two wordings of one question share: whitespace-normalized, case-folded text.

    >>> comparison_key("  What is\n2 + 2? ") == comparison_key("what IS 2 + 2?")
    True
    """
    return " ".join(text.split()).casefold()


def digest(*parts: Any) -> str:
    """Return 12 hexadecimal digits that depend on the JSON form of ``parts`` alone."""
    text = json.dumps(parts, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=6).hexdigest()
