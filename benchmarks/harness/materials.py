"""Batches and questions for the cases: real objects of gnomon, with made-up answers where only the cost counts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.sizes import Size
from gnomon.algorithms import Algorithm, MarginalBest
from gnomon.config.experiment import Experiment, load
from gnomon.core.types import GIVEN, Batch, Grade, Group, Rollout, Task
from gnomon.learner.learner import TorchLearner
from gnomon.rollouts.collate import collate
from gnomon.tasks.reasoning import ReasoningGymTask
from gnomon.training.build_data import TrainingData, questions
from gnomon.training.resolve import resolve


def experiment_of(size: Size, *overrides: str) -> Experiment:
    """Return the fixed work's experiment, its precision decided."""
    return resolve(load(size.experiment, [*size.overrides, *overrides]).experiment).experiment


@dataclass(frozen=True)
class BenchShape:
    """prompts: tokens of each prompt. generations: answers to each. answer: tokens of an answer on average.

    longest: tokens of an answer at most. degenerate: of the groups, how many have equal rewards, so that nothing of
    them is trained. is_shared: whether the answers of a group have one prompt; otherwise each has its own, of the same
    length, which costs what a group costs when prompts are computed once an answer. beginning: tokens that all prompts
    begin with, as a chat template and a system message make them.
    """

    prompts: tuple[int, ...]
    generations: int
    answer: int
    longest: int
    degenerate: int = 0
    is_shared: bool = True
    beginning: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each answer, drawn between 1 and ``longest`` around ``answer``, always the same ones."""
        count = len(self.prompts) * self.generations
        if self.answer == self.longest:
            return (self.longest,) * count
        draws = torch.rand(count, generator=torch.Generator().manual_seed(0))
        # Uniform below and above the mean, so that it is the mean whatever the longest is.
        low = [1 + float(u) * 2 * (self.answer - 1) for u in draws]
        return tuple(min(self.longest, round(x)) for x in low)

    def work(self, part: str) -> dict[str, Any]:
        """Return one part of work as `limits.with_limits` reads it; degenerate groups have none."""
        live = len(self.prompts) - self.degenerate
        lengths = list(self.lengths[self.degenerate * self.generations :])
        prompts = list(self.prompts[-live:]) if self.is_shared else [p for p in self.prompts[-live:]
                                                                     for _ in range(self.generations)]  # fmt: skip
        return {"prompts": prompts, "lengths": lengths, "part": part}


def make_groups(shape: BenchShape, vocabulary: int) -> tuple[Group, ...]:
    """Return groups of random tokens; rewards alternate between 1 and 0, but in the first, degenerate groups.

    Groups of one alternate too: a batch of equal rewards has no advantage, and nothing would be learned from it.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())

    lengths = iter(shape.lengths)
    beginning = draw(shape.beginning)
    groups = []
    for number, tokens in enumerate(shape.prompts):
        task = Task(id=f"made-{number}", prompt=beginning + draw(tokens - len(beginning)), text="")
        is_degenerate = number < shape.degenerate
        prompts = [task.prompt if shape.is_shared else draw(tokens) for _ in range(shape.generations)]
        answers = [draw(next(lengths)) for _ in prompts]
        graded = [Grade(0.0 if is_degenerate else float((number + place) % 2)) for place in range(shape.generations)]
        pairs = zip(prompts, answers, graded, strict=True)
        groups.append(Group(task, tuple(_rollout(task.id, *parts) for parts in pairs)))
    return tuple(groups)


def make_batch(shape: BenchShape, vocabulary: int) -> Batch:
    """Return `make_groups` as a batch, with a tracked baseline of one half for algorithms that read one."""
    batch = collate(make_groups(shape, vocabulary), 1.0)
    tracked = torch.full((len(batch),), 0.5, dtype=torch.float64)
    one = {"component_rewards": batch.rewards[:, None], "components": ("answer",), "component_weights": (1.0,)}
    return batch.with_fields(baseline=tracked, **one)


