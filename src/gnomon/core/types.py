"""The types that rooms hand to each other: task, completion, rollout, group, batch, snapshot.

Axes, everywhere: **B** sequences of a batch (all groups together), **T** response positions (padded
right), **S** positions of the whole sequence (prompt, then response, padded right), **G** rollouts of
one task. Log-probabilities are natural logarithms. `mask` is true where *the policy chose the token*.

Four policies, four names: *behavior* (the engine that sampled), *proximal* (the learner when the step
began), *reference* (frozen), *current* (the one with a gradient).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gnomon.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

StopReason = Literal["stop", "length"]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """One question: what is asked, and everything that a reward may look at.

    Attributes:
        id: Stable and unique within its task set; trackers and checkpoints are keyed by it.
        prompt: Token ids, the chat template already applied.
        text: The question as a person reads it, without template.
        columns: The dataset's other columns by name (``answer``, ``data_source``, ``entry``, ...); JSON values.
        messages: The question as the dataset holds it, where that is chat messages; () where it is text.
        response: Every token after the prompt of the dataset's own answer, for supervised fine-tuning; else ().
        mask: True for the tokens of ``response`` that an assistant wrote.
        hint: Token ids of what the reference policy is asked instead, in pieces: between them stands another answer of
            the group. () asks it the same.
        contrast: As ``response``, of the answer that it is compared with, such as a rejected one; () for none.
        contrast_mask: As ``mask``, of that answer.
        given_rewards: Rewards of the dataset's answers, None for one that says nothing of its question.
        switches: The row's own variables of the chat template, which every turn of a conversation is written with.
    """

    id: str
    prompt: tuple[int, ...]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    response: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    hint: tuple[tuple[int, ...], ...] = ()
    contrast: tuple[int, ...] = ()
    contrast_mask: tuple[bool, ...] = ()
    given_rewards: tuple[float | None, ...] = (1.0,)
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the prompt with the longer of the dataset's answers."""
        return len(self.prompt) + max(len(self.response), len(self.contrast))


def answer_of(columns: Mapping[str, Any]) -> Any:
    """Return the column ``answer``, a number as its text, so that 7 and "7" are one answer."""
    answer = columns.get("answer")
    return str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer


def role_of(task: Task) -> str:
    """Return who the policy is in a task: its column ``role``, "" without a text there."""
    role = task.columns.get("role", "")
    return role if isinstance(role, str) else ""


class TopLogprobs(NamedTuple):
    """The likeliest tokens of the distribution that each token of a response was drawn from.

    Attributes:
        tokens: Int32[T N], different ones in a row; N is the vocabulary where all were asked for.
        logprobs: Float32[T N], in nats, of the tempered distribution.
    """

    tokens: "Tensor"
    logprobs: "Tensor"


@dataclass(frozen=True)
class Completion:
    """One answer of an engine.

    Attributes:
        tokens: The sampled ids, the stop token included when one was sampled.
        logprobs: Log-probability of each token, in nats, under the distribution that it was sampled from (temperature
            and truncation applied; temperature 1 of a greedy answer).
        full_logprobs: Log-probability of each token under the temperature-scaled policy *without* truncation; equal to
            ``logprobs`` when top-p, top-k and min-p are off.
        oldest_version, newest_version: The weights that sampled the first and the last token.
        stop: "stop" when a stop token was sampled, "length" when the budget ended first.
        routing: Int16[S L K], the experts that each of L mixture layers chose for each position of prompt and response;
            -1 where none was recorded (the last position: nothing was asked of it). None unless it was asked for.
        top: A row for each token. None unless it was asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    full_logprobs: tuple[float, ...]
    oldest_version: int
    newest_version: int
    stop: StopReason
    routing: "Tensor | None" = None
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class Grade:
    """A verdict: a reward, or an error that is neither a zero nor trained on.

    Attributes:
        reward: The weighted, shaped sum; ``None`` when ``error`` is set, and where nothing judged.
        parts: Each component's own value before weighting, by name.
        error: What went wrong, in one line.
        answer: What was answered, as the first reward's verifier writes it: equal answers have equal texts, so that
            samples can vote. None when no answer was given.
        is_judged: False for the dataset's own answer as it is recorded: it has neither a reward nor an error.
    """

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    answer: str | None = None
    is_judged: bool = True

    def __post_init__(self) -> None:
        if self.is_judged and (self.reward is None) == (self.error is None):
            raise ConfigError(f"a Grade has either a reward or an error, got reward={self.reward}, error={self.error}")


OVERLONG = "overlong"
"""Name of the part of a grade that is the algorithm's penalty for a long response."""
GIVEN = -1
"""Version of a response that no weights of the run sampled: the dataset's own, or one that a user gave."""

