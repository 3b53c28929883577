"""A live view for logs and for programs: lines as a run goes on, its state once, or one object."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from shlex import quote
from typing import Any

from gnomon.insight.watch.glance import Glance
from gnomon.insight.watch.head import badge, banner, head, subject
from gnomon.insight.watch.overview import overview
from gnomon.insight.watch.terms import HEALTH, REWARD
from gnomon.insight.watch.text import tame
from gnomon.insight.watch.watcher import Watcher
from gnomon.records.damage import in_words
from gnomon.records.phase import duration

_TALL = 32
_SHOWN = [term for term in HEALTH if term.label in ("length", "entropy", "ESS", "truncated")]


def once(glance: Glance, width: int) -> list[str]:
    """Return the state of a run as lines of text, without colors and without blanks at their ends."""
    texts = [*head(glance, width), *overview(glance, width, _TALL)]
    return [text.plain.rstrip() for text in texts]


def as_row(glance: Glance) -> dict[str, Any]:
    """Return the state of a run as one JSON object."""
    return {
        "run": str(glance.path),
        "state": glance.state,
        "step": glance.step,
        "steps": glance.steps,
        "seconds_left": glance.seconds_left,
        "step_seconds": glance.step_seconds,
        "silent_seconds": glance.silent_seconds,
        "process": None if glance.holder is None else asdict(glance.holder),
        "checkpoint": glance.checkpoint,
        "resume": f"gnomon resume {quote(str(glance.path))}" if glance.state == "stopped" else None,
        "metrics": dict(glance.last),
        "evaluations": [asdict(found) for found in glance.evaluations],
        "findings": [found.as_row() for found in glance.findings],
        "damaged": dict(glance.damaged),
        "ended": glance.ended,
        "samples": asdict(glance.samples),
    }


class Teller:
    """Says what is new since it was last asked: a line for the newest step, one for each evaluation and finding."""

    def __init__(self) -> None:
        self._state = ""
        self._step = self._evaluations = 0
        self._said: set[tuple[str, int]] = set()
        self._damage = ""

    def tell(self, glance: Glance) -> list[str]:
        """Return the lines; none where nothing happened."""
        if not self._state:
            self._evaluations = max(0, len(glance.evaluations) - 1)
        lines = self._changed(glance) if glance.state != self._state else []
        self._state = glance.state
        if glance.step > self._step:
            lines.append(step_line(glance))
        for found in glance.evaluations[self._evaluations :]:
            lines.append(f"evaluation after step {found.step}: {found.name} {found}")
        for finding in reversed(glance.findings):
            if (finding.rule, finding.first_step) not in self._said:
                self._said.add((finding.rule, finding.first_step))
                lines.append(f"{finding.severity}: {finding.summary}")
        damage = in_words(glance.damaged)
        if damage != self._damage:
            self._damage = damage
            lines += [damage] if damage else []
        # Both go back when a run is cut to its checkpoint, or is another one.
        self._step, self._evaluations = glance.step, len(glance.evaluations)
        return [" ".join(tame(line).split("\n")) for line in lines]

    def _changed(self, glance: Glance) -> list[str]:
        """Return where a run is that was elsewhere; how it ended is said by `last_words`."""
        if self._state and glance.state in ("finished", "stopped"):
            return []
        said = _in_words(glance) if glance.state == "absent" else subject(glance)
        return [f"{glance.path}: {badge(glance).plain[2:]}; {said}"]


def step_line(glance: Glance) -> str:
    """Return what a step measured, on one line."""
    last, parts = glance.last, [f"step {glance.step}/{glance.steps}"]
    if REWARD.name in last:
        parts.append(f"reward {last[REWARD.name]:.3f}")
    parts += [f"{term.label} {term.said(last[term.name])}" for term in _SHOWN if term.name in last]
    if last.get("time/step_seconds", 0.0) > 0:
        parts.append(f"{last.get('tokens/generated', 0.0) / last['time/step_seconds']:.0f} tokens/s")
    if glance.seconds_left is not None:
        parts.append(f"{duration(glance.seconds_left)} left")
    return "  ".join(parts)


def last_words(glance: Glance) -> str:
    """Return how a run ended and, where that was too soon, how it goes on."""
    if glance.state == "stopped":
        return _in_words(glance)
    return f"finished after step {glance.step}"


def _in_words(glance: Glance) -> str:
    return " ".join(text.plain for text in banner(glance, 10_000))


def follow(
    watcher: Watcher, interval: float, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Glance:
    """Say what happens until the run ends, looking every ``interval`` seconds, and return it as it was then.

    A run that is not there yet is waited for; one that is removed is waited for, too.
    """
    teller = Teller()
    for glance in _looks(watcher, interval, sleep):
        for text in teller.tell(glance):
            say(text)
        if glance.state in ("finished", "stopped"):
            say(last_words(glance))
            return glance
    raise AssertionError("it looks for ever")


def _looks(watcher: Watcher, interval: float, sleep: Callable[[float], None]) -> Iterator[Glance]:
    while True:
        yield watcher.look()
        sleep(interval)
