"""``python -m benchmarks``: every case and every peer at hand, in one go, into ``benchmarks/results``."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rich.console import Console

from benchmarks.harness.report import BenchReport
from benchmarks.harness.run import CASES, Conditions, conduct, default_threads, quick_or_standard
from benchmarks.harness.tables import markdown, show
from gnomon.core.errors import UserError

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit code: 2 for wrong input, 1 when a contender of ours gave no result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("case", nargs="*", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--peer-python", action="append", default=[], metavar="PATH", help="has trl or vllm")
    parser.add_argument("--repeats", type=int, metavar="N")
    parser.add_argument("--only", default="", metavar="NAME", help="one contender of a case, such as algorithms")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="for one contender")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR")
    given = parser.parse_intermixed_args(arguments)
    size = quick_or_standard(given.quick)
    conditions = Conditions(default_threads(), given.limit, 0.0 if given.quick else 120.0, given.only)
    pythons = [*given.peer_python, *([str(PEERS)] if PEERS.is_file() else [])]
    try:
        report = conduct(given.case, size, given.repeats or size.repeats, conditions, pythons, _say)
    except UserError as error:
        _say(f"python -m benchmarks: {error}")
        return 2
    show(report, Console(highlight=False, width=200))
    for path in write(report, given.results, given.case):
        _say(f"written: {path}")
    return report.exit_code


def write(report: BenchReport, folder: Path, cases: Sequence[str] = ()) -> tuple[Path, Path]:
    """Write the report as JSON and as a Markdown page, named after machine, cases and day; return where."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (report.machine["cpu"], f"{report.machine['cores']}-cores", report.settings["size"], *cases)
    stem = "-".join([*(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts), str(date.today())])
    paths = folder / f"{stem}.json", folder / f"{stem}.md"
    paths[0].write_text(json.dumps(report.as_row(), indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(report), encoding="utf-8")
    return paths


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