EndedBy = Literal["done", "turns", "tokens", "timeout", "flood", "fault"]


@dataclass(frozen=True)
class Ending:
    """How a conversation of several turns ended.

    Attributes:
        turns: Number of answers of the policy.
        by: "done" by the environment or by an answer without a tool call; "turns" or "tokens" when that budget was
            spent; "timeout", "flood" or "fault" when a reply took too long, was too long, or failed.
        cause: One line about the last three.
    """

    turns: int
    by: EndedBy
    cause: str | None = None

    @property
    def is_budget(self) -> bool:
        """Whether a budget cut it off, so that it might have gone on; what failed is an end."""
        return self.by in ("turns", "tokens")


@dataclass(frozen=True)
class Rollout:
    """One graded answer to one task, or one conversation about it.

    Attributes:
        response: Every token after the first prompt.
        mask: True where the policy chose the token.
        logprobs, full_logprobs: As in `Completion`, 0.0 where ``mask`` is false.
        routing: As in `Completion`.
        top: As in `Completion`, zeros where ``mask`` is false.
        text: The response decoded, for verifiers and people.
        oldest_version, newest_version: As in `Completion`; `GIVEN` for a response that was not sampled, whose
            log-probabilities are zeros.
        stop: "length" when a budget of turns or tokens cut the response off, else "stop".
        ending: How a conversation ended; None for a single answer.
        turn_ends: After how many tokens of the response each answer of a conversation ends; () for a single answer.
        turn_rewards: What each of these answers earned of the reward; they add up to it. Without a verdict, what the
            environment gave.
        turn_seconds: Seconds of wall time from the question for each of them to its reply; () where none was measured.
        role: The name that an agent called the policy by for this segment; "" where it named none.
        segments: The further segments of an agent's rollout, each with a prompt of its own and the same grade.
    """

    task_id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    full_logprobs: tuple[float, ...]
    text: str
    grade: Grade
    oldest_version: int
    newest_version: int
    stop: StopReason
    routing: "Tensor | None" = None
    ending: Ending | None = None
    top: TopLogprobs | None = None
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    turn_seconds: tuple[float, ...] = field(default=(), compare=False)
    role: str = ""
    segments: "tuple[Rollout, ...]" = ()

    @property
    def rows(self) -> "tuple[Rollout, ...]":
        """Its segments, itself first: the rows that it has in a batch."""
        return (self, *self.segments)

    @property
    def length(self) -> int:
        """Tokens of all its segments, each behind its own prompt."""
        return sum(len(row.response) for row in self.rows)

    @property
    def is_truncated(self) -> bool:
        """Whether a budget ended the response."""
        return self.stop == "length"


