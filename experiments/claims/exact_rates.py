"""The exact chance that a model answers a question rightly: a success rate without sampling noise."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from experiments.claims.estimates import NotMeasured
from torch import Tensor, nn

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.types import Task
from gnomon.models.load import load_model, load_tokenizer
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tokenizer import Tokenizer
from gnomon.records.reading import RunRecord
from gnomon.tasks.base import TaskSet
from gnomon.training.build_data import questions

_AT_ONCE = 256


def success_rates(
    model: nn.Module, tokenizer: Tokenizer, tasks: Sequence[Task], temperature: float = 1.0
) -> list[float]:
    """Return of each task the exact chance that the model answers with its ``answer`` and then ends.

    exp of the sum of log-probabilities of the answer's tokens and the end token. It is the value function of a reward
    that one text alone earns: what trackers and group means only estimate. Where the tokenizer can spell the answer in
    several ways, one of them is counted. A column ``prefix`` says instead how a right answer must begin, whatever
    follows.
    Raises: ConfigError for a task without such a column.
    """
    scorer, rates = TokenScorer(model), list[float]()
    for start in range(0, len(tasks), _AT_ONCE):
        part = tasks[start : start + _AT_ONCE]
        with torch.no_grad():
            found = answer_logprobs(scorer, part, [counted(task, tokenizer) for task in part], temperature)
        rates += found.sum(1).exp().tolist()
    return rates


def checkpoint_rates(record: RunRecord, step: int | None = None, is_held_out: bool = True) -> list[float]:
    """Return the `success_rates` of a run's checkpoint on its held-out questions, or on those that it is trained on.

    step: of the checkpoint; None is the last one; 0 the model that the run began with. At the run's temperature.
    Scored once a process: a checkpoint does not change. Raises: NotMeasured where there is no such checkpoint.
    """
    return list(_rates(record.path, step, is_held_out))


@cache
def _rates(path: Path, step: int | None, is_held_out: bool) -> tuple[float, ...]:
    record = RunRecord(path)
    experiment = load(record.files.experiment).experiment
    steps = record.checkpoint_steps()
    wanted = steps[-1] if step is None and steps else step
    if wanted is None or (wanted and wanted not in steps):
        raise NotMeasured(f"{path.name} has no checkpoint of step {wanted}")
    name = str(record.files.checkpoints / f"step-{wanted}") if wanted else experiment.model
    split = questions(experiment).split
    tasks: TaskSet = split.held_out if is_held_out else split.train
    chosen = [tasks[index] for index in range(len(tasks))]
    model = load_model(name, torch.float32)
    return tuple(success_rates(model, load_tokenizer(name), chosen, experiment.sampling.temperature))


def pass_at(k: int) -> Callable[[RunRecord], float]:
    """Return what reads the mean of 1 - (1 - p)^k with the exact rates p of held-out questions, in the end."""
    return lambda record: fmean(1 - (1 - rate) ** k for rate in checkpoint_rates(record))


def counted(task: Task, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens by which an answer is right: those of ``prefix``, or of ``answer`` and its end."""
    prefix = task.columns.get("prefix")
    if isinstance(prefix, str) and prefix:
        return tokenizer.encode_plain(prefix)
    return [*tokenizer.encode_plain(answer_of(task)), tokenizer.stop_ids[0]]


def answer_of(task: Task) -> str:
    """Return the right answer. Raises: ConfigError where the column ``answer`` holds no text."""
    answer = task.columns.get("answer")
    if not isinstance(answer, str) or not answer:
        raise ConfigError(f"the question {task.id} has no text in its column 'answer'")
    return answer


def answer_logprobs(
    scorer: TokenScorer, tasks: Sequence[Task], answers: Sequence[Sequence[int]], temperature: float = 1.0
) -> Tensor:
    """Return Float[B T], the log-probability of each token of the answers, 0 beyond their ends."""
    return scorer(*spelled(tasks, answers), temperature, with_entropy=False).logprobs


def spelled(tasks: Sequence[Task], answers: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tasks and answers as a scorer takes them: tokens Int[B S], prompt lengths Int[B], mask Bool[B T]."""
    rows = [[*task.prompt, *answer] for task, answer in zip(tasks, answers, strict=True)]
    longest, width = max(map(len, rows)), max(map(len, answers))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    prompts = torch.tensor([len(task.prompt) for task in tasks])
    mask = torch.arange(width) < torch.tensor([len(answer) for answer in answers])[:, None]
    return tokens, prompts, mask
