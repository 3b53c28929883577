"""``gnomon evaluate MODEL_OR_RUN [--task NAME] [--samples K]``: held-out scores with 95% intervals."""

import argparse
import json
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Evaluate a model or a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gnomon evaluate", description=__doc__)
    parser.add_argument("model", help="a run directory (its newest checkpoint), a model folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as sampling.temperature=0.6")
    parser.add_argument("--task", help="a built-in task, a reasoning-gym generator or a dataset (default: the run's)")
    parser.add_argument("--samples", type=int, default=1, help="answers a prompt: the k of avg@k, pass@k and maj@k")
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts, when --task is given")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_intermixed_args(arguments)

    from gnomon.cli.results import table
    from gnomon.launch import evaluate

    found = evaluate(given.model, given.task, given.samples, given.prompts, given.overrides)
    print(json.dumps(found.as_row()) if given.json else "\n".join(table([found])))
    return 0
