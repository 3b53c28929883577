"""What a person reads of a claim: its own page, and the table of all of them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.claims.definition import Claim, ClaimOutcome, ClaimVerdict, Expectation, Holds, Level
from experiments.claims.estimates import MeasuredValues, NotMeasured
from experiments.claims.folders import APPENDIX, FIGURE, PAGE, ClaimFolder, Tested, is_outdated, write_text

VERDICTS = {
    "supported": "the headline holds",
    "contradicted": "the headline fails, and the setting has the cause of the effect",
    "undecided": "the interval has the bound in it, or an undecided check leaves open whether the cause is there",
    "cause absent": "a check fails, so the setting does not show the effect's cause",
    "not run": "nothing was measured",
}
SETTING, MEANING = 80, 130
"""Words of a page's setting and meaning; the appendix has the rest."""
CODE = ("code of", "of which commit is not recorded")
TABLE = Path("docs") / "claims.md"
SETTLED = (
    "*Undecided: about N seeds* says with how many the interval would no longer reach its bound if mean and spread "
    "stayed as they are here; fresh seeds have another mean, and so many decide about every second time."
)


_TABLE_SAYS = (
    "Written by `gnomon reproduce`; `gnomon reproduce --list` prints the verdicts. Each claim is a folder of "
    "[experiments](../experiments) with a page of at most 500 words, an appendix (protocol and its history, every "
    "expectation and check, all numbers, remarks), and at least three seeds.",
    "",
    "| word | meaning |",
    "|---|---|",
    *(f"| *{word}* | {says} |" for word, says in VERDICTS.items()),
    "",
    "The **headline** is the expectation that the claim's title states; other expectations are counted beside it and "
    "change no word. A title with two or three parts has as many, which all have to hold. An expectation *holds* or "
    "*fails* when Student's 95% interval over seeds lies wholly on one side of its bound. Expectations, bounds and "
    "their order were written before the numbers were seen. Which of them is the headline was named on 2026-11-26, "
    "when the numbers were known, by one rule for all: for each part of the title the first expectation that states "
    "it, and where the title names a topic alone the first of all. Before that day verdicts were *partly* (19) or "
    "*not* (1), by how many expectations held.",
    "",
    "Models are tiny and warmed up: a row says where an effect shows at the smallest scale, and nothing about models a "
    "thousand times as large. Seeds share their models, so intervals are of training on these, not on others. Nothing "
    "corrects for the number of claims: a headline whose true value lies on its bound holds once in 40 times.",
    "",
    "The same command gives the same numbers to the bit with the same code of gnomon, the same processor and the same "
    "number of threads. Other code may sum in another order; where a learning rate is high, a run whose last digits "
    "differ ends elsewhere, as another seed would. So an appendix names the commits whose code made its runs (from "
    "2026-11-24 on).",
    "",
)


def write_pages(folder: ClaimFolder) -> None:
    """Write figure, page and appendix of one claim from its last results; an appendix by hand is left alone."""
    claim, tested = folder.claim(), folder.read_again()
    folder.write_figure(tested)
    write_text(folder.path / PAGE, page(folder.name, claim, tested))
    if not claim.is_own_page:
        write_text(folder.path / APPENDIX, appendix(claim, tested))


def page(name: str, claim: Claim, tested: Tested | None) -> str:
    """Return the README of a claim, in Markdown: the same claim and results always give the same text."""
    measured = MeasuredValues() if tested is None else tested.measured
    verdict = claim.judge(measured)
    parts = [
        f"# {claim.title}",
        f"**Claim.** {claim.claim}",
        f"**Verdict: {verdict.word}**: {VERDICTS[verdict.word]}.",
        "\n".join(
            _expected(
                "headline",
                [claim.expectations[part] for part in claim.headline],
                [verdict.outcomes[part] for part in claim.headline],
            )
        ),
        f"{_beside(verdict)} Scale: {_scale(claim, measured)}.",
        f"**Setting.** {lead(claim.protocol, SETTING)}",
    ]
    if tested is not None and (claim.figure is not None or claim.is_own_page):
        parts.append(f"![{claim.title}]({FIGURE})")
    parts += [warning] if (warning := outdated(claim, tested)) else []
    parts += [f"**What it means.** {meant}"] if (meant := lead(_plain(claim.remarks), MEANING)) else []
    parts.append(
        "**What it cannot say.** Whether the effect is the same in a language model, with long answers or other "
        "tasks: models and questions are made to be small. Seeds share their models, so the interval is of training "
        "on these and of no others."
    )
    parts.append(
        f"**Command.** {'Not run yet.' if tested is None else f'Last run on {tested.date}.'} The [appendix]"
        f"({APPENDIX}) has the source, the whole protocol, every expectation and check, all numbers and remarks."
    )
    parts.append(f"<!-- test: parse -->\n```bash\ngnomon reproduce {name}\n```")
    return "\n\n".join(parts) + "\n"


