"""Runs of TRL, verl and prime-rl, read from the files that they write: metrics by gnomon's names, and answers.

TRL: ``trainer_state.json`` (also in checkpoint folders) and ``completions/completions_STEP.parquet``. verl: the JSON
lines of its file logger, TensorBoard's event files, and ``STEP.jsonl`` in the folders of ``rollout_data_dir`` and
``validation_data_dir``. prime-rl: ``metrics.jsonl`` and ``rollouts/step_STEP/KIND/SUBSET/traces.jsonl``. Event files of
the other two are read as well. One table, foreign_metrics.toml, says which metric is which.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import open_plain, read_plain_text
from gnomon.core.errors import DatasetError, RunDirectoryError
from gnomon.core.optional import import_optional
from gnomon.core.tables import packaged_toml
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.records.jsonl import is_number, is_step, read_rows

SCORE = "evaluation/score"
_NAMES: Mapping[str, Mapping[str, str]] = packaged_toml("gnomon.records", "foreign_metrics.toml")
_SHOWN = {"trl": "TRL", "verl": "verl", "prime-rl": "prime-rl"}
_CUT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
_SOURCES = ("trainer_state.json", "checkpoint-*/trainer_state.json", "*.jsonl", "*/metrics.jsonl", "**/*tfevents*")
_ANSWERS = ("*.jsonl", "*/*.jsonl", "*/*/*.jsonl", "completions/*.parquet", "**/rollouts/step_*/*/*/traces.jsonl")
_NO_REWARD = {"step", "prompt", "completion", "advantage", "image", "images"}
Logged = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True)
class ForeignRun:
    """What another library has logged of a run.

    Attributes:
        library: "TRL", "verl" or "prime-rl".
        rows: One row a step, in order, with gnomon's names; of a step that was logged again the last values.
        scores: Step and held-out score of each evaluation, in order.
        steps: Steps that were asked for, 0 where the files do not say.
        notes: What a reader has to know of these files, in sentences.
    """

    path: Path
    library: str
    rows: tuple[Mapping[str, Any], ...]
    scores: tuple[tuple[int, float], ...]
    steps: int = 0
    notes: tuple[str, ...] = ()
    _rewards: frozenset[str] = field(default=frozenset())

    @property
    def last_step(self) -> int:
        """The last step that was logged."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @cached_property
    def answered(self) -> Mapping[bool, Mapping[int, Path]]:
        """The file of answers of each step, in order of steps: under True the held-out ones."""
        found: dict[bool, dict[int, Path]] = {False: {}, True: {}}
        for pattern in _ANSWERS:
            for path in sorted(self.path.glob(pattern)) if self.path.is_dir() else ():
                place = _place(path)
                # Of prime-rl's two, "effective" is what was trained on or counted; it sorts behind "all".
                if place is not None:
                    found[place[1]][place[0]] = path
        return {key: dict(sorted(by_step.items())) for key, by_step in found.items()}

    def groups(self, step: int, is_held_out: bool = False) -> list[Group]:
        """Return the answers of a step by prompt. Words stand for tokens: no library writes the tokens down.

        Raises:
            DatasetError: The file cannot be read.
        """
        path = self.answered[is_held_out].get(step)
        by_prompt: dict[str, list[tuple[str, Grade, bool]]] = defaultdict(list)
        for prompt, text, grade, is_cut in () if path is None else _answers(path, self._rewards):
            by_prompt[prompt].append((text, grade, is_cut))
        return [Group(Task(p, (), p), tuple(_rollout(p, *a) for a in each)) for p, each in by_prompt.items()]


def is_foreign(path: Path) -> bool:
    """Whether there is no run of gnomon at ``path``, and files of which another library's could be read."""
    if not path.is_dir():
        return path.is_file()
    if any((path / name).exists() for name in ("experiment.toml", "run.json")):
        return False
    return any(True for pattern in _SOURCES for _ in path.glob(pattern))


def read_foreign(path: Path) -> ForeignRun:
    """Read a run of another library.

    Args:
        path: Its folder, or the file of its metrics.

    Raises:
        RunDirectoryError: Nothing there can be read as such a run.
    """
    logged, steps = _logged(path)
    names = {name for _, row in logged for name in row}
    matches = {library: {n for n in names if _ours(library, n)} for library in _NAMES}
    # No file names its library: the one whose metrics occur most often wrote it.
    library = max(matches, key=lambda each: len(matches[each]))
    if not matches[library]:
        some = ", ".join(sorted(names)[:4]) or "nothing"
        raise RunDirectoryError(
            f"{path} logs no metric of TRL, verl or prime-rl that gnomon knows (it has {some}); name the folder with "
            "trainer_state.json, the file logger's .jsonl, event files of TensorBoard, or metrics.jsonl"
        )
    rows, scores, notes = _merged(library, logged)
    rewards = frozenset(m[1] for name in names if (m := re.fullmatch(r"(?:train/)?rewards/(.+)/mean", name)))
    if library == "trl" and len(rewards) > 1:
        notes.append("answers have the sum of their rewards: TRL does not write down reward_weights")
    return ForeignRun(path, _SHOWN[library], rows, scores, steps, tuple(notes), rewards)


