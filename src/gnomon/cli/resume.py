"""``gnomon resume RUN``: go on from the newest valid checkpoint."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from gnomon.progress import working


def run(arguments: Sequence[str]) -> int:
    """Resume a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gnomon resume", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    given = parser.parse_args(arguments)

    with working("loading libraries", is_brief=True):
        from gnomon.cli.results import show
        from gnomon.launch import resume

    return show(resume(given.run), as_json=given.json)
