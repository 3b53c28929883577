"""``gnomon plan EXPERIMENT [key=value ...]``: validate everything and say what a step does, without training."""

import argparse
import json
import sys
from collections.abc import Sequence

from gnomon.progress import working


def run(arguments: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gnomon plan", description=__doc__)
    parser.add_argument("experiment", help="a TOML file, or the name of a built-in experiment")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--resolved",
        action="store_true",
        help="print the fully resolved experiment as TOML, and the words on standard error",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_intermixed_args(arguments)

    with working("loading libraries", is_brief=True):
        from gnomon.experiment import load, to_toml
        from gnomon.launch import checked
        from gnomon.models.size import model_size
        from gnomon.planning import make_plan
        from gnomon.records.console import Console

    loaded = load(given.experiment, given.overrides)
    experiment = loaded.experiment
    with Console() as console:
        asked, _ = checked(experiment, console)
    with working("reckoning what a step takes"):
        plan = make_plan(experiment, asked, model_size(experiment.model, experiment.trust_remote_code))
    if given.json:
        print(json.dumps({**plan.as_row(), "notes": loaded.notes}, indent=2))
        return 0
    lines = [*(f"Understood: {note}." for note in loaded.notes), *plan.sentences]
    # A resolved experiment is a file of its own, so the words go beside it.
    print("\n".join(lines), file=sys.stderr if given.resolved else sys.stdout)
    if given.resolved:
        print(to_toml(experiment))
    return 0
