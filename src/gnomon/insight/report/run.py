"""All that a page says of one run, but for its rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import real_path
from gnomon.core.tables import reach_table
from gnomon.diagnosis.finding import SEVERITIES, Finding
from gnomon.insight.report import curves, facts
from gnomon.insight.report.plots import PLOTS
from gnomon.insight.report.rollouts import prompts_of, reward_intervals, scan
from gnomon.records.console import duration
from gnomon.records.corruption import damaged, in_words
from gnomon.records.jsonl import task_name
from gnomon.records.reading import RunRecord, column
from gnomon.records.run_card import end_of, rejudged
from gnomon.training.evaluate import EvalScore, Evaluation, read_evaluations

_MOST_FINDINGS = 40
_MOST_EVENTS = 60


@dataclass(frozen=True)
class Figure:
    """One number that matters, what it is, and what to know about it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Part:
    """Panels under one heading."""

    key: str
    title: str
    panels: Sequence[curves.Panel]


def build_report(record: RunRecord, findings: Sequence[Finding], is_over: bool = False) -> dict[str, Any]:
    """Return what the page says of a run, by name; all of its files are read, and none has to be there.

    Sentences and numbers are ready to be read; text is not escaped.

    Args:
        is_over: It has just ended, though its process still holds it.
    """
    rows, experiment = record.metrics(), record.experiment()
    done = rows[-1]["step"] if rows else 0
    evaluations = read_evaluations(record.files.evaluations)
    checkpoints = record.checkpoint_steps()
    marks = curves.marks_of(evaluations, checkpoints, findings)
    plain = [curves.unlabeled(mark) for mark in marks]
    # One pass over the rollouts, on which intervals, prompts and lists of rollouts draw.
    seen = scan(record, rows)
    asked = curves.CurveSettings(*facts.asked_of(experiment), reward_intervals(seen))
    named = reach_table(experiment, "algorithm")
    preset, changed = facts.preset_differences(experiment)
    parts = [
        Part("learning", "Learning", curves.learning_panels(rows, asked, evaluations, marks)),
        Part("policy", "Policy and optimizer", curves.panels_of(rows, PLOTS["policy"], plain)),
        Part("staleness", "Staleness and mismatch", curves.panels_of(rows, PLOTS["staleness"], plain)),
    ]  # fmt: skip
    return {
        "name": real_path(record.path).name,
        "state": record.ended() if is_over else record.state(),
        "done": done,
        "steps": record.steps(),
        "model": Path(str(experiment.get("model", "a model"))).name,
        "task": task_name(experiment) or "its task",
        "algorithm": str(named.get("name", "an algorithm")),
        "paper": str(named.get("paper", "")),
        "verdict": verdict(evaluations, rejudged(record.card())),
        "figures": figures(rows, evaluations),
        "damaged": in_words(damaged(record.files, seen.damaged)),
        "ended": end_of(record.card()),
        "findings": sorted(findings, key=lambda f: (-SEVERITIES.index(f.severity), f.first_step))[:_MOST_FINDINGS],
        "parts": [part for part in parts if part.panels],
        "events": _events(evaluations, checkpoints, findings),
        "prompts": prompts_of(seen),
        "time": facts.time_shares(rows),
        "time_panels": curves.time_panels(rows, plain),
        "waste": facts.waste_shares(rows),
        "waste_panels": curves.waste_panels(rows, plain),
        "preset": preset,
        "changed": changed,
        "set_here": facts.default_differences(experiment),
        "experiment": facts.experiment_text(record),
        "card": facts.card_rows(record.card()),
        "metrics": curves.everything(rows),
        "scan": seen,
    }


def verdict(evaluations: Sequence[Evaluation], changed: Sequence[str] = ()) -> str:
    """Return what held-out prompts say of the whole run, in one sentence; empty with fewer than two evaluations.

    >>> verdict([])
    ''
    """
    if len(evaluations) < 2:
        return ""
    before, after = evaluations[0].headline, evaluations[-1].headline
    name = next(iter(evaluations[-1].scores))
    if changed:
        return f"{name} is not compared: {', '.join(changed)} changed while the run went on, so two codes judged it."
    # Intervals that do not overlap are a stricter test than one of the difference.
    if after.low > before.high:
        said = "rose beyond noise"
    elif after.high < before.low:
        said = "fell beyond noise"
    else:
        said = "changed by less than can be told from noise"
    prompts = evaluations[-1].prompts
    return f"On {prompts} held-out prompts, {name} went from {before.mean:.3f} to {after.mean:.3f}: it {said}."


def interval(score: EvalScore) -> str:
    """Return a score's interval.

    >>> interval(EvalScore(0.5, 0.4, 0.6))
    '95%: 0.400 to 0.600'
    """
    return f"95%: {score.low:.3f} to {score.high:.3f}"


def figures(rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return the few numbers that a person asks for first."""
    found: list[Figure] = []
    # The first and the last: what was before, and what came of it.
    ends = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else list(evaluations)
    for one in ends:
        label = f"held out after step {one.step}" if one.step else "held out before"
        found.append(Figure(label, one.headline.shown, interval(one.headline)))
    losses = [(e.step, e.loss_nats, e.perplexity) for e in ends if e.loss_nats is not None and e.perplexity is not None]
    if losses:
        step, loss, perplexity = losses[-1]
        was = f"{losses[0][1]:.4f} at the beginning, " if len(losses) > 1 else ""
        found.append(Figure(f"held-out loss after step {step}", f"{loss:.4f}", f"{was}perplexity {perplexity:.4g}"))
    for part in ends[-1].parts if ends else ():
        found.append(Figure(f"{part.task} after step {part.step}", part.headline.shown, interval(part.headline)))
    rewards = [value for _, value in column(rows, "rollout/reward_mean")]
    if rewards:
        first, last = facts.ends(rewards)
        found.append(Figure("training reward", f"{last:.3f}", f"{first:.3f} at the beginning"))
    thoughts, endless = (
        [value for _, value in column(rows, f"rollout/{name}_fraction")] for name in ("thought", "unfinished_thought")
    )
    if thoughts and endless:
        found.append(Figure("in thoughts", f"{thoughts[-1]:.0%} of the text", f"{endless[-1]:.0%} of thoughts cut off"))
    tokens, seconds = facts.total(rows, "tokens/generated"), facts.worked_seconds(rows)
    # Recorded where the dataset's own answers are trained on, which nobody generated.
    epochs = [value for _, value in column(rows, "tokens/epochs")]
    if epochs:
        found.append(Figure("tokens trained on", _short(tokens), f"{epochs[-1]:.3g} passes over the rows"))
    elif tokens > 0:
        wasted = sum(share.fraction for share in facts.waste_shares(rows)[1:])
        found.append(Figure("tokens generated", _short(tokens), f"{wasted:.0%} without a gradient"))
    if seconds > 0:
        found.append(Figure("time", duration(seconds), f"{tokens / seconds:,.0f} tokens a second in all"))
    return found


def _events(
    evaluations: Sequence[Evaluation], checkpoints: Sequence[int], findings: Sequence[Finding]
) -> list[tuple[int, str, str]]:
    """Return step, kind and words of what happened, in order; the last ones where there are very many."""
    found = [(e.step, "evaluation", f"{next(iter(e.scores))} {e.headline}") for e in evaluations]
    found += [(step, "checkpoint", f"checkpoints/step-{step}") for step in checkpoints]
    found += [(f.first_step, f.severity, f"{f.rule}: {f.summary}") for f in findings]
    return sorted(found)[-_MOST_EVENTS:]


def _short(count: float) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:.0f}"
