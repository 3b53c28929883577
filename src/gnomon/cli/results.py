"""How results are printed."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnomon.launch import Result
    from gnomon.loop.evaluate import Evaluation


def show(result: "Result", as_json: bool) -> int:
    """Print a finished run: before and after with intervals, where it is, what to type next; returns exit code 0."""
    if as_json:
        print(json.dumps(result.as_row()))
        return 0
    evaluations = [e for e in result.evaluations if e.step in (0, result.steps)]
    lines = ["", *table(evaluations)]
    if len(evaluations) == 2:
        lines += ["", _verdict(*evaluations)]
    called = sys.argv[0] if Path(sys.argv[0]).name == "gnomon" else "gnomon"
    lines += [
        "",
        f"run     {result.directory}",
        f"model   {result.model}",
        *_critic(result.model),
        f"next    {called} evaluate {result.directory} --samples 4",
        f"        {called} export {result.directory} my-model",
    ]
    if "quickstart" in result.directory.name:
        lines.append(f"        {called} train quickstart algorithm=spo algorithm.tracker.initial=prior")
    print("\n".join(lines))
    return 0


def _critic(model: Path) -> list[str]:
    """Return where the critic lies that another run can begin with; nothing without one."""
    return [f"critic  {model / 'critic'}"] if (model / "critic").is_dir() else []


def table(evaluations: Sequence["Evaluation"]) -> list[str]:
    """Return the evaluations as lines, one score a line, one evaluation a column."""
    if not evaluations:
        return ["no evaluation was made"]
    first = evaluations[0]
    names = list(dict.fromkeys(name for e in evaluations for name in e.scores))
    wide = max(len(name) for name in [*names, "truncated"])
    head = f"{first.prompts} held-out prompts of '{first.task}', {first.samples} answer(s) each, 95% intervals"
    columns = [f"{'after step ' + str(e.step):<24}" for e in evaluations]
    lines = [head, "  ".join([" " * wide, *columns]).rstrip()]
    for name in names:
        cells = [str(e.scores[name]) if name in e.scores else "-" for e in evaluations]
        lines.append("  ".join([f"{name:<{wide}}", *(f"{cell:<24}" for cell in cells)]).rstrip())
    for label, values in _extras(evaluations):
        lines.append("  ".join([f"{label:<{wide}}", *(f"{value:<24}" for value in values)]).rstrip())
    return lines


def _extras(evaluations: Sequence["Evaluation"]) -> list[tuple[str, list[str]]]:
    rows = [("tokens", [f"{e.length_tokens_mean:.1f}" for e in evaluations])]
    rows.append(("truncated", [f"{e.truncated_fraction:.3f}" for e in evaluations]))
    for k in evaluations[0].pass_at if evaluations[0].samples > 1 else ():
        rows.append((f"pass@{k}", [f"{e.pass_at.get(k, float('nan')):.3f}" for e in evaluations]))
    for k in evaluations[0].maj_at:
        rows.append((f"maj@{k}", [f"{e.maj_at.get(k, float('nan')):.3f}" for e in evaluations]))
    if any(e.errors for e in evaluations):
        rows.append(("errors", [str(e.errors) for e in evaluations]))
    return rows


def _verdict(before: "Evaluation", after: "Evaluation") -> str:
    name = next(iter(before.scores))
    low, high = before.headline, after.headline
    change = f"{name} went from {low.mean:.3f} to {high.mean:.3f}"
    if high.low > low.high:
        return f"{change}; the intervals do not overlap, so it rose beyond noise."
    if high.high < low.low:
        return f"{change}; the intervals do not overlap, so it fell beyond noise."
    return f"{change}; the intervals overlap, so this could be noise: train longer, or hold out more prompts."