def _merged(
    library: str, logged: Logged
) -> tuple[tuple[dict[str, Any], ...], tuple[tuple[int, float], ...], list[str]]:
    """Return rows by gnomon's names, held-out scores, and what has to be said.

    A name that is logged at an earlier step than before is that of a resumed run: what came after that step is gone.
    """
    columns: dict[str, dict[int, float]] = defaultdict(dict)
    again, odd = set(), set()
    for step, row in logged:
        values: dict[str, list[float]] = defaultdict(list)
        for name in row:
            if (ours := _ours(library, name)) is None:
                continue
            if (number := _number(row[name])) is None:
                odd.add(name)
            else:
                values[ours].append(number)
        for name, each in values.items():
            column = columns[name]
            # Rows come in the order of writing. A step that is not later than the last
            # one is logged again by a resumed run, which made all later rows void.
            while column and next(reversed(column)) >= step:
                again.add(column.popitem()[0])
            # Several of their metrics may be one of ours, such as a mean for each data set.
            column[step] = sum(each) / len(each)
    notes = []
    if again:
        notes.append(f"{len(again)} steps were logged again, as by a run that was resumed; the last values count")
    if odd:
        notes.append(f"values that are no finite numbers are left out: {', '.join(sorted(odd)[:4])}")
    scores = tuple(columns.pop(SCORE, {}).items())
    by_step: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, column in columns.items():
        for step, value in column.items():
            by_step[step][name] = value
    return tuple({"step": step, **by_step[step]} for step in sorted(by_step)), scores, notes


def _ours(library: str, name: str) -> str | None:
    """Return gnomon's name of a metric; the Trainer's callback for TensorBoard writes train/ and eval/ before TRL's."""
    if library == "trl":
        name = re.sub(r"^eval/", "eval_", name.removeprefix("train/"))
    for pattern, ours in _NAMES[library].items():
        if found := re.fullmatch(pattern, name):
            return found.expand(ours)
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if is_number(value) else None


def _logged(path: Path) -> tuple[Logged, int]:
    """Return what was logged, in the order of writing, and the steps asked for (0 where nothing says so)."""
    states = [path] if path.name == "trainer_state.json" else [path / "trainer_state.json"]
    states += path.glob("checkpoint-*/trainer_state.json") if path.is_dir() else []
    found = [_state(state) for state in states if state.is_file()]
    if found:
        # Each checkpoint's state holds the whole history up to it: the longest one has everything.
        return max(found, key=lambda each: max((step for step, _ in each[0]), default=0))
    lines = [path] if path.is_file() and path.suffix == ".jsonl" else []
    if path.is_dir():
        lines = sorted(p for p in (*path.glob("*.jsonl"), *path.glob("*/metrics.jsonl")) if _place(p) is None)
    logged = [row for each in lines for row in _lines(each)]
    if not logged:
        events = [path] if "tfevents" in path.name else path.rglob("*tfevents*") if path.is_dir() else []
        logged = _events(sorted(events))
    if not logged:
        raise RunDirectoryError(
            f"{path} holds no run: no experiment.toml (gnomon), trainer_state.json (TRL), JSON lines with steps or "
            "event files of TensorBoard (verl), metrics.jsonl (prime-rl); name the folder that has one of these"
        )
    return logged, 0


