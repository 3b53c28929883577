"""One contender in a process of its own: ``python -m benchmarks.harness.contender CASE NAME SIZE REPEATS``.

Prints one JSON object as its last line. ``contender work NAME SIZE FOLDER`` writes the fixed work for a peer instead.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace

from benchmarks.harness.report import BenchResult
from benchmarks.harness.sizes import size_of

CONTENDERS: Mapping[str, Mapping[str, str]] = {
    "roofline": {"gnomon": "roofline.roofline"},
    "c1": {"gnomon": "steps.step"},
    "engine": {"gnomon": "generation.decode", "transformers": "generation.decode_plainly"},
    "update": {"gnomon": "updates.update"},
    "learning": {"gnomon": "updates.learning"},
    "growth": {
        "batch": "growth.batch",
        "length": "growth.length",
        "group size": "growth.group",
        "vocabulary": "growth.vocabulary",
        "prompts tracked": "growth.tracker",
        "algorithms": "growth.algorithms",
        "recording": "growth.recording",
    },
    "weights": {"gnomon": "weights.weights"},
    "start": {"gnomon": "steps.start"},
}
"""Case -> contender -> the function that measures it, as module.name of this package."""
UNTUNED = {("growth", "prompts tracked")}
"""Those that measure memory, and so leave the allocator as it is."""


def measure(case: str, contender: str, size: str, repeats: int) -> BenchResult:
    """Return what a contender of ours shows, in this process."""
    module, _, name = CONTENDERS[case][contender].partition(".")
    work = vars(importlib.import_module(f"benchmarks.harness.{module}"))[name]
    result: BenchResult = work(size_of(size), repeats)
    return result


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    case, contender, size, last = arguments
    if case == "work":
        from benchmarks.harness.materials import written_work

        print(json.dumps(written_work(size_of(size), last)))
        return 0
    if case == "profile":
        from benchmarks.harness.profiling import profile

        print(json.dumps(profile(size_of(size), contender)))
        return 0
    result = measure(case, contender, size, int(last))
    if case == "roofline":
        from benchmarks.harness.machine import describe

        result = replace(result, facts={**result.facts, "machine": describe()})
    print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
