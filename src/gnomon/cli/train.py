"""gnomon train EXPERIMENT [key=value ...]: train, evaluate, record."""

import json
from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.arguments import cluster_overrides, parser_of, supervise, trained
from gnomon.config.reading import check_names


def run(arguments: Sequence[str]) -> int:
    """Train an experiment; return the exit code."""
    parser = parser_of("train", __doc__)
    given = parser.parse_intermixed_args(arguments)
    cluster = cluster_overrides(parser, given.cluster)
    overrides = [*given.overrides, *([] if given.logged is None else [f"rollouts_from={json.dumps(given.logged)}"])]
    # Before torch is imported, which takes seconds: a misspelt name is refused at once.
    check_names(given.experiment, [*overrides, *cluster], run_dir=given.run_dir or Path("runs", "run"))
    if given.restarts:
        return supervise(given, ["train", given.experiment, *overrides], given.experiment, overrides)

    return trained(given, lambda experiments: experiments.load(given.experiment, [*overrides, *cluster]))