def lead(text: str, most: int) -> str:
    """Return the first sentences of a text, as many as have ``most`` words in all, and at least one.

    >>> lead("One two. Three four (five). Six.", 5)
    'One two. Three four (five).'
    """
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?)])\s+(?=[A-Z*])", text.strip()):
        if kept and len(" ".join([*kept, sentence]).split()) > most:
            break
        kept.append(sentence)
    return " ".join(kept)


def _plain(remarks: str) -> str:
    return re.sub(r"\*\*What we make of it\.\*\* *", "", remarks)


def _beside(verdict: ClaimVerdict) -> str:
    said: dict[Holds, str] = {"holds": "hold", "fails": "fail", "undecided": "undecided", "not run": "not run"}
    counts = [f"{n} {plural}" for word, plural in said.items() if (n := verdict.count(word))]
    others = f"Of the other expectations: {', '.join(counts)}." if counts else "There is no other expectation."
    return f"{others} {_checked(verdict)} checks of the setting hold." if verdict.checks else others


def _scale(claim: Claim, measured: MeasuredValues) -> str:
    """Return models, steps and seeds in words."""
    seeds = sorted({len(s) for found in measured.numbers.values() for s in found.values() if s})
    spoken = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "no"
    return ", ".join([*([claim.scale] if claim.scale else []), f"{spoken} seeds"])


def appendix(claim: Claim, tested: Tested | None) -> str:
    """Return the appendix of a claim: source, protocol, everything that was expected and measured, remarks."""
    measured = MeasuredValues() if tested is None else tested.measured
    verdict = claim.judge(measured)
    parts = [
        f"# {claim.title}: appendix",
        f"[The page]({PAGE}) has claim and verdict.",
        f"**Source.** {claim.source}",
        f"**Protocol.** {claim.protocol}",
    ]
    if claim.checks:
        parts.append("\n".join(_expected("check of the setting, not of the claim", claim.checks, verdict.checks)))
    parts.append("\n".join(_expected("expected", claim.expectations, verdict.outcomes)))
    parts += [SETTLED] if any(o.settled_by for o in (*verdict.checks, *verdict.outcomes)) else []
    if measured.names:
        seeds = sorted({len(s) for found in measured.numbers.values() for s in found.values()})
        spoken = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        range_of = _legend(claim, measured)
        parts.append(f"**Measured**, mean over {spoken} seeds and Student's 95% interval of it{range_of}")
        parts.append("\n".join(_numbers(measured)))
    parts += [warning] if (warning := outdated(claim, tested)) else []
    parts += [claim.remarks] if claim.remarks else []
    missing = (*measured.failures, *measured.gaps)
    parts += [_missing(missing)] if missing else []
    if measured.inexact:
        parts.append(
            f"**Not repeatable.** The same seeds give other numbers another time. {'; '.join(measured.inexact)}."
        )
    parts.append(_when(tested))
    return "\n\n".join(parts) + "\n"


def outdated(claim: Claim, tested: Tested | None) -> str:
    """Return the warning that the remarks were written for other numbers; "" where they were not."""
    if tested is None or tested.remarks is None or not is_outdated(claim, tested.measured, tested.remarks):
        return ""
    return (
        f"**Warning: what follows was written for other numbers**, those of {tested.remarks.date}. Where it differs "
        "from the tables above, the tables are right."
    )


