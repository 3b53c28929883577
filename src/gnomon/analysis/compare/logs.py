"""Compare runs by what they have logged: those of TRL, verl and prime-rl, and gnomon's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gnomon.analysis.compare.page import PAGE_SIZES, PageSection, Rows, chance, lines, rendered
from gnomon.analysis.compare.statistics import Contrast, Floats, contrast, mean_over, unpaired
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import DatasetError, RunDirectoryError
from gnomon.core.statistics import FEWEST, SIGNIFICANCE, Interval, holm, student_quantile
from gnomon.core.svg import Series, chart
from gnomon.core.types import Group
from gnomon.diagnosis.recorded import groups_of
from gnomon.records.directory import RunDirectory
from gnomon.records.eval_records import answered_after, question_digest
from gnomon.records.foreign import ForeignRun, is_foreign, read_foreign
from gnomon.records.reading import RunRecord, column
from gnomon.records.run_card import rejudged, reward_digests
from gnomon.training.evaluate import read_evaluations

Kind = Literal["held-out", "training"]
REWARD = "rollout/reward_mean"
LATEST = 10
"""Training rewards are those of the last tenth of the steps."""


@dataclass(frozen=True)
class LoggedScores:
    """What one run has logged of one kind of score.

    Attributes:
        mean: Over prompts where answers were recorded, else as it was logged.
        by_prompt: Digest of a prompt's text to its mean score; empty where no answers were recorded.
        curve: Step and score, of every step or evaluation that was logged.
        judges: What tells each reward of the run from others of its name.
    """

    path: Path
    library: str
    last_step: int
    mean: float
    by_prompt: Mapping[str, float]
    curve: Sequence[tuple[int, float]]
    notes: tuple[str, ...] = ()
    judges: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedArm:
    """The runs of one name; `interval` is over runs and prompts, None where a single number is all there is."""

    name: str
    runs: tuple[LoggedScores, ...]
    score: float
    interval: Interval | None
    prompts: int


@dataclass(frozen=True)
class LoggedPair:
    """Two arms: ``contrast`` is the second less the first, None where nothing says how much they vary.

    Attributes:
        prompts: Prompts by which they are paired; 0 where they are not.
        corrected: The p-value after Holm's correction for all pairs.
    """

    first: str
    second: str
    difference: float
    contrast: Contrast | None
    prompts: int
    corrected: float | None

    @property
    def verdict(self) -> str:
        """The conclusion in words."""
        if self.contrast is None or self.corrected is None:
            return "no interval: one run, no answers"
        if self.corrected > SIGNIFICANCE:
            return "cannot be told apart"
        better = self.second if self.difference > 0 else self.first
        return f"{better} is better" + (" (as a model)" if self.contrast.is_about_models else "")


@dataclass(frozen=True)
class LoggedComparison:
    """Arms and all their pairs, by one kind of score."""

    kind: Kind
    arms: tuple[LoggedArm, ...]
    pairs: tuple[LoggedPair, ...]

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object; prompts are left out, of which there may be thousands."""
        arms = [
            asdict(arm)
            | {"runs": [asdict(run) | {"path": str(run.path), "by_prompt": len(run.by_prompt)} for run in arm.runs]}
            for arm in self.arms
        ]
        pairs = [asdict(pair) | {"verdict": pair.verdict} for pair in self.pairs]
        return {"format": "gnomon-logs/1", "kind": self.kind, "arms": arms, "pairs": pairs}


