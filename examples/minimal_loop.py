"""Reinforcement learning of a language model in one loop: from a task to a trained model, without the launcher.

Every object here is the one that `gnomon train` builds, so each line can be looked up under its name. What a real run
adds around this loop is in `src/gnomon/training/train_loop.py`: rollouts of later steps while this one trains, the
staleness filter, a critic, the non-finite guard, checkpoints and records.

Try it (about a minute on two CPU cores):

    python examples/minimal_loop.py
"""

import asyncio
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from gnomon.algorithms import GRPO, Algorithm
from gnomon.core.types import Grade, Group, Task
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.load import load_model, load_tokenizer
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Numeric
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.question import ListDataset, Question, TokenizedDataset

STEPS = 100
PROMPTS_PER_STEP = 16
HELD_OUT_ROUND = -1


@dataclass(frozen=True)
class RightAnswer:
    """The reward: 1 for an answer whose last number is the expected one, else 0.

    This grader runs in this process, which suits a comparison of two numbers. `gnomon.rewards.grader_pool.GradingPool`
    has the same method and runs rewards in processes with a deadline, which suits everything else.
    """

    verifier: Numeric = Numeric()

    async def grade(self, sample: Sample) -> Grade:
        """Return the grade of one completion. A reward that cannot judge would return ``Grade(None, error=...)``."""
        return Grade(reward=self.verifier(sample))


def copy_task(letters: str, renderer: ChatRenderer) -> TokenizedDataset:
    """Return questions such as ``k7``, whose answer is the digit; the model must learn to read its prompt."""
    texts = [f"{letter}{digit}" for letter in letters for digit in string.digits]
    questions = tuple(Question(id=text, content=text, text=text, columns={"answer": text[1]}) for text in texts)
    return TokenizedDataset(ListDataset("copy", questions), renderer)


async def run_groups(rollouter: Rollouter, tasks: Sequence[Task], step: int) -> list[Group]:
    """Return one graded group of rollouts per task.

    All tasks are asked at once; the engine batches them. The sampled tokens depend on the seed, the step, the task and
    the place in the group, and on no random state, so a step can be repeated.
    """
    return await asyncio.gather(*(rollouter.run_group(task, step, RolloutTimer()) for task in tasks))


def mean_reward(groups: Sequence[Group]) -> float:
    """Return the mean reward of all rollouts."""
    return fmean(reward for group in groups for reward in group.rewards)


async def train(algorithm: Algorithm = GRPO, steps: int = STEPS, seed: int = 0) -> tuple[list[float], float, float]:
    """Train the tiny model to copy the digit of its prompt.

    Returns: the mean reward of each step, and the held-out reward before and after training.
    """
    # 1. The model. "tiny" has 91,000 random weights; a folder or a hub name works as well.
    model, tokenizer = load_model("tiny", torch.float32), load_tokenizer("tiny")

    # 2. The task: questions as prompt tokens. The held-out questions have letters that no training question has.
    renderer = ChatRenderer(tokenizer)
    questions, held_out = copy_task(string.ascii_lowercase[:22], renderer), copy_task("wxyz", renderer)
    curriculum = UniformCurriculum(len(questions), seed)

    # 3. The learner owns the weights and the optimizer. The engine samples; here it shares the learner's module.
    learner = TorchLearner(model, LearnerConfig(OptimizerConfig(learning_rate=3e-3), precision="fp32"), steps)
    engine = LocalEngine(model)

    # 4. Rollouts: the engine answers, the grader judges, and a group holds the rollouts of one prompt.
    sampling = Sampling(temperature=1.0, max_completion_length=2, stop_ids=tokenizer.stop_ids)
    rollouter = Rollouter(engine, RightAnswer(), tokenizer.decode, sampling, algorithm.num_generations, seed)
    evaluator = replace(rollouter, generations=8)

    async def evaluate() -> float:
        return mean_reward(await run_groups(evaluator, [held_out[i] for i in range(len(held_out))], HELD_OUT_ROUND))

    await engine.load(learner.snapshot())
    before, rewards = await evaluate(), list[float]()
    for step in range(steps):
        # Rollouts of the current policy, as one batch: tokens, rewards and log-probabilities, a row per rollout.
        tasks = [questions[index] for index in curriculum.take(PROMPTS_PER_STEP)]
        groups = await run_groups(rollouter, tasks, step)
        batch = collate(groups, sampling.temperature)

        # The learner scores the sampled tokens, as far as the algorithm reads such scores (`proximal`, `reference`).
        batch = (await learner.score(batch, algorithm.needs)).into(batch)

        # Advantages come from the whole batch. Only then is the batch cut, one minibatch per optimizer step.
        batch = algorithm.prepare(batch)
        for minibatch in algorithm.minibatches(batch, seed + step):
            await learner.update(minibatch, algorithm, step)

        # Weight sync: the engine answers with the new weights from here on, under the next version number.
        learner.advance()
        await engine.load(learner.snapshot())

        rewards.append(mean_reward(groups))
        if (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}  mean reward of the last 10 steps {fmean(rewards[-10:]):.3f}", flush=True)
    after = await evaluate()
    await engine.close()
    learner.close()
    return rewards, before, after


def main() -> None:
    """Train, and print what training changed on questions that it never saw."""
    _, before, after = asyncio.run(train())
    print(f"held-out reward: {before:.3f} before training, {after:.3f} after")


if __name__ == "__main__":
    main()
