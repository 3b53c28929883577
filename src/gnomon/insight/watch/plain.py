"""A live view for logs and for programs: lines as a run goes on, its state once, or one object."""

import time
from collections.abc import Callable
from dataclasses import asdict
from shlex import quote
from typing import Any

from gnomon.insight.watch.lines import tame
from gnomon.insight.watch.views import HEALTH, badge, banner, head, objective, overview, subject
from gnomon.insight.watch.watcher import RunSnapshot, Watcher
from gnomon.records.corruption import in_words
from gnomon.records.phase import duration

_TALL = 32
_SHOWN = [term for term in HEALTH if term.label in ("length", "entropy", "ESS", "truncated")]


def once(snapshot: RunSnapshot, width: int) -> list[str]:
    """Return the state of a run as lines of text, without colors and without blanks at their ends."""
    texts = [*head(snapshot, width), *overview(snapshot, width, _TALL)]
    return [text.plain.rstrip() for text in texts]


def as_row(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the state of a run as one JSON object."""
    return {
        "run": str(snapshot.path),
        "state": snapshot.state,
        "step": snapshot.step,
        "steps": snapshot.steps,
        "seconds_left": snapshot.seconds_left,
        "step_seconds": snapshot.step_seconds,
        "silent_seconds": snapshot.silent_seconds,
        "process": None if snapshot.owner is None else asdict(snapshot.owner),
        "checkpoint": snapshot.checkpoint,
        "resume": f"gnomon resume {quote(str(snapshot.path))}" if snapshot.state == "stopped" else None,
        "metrics": dict(snapshot.last),
        "evaluations": [asdict(found) for found in snapshot.evaluations],
        "findings": [found.as_row() for found in snapshot.findings],
        "damaged": dict(snapshot.damaged),
        "ended": snapshot.ended,
        "samples": asdict(snapshot.samples),
    }


class LineWriter:
    """Says what is new since it was last asked: a line for the newest step, one for each evaluation and finding."""

    def __init__(self) -> None:
        self._state = ""
        self._step = self._evaluations = 0
        self._said: set[tuple[str, int]] = set()
        self._damage = ""

    def tell(self, snapshot: RunSnapshot) -> list[str]:
        """Return the lines; none where nothing happened."""
        if not self._state:
            # At the first look only the newest evaluation is news.
            self._evaluations = max(0, len(snapshot.evaluations) - 1)
        lines = self._changed(snapshot) if snapshot.state != self._state else []
        self._state = snapshot.state
        if snapshot.step > self._step:
            lines.append(step_line(snapshot))
        for found in snapshot.evaluations[self._evaluations :]:
            lines.append(f"evaluation after step {found.step}: {found.name} {found}")
        # They are ordered from the gravest, and lines are read upwards from the last one.
        for finding in reversed(snapshot.findings):
            if (finding.rule, finding.first_step) not in self._said:
                self._said.add((finding.rule, finding.first_step))
                lines.append(f"{finding.severity}: {finding.summary}")
        damage = in_words(snapshot.damaged)
        if damage != self._damage:
            self._damage = damage
            lines += [damage] if damage else []
        # Both go back when a run is cut to its checkpoint, or is another one.
        self._step, self._evaluations = snapshot.step, len(snapshot.evaluations)
        # One event is one line, for programs that read the lines.
        return [" ".join(tame(line).split("\n")) for line in lines]

    def _changed(self, snapshot: RunSnapshot) -> list[str]:
        """Return where a run is that was elsewhere; how it ended is said last."""
        # `follow` says the end itself, behind all other lines.
        if self._state and snapshot.state in ("finished", "stopped"):
            return []
        said = _in_words(snapshot) if snapshot.state == "absent" else subject(snapshot)
        return [f"{snapshot.path}: {badge(snapshot).plain[2:]}; {said}"]


def step_line(snapshot: RunSnapshot) -> str:
    """Return what a step measured, on one line."""
    last, parts = snapshot.last, [f"step {snapshot.step}/{snapshot.steps}"]
    term = objective(snapshot)
    if term.name in last:
        parts.append(f"{term.label} {last[term.name]:.3f}")
    parts += [f"{term.label} {term.said(last[term.name])}" for term in _SHOWN if term.name in last]
    if last.get("time/step_seconds", 0.0) > 0:
        parts.append(f"{last.get('tokens/generated', 0.0) / last['time/step_seconds']:.0f} tokens/s")
    if snapshot.seconds_left is not None:
        parts.append(f"{duration(snapshot.seconds_left)} left")
    return "  ".join(parts)


def _in_words(snapshot: RunSnapshot) -> str:
    return " ".join(text.plain for text in banner(snapshot, 10_000))


def follow(
    watcher: Watcher, interval: float, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> RunSnapshot:
    """Say what happens until the run ends, looking every ``interval`` seconds, and return it as it was then.

    A run that is not there yet is waited for; one that is removed is waited for, too.
    """
    teller = LineWriter()
    while True:
        snapshot = watcher.look()
        for text in teller.tell(snapshot):
            say(text)
        if snapshot.state in ("finished", "stopped"):
            say(_in_words(snapshot) if snapshot.state == "stopped" else f"finished after step {snapshot.step}")
            return snapshot
        sleep(interval)
