"""gnomon continue RUN key=value ...: go on with a run after its end, with more steps, other prompts or settings.

With more steps alone the same run goes on. Otherwise, and with --run-dir, another run begins with its weights, moments
and what it knows of the prompts that stay; its steps count on from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.arguments import SettingsParser, add_restarts, chosen, finished, restarted
from gnomon.config.reading import check_names, parse_override
from gnomon.core.progress import working
from gnomon.records.directory import RunDirectory, refuse_unchanged

EXAMPLES = """
examples:
  gnomon continue runs/first steps=200            # 200 steps in all, in the same run
  gnomon continue runs/first steps=300 task=more.jsonl sampling.max_completion_length=1024
                                                  # a run runs/first-2 that begins after step 200 of runs/first
  gnomon continue runs/first steps=300 learner.optimizer.learning_rate=5e-7 --run-dir runs/slower

model, lora, seed, the critic's backbone and an averaged policy stay as they were."""


def build_parser() -> SettingsParser:
    """Return the parser of the verb."""
    parser = SettingsParser("continue", __doc__, EXAMPLES, is_raw=True)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_overrides("settings that change, such as steps=200")
    parser.add_argument("--run-dir", type=Path, help="where to write another run (default: RUN-2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    add_restarts(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Continue a run; return the exit code."""
    given = build_parser().parse_intermixed_args(arguments)
    RunDirectory.check(given.run)
    refuse_unchanged(given.run, given.overrides)
    check_names(RunDirectory(given.run).experiment, given.overrides)
    if given.restarts:
        return _with_restarts(given)
    with working("loading libraries", is_brief=True):
        from gnomon.training.api import continue_run

    settings = [parse_override(each) for each in given.overrides]
    return finished(given, lambda: continue_run(given.run, settings, given.run_dir))


def _with_restarts(given: argparse.Namespace) -> int:
    """Continue in a process that is begun again after a fault, in a directory that is chosen in advance."""
    with working("loading libraries", is_brief=True):
        from gnomon.training.continuation import LENGTH

    run_dir = given.run_dir
    if run_dir is None and any(parse_override(each)[0] not in LENGTH for each in given.overrides):
        run_dir = chosen(RunDirectory.after(given.run))
    place = [] if run_dir is None else ["--run-dir", str(run_dir)]
    again = ["continue", str(given.run), *given.overrides, *place, *["--json"] * given.json]
    return restarted(again, run_dir or given.run, given.restarts)
