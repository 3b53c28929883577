"""A comparison as an HTML page that loads nothing else, and as lines of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gnomon.analysis.compare.records import STAGES
from gnomon.analysis.compare.statistics import Band, Comparison, Pairing, Ranking
from gnomon.core.redaction import without_secrets
from gnomon.core.sentences import sentences
from gnomon.core.statistics import in_words
from gnomon.core.svg import MARK, Series, chart, page_style
from gnomon.records.console import duration

Rows = Sequence[Sequence[str]]
DIFFERENCE = 0.05
"""The page says how many seeds and prompts it takes to find this difference in score."""
_SAME_COST = 0.05
PAGE_SIZES = (820, 300), (360, 230)
"""Width and height of a picture on wide and on narrow screens."""


def verdict(found: Comparison) -> list[str]:
    """Return the conclusion in sentences: real differences, undecided pairs, and the runs that would decide them."""
    return _said("verdict", found)


def caveats(found: Comparison) -> list[str]:
    """Return the limits of the comparison in sentences."""
    lost = f"Runs that failed are left out, which favors an algorithm that fails often: {found.failures}"
    return [*_said("caveats", found), *([lost] if found.failures else [])]


def _said(part: str, found: Comparison) -> list[str]:
    asked: dict[str, list[int]] = {}
    # One sentence for each verdict, with the number of prompts of each pair of runs that it is about.
    for order in found.orders:
        asked.setdefault(order.verdict, []).append(order.questions)
    words = {"found": found, "asked": asked, "difference": DIFFERENCE, "same_cost": _SAME_COST, "listed": _listed}
    words |= {"pair_in_words": pair_in_words, "spent": _spent(found), "tokens": _tokens(found)}
    return sentences("analysis/compare/words.j2", part, **words)


def pair_in_words(pairing: Pairing, pairs: int) -> str:
    """Describe one pair: the better algorithm first, the difference with its interval, and the p-value."""
    gain, interval = pairing.contrast.mean, pairing.contrast.interval
    better, other = (pairing.second, pairing.first) if gain >= 0 else (pairing.first, pairing.second)
    # The sentence names the better one first, so the interval turns around with the difference.
    low, high = (interval.low, interval.high) if gain >= 0 else (-interval.high, -interval.low)
    corrected = f", corrected for {pairs} pairs" if pairs > 1 else ""
    who = f"the model that {better} trained" if pairing.contrast.is_about_models else better
    than = f"the one of {other}" if pairing.contrast.is_about_models else other
    numbers = f"{abs(gain):.3f} more than {than} [{low:.3f}, {high:.3f}] ({in_words(pairing.corrected)}{corrected})"
    return f"{who} scored {numbers}"


def _spent(found: Comparison) -> str:
    """Return what a run spent. For tokens, the range over algorithms, because the last step passes the budget."""
    if found.setting.unit != "tokens":
        return found.setting.limit
    # A dict keeps the order and drops the second end where both read the same.
    ends = dict.fromkeys(f"{f(s.cost.tokens for s in found.standings):,.0f}" for f in (min, max))
    asked = f"{found.setting.amount:,.0f}"
    budget = "" if list(ends) == [asked] else f" (budget: {asked})"
    return f"{' to '.join(ends)} {_tokens(found)}{budget}"


def _tokens(found: Comparison) -> str:
    """Return what the tokens are that were spent: supervised fine-tuning generates none."""
    given = found.setting.supervised
    if not given:
        return "generated tokens"
    return "tokens of the dataset's answers" if len(given) == len(found.standings) else "answer tokens"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


@dataclass(frozen=True)
class PageSection:
    """A part of a page: curves, a table, sentences, in this order, and what a reader has to know of them.

    Attributes:
        pictures: The same curves for wide and for narrow screens, or none.
        rows: A table with a header row, or none.
    """

    title: str
    pictures: Sequence[str] = ()
    picture_note: str = ""
    rows: Rows = ()
    row_note: str = ""
    sentences: Sequence[str] = ()


def page(found: Comparison) -> str:
    """Return the HTML page, in the design of the report. Names are escaped."""
    setting = found.setting
    scores = PageSection(
        "Held-out score",
        _curves(found, lambda ranked: ranked.curve, "held-out score"),
        "Lines are means over seeds; bands go from the lowest to the highest seed, so they are no intervals.",
        score_rows(found),
        "The interval is a bootstrap over seeds and prompts together; few seeds make it wide, as they should.",
    )
    pairs = PageSection(
        "Each against each",
        rows=pair_rows(found),
        row_note="The difference is the second minus the first, paired by seed and prompt. p takes both as drawn at "
        "random (min F'); it is corrected for the number of pairs by Holm's method. At 0.05 or less the two differ. "
        "The interval is of each pair alone: it holds 0 exactly where p, before that correction, is above 0.05.",
    )
    rewards = PageSection(
        "Training reward",
        _curves(found, lambda ranked: ranked.rewards, "mean reward"),
        "Of the questions that each algorithm asked; one that chooses hard questions has a lower line.",
        sentences=_said("scales", found),
    )
    return rendered(
        f"{', '.join(s.name for s in found.standings)} on {setting.experiment}",
        f"{setting.task} with {setting.model}, {setting.limit} a run. {' '.join(verdict(found))}",
        [
            *(scores, pairs, rewards, PageSection("Cost", rows=cost_rows(found))),
            PageSection("Before this is believed", sentences=caveats(found)),
        ],
    )


def rendered(title: str, lede: str, sections: Sequence[PageSection]) -> str:
    """Return a page of the comparison's design that loads nothing else. Whatever is no picture is escaped."""
    template = (files("gnomon.analysis.compare") / "compare.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_printable, keep_trailing_newline=True
    )
    words = {"title": title, "lede": lede, "sections": sections}
    return environment.from_string(template).render(style=page_style(), mark=MARK, **words)


