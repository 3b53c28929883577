"""``gnomon continue RUN key=value ...``: go on with a run after its end, with more steps."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from gnomon.cli.arguments import SettingsParser, add_restarts, restarted
from gnomon.config.reading import check_names, parse_override
from gnomon.core.progress import working
from gnomon.records.directory import RunDirectory
from gnomon.training.supervisor import reporting

EXAMPLES = """
examples:
  gnomon continue runs/first steps=200            # 200 steps in all, in the same run

The same run with more steps has the numbers of a run that asked for them at first."""


def build_parser() -> SettingsParser:
    """Return the parser of the verb."""
    parser = SettingsParser(
        prog="gnomon continue",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that change, such as steps=200")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    add_restarts(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Continue a run; return the exit code."""
    given = build_parser().parse_intermixed_args(arguments)
    RunDirectory.check(given.run)
    check_names(RunDirectory(given.run).experiment, given.overrides)
    if given.restarts:
        again = ["continue", str(given.run), *given.overrides, *["--json"] * given.json]
        return restarted(again, given.run, given.restarts)
    with working("loading libraries", is_brief=True):
        from gnomon.cli.results import show
        from gnomon.training.api import continue_run

    with reporting(given.report), redirect_stdout(sys.stderr if given.json else sys.stdout):
        result = continue_run(given.run, [parse_override(each) for each in given.overrides])
    return show(result, as_json=given.json)
