"""Places for prompts on their way, and which of them a step may take."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gnomon.rollouts.rollout import Stopwatch
from gnomon.types import Group

Status = Literal["asked", "kept", "refused", "given up"]

_ATTEMPT = 1 << 40
"""Added to a round's number for each further attempt, so that a task asked again in one round draws afresh."""


@dataclass(eq=False)
class Slot:
    """One prompt on its way, or the group that it became and that waits for its step.

    index: of the task. number, place: of the round that it was asked in, and where in it; draws depend on them.
    attempt: how many prompts were refused in this place before. turn: counts what was asked so far, so it orders
    groups. clock: of the step that it was asked in. done_at: seconds, of the process's clock.
    status: "asked"; "kept", finished and to be trained on; "refused" by the filter, to be asked again; "given up" after
    the last attempt, when the step that it was meant for is smaller.
    """

    index: int
    number: int
    place: int
    watch: Stopwatch
    attempt: int = 0
    turn: int = 0
    clock: int = 0
    done_at: float = 0.0
    status: Status = "asked"
    group: Group | None = None
    answer: "asyncio.Future[None] | None" = field(default=None, repr=False)

    @property
    def is_ready(self) -> bool:
        """Whether nothing more is to come."""
        return self.status in ("kept", "given up")


def round_of_draws(slot: Slot, attempts: int, is_together: bool) -> int:
    """Return the round number that a slot's draws are keyed with.

    Refused prompts that are asked again together are different tasks, so the attempt tells them from those before.
    Asked again one by one, two places may get the same task, so each attempt of each place has a number of its own.
    """
    serial = slot.attempt
    if not is_together and slot.attempt:
        serial += slot.place * (attempts - 1)
    return slot.number + serial * _ATTEMPT


def choose(slots: Sequence[Slot], count: int, clock: int, bound: int, is_waiting: bool) -> Sequence[Slot] | None:
    """Return the slots that the step at ``clock`` trains on, or None when it must wait.

    The oldest ``count`` that are ready, for of all choices that leaves the others the most time. is_waiting: only if
    every other slot can still be trained on at ``bound`` steps after it was asked or earlier, ``count`` a step;
    otherwise someone would be too old in the end. That is earliest deadline first (Jackson 1955), which meets all
    deadlines if anything does.
    slots: in the order in which they were asked.
    """
    ready = [slot for slot in slots if slot.is_ready][:count]
    if len(ready) < count:
        return None
    chosen = set(ready)
    others = [slot for slot in slots if slot not in chosen]
    is_late = any(slot.clock + bound < clock + 1 + place // count for place, slot in enumerate(others))
    return None if is_waiting and is_late else ready
