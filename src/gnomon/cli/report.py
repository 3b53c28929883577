"""gnomon report RUN [RUN ...]: one page that shows a run, or several beside each other."""

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from gnomon.cli.arguments import VerbParser
from gnomon.core.progress import working
from gnomon.records.directory import RunDirectory


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the verb."""
    parser = VerbParser(
        "report",
        __doc__,
        "examples: gnomon report runs/first, gnomon report runs/first runs/second --out comparison.html",
    )
    parser.add_argument("run", nargs="+", type=Path, help="run directories; with several the page compares them")
    parser.add_argument("--out", type=Path, help="the file (default: report.html in the run, comparison.html for more)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    given = build_parser().parse_args(arguments)
    RunDirectory.check_there(*given.run)

    with working("loading libraries", is_brief=True):
        from gnomon.records.console import Console

        write_report = import_module("gnomon.insight.report.write").write_report

    with Console() as console, console.phase("reading and drawing"):
        report = write_report(given.run, given.out)
    print(json.dumps(report.as_row()) if given.json else f"report  {report.path}  ({report.size / 1e6:.2f} MB)")
    return 0
