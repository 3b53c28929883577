"""gnomon plan EXPERIMENT [key=value ...]: validate everything and say what a step does, without training.

With --hardware: simulate the experiment on a cluster of such devices, none of which has to be on this machine: how to
split them, memory, seconds of each stage, the bottleneck, and what gnomon does not support there. Of the model only
config.json is needed.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from gnomon.cli.arguments import cluster_overrides, loading_libraries, parser_of
from gnomon.config.reading import check_names
from gnomon.core.errors import ConfigError
from gnomon.core.progress import show_progress

_DEVICES, _PROMPT_TOKENS = 8, 512


def run(arguments: Sequence[str]) -> int:
    """Print the plan; return the exit code."""
    parser = parser_of("plan", __doc__)
    given = parser.parse_intermixed_args(arguments)
    given.overrides += cluster_overrides(parser, given.cluster)
    if given.resolved and given.json:
        parser.error("--json prints one object and --resolved an experiment: leave one out")
    if given.hardware is None and (given.gpus, given.prompt_tokens, given.answer_tokens) != (None, None, None):
        parser.error("--gpus, --prompt-tokens and --answer-tokens are for --hardware; add it: --hardware h100")
    check_names(given.experiment, given.overrides, is_here=given.hardware is None)
    if given.hardware is not None:
        import_module("gnomon.analysis.planner.hardware").hardware_of(given.hardware)
        return _on_cluster(given)

    with loading_libraries():
        from gnomon.config.experiment import load, to_toml

    loaded = load(given.experiment, given.overrides)
    with loading_libraries():
        from gnomon.analysis.plan import make_plan
        from gnomon.models.size import model_size
        from gnomon.records.console import Console
        from gnomon.training.api import checked
        from gnomon.training.build_data import completed
        from gnomon.training.continuation import settled
        from gnomon.training.resolve import Resolved

    loaded = completed(loaded)
    experiment = settled(loaded.experiment)
    resolved = Resolved(experiment)
    with Console() as console:
        data, *_ = checked(resolved, console)
    with show_progress("estimating what a step takes"):
        plan = make_plan(resolved, data, model_size(experiment.model, experiment.trust_remote_code))
    lines = [*(f"Understood: {note}." for note in loaded.notes), *plan.sentences]
    return _print(given, {**plan.as_row(), "notes": loaded.notes}, lines, to_toml(experiment))


def _print(given: argparse.Namespace, row: Mapping[str, Any], lines: Sequence[str], resolved: str) -> int:
    """Print a plan in the form that was asked for, the resolved experiment as TOML; return the exit code."""
    if given.json:
        print(json.dumps(row, indent=2))
        return 0
    # The resolved experiment is the whole standard output, so the sentences go to standard error.
    print("\n".join(lines), file=sys.stderr if given.resolved else sys.stdout)
    if given.resolved:
        print(resolved)
    return 0


def _on_cluster(given: argparse.Namespace, changed: Sequence[str] = ()) -> int:
    """Print the forecast for hardware that is not here; return the exit code.

    Args:
        given: The command line.
        changed: The last of its settings, which were added so that the experiment fits.

    Raises:
        ConfigError: It does not fit. Where settings would fix that, the forecast with them was printed.
    """
    with loading_libraries():
        from gnomon.config.experiment import load, to_toml

    loaded = load(given.experiment, given.overrides)
    with loading_libraries():
        planner, deployment, search = (
            import_module(f"gnomon.analysis.planner.{name}") for name in ("text", "deployment", "search")
        )
        from gnomon.training.resolve import Resolved

    resolved = Resolved(loaded.experiment)
    place = deployment.place_of(
        resolved,
        given.hardware,
        _DEVICES if given.gpus is None else given.gpus,
        _PROMPT_TOKENS if given.prompt_tokens is None else given.prompt_tokens,
        given.answer_tokens,
    )
    try:
        with show_progress("estimating what a step takes"):
            found = planner.forecast(place)
    except ConfigError:
        # Once: a plan that was changed and still does not fit is an error.
        ways = [] if changed else [way.split() for way, _ in search.remedies(place) if not way.startswith("--")]
        if ways:
            # What was asked is refused all the same, after the plan of what would do.
            given.overrides += ways[0]
            _on_cluster(given, ways[0])
        raise
    warnings = list(filter(None, [deployment.passed_over(resolved, given.overrides)]))
    said = [f"Plan with {' '.join(changed)}, without which it does not fit:"] if changed else []
    chosen = {setting.partition("=")[0] for setting in found.settings}
    # Settings that the forecast chose replace those that were given.
    own = [override for override in given.overrides if override.partition("=")[0] not in chosen]
    command = shlex.join(["gnomon", "train", given.experiment, *own, *found.settings])
    lines = [*said, *(f"Understood: {note}." for note in loaded.notes), *warnings, *found.sentences(), command]
    row = {**found.as_row(), "changed": [*changed], "notes": [*loaded.notes, *warnings]}
    return _print(given, row, lines, to_toml(loaded.experiment))
