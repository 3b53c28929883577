"""The panes: how it goes at one look, every curve, samples, findings and keys, and the head above all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from rich.text import Text

from gnomon.core.atomic_files import real_path
from gnomon.core.tables import packaged_toml, value_at
from gnomon.diagnosis import Finding, FindingSample
from gnomon.insight.watch.lines import (
    BAD,
    CALM,
    FAINT,
    GOOD,
    HEAD,
    MUTED,
    WARN,
    chart,
    fitted,
    labeled,
    line,
    one_line,
    progress,
    side_by_side,
    spark,
    spread,
    stacked,
    title,
    wrapped,
)
from gnomon.insight.watch.watcher import RunSnapshot
from gnomon.records.corruption import in_words
from gnomon.records.jsonl import task_name, waste_cause
from gnomon.records.phase import duration

# The metrics that a live view shows, and how their numbers are written.

Form = Literal["share", "number", "count", "bytes"]


@dataclass(frozen=True)
class Term:
    """A metric under the name that a person reads.

    Attributes:
        meaning: What the metric says, in one line.
        least: The smallest range of values that is worth drawing.
    """

    name: str
    label: str
    form: Form
    meaning: str
    least: float = 0.01

    def said(self, value: float | None) -> str:
        """Return a value as it is written."""
        return "-" if value is None else written(value, self.form)


REWARD = Term("rollout/reward_mean", "reward", "number", "mean of all answers of a step, trained on or not")
LOSS = Term("loss/policy", "loss", "number", "mean negative log-likelihood of a token of the dataset's answers")
"""In the place of the reward where the dataset's answers are trained on."""
_WORDS = packaged_toml("gnomon.insight", "words.toml")
HEALTH, FLOW = (
    tuple(Term(name, **said) for name, said in _WORDS["terms"][part].items()) for part in ("health", "flow")
)


def written(value: float, form: Form = "number") -> str:
    """Return a number in at most eight characters.

    >>> written(0.53125), written(1234.5), written(3.2e-7), written(0.25, "share"), written(3 << 30, "bytes")
    ('0.531', '1234', '3.2e-07', '25%', '3.0 GiB')
    """
    if form == "share":
        return f"{100 * value:.0f}%"
    if form == "bytes":
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    # Eight characters are the width of the column.
    if form == "count" or abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.1e}"
    if value != 0 and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


# What stands above every pane: which run this is, where it is, and what to do if it stands still.

_BAR = 20
_WIDE = 100
_LONGEST_END = 160


def head(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return two lines: the run's name and state; what is trained on what, and how far it is."""
    state = line((_who(snapshot, width), MUTED)).append_text(badge(snapshot))
    first = spread(line((one_line(name_of(snapshot.path), width), HEAD)), state, width)
    second = spread(line((one_line(subject(snapshot), width), MUTED)), _progress(snapshot, width), width)
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
    named: list[Any] = [value_at(table, "algorithm.name"), task_name(table), table.get("model")]
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
    return MUTED, "", ""


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
        (rest, MUTED),
        f" {100 * snapshot.share:3.0f}%",
        *(f"  {text}" for text in said[1:]),
    )


# The first pane: how it goes, at one look.

COLORS = {"severe": BAD, "warning": WARN, "note": CALM}
_SMALLEST_TWO_COLUMNS = 70
_GAP = " │ "
_TALLEST = 14


def overview(snapshot: RunSnapshot, width: int, height: int) -> list[Text]:
    """Return the overview in ``height`` lines of ``width`` cells at most; with more room curves become taller."""
    # What is wrong and what is found have their lines first; curves take what is left.
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
        return [title("reward", width), *(line((row, MUTED)) for row in wrapped(_before_the_first(snapshot), width))]
    rows = [health(snapshot, term, width) for term in HEALTH if snapshot.series(term.name)]
    # The curve grows with the terminal, and the rows below it come first.
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
    return [line((f"{name:>{wide}} ", MUTED), (row, CALM)) for name, row in zip(names, rows, strict=True)]