def _printable(said: Any) -> Any:
    """Return a text without control characters and secrets; what is marked as HTML is the page's own."""
    # Names of runs and reasons of failures come from files, so they may hold control characters or a secret.
    return said if isinstance(said, Markup) else without_secrets("".join(c if c.isprintable() else " " for c in said))


def text(found: Comparison) -> str:
    """Return the comparison as lines for a terminal."""
    blocks = [
        "\n".join(verdict(found)),
        lines(score_rows(found)),
        lines(pair_rows(found)),
        lines(cost_rows(found)),
        "\n".join(f"- {sentence}" for sentence in caveats(found)),
    ]
    return "\n\n".join(blocks)


def score_rows(found: Comparison) -> Rows:
    """Return the table of final scores with a header row, the highest score first."""
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
        for s in sorted(found.standings, key=lambda ranked: -ranked.score)
    ]
    return [head, *rows]


def pair_rows(found: Comparison) -> Rows:
    """Return the table of pairs with a header row."""
    head = ["first", "second", "difference", "95% interval", "p", "corrected", ""]
    rows = [
        [
            p.first,
            p.second,
            f"{p.contrast.mean:+.3f}",
            str(p.contrast.interval),
            *map(chance, (p.contrast.p_value, p.corrected)),
            ("cannot be told apart" if p.contrast.mean else "tied")
            if p.is_noise
            else f"{p.second if p.contrast.mean > 0 else p.first} is better",
        ]
        for p in found.pairings
    ]
    return [head, *rows]


def chance(p: float) -> str:
    """Return a p-value as a cell of a table."""
    return in_words(p).removeprefix("p ").removeprefix("= ")


def cost_rows(found: Comparison) -> Rows:
    """Return the table of costs with a header row: one row per quantity, means over seeds."""
    costs = [s.cost for s in found.standings]
    # Rows for the causes that some algorithm has; a cause that nobody has would be a row of zeros.
    causes = sorted({cause for cost in costs for cause, tokens in cost.wasted.items() if tokens})
    rows = [
        ["steps", *(f"{c.steps:.0f}" for c in costs)],
        [_tokens(found) if found.setting.supervised else "tokens generated", *(f"{c.tokens:,.0f}" for c in costs)],
        ["of these before the first step", *(f"{c.before:,.0f}" for c in costs)],
        ["of these with a gradient", *(_share(c.trained, c.tokens) for c in costs)],
        *([f"no gradient: {cause}", *(_share(c.wasted.get(cause, 0.0), c.tokens) for c in costs)] for cause in causes),
        ["seconds of training", *(duration(c.seconds["step"]) for c in costs)],
        *([f"to {stage}", *(_share(c.seconds[stage], c.seconds["step"]) for c in costs)] for stage in STAGES),
    ]
    return [["a run, mean over seeds", *(s.name for s in found.standings)], *rows]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _curves(found: Comparison, bands: Callable[[Ranking], Sequence[Band]], label: str) -> list[str]:
    """Return the picture for wide and for narrow screens."""
    series = []
    for ranked in found.standings:
        points = bands(ranked)
        # One seed has no band: its lowest and highest value are the line itself.
        lows, highs = ([], []) if len(ranked.seeds) < 2 else ([p.low for p in points], [p.high for p in points])
        series.append(Series(ranked.name, [p.tokens for p in points], [p.mean for p in points], lows, highs))
    title, across = f"{label} against {_tokens(found)}", f"{_tokens(found)}, in training"
    return [chart(series, title, across, label, size=size) for size in PAGE_SIZES]


def lines(rows: Rows) -> str:
    """Return a table as lines for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
