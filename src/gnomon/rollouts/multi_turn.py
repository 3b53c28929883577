"""A conversation as one rollout: the tokens trained on are the tokens sampled.

The prompt of turn n + 1 is everything so far, token by token as it was sampled or sent, then the tokens of the reply
(`tasks/turn_tokens.py`). Nothing is decoded and tokenized again, so what is scored later is what the engine saw; a
policy would otherwise be trained on tokens that it never chose, at ratios that mean nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnomon.core.types import Completion, EndedBy, Ending, Grade, Rollout, Task, TopLogprobs
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.stop_strings import cut_at_stop
from gnomon.rewards.base import Sample
from gnomon.rollouts.env_workers import EnvAnswer, EnvError, EnvWorker, EnvWorkerLost, EnvWorkers
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.turn_tokens import TurnTokenizer


@dataclass
class Trajectory:
    """The tokens of a conversation as it grows, and at its end what it was.

    Attributes:
        prompt: The question, with what the environment showed before the first answer.
        tokens: All that follows, with ``mask`` true where the policy chose, and log-probabilities 0.0 where it did not.
        said: Answers and replies as messages.
        reward: The environment's, added up.
        turn_ends, turn_rewards: Where each answer ends, and the environment's reward for it.
        turn_seconds: Seconds from the question for it to its reply.
        seed: Seed of what environment and rewards draw.
        role: As in `Rollout`.
        answer: What rewards see as the answer; None for the policy's last one.
        further: Further segments of the same rollout.
        is_of_role: Whether it is the part of one role, which is paid and compared by itself.
        others: Those of the other roles.
        error: Why it cannot be trained on; None when it can.
    """

    prompt: tuple[int, ...]
    version: int
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    completions: list[tuple[int, Completion]] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_seconds: list[float] = field(default_factory=list)
    said: list[dict[str, str]] = field(default_factory=list)
    reward: float = 0.0
    text: str = ""
    seed: int = 0
    role: str = ""
    answer: str | None = None
    further: "list[Trajectory]" = field(default_factory=list)
    is_of_role: bool = False
    others: "list[Trajectory]" = field(default_factory=list)
    ending: Ending = Ending(0, "fault")
    error: str | None = None

    @property
    def generated(self) -> int:
        """Tokens that the policy chose, in all segments and roles."""
        own = sum(sum(path.mask) for path in (self, *self.further))
        return own + sum(other.generated for other in self.others)

    def add_answer(self, completion: Completion, text: str) -> None:
        """Append what the policy sampled."""
        # Where the completion starts in prompt and response together.
        self.completions.append((len(self.prompt) + len(self.tokens), completion))
        self.tokens += completion.tokens
        self.mask += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.full_logprobs += completion.full_logprobs
        self.said.append({"role": "assistant", "content": text})
        self.turn_ends.append(len(self.tokens))
        self.turn_rewards.append(0.0)
        self.turn_seconds.append(0.0)

    def earn(self, reward: float) -> None:
        """Add what the environment gave for the answer that was just said."""
        self.reward += reward
        if self.turn_rewards:
            self.turn_rewards[-1] += reward

    def add_reply(self, tokens: Sequence[int], messages: Sequence[tuple[str, str]]) -> None:
        """Append what nobody chose."""
        zeros = [0.0] * len(tokens)
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += zeros
        self.full_logprobs += zeros
        self.said += [{"role": role, "content": text} for role, text in messages]

    def sample(self, task: Task, sampling: Sampling) -> Sample:
        """Return what rewards see: the last answer, and the conversation in further columns.

        ``conversation``, its messages; ``environment_reward``; ``turns``; ``ended_by``.
        """
        # All segments in order: rewards see the whole conversation.
        said = [message for path in (self, *self.further) for message in path.said]
        answers = [message["content"] for message in said if message["role"] == "assistant"]
        answers += [] if self.answer is None else [self.answer]
        further = {
            "conversation": said,
            "environment_reward": self.reward,
            "turns": self.ending.turns,
            "ended_by": self.ending.by,
        }
        return Sample(
            prompt=task.text,
            completion=answers[-1] if answers else "",
            completion_tokens=sum(len(path.tokens) for path in (self, *self.further)),
            is_truncated=self.ending.is_budget,
            max_completion_length=sampling.max_completion_length,
            columns={**task.columns, **further},
            seed=self.seed,
            messages=task.messages,
        )

    def rollout(self, task: Task, grade: Grade, weight: float = 1.0) -> Rollout:
        """Return the graded rollout. One without any token gets a padding one, which is not trained on.

        Args:
            weight: Of the environment's reward in the grade. What else the grade has is earned by the last answer.
        """
        paths = (self, *self.further)
        earned = [[weight * reward for reward in path.turn_rewards] for path in paths]
        if earned[-1] and grade.reward is not None:
            # What the graders gave, beyond the environment's own rewards, is earned by the last answer.
            earned[-1][-1] = grade.reward - sum([reward for each in earned for reward in each][:-1])
        first, *rest = (path._row(task, grade, each) for path, each in zip(paths, earned, strict=True))
        ages = [(row.oldest_version, row.newest_version) for row in (first, *rest)]
        oldest, newest = min(old for old, _ in ages), max(new for _, new in ages)
        # A rollout is as old as its oldest token, wherever that is.
        return replace(first, oldest_version=oldest, newest_version=newest, segments=tuple(rest))

    def _row(self, task: Task, grade: Grade, earned: Sequence[float]) -> Rollout:
        """Return one segment, whose answers earned these rewards."""
        # A row of a batch has at least one token; this one is masked.
        if not self.tokens:
            self.add_reply([0], ())
        # A rollout without an answer has the weights of its time.
        versions = [(c.oldest_version, c.newest_version) for _, c in self.completions] or [(self.version, self.version)]
        return Rollout(
            task_id=task.id,
            prompt=self.prompt,
            response=tuple(self.tokens),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            full_logprobs=tuple(self.full_logprobs),
            text=self.text,
            grade=grade,
            oldest_version=min(oldest for oldest, _ in versions),
            newest_version=max(newest for _, newest in versions),
            stop="length" if self.ending.is_budget else "stop",
            routing=self._routing(),
            ending=self.ending,
            top=self._top(),
            turn_ends=tuple(self.turn_ends),
            turn_rewards=tuple(earned),
            turn_seconds=tuple(self.turn_seconds),
            role=self.role,
        )

    def _top(self) -> TopLogprobs | None:
        """Return the likeliest tokens at each position that the policy chose, zeros elsewhere."""
        known = [(start - len(self.prompt), c.top) for start, c in self.completions if c.top is not None]
        if not known:
            return None
        whole = TopLogprobs(*(part.new_zeros((len(self.tokens), part.shape[1])) for part in known[0][1]))
        for start, top in known:
            for merged, part in zip(whole, top, strict=True):
                merged[start : start + len(part)] = part
        return whole

    def _routing(self) -> Tensor | None:
        """Return the experts at each position, from the turn that first computed it for an answer.

        A turn's rows begin at its prompt's last position, whose experts chose the first token; what lies between two
        answers is known from the later one.
        """
        known = [(start, c) for start, c in self.completions if c.routing is not None]
        if not known:
            return None
        last = known[-1][1].routing
        assert last is not None
        merged = torch.full((len(self.prompt) + len(self.tokens), *last.shape[1:]), -1, dtype=last.dtype)
        filled = 0
        for start, completion in known:
            assert completion.routing is not None
            # The last token of an answer has no routing yet: no later token was computed from it.
            end = start + len(completion.tokens) - 1
            merged[filled:end] = completion.routing[filled:end]
            filled = end
        return merged


TRIES = 3
"""Plays of one conversation whose processes are lost: among the others, then twice apart from them."""


def unopened(prompt: Sequence[int]) -> str:
    """Return that a prompt opens no answer."""
    return ""


@dataclass(frozen=True)
class MultiTurnRollout:
    """Plays the turns of a rollout with an environment.

    Which endings are trained on: all that follow something the policy said. For a policy that makes a tool hang, raise
    or flood that is the end, and it is graded on what it has: were it not trained on, or were the rest left to a
    critic's guess as where a budget ends, breaking a tool would be a way out of a bad grade. A failure before the first
    answer is nobody's doing but the environment's: an error. A process that ends by no doing of the environment in it
    (the kernel's memory killer, or another environment that ends their parent) says nothing about the policy: the
    conversation is played again from its beginning with the same draws, apart from the others, and is an error when
    that process is lost too, twice.

    Attributes:
        decode: An answer's token ids to its text.
        refuse: The grade of a rollout that cannot be trained on, counted against the error budget.
        opening: What the ids before an answer open it with.
        reward_weight: Weight of the environment's reward in a grade.
    """

    engine: Engine
    env_workers: EnvWorkers
    turn_tokenizer: TurnTokenizer
    plan: EnvironmentConfig
    decode: Callable[[Sequence[int]], str]
    refuse: Callable[[Sample, str], Grade]
    opening: Callable[[Sequence[int]], str] = unopened
    count: Callable[[str | None], None] = lambda cause: None
    """Is told of each conversation what fault ended it, None for any other end; raises when a run should end."""
    reward_weight: float = 1.0

    async def run(self, task: Task, key: Callable[[int], int], sampling: Sampling) -> Trajectory:
        """Return the trajectory of one rollout; never raises for what an environment does.

        Args:
            key: Turn to the key of its draws.
        """
        lost: list[str] = []
        played = replace(self, turn_tokenizer=replace(self.turn_tokenizer, switches=task.switches))
        while len(lost) < TRIES:
            try:
                async with self.env_workers.alone() if lost else self.env_workers.open() as env_worker:
                    path = await played._play(env_worker, task, key, sampling)
                break
            except EnvWorkerLost as error:
                lost.append(str(error))
        else:
            path = Trajectory(task.prompt, self.engine.version, seed=key(0))
            path.error = f"environment: its process {lost[-1]}, {len(lost)} times"
            path.ending = Ending(0, "fault", path.error)
        path.text = self.opening(path.prompt) + self.decode(path.tokens)
        return path

    async def _play(
        self, env_worker: EnvWorker, task: Task, key: Callable[[int], int], sampling: Sampling
    ) -> Trajectory:
        """Return the trajectory that one environment's process lived through.

        Raises:
            EnvWorkerLost: If it did not.
        """
        path = Trajectory(task.prompt, self.engine.version, seed=key(0))
        try:
            first = await env_worker.reset(task.text, {"seed": path.seed % 2**63, **task.columns}, path.seed)
            room = self._show(path, first, sampling.max_completion_length)
        except EnvError as fault:
            path.error = f"environment: reset: {fault.cause}"
            path.ending = Ending(0, fault.by, fault.cause)
        else:
            by, cause = await self._turns(path, env_worker, room, key, sampling)
            path.ending = Ending(len(path.completions), by, cause)
            self.count(cause if by == "fault" else None)
        if env_worker.is_sound:
            try:
                path.earn(await env_worker.end())
            except EnvError as fault:
                path.error = path.error or f"environment: close: {fault.cause}"
        return path

    def _show(self, path: Trajectory, first: EnvAnswer, budget: int) -> int:
        """Put a first observation behind the question; return how many tokens are left for all that follows.

        Raises:
            EnvError: If it is longer than a reply may be, or leaves no room for an answer.
        """
        asked = len(path.prompt)
        path.prompt = self.turn_tokenizer.observed(path.prompt, first.messages)
        path.said += [{"role": role, "content": text} for role, text in first.messages]
        # A first observation counts against the completion budget, as later replies do.
        shown = len(path.prompt) - asked
        if shown > self.plan.max_reply_tokens or shown >= budget:
            raise EnvError("flood", f"a first observation of {shown} tokens")
        return budget - shown

    async def _turns(
        self, path: Trajectory, env_worker: EnvWorker, room: int, key: Callable[[int], int], sampling: Sampling
    ) -> tuple[EndedBy, str | None]:
        """Play until something ends it; return what did, and the cause of a failing reply."""
        plan = self.plan
        for turn in range(plan.max_turns):
            left = room - len(path.tokens)
            # 0 is no limit of its own.
            limit = min(left, plan.max_turn_tokens or left)
            asked = replace(sampling, max_completion_length=limit)
            before = (*path.prompt, *path.tokens)
            begun = time.monotonic()
            [completion] = await self.engine.generate(before, [key(turn)], asked)
            text = cut_at_stop(self.decode(completion.tokens), completion, sampling)
            path.add_answer(completion, self.opening(before) + text)
            path.turn_seconds[-1] = time.monotonic() - begun
            # Cut off by the budget of the whole conversation, not by that of the turn.
            if completion.stop == "length" and len(completion.tokens) >= left:
                return "tokens", None
            try:
                answer = await env_worker.step(path.said[-1]["content"])
            except EnvError as fault:
                return fault.by, fault.cause
            finally:
                path.turn_seconds[-1] = time.monotonic() - begun
            path.earn(answer.reward)
            if answer.is_done:
                return "done", None
            # The reply to the last answer would never be read.
            if turn + 1 == plan.max_turns:
                break
            # A stop string is no end of turn, and neither is a token of sampling.stop_ids.
            is_ended = completion.tokens[-1] in self.turn_tokenizer.tokenizer.stop_ids
            reply = self.turn_tokenizer.reply(answer.messages, is_ended)
            if len(reply) > plan.max_reply_tokens:
                return "flood", f"a reply of {len(reply)} tokens, more than {plan.max_reply_tokens}"
            if len(path.tokens) + len(reply) >= room:
                return "tokens", None
            path.add_reply(reply, answer.messages)
        return "turns", None
