"""The curves of a page: which metrics stand together, with intervals where they are known, and what happened when."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from gnomon.core.svg import Mark, Series, chart, number_of, thinned
from gnomon.diagnosis.finding import Finding
from gnomon.insight.report.plots import CAUSES, PLOTS, Plot, Rows, Z, color_of
from gnomon.records.jsonl import is_number, waste_cause
from gnomon.records.reading import column
from gnomon.training.evaluate import Evaluation

WIDE, HALF, NARROW = (820, 300), (600, 340), (360, 230)
"""Sizes of a picture that has the width of the page, that has findings beside it, and of a small one."""
_MOST_MARKS = 24


@dataclass(frozen=True)
class Panel:
    """A picture of curves and a sentence about it.

    Attributes:
        wide: The picture for a wide screen, where there is one.
        is_zero: Whether nothing in it is ever anything but 0.
    """

    title: str
    note: str
    picture: Markup
    wide: Markup | None = None
    is_zero: bool = False


@dataclass(frozen=True)
class CurveSettings:
    """How a step asks.

    Attributes:
        prompts: Prompts of a step.
        each: Answers to one prompt.
        intervals: The interval of each step's mean reward, where it is known.
    """

    prompts: int = 1
    each: int = 1
    intervals: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def reward_picture(
    rows: Rows, asked: CurveSettings, evaluations: Sequence[Evaluation], marks: Sequence[Mark], size: tuple[int, int]
) -> Markup:
    """Return training reward with its interval, and the held-out score with its own.

    Where the rollouts of a step were not read its interval is mean ± 1.96 std / sqrt(prompts): as if the answers to one
    prompt were a single draw, which is too wide rather than too narrow.
    """
    deviations = dict(column(rows, "rollout/reward_std"))
    rewards = column(rows, "rollout/reward_mean")
    ends = []
    for step, mean in rewards:
        # Without a deviation the ends are nan, which the picture leaves out.
        half = Z * deviations.get(step, math.nan) / math.sqrt(asked.prompts)
        ends.append(asked.intervals.get(step, (mean - half, mean + half)))
    drawn = [Series("training reward", *_split(rewards), [low for low, _ in ends], [high for _, high in ends])]
    drawn += evaluated(evaluations, f"held out: {_headline(evaluations)}")
    return Markup(chart(drawn, "Reward", "step", "", marks, size))


def evaluated(evaluations: Sequence[Evaluation], name: str, score: str = "") -> list[Series]:
    """Return a score of each evaluation, by default the first, with its interval as one series; none without any."""
    found = [(e.step, e.scores[score] if score else e.headline) for e in evaluations if not score or score in e.scores]
    steps, scores = [step for step, _ in found], [s for _, s in found]
    ends = [s.mean for s in scores], [s.low for s in scores], [s.high for s in scores]
    return [Series(name, steps, *ends, style="points")] if found else []


def learning_panels(
    rows: Rows, asked: CurveSettings, evaluations: Sequence[Evaluation], marks: Sequence[Mark]
) -> list[Panel]:
    """Return reward, held-out scores, parts of the reward, lengths, and groups where there are any."""
    note = (
        "The band is the 95% interval of each step's mean over prompts, bars are those of evaluations on held-out "
        "prompts. Dashed lines are evaluations, checkpoints and findings, listed below."
    )
    # Small pictures have no room for the texts of marks.
    plain = [unlabeled(mark) for mark in marks]
    # Only training on the dataset's answers has a perplexity: there the loss is what a run is for, and not a reward.
    if column(rows, "loss/perplexity"):
        panels = [_loss_panel(rows, evaluations, marks, plain)]
        if evaluations:
            drawn = evaluated(evaluations, _headline(evaluations))
            scored = Markup(chart(drawn, "Held-out scores", "step", "", plain, NARROW))
            panels.append(Panel("Held-out scores", "With 95% intervals.", scored))
    else:
        wide = reward_picture(rows, asked, evaluations, marks, HALF)
        panels = [Panel("Reward", note, reward_picture(rows, asked, evaluations, plain, NARROW), wide)]
    others = _other_scores(evaluations)
    if others:
        series = [one for name in others[:6] for one in evaluated(evaluations, name, name)]
        picture = chart(series, "Other held-out scores", "step", "", plain, NARROW)
        panels.append(Panel("Other held-out scores", "With 95% intervals over prompts.", Markup(picture)))
    # One part alone is the reward itself.
    parts = sorted({n for row in rows for n in row if n.startswith("reward/") and n.endswith("_mean")})
    if len(parts) > 1:
        names = {n: n.removeprefix("reward/").removesuffix("_mean") for n in parts[:8]}
        panels += panels_of(rows, [Plot("Parts of the reward", "before weighting", names)], plain)
    return panels + panels_of(rows, PLOTS["learning"] + (PLOTS["groups"] if asked.each > 1 else ()), plain)


def _loss_panel(rows: Rows, evaluations: Sequence[Evaluation], marks: Sequence[Mark], plain: Sequence[Mark]) -> Panel:
    """Return the loss on the dataset's answers, in training and of the held-out ones."""
    held_out = [(e.step, e.loss_nats) for e in evaluations if e.loss_nats is not None]
    drawn = [Series("training loss", *_split(column(rows, "loss/policy")))]
    drawn += [Series("held-out loss", *_split(held_out), style="points")] if held_out else []
    note = (
        "Mean negative log-likelihood of an answer's token. Held-out loss that rises while the other falls is overfit."
    )
    small, wide = (
        Markup(chart(drawn, "Loss", "step", "nats a token", at, size)) for at, size in ((plain, NARROW), (marks, HALF))
    )
    return Panel("Loss", note, small, wide)


