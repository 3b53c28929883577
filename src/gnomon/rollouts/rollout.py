"""One task, one engine, one grader: a graded group."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gnomon.core.failpoints import failpoint
from gnomon.core.types import Completion, Grade, Group, Rollout, Task
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.rng import sample_key
from gnomon.engines.stop_strings import cut_at_stop
from gnomon.rewards.base import Sample
from gnomon.rollouts.multi_turn import Trajectory, unopened


class GradesRollouts(Protocol):
    """Who judges: `rewards.grader_pool.GradingPool`, or a function of a user's test."""

    async def grade(self, sample: Sample) -> Grade:
        """Return a reward or an error; never raises for a bad sample, never waits longer than its deadline."""


class PlaysConversations(Protocol):
    """Who plays several turns: a `MultiTurnRollout` with an environment, an `AgentRollout` with an agent."""

    @property
    def refuse(self) -> Callable[[Sample, str], Grade]:
        """The grade of a rollout that cannot be trained on."""

    @property
    def reward_weight(self) -> float:
        """Weight of what it rewards by itself in the grade."""

    async def run(self, task: Task, key: Callable[[int], int], sampling: Sampling) -> Trajectory:
        """Return one conversation; ``key`` gives the key of a turn's draws."""
        ...


@dataclass
class RolloutTimer:
    """Seconds and tokens since the last `read`, summed over the groups of a step.

    Attributes:
        answers: How many answers have arrived.
        step: The timer of the whole step, where this one is of one group.
        told: Called whenever answers have arrived.
    """

    generate_seconds: float = 0.0
    grade_seconds: float = 0.0
    generated_tokens: int = 0
    answers: int = 0
    step: "RolloutTimer | None" = None
    told: Callable[[], None] = lambda: None
    _began: float = field(default_factory=time.perf_counter)

    def generated(self, tokens: int, answers: int = 1) -> None:
        """Note that so many answers to a prompt have just arrived."""
        self.generate_seconds = time.perf_counter() - self._began
        self.generated_tokens += tokens
        self.answers += answers
        self.told()
        if self.step is not None:
            self.step.generated(tokens, answers)

    def graded(self) -> None:
        """Note that a group's grades have just arrived; only the wait after the last completion counts."""
        self.grade_seconds = max(0.0, time.perf_counter() - self._began - self.generate_seconds)
        if self.step is not None:
            self.step.graded()


class RolloutSource(Protocol):
    """Where the groups of a step come from: a policy that answers, or the dataset."""

    @property
    def generations(self) -> int:
        """Rollouts of a task."""
        ...

    async def run_group(self, task: Task, round_number: int, watch: RolloutTimer) -> Group:
        """Return the task's graded group."""
        ...


@dataclass(frozen=True)
class Rollouter:
    """Asks an engine and a grader about tasks.

    Attributes:
        generations: Rollouts a task.
        seed: The run's seed; draws depend on it, the round, the task and the sample alone.
        decode: An answer's token ids to its text.
        conversation: Plays several turns with an environment; None asks for one answer.
        opening: What the prompt opens the answer with, which stands before its text for rewards and records.
    """

    engine: Engine
    grader: GradesRollouts
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling
    generations: int
    seed: int
    conversation: PlaysConversations | None = None
    opening: Callable[[Sequence[int]], str] = unopened
    together: Callable[[Sequence[Sample]], Awaitable[Sequence[Grade]]] | None = None
    """Grades all answers to a question at once, for rewards that compare them; None grades each as it comes."""

    async def run_group(self, task: Task, round_number: int, watch: RolloutTimer) -> Group:
        """Return the task's graded group; a sample that cannot be graded is a rollout with an error."""
        if self.conversation is not None:
            return await self._converse(self.conversation, task, round_number, watch)
        rollouts, _ = await self.judged_with(task, round_number, watch)
        return Group(task, rollouts)

    async def judged_with(
        self, task: Task, round_number: int, watch: RolloutTimer, others: Sequence[Sample] = ()
    ) -> tuple[tuple[Rollout, ...], Sequence[Grade]]:
        """Return the rollouts of single answers, and the grades of ``others``, judged together with them."""
        # Keyed by what is sampled and not by when: the same draws whatever the order or the batching.
        keys = [sample_key(self.seed, round_number, task.id, sample) for sample in range(self.generations)]
        completions = await self.engine.generate(task.prompt, keys, self.sampling)
        watch.generated(sum(len(c.tokens) for c in completions), len(completions))
        samples = [self._sample(task, c, key) for c, key in zip(completions, keys, strict=True)]
        grades = await self.grades([*samples, *others])
        watch.graded()
        rollouts = tuple(_rollout(task, *each) for each in zip(completions, samples, grades, strict=False))
        return rollouts, grades[len(samples) :]

    async def grades(self, samples: Sequence[Sample]) -> Sequence[Grade]:
        """Return the grades of answers to one question."""
        if self.together is not None:
            return await self.together(samples)
        return await asyncio.gather(*(self.grader.grade(sample) for sample in samples))

    async def _converse(
        self, conversation: PlaysConversations, task: Task, round_number: int, watch: RolloutTimer
    ) -> Group:
        # A conversation is graded as soon as it ends, while others still run, unless rewards compare all answers.
        async def one(sample: int) -> list[tuple[Trajectory, Grade | None]]:
            played = await conversation.run(
                task, lambda turn: sample_key(self.seed, round_number, task.id, sample, turn), self.sampling
            )
            watch.generated(played.generated)
            return [(path, await graded(path)) for path in (played, *played.others)]

        async def graded(played: Trajectory) -> Grade | None:
            if played.error is not None:
                return conversation.refuse(played.sample(task, self.sampling), played.error)
            return None if self.together is not None else await self.grader.grade(played.sample(task, self.sampling))

        playing = [asyncio.ensure_future(one(sample)) for sample in range(self.generations)]
        try:
            found = [each for parts in await asyncio.gather(*playing) for each in parts]
        finally:
            # One conversation that raises ends the others of its group too.
            for rollout in playing:
                rollout.cancel()
            await asyncio.gather(*playing, return_exceptions=True)  # their environments are ended then
        waiting = [played.sample(task, self.sampling) for played, grade in found if grade is None]
        # The grades come in the order of the conversations that waited for theirs.
        later = iter(await self.grades(waiting) if waiting else ())
        watch.graded()
        grades = [(played, next(later) if grade is None else grade) for played, grade in found]
        weight = conversation.reward_weight
        rollouts = tuple(played.rollout(task, grade, weight) for played, grade in grades)
        return Group(task, rollouts, any(played.is_of_role for played, _ in found))

    def _sample(self, task: Task, completion: Completion, key: int) -> Sample:
        failpoint("grade")
        return Sample(
            prompt=task.text,
            completion=self.opening(task.prompt)
            + cut_at_stop(self.decode(completion.tokens), completion, self.sampling),
            completion_tokens=len(completion.tokens),
            is_truncated=completion.stop == "length",
            max_completion_length=self.sampling.max_completion_length,
            columns=task.columns,
            seed=key,
            messages=task.messages,
        )


def _rollout(task: Task, completion: Completion, sample: Sample, grade: Grade) -> Rollout:
    return Rollout(
        task_id=task.id,
        prompt=task.prompt,
        response=completion.tokens,
        mask=(True,) * len(completion.tokens),
        logprobs=completion.logprobs,
        full_logprobs=completion.full_logprobs,
        text=sample.completion,
        grade=grade,
        oldest_version=completion.oldest_version,
        newest_version=completion.newest_version,
        stop=completion.stop,
        routing=completion.routing,
        top=completion.top,
    )
