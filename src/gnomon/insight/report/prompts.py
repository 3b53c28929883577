"""How single prompts went over the run: learned, forgotten, never solved; and many of them at once as a map."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gnomon.core.svg import number_of
from gnomon.insight.report.scan import Scan, Visit

MOST_ROWS, MOST_COLUMNS = 36, 60
_CELL, _HIGH = 10, 9
_SHADES = 5
_EACH = 4
_SPARK = (180, 34)


@dataclass(frozen=True)
class RewardHistory:
    """One prompt over the run.

    Attributes:
        picture: Tracked value as a line, rewards as dots.
    """

    task_id: str
    question: str
    visits: int
    first: float
    last: float
    picture: Markup


@dataclass(frozen=True)
class PromptHistory:
    """Prompts that went alike."""

    title: str
    prompts: Sequence[RewardHistory]


@dataclass(frozen=True)
class PromptTable:
    """What there is to say of prompts.

    Attributes:
        asked: Prompts that were asked in the steps that were read.
        again: Those of them that were asked more than once.
        is_tracked: Whether there are tracked values.
        overview: The map, None where no prompt was asked twice.
    """

    asked: int
    again: int
    is_tracked: bool
    overview: Markup | None
    rows: int
    chapters: Sequence[PromptHistory]


def prompts_of(scan: Scan) -> PromptTable:
    """Return the histories of the prompts that were asked more than once."""
    again = {name: visits for name, visits in scan.visits.items() if len(visits) > 1}
    is_tracked = any(visit.value is not None for visits in again.values() for visit in visits)
    span = _span(scan.visits)
    rises = {name: _level(visits, -1) - _level(visits, 0) for name, visits in again.items()}
    most = sorted(again, key=lambda name: (-len(again[name]), name))
    stuck = [name for name in most if max(v.reward for v in again[name]) <= span[0] and span[1] > span[0]]
    chapters = {
        "Learned": sorted((name for name in most if rises[name] > 0), key=lambda name: -rises[name]),
        "Forgotten": sorted((name for name in most if rises[name] < 0), key=lambda name: rises[name]),
        "Never solved": stuck,
        "Asked most often": most,
    }
    listed = [
        PromptHistory(title, [_history(scan, name, span) for name in names[:_EACH]])
        for title, names in chapters.items()
        if names
    ]
    rows = min(len(again), MOST_ROWS)
    return PromptTable(len(scan.visits), len(again), is_tracked, overview(again, span), rows, listed)


def overview(visits: Mapping[str, Sequence[Visit]], span: tuple[float, float]) -> Markup | None:
    """Return a map: a row a prompt, a column a stretch of steps, stronger where its answers earned more.

    The prompts are those that were visited most, from those that ended lowest to those that ended highest.
    """
    if not visits:
        return None
    most = sorted(visits, key=lambda name: (-len(visits[name]), name))[:MOST_ROWS]
    names = sorted(most, key=lambda name: (_level(visits[name], -1), _level(visits[name], 0), name))
    steps = [visit.step for name in names for visit in visits[name]]
    first, last = min(steps), max(steps)
    columns = min(MOST_COLUMNS, last - first + 1)
    shades: dict[int, list[str]] = {}
    for row, name in enumerate(names):
        cells: dict[int, list[float]] = {}
        for visit in visits[name]:
            cells.setdefault((visit.step - first) * columns // (last - first + 1), []).append(visit.reward)
        for column, rewards in cells.items():
            shade = _shade(sum(rewards) / len(rewards), span)
            place = f"M{column * _CELL} {row * _CELL}h{_HIGH}v{_HIGH}h-{_HIGH}z"
            shades.setdefault(shade, []).append(place)
    paths = "".join(f'<path class="shade-{shade}" d="{"".join(parts)}"/>' for shade, parts in sorted(shades.items()))
    size = (columns * _CELL, len(names) * _CELL)
    said = f"Mean reward of {len(names)} prompts from step {first} to step {last}"
    return Markup(
        f'<svg class="map" role="img" aria-label="{said}" viewBox="0 0 {size[0]} {size[1]}" '
        f'style="max-width:{size[0] * 1.4:.0f}px"><title>{said}</title>{paths}</svg>'
    )


def _history(scan: Scan, name: str, span: tuple[float, float]) -> RewardHistory:
    visits = scan.visits[name]
    picture = _picture(visits, span)
    question = scan.questions.get(name, "")
    return RewardHistory(name, question, len(visits), visits[0].reward, visits[-1].reward, picture)


def _picture(visits: Sequence[Visit], span: tuple[float, float]) -> Markup:
    low, high = _wider(span, [v.value for v in visits if v.value is not None])
    kept = visits if len(visits) <= 60 else [visits[n * (len(visits) - 1) // 59] for n in range(60)]
    first, last = visits[0].step, visits[-1].step

    def place(step: int, value: float) -> tuple[str, str]:
        across = 4 + (step - first) / max(1, last - first) * (_SPARK[0] - 8)
        up = _SPARK[1] - 4 - (value - low) / (high - low) * (_SPARK[1] - 8)
        return number_of(across), number_of(up)

    places = [place(v.step, v.reward) for v in kept]
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in places)
    values = [place(v.step, v.value) for v in kept if v.value is not None]
    line = f'<path d="M{"L".join(" ".join(p) for p in values)}"/>' if values else ""
    frame = f'class="history" viewBox="0 0 {_SPARK[0]} {_SPARK[1]}" aria-hidden="true"'
    return Markup(f"<svg {frame}>{line}{dots}</svg>")


def _level(visits: Sequence[Visit], end: int) -> float:
    """Return the mean reward of the first or the last third of the visits."""
    count = max(1, len(visits) // 3)
    chosen = visits[:count] if end == 0 else visits[-count:]
    return sum(v.reward for v in chosen) / count


def _span(visits: Mapping[str, Sequence[Visit]]) -> tuple[float, float]:
    rewards = [v.reward for listed in visits.values() for v in listed]
    return (min(rewards), max(rewards)) if rewards else (0.0, 1.0)


def _wider(span: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    low, high = min([span[0], *values]), max([span[1], *values])
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _shade(value: float, span: tuple[float, float]) -> int:
    if span[1] <= span[0] or not math.isfinite(value):
        return _SHADES // 2
    return min(_SHADES, max(0, round((value - span[0]) / (span[1] - span[0]) * _SHADES)))
