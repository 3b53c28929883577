"""Several runs beside each other: curves over each other, final scores with intervals, and what differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gnomon.core.atomic_files import real_path
from gnomon.core.svg import COLORS, Series, chart
from gnomon.core.tables import flat, packaged_toml, value_at
from gnomon.insight.report import facts
from gnomon.insight.report.curves import NARROW, WIDE, Panel, evaluated
from gnomon.insight.report.plots import Rows
from gnomon.records.console import duration
from gnomon.records.corruption import damaged, in_words
from gnomon.records.reading import RunRecord, column
from gnomon.records.run_card import reward_digests
from gnomon.training.evaluate import Evaluation, read_evaluations

_MOST_DIFFERENCES = 120
_SMOOTHED = 5


@dataclass(frozen=True)
class _Run:
    name: str
    record: RunRecord
    rows: Rows
    evaluations: Sequence[Evaluation]
    experiment: Mapping[str, Any]


def compared(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the page says of several runs, by name.

    ``damaged`` has a sentence for each run of which lines were passed over; ``settings`` and ``machines`` have what is
    not the same everywhere, with its value in each run.
    """
    names = distinct([record.path for record in records])
    runs = [
        _Run(name, record, record.metrics(), read_evaluations(record.files.evaluations), record.experiment())
        for name, record in zip(names, records, strict=True)
    ]
    # Dotted keys, so that settings can be laid beside each other whatever their nesting.
    experiments = [flat(run.experiment) for run in runs]
    machines = [dict(facts.card_rows(run.record.card())) for run in runs]
    return {
        "names": names,
        "lines": [_line(run, place, _score_name(run, runs)) for place, run in enumerate(runs)],
        "verdict": _verdict(runs),
        # Rollouts are not looked at on this page.
        "damaged": [
            f"{run.name}: {in_words(found)}" for run in runs if (found := damaged(run.record.files, rollouts=0))
        ],
        "panels": _panels(runs),
        "settings": _unlike(experiments),
        "machines": [(key, values) for key, values in _unlike(machines) if key not in ("Started", "Sessions")],
    }


def distinct(paths: Sequence[Path]) -> list[str]:
    """Return names of runs that tell them apart: the last parts of their paths, as many as are needed.

    >>> distinct([Path("a/seed0"), Path("b/seed0")])
    ['a/seed0', 'b/seed0']
    """
    parts = [real_path(path).parts for path in paths]
    # One run may be named twice, by a link: then no number of parts tells its names apart.
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(("/".join(part[-1:]) for part in parts), start=1)]


def _score_name(run: _Run, runs: Sequence[_Run]) -> str:
    """Return the name of a run's held-out score, with a digest where the runs have different rewards of that name."""
    if not run.evaluations:
        return "-"
    name = next(iter(run.evaluations[-1].scores))
    # Two runs may have each a reward "accuracy" that judges otherwise;
    # equal names must not make their scores look comparable.
    every = [reward_digests(one.experiment, one.record.card()).get(name) for one in runs]
    own = reward_digests(run.experiment, run.record.card()).get(name)
    return f"{name} ({own})" if own and len(set(every)) > 1 else name


def _line(run: _Run, place: int, score: str) -> dict[str, Any]:
    """Return the row of a run: the number of its curves' color, and its cells."""
    first, last = (run.evaluations[0], run.evaluations[-1]) if run.evaluations else (None, None)
    rewards = [value for _, value in column(run.rows, "rollout/reward_mean")]
    tokens = facts.total(run.rows, "tokens/generated")
    # The first share is what was trained on.
    wasted = sum(share.fraction for share in facts.waste_shares(run.rows)[1:])
    return {
        "name": run.name,
        # Colors are classes of the page's style, counted from 1, and repeat after the last.
        "color": place % len(COLORS) + 1,
        "algorithm": str(value_at(run.experiment, "algorithm.name") or "-"),
        "done": run.rows[-1]["step"] if run.rows else 0,
        "state": run.record.state(),
        "score": score,
        "before": "-" if first is None else first.headline.shown,
        "held_out": "-" if last is None else last.headline.shown,
        "interval": "" if last is None else f"{last.headline.low:.3f} to {last.headline.high:.3f}",
        "reward": f"{facts.ends(rewards)[1]:.3f}" if rewards else "-",
        "tokens": f"{tokens:,.0f}",
        "wasted": f"{wasted:.0%}" if tokens > 0 else "-",
        "time": duration(facts.worked_seconds(run.rows)),
    }