def table(folders: Mapping[str, ClaimFolder]) -> str:
    """Return ``docs/claims.md``: every claim with its last verdict."""
    lines = [
        "# Claims, and what became of them",
        "",
        *_TABLE_SAYS,
        "| claim | verdict | headline | effect | scale | others: hold, fail, undecided | checks that hold |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, folder in folders.items():
        claim, tested = folder.claim(), folder.tested()
        measured = MeasuredValues() if tested is None else tested.measured
        verdict = claim.judge(measured)
        deciding = verdict.deciding
        cells = (
            f"[{claim.title}](../experiments/{name}/{PAGE}) (`{name}`)",
            verdict.word,
            _cell(claim.expectations[deciding].says),
            _cell(verdict.outcomes[deciding].measured),
            _scale(claim, measured),
            ", ".join(str(verdict.count(word)) for word in ("holds", "fails", "undecided")),
            _checked(verdict),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _missing(failures: Sequence[str], most: int = 12) -> str:
    more = f"; and {len(failures) - most} more" if len(failures) > most else ""
    return f"**Not in these numbers.** {'; '.join(failures[:most])}{more}."


def _checked(verdict: ClaimVerdict) -> str:
    """Return how many checks hold, of how many."""
    held = sum(outcome.word == "holds" for outcome in verdict.checks)
    return f"{held} of {len(verdict.checks)}" if verdict.checks else ""


def _expected(head: str, expectations: Sequence[Expectation], outcomes: Sequence[ClaimOutcome]) -> list[str]:
    lines = [f"| {head} | measured | |", "|---|---|---|"]
    for expectation, outcome in zip(expectations, outcomes, strict=True):
        settled = f": {outcome.settled_by}" if outcome.settled_by else ""
        lines.append(f"| {_cell(expectation.says)} | {_cell(outcome.measured)} | {outcome.word}{settled} |")
    return lines


def _legend(claim: Claim, measured: MeasuredValues) -> str:
    """Return how the sentence about the interval ends: with a warning where a number is, or may be, a share.

    A share cannot be told from its name: what no seed of any arm has outside of 0 to 1 is taken for one.
    """
    seen: dict[str, list[float]] = {}
    for numbers in measured.numbers.values():
        for name, by_seed in numbers.items():
            seen.setdefault(name, []).extend(by_seed.values())
    if not any(len(values) > 1 and all(0 <= value <= 1 for value in values) for values in seen.values()):
        return ":"
    judged = (*claim.checks, *claim.expectations)
    has_rates = any(isinstance(expectation, Level) and expectation.is_rate for expectation in judged)
    wilson = " Shares of runs are judged by Wilson's interval, which does not." if has_rates else ""
    return f". The t interval is not truncated to [0, 1]: that of a rate or a fraction may reach beyond 0 or 1.{wilson}"


def _numbers(measured: MeasuredValues) -> list[str]:
    names: Sequence[str] = measured.names
    lines = [f"| | {' | '.join(map(_cell, names))} |", f"|---|{'---|' * len(names)}"]
    for arm in (arm for arm, found in measured.numbers.items() if any(found.values())):
        lines.append(f"| {_cell(arm)} | {' | '.join(_estimated(measured, arm, name) for name in names)} |")
    return lines


def _estimated(measured: MeasuredValues, arm: str, name: str) -> str:
    try:
        return str(measured.estimate(arm, name))
    except NotMeasured:
        return ""


def _when(tested: Tested | None) -> str:
    if tested is None:
        return "Not run yet."
    code = f" ({CODE[0]} {', '.join(tested.measured.code)})" if tested.measured.code else f" ({CODE[1]})"
    versions = ", ".join(
        f"{package} {number}{code if package == 'gnomon' else ''}" for package, number in tested.versions.items()
    )
    cost = _minutes(tested)
    took = f" All of its runs take about {cost} CPU minutes there." if cost else ""
    return f"Last run on {tested.date}, on {tested.machine}; {versions}.{took}"


def _minutes(tested: Tested | None) -> str:
    """Return the CPU minutes of all runs as they are said: one digit below 10; nothing where they are not known."""
    if tested is None or tested.cpu_minutes is None:
        return ""
    return f"{tested.cpu_minutes:.0f}" if tested.cpu_minutes >= 1 else f"{tested.cpu_minutes:.1f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
