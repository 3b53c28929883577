"""The page of a run, or of several beside each other: one HTML file that loads nothing else."""

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import unescape
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import gnomon
from gnomon.core.atomic_files import real_path, write_durably, write_page
from gnomon.core.errors import ConfigError
from gnomon.core.redaction import for_people, without_secrets
from gnomon.core.svg import MARK, page_style
from gnomon.core.tables import packaged_toml
from gnomon.diagnosis.current_findings import written
from gnomon.diagnosis.finding import Finding
from gnomon.diagnosis.recorded import diagnose
from gnomon.insight.report.compare import compared
from gnomon.insight.report.rollouts import Reader, RolloutList, algorithm_of, vocabulary_of
from gnomon.insight.report.run import build_report
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import is_number
from gnomon.records.reading import RunRecord

LARGEST = 2_000_000
"""Bytes of a page."""
MOST_RUNS = 32
MOST_DIAGNOSED = 500
"""Steps that are diagnosed anew for a page."""
_ROOM = ((700, 5), (350, 5), (200, 3), (60, 2), (10, 1))
"""Tokens of a response and rollouts of one list, tried in this order until the page is small enough."""
_STYLE, _SCRIPT = "<!--style-->", "<!--script-->"
# A mark, or the text between two; and, in a mark, what a person reads.
_PART = re.compile(r"<[^<>]*>|[^<>]+")
_WORDS = re.compile(r"""( (?:title|aria-label|data-across|data-meaning)=")([^"]*)""")
_COLORINGS: Mapping[str, Sequence[str]] = packaged_toml("gnomon.insight", "words.toml")["colorings"]


@dataclass(frozen=True)
class ReportPage:
    """A page that was written: where, of how many bytes, of which runs."""

    path: Path
    size: int
    runs: tuple[Path, ...]

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {"report": str(self.path), "bytes": self.size, "runs": [str(run) for run in self.runs]}


def leave_page(directory: RunDirectory, console: Console) -> None:
    """Write the page of a run that has just ended, well or not; whatever goes wrong is a warning and no more."""
    try:
        with console.phase("drawing the report"):
            write_durably(directory.report, run_page(RunRecord(directory.path), is_over=True).encode(), is_synced=False)
    except Exception as error:
        # The boundary of the run: its weights and records are safe by now, and a page can be drawn again.
        console.warn(f"the report was not written ({error}); try again: gnomon report {quote(str(directory.path))}")


