"""gnomon export RUN [FOLDER] [--to WHERE]: take the model of a run or an adapter away."""

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from shlex import quote

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.core.errors import ConfigError
from gnomon.core.progress import show_progress
from gnomon.records.directory import RunDirectory

_HUB = "hub:"


def run(arguments: Sequence[str]) -> int:
    """Export the newest valid checkpoint's model; return the exit code."""
    parser = parser_of("export", __doc__)
    given = parser.parse_args(arguments)
    if given.to is None and given.folder is None:
        parser.error("the following arguments are required: folder")
    RunDirectory.check_there(given.run)
    if given.to is None:
        if given.public or given.dry_run:
            parser.error("--public and --dry-run are of an upload: add --to hub:USER/NAME")
        said = _copied(given)
    elif given.to.partition(":")[0] == "gguf":
        if given.folder is None or given.public or given.dry_run:
            parser.error("--to gguf takes a new file, as in: gnomon export RUN model.gguf --to gguf")
        said = _converted(given)
    elif given.to.startswith(_HUB):
        said = _uploaded(given)
    else:
        raise ConfigError(f"--to is hub:USER/NAME or gguf, got '{given.to}'; for a folder here leave --to out")
    print(said)
    return 0


def _copied(given: argparse.Namespace) -> str:
    with loading_libraries():
        from gnomon.training.api import export

    folder = export(given.run, given.folder)
    return (
        json.dumps({"folder": str(folder)}) if given.json else f"{folder} loads with from_pretrained({str(folder)!r})"
    )


def _converted(given: argparse.Namespace) -> str:
    with loading_libraries():
        from gnomon.training.api import export_gguf

    with show_progress(f"writing {given.folder}"):
        file = export_gguf(given.run, given.folder, given.to.partition(":")[2] or None)
    return (
        json.dumps({"file": str(file)}) if given.json else f"{file} is for llama.cpp: llama-cli -m {quote(str(file))}"
    )


def _uploaded(given: argparse.Namespace) -> str:
    with loading_libraries():
        # A room that the command line knows by name only.
        push_to_hub = import_module("gnomon.insight.model_card").push_to_hub

    repository, private = given.to.removeprefix(_HUB), not given.public
    with show_progress(f"preparing {repository}" if given.dry_run else f"uploading to {repository}"):
        done = push_to_hub(given.run, repository, private, given.folder, given.dry_run)
    if given.json:
        return json.dumps(done.as_row())
    if given.dry_run:
        return f"{done.folder} is what {repository} would hold: {', '.join(done.files)}"
    return f"{done.url} holds the model ({'private' if private else 'public'})"
