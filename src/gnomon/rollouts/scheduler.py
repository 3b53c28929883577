"""The rollout scheduler: which prompts are asked when, synchronous or not, and the bound on staleness.

There are ``max_staleness + 1 - slack`` steps' worth of slots. A prompt takes one when it is asked, inside
`next_batch`, and it is free again at the `next_batch` after the one that its group left in, that is after the weights
trained from it were published. The clock counts these calls. What was asked at clock c leaves by clock
c + max_staleness, and between two calls the weights change once at most, so no token that is trained on is older than
``max_staleness`` steps: the bound is structural. Zero alternates between asking and training, a positive number
overlaps them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

from gnomon.core.errors import ConfigError
from gnomon.core.failpoints import failpoint
from gnomon.core.progress import show_progress
from gnomon.core.types import Batch, Group, State
from gnomon.rollouts.curriculum.base import Curriculum
from gnomon.rollouts.rollout import RolloutSource, RolloutTimer
from gnomon.tasks.base import TaskSet

# Places for prompts on their way, and which of them a step may take.

Status = Literal["asked", "kept", "refused", "given up"]

_ATTEMPT = 1 << 40
"""Added to a round's number for each further attempt, so that a task asked again in one round draws afresh."""


@dataclass(eq=False)
class InflightGroup:
    """One prompt on its way, or the group that it became and that waits for its step.

    Attributes:
        index: The task's index.
        number: The round that it was asked in; draws depend on it and on `place`.
        place: Its place in that round.
        attempt: How many prompts were refused in this place before.
        turn: Counts what was asked so far, so it orders groups.
        clock: The step that it was asked in.
        done_at: Seconds, of the process's clock.
        status: "asked"; "kept", finished and to be trained on; "refused" by the filter, to be asked again; "given up"
            after the last attempt, when the step that it was meant for is smaller.
    """

    index: int
    number: int
    place: int
    watch: RolloutTimer
    attempt: int = 0
    turn: int = 0
    clock: int = 0
    done_at: float = 0.0
    status: Status = "asked"
    group: Group | None = None
    answer: "asyncio.Future[None] | None" = field(default=None, repr=False)
    own_watch: RolloutTimer = field(default_factory=RolloutTimer, repr=False)

    @property
    def is_ready(self) -> bool:
        """Whether nothing more is to come."""
        return self.status in ("kept", "given up")


def round_of_draws(slot: InflightGroup, attempts: int, is_together: bool) -> int:
    """Return the round number that a slot's draws are keyed with.

    Refused prompts that are asked again together are different tasks, so the attempt tells them from those before.
    Asked again one by one, two places may get the same task, so each attempt of each place has a number of its own.
    """
    serial = slot.attempt
    if not is_together and slot.attempt:
        # Attempts 1 to A - 1 of place p have the serials p (A - 1) + 1 to (p + 1) (A - 1), which no other place has.
        serial += slot.place * (attempts - 1)
    return slot.number + serial * _ATTEMPT