def write_report(runs: Sequence[str | Path], out: Path | None = None) -> ReportPage:
    """Write the page of one run, or one that compares several, and return what was written.

    Args:
        out: A file; without it ``report.html`` in the run, or ``comparison.html`` in the first of several. Files of the
            runs are only read, a run that is going on is not disturbed, and what is damaged is passed over.

    Raises:
        RunDirectoryError: If there is no such run, or the page cannot be written.
        ConfigError: For too many runs, or one that is named twice.
    """
    records = [RunRecord.of(run) for run in runs]
    if not 1 <= len(records) <= MOST_RUNS:
        raise ConfigError(f"a page shows 1 to {MOST_RUNS} runs, got {len(records)}; name fewer")
    places = [real_path(record.path) for record in records]
    twice = [record.path for record, place in zip(records, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ConfigError(f"{twice[-1]} is named twice, and a run cannot be compared with itself; name each run once")
    files_of = records[0].files
    path = out or (files_of.report if len(records) == 1 else files_of.path / "comparison.html")
    content = (run_page(records[0]) if len(records) == 1 else comparison_page(records)).encode()
    write_page(path, content)
    return ReportPage(path, len(content), tuple(record.path for record in records))


def run_page(record: RunRecord, is_over: bool = False) -> str:
    """Return the page of one run, of at most 2 MB: where it would be more, responses are cut shorter.

    Args:
        is_over: Its process still holds it, and will not go on with it.
    """
    run = build_report(record, findings_of(record), is_over)
    vocabulary, algorithm = vocabulary_of(record), algorithm_of(record)
    page = ""
    # Responses take nearly all of a page, so they are shortened until it fits; the last try is shown whatever its size.
    for most, each in _ROOM:
        reader = Reader(record, vocabulary, algorithm, most, each)
        lists = reader.rollout_lists(run["scan"])
        page = _page("run.html", {"run": run, "lists": lists, "colorings": colorings(lists)})
        if len(page.encode()) <= LARGEST:
            break
    return page


def comparison_page(records: Sequence[RunRecord]) -> str:
    """Return the page that lays several runs beside each other."""
    return _page("comparison.html", {"all": compared(records)})


def findings_of(record: RunRecord) -> list[Finding]:
    """Return what the diagnosis says of the run: now, or for a long one what it said while the run was training.

    What the run wrote down and a diagnosis of its files does not find, as where files are damaged, is added.
    """
    said = written(record.files)
    # A diagnosis reads the whole run, which takes long where there are thousands of steps.
    if record.files.findings.exists() and len(record.metrics()) > MOST_DIAGNOSED:
        return said
    found = diagnose(record)
    known = {finding.rule for finding in found}
    return [*found, *(finding for finding in said if finding.rule not in known)]


def colorings(lists: Sequence[RolloutList]) -> list[tuple[str, str, str]]:
    """Return by what the tokens on the page can be colored: key, title and meaning."""
    there = {name for kind in lists for one in kind.rollouts for name in one.response.numbers}
    return [(key, words[0], words[1]) for key, words in _COLORINGS.items() if key in there]


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("gnomon.insight.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["measured"] = _measured
    return environment


def _page(template: str, context: Mapping[str, Any]) -> str:
    folder = files("gnomon.insight.report") / "page"
    script = (folder / "page.js").read_text(encoding="utf-8")
    # The page's security policy allows this one script by its digest, so a script in a run's text cannot run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    places = {"style": Markup(_STYLE), "script": Markup(_SCRIPT), "digest": digest, "mark": Markup(MARK)}
    text = _templates().get_template(template).render(**context, **places, version=gnomon.__version__)
    # Secrets are taken out, and what cannot be seen is spelled out, of texts alone and before style and script come in:
    # the script has to stay what its digest says. What others wrote is escaped, so it cannot say where those belong.
    return _for_people(text).replace(_STYLE, page_style(), 1).replace(_SCRIPT, script, 1)


def _for_people(page: str) -> str:
    """Return a page whose texts are `for_people`: what stands between marks, and in attributes that hold words.

    Marks, classes, names of places and numbers of drawings stay what they are, whatever a secret of the environment is.
    """
    # Compared unescaped: a secret with "&" or "<" in it stands escaped in the page.
    plain = unescape(page)
    # The usual case: nothing to hide in the whole page, and it is not taken apart.
    if for_people(plain) == plain:
        return page
    # Where the whole has no secret of the environment, no part has one: it is not looked for a thousand times.
    environment = {} if without_secrets(plain) == plain else dict(os.environ)
    return _PART.sub(lambda found: _part(found[0], environment), page)


def _part(found: str, environment: Mapping[str, str]) -> str:
    if found.startswith("<"):
        return _WORDS.sub(lambda given: given[1] + _text(given[2], environment), found)
    return _text(found, environment)


def _text(written: str, environment: Mapping[str, str]) -> str:
    plain = unescape(written)
    shown = for_people(plain, environment)
    # What does not change keeps the entities that the template wrote.
    return written if shown == plain else str(escape(shown))


def _measured(value: Any) -> str:
    """Return a measured number as a person reads it; what is no number as it is.

    >>> _measured(0.25), _measured(1234567.0), _measured(3e-05), _measured(2.0)
    ('0.25', '1,234,567', '3e-05', '2')
    """
    if not is_number(value):
        return str(value)
    number = float(value)
    return f"{number:,.0f}" if number == round(number) and abs(number) < 1e15 else f"{number:.4g}"
