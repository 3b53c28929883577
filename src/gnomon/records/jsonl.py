"""JSON lines that survive crashes, full disks and numbers that are not finite."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

from gnomon.core.atomic_files import keep_lines, open_plain, refuse_special
from gnomon.core.errors import RunDirectoryError
from gnomon.core.redaction import for_people, redacted

Warn = Callable[[str], None]
_AGES = 1e12
"""Seconds that no run has worked."""


def warn_on_stderr(message: str) -> None:
    """Print one line on standard error."""
    print(f"warning: {for_people(message)}", file=sys.stderr, flush=True)


class JsonLines:
    """Appends one JSON object a line, each handed to the system at once.

    A line is whole or absent: what a crash tore off is cut at the next opening, and what a full disk tore off is cut
    right away. A row that cannot be written is counted and warned of once; it never ends a run.

    Args:
        is_synced: Wait for the disk after each row, so that rows also survive a power cut.
    """

    def __init__(self, path: Path, warn: Warn = warn_on_stderr, is_synced: bool = False) -> None:
        self.path = path
        self.lost = 0
        self._warn, self._is_synced = warn, is_synced
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            refuse_special(path)
        # Unbuffered: a row is with the system when `append` returns, and survives a kill of this process.
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - it lives as long as this object
        self._end = self._after_last_line()
        self._file.truncate(self._end)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; what is not finite, however deep, is written as null."""
        text = json.dumps(redacted(sound(row)), ensure_ascii=False, allow_nan=False)
        line = (text + "\n").encode(errors="backslashreplace")
        try:
            # A full disk may take a part of a write without an error.
            if self._file.write(line) != len(line):
                raise OSError("the disk took a part of a row")
            if self._is_synced:
                os.fsync(self._file.fileno())
            self._end += len(line)
        except OSError as error:
            # Cut the torn line off, or the next row would be glued to it and both lost.
            self._file.truncate(self._end)
            if self.lost == 0:
                self._warn(f"{self.path} cannot be written, the run goes on without its rows: {error}")
            self.lost += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _after_last_line(self) -> int:
        size = self._file.seek(0, os.SEEK_END)
        position = size
        # Read backwards in blocks: the last line feed is near the end, and the file may be gigabytes.
        while position > 0:
            start = max(0, position - 65536)
            self._file.seek(start)
            found = self._file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
        return 0