def _state(path: Path) -> tuple[Logged, int]:
    try:
        state = json.loads(read_plain_text(path))
        history = state["log_history"]
        rows = [(row["step"], row) for row in history if isinstance(row, dict) and is_step(row.get("step"))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is no state of a Trainer with log_history: {error}") from error
    most = state.get("max_steps")
    return rows, most if is_step(most) else 0


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for row in read_rows(path):
        data = row.get("data", row)
        if is_step(row.get("step")) and isinstance(data, dict):
            yield row["step"], data


def _events(paths: Sequence[Path]) -> Logged:
    """Return the scalars of event files by time: a resumed run writes a new file and repeats steps."""
    if not paths:
        return []
    loader = import_optional("tensorboard.backend.event_processing.event_file_loader", "tensorboard", "an event file")
    points: list[tuple[float, int, dict[str, Any]]] = []
    for path in paths:
        # Opened by gnomon first: the library would wait for ever on a named pipe.
        open_plain(path).close()
        try:
            for event in loader.LegacyEventFileLoader(str(path)).Load():
                row = {v.tag: _scalar(v) for v in event.summary.value}
                points += [(event.wall_time, event.step, row)] if row and event.step >= 0 else []
        except Exception as error:  # what a damaged file raises is the library's own
            raise RunDirectoryError(f"{path} is no event file of TensorBoard: {error}") from error
    return [(step, row) for _, step, row in sorted(points, key=lambda point: point[0])]


def _scalar(value: Any) -> Any:
    if value.HasField("simple_value"):
        return value.simple_value
    return next(iter(value.tensor.float_val), None)


def _place(path: Path) -> tuple[int, bool] | None:
    """Return the step of a file of answers, and whether they are of held-out prompts; None for other files."""
    if path.name == "traces.jsonl":
        found = re.search(r"step_(\d{1,9})/(train|eval)/\w+$", path.parent.as_posix())
        return (int(found[1]), found[2] == "eval") if found else None
    found = re.fullmatch(r"(?:completions_)?(\d{1,9})\.(jsonl|parquet)", path.name)
    return (int(found[1]), "val" in path.parent.name.lower()) if found else None


def _answers(path: Path, rewards: frozenset[str]) -> Iterator[tuple[str, str, Grade, bool]]:
    """Yield prompt, text, grade and whether it was cut off, of each answer of a file."""
    if path.suffix == ".parquet":
        yield from _completions(path, rewards)
        return
    for row in read_rows(path):
        if path.name == "traces.jsonl":
            yield from _traces(row)
        elif isinstance(row.get("input"), str) and "score" in row:
            yield row["input"], str(row.get("output", "")), _grade({"score": row["score"]}), False


def _completions(path: Path, rewards: frozenset[str]) -> Iterator[tuple[str, str, Grade, bool]]:
    parquet = import_optional("pyarrow.parquet", "tables", "a table of completions")
    try:
        with open_plain(path) as file:
            rows = parquet.read_table(file).to_pylist()
    except (OSError, ValueError, TypeError) as error:
        raise DatasetError(f"{path} is no table of completions: {error}") from error
    for row in rows:
        named = {n: v for n, v in row.items() if n in rewards or (not rewards and n not in _NO_REWARD)}
        parts = {name: value for name, value in named.items() if not isinstance(value, str)}
        yield _text(row.get("prompt")), _text(row.get("completion")), _grade(parts), False


def _traces(episode: Mapping[str, Any]) -> Iterator[tuple[str, str, Grade, bool]]:
    """Yield the answers of an episode, whose traces have weighted rewards, calls and a graph of messages."""
    task = _map(episode.get("task"))
    prompt = _text(_map(task.get("data")).get("prompt") or task.get("key") or task.get("hash"))
    for trace in map(_map, _list(episode.get("traces"))):
        parts, total = {}, 0.0
        for name, reward in _map(trace.get("rewards")).items():
            score, weight = (
                _number(_map(reward).get(key, default)) for key, default in (("score", None), ("weight", 1))
            )
            if score is not None and weight is not None:
                parts[name], total = score, total + score * weight
        ends = [_map(call).get("finish_reason") for call in _list(trace.get("calls"))]
        is_cut = trace.get("stop_condition") in _CUT or ends[-1:] == ["length"]
        said = [_map(_map(node).get("message")) for node in _list(trace.get("nodes"))]
        text = next((_text(m.get("content")) for m in reversed(said) if m.get("role") == "assistant"), "")
        grade = Grade(total, parts) if parts else Grade(None, error="no reward")
        yield prompt, text, grade, is_cut


def _grade(parts: Mapping[str, Any]) -> Grade:
    """Return the sum of the rewards that are numbers; an answer without one was not judged."""
    known = {name: number for name, value in parts.items() if (number := _number(value)) is not None}
    return Grade(math.fsum(known.values()), known) if known else Grade(None, error="no reward")


def _rollout(prompt: str, text: str, grade: Grade, is_cut: bool) -> Rollout:
    # Only counts of tokens are read of such a rollout; words stand for them.
    words = tuple(hash(word) for word in text.split())
    zeros = (0.0,) * len(words)
    stop: Any = "length" if is_cut else "stop"
    return Rollout(prompt, (), words, (True,) * len(words), zeros, zeros, text, grade, 0, 0, stop)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
