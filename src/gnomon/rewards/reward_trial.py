"""Every reward function is called on made answers to real questions before a model loads, where it will be called."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gnomon.core.errors import RewardError
from gnomon.core.processes.client import ExitReason, ForkServer, Limits
from gnomon.core.processes.server import Channel
from gnomon.rewards.base import Sample, Verdict
from gnomon.rewards.function import NO_COLUMN, UserFunction
from gnomon.rewards.grading import NOTHING, Grading, WeightedReward
from gnomon.rewards.grading_worker import from_sample, grading_program, to_verdict

EMPTY, PLAIN = "", "I do not know."
# Each request that hangs costs a whole deadline, so it is not made again; after three others, of which the first
# question's own answer is one, the rest counts as late without being asked.
_MOST_HUNG = 3
_TRIES = 3
"""Workers that are asked one question, where what ends them is not the reward."""


@dataclass(frozen=True)
class Trial:
    """What one reward said to made answers. together: of the answers to a question at once. joint: whether it is so."""

    tried: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]
    alone: tuple[Verdict, ...] = ()

    @property
    def failures(self) -> list[tuple[Sample, str]]:
        """Answers that could not be judged, and why; one to which the reward does not apply is none."""
        found = zip(self.tried, self.verdicts, strict=False)
        return [(s, v.error) for s, v in found if v.error is not None and v.error != NOTHING]

    @property
    def rewards(self) -> list[float]:
        """What the others earn."""
        return [v.reward for v in self.verdicts if v.reward is not None]

    @property
    def is_hopeless(self) -> bool:
        """Whether no answer could be judged."""
        return bool(self.failures) and not self.rewards

    @property
    def discriminates(self) -> bool:
        """Whether some answers earn more than others."""
        return len(set(self.rewards)) > 1

    @property
    def compares(self) -> bool:
        """Whether answers earn something else beside others than alone."""
        pairs = zip(self.verdicts, self.alone, strict=False)
        return any(one.reward is not None and two.reward is not None and one.reward != two.reward for one, two in pairs)


def made_answers(prompt: str, columns: Mapping[str, Any], messages: tuple[Mapping[str, Any], ...]) -> list[Sample]:
    """Return answers to a question: nothing, a plain one, and the row's own where it has one."""
    gold = columns.get("answer")
    texts = [EMPTY, PLAIN, *([str(gold)] if isinstance(gold, str | int | float) else [])]
    return [Sample(prompt, text, len(text), False, 64, columns, number, messages) for number, text in enumerate(texts)]


def try_rewards(
    grading: Grading, limits: Limits, questions: Sequence[Sequence[Sample]], rows: Sequence[str] = ()
) -> tuple[str, ...]:
    """Import all rewards and call each function of the user's on made answers, in a process that can be killed.

    Args:
        questions: Answers to each of a few.
        rows: Where the last of these stand, in words, of rows with fewer columns.

    Returns:
        What should be said of them, a sentence each.

    Raises:
        RewardError: If a reward cannot be found or imported, can judge none of the answers, or needs a column that a
            row lacks.
    """
    if not grading.imports:
        return ()
    with _bench(grading, limits, questions, rows) as bench:
        return tuple(
            note
            for number, reward in enumerate(grading.rewards)
            if isinstance(reward.verifier, UserFunction) and questions
            for note in _notes(bench, number, reward, len(grading.rewards) == 1)
        )