def compare_logs(named: Sequence[tuple[str, Path]], kind: Kind | None = None) -> LoggedComparison:
    """Compare runs by their logs.

    Two arms are paired by prompts where at least 6 of them have equal texts, and then by runs in the order given; where
    fewer agree, each varies for itself. Runs of one name are repetitions.

    Args:
        named: Name of the arm and folder of each run.
        kind: Which scores; None for held-out ones where every run has them, else those of training.

    Raises:
        RunDirectoryError: A folder holds no run.
        DatasetError: Runs lack scores, or there are not two arms.
    """
    if len({name for name, _ in named}) < 2:
        raise DatasetError("a comparison needs runs of two names or more: --logs grpo=DIR1 grpo=DIR2 dapo=DIR3")
    # Every log is read before a kind is chosen, so that one run without held-out scores
    # turns the whole comparison to training rewards instead of comparing unlike numbers.
    offered = [(name, path, _offered(path)) for name, path in named]
    kinds: tuple[Kind, ...] = ("held-out", "training") if kind is None else (kind,)
    chosen = next((k for k in kinds if all(k in scores for _, _, scores in offered)), None)
    if chosen is None:
        path, scores = next((path, scores) for _, path, scores in offered if kinds[-1] not in scores)
        has = f"only {' and '.join(scores)} scores" if scores else "no scores"
        raise DatasetError(f"{path} has {has}, so these runs cannot be compared by {' or '.join(kinds)} scores")
    arms: dict[str, list[LoggedScores]] = {}
    for name, _, scores in offered:
        arms.setdefault(name, []).append(scores[chosen])
    pairs = [(a, b, *_contrasted(arms[a], arms[b])) for a, b in combinations(arms, 2)]
    # Holm's correction needs all p-values at once. Pairs without one take no part
    # in the count, so the iterator advances only where a pair has a contrast.
    corrected = iter(holm([found.p_value for _, _, _, found, _ in pairs if found is not None]))
    return LoggedComparison(
        chosen,
        tuple(_arm(name, runs) for name, runs in arms.items()),
        tuple(LoggedPair(*pair, None if pair[3] is None else next(corrected)) for pair in pairs),
    )


def text(found: LoggedComparison) -> str:
    """Return the comparison as lines for a terminal."""
    notes = "\n".join(f"- {note}" for note in _notes(found))
    return "\n\n".join(
        [_basis(found), lines(_score_rows(found)), lines(_pair_rows(found)), *([notes] if notes else [])]
    )


def page(found: LoggedComparison) -> str:
    """Return the comparison as an HTML page that loads nothing else: curves of every run, both tables, the notes."""
    series = [
        Series(arm.name, [step for step, _ in run.curve], [score for _, score in run.curve], color=color)
        for color, arm in enumerate(found.arms)
        for run in arm.runs
    ]
    label = "held-out score" if found.kind == "held-out" else "training reward"
    pictures = [chart(series, f"{label} against steps", "step", label, size=size) for size in PAGE_SIZES]
    drawn = "One line a run, over its own steps, as its library logged it. Runs of one name have one color."
    test = (
        "The difference is the second minus the first; p is corrected for the number of pairs by Holm's method. Pairs "
        "by prompts vary over runs and prompts together, others for themselves (Welch's test)."
    )
    sections = [
        PageSection(label.capitalize(), pictures, drawn, _score_rows(found)),
        PageSection("Each against each", rows=_pair_rows(found), row_note=test),
        *([PageSection("Before this is believed", sentences=notes)] if (notes := _notes(found)) else []),
    ]
    verdicts = ". ".join(f"{pair.first} and {pair.second}: {pair.verdict}" for pair in found.pairs)
    return rendered(
        f"{', '.join(arm.name for arm in found.arms)}, by their logs", f"{_basis(found)} {verdicts}.", sections
    )


def _basis(found: LoggedComparison) -> str:
    kinds = {"held-out": "held-out scores", "training": f"training rewards of the last 1/{LATEST} of the steps"}
    return f"By {kinds[found.kind]}."


def _score_rows(found: LoggedComparison) -> Rows:
    rows = [["", "by", "runs", "steps", "prompts", "score", "95% interval", "each run"]]
    for arm in sorted(found.arms, key=lambda arm: -arm.score):
        libraries, steps = ({of(run) for run in arm.runs} for of in (lambda r: r.library, lambda r: str(r.last_step)))
        each = " ".join(f"{run.mean:.3f}" for run in arm.runs)
        cells = (", ".join(sorted(libraries)), str(len(arm.runs)), ", ".join(sorted(steps)), str(arm.prompts or "-"))
        rows.append([arm.name, *cells, f"{arm.score:.3f}", str(arm.interval or "-"), each])
    return rows


