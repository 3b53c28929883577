"""What stands above every pane: which run this is, where it is, and what to do if it stands still."""

from pathlib import Path
from shlex import quote
from typing import Any

from rich.text import Text

from gnomon.core.atomic_files import real_path
from gnomon.core.tables import reach
from gnomon.insight.watch.draw import progress
from gnomon.insight.watch.lines import BAD, CALM, GOOD, HEAD, QUIET, WARN, fitted, line, spread
from gnomon.insight.watch.run_snapshot import RunSnapshot
from gnomon.insight.watch.text import one_line, wrapped
from gnomon.records.phase import duration

_BAR = 20
_WIDE = 100
_LONGEST_END = 160


def head(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return two lines: the run's name and state; what is trained on what, and how far it is."""
    state = line((_who(snapshot, width), QUIET)).append_text(badge(snapshot))
    first = spread(line((one_line(name_of(snapshot.path), width), HEAD)), state, width)
    second = spread(line((one_line(subject(snapshot), width), QUIET)), _progress(snapshot, width), width)
    return fitted([first, second], width)


def _who(snapshot: RunSnapshot, width: int) -> str:
    """Return which process works on it, where there is room for that."""
    owner = snapshot.owner
    if owner is None or not owner.pid or width < _WIDE:
        return ""
    return f"process {owner.pid} on {one_line(owner.host, 24)}   "


def name_of(path: Path) -> str:
    """Return the directory's own name, also where it was given as "." or ended in a slash."""
    return path.name or real_path(path).name or str(path)


def badge(snapshot: RunSnapshot) -> Text:
    """Return the run's state in a word or two, with its color."""
    if snapshot.state == "live":
        return line(("● silent", WARN)) if snapshot.silent_seconds else line(("● live", GOOD))
    if snapshot.state == "finished":
        return line(("✓ finished", GOOD))
    if snapshot.state == "stopped":
        return line(("■ stopped", BAD))
    return line(("○ gone", WARN) if snapshot.was_there else ("○ not there yet", WARN))


def subject(snapshot: RunSnapshot) -> str:
    """Return what is trained: algorithm, task and model, as far as the experiment says."""
    table = snapshot.table
    task = table.get("task")
    named: list[Any] = [reach(table, "algorithm.name"), _task(task), table.get("model")]
    return " · ".join(Path(name).name or name for name in named if isinstance(name, str) and name)


def banner(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return what a person must know before anything else, in words; nothing where all is well."""
    style, text, command = _alarm(snapshot)
    said = [line((row, style)) for row in wrapped(text, width, 4)] if text else []
    return said + [line((row, HEAD)) for row in wrapped(command, width, 4)] if command else said


def _alarm(snapshot: RunSnapshot) -> tuple[str, str, str]:
    """Return the style and the words of what is wrong, and what to type."""
    path = str(snapshot.path)
    if snapshot.state == "absent":
        if snapshot.was_there:
            return WARN, f"{path} is gone; what was read of it is shown no more. It is looked for every second.", ""
        return WARN, f"There is no run {path} yet: it has no experiment.toml. It is looked for every second.", ""
    if snapshot.state == "stopped":
        why = f" with {one_line(snapshot.ended, _LONGEST_END)}" if snapshot.ended else ""
        done = f"It ended at step {snapshot.step} of {snapshot.steps}{why}, and no process works on it."
        step = snapshot.checkpoint
        saved = "no checkpoint" if step is None else f"a checkpoint of step {step}"
        on = "begins again" if step is None else "goes on from there"
        return BAD, f"{done} It has {saved} and {on} with:", f"gnomon resume {quote(str(path))}"
    if snapshot.silent_seconds:
        usual = duration(snapshot.step_seconds or 0.0)
        return WARN, f"No step for {duration(snapshot.silent_seconds)}; lately one took {usual}.", ""
    return QUIET, "", ""


def _progress(snapshot: RunSnapshot, width: int) -> Text:
    if snapshot.state == "absent" or not snapshot.steps:
        return line()
    said = [f"step {snapshot.step}/{snapshot.steps}"]
    left = snapshot.seconds_left
    if left is not None:
        said.append(f"{duration(left)} left")
    if width < 60:
        return line("  ".join(said))
    done, rest = progress(snapshot.share, _BAR if width < _WIDE else 2 * _BAR)
    return line(
        f"{said[0]}  ",
        (done, CALM),
        (rest, QUIET),
        f" {100 * snapshot.share:3.0f}%",
        *(f"  {text}" for text in said[1:]),
    )


def _task(task: Any) -> str:
    if not isinstance(task, dict):
        return ""
    if isinstance(task.get("parts"), list):
        return "+".join(filter(None, (_task(part.get("task")) for part in task["parts"] if isinstance(part, dict))))
    named = (task.get(key) for key in ("generator", "path", "name", "kind"))
    return next((name for name in named if isinstance(name, str)), "")