def _notes(bench: "_Bench", number: int, reward: WeightedReward, is_only: bool) -> Iterator[str]:
    """Yield what should be said of one reward.

    Raises:
        RewardError: If it fails, or gives every made answer the same.
    """
    found, questions = bench.tried(number), bench.questions
    function = reward.verifier
    assert isinstance(function, UserFunction), "the others are gnomon's"
    named = f"reward '{reward.part}' ({function.function})"
    is_chat = all(sample.messages for answers in questions for sample in answers)
    if found.is_hopeless:
        lacks = NO_COLUMN in found.failures[0][1]
        column = "name a column that the rows have, or give the parameter a default value"
        raise RewardError(_hopeless(named, found, column if lacks else _other_form(bench, number)))
    if is_only and not found.rewards:
        raise RewardError(
            f"{named} returned None for each of the {len(found.tried)} answers that were tried, and it is the only "
            "reward: nothing would be trained; return a number where it applies"
        )
    # A reward that was written for TRL reads completion[0]["content"] or text, depending
    # on its dataset. Given the other form it may judge all answers alike without raising.
    if found.alone and function.messages == "auto":
        given, other = ("messages", "text") if is_chat else ("text", "messages")
        if found.rewards and not found.discriminates and bench.tried(number, messages=not is_chat).discriminates:
            raise RewardError(
                f"{named} is given {given}, as TRL gives it for a dataset of {given}, and tells no answer from another "
                f"({found.rewards[0]:g} for each that was tried); given {other} it does: set messages = "
                f"{str(not is_chat).lower()}, or messages = {str(is_chat).lower()} if it should have {given}"
            )
        if is_chat:
            yield f"{named} is given messages, as TRL gives them, because the dataset's prompts are messages"
    # A format reward rightly gives 0 to a bare answer, so this is a note and no error.
    if set(found.rewards) == {0.0} and any(s.completion == str(s.columns.get("answer")) for s in found.tried):
        yield (
            f"{named} gives 0 to each of the {len(found.rewards)} answers that were tried, the rows' own among them; "
            "that is right for a form of answers alone"
        )
    # Asked twice with the same seed, so what differs is state that
    # the function keeps or randomness that no seed reaches.
    if bench.wavers(number):
        yield f"{named} gives one answer two rewards when asked twice: what it draws or keeps is noise to learn from"
    if found.compares:
        yield (
            f"{named} scores an answer by those beside it: it is given all answers to a question at once, in training "
            "algorithm.num_generations of them, in an evaluation evaluation.samples"
        )
    of_rows = list(_of_sparse_rows(bench, named, found))
    yield from of_rows
    if found.failures and not of_rows:
        sample, error = found.failures[0]
        yield (
            f"{named} fails on {len(found.failures)} of {len(found.tried)} answers that were tried, such as "
            f"{sample.completion!r}: {error}; an answer like that is an error, which is neither a zero nor trained on"
        )


def _of_sparse_rows(bench: "_Bench", named: str, found: Trial) -> Iterator[str]:
    """Yield what should be said of rows with fewer columns.

    Raises:
        RewardError: If one lacks what is needed.
    """
    failed = {id(sample): error for sample, error in found.failures}
    for row, answers in zip(bench.rows, bench.questions[len(bench.questions) - len(bench.rows) :], strict=True):
        errors = [failed[id(sample)] for sample in answers if id(sample) in failed]
        if len(errors) < len(answers):
            continue
        if NO_COLUMN in errors[0]:
            raise RewardError(
                f"{named} cannot judge {row}: {errors[0]}\n"
                "correct these rows, leave them out, or give the parameter a default value"
            )
        yield f"{named} fails on each answer that was tried to {row}: {errors[0]}"


def _hopeless(named: str, found: Trial, instead: str) -> str:
    sample, error = found.failures[0]
    asked = " ".join(sample.prompt.split())[:60]
    return (
        f"{named} fails on each of the {len(found.failures)} answers that were tried: {error}\n"
        f"the first was {sample.completion!r} to {asked!r}, with the columns "
        f"{', '.join(sorted(map(str, sample.columns))) or 'none'}\n{instead}"
    )


def _other_form(bench: "_Bench", number: int) -> str:
    """Return what to type: the other form of completions where the function can read that."""
    for messages in (True, False):
        if not bench.tried(number, messages).is_hopeless:
            form = 'messages, [{"role": "assistant", "content": ...}]' if messages else "text"
            return (
                f"it can read completions that are {form}: set messages = {str(messages).lower()} beside its function"
            )
    return "fix the function: it returns one finite number (True is 1), in TRL's form a list of one for each completion"


