"""gnomon sft [EXPERIMENT] [key=value ...]: train on the answers of a dataset (supervised fine-tuning).

    gnomon sft model=smollm2-135m-instruct task=chats.jsonl
    gnomon sft model=smollm2-135m-instruct task=chats.jsonl epochs=1 max_length=1024 lora={}
    gnomon sft my.toml --run-dir runs/cold-start
    gnomon train my.toml model=runs/cold-start

A row has a prompt with a completion or an answer, or messages of which every assistant's is trained on. The loss is the
mean negative log-likelihood of answer tokens. The run is one as any other: resume, report, watch, evaluate, export.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.arguments import cluster_overrides, parser_of, supervise, trained
from gnomon.config.foreign_names import translated
from gnomon.config.reading import check_names, parse_override, read
from gnomon.core.errors import ConfigError


def run(arguments: Sequence[str], verb: str = "sft", said: str | None = __doc__) -> int:
    """Fine-tune on the answers of a dataset, or train a reward model; return the exit code."""
    parser = parser_of(verb, said)
    given = parser.parse_intermixed_args(arguments)
    # Without an experiment the first setting stands in its place.
    if given.experiment is not None and "=" in given.experiment and not os.path.isfile(given.experiment):
        given.experiment, given.overrides = None, [given.experiment, *given.overrides]
    cluster = cluster_overrides(parser, given.cluster)
    table = {"name": verb} if given.experiment is None else read(given.experiment)
    check_names(table, [*given.overrides, *cluster], verb=verb, run_dir=given.run_dir or Path("runs", "run"))
    settings = [parse_override(each) for each in (*given.overrides, *cluster)]
    named = {key.partition(".")[0] for key, _ in translated(settings)[0]} | {*table}
    lacking = [key for key in ("model", "task") if key not in named]
    if given.experiment is None and lacking:
        raise ConfigError(
            f"{' and '.join(lacking)} must be named: gnomon {verb} model=smollm2-135m-instruct task=rows.jsonl, or an "
            "experiment that does"
        )
    if given.restarts:
        source = [] if given.experiment is None else [given.experiment]
        return supervise(given, [verb, *source, *given.overrides], given.experiment or verb, given.overrides)

    return trained(given, lambda experiments: experiments.supervised(table, settings, verb))
