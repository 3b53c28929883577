"""A comparison as one page that needs nothing else, and as lines of text."""

import html
from collections.abc import Callable, Iterator, Sequence

from gnomon.insight.svg import COLORS, DARK, Series, chart
from gnomon.records.console import duration
from gnomon.statistics import in_words
from gnomon.studies.compare import Band, Comparison, Standing
from gnomon.studies.compare_runs import STAGES
from gnomon.studies.compare_words import best_first, caveats, scales, verdict

Rows = Sequence[Sequence[str]]


def page(found: Comparison) -> str:
    """Return the page: HTML without anything that is loaded from elsewhere. Names are text and never markup."""
    setting = found.setting
    title = f"{_list(s.name for s in found.standings)} on {setting.experiment}"
    parts = [
        f"<h1>{_escaped(title)}</h1>",
        f"<p>{_escaped(setting.task)} with {_escaped(setting.model)}, {_escaped(setting.limit)} a run.</p>",
        "<h2>What can be said</h2>",
        *(f"<p>{_escaped(sentence)}</p>" for sentence in verdict(found)),
        "<h2>Held-out score</h2>",
        _curves(found, lambda standing: standing.curve, "held-out score"),
        "<p>Lines are means over seeds; bands go from the lowest to the highest seed, so they are no intervals.</p>",
        _table(score_rows(found)),
        "<p>The interval is a bootstrap over seeds and prompts together; few seeds make it wide, as they should.</p>",
        "<h2>Each against each</h2>",
        _table(pair_rows(found)),
        "<p>The difference is the second minus the first, paired by seed and prompt. p takes both as drawn at random "
        "(min F\x27); it is corrected for the number of pairs by Holm's method. At 0.05 or less the two differ. "
        "The interval is of each pair alone: it holds 0 exactly where p, before that correction, is above 0.05.</p>",
        "<h2>Training reward</h2>",
        _curves(found, lambda standing: standing.rewards, "mean reward"),
        "<p>Of the questions that each algorithm asked; one that chooses hard questions has a lower line.</p>",
        *(f"<p>{_escaped(sentence)}</p>" for sentence in scales(found)),
        "<h2>Cost</h2>",
        _table(cost_rows(found)),
        "<h2>Before this is believed</h2>",
        f"<ul>{''.join(f'<li>{_escaped(sentence)}</li>' for sentence in caveats(found))}</ul>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}</title>'
        '<meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_style()}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def text(found: Comparison) -> str:
    """Return the comparison as lines for a terminal."""
    blocks = [
        "\n".join(verdict(found)),
        _lines(score_rows(found)),
        _lines(pair_rows(found)),
        _lines(cost_rows(found)),
        "\n".join(f"- {sentence}" for sentence in caveats(found)),
    ]
    return "\n\n".join(blocks)


def score_rows(found: Comparison) -> Rows:
    """Return the final scores, the highest first, with a head."""
    head = ["algorithm", "before", "after", "95% interval", "each seed", "steps", "tokens"]
    rows = [
        [
            s.name,
            f"{s.curve[0].mean:.3f}",
            f"{s.score:.3f}",
            str(s.interval),
            " ".join(f"{value:.3f}" for value in s.by_seed),
            f"{s.cost.steps:.0f}",
            f"{s.cost.tokens:,.0f}",
        ]
        for s in best_first(found)
    ]
    return [head, *rows]


def pair_rows(found: Comparison) -> Rows:
    """Return every pair with its difference and what may be said of it, with a head."""
    head = ["first", "second", "difference", "95% interval", "p", "corrected", ""]
    rows = [
        [
            p.first,
            p.second,
            f"{p.contrast.mean:+.3f}",
            str(p.contrast.interval),
            in_words(p.contrast.p_value).removeprefix("p ").removeprefix("= "),
            in_words(p.corrected).removeprefix("p ").removeprefix("= "),
            "cannot be told apart" if p.is_noise else f"{p.second if p.contrast.mean > 0 else p.first} is better",
        ]
        for p in found.pairings
    ]
    return [head, *rows]


def cost_rows(found: Comparison) -> Rows:
    """Return what a run of each algorithm took, a row a quantity, mean over seeds, with a head."""
    costs = [s.cost for s in found.standings]
    causes = sorted({cause for cost in costs for cause, tokens in cost.wasted.items() if tokens})
    rows = [
        ["steps", *(f"{c.steps:.0f}" for c in costs)],
        ["tokens generated", *(f"{c.tokens:,.0f}" for c in costs)],
        ["of these before the first step", *(f"{c.before:,.0f}" for c in costs)],
        ["of these with a gradient", *(_share(c.trained, c.tokens) for c in costs)],
        *([f"no gradient: {cause}", *(_share(c.wasted.get(cause, 0.0), c.tokens) for c in costs)] for cause in causes),
        ["seconds of training", *(duration(c.seconds["step"]) for c in costs)],
        *([f"to {stage}", *(_share(c.seconds[stage], c.seconds["step"]) for c in costs)] for stage in STAGES),
    ]
    return [["a run, mean over seeds", *(s.name for s in found.standings)], *rows]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _curves(found: Comparison, bands: Callable[[Standing], Sequence[Band]], label: str) -> str:
    series = []
    for standing in found.standings:
        points = bands(standing)
        lows, highs = ([], []) if len(standing.seeds) < 2 else ([p.low for p in points], [p.high for p in points])
        series.append(Series(standing.name, [p.tokens for p in points], [p.mean for p in points], lows, highs))
    return chart(series, f"{label} against generated tokens", "tokens generated for training", label, size=(760, 320))


def _table(rows: Rows) -> str:
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _lines(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)


def _escaped(said: str) -> str:
    return html.escape("".join(c if c.isprintable() else " " for c in said))


def _list(names: Iterator[str]) -> str:
    return ", ".join(names)


def _style() -> str:
    light, dark = (
        "".join(f"--series-{n}:{color};" for n, color in enumerate(colors, start=1)) for colors in (COLORS, DARK)
    )
    return (
        f":root{{{light}--ink:#1b1e23;--muted:#6a7079;--rule:#e2e4e8;--page:#fff;color-scheme:light dark}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}--ink:#e6e8eb;--muted:#9aa1ab;--rule:#363b43;--page:#16181c}}}}"
        "body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:800px;"
        "margin:2rem auto;padding:0 1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}"
        "th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--rule);white-space:nowrap}"
        "th{color:var(--muted);font-weight:500}"
    )