def rows_for(algorithm: Algorithm, batch: Batch) -> Batch:
    """Return the same answers as the algorithm would have got them: pairs, labels, one of a group given, hints.

    All answers of a dataset have reward 1; of a group that is judged by its best answer one has.
    """
    rows = torch.arange(len(batch))
    if algorithm.samples == "data":
        return batch.with_fields(rewards=torch.ones_like(batch.rewards))
    if isinstance(algorithm.advantage, MarginalBest):
        return batch.with_fields(rewards=(batch.group != batch.group.roll(1)).double())
    is_first = rows % 2 == 0
    if algorithm.samples == "pairs":
        return batch.with_fields(group=rows // 2, rewards=is_first.double())
    if algorithm.samples == "labels":
        return batch.with_fields(group=rows // 2, rewards=is_first * (1.0 - rows // 2 % 2 * 2), is_graded=is_first)
    if algorithm.demonstrated:
        given = torch.where(batch.group != batch.group.roll(1), GIVEN, batch.version)
        return batch.with_fields(version=given)
    if algorithm.reference.prompt:  # another answer's question and text, as long as a demonstration behind a question
        return batch.with_fields(hints=batch.tokens.roll(1, 0), hint_lengths=batch.lengths.roll(1))
    return batch


def _rollout(task_id: str, prompt: Sequence[int], response: Sequence[int], grade: Grade) -> Rollout:
    return Rollout(
        task_id=task_id,
        prompt=tuple(prompt),
        response=tuple(response),
        mask=(True,) * len(response),
        logprobs=(-1.0,) * len(response),
        full_logprobs=(-1.0,) * len(response),
        text="",
        grade=grade,
        oldest_version=0,
        newest_version=0,
        stop="stop",
    )


@dataclass
class Trainer:
    """A learner with an algorithm: what a step does after its rollouts arrived, outside of any event loop."""

    learner: TorchLearner
    algorithm: Algorithm
    precision: str = "fp32"

    def on_policy(self, batch: Batch) -> Batch:
        """Return the batch as if the learner's present weights had answered."""
        scored = asyncio.run(self.learner.score(batch, frozenset({"proximal"}))).proximal
        return batch.with_fields(behavior=scored, full_behavior=scored)

    def step(self, batch: Batch) -> None:
        """Score what the algorithm needs, prepare, and make its updates."""
        self.learn(self.scored(batch))

    def scored(self, batch: Batch) -> Batch:
        """Return the batch with what the algorithm needs of other policies, prepared."""
        first = self.algorithm.first_rows(batch, 0, 0)
        return self.algorithm.prepare(asyncio.run(self.learner.score(batch, self.algorithm.needs, first)).into(batch))

    def learn(self, batch: Batch) -> None:
        """Make the algorithm's updates, and the critic's, with a batch that is `scored`."""

        async def update() -> None:
            for minibatch in self.algorithm.minibatches(batch, 0):
                await self.learner.update(minibatch, self.algorithm, 0)
            for minibatch in self.algorithm.value_minibatches(batch, 0):
                await self.learner.fit(minibatch, self.algorithm, 0)

        asyncio.run(update())


def written_work(size: Size, folder: str) -> dict[str, Any]:
    """Return the fixed work for a peer: its prompts as text and as ids, answers, and a model folder.

    folder: where a model that is built in code is written to.
    """
    experiment = experiment_of(size)
    asked = questions(experiment)
    count = min(len(asked.split.train), 8 * size.prompts)
    tasks = [asked.split.train[index] for index in range(count)]
    return {
        "model": _folder(experiment, folder),
        "prompts": [_text(experiment, asked, task) for task in tasks],
        "prompt_ids": [list(task.prompt) for task in tasks[: size.prompts]],
        "answers": [str(task.columns.get("answer", "")) for task in tasks],
        "prompts_per_step": size.prompts,
        "generations": size.generations,
        "max_new_tokens": size.budget,
        "learning_rate": experiment.learner.optimizer.learning_rate,
        "precision": experiment.learner.precision,
    }


def _text(experiment: Experiment, asked: TrainingData, task: Task) -> str:
    """Return the prompt as one text that a tokenizer turns into the same ids; a model without template gets less."""
    suffix = experiment.task.suffix if isinstance(experiment.task, ReasoningGymTask) else ""
    rendered = asked.tokenizer.template([{"role": "user", "content": f"{task.text}{suffix}"}])
    if rendered is None:
        return task.text
    assert tuple(asked.tokenizer.encode(rendered)) == task.prompt, "a peer must be asked what we are asked"
    return rendered


def _folder(experiment: Experiment, folder: str) -> str:
    from pathlib import Path

    from gnomon.models.default import NAME, prepare_default
    from gnomon.models.tiny import TINY_MODELS, save_tiny

    if experiment.model in TINY_MODELS:
        return str(save_tiny(Path(folder) / "model", 0, TINY_MODELS[experiment.model]))
    return str(prepare_default()) if experiment.model == NAME else experiment.model