def _pair_rows(found: LoggedComparison) -> Rows:
    rows = [["first", "second", "difference", "95% interval", "p", "corrected", "paired by", ""]]
    for pair in found.pairs:
        said = ["-", "-", "-"]
        if pair.contrast is not None and pair.corrected is not None:
            said = [str(pair.contrast.interval), *map(chance, (pair.contrast.p_value, pair.corrected))]
        by = f"{pair.prompts} prompts" if pair.prompts else "nothing"
        rows.append([pair.first, pair.second, f"{pair.difference:+.3f}", *said, by, pair.verdict])
    return rows


def _notes(found: LoggedComparison) -> list[str]:
    notes = [f"{run.path}: {note}" for arm in found.arms for run in arm.runs for note in run.notes]
    if any(len(arm.runs) == 1 for arm in found.arms):
        notes.insert(0, "one run says nothing about other runs: what is compared is one model of each such name")
    asked = [run.by_prompt.keys() for arm in found.arms for run in arm.runs if run.by_prompt]
    if found.kind == "held-out" and any(each != asked[0] for each in asked):
        counts = " and ".join(map(str, sorted({len(each) for each in asked})))
        notes.append(
            f"the runs held out different questions ({counts}, {len(set.intersection(*map(set, asked)))} in common), "
            "so a difference may be theirs; hold out the same ones (gnomon evaluate RUN RUN asks both the same)"
        )
    judges = [run.judges for arm in found.arms for run in arm.runs if run.judges]
    if any(each != judges[0] for each in judges):
        every = dict.fromkeys(f"{name} ({digest})" for each in judges for name, digest in each.items())
        notes.append(
            f"the runs were judged by different rewards ({', '.join(every)}), so a difference may be theirs; judge all "
            "by the same ones (gnomon evaluate RUN RUN takes the first one's)"
        )
    if len({run.library for arm in found.arms for run in arm.runs}) > 1:
        notes.append("libraries score and log in ways of their own: see that reward, prompts and steps are the same")
    return notes


def _arm(name: str, runs: Sequence[LoggedScores]) -> LoggedArm:
    table = _table(runs, _shared(runs))
    # With prompts in common the bootstrap over runs and prompts applies. Without
    # them a run is one number, and only the spread between runs is known.
    interval = mean_over(table) if table.shape[1] > 1 else None
    if interval is None and len(runs) > 1:
        half = student_quantile(SIGNIFICANCE, len(runs) - 1) * float(table.std(ddof=1)) / math.sqrt(len(runs))
        interval = Interval(float(table.mean()) - half, float(table.mean()) + half)
    return LoggedArm(name, tuple(runs), float(table.mean()), interval, len(_shared(runs)))


def _contrasted(first: Sequence[LoggedScores], second: Sequence[LoggedScores]) -> tuple[float, Contrast | None, int]:
    """Return the difference, the contrast, and the prompts by which they are paired."""
    shared = _shared([*first, *second])
    # With fewer shared prompts the sign-flip test over prompts could not reach 5%, whatever the scores are.
    if len(shared) >= FEWEST:
        # A paired table needs as many rows on both sides: runs are paired in the order in which they were named.
        count = min(len(first), len(second))
        paired = contrast(*(_table(runs[:count], shared) for runs in (first, second)))
        return paired.mean, paired, len(shared)
    tables = [_table(runs, _shared(runs)) for runs in (first, second)]
    return float(tables[1].mean() - tables[0].mean()), unpaired(*tables), 0


def _shared(runs: Sequence[LoggedScores]) -> list[str]:
    return sorted(set.intersection(*(set(run.by_prompt) for run in runs)))


def _table(runs: Sequence[LoggedScores], prompts: Sequence[str]) -> Floats:
    """Return [runs, prompts], or [runs, 1] of their means where they share no prompt."""
    rows = [[run.by_prompt[prompt] for prompt in prompts] if prompts else [run.mean] for run in runs]
    return np.array(rows, dtype=np.float64)


def _offered(path: Path) -> dict[Kind, LoggedScores]:
    if is_foreign(path):
        return _of_foreign(read_foreign(path))
    RunDirectory.check(path)
    return _of_gnomon(RunRecord.of(path))


