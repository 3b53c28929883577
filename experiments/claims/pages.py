"""What a person reads of a claim: its own page, and the table of all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.claims.definition import Claim, ClaimOutcome, ClaimVerdict, Expectation, Level
from experiments.claims.estimates import MeasuredValues, NotMeasured
from experiments.claims.folders import FIGURE, PAGE, ClaimFolder, Tested, is_outdated, write_text

VERDICTS = {
    "reproduced": "reproduced: everything that was expected holds",
    "partly": "partly: some of what was expected holds",
    "not": "not reproduced: nothing of what was expected holds",
    "open": "open: not run, or nothing decided",
}
CODE = ("code of", "of which commit is not recorded")
TABLE = Path("docs") / "claims.md"
SETTLED = (
    "*Undecided: about N seeds* says with how many the interval would no longer reach its bound if mean and spread "
    "stayed as they are here; fresh seeds have another mean, and so many decide about every second time."
)


_TABLE_SAYS = (
    "Written by `gnomon reproduce`; `gnomon reproduce --list` prints the verdicts. Each claim is a folder of "
    "[experiments](../experiments) with its protocol, its numbers, at least three seeds, a figure and the rule of its "
    "verdict. The rule was written before the numbers were seen.",
    "",
    "Models are tiny and warmed up. So a page says where an effect shows at the smallest scale, and what its cause is "
    "there; it says nothing about models a thousand times as large. Where a page speaks of one model or of three, its "
    "seeds share them, and intervals are of training on these models, not on others.",
    "",
    "| word | meaning |",
    "|---|---|",
    "| *holds*, *fails* | Student's 95% interval over seeds lies wholly on one side of the expectation's bound |",
    "| *undecided* | the interval has the bound in it; the page says about how many seeds would decide |",
    "| *reproduced*, *partly*, *not* | all expectations hold, some hold, none holds |",
    "| *open* | the claim was not run, or its numbers decided nothing |",
    "| *checks* | whether the setting has the cause of the effect at all; a check never counts as an expectation |",
    "| *CPU minutes* | what all runs of the command took, on one core of the machine that the page names |",
    "",
    "A check that fails leaves the claim *open*. While a check is undecided, a claim is neither *reproduced* nor "
    "*not*: it is *partly* where something holds, else *open*.",
    "",
    "Each interval is of its own expectation, and nothing corrects for their number: an expectation whose true value "
    "lies on its bound holds once in 40 times. So a *partly* by one of many says little.",
    "",
    "The same command gives the same numbers to the bit with the same code of gnomon, the same processor and the same "
    "number of threads. Other code may sum in another order; where a learning rate is high, a run whose last digits "
    "differ ends elsewhere, as another seed would. So a page names the commits whose code made its runs (from "
    "2026-11-24 on). The page also says when timing decides its runs, which cells of its tables have fewer seeds, and "
    "when its remarks were written for other numbers.",
    "",
)


def write_pages(folder: ClaimFolder) -> None:
    """Write figure and page of one claim from its last results; a page that is written by hand is left alone."""
    claim, tested = folder.claim(), folder.read_again()
    folder.write_figure(tested)
    if not claim.is_own_page:
        write_text(folder.path / PAGE, page(folder.name, claim, tested))


def page(name: str, claim: Claim, tested: Tested | None) -> str:
    """Return the README of a claim, in Markdown: the same claim and results always give the same text."""
    measured = MeasuredValues() if tested is None else tested.measured
    verdict = claim.judge(measured)
    parts = [
        f"# {claim.title}",
        f"**Claim.** {claim.claim}",
        f"**Source.** {claim.source}",
        f"**Protocol.** {claim.protocol}",
        f"**Verdict: {_verdict(verdict)}.**",
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
    if claim.figure is not None and tested is not None:
        parts.append(f"![{claim.title}]({FIGURE})")
    parts += [warning] if (warning := outdated(claim, tested)) else []
    parts += [claim.remarks] if claim.remarks else []
    missing = (*measured.failures, *measured.gaps)
    parts += [_missing(missing)] if missing else []
    if measured.inexact:
        parts.append(
            f"**Not repeatable.** The same seeds give other numbers another time. {'; '.join(measured.inexact)}."
        )
    parts.append("**Command.** " + _when(tested))
    parts.append(f"<!-- test: parse -->\n```bash\ngnomon reproduce {name}\n```")
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
        "| claim | verdict | holds | fails | undecided | not run | checks that hold | CPU minutes | measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, folder in folders.items():
        claim, tested = folder.claim(), folder.tested()
        verdict = claim.judge(MeasuredValues() if tested is None else tested.measured)
        words = [outcome.word for outcome in verdict.outcomes]
        counts = " | ".join(str(words.count(word)) for word in ("holds", "fails", "undecided", "not run"))
        where = f"[{claim.title}](../experiments/{name}/{PAGE})"
        said = (_checked(verdict), _minutes(tested), tested.date if tested else "")
        lines.append(f"| {where} (`{name}`) | {verdict.word} | {counts} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def _missing(failures: Sequence[str], most: int = 12) -> str:
    more = f"; and {len(failures) - most} more" if len(failures) > most else ""
    return f"**Not in these numbers.** {'; '.join(failures[:most])}{more}."


def _verdict(verdict: ClaimVerdict) -> str:
    if verdict.is_setting_unfit:
        return "open: a check fails, so the setting does not show the effect's cause"
    if verdict.word == "open" and verdict.is_setting_doubtful and any(o.word == "fails" for o in verdict.outcomes):
        return "open: nothing holds, but a check is undecided, so the setting may lack the effect's cause"
    return VERDICTS[verdict.word]


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