def choose(
    slots: Sequence[InflightGroup], count: int, clock: int, bound: int, is_waiting: bool
) -> Sequence[InflightGroup] | None:
    """Return the slots that the step at ``clock`` trains on, or None when it must wait.

    The oldest ``count`` that are ready, for of all choices that leaves the others the most time.

    Args:
        is_waiting: Only if every other slot can still be trained on at ``bound`` steps after it was asked or earlier,
            ``count`` a step; otherwise someone would be too old in the end. That is earliest deadline first (Jackson
            1955), which meets all deadlines if anything does.
        slots: Its slots, in the order in which they were asked.
    """
    ready = [slot for slot in slots if slot.is_ready][:count]
    if len(ready) < count:
        return None
    chosen = set(ready)
    others = [slot for slot in slots if slot not in chosen]
    # If the others leave in order, ``count`` a step, the one at ``place`` leaves at the step clock + 1 + place //
    # count.
    is_late = any(slot.clock + bound < clock + 1 + place // count for place, slot in enumerate(others))
    return None if is_waiting and is_late else ready


class Fate(StrEnum):
    """What became of a rollout that no gradient came from; the values are words of recorded metrics.

    FILTERED: the group filter refused its group. LATE: its group was finished, and no step had room before it became
    too old. OFF_POLICY: its group was kept, and the staleness filter removed it after scoring. CANCELLED: it was
    withdrawn unfinished, because it would have become too old; what an engine had generated of it is not known.
    ERRORED: it has no reward, in a group that is trained on. IDLE: in such a group, with a reward and no gradient.
    """

    FILTERED = "refused"
    LATE = "surplus"
    OFF_POLICY = "distrusted"
    CANCELLED = "stale"
    ERRORED = "failed"
    IDLE = "idle"


@dataclass(frozen=True)
class RolloutBatch:
    """What one step trains on, and what else came to an end since the step before.

    Attributes:
        number: Number of the take, from 0.
        groups: Kept, in the order they were asked.
        filtered, late, off_policy: Finished groups that are not trained on, by their `Fate`.
        cancelled: Rollouts that never finished.
        wait_seconds: How long the step waited for groups.
        in_flight: Groups that stay behind and are not finished.
        finished: Groups that stay behind and are finished.
        ahead: Steps for which prompts were asked beside this one.
        is_refused: The filter refused every group; ``groups`` are such, and the step learns nothing of them.
        watch: The watch of the group that finished last.
    """

    number: int
    groups: tuple[Group, ...]
    filtered: tuple[Group, ...]
    watch: RolloutTimer
    late: tuple[Group, ...] = ()
    off_policy: tuple[Group, ...] = ()
    cancelled: int = 0
    wait_seconds: float = 0.0
    in_flight: int = 0
    finished: int = 0
    ahead: int = 0
    is_refused: bool = False

    @property
    def trained(self) -> tuple[Group, ...]:
        """The groups that the step learns from."""
        return () if self.is_refused else self.groups

    def taught(self, batch: Batch) -> Batch:
        """Return the batch of its groups with what is learned from: no token where the filter refused every group.

        Such rewards can have advantages all the same: equal in one part, or without a baseline to meet.
        """
        return batch.with_fields(mask=batch.mask.new_zeros(batch.mask.shape)) if self.is_refused else batch

    @property
    def refused(self) -> tuple[Group, ...]:
        """Every group that the filter refused."""
        return self.groups + self.filtered if self.is_refused else self.filtered

    @property
    def wasted(self) -> tuple[Group, ...]:
        """Every group that was generated and is not trained on."""
        return self.refused + self.late + self.off_policy

    @property
    def generated(self) -> tuple[Group, ...]:
        """Every group that was generated: each is in exactly one round of a run."""
        return self.trained + self.wasted


@dataclass
class RolloutScheduler:
    """Asks prompts ahead of training and hands out ``prompts_per_step`` finished groups a step. `Stateful`.

    Attributes:
        max_staleness: Largest staleness, in steps.
        stragglers: What is done about a group that is not finished when its time is over: "wait", or "drop" it and take
            another finished one instead, which no step waits for but which favors short answers.
        slack: Steps' worth of slots that stay empty, at most ``max_staleness``; may be changed between takes. With 0
            each step trains on what was asked ``max_staleness`` steps before. With 1 on what was asked one step later
            than that, as fresh as with a bound of one less, but a slow answer may be overtaken and come a step later.
        rest: What the engine does while a step trains, once all that was asked is answered: release its memory, or
            nothing. Grades of later steps may come meanwhile.
        is_kept: Which finished groups are trained on; the others' places are taken by other prompts, at most
            ``max_attempts`` prompts a place in all, after which the step is smaller; a step without any kept group
            learns nothing, and is counted. At staleness 0 refused prompts are replaced once
            all have answered, so that who is asked depends on no timing; above it at once.
    """

    curriculum: Curriculum
    tasks: TaskSet
    rollouter: RolloutSource
    prompts_per_step: int
    max_staleness: int = 0
    is_kept: Callable[[Group], bool] = lambda group: True
    max_attempts: int = 1
    stragglers: Literal["wait", "drop"] = "wait"
    slack: int = 0
    rest: Callable[[], Awaitable[None]] | None = None
    _slots: list[InflightGroup] = field(default_factory=list)
    _refused: list[tuple[int, Group]] = field(default_factory=list)
    _pending: list[InflightGroup] = field(default_factory=list)
    _next: int = 0
    _turn: int = 0
    _clock: int = -1
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ready: int = 0
    _left: int = 0  # answers that must end before a choice is possible

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 (synchronous) or more steps, got {self.max_staleness}")
        if not 0 <= self.slack <= self.max_staleness:
            raise ConfigError(f"slack must be from 0 to max_staleness = {self.max_staleness} steps, got {self.slack}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        answers = [slot.answer for slot in self._slots if slot.answer is not None]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        self._slots.clear()

    async def next_batch(self) -> RolloutBatch:
        """Ask until every slot is taken, and return what the step trains on as soon as that is finished.

        Raises:
            Exception: What asking raised.
        """
        self._clock += 1
        self._fill()
        began = time.perf_counter()
        with show_progress("answering", self.prompts_per_step, is_brief=True) as steps:
            answered = 0
            while (chosen := self._choose()) is None:
                # Looking at every slot after every answer would take the square of their number.
                self._ready = sum(slot.is_ready for slot in self._slots)
                asked = sum(slot.status == "asked" for slot in self._slots)
                self._left = max(1, min(self.prompts_per_step - self._ready, asked))
                while self._left > 0:
                    ready = min(self._ready, self.prompts_per_step)
                    steps.advance(ready - answered)
                    answered = ready
                    self._changed.clear()
                    await self._changed.wait()
        waited = time.perf_counter() - began
        if self.rest is not None:
            while any(self._lacks_answers(slot) for slot in self._slots):
                self._changed.clear()
                await self._changed.wait()
            await self.rest()
        # What the next call could hand out only too late leaves now, finished or not.
        expired = self._too_stale(chosen)
        gone = {*chosen, *expired}
        self._slots = [slot for slot in self._slots if slot not in gone]
        return self._round(chosen, expired, waited)

    def _fill(self) -> None:
        """Ask what a restored state had on its way, then new prompts, a round at a time."""
        # A restored prompt is asked again before new ones, so that it keeps its place in the order.
        for slot in self._pending:
            self._ask(slot)
        self._pending = []
        # The bound: prompts_per_step of these leave at each call, so none stays longer than max_staleness.
        most = (self.max_staleness + 1 - self.slack) * self.prompts_per_step
        while len(self._slots) < most:
            watch = RolloutTimer()
            # A round is at most a step's prompts, and all of its prompts share one timer.
            indices = self.curriculum.take(min(self.prompts_per_step, most - len(self._slots)))
            failpoint("ask")
            for place, index in enumerate(indices):
                self._ask(InflightGroup(index, self._next, place, watch))
            self._next += 1

    def _ask(self, slot: InflightGroup) -> None:
        """Ask a slot's prompt as the newest of all."""
        slot.turn, slot.clock, slot.status = self._turn, self._clock, "asked"
        slot.own_watch = RolloutTimer(step=slot.watch, told=self._changed.set)
        self._turn += 1
        self._slots.append(slot)
        slot.answer = asyncio.ensure_future(self._answer(slot))

    async def _answer(self, slot: InflightGroup) -> None:
        try:
            number = round_of_draws(slot, self.max_attempts, is_together=self.max_staleness == 0)
            group = await self.rollouter.run_group(self.tasks[slot.index], number, slot.own_watch)
            # In self-play each role is a group by itself; one that is informative keeps the whole.
            if any(self.is_kept(each) for each in group.by_role):
                slot.status, slot.group = "kept", group
            elif slot.attempt + 1 >= self.max_attempts:
                slot.status, slot.group = "given up", group
            else:
                slot.status = "refused"
                self._refused += [(slot.turn, each) for each in group.by_role]
                # Without staleness they are replaced together (`_choose`), so that no draw depends on timing.
                if self.max_staleness > 0:
                    self._ask_others([slot])
            self._ready += slot.is_ready
            self._left -= 1
        except BaseException:
            self._left = 0  # choosing raises it
            raise
        finally:
            slot.done_at = time.perf_counter()
            self._changed.set()

    def _lacks_answers(self, slot: InflightGroup) -> bool:
        is_under_way = slot.status == "asked" and slot.answer is not None and not slot.answer.done()
        return is_under_way and slot.own_watch.answers < self.rollouter.generations

    def _ask_others(self, slots: Sequence[InflightGroup]) -> None:
        """Ask other prompts in the places of refused ones."""
        for slot, index in zip(slots, self.curriculum.take(len(slots)), strict=True):
            # The slot moves to the end of the list: its new prompt is the newest of all.
            slot.index, slot.attempt = index, slot.attempt + 1
            self._slots.remove(slot)
            self._ask(slot)

    def _choose(self) -> Sequence[InflightGroup] | None:
        for slot in self._slots:
            if slot.answer is not None and slot.answer.done():
                # A failure of any prompt ends the wait, even if enough others are ready.
                slot.answer.result()  # raises what asking raised
        refused = [slot for slot in self._slots if slot.status == "refused"]
        if refused and all(slot.status != "asked" for slot in self._slots):
            self._ask_others(refused)
        is_waiting = self.stragglers == "wait"
        return choose(self._slots, self.prompts_per_step, self._clock, self.max_staleness, is_waiting)

    def _too_stale(self, chosen: Sequence[InflightGroup]) -> list[InflightGroup]:
        """Return the others that would be too old for the next step; those without an answer are withdrawn."""
        taken = set(chosen)
        # The next call is at clock + 1, with weights that are one version newer.
        late = [s for s in self._slots if s not in taken and s.clock + self.max_staleness <= self._clock]
        for slot in late:
            if slot.status == "asked" and slot.answer is not None:
                slot.answer.cancel()
        return late

    def _round(self, chosen: Sequence[InflightGroup], expired: Sequence[InflightGroup], waited: float) -> RolloutBatch:
        kept = _groups(chosen, "kept")
        # By the order in which they were asked, so that the record does not depend on timing.
        given_up = [*_groups(chosen, "given up"), *_groups(expired, "given up")]
        refused = [group for _, group in sorted([*self._refused, *given_up], key=lambda pair: pair[0])]
        self._refused = []
        groups = [group for _, group in kept]
        # A step needs rows: it gets refused groups, and learns nothing of them.
        is_refused = not groups
        if is_refused:
            groups, refused = refused[: self.prompts_per_step], refused[self.prompts_per_step :]
        return RolloutBatch(
            number=self._clock,
            groups=tuple(groups),
            filtered=tuple(refused),
            watch=max(chosen, key=lambda slot: slot.done_at).watch,
            late=tuple(group for _, group in _groups(expired, "kept")),
            cancelled=self.rollouter.generations * sum(slot.status == "asked" for slot in expired),
            wait_seconds=waited,
            in_flight=sum(not slot.is_ready for slot in self._slots),
            finished=sum(slot.is_ready for slot in self._slots),
            ahead=self.max_staleness - self.slack,
            is_refused=is_refused,
        )

    def state(self) -> State:
        """Return the counters and every prompt that is asked or ready and not trained on.

        All of them are asked again, with the same draws; by newer weights, so the answers differ. What was refused
        since the last step is not asked again, and is in no record.
        """
        pending = [[s.index, s.number, s.place, s.attempt] for s in [*self._slots, *self._pending]]
        return State(values={"next": self._next, "taken": self._clock + 1, "slack": self.slack, "pending": pending})

    def moved(self, state: State, places: Mapping[int, int] | None) -> State:
        """Return a state of another scheduler as one of this: rounds go on, and what is on its way is asked if it fits.

        Args:
            places: The place of each former task in this task set; None where the sets are the same.
        """
        rows = [row for row in state.values["pending"] if places is None or row[0] in places]
        pending = [[row[0] if places is None else places[row[0]], *row[1:]] for row in rows]
        # A parent with larger steps or more attempts has prompts that no slot of this run could hold; they are asked no
        # more.
        fits = all(row[2] < self.prompts_per_step and row[3] < self.max_attempts for row in pending)
        fits = fits and len(pending) <= (self.max_staleness + 1 - self.slack) * self.prompts_per_step
        return State(values={**state.values, "slack": self.slack, "pending": pending if fits else []})

    def restore(self, state: State) -> None:
        """Ask first what was on its way."""
        slack, rows = int(state.values["slack"]), [[int(number) for number in row] for row in state.values["pending"]]
        most = (self.max_staleness + 1) * self.prompts_per_step
        # A checkpoint that was edited, or is of other settings, must not break the bound.
        if not (0 <= slack <= self.max_staleness and len(rows) <= most):
            raise ValueError(f"slack is {slack} and {len(rows)} prompts are asked, and at most {most} can be")
        for index, number, place, attempt in rows:
            is_sound = 0 <= index < len(self.tasks) and 0 <= number <= int(state.values["next"])
            if not (is_sound and 0 <= place < self.prompts_per_step and 0 <= attempt < self.max_attempts):
                raise ValueError(f"no prompt can have been asked as {[index, number, place, attempt]}")
        self.slack = slack
        self._next, self._clock = int(state.values["next"]), int(state.values["taken"]) - 1
        self._pending = [
            InflightGroup(index, number, place, RolloutTimer(), again) for index, number, place, again in rows
        ]


def _groups(slots: Sequence[InflightGroup], status: Literal["kept", "given up"]) -> list[tuple[int, Group]]:
    found = [(slot.turn, slot.group) for slot in slots if slot.status == status and slot.group is not None]
    return [(turn, group) for turn, whole in found for group in whole.by_role]
