"""Print the results of a run and of evaluations."""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from gnomon.core.errors import UserError

if TYPE_CHECKING:
    from gnomon.training.evaluate import Evaluation
    from gnomon.training.result import Result


def show(result: "Result", as_json: bool) -> int:
    """Print a finished run: scores before and after with intervals, paths and next commands; return exit code 0."""
    if as_json:
        print(json.dumps(result.as_row()))
        return 0
    evaluations = [e for e in result.evaluations if e.step in (result.first_step, result.steps)]
    lines = ["", *table(evaluations)]
    if len(evaluations) == 2:
        lines += ["", _verdict(result.directory, *evaluations)]
    # The next commands are printed as the user can type them: with a path where gnomon is not on PATH.
    is_typed = Path(sys.argv[0]).name == "gnomon" and shutil.which("gnomon") != os.path.abspath(sys.argv[0])
    called = quote(sys.argv[0]) if is_typed else "gnomon"
    typed = quote(str(result.directory))
    # Several greedy answers to a question are one, and refused; a reward model gives none.
    is_greedy = any(re.match("temperature 0[ ,]", part.drawn) for e in evaluations for part in e.parts or [e])
    is_measured = any(e.loss_nats is not None for e in evaluations)
    ranks = any("margin" in e.scores and not e.drawn for e in evaluations)
    form = "" if _has_template(result.model) else ', form = "plain"'
    rewards = quote(f'rewards=[{{kind = "model", model = {json.dumps(str(result.directory))}{form}}}]')
    lines += [
        "",
        f"run     {result.directory}",
        f"model   {result.model}",
        *([f"critic  {result.model / 'critic'}"] if (result.model / "critic").is_dir() else []),
        *([f"report  {page}"] if (page := result.directory / "report.html").is_file() else []),
    ]
    following = [
        *([f"evaluate {typed}{'' if is_greedy or is_measured or ranks else ' --samples 4'}"] if evaluations else []),
        *([f"train EXPERIMENT {rewards}"] if ranks else []),
        *([f"train EXPERIMENT model={typed}"] if is_measured else []),
        f"export {typed} my-model",
    ]
    if "quickstart" in result.directory.name:
        following.append("train quickstart algorithm=spo algorithm.tracker.initial=prior")
    lines += [f"{'' if place else 'next':8}{called} {verb}" for place, verb in enumerate(following)]
    print("\n".join(lines))
    return 0


def _has_template(model: Path) -> bool:
    settings = model / "tokenizer_config.json"
    return (model / "chat_template.jinja").is_file() or (
        settings.is_file() and json.loads(settings.read_text()).get("chat_template") is not None
    )


def table(evaluations: Sequence["Evaluation"], names: Sequence[str] = ()) -> list[str]:
    """Return the evaluations as lines, one score per line and one evaluation per column.

    Args:
        evaluations: The columns.
        names: Headings of the columns; by default the trained steps.
    """
    if not evaluations:
        return ["no evaluation was made"]
    first = evaluations[0]
    each = f"{first.samples} answer(s) each{f' (avg@{first.samples})' if first.samples > 1 else ''}"
    head = f"{first.prompts} held-out prompts of '{first.task}', {each}, 95% intervals"
    if first.parts:
        head = f"{first.prompts} held-out prompts of {len(first.parts)} sets and their macro average, 95% intervals"
    head += f", drawn at {first.drawn}" if first.drawn else ""
    columns = list(names) or [f"after step {e.step}" for e in evaluations]
    rows = [("", columns), *_sets(evaluations), *_scores(evaluations), *_extras(evaluations)]
    # Columns are as wide as their widest cell; 24 hold a score with its interval.
    wide = max(len(label) for label, _ in rows)
    column = max(24, *map(len, columns))
    lines = ["  ".join([f"{label:<{wide}}", *(f"{cell:<{column}}" for cell in cells)]) for label, cells in rows]
    ungraded = [f"{name}: {e.ungraded}" for name, e in zip(columns, evaluations, strict=True) if e.errors]
    return [head, *(line.rstrip() for line in lines), *ungraded]


def _sets(evaluations: Sequence["Evaluation"]) -> list[tuple[str, list[str]]]:
    """Return the first score of each set, one set per line."""
    found = [{part.task: part for part in e.parts} for e in evaluations]
    return [
        (f"{part.task} (avg@{part.samples}, {part.prompts} prompts)",
         [str(parts[part.task].headline) if part.task in parts else "-" for parts in found])
        for part in evaluations[0].parts
    ]  # fmt: skip


def _scores(evaluations: Sequence["Evaluation"]) -> list[tuple[str, list[str]]]:
    names = list(dict.fromkeys(name for e in evaluations for name in e.scores))
    macro = "macro average, " if evaluations[0].parts else ""
    return [(f"{macro}{n}", [str(e.scores[n]) if n in e.scores else "-" for e in evaluations]) for n in names]


def _extras(evaluations: Sequence["Evaluation"]) -> list[tuple[str, list[str]]]:
    losses = [(e.loss_nats, e.perplexity) for e in evaluations if e.loss_nats is not None and e.perplexity is not None]
    rows = []
    if len(losses) == len(evaluations):
        rows.append(("loss (nats a token)", [f"{loss:.4f}" for loss, _ in losses]))
        rows.append(("perplexity", [f"{perplexity:.4g}" for _, perplexity in losses]))
    rows.append(("tokens", [f"{e.length_tokens_mean:.1f}" for e in evaluations]))
    rows.append(("truncated", [f"{e.truncated_fraction:.3f}" for e in evaluations]))
    for kind in ("pass", "maj") if evaluations[0].samples > 1 else ():
        values = [e.pass_at if kind == "pass" else e.maj_at for e in evaluations]
        for k in values[0]:
            name = f"{kind}@{k}"
            rows.append((name, [_with_interval(v.get(k), e, name) for v, e in zip(values, evaluations, strict=True)]))
    if any(e.errors for e in evaluations):
        rows.append(("errors", [str(e.errors) for e in evaluations]))
    return rows


def _with_interval(value: float | None, evaluation: "Evaluation", name: str) -> str:
    if value is None:
        return "-"
    interval = evaluation.intervals.get(name)
    return f"{value:.3f}" if interval is None else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _verdict(run: Path, before: "Evaluation", after: "Evaluation") -> str:
    """Compare both evaluations by their paired responses, or by their intervals if responses were not recorded."""
    from gnomon.analysis.paired import compare, read_answered
    from gnomon.records.directory import RunDirectory
    from gnomon.records.eval_records import AnswerLog
    from gnomon.records.run_card import read_card, rejudged

    name = next(iter(before.scores))
    if changed := rejudged(read_card(RunDirectory(run).card)):
        return f"{name} is not compared: {', '.join(changed)} changed while the run went on, so two codes judged it."
    log = AnswerLog(RunDirectory(run).answers)
    try:
        found = compare(read_answered(log.path(before.step)), read_answered(log.path(after.step)))
        return f"{name}: {found.words}"
    except UserError:
        # Responses may not be recorded: then the unpaired intervals decide, which is more cautious.
        low, high = before.headline, after.headline
        is_told = high.low > low.high or high.high < low.low
        said = "do not overlap, so this is beyond noise" if is_told else "overlap, so this could be noise"
        return f"{name} went from {low.mean:.3f} to {high.mean:.3f}; the intervals {said}."
