"""gnomon bench [CASE ...]: how fast gnomon is on this machine, beside the machine's limit and beside TRL."""

import json
import sys
from collections.abc import Sequence

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.cli.clone import enter_clone
from gnomon.core.progress import track


def run(arguments: Sequence[str]) -> int:
    """Measure and print; return the exit code, which is 1 if one of gnomon's own contenders gave no result."""
    parser = parser_of("bench", __doc__)
    given = parser.parse_intermixed_args(arguments)
    if given.repeats is not None and given.repeats < 1:
        parser.error(f"--repeats should be at least 1, got {given.repeats}")
    if given.profile and given.case:
        parser.error("--profile is of the fixed work's step: name no case with it")
    if given.profile and (given.repeats is not None or given.peer_python):
        other = "--peer-python" if given.peer_python else "--repeats"
        parser.error(f"--profile measures one step of gnomon once: leave {other} out")

    enter_clone("bench", "benchmarks")
    with loading_libraries():
        from benchmarks.harness.run import Conditions, conduct, default_threads, profile, quick_or_standard

    size = quick_or_standard(given.quick)
    # A quick look does not wait until the machine is idle.
    conditions = Conditions(default_threads(), quiet_seconds=0.0 if given.quick else 60.0)
    if given.profile:
        parts = ("generate", "update")
        tables = {part: profile(part, size, conditions) for part in track(parts, "profiling", len(parts))}
        print(json.dumps(tables) if given.json else "\n".join(f"{part}\n{text}" for part, text in tables.items()))
        return 0
    report = conduct(given.case, size, given.repeats or size.repeats, conditions, given.peer_python or (), _say)
    if given.json:
        print(json.dumps(report.as_row(), allow_nan=False))
    else:
        from benchmarks.harness.tables import show
        from rich.console import Console

        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    return report.exit_code


def _say(line: str) -> None:
    print(line, file=sys.stderr)
