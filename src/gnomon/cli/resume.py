"""gnomon resume RUN: go on from the newest valid checkpoint."""

import shlex
from collections.abc import Sequence

from gnomon.cli.arguments import finished, loading_libraries, parser_of, restarted
from gnomon.core.errors import ConfigError
from gnomon.records.directory import RunDirectory


def run(arguments: Sequence[str]) -> int:
    """Resume a run; return the exit code."""
    given = parser_of("resume", __doc__).parse_intermixed_args(arguments)
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
    with loading_libraries():
        from gnomon.training.api import resume

    return finished(given, lambda: resume(given.run))
