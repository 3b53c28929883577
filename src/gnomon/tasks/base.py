"""What is asked: sets of tasks, and the tokenizer seen from the tasks' side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.core.types import Message, Task

Content = str | tuple[Message, ...]


@dataclass(frozen=True)
class Further:
    """What a row gives its prompt beside the question.

    Attributes:
        where: Name of the row in messages.
        tools: JSON schemas for the chat template.
        switches: Further variables of the chat template, such as ``enable_thinking``.
    """

    where: str = "a prompt"
    tools: tuple[Mapping[str, Any], ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RenderedConversation:
    """A question with its answers as token ids.

    Attributes:
        prompt: The ids of the question, as the engine is asked.
        response: Every id after them.
        mask: True where an assistant wrote: its text, and the token that ends its turn.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]

    @property
    def answer(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Response and mask."""
        return self.response, self.mask


class Renderer(Protocol):
    """Turns what a dataset holds into prompt token ids; `tasks/chat.py` implements it over any tokenizer."""

    def __call__(self, question: str | Sequence[Message], further: Further, /) -> tuple[int, ...]:
        """Return the prompt's ids; text that looks like a control token stays text."""

    def conversation(
        self, question: str | Sequence[Message], turns: Sequence[Message], further: Further, with_tail: bool, /
    ) -> RenderedConversation:
        """Return the ids of the question, and of its answers as a model is to write them; ``with_tail`` with the rest
        of the template."""
        ...

    def is_one_text(self, question: str | Sequence[Message], turns: Sequence[Message], further: Further, /) -> bool:
        """Return whether every answer stands in one text as a model is asked for it, and `conversation` has it."""
        ...

    def pieces(self, question: str | Sequence[Message], further: Further, mark: str, /) -> tuple[tuple[int, ...], ...]:
        """Return the ids of the question in pieces, between which ``mark`` stands in it."""
        ...


class TaskSet(Protocol):
    """A finite, indexable, deterministic set of tasks: the same settings give the same tasks in one order."""

    @property
    def name(self) -> str:
        """What it is called in messages and metrics."""

    def __len__(self) -> int:
        """Return how many tasks there are."""

    def __getitem__(self, index: int, /) -> Task:
        """Return the task at ``index``; the same index always gives the same task."""
