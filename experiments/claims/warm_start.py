"""Tiny models that already half know a task, so that a claim about training can be tested in minutes.

A model made from scratch never answers rightly, and what never succeeds teaches nothing. `warm_model` gives it what a
language model brings along: it is taught by supervised steps on generated questions, answered rightly with a chance
that falls with the difficulty and wrongly otherwise. It then answers like its teacher: right at about the rate that is
asked for, surely where questions are easy and seldom where they are hard, in the right form but for a few.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from experiments.claims.exact_rates import answer_logprobs, success_rates
from experiments.claims.pretrain import PretrainingTask
from torch import nn

from gnomon.core.errors import ConfigError
from gnomon.models.load import write_model
from gnomon.models.logprobs import TokenScorer
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, tiny_model, tiny_tokenizer
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.build import MixtureTask, TaskConfig, build_split, check_context
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.question import dataset_fingerprint, digest
from gnomon.tasks.reasoning import ReasoningGymTask
from gnomon.tasks.split import HeldOut

RECORD = "warm.json"
_FORM = 2  # of what is written; another one makes every cached model anew
_CHECK_EVERY = 50
_LOOKED_AT = 256


@dataclass(frozen=True)
class Warming:
    """How a tiny model is taught.

    spread: the easiest question is taught with ``rate + spread``, the hardest with ``rate - spread`` (kept within 0.02
        and 0.98, and lowered on both sides alike so that the mean stays ``rate``), those between in proportion to
        their rank.
    malformed: of the wrong answers, the share that is wrong in form too: a character doubled or left out.
    tolerance: it is enough when the measured rate is no further below ``rate``.
    steps: at most so many, each on ``rows`` questions; the rate is measured every 50.
    questions: that a generator makes to be taught from; a table has its own.
    learning_rate: of AdamW, after a rise over 20 steps. seed: of the initial weights and of every draw.
    """

    spread: float = 0.35
    malformed: float = 0.25
    tolerance: float = 0.03
    steps: int = 1500
    rows: int = 64
    questions: int = 4000
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        shares = {"spread": self.spread, "malformed": self.malformed, "tolerance": self.tolerance}
        wrong = [f"{name} must be in [0, 1), got {share}" for name, share in shares.items() if not 0 <= share < 1]
        counts = {"steps": self.steps, "rows": self.rows, "questions": self.questions}
        wrong += [f"{name} must be >= 1, got {count}" for name, count in counts.items() if count < 1]
        wrong += [] if self.learning_rate > 0 else [f"learning_rate must be > 0, got {self.learning_rate}"]
        if wrong:
            raise ConfigError(f"Warming: {'; '.join(wrong)}")


def warm_model(
    task: TaskConfig,
    folder: Path,
    rate: float,
    shape: TinyConfig | None = None,
    plan: Warming | None = None,
    held_out: HeldOut | None = None,
) -> Path:
    """Return a Hugging Face folder with a tiny model that answers ``task`` rightly at about ``rate``.

    It is taught on training questions only: those that ``held_out`` keeps back for evaluation are never shown, and a
    generator makes ``plan.questions`` of them. The rate is the mean over training questions of the exact chance of the
    answer with its end, at temperature 1 (`success_rates`). A model too small for the task, or ``plan.steps`` that are
    too few, end below ``rate``; `warmth` says what was reached.

    The model lies in a folder below ``folder`` that is named by a digest of the questions, the rate, the shape and the
    plan, and is made only once.

    task: whose questions have a column ``answer``. What else they may have: ``difficulty``, a number that orders them
        (else the length of question and answer does); ``wrong``, a list of answers to be wrong with; ``prefix``, how an
        answer begins that counts as right, where ``answer`` is only one of many.
    Raises: ConfigError for a rate outside (0, 1), or questions without answers.

    >>> warm_model(ArithmeticTask(highest=9), Path("runs/warm"), rate=0.4)  # doctest: +SKIP
    """
    shape, plan, held_out = shape or TinyConfig(), plan or Warming(), held_out or HeldOut()
    if not 0 < rate < 1:
        raise ConfigError(f"warm_model: rate must be between 0 and 1, got {rate}")
    tokenizer = tiny_tokenizer(shape)
    asked = task
    if isinstance(task, ArithmeticTask | ReasoningGymTask | MixtureTask):
        asked = replace(task, size=max(task.size, plan.questions))
    questions = build_split(asked, held_out, ChatRenderer(tokenizer)).train
    settings = {"rate": rate, "shape": asdict(shape), "plan": asdict(plan), "torch": torch.__version__, "form": _FORM}
    found = folder / f"{task.name.replace('/', '-')}-{digest(dataset_fingerprint(questions), settings)}"
    if (found / RECORD).is_file():
        return found
    guarded = PretrainingTask.on(questions, tokenizer, rate, plan.spread, plan.malformed)
    check_context(questions, shape.context_length, guarded.longest)
    model, began = tiny_model(plan.seed, shape), time.perf_counter()
    steps, rates = _teach(model, guarded, rate, plan)
    reached = sorted(rates)
    record = {
        **settings,
        "reached": sum(rates) / len(rates),
        "deciles": [reached[min(len(reached) - 1, len(reached) * tenth // 10)] for tenth in range(11)],
        "steps": steps,
        "seconds": time.perf_counter() - began,
    }
    return _publish(model, guarded, found, record)


def warmth(folder: Path) -> dict[str, Any]:
    """Return what is recorded of a warm model: the rate asked for and reached, its deciles, the steps it took."""
    read: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return read


def _teach(model: nn.Module, guarded: PretrainingTask, rate: float, plan: Warming) -> tuple[int, list[float]]:
    """Take supervised steps until the rate is reached; return how many they were, and the rates of some questions."""
    random, scorer = Random(plan.seed), TokenScorer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.0)
    looked_at = Random(0).sample(list(guarded.tasks), min(_LOOKED_AT, len(guarded.tasks)))
    rates: list[float] = []
    for step in range(1, plan.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, step / 20)
        tasks, answers = guarded.draw(plan.rows, random)
        loss = -answer_logprobs(scorer, tasks, answers).sum() / sum(map(len, answers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _CHECK_EVERY == 0 or step == plan.steps:
            rates = success_rates(model, guarded.tokenizer, looked_at)
            if sum(rates) / len(rates) >= rate - plan.tolerance:
                return step, rates
    return plan.steps, rates


def _publish(model: nn.Module, guarded: PretrainingTask, found: Path, record: Mapping[str, Any]) -> Path:
    """Write the model beside ``found``, then rename it: no reader sees half of one."""
    found.parent.mkdir(parents=True, exist_ok=True)
    whole = Path(tempfile.mkdtemp(dir=found.parent, prefix=".warm-"))
    config: Any = model.config
    write_model(merged_tensors(model), config, whole)
    guarded.tokenizer.save(whole)
    (whole / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    try:
        os.rename(whole, found)
    except OSError:
        # Another process made the same model meanwhile.
        shutil.rmtree(whole)
    return found
