"""gnomon continue RUN key=value ...: go on with a run after its end, with more steps, other prompts or settings.

With more steps alone the same run goes on. Otherwise, and with --run-dir, another run begins with its weights, moments
and what it knows of the prompts that stay; its steps count on from there.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gnomon.cli.arguments import chosen, finished, loading_libraries, parser_of, restarted
from gnomon.config.reading import check_names, parse_override
from gnomon.records.directory import RunDirectory, refuse_unchanged

if TYPE_CHECKING:
    from gnomon.training.result import Result


def run(arguments: Sequence[str]) -> int:
    """Continue a run; return the exit code."""
    given = parser_of("continue", __doc__).parse_intermixed_args(arguments)
    RunDirectory.check(given.run)
    refuse_unchanged(given.run, given.overrides)
    check_names(RunDirectory(given.run).experiment, given.overrides)
    if given.restarts:
        return _with_restarts(given)
    with loading_libraries():
        from gnomon.config.experiment import changed

    settings = [parse_override(each) for each in given.overrides]

    def train() -> "Result":
        changed(given.run, settings)  # before torch is imported
        with loading_libraries():
            from gnomon.training.api import continue_run
        return continue_run(given.run, settings, given.run_dir)

    return finished(given, train)


def _with_restarts(given: argparse.Namespace) -> int:
    """Continue in a process that is begun again after a fault, in a directory that is chosen in advance."""
    with loading_libraries():
        from gnomon.training.continuation import LENGTH

    run_dir = given.run_dir
    # More steps alone go on in the same directory; anything else needs one that a restart finds again.
    if run_dir is None and any(parse_override(each)[0] not in LENGTH for each in given.overrides):
        run_dir = chosen(RunDirectory.after(given.run))
    place = [] if run_dir is None else ["--run-dir", str(run_dir)]
    again = ["continue", str(given.run), *given.overrides, *place, *["--json"] * given.json]
    return restarted(again, run_dir or given.run, given.restarts)