def time_panels(rows: Rows, marks: Sequence[Mark]) -> list[Panel]:
    """Return seconds, throughput and memory."""
    # Throughput and GiB are computed here, so that they are drawn by the same code as what was recorded.
    derived = [dict(row) | _derived(row) for row in rows]
    speed = Plot("Throughput", "tokens a second", {"tokens_per_second": "generated and trained on"})
    return panels_of(derived, (PLOTS["time"][0], speed, PLOTS["time"][1]), marks)


def waste_panels(rows: Rows, marks: Sequence[Mark]) -> list[Panel]:
    """Return the tokens without a gradient, by cause where that is known."""
    causes = sorted({n for row in rows for n in row if waste_cause(n)})
    # A picture has eight colors.
    seen = [n for n in causes if any(value > 0 for _, value in column(rows, n))][:7]
    names = {n: waste_cause(n).replace("_", " ") for n in seen}
    colors = {n: color_of(waste_cause(n), CAUSES) for n in seen}
    # One cause alone is the whole.
    by_cause = [Plot("Wasted tokens by cause", "fraction of tokens", names, colors=colors)] if len(names) > 1 else []
    return panels_of(rows, [*PLOTS["waste"], *by_cause], marks)


def unlabeled(mark: Mark) -> Mark:
    """Return the mark without its text, for small pictures."""
    return Mark(mark.x, "", mark.tone)


def marks_of(evaluations: Sequence[Evaluation], checkpoints: Sequence[int], findings: Sequence[Finding]) -> list[Mark]:
    """Return what happened when; where there were too many of a kind to tell apart, that kind is left out."""
    found: list[Mark] = []
    if len(evaluations) <= _MOST_MARKS:
        found += [Mark(e.step, "evaluation") for e in evaluations]
    if len(checkpoints) <= _MOST_MARKS:
        found += [Mark(step, "checkpoint") for step in checkpoints if step not in {e.step for e in evaluations}]
    # Severe findings first, so that they stay where there are too many.
    worst = sorted(findings, key=lambda f: f.severity != "severe")[:_MOST_MARKS]
    tones: Mapping[str, Any] = {"severe": "severe", "warning": "warning"}
    return found + [Mark(f.first_step, f.rule, tones.get(f.severity, "plain")) for f in worst]


