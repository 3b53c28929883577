"""Questions whose answers are short or ten times as long: what claims about long responses are tested on.

``d-h:`` asks for the letters from d to h. One wrong letter anywhere makes the answer wrong, each is as easy as the
next, and nothing but the number of them makes a question hard: so what differs between answers is length alone.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.claims.estimates import NotMeasured
from experiments.claims.exact_rates import checkpoint_rates
from experiments.claims.warm_start import Warming, warm_model

from gnomon.core.atomic_files import write_durably
from gnomon.core.tables import to_table
from gnomon.models.tiny import TinyConfig
from gnomon.records.reading import RunRecord, column
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SHORTEST, LONGEST, EACH = 2, 20, 17
HELD_OUT = HeldOut(size=48, fraction=0.2)
MARKED_HELD_OUT = replace(HELD_OUT, size=40)
RATE, STEPS = 0.4, 30


def write_stretches(folder: Path, is_marked: bool = False) -> TableTask:
    """Write up to ``EACH`` questions of every length from 2 to 20 letters, and return them as a task.

    Columns: question, answer, difficulty (letters). is_marked: only a to z, and a column ``wrong`` of answers that
    models are taught beside the right one, each with a capital in place of one letter: such a mistake shows in the
    token itself.
    The file is always the same; one that is there is left alone.
    """
    path = folder / ("marked.jsonl" if is_marked else "stretches.jsonl")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        letters = LETTERS[:26] if is_marked else LETTERS
        lengths = range(SHORTEST, LONGEST + 1)
        rows = [_row(letters[start : start + n], is_marked) for n in lengths for start in _starts(len(letters) - n)]
        write_durably(path, "".join(json.dumps(row) + "\n" for row in rows).encode(), is_synced=False)
    return TableTask(str(path))


def _starts(last: int) -> list[int]:
    count = min(EACH, last + 1)
    return [round(place * last / (count - 1)) for place in range(count)]


def _row(answer: str, is_marked: bool) -> dict[str, Any]:
    row = {"question": f"{answer[0]}-{answer[-1]}:", "answer": answer, "difficulty": len(answer)}
    marked = [answer[:place] + answer[place].upper() + answer[place + 1 :] for place in range(len(answer))]
    return row | ({"wrong": marked} if is_marked else {})


def stretch_experiment(
    folder: Path, seed: int, shape: TinyConfig | None = None, is_marked: bool = False
) -> dict[str, Any]:
    """Return the experiment that all claims here begin with, as a table: 64 answers a step of a warm tiny model.

    The model is taught to be right at a rate of 0.4 (`warm_model`), more often where answers are short, with weights of
    its own for each ``seed``; a fifth of the questions is held out. shape: of the model. is_marked: see
    `write_stretches`.
    """
    task, held_out = write_stretches(folder, is_marked), MARKED_HELD_OUT if is_marked else HELD_OUT
    model = warm_model(task, folder, RATE, shape, Warming(seed=seed), held_out)
    return {
        "model": str(model),
        "task": to_table(task),
        "rewards": [{"kind": "exact"}],
        "steps": STEPS,
        "rollouts_per_step": 64,
        "held_out": to_table(held_out),
        "sampling": {"max_completion_length": LONGEST + 6},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": 3e-4}},
        "evaluation": {"before": False},
        "checkpoints": {"every": 0},
        "grading": {"workers": 1},
        "device": "cpu",
    }


def held_out_at(step: int | None = None) -> Callable[[RunRecord], float]:
    """Return what reads the exact mean success rate of a run's checkpoint on held-out questions; None is the last."""
    return lambda record: fmean(_held_out_rates(record.path, step))


def held_out_gain(record: RunRecord) -> float:
    """Return how far the exact mean success rate on held-out questions ended above where the run began."""
    return held_out_at()(record) - held_out_at(0)(record)


@cache
def _held_out_rates(run: Path, step: int | None) -> tuple[float, ...]:
    return tuple(checkpoint_rates(RunRecord(run), step))


def lowest_after_best(name: str, window: int) -> Callable[[RunRecord], float]:
    """Return what reads how much of its best a metric keeps: the lowest mean of ``window`` steps after the best mean,
    divided by that. 1 never falls; below one half it has collapsed."""

    def read(record: RunRecord) -> float:
        values = [value for _, value in column(record.metrics(), name)]
        means = [fmean(values[start : start + window]) for start in range(0, len(values) - window + 1)]
        if not means or max(means) <= 0:
            raise NotMeasured(name)
        best = means.index(max(means))
        return min(means[best:]) / means[best]

    return read


def merged(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the table with some of its top-level keys replaced."""
    return {**base, **changes}