def _verdict(runs: Sequence[_Run]) -> str:
    """Return what intervals allow to say of the final scores; nothing where they are of different questions."""
    last = [(run.name, run.evaluations[-1]) for run in runs if run.evaluations]
    # A run without an evaluation cannot be ranked, and leaving it out would hide that.
    if len(last) < 2 or len(last) < len(runs):
        return ""
    if len({(e.task, e.prompts) for _, e in last}) > 1:
        return "The runs were evaluated on different questions, so their held-out scores cannot be compared."
    names = {_score_name(run, runs) for run in runs}
    if len(names) > 1:
        return (
            f"The runs were judged by different rewards ({', '.join(sorted(names))}): their scores cannot be compared."
        )
    # The sort is stable: of equal scores the first named comes first.
    (name, best), (_, second) = sorted(last, key=lambda pair: -pair[1].headline.mean)[:2]
    highest = [name for name, one in last if one.headline.mean == best.headline.mean]
    if len(highest) > 1:
        who = "All runs are" if len(highest) == len(last) else f"{', '.join(highest)} are"
        return f"{who} tied at {best.headline.mean:.3f}. Each interval is of one run; other seeds would add to it."
    # Intervals that do not overlap are a stricter test than an
    # interval of the difference, which one run each does not give.
    if best.headline.low > second.headline.high:
        return f"{name} ended highest; its interval lies above all others."
    return (
        f"{name} ended highest, but the intervals overlap: which of them is best cannot be told from these prompts. "
        "Each interval is of one run; other seeds would add to it."
    )


def _panels(runs: Sequence[_Run]) -> list[Panel]:
    score = [one for run in runs for one in evaluated(run.evaluations, run.name)]
    found = [_panel("Held-out score", "The first score of each evaluation, with 95% intervals.", score, "step")]
    reward = [_series(run, "rollout/reward_mean") for run in runs]
    # Equal steps are not equal costs, so the same curves are drawn over tokens and over time too.
    by_tokens = [_over(run, one, "tokens/generated", 1e-3) for run, one in zip(runs, reward, strict=True)]
    by_time = [_over(run, one, "", 1 / 60) for run, one in zip(runs, reward, strict=True)]
    note = "Mean over windows of a few steps."
    found.append(_panel("Training reward", note, reward, "step"))
    found.append(_panel("Training reward by tokens", note, by_tokens, "thousand tokens generated"))
    found.append(_panel("Training reward by time", note, by_time, "minutes of work"))
    for title, name in _OTHERS.items():
        found.append(_panel(title, "", [_series(run, name) for run in runs], "step"))
    return [panel for panel in found if panel is not None]


_OTHERS: Mapping[str, str] = packaged_toml("gnomon.insight", "words.toml")["compared"]


def _panel(title: str, note: str, series: Sequence[Series], x_label: str) -> Panel | None:
    drawn = [one for one in series if one.xs]
    if not drawn:
        return None
    wide, narrow = (Markup(chart(drawn, title, x_label, "", size=size)) for size in (WIDE, NARROW))
    return Panel(title, note, narrow, wide if title in ("Held-out score", "Training reward") else None)


def _series(run: _Run, name: str) -> Series:
    points = column(run.rows, name)
    # At most an eighth of a short run, or its whole course would be one mean.
    window = max(1, min(_SMOOTHED, len(points) // 8))
    ys = [value for _, value in points]
    windows = (ys[max(0, end - window) : end] for end in range(1, len(ys) + 1))
    return Series(run.name, [step for step, _ in points], [sum(some) / len(some) for some in windows])


def _over(run: _Run, series: Series, name: str, unit: float) -> Series:
    """Return the series over what had been spent by each step: the sum of a metric, or seconds of work."""
    spent: dict[float, float] = {}
    total = 0.0
    for step, value in column(run.rows, name or "seconds"):
        # A metric is summed; seconds of work are recorded as a running total.
        total = total + value if name else value
        spent[step] = total * unit
    kept = [(spent[x], y) for x, y in zip(series.xs, series.ys, strict=True) if x in spent]
    return Series(series.name, [x for x, _ in kept], [y for _, y in kept])


def _unlike(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    keys = sorted({key for table in tables for key in table})
    rows = [(key, [facts.shown(table.get(key)) for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1][:_MOST_DIFFERENCES]