def _of_foreign(run: ForeignRun) -> dict[Kind, LoggedScores]:
    found: dict[Kind, LoggedScores] = {}
    # Held-out scores are those of the last evaluation; training rewards those
    # of the last tenth of the steps, since a single step's prompts are few.
    held_out = list(run.answered[True])[-1:]
    logged = [score for _, score in run.scores[-1:]]
    rewards = column(run.rows, REWARD)
    for kind, steps, level, curve in (
        ("held-out", held_out, logged, run.scores),
        ("training", _latest(list(run.answered[False]), run.last_step), _recent(rewards, run.last_step), rewards),
    ):
        by_prompt = _by_prompt([group for step in steps for group in run.groups(step, kind == "held-out")])
        if by_prompt or level:
            mean = _mean(by_prompt.values() if by_prompt else level)
            found[kind] = LoggedScores(run.path, run.library, run.last_step, mean, by_prompt, curve, run.notes)  # type: ignore[index]
    return found


def _of_gnomon(record: RunRecord) -> dict[Kind, LoggedScores]:
    rows = record.metrics()
    last = rows[-1]["step"] if rows else 0
    found: dict[Kind, LoggedScores] = {}
    judges = reward_digests(record.experiment(), record.card())
    notes = tuple(f"{name} changed while it went on: two codes judged it" for name in rejudged(record.card()))
    evaluations = read_evaluations(record.files.evaluations)
    if evaluations:
        answered = answered_after(record.files.answers, evaluations[-1].step)
        # Keyed by the digest of the question and not by its id, because other libraries do not know gnomon's ids.
        scores = {row.question: score for row in answered if (score := row.measure("avg")) is not None}
        mean = _mean(scores.values()) if scores else evaluations[-1].headline.mean
        curve = [(e.step, e.headline.mean) for e in evaluations]
        found["held-out"] = LoggedScores(record.path, "gnomon", last, mean, scores, curve, notes, judges)
    rewards = column(rows, REWARD)
    level = _recent(rewards, last)
    steps = _latest(record.rollout_steps(), last)
    by_prompt = _by_prompt([group for step in steps for group in groups_of(record.rollouts(step))])
    if by_prompt or level:
        mean = _mean(by_prompt.values() if by_prompt else level)
        found["training"] = LoggedScores(record.path, "gnomon", last, mean, by_prompt, rewards, notes, judges)
    return found


def _latest(steps: Sequence[int], last: int) -> list[int]:
    # The last tenth of the run; where nothing was recorded there, the newest step that was.
    return [step for step in steps if last - max(1, last // LATEST) < step <= last] or list(steps[-1:])


def _recent(rewards: Sequence[tuple[int, float]], last: int) -> list[float]:
    points = dict(rewards)
    return [points[step] for step in _latest(sorted(points), last)]


def _by_prompt(groups: Sequence[Group]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for group in groups:
        # Libraries differ in the white space around a prompt, which must not keep two logs of one question apart.
        rewards.setdefault(question_digest(group.task.text.strip()), []).extend(group.rewards)
    return {key: _mean(each) for key, each in rewards.items() if each}


def _mean(values: Any) -> float:
    listed = list(values)
    # The exact sum, so that the order in which a library logged its answers does not change the mean.
    return math.fsum(listed) / len(listed)


def arms_of(given: Sequence[str]) -> list[tuple[str, Path]]:
    """Return name and folder of each NAME=DIR or DIR, whose name is then the folder's.

    Raises:
        RunDirectoryError: There is no such folder.
    """
    found = []
    for each in given:
        name, equals, folder = each.partition("=")
        # A folder may have "=" in its own name: what exists as a whole is a folder.
        path = Path(folder if equals and not Path(each).exists() else each)
        RunDirectory.check_there(path)
        found.append((name if equals and path != Path(each) else real_path(path).name, path))
    if any(not name for name, _ in found):
        raise RunDirectoryError(f"a run has no name in {' '.join(given)}; write NAME=DIR")
    return found
