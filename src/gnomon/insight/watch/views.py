"""The other panes: every curve, the samples of the newest step, the findings, and what the keys do."""

from collections.abc import Sequence
from shlex import quote

from rich.text import Text

from gnomon.diagnosis import Finding, FindingSample
from gnomon.insight.watch.header import banner
from gnomon.insight.watch.lines import BAD, GOOD, HEAD, QUIET, WARN, fitted, line, side_by_side, title
from gnomon.insight.watch.metric_labels import FLOW, HEALTH, REWARD, Term, written
from gnomon.insight.watch.overview import COLORS, curve_lines
from gnomon.insight.watch.run_snapshot import RunSnapshot
from gnomon.insight.watch.text import one_line, wrapped
from gnomon.records.reading import waste_cause

_CURVE_LINES, _CURVE_WIDTH = 4, 38
_ANSWER_LINES = 14

KEYS: Sequence[tuple[str, str]] = (
    ("q", "end the view; the run is not touched"),
    ("tab, right", "next pane"),
    ("shift+tab, left", "pane before"),
    ("o c s f ?", "overview, curves, samples, findings, this page"),
    ("up, down", "scroll; page up, page down, home and end too"),
)


def curves(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return a small chart of every metric that the run has, as many beside each other as fit."""
    terms = [
        term
        for term in (REWARD, *_parts(snapshot), *HEALTH, *_causes(snapshot), *FLOW)
        if len(snapshot.series(term.name)) > 0
    ]
    if not terms:
        return [*banner(snapshot, width), line(("no step yet", QUIET))]
    count = max(1, width // _CURVE_WIDTH)
    wide = (width - 3 * (count - 1)) // count
    lines: list[Text] = []
    for start in range(0, len(terms), count):
        blocks = [[*_curve(snapshot, term, wide), line()] for term in terms[start : start + count]]
        row = blocks[0]
        for number, block in enumerate(blocks[1:], start=1):
            row = side_by_side(row, block, number * wide + 3 * (number - 1), "   ")
        lines.extend(row)
    return fitted(lines, width)


def samples(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the best and worst answers of the newest step, and those without a reward, in full as far as they fit."""
    found = snapshot.samples
    if not found.count:
        return [
            *banner(snapshot, width),
            line(("no rollouts on disk yet (records.rollouts = false writes none)", QUIET)),
        ]
    of = f"{found.count}{' first' if found.is_part else ''} answers of step {found.step}"
    groups = (("best", GOOD, found.best), ("worst", BAD, found.worst), ("could not be judged", WARN, found.failed))
    lines: list[Text] = []
    for called, style, chosen in groups:
        if chosen:
            lines.append(line((called, f"{HEAD} {style}"), (f"  of {of}", QUIET)))
        for sample in chosen:
            lines.extend(_sample(sample, width))
    return fitted(lines, width)


def findings(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return what the diagnosis found: the worst first, with what shows it, what it means and what to try."""
    if not snapshot.findings:
        return [
            *banner(snapshot, width),
            line(("no findings so far", QUIET)),
            line((one_line(f"gnomon doctor {quote(str(snapshot.path))} looks through the whole run", width), QUIET)),
        ]
    return fitted([shown for found in snapshot.findings for shown in _finding(found, width)], width)


def keys(width: int) -> list[Text]:
    """Return what the keys do and what the names mean."""
    lines = [title("keys", width)]
    lines += [line((f"{key:<16}", ""), (meaning, QUIET)) for key, meaning in KEYS]
    lines += [line(), title("what is shown", width)]
    lines += [_meaning(term) for term in (REWARD, *HEALTH, *FLOW)]
    lines += [line(), line(("Curves run from the first step to now; each has a scale of its own.", QUIET))]
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
    rows = [line((f"{reward}  ", ""), (one_line(sample.task_id, max(width - len(reward) - 2, 8)), QUIET))]
    rows += [line("  ", (row, QUIET)) for row in wrapped(sample.question, width - 2, 6)]
    rows += [line("  ", row) for row in wrapped(sample.response, width - 2, _ANSWER_LINES)]
    if sample.error is not None:
        rows += [line("  ", (row, WARN)) for row in wrapped(sample.error, width - 2, 4)]
    return [*rows, line()]


def _finding(found: Finding, width: int) -> list[Text]:
    style = COLORS[found.severity]
    when = f"step {found.step}" if found.first_step == found.step else f"steps {found.first_step} to {found.step}"
    rows = [line(("▲ ", style), (one_line(found.rule, width - 24), HEAD), (f"  {found.severity}, {when}", QUIET))]
    rows += [line("  ", row) for row in wrapped(found.summary, width - 2)]
    numbers = ", ".join(f"{name} {written(value)}" for name, value in found.evidence.items())
    rows += [line("  ", (row, QUIET)) for row in wrapped(numbers, width - 2, 3)] if numbers else []
    rows += [line("  ", (row, QUIET)) for row in wrapped(found.meaning, width - 2, 6)]
    for advice in found.advice:
        first, *others = wrapped(advice, width - 6, 4)
        rows += [line(("  → ", style), first), *(line("    ", row) for row in others)]
    return [*rows, line()]


def _meaning(term: Term) -> Text:
    return line((f"{term.label:<16}", ""), (term.meaning, QUIET))
