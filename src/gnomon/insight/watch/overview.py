"""The first pane: how it goes, at one look."""

from collections.abc import Sequence

from rich.text import Text

from gnomon.diagnosis import Sample
from gnomon.insight.watch.draw import chart, progress, spark
from gnomon.insight.watch.glance import Glance
from gnomon.insight.watch.head import banner
from gnomon.insight.watch.lines import (
    BAD,
    CALM,
    FAINT,
    GOOD,
    QUIET,
    WARN,
    beside,
    fitted,
    labeled,
    line,
    stacked,
    title,
)
from gnomon.insight.watch.terms import HEALTH, REWARD, STAGES, Term, written
from gnomon.insight.watch.text import one_line, wrapped
from gnomon.records.damage import in_words
from gnomon.records.phase import duration

COLORS = {"severe": BAD, "warning": WARN, "note": CALM}
_SMALLEST_TWO_COLUMNS = 70
_GAP = " │ "
_TALLEST = 14


def overview(glance: Glance, width: int, height: int) -> list[Text]:
    """Return the overview in ``height`` lines of ``width`` cells at most; with more room curves become taller."""
    above = banner(glance, width)
    if glance.state == "absent":
        return fitted(above[: max(height, 1)], width)
    below = [*_examples(glance, width), *_found(glance, width), *_damage(glance)]
    room = height - len(above) - len(below) - 1 - bool(above)
    half = (width - len(_GAP)) // 2
    if width >= _SMALLEST_TWO_COLUMNS:
        other = width - len(_GAP) - half
        right = [stages(glance, other), speed(glance, other), evaluation(glance, other), serving(glance, other)]
        middle = beside(_learning(glance, half, room), stacked(right, room), half, _GAP)
    else:
        middle = stacked([_learning(glance, width, max(room // 2, 6)), evaluation(glance, width)], room)
    shown = [*above, *([line()] if above else []), *middle[: max(room, 0)], line(), *below]
    return fitted(shown[: max(height, 1)], width)


def _learning(glance: Glance, width: int, height: int) -> list[Text]:
    """Return the reward as a curve, and a line for each measure of health that the run has."""
    if not glance.rows:
        return [title("reward", width), *(line((row, QUIET)) for row in wrapped(_before_the_first(glance), width))]
    rows = [health(glance, term, width) for term in HEALTH if glance.series(term.name)]
    tall = max(3, min(height - 2 - len(rows), height // 2, _TALLEST))
    curve = [
        title(REWARD.label, width, _change(glance)),
        *curve_lines(glance.series(REWARD.name), REWARD, width, tall),
    ]
    return stacked([curve, [title("health", width, "step 1 to now"), *rows]], height)


def curve_lines(values: Sequence[float], term: Term, width: int, height: int) -> list[Text]:
    """Return a curve with its scale at the left."""
    if not values:
        return []
    low, high = scale(values, term.least)
    names = [term.said(high), *[""] * (height - 2), *([term.said(low)] if height > 1 else [])]
    wide = max(map(len, names))
    rows = chart(values, max(width - wide - 1, 1), height, low, high)
    return [line((f"{name:>{wide}} ", QUIET), (row, CALM)) for name, row in zip(names, rows, strict=True)]


def scale(values: Sequence[float], least: float) -> tuple[float, float]:
    """Return the lowest and the highest value, or where they differ by less than is worth drawing a range around them.

    Values from 0 to 1 that come near 0 begin there.

    >>> scale([2.0, 3.0], 0.01), scale([0.1, 0.4], 0.01), scale([0.0, 0.0], 0.01)
    ((2.0, 3.0), (0.0, 0.4), (0.0, 1.0))
    """
    low, high = min(values), max(values)
    if high - low <= max(least, 1e-6 * max(abs(high), abs(low))):
        top = 1.0 if high <= 1 < 1.5 * high else 1.5 * high
        return (low / 2, top) if low > 0 else (low, low + (100 * least or 1.0))
    return (0.0, high) if 0 <= low < high <= 1 and low < high / 2 else (low, high)


def health(glance: Glance, term: Term, width: int) -> Text:
    """Return a measure's name, the latest value there is, and its course on one line."""
    values = glance.series(term.name)
    return labeled(term.label, term.said(values[-1]), width, (spark(values, width - 22, term.least), FAINT))


def stages(glance: Glance, width: int) -> list[Text]:
    """Return which share of a step's time each stage takes, over the last 20 steps."""
    whole = glance.recent("time/step_seconds")
    if not whole:
        return []
    lines = [title("time of a step", width, f"{whole:.1f} s" if whole < 60 else duration(whole))]
    for stage, called in STAGES:
        share = (glance.recent(f"time/{stage}_seconds") or 0.0) / whole
        if share >= 0.005:
            lines.append(
                labeled(called, f"{100 * share:.0f}%", width, (progress(share, max(width - 19, 1))[0], CALM), 11, 4)
            )
    return lines


def speed(glance: Glance, width: int) -> list[Text]:
    """Return the tokens a second, their course, and what the process takes."""
    rates = [
        row["tokens/generated"] / row["time/step_seconds"]
        for row in glance.rows
        if "tokens/generated" in row and row.get("time/step_seconds", 0.0) > 0
    ]
    if not rates:
        return []
    wasted, memory = glance.recent("tokens/wasted_fraction"), glance.last.get("memory/peak_bytes")
    said = [] if wasted is None else [f"{100 * (1 - wasted):.0f}% trained"]
    said += [] if memory is None else [written(memory, "bytes")]
    return [
        title("throughput", width, ", ".join(said)),
        labeled("tokens/s", written(rates[-1], "count"), width, (spark(rates, width - 22), FAINT)),
    ]


def serving(glance: Glance, width: int) -> list[Text]:
    """Return who answers, who grades, what waits, and how old answers are."""
    last, lines = glance.last, []
    if "engines/alive" in last:
        lost = sum(glance.series("engines/lost"))
        alive = f"{last['engines/alive']:.0f} at work"
        gone = (f"{lost:.0f} lost", WARN) if lost else _kind(glance)
        lines.append(labeled("engines", alive, width, gone))
    if "stream/in_flight_groups" in last:
        waiting, ready = last["stream/in_flight_groups"], last.get("stream/finished_groups", 0)
        rest = f"{ready:.0f} ready, {duration(last.get('time/wait_seconds', 0.0))} wait"
        lines.append(labeled("queue", f"{waiting:.0f} asked", width, rest))
    if "stream/staleness_steps_mean" in last:
        bound = glance.table.get("max_staleness", 0)
        rest = f"most {last.get('stream/staleness_steps_max', 0):.0f}, allowed {one_line(str(bound), 8)}"
        lines.append(labeled("staleness", f"{last['stream/staleness_steps_mean']:.2f}", width, rest))
    return [title("engines and queue", width), *lines] if lines else []


def evaluation(glance: Glance, width: int) -> list[Text]:
    """Return the last evaluation with its interval, and the first one to compare it with."""
    if not glance.evaluations:
        return []
    last, first = glance.evaluations[-1], glance.evaluations[0]
    lines = [title("evaluation", width, f"{one_line(last.name, 20)}, {last.prompts} prompts")]
    shown = [last] if first is last else [last, first]
    for found in shown:
        style = GOOD if found is last and first is not last and last.low > first.high else ""
        lines.append(line((f"step {found.step:<6}", QUIET), (f" {found}", style)))
    return lines


def _examples(glance: Glance, width: int) -> list[Text]:
    """Return the best and the worst answer of the newest step, a line each."""
    samples = glance.samples
    marked = [("best ", GOOD, samples.best[:1]), ("worst", BAD, samples.worst[:1])]
    marked += [("error", WARN, samples.failed[:1])] if samples.failed else []
    return [example(word, style, sample, width) for word, style, found in marked for sample in found]


def example(word: str, style: str, sample: Sample, width: int) -> Text:
    """Return a sample on one line: its reward, the end of its question, the beginning of its answer."""
    reward = "   -  " if sample.reward is None else f"{sample.reward:6.2f}"
    room = max(width - len(word) - len(reward) - 6, 8)
    asked = one_line(sample.question, room // 3)
    answered = one_line(sample.error or sample.response, room - len(asked))
    return line((word, style), f"{reward}  ", (asked, QUIET), ("  → ", QUIET), answered)


def _found(glance: Glance, width: int) -> list[Text]:
    """Return the worst finding and how many there are, on one line."""
    if not glance.findings:
        return [line(("no findings so far", QUIET))]
    worst, others = glance.findings[0], len(glance.findings) - 1
    more = f"  and {others} more, press f" if others else "  press f"
    shown = one_line(worst.summary, max(width - len(more) - 2, 8))
    return [line(("▲ ", COLORS[worst.severity]), shown, (more, QUIET))]


def _damage(glance: Glance) -> list[Text]:
    return [line((in_words(glance.damaged), WARN))] if glance.damaged else []


def _change(glance: Glance) -> str:
    now = glance.last.get(REWARD.name)
    return "" if now is None else f"{now:.3f} now"


def _before_the_first(glance: Glance) -> str:
    if not glance.teaching:
        return "no step yet: it loads, or evaluates what it begins with"
    last = glance.teaching[-1]
    return f"teaching the critic, batch {last['step']}: explains {last.get('critic/explained_variance', 0.0):.2f}"


def _kind(glance: Glance) -> str:
    plan = glance.table.get("engine")
    kind = plan.get("kind") if isinstance(plan, dict) else ""
    grading = glance.table.get("grading")
    workers = grading.get("workers") if isinstance(grading, dict) else None
    return f"{one_line(str(kind or ''), 12)}, {one_line(str(workers), 6)} graders" if workers else str(kind or "")