class JsonlSink:
    """The metrics file: ``{"step": int, "seconds": float, NAME: number, ...}``.

    seconds: of wall clock that the run has worked, over all its sessions. A number that is not finite is ``null``, and
    its name is in the list ``not_finite``, so that the file stays JSON and the fault stays visible.
    """

    def __init__(self, path: Path, is_synced: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        # A resumed run goes on counting where the last session stopped.
        # The largest value, not the last one: a damaged row may be last.
        before = [s for row in read_rows(path) if isinstance(s := row.get("seconds"), int | float) and 0 <= s < _AGES]
        self._lines = JsonLines(path, is_synced=is_synced)
        self._clock, self._began = clock, clock() - max(before, default=0.0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of a step."""
        self._lines.append({"step": step, "seconds": round(self._clock() - self._began, 3), **finite(values)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def finite(values: Mapping[str, float]) -> dict[str, Any]:
    """Return ``values`` with None for what is not finite, and then the names of those under ``not_finite``.

    >>> finite({"a": 1.0, "b": float("nan")})
    {'a': 1.0, 'b': None, 'not_finite': ['b']}
    """
    # NaN and infinity are no JSON; null alone would look like a metric that was not measured, hence the list of names.
    wrong = [name for name, value in values.items() if not math.isfinite(value)]
    row: dict[str, Any] = {name: None if name in wrong else value for name, value in values.items()}
    return row | {"not_finite": wrong} if wrong else row


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON objects; none when there is no file. Torn and damaged lines are passed over.

    Raises:
        RunDirectoryError: ``path`` is no readable file.
    """
    try:
        with open_plain(path) as file:
            for line in file:
                row = parsed(line)
                if row is not None:
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read: {error.strerror or error}; it should be a file with one JSON object a line: "
            "bring it back, or move away what is there"
        ) from error


def step_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that are of a step.

    Raises:
        RunDirectoryError: As for `read_rows`.
    """
    return (row for row in read_rows(path) if is_step(row.get("step")))


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, None where it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file can be judged and drawn: a number, finite and of a size that arithmetic survives.

    >>> is_number(1), is_number(True), is_number(float("inf"))
    (True, False, False)
    """
    # The bound keeps squares and sums of file values finite; `type` leaves bool out.
    return type(value) in (int, float) and isinstance(value, int | float) and -1e300 < value < 1e300


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value of a file can be the number of a step.

    >>> is_step(3), is_step(3.0), is_step(-1)
    (True, False, False)
    """
    return type(value) is int and 0 <= value < 10**12


def budget_of(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return (allowed, spent) of tokens and of seconds, as far as an experiment limits them, by rows of metrics."""
    plan = table.get("budget")
    if not isinstance(plan, Mapping):
        return []
    tokens, seconds = (
        [value for row in rows if is_number(value := row.get(name))]
        for name in ("tokens/generated_total", "time/step_seconds")
    )
    pairs = ((plan.get("tokens"), max(tokens, default=0.0)), (plan.get("seconds"), sum(seconds)))
    return [(float(most), float(spent)) for most, spent in pairs if is_number(most) and most > 0]


def task_name(table: Mapping[str, Any]) -> str:
    """Return what an experiment asks, in a word or two: of several tasks each; "" where it does not say.

    >>> task_name({"task": {"parts": [{"task": {"kind": "arithmetic"}}, {"task": {"path": "rows.jsonl"}}]}})
    'arithmetic+rows.jsonl'
    """
    task = table.get("task")
    if not isinstance(task, Mapping):
        return ""
    if isinstance(task.get("parts"), list):
        names = (task_name(part) for part in task["parts"] if isinstance(part, Mapping))
        return "+".join(dict.fromkeys(filter(None, names)))
    named = (task.get(key) for key in ("generator", "path", "name", "kind"))
    return next((name for name in named if isinstance(name, str) and name), "")


def made_its_last(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether rows of metrics reach an experiment's last step, or spend its budget, which may end it before."""
    asked, done = table.get("steps"), rows[-1]["step"] if rows else 0
    return is_step(asked) and (done >= asked or any(spent >= most for most, spent in budget_of(table, rows)))


def ended(
    table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], checkpoints: Sequence[int]
) -> Literal["finished", "stopped"]:
    """Return whether a run that no process works on has reached its end.

    Where it has checkpoints, the last of them must be of the last step: `gnomon resume` makes what came after it again.
    """
    is_saved = not checkpoints or not rows or checkpoints[-1] >= rows[-1]["step"]
    is_done = bool(rows or checkpoints) and made_its_last(table, rows)
    return "finished" if is_done and is_saved else "stopped"


def drop_after(path: Path, step: int) -> None:
    """Remove the rows of later steps: a run that resumes at ``step`` will make them again.

    Torn and damaged lines go too. The file is replaced at once, or untouched when nothing has to go.

    Raises:
        RunDirectoryError: As `read_rows` does.
    """
    if path.exists():
        # Read once for its error: `keep_lines` would replace what is no file.
        next(read_rows(path), None)
        keep_lines(path, lambda line: _step(line) <= step)


def sound(value: Any) -> Any:
    """Return a value of a file with None for each number in it that is not finite, however deep."""
    if isinstance(value, Mapping):
        return {key: sound(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [sound(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: bytes) -> float:
    row = parsed(line)
    step = None if row is None else row.get("step")
    return step if type(step) is int else math.inf


def waste_cause(name: str) -> str:
    """Return the cause that a metric ``waste/CAUSE_fraction`` measures, "" for any other metric.

    Earlier versions recorded "stale" for what is "off_policy" now: ``stream/stale_rollouts`` counts something else.

    >>> waste_cause("waste/clipped_fraction"), waste_cause("waste/stale_fraction"), waste_cause("loss/policy")
    ('clipped', 'off_policy', '')
    """
    if not (name.startswith("waste/") and name.endswith("_fraction")):
        return ""
    cause = name.removeprefix("waste/").removesuffix("_fraction")
    return "off_policy" if cause == "stale" else cause
