"""gnomon train EXPERIMENT [key=value ...]: train, evaluate, record."""

import json
from collections.abc import Sequence

from gnomon.cli.arguments import SettingsParser, add_run_options, cluster_overrides, finished, restarting
from gnomon.config.reading import check_names
from gnomon.core.progress import working


def build_parser() -> SettingsParser:
    """Return the parser of the verb."""
    parser = SettingsParser(
        "train",
        __doc__,
        "examples: gnomon train quickstart steps=50, gnomon train my.toml algorithm=spo --run-dir runs/spo",
    )
    parser.add_argument("experiment", help="a TOML file, or the name of a built-in experiment (tiny, quickstart)")
    parser.add_overrides("such as steps=50 algorithm=spo algorithm.num_generations=4")
    parser.add_argument("--from", dest="logged", metavar="FOLDER", help="train on what a run logged in RUN/rollouts")
    add_run_options(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Train an experiment; return the exit code."""
    parser = build_parser()
    given = parser.parse_intermixed_args(arguments)
    cluster = cluster_overrides(parser, given.cluster)
    overrides = [*given.overrides, *([] if given.logged is None else [f"rollouts_from={json.dumps(given.logged)}"])]
    check_names(given.experiment, [*overrides, *cluster])
    if given.restarts:
        return restarting(given, ["train", given.experiment, *overrides], given.experiment, overrides)

    with working("loading libraries", is_brief=True):
        from gnomon.config.experiment import load
        from gnomon.training.api import train_experiment

    return finished(given, lambda: train_experiment(load(given.experiment, [*overrides, *cluster]), given.run_dir))
