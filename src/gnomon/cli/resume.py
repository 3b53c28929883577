"""gnomon resume RUN: go on from the newest valid checkpoint."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.arguments import VerbParser, add_restarts, finished, restarted
from gnomon.core.errors import ConfigError
from gnomon.core.progress import working
from gnomon.records.directory import RunDirectory


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the verb."""
    parser = VerbParser("resume", __doc__, "examples: gnomon resume runs/first")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("overrides", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    add_restarts(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Resume a run; return the exit code."""
    given = build_parser().parse_intermixed_args(arguments)
    if given.overrides:
        said, run = shlex.join(given.overrides), shlex.quote(str(given.run))
        raise ConfigError(
            f"{said}: a run goes on with the settings that it began with; to change this and keep weights, moments and "
            f"what is known of prompts, type gnomon continue {run} {said}; to begin anew, gnomon train "
            f"{shlex.quote(f'{given.run}/experiment.toml')} {said} --run-dir DIR"
        )

    RunDirectory.check(given.run)
    if given.restarts:
        return restarted(["resume", str(given.run), *["--json"] * given.json], given.run, given.restarts)
    with working("loading libraries", is_brief=True):
        from gnomon.training.api import resume

    return finished(given, lambda: resume(given.run))
