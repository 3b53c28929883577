"""gnomon report RUN [RUN ...]: one page that shows a run, or several beside each other."""

import json
from collections.abc import Sequence
from importlib import import_module

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.records.directory import RunDirectory


def run(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    given = parser_of("report", __doc__).parse_args(arguments)
    RunDirectory.check_there(*given.run)

    with loading_libraries():
        from gnomon.records.console import Console

        write_report = import_module("gnomon.insight.report.write").write_report

    with Console() as console, console.phase("reading and drawing"):
        report = write_report(given.run, given.out)
    print(json.dumps(report.as_row()) if given.json else f"report  {report.path}  ({report.size / 1e6:.2f} MB)")
    return 0