@dataclass(frozen=True)
class Group:
    """All rollouts of one visit to one task; never split between shards or steps.

    Attributes:
        is_by_role: Whether each rollout was paid for the part of its ``role`` alone, so that those of one role compare.
    """

    task: Task
    rollouts: "tuple[Rollout, ...]"
    is_by_role: bool = False

    @property
    def by_role(self) -> "tuple[Group, ...]":
        """Itself, or a group for each role, which the task's column ``role`` then names."""
        if not self.is_by_role:
            return (self,)
        played: dict[str, list[Rollout]] = {}
        for rollout in self.rollouts:
            played.setdefault(rollout.role, []).append(rollout)
        task = self.task
        return tuple(
            Group(replace(task, columns={**task.columns, "role": role}), tuple(own)) for role, own in played.items()
        )

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of those that could be graded."""
        return tuple(r.grade.reward for r in self.rollouts if r.grade.reward is not None)

    @property
    def sampled(self) -> "Group":
        """The group without the rollouts that were given to it; itself where all were."""
        own = tuple(r for r in self.rollouts if r.oldest_version != GIVEN)
        return replace(self, rollouts=own) if 0 < len(own) < len(self.rollouts) else self

    @property
    def is_degenerate(self) -> bool:
        """Whether all graded rewards are equal, so that no group baseline can tell the rollouts apart."""
        return len(set(self.rewards)) <= 1


_AXES: Mapping[str, str] = {
    "tokens": "B S", "prompt_lengths": "B", "lengths": "B", "mask": "B T", "rewards": "B", "is_graded": "B",
    "is_truncated": "B", "group": "B", "version": "B", "behavior": "B T", "full_behavior": "B T",
    "baseline": "B", "bootstrap": "B", "routing": "B S L K",
    "free_routing": "B S L K", "hints": "B P", "hint_lengths": "B", "top_tokens": "B T N", "top_logprobs": "B T N",
    "proximal": "B T", "sharpened": "B T", "reference": "B T", "values": "B T", "advantages": "B T",
    "returns": "B T", "weights": "B T",
    "component_rewards": "B C", "turn": "B T", "step_rewards": "B T", "state": "B T", "teacher": "B T",
    "rollout_id": "B",
}  # fmt: skip
TOKEN_FIELDS = tuple(name for name, axes in _AXES.items() if axes.startswith("B T"))
"""Fields of a `Batch` that hold something for each response token."""
SEQUENCE_FIELDS = tuple(name for name, axes in _AXES.items() if axes.startswith("B S"))
"""Those that hold something for each token of prompt and response."""
_ROW_TEXTS = ("task_ids", "role")


@dataclass(frozen=True)
class Batch:
    """Graded groups as tensors: small `[B, T]` matrices on which all statistics are computed before any cut.

    Attributes:
        tokens (Int[B S]): Prompt, then response, padded right with 0.
        prompt_lengths, lengths (Int[B]): Where the response starts and ends.
        mask (Bool[B T]): Tokens to train; false for padding, tool output, errored rollouts, filtered sequences.
        rewards (Float[B]): Shaped outcome; 0 where ``is_graded`` is false.
        is_graded (Bool[B]): False for errors, which enter no statistic and no loss.
        group (Int[B]): Rows with one number answer one task.
        version (Int[B]): Weights of the oldest token.
        behavior (Float[B T]): Log-probability under the sampling distribution, in nats.
        full_behavior (Float[B T]): Log-probability under the tempered distribution without truncation.
        temperature: Temperature of the sampler; every policy is scored at it.
        task_ids: B texts, the task that each row answers; they follow the rows through every cut. () where a batch was
            made without tasks.
        baseline (Float[B]): Tracked value of the task, read before this batch was observed.
        routing (Int[B S L K]): Experts of the policy whose routing is replayed, -1 where none is; None replays nothing.
        free_routing (Int[B S L K]): Experts of the proximal policy where nothing is replayed, to compare with.
        hints, hint_lengths (Int[B P], Int[B]): What the reference policy is asked in place of the prompt, and its
            tokens, 0 for a row of which it is asked nothing. None where it is asked the same.
        top_tokens, top_logprobs (Int[B T N], Float[B T N]): The likeliest tokens of behavior, or of the reference, as
            in `TopLogprobs`; None unless the algorithm reads them.
        proximal, reference (Float[B T]): Log-probabilities of these policies, filled by scoring.
        sharpened (Float[B T]): That of proximal at half the temperature, where each probability p is p^2 / sum p^2.
        values (Float[B T]): Value of the state *before* each token, filled by scoring.
        bootstrap (Float[B]): Value of the state after the last token, filled by scoring.
        advantages, returns (Float[B T]): Filled by `Algorithm.prepare`.
        weights (Float[B T]): Weights of the policy loss, filled by `Algorithm.minibatches`.
        component_rewards (Float[B C]): Each reward by itself, before its weight; NaN where one did not apply. None:
            only the sum is known.
        components, component_weights: The C rewards' names, and the factors with which they enter the sum.
        turn (Int[B T]): Which answer of the policy a token belongs to, from 0; a reply belongs to the answer after it.
        step_rewards (Float[B T]): The reward where it was earned, on the last trained token of an answer. Over a
            rollout's tokens they add up to its reward. None: all of it is earned at the end.
        state (Int[B T]): The state that the token's answer was given in; equal numbers within a group are one state.
        role: B texts, who the policy was in each row (the player of a game); () where nobody is told apart.
        teacher (Float[B T]): Log-probability of each token under the teacher, in nats.
        rollout_id (Int[B]): Rows of one number are the segments of one rollout, in order: each has a prompt of its own,
            and the rollout's reward. None: every row is a rollout.
        own_weights: Weights Float[B T] of each regularizer by its name, filled by `Algorithm.minibatches`.

    Raises:
        ConfigError: A shape does not fit, or ``task_ids``, ``role`` or the components' names have another length. The
            message names the field, its shape and the axes that are already bound.
    """

    tokens: "Tensor"
    prompt_lengths: "Tensor"
    lengths: "Tensor"
    mask: "Tensor"
    rewards: "Tensor"
    is_graded: "Tensor"
    is_truncated: "Tensor"
    group: "Tensor"
    version: "Tensor"
    behavior: "Tensor"
    full_behavior: "Tensor"
    temperature: float = 1.0
    task_ids: tuple[str, ...] = ()
    baseline: "Tensor | None" = None
    bootstrap: "Tensor | None" = None
    routing: "Tensor | None" = None
    free_routing: "Tensor | None" = None
    hints: "Tensor | None" = None
    hint_lengths: "Tensor | None" = None
    top_tokens: "Tensor | None" = None
    top_logprobs: "Tensor | None" = None
    proximal: "Tensor | None" = None
    sharpened: "Tensor | None" = None
    reference: "Tensor | None" = None
    values: "Tensor | None" = None
    advantages: "Tensor | None" = None
    returns: "Tensor | None" = None
    weights: "Tensor | None" = None
    component_rewards: "Tensor | None" = None
    components: tuple[str, ...] = ()
    component_weights: tuple[float, ...] = ()
    turn: "Tensor | None" = None
    step_rewards: "Tensor | None" = None
    state: "Tensor | None" = None
    role: tuple[str, ...] = ()
    teacher: "Tensor | None" = None
    rollout_id: "Tensor | None" = None
    own_weights: "Mapping[str, Tensor]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        bound: dict[str, int] = {}
        # The first field binds an axis, all others must agree: one pass over all fields finds any two that do not fit.
        for name, axes in _AXES.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                _bind(name, tensor, axes.split(), bound)
        for name, tensor in self.own_weights.items():
            _bind(f"own_weights[{name!r}]", tensor, ["B", "T"], bound)
        counts = {name: (len(getattr(self, name)), len(self), "row") for name in _ROW_TEXTS if getattr(self, name)}
        columns = 0 if self.component_rewards is None else int(self.component_rewards.shape[1])
        for name in ("components", "component_weights"):
            counts[name] = (len(getattr(self, name)), columns, "column of component_rewards")
        for name, (found, wanted, what) in counts.items():
            if found != wanted:
                raise ConfigError(f"Batch.{name} has {found} entries, expected {wanted}, one for each {what}")

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """T, the number of response positions."""
        return int(self.mask.shape[1])

    @property
    def is_given(self) -> "Tensor":
        """Bool[B]: rows that nobody sampled."""
        return self.version == GIVEN

    @property
    def is_taught(self) -> "Tensor":
        """Bool[B]: rows of which the reference policy has something to say."""
        return self.is_graded | True if self.hint_lengths is None else self.hint_lengths > 0

    def rows(self, index: "Tensor | Sequence[int]") -> "Batch":
        """Return the batch of the rows at ``index``, in that order, every field cut alike."""
        import torch

        where = torch.as_tensor(index, dtype=torch.long)
        # From the table of axes and not by hand: a field that is forgotten here would keep its old rows, silently.
        cut: dict[str, Any] = {n: getattr(self, n)[where] for n in _AXES if getattr(self, n) is not None}
        own = {name: tensor[where] for name, tensor in self.own_weights.items()}
        cut |= {n: tuple(getattr(self, n)[row] for row in where.tolist()) for n in _ROW_TEXTS if getattr(self, n)}
        return replace(self, **cut, own_weights=own)

    def with_fields(self, **changes: Any) -> "Batch":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


def _bind(name: str, tensor: "Tensor", axes: list[str], bound: dict[str, int]) -> None:
    fits = tensor.ndim == len(axes) and all(bound.get(a, n) == n for a, n in zip(axes, tensor.shape, strict=True))
    if not fits:
        raise ConfigError(
            f"Batch.{name} has shape {tuple(tensor.shape)}, expected [{', '.join(axes)}] "
            f"with {bound or 'nothing bound yet'}"
        )
    bound.update(zip(axes, tensor.shape, strict=True))


@dataclass(frozen=True)
class Scores:
    """What a learner says about a batch; fields are as in `Batch`, None where they were not asked for."""

    proximal: "Tensor | None" = None
    sharpened: "Tensor | None" = None
    reference: "Tensor | None" = None
    values: "Tensor | None" = None
    bootstrap: "Tensor | None" = None
    routing: "Tensor | None" = None
    free_routing: "Tensor | None" = None
    top_tokens: "Tensor | None" = None
    top_logprobs: "Tensor | None" = None

    def into(self, batch: "Batch") -> "Batch":
        """Return ``batch`` with the fields that were scored."""
        scored = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return batch.with_fields(**scored)


@dataclass(frozen=True)
class Adapted:
    """A weight that adapters changed: base + scale * up @ down, which `models.merging.merged` makes one tensor of.

    Attributes:
        base: [outputs, inputs], or [inputs, outputs] where ``is_transposed``.
        up: [outputs, rank].
        down: [rank, inputs].
    """

    base: "Tensor"
    up: "Tensor"
    down: "Tensor"
    scale: float
    is_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weight once it is merged."""
        return self.base.nbytes