@dataclass
class _Bench:
    """One worker that is asked, and another in its place when it dies or hangs."""

    fork_server: ForkServer
    seconds: float
    questions: Sequence[Sequence[Sample]]
    rows: Sequence[str] = ()
    hung: set[tuple[str, ...]] = field(default_factory=set)
    _worker: tuple[int, socket.socket, Channel] | None = field(default=None, init=False)

    def tried(self, number: int, messages: bool | None = None) -> Trial:
        """Return what one reward says to every answer, its weight left out; ``messages`` in place of its own."""
        verdicts: list[Verdict] = []
        alone: list[Verdict] = []
        only = {"trial": {"number": number, "messages": messages}}
        for answers in self.questions:
            fields = [from_sample(sample) for sample in answers]
            # Asked both ways: the difference shows whether the reward compares answers with each other.
            together = self.ask({**only, "samples": fields}, len(answers))
            each = [self.ask({**only, "sample": one}, 1)[0] for one in fields]
            verdicts += together or each
            alone += each if together else []
        return Trial(tuple(sample for answers in self.questions for sample in answers), tuple(verdicts), tuple(alone))

    def wavers(self, number: int) -> bool:
        """Whether the last answer to the first question earns something else when it is judged again."""
        sample = from_sample(self.questions[0][-1])
        one, other = (self.ask({"trial": {"number": number, "messages": None}, "sample": sample}, 1)[0] for _ in "ab")
        return one.reward is not None and other.reward is not None and one.reward != other.reward

    def ask(self, request: dict[str, Any], count: int) -> list[Verdict]:
        """Return ``count`` verdicts; none where a reward does not judge several at once."""
        said = self._asked(request, count)
        # A worker that was killed from outside says nothing about the reward.
        for _ in range(_TRIES - 1):
            if isinstance(said, ExitReason) and said.is_foreign:
                said = self._asked(request, count)
        if not isinstance(said, ExitReason):
            return said
        return [Verdict(None, error=f"its process {said.words}")] * count

    def _asked(self, request: dict[str, Any], count: int) -> list[Verdict] | ExitReason:
        late = Verdict(None, error=f"timed out after {self.seconds:g} s (grading.deadline_seconds)")
        texts = tuple(sample["completion"] for sample in request.get("samples") or [request["sample"]])
        if texts in self.hung or len(self.hung) >= _MOST_HUNG:
            return [late] * count
        try:
            channel = self._open(self.seconds * count)
            channel.send({"id": "trial", **request})
            said, _ = channel.receive()
        except TimeoutError:
            self.hung.add(texts)
            self.end()
            return [late] * count
        except (OSError, EOFError, ValueError):
            said = None
        if said is None:
            return self.end()
        return [to_verdict(fields) for fields in said.get("verdicts", [said])]

    def end(self) -> ExitReason:
        """End the worker; return how it ended."""
        if self._worker is None:
            return ExitReason("could not be started", is_foreign=True)
        pid, connection, _ = self._worker
        self._worker = None
        connection.close()
        return self.fork_server.end(pid)

    def _open(self, seconds: float) -> Channel:
        if self._worker is None:
            pid, connection = self.fork_server.fork()
            # The hello comes after all rewards are imported, which may take longer than one sample's deadline.
            connection.settimeout(Limits().start_seconds)
            channel = Channel(connection)
            hello, _ = channel.receive()
            self._worker = pid, connection, channel
            if hello is None:
                raise EOFError
            if hello["fault"] is not None:
                raise RewardError(hello["fault"])
        _, connection, channel = self._worker
        connection.settimeout(seconds + 0.5)
        return channel


@contextmanager
def _bench(
    grading: Grading, limits: Limits, questions: Sequence[Sequence[Sample]], rows: Sequence[str]
) -> Iterator[_Bench]:
    fork_server = ForkServer(grading_program(grading), limits)
    bench = _Bench(fork_server, limits.deadline_seconds, questions, rows)
    try:
        fork_server.open()
        yield bench
    finally:
        bench.end()
        fork_server.close()
