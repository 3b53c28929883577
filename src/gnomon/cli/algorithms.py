"""``gnomon algorithms [NAME]``: what there is, and what a name stands for."""

import argparse
import json
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Print the presets, or describe one; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gnomon algorithms", description=__doc__)
    parser.add_argument("name", nargs="?", help="a preset, or path.py:NAME of your own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)

    from gnomon.algorithms import PRESETS
    from gnomon.algorithms.configure import resolve, to_table
    from gnomon.algorithms.describe import describe, summary

    chosen = PRESETS if given.name is None else {given.name: resolve(given.name)}
    if given.json:
        print(json.dumps({name: to_table(algorithm) for name, algorithm in chosen.items()}, indent=2))
        return 0
    print(summary() if given.name is None else describe(chosen[given.name]))
    return 0
