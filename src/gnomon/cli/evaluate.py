"""gnomon evaluate MODEL_OR_RUN [MODEL_OR_RUN_B] [--task NAME] [--samples K]: held-out scores, and what differs.

Two models, or two checkpoints of a run, are asked the same prompts with the same draws and compared prompt by prompt.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.config.reading import check_evaluation
from gnomon.core.errors import ConfigError, RunDirectoryError

if TYPE_CHECKING:
    from gnomon.core.statistics import Difference
    from gnomon.training.eval_spec import EvalTarget
    from gnomon.training.evaluate import Evaluation

_TRUNCATED = 0.1


def run(arguments: Sequence[str]) -> int:
    """Evaluate one or two models or runs; return the exit code."""
    given = parser_of("evaluate", __doc__).parse_intermixed_args(arguments)
    others = [text for text in (given.second, *given.overrides) if text is not None]
    # What has an equals sign and is no file is a setting; the rest are models.
    overrides = tuple(text for text in others if "=" in text and not os.path.exists(text))
    models = [given.model, *(text for text in others if text not in overrides)]
    checkpoints = list(given.checkpoint or [])
    if max(len(models), len(checkpoints)) > 2:
        many = checkpoints if len(checkpoints) > 2 else models
        raise ConfigError(f"two are compared at most, got {', '.join(map(str, many))}")
    check_evaluation(overrides, given.task or (), models)
    with loading_libraries():
        from gnomon.cli.results import table
        from gnomon.training.api import evaluate_each
        from gnomon.training.eval_spec import EvalSpec

    candidates = _candidates(models, checkpoints)
    _check_out(given.out)
    spec = EvalSpec(tuple(given.task or ()), given.samples, given.prompts, overrides)
    found = evaluate_each(candidates, spec)
    names = [_name(c, e, len(candidates)) for c, e in zip(candidates, found, strict=True)]
    if given.out is not None:
        _write(given.out, names, found)
    differences = _differences(found)
    if given.json:
        print(json.dumps(_row(names, found, differences)))
        return 0
    lines = [*table(found, names), *_advice(found)]
    if differences:
        lines += ["", f"{next(iter(found[0].scores))}: {differences['avg'].words}"]
        lines += [f"{task}: {difference.words}" for task, difference in _differences_by_set(found).items()]
    print("\n".join(lines))
    return 0


def _candidates(models: Sequence[str], given: Sequence[int | str]) -> list["EvalTarget"]:
    """Return the evaluation targets: one or two models, or two checkpoints of one run."""
    from gnomon.training.eval_spec import NEWEST, EvalTarget

    # One model with several checkpoints, or two models with one checkpoint each.
    if len(models) == 1:
        return [EvalTarget(models[0], each) for each in given or [NEWEST]]
    if len(given) == 2:
        return [EvalTarget(model, each) for model, each in zip(models, given, strict=True)]
    plain = [EvalTarget(model) for model in models]
    if given and not any(c.is_run for c in plain):
        raise ConfigError(f"neither {models[0]} nor {models[1]} is a run, so there is no checkpoint {given[0]}")
    return [EvalTarget(c.model, given[0]) if given and c.is_run else c for c in plain]


def _name(candidate: "EvalTarget", evaluation: "Evaluation", count: int) -> str:
    """Return a column's heading."""
    if count == 1:
        return f"after step {evaluation.step}" if candidate.is_run else "the model"
    short = Path(candidate.model).name or str(candidate.model)
    return f"{short}, step {evaluation.step}" if candidate.is_run else short


def _differences(found: Sequence["Evaluation"]) -> dict[str, "Difference"]:
    """Return the paired differences by measure; empty for a single evaluation."""
    if len(found) < 2:
        return {}
    from gnomon.analysis.paired import compare

    first, second = found
    curves = [*(f"pass@{k}" for k in first.pass_at), *(f"maj@{k}" for k in first.maj_at)]
    measures = ["avg", *(name for name in curves if name in second.intervals), "tokens", "truncated"]
    return {name: compare(first.answered, second.answered, name) for name in measures}


def _differences_by_set(found: Sequence["Evaluation"]) -> dict[str, "Difference"]:
    """Return the paired difference of each set's first score; empty where one set was asked."""
    from gnomon.analysis.paired import compare

    sides = [{part.task: part.answered for part in evaluation.parts} for evaluation in found]
    return {task: compare(sides[0][task], sides[1][task]) for task in sides[0]}


def _row(names: Sequence[str], found: Sequence["Evaluation"], differences: dict[str, "Difference"]) -> dict[str, Any]:
    if not differences:
        return found[0].as_row()
    rows = {
        measure: {
            **asdict(d),
            "is_noise": d.is_noise,
            "prompts_needed": d.prompts_needed,
            "detectable": d.detectable,
            "words": d.words,
        }
        for measure, d in differences.items()
    }
    return {"evaluations": [{"name": n, **e.as_row()} for n, e in zip(names, found, strict=True)], "differences": rows}


def _advice(found: Sequence["Evaluation"]) -> list[str]:
    """Return a line if many responses were truncated, which lowers scores whatever the model."""
    most = max(e.truncated_fraction for e in found)
    if most <= _TRUNCATED:
        return []
    return [f"{most:.0%} of answers were cut off at their budget; sampling.max_completion_length=N gives them more"]


def _check_out(folder: Path | None) -> None:
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirectoryError(f"{folder} exists and is not empty; name a new folder with --out")


def _write(folder: Path, names: Sequence[str], found: Sequence["Evaluation"]) -> None:
    from gnomon.analysis.paired import write_answered

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, evaluation) in enumerate(zip(names, found, strict=True), start=1):
            # The column's heading as a file name.
            slug = "".join(c if c.isalnum() or c in ".-" else "-" for c in name).strip("-.")
            write_answered(folder / f"{number}-{slug}.jsonl", evaluation.answered)
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be written: {error.strerror}; name another with --out") from error