def scale(values: Sequence[float], least: float) -> tuple[float, float]:
    """Return the lowest and the highest value, or where they differ by less than is worth drawing a range around them.

    Values from 0 to 1 that come near 0 begin there.

    >>> scale([2.0, 3.0], 0.01), scale([0.1, 0.4], 0.01), scale([0.0, 0.0], 0.01)
    ((2.0, 3.0), (0.0, 0.4), (0.0, 1.0))
    """
    low, high = min(values), max(values)
    if high - low <= max(least, 1e-6 * max(abs(high), abs(low))):
        # A constant line lies in the middle of its picture; fractions do not go beyond 1.
        top = 1.0 if high <= 1 < 1.5 * high else 1.5 * high
        return (low / 2, top) if low > 0 else (low, low + (100 * least or 1.0))
    return (0.0, high) if 0 <= low < high <= 1 and low < high / 2 else (low, high)


def health(snapshot: RunSnapshot, term: Term, width: int) -> Text:
    """Return a measure's name, the latest value there is, and its course on one line."""
    values = snapshot.series(term.name)
    return labeled(term.label, term.said(values[-1]), width, (spark(values, width - 22, term.least), FAINT))


def stages(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return which share of a step's time each stage takes, over the last 20 steps."""
    # Means over the last steps, as a single step may hold a garbage collection or a checkpoint.
    whole = snapshot.recent("time/step_seconds")
    if not whole:
        return []
    lines = [title("time of a step", width, f"{whole:.1f} s" if whole < 60 else duration(whole))]
    for stage, called in _WORDS["called"].items():
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
        # Only what is beyond noise is colored as better.
        style = GOOD if found is last and first is not last and last.low > first.high else ""
        lines.append(line((f"step {found.step:<6}", MUTED), (f" {found}", style)))
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
    return line((word, style), f"{reward}  ", (asked, MUTED), ("  → ", MUTED), answered)


def _found(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the worst finding and how many there are, on one line."""
    if not snapshot.findings:
        return [line(("no findings so far", MUTED))]
    worst, others = snapshot.findings[0], len(snapshot.findings) - 1
    more = f"  and {others} more, press f" if others else "  press f"
    shown = one_line(worst.summary, max(width - len(more) - 2, 8))
    return [line(("▲ ", COLORS[worst.severity]), shown, (more, MUTED))]


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
    kind, workers = value_at(snapshot.table, "engine.kind"), value_at(snapshot.table, "grading.workers")
    return f"{one_line(str(kind or ''), 12)}, {one_line(str(workers), 6)} graders" if workers else str(kind or "")


_CURVE_LINES, _CURVE_WIDTH = 4, 38
_ANSWER_LINES = 14


def curves(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return a small chart of every metric that the run has, as many beside each other as fit."""
    terms = [
        term
        for term in (REWARD, *_parts(snapshot), *HEALTH, *_causes(snapshot), *FLOW)
        if len(snapshot.series(term.name)) > 0
    ]
    if not terms:
        return [*banner(snapshot, width), line(("no step yet", MUTED))]
    count = max(1, width // _CURVE_WIDTH)
    wide = (width - 3 * (count - 1)) // count
    lines: list[Text] = []
    for start in range(0, len(terms), count):
        blocks = [[*_curve(snapshot, term, wide), line()] for term in terms[start : start + count]]
        row = blocks[0]
        for number, block in enumerate(blocks[1:], start=1):
            # The blocks so far are the left column of the next pair.
            row = side_by_side(row, block, number * wide + 3 * (number - 1), "   ")
        lines.extend(row)
    return fitted(lines, width)


def samples(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the best and worst answers of the newest step, and those without a reward, in full as far as they fit."""
    found = snapshot.samples
    if not found.count:
        return [
            *banner(snapshot, width),
            line(("no rollouts on disk yet (records.rollouts = false writes none)", MUTED)),
        ]
    of = f"{found.count}{' first' if found.is_part else ''} answers of step {found.step}"
    groups = (("best", GOOD, found.best), ("worst", BAD, found.worst), ("could not be judged", WARN, found.failed))
    lines: list[Text] = []
    for called, style, chosen in groups:
        if chosen:
            lines.append(line((called, f"{HEAD} {style}"), (f"  of {of}", MUTED)))
        for sample in chosen:
            lines.extend(_sample(sample, width))
    return fitted(lines, width)


def findings(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return what the diagnosis found: the worst first, with what shows it, what it means and what to try."""
    if not snapshot.findings:
        return [
            *banner(snapshot, width),
            line(("no findings so far", MUTED)),
            line((one_line(f"gnomon doctor {quote(str(snapshot.path))} looks through the whole run", width), MUTED)),
        ]
    return fitted([shown for found in snapshot.findings for shown in _finding(found, width)], width)


def keys(width: int) -> list[Text]:
    """Return what the keys do and what the names mean."""
    lines = [title("keys", width)]
    lines += [line((f"{key:<16}", ""), (meaning, MUTED)) for key, meaning in _WORDS["keys"].items()]
    lines += [line(), title("what is shown", width)]
    lines += [_meaning(term) for term in (REWARD, *HEALTH, *FLOW)]
    lines += [line(), line(("Curves run from the first step to now; each has a scale of its own.", MUTED))]
    return fitted(lines, width)


def _parts(snapshot: RunSnapshot) -> list[Term]:
    """Return the components of the reward, which have the names that the user gave them."""
    names = sorted(name for name in snapshot.last if name.startswith("reward/"))
    return [Term(name, name.removeprefix("reward/").removesuffix("_mean"), "number", "") for name in names]


def _causes(snapshot: RunSnapshot) -> list[Term]:
    """Return the causes for which tokens were wasted."""
    names = sorted(name for name in snapshot.last if waste_cause(name) and any(snapshot.series(name)))
    return [Term(name, f"wasted: {waste_cause(name).replace('_', ' ')}", "share", "") for name in names]


def _curve(snapshot: RunSnapshot, term: Term, width: int) -> list[Text]:
    values = snapshot.series(term.name)
    now = term.said(values[-1])
    return [title(one_line(term.label, width), width, now), *curve_lines(values, term, width, _CURVE_LINES)]


def _sample(sample: FindingSample, width: int) -> list[Text]:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3f}"
    rows = [line((f"{reward}  ", ""), (one_line(sample.task_id, max(width - len(reward) - 2, 8)), MUTED))]
    rows += [line("  ", (row, MUTED)) for row in wrapped(sample.question, width - 2, 6)]
    rows += [line("  ", row) for row in wrapped(sample.response, width - 2, _ANSWER_LINES)]
    if sample.error is not None:
        rows += [line("  ", (row, WARN)) for row in wrapped(sample.error, width - 2, 4)]
    return [*rows, line()]


def _finding(found: Finding, width: int) -> list[Text]:
    style = COLORS[found.severity]
    when = f"step {found.step}" if found.first_step == found.step else f"steps {found.first_step} to {found.step}"
    rows = [line(("▲ ", style), (one_line(found.rule, width - 24), HEAD), (f"  {found.severity}, {when}", MUTED))]
    rows += [line("  ", row) for row in wrapped(found.summary, width - 2)]
    numbers = ", ".join(f"{name} {written(value)}" for name, value in found.evidence.items())
    rows += [line("  ", (row, MUTED)) for row in wrapped(numbers, width - 2, 3)] if numbers else []
    rows += [line("  ", (row, MUTED)) for row in wrapped(found.meaning, width - 2, 6)]
    for advice in found.advice:
        first, *others = wrapped(advice, width - 6, 4)
        rows += [line(("  → ", style), first), *(line("    ", row) for row in others)]
    return [*rows, line()]


def _meaning(term: Term) -> Text:
    return line((f"{term.label:<16}", ""), (term.meaning, MUTED))
