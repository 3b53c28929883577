"""gnomon doctor RUN [--fail-on severe]: what is wrong with a run, what shows it, what it means, what to try.

RUN may be a run of TRL, verl or prime-rl; then the rules that could not look are named.
"""

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.core.redaction import for_people, shortened
from gnomon.records.directory import RunDirectory

if TYPE_CHECKING:
    from gnomon.diagnosis import Finding, FindingSample

WIDEST = 80
_TEXT = 60


def run(arguments: Sequence[str]) -> int:
    """Print the findings of a run; return 1 if a finding is as severe as --fail-on, otherwise 0."""
    given = parser_of("doctor", __doc__).parse_args(arguments)
    path, width = Path(given.run), min(WIDEST, shutil.get_terminal_size().columns)
    RunDirectory.check_there(path)

    with loading_libraries():
        from gnomon.records.foreign import is_foreign

        look = _of_foreign if is_foreign(path) else _of_gnomon
    findings, table, said, notes, is_blind = look(path, width)
    if given.json:
        print(json.dumps({"run": str(path), "findings": [finding.as_row() for finding in findings], **table}))
    else:
        print(for_people("\n\n".join([said, *(describe(finding, width) for finding in findings), *notes])))
    return int(_is_grave(findings, given.fail_on) or (given.fail_on is not None and is_blind))


Looked = tuple[Sequence["Finding"], dict[str, object], str, list[str], bool]
"""Findings; what else the JSON object has; the line above the findings and those below; whether no step was there."""


def _of_gnomon(path: Path, width: int) -> Looked:
    from gnomon.diagnosis import diagnose
    from gnomon.records.console import Console
    from gnomon.records.corruption import damaged, in_words
    from gnomon.records.reading import RunRecord
    from gnomon.records.run_card import end_of

    record = RunRecord.of(path)
    with Console():
        findings, rows, damage = diagnose(record), record.metrics(), damaged(record.files)
    last, ended = rows[-1]["step"] if rows else 0, end_of(record.card())
    found = _count(len(findings)) if rows else "there is no step to judge in metrics.jsonl; found nothing else"
    said = f"{path}: {found} after step {last} of {record.steps()}, {record.state()}"
    said += f"\nIt ended with {ended}" if ended else ""
    said += f"\n{in_words(damage)}" if damage else ""
    return findings, {"step": last, "damaged": damage, "ended": ended}, said, [], not rows and record.state() != "live"


def _of_foreign(path: Path, width: int) -> Looked:
    from gnomon.diagnosis.recorded import diagnose_foreign
    from gnomon.records.console import Console
    from gnomon.records.foreign import read_foreign

    run = read_foreign(path)
    with Console():
        findings, unable = diagnose_foreign(run)
    table = {"library": run.library, "step": run.last_step, "could_not_look": unable, "notes": list(run.notes)}
    blind = "; ".join(f"{rule} (needs {name})" for rule, name in unable.items())
    notes = ["\n".join(_wrapped(f"rules that could not look: {blind}", width, "", "  "))] if unable else []
    notes += ["\n".join(_wrapped(note, width, "- ", "  ")) for note in run.notes]
    said = f"{path}: {_count(len(findings))} after step {run.last_step}, as {run.library} logged it"
    return findings, table, said, notes, not run.rows


def _is_grave(findings: Sequence["Finding"], fail_on: str | None) -> bool:
    from gnomon.diagnosis.finding import SEVERITIES

    return fail_on is not None and any(
        SEVERITIES.index(finding.severity) >= SEVERITIES.index(fail_on) for finding in findings
    )


def describe(finding: "Finding", width: int = WIDEST) -> str:
    """Return a finding as lines of at most ``width`` characters."""
    head = f"{finding.severity.upper():<8} {finding.rule}"
    steps = f"steps {finding.first_step} to {finding.step}"
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in finding.evidence.items())
    lines = [f"{head}{steps:>{max(2, width - len(head))}}", *_wrapped(finding.summary, width, "  ", "  ")]
    lines += _wrapped(finding.meaning, width, "  means     ")
    for number, advice in enumerate(finding.advice):
        lines += _wrapped(advice, width, "  try       - " if number == 0 else "            - ", "              ")
    lines += _wrapped(numbers, width, "  evidence  ")
    for number, sample in enumerate(finding.samples):
        lines += _wrapped(_said(sample), width, "  samples   - " if number == 0 else "            - ", "              ")
    return "\n".join(lines)


def _said(sample: "FindingSample") -> str:
    """Return one response in a line without control characters, because a model may write escape sequences."""
    verdict = f"error: {_visible(sample.error)}" if sample.error is not None else f"reward {sample.reward:.3g}"
    return f"step {sample.step}, {verdict}: {_visible(sample.question)} -> {_visible(sample.response)}"


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shortened(text, _TEXT))


def _wrapped(text: str, width: int, first: str, later: str = "            ") -> list[str]:
    return textwrap.wrap(for_people(text), width, initial_indent=first, subsequent_indent=later, break_long_words=True)


def _count(number: int) -> str:
    return "nothing found" if number == 0 else "1 finding" if number == 1 else f"{number} findings"