@dataclass(frozen=True)
class MetricRow:
    """A metric as one line of a table: a small picture, and numbers."""

    name: str
    picture: Markup
    first: float
    last: float
    low: float
    high: float


def everything(rows: Rows) -> list[MetricRow]:
    """Return every metric of the run in order of names."""
    columns: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        # One pass over all rows: `column` for each of hundreds of metrics would read them as many times.
        for name, value in row.items():
            if is_number(value):
                columns.setdefault(name, []).append((row["step"], value))
    found = []
    for name, points in sorted(columns.items()):
        if name not in ("step", "seconds"):
            ys = [y for _, y in points]
            found.append(MetricRow(name, sparkline(points), ys[0], ys[-1], min(ys), max(ys)))
    return found


def sparkline(points: Sequence[tuple[float, float]], size: tuple[int, int] = (110, 18)) -> Markup:
    """Return a curve without axes, from the smallest to the largest of its numbers."""
    kept = thinned([(x, y, math.nan, math.nan) for x, y in points], 40)
    xs, ys = [p[0] for p in kept], [p[1] for p in kept]
    wide, high = max(xs) - min(xs), max(ys) - min(ys)
    across = [(x - min(xs)) / wide * (size[0] - 2) + 1 if wide > 0 else size[0] / 2 for x in xs]
    up = [size[1] - 1 - (y - min(ys)) / high * (size[1] - 2) if 0 < high < math.inf else size[1] / 2 for y in ys]
    line = "L".join(f"{number_of(x)} {number_of(y)}" for x, y in zip(across, up, strict=True))
    # The last stroke of a tenth makes a curve of a single point visible.
    drawn = f'<path d="M{line}h.1"/>'
    return Markup(f'<svg class="spark" viewBox="0 0 {size[0]} {size[1]}" aria-hidden="true">{drawn}</svg>')


def panels_of(rows: Rows, plots: Sequence[Plot], marks: Sequence[Mark]) -> list[Panel]:
    """Return a picture of each plot of which a metric was measured; curves that are 0 throughout are named below it."""
    panels = []
    for plot in plots:
        series = [
            Series(label, *_split(column(rows, name)), color=plot.colors.get(name))
            for name, label in plot.names.items()
        ]
        there = [one for one in series if one.xs]
        # Lines that are 0 all the time lie on the axis and hide each other, so they are named in the note.
        moving = [one for one in there if any(one.ys)]
        still = [one.name for one in there if not any(one.ys)] if moving else []
        note = f"{plot.note} Zero throughout: {', '.join(still)}." if still else plot.note
        if there:
            picture = chart(moving or there, plot.title, "step", plot.y_label, marks, NARROW)
            panels.append(Panel(plot.title, note.strip(), Markup(picture), is_zero=not moving))
    return panels


def _other_scores(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of the scores beside the first that are not the same as it."""
    if not evaluations:
        return []
    # A task's score and the sum of its parts may be the same numbers under two names: one picture is enough.
    first = _headline(evaluations)
    return [n for n in evaluations[-1].scores if any(e.scores.get(n) != e.scores.get(first) for e in evaluations)]


def _headline(evaluations: Sequence[Evaluation]) -> str:
    return next(iter(evaluations[-1].scores)) if evaluations else ""


def _derived(row: Mapping[str, Any]) -> dict[str, float]:
    values = {name: dict(column([row], name)).get(row["step"]) for name in _DERIVED}
    seconds, tokens, peak = (values[name] for name in _DERIVED)
    speed = {"tokens_per_second": tokens / seconds} if seconds and tokens is not None else {}
    return speed | ({"memory/peak_gib": peak / 2**30} if peak is not None else {})


_DERIVED = ("time/step_seconds", "tokens/generated", "memory/peak_bytes")


def _split(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
