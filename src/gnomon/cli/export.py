"""``gnomon export RUN DIR``: take a run's model away as Hugging Face safetensors."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gnomon.core.progress import working


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the verb."""
    parser = argparse.ArgumentParser(prog="gnomon export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Export the newest valid checkpoint's model; return the exit code."""
    given = build_parser().parse_args(arguments)

    with working("loading libraries", is_brief=True):
        from gnomon.training.api import export

    folder = export(given.run, given.folder)
    said = (
        json.dumps({"folder": str(folder)}) if given.json else f"{folder} loads with from_pretrained({str(folder)!r})"
    )
    print(said)
    return 0