@dataclass(frozen=True)
class Snapshot:
    """Weights on their way to an engine.

    Attributes:
        version: Number of published updates.
        tensors: Yields ``(name, tensor)``, in the names of the Hugging Face model.
        stored: Returns where they lie for engines of other machines, a `models.transfer.remote_weights` reference;
            reading ``tensors`` would bring them here first. None where they lie here.
        since: Version of weights that the engine holds; only tensors that differ from it come. None: all come.
        parts: Yields the same weights, those with adapters not merged; None where nothing is merged, or more is done to
            it.
    """

    version: int
    tensors: "Callable[[], Iterator[tuple[str, Tensor]]]"
    stored: Callable[[], Any] | None = None
    since: int | None = None
    parts: "Callable[[], Iterator[tuple[str, Tensor | Adapted]]] | None" = None


class Loan:
    """A tensor that another thread may read until its owner changes it, and a copy of it from then on.

    The owner calls `recall` before the tensor changes. A reader looks at the tensor within `reading` alone, and
    briefly, since the owner waits that long. The reader calls `end` after it has read everything.

    Args:
        start: Row of a whole that it begins with, where it is a share; None: it is the whole.
        is_copy: The tensor is a copy already, which nobody changes.
    """

    def __init__(self, tensor: "Tensor", start: int | None = None, is_copy: bool = False) -> None:
        self._is_copy = is_copy
        self.shape, self.dtype, self.nbytes, self.start = tensor.shape, tensor.dtype, tensor.nbytes, start
        self._lock = threading.Lock()
        self._tensor: Tensor | None = tensor

    @contextmanager
    def reading(self) -> "Iterator[Tensor]":
        """Lend the tensor, with the numbers that it was lent with, for the block."""
        with self._lock:
            assert self._tensor is not None, "reading a tensor that was given back"
            yield self._tensor

    def recall(self) -> None:
        """Put a copy in the tensor's place, unless everything was read."""
        with self._lock:
            # The copy holds the numbers that were lent; the owner changes the original afterwards.
            self._tensor = self._tensor if self._tensor is None or self._is_copy else self._tensor.clone()

    def end(self) -> None:
        """Give the tensor back."""
        with self._lock:
            self._tensor = None


@dataclass(frozen=True)
class Shares:
    """Tensors that several other processes hold, a share each.

    Attributes:
        nbytes: Bytes of all shares.
        write: Writes them into a folder, a file each process, and returns the XXH3 of each file.
    """

    nbytes: int
    write: Callable[[Path], Mapping[Path, str]]


@dataclass(frozen=True)
class State:
    """What a part must find again to go on as if nothing had happened: tensors, and JSON values.

    Attributes:
        lent: More tensors, not copied yet; never in a state that a part goes on from.
        shares: Tensors that are elsewhere, in the place of those here; never in such a state either.
    """

    tensors: "Mapping[str, Tensor]" = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    lent: Mapping[str, Loan] = field(default_factory=dict)
    shares: Shares | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        elsewhere = 0 if self.shares is None else self.shares.nbytes
        return elsewhere + sum(tensor.nbytes for tensors in (self.tensors, self.lent) for tensor in tensors.values())


class Stateful(Protocol):
    """A part of a run that changes from step to step, and is therefore saved with every checkpoint."""

    def state(self) -> State:
        """Return everything that later behavior depends on."""

    def restore(self, state: State) -> None:
        """Become the part that returned ``state``."""
