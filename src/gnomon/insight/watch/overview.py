"""The first pane: how it goes, at one look."""

from collections.abc import Sequence

from rich.text import Text

from gnomon.core.tables import reach
from gnomon.diagnosis import FindingSample
from gnomon.insight.watch.draw import chart, progress, spark
from gnomon.insight.watch.header import banner
from gnomon.insight.watch.lines import (
    BAD,
    CALM,
    FAINT,
    GOOD,
    QUIET,
    WARN,
    fitted,
    labeled,
    line,
    side_by_side,
    stacked,
    title,
)
from gnomon.insight.watch.metric_labels import HEALTH, LOSS, REWARD, STAGES, Term, written
from gnomon.insight.watch.run_snapshot import RunSnapshot
from gnomon.insight.watch.text import one_line, wrapped
from gnomon.records.corruption import in_words
from gnomon.records.phase import duration

COLORS = {"severe": BAD, "warning": WARN, "note": CALM}
_SMALLEST_TWO_COLUMNS = 70
_GAP = " │ "
_TALLEST = 14


def overview(snapshot: RunSnapshot, width: int, height: int) -> list[Text]:
    """Return the overview in ``height`` lines of ``width`` cells at most; with more room curves become taller."""
    above = banner(snapshot, width)
    if snapshot.state == "absent":
        return fitted(above[: max(height, 1)], width)
    below = [*_examples(snapshot, width), *_found(snapshot, width), *_damage(snapshot)]
    room = height - len(above) - len(below) - 1 - bool(above)
    half = (width - len(_GAP)) // 2
    if width >= _SMALLEST_TWO_COLUMNS:
        other = width - len(_GAP) - half
        right = [stages(snapshot, other), speed(snapshot, other), evaluation(snapshot, other), serving(snapshot, other)]
        middle = side_by_side(_learning(snapshot, half, room), stacked(right, room), half, _GAP)
    else:
        middle = stacked([_learning(snapshot, width, max(room // 2, 6)), evaluation(snapshot, width)], room)
    shown = [*above, *([line()] if above else []), *middle[: max(room, 0)], line(), *below]
    return fitted(shown[: max(height, 1)], width)


def _learning(snapshot: RunSnapshot, width: int, height: int) -> list[Text]:
    """Return the reward as a curve, and a line for each measure of health that the run has."""
    if not snapshot.rows:
        return [title("reward", width), *(line((row, QUIET)) for row in wrapped(_before_the_first(snapshot), width))]
    rows = [health(snapshot, term, width) for term in HEALTH if snapshot.series(term.name)]
    tall = max(3, min(height - 2 - len(rows), height // 2, _TALLEST))
    term = objective(snapshot)
    curve = [title(term.label, width, _change(snapshot)), *curve_lines(snapshot.series(term.name), term, width, tall)]
    return stacked([curve, [title("health", width, f"step {snapshot.rows[0]['step']} to now"), *rows]], height)


def objective(snapshot: RunSnapshot) -> Term:
    """Return what a run is for: its reward, or the loss where it is trained on the dataset's answers."""
    return LOSS if "loss/perplexity" in snapshot.last else REWARD


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


def health(snapshot: RunSnapshot, term: Term, width: int) -> Text:
    """Return a measure's name, the latest value there is, and its course on one line."""
    values = snapshot.series(term.name)
    return labeled(term.label, term.said(values[-1]), width, (spark(values, width - 22, term.least), FAINT))


def stages(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return which share of a step's time each stage takes, over the last 20 steps."""
    whole = snapshot.recent("time/step_seconds")
    if not whole:
        return []
    lines = [title("time of a step", width, f"{whole:.1f} s" if whole < 60 else duration(whole))]
    for stage, called in STAGES:
        share = (snapshot.recent(f"time/{stage}_seconds") or 0.0) / whole
        if share >= 0.005:
            lines.append(
                labeled(called, f"{100 * share:.0f}%", width, (progress(share, max(width - 19, 1))[0], CALM), 11, 4)
            )
    return lines


def speed(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the tokens a second, their course, and what the process takes."""
    rates = [
        row["tokens/generated"] / row["time/step_seconds"]
        for row in snapshot.rows
        if "tokens/generated" in row and row.get("time/step_seconds", 0.0) > 0
    ]
    if not rates:
        return []
    wasted, memory = snapshot.recent("tokens/wasted_fraction"), snapshot.last.get("memory/peak_bytes")
    said = [] if wasted is None else [f"{100 * (1 - wasted):.0f}% trained"]
    said += [] if memory is None else [written(memory, "bytes")]
    return [
        title("throughput", width, ", ".join(said)),
        labeled("tokens/s", written(rates[-1], "count"), width, (spark(rates, width - 22), FAINT)),
    ]


def serving(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return who answers, who grades, what waits, and how old answers are."""
    last, lines = snapshot.last, []
    if "engines/alive" in last:
        lost = sum(snapshot.series("engines/lost"))
        alive = f"{last['engines/alive']:.0f} at work"
        gone = (f"{lost:.0f} lost", WARN) if lost else _kind(snapshot)
        lines.append(labeled("engines", alive, width, gone))
    if "stream/in_flight_groups" in last:
        waiting, ready = last["stream/in_flight_groups"], last.get("stream/finished_groups", 0)
        rest = f"{ready:.0f} ready, {duration(last.get('time/wait_seconds', 0.0))} wait"
        lines.append(labeled("queue", f"{waiting:.0f} asked", width, rest))
    if "stream/staleness_steps_mean" in last:
        bound = snapshot.table.get("max_staleness", 0)
        rest = f"most {last.get('stream/staleness_steps_max', 0):.0f}, allowed {one_line(str(bound), 8)}"
        lines.append(labeled("staleness", f"{last['stream/staleness_steps_mean']:.2f}", width, rest))
    return [title("engines and queue", width), *lines] if lines else []


def evaluation(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the last evaluation with its interval, and the first one to compare it with."""
    if not snapshot.evaluations:
        return []
    last, first = snapshot.evaluations[-1], snapshot.evaluations[0]
    lines = [title("evaluation", width, f"{one_line(last.name, 20)}, {last.prompts} prompts")]
    shown = [last] if first is last else [last, first]
    for found in shown:
        style = GOOD if found is last and first is not last and last.low > first.high else ""
        lines.append(line((f"step {found.step:<6}", QUIET), (f" {found}", style)))
    return lines


def _examples(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the best and the worst answer of the newest step, a line each."""
    samples = snapshot.samples
    marked = [("best ", GOOD, samples.best[:1]), ("worst", BAD, samples.worst[:1])]
    marked += [("error", WARN, samples.failed[:1])] if samples.failed else []
    return [example(word, style, sample, width) for word, style, found in marked for sample in found]


def example(word: str, style: str, sample: FindingSample, width: int) -> Text:
    """Return a sample on one line: its reward, the end of its question, the beginning of its answer."""
    reward = "   -  " if sample.reward is None else f"{sample.reward:6.2f}"
    room = max(width - len(word) - len(reward) - 6, 8)
    asked = one_line(sample.question, room // 3)
    answered = one_line(sample.error or sample.response, room - len(asked))
    return line((word, style), f"{reward}  ", (asked, QUIET), ("  → ", QUIET), answered)


def _found(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the worst finding and how many there are, on one line."""
    if not snapshot.findings:
        return [line(("no findings so far", QUIET))]
    worst, others = snapshot.findings[0], len(snapshot.findings) - 1
    more = f"  and {others} more, press f" if others else "  press f"
    shown = one_line(worst.summary, max(width - len(more) - 2, 8))
    return [line(("▲ ", COLORS[worst.severity]), shown, (more, QUIET))]


def _damage(snapshot: RunSnapshot) -> list[Text]:
    return [line((in_words(snapshot.damaged), WARN))] if snapshot.damaged else []


def _change(snapshot: RunSnapshot) -> str:
    now = snapshot.last.get(objective(snapshot).name)
    return "" if now is None else f"{now:.3f} now"


def _before_the_first(snapshot: RunSnapshot) -> str:
    if not snapshot.teaching:
        return "no step yet: it loads, or evaluates what it begins with"
    last = snapshot.teaching[-1]
    return f"teaching the critic, batch {last['step']}: explains {last.get('critic/explained_variance', 0.0):.2f}"


def _kind(snapshot: RunSnapshot) -> str:
    kind, workers = reach(snapshot.table, "engine.kind"), reach(snapshot.table, "grading.workers")
    return f"{one_line(str(kind or ''), 12)}, {one_line(str(workers), 6)} graders" if workers else str(kind or "")
