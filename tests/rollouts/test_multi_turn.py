"""Conversations: token-exact, bounded, and ended one by one."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.core.types import Completion, Ending, Grade, Group, Rollout, Snapshot, Task
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.tiny import tiny_model, tiny_tokenizer
from gnomon.records.rollouts import RolloutLog, read_rollouts
from gnomon.rewards.base import Sample
from gnomon.rewards.function import signature
from gnomon.rollouts.collate import collate
from gnomon.rollouts.env_workers import EnvWorker, EnvWorkers, describe
from gnomon.rollouts.metrics import measure_turns
from gnomon.rollouts.multi_turn import MultiTurnRollout
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.tasks.env_server import EnvServer
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.prompt_start import beginning_of
from gnomon.tasks.turn_tokens import TurnTokenizer

EOS = 257
CHAT = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
MINE = '''
import ctypes
import os
import signal
import time
from pathlib import Path

from gnomon.core.processes.stop_signals import STOP_SIGNALS
from gnomon.tasks.environment import Reply


class Scripted:
    """Replies with its column ``replies``, one by one; some of them are deeds."""

    def __init__(self, pay=0.25):
        self.pay = pay

    def reset(self, replies, first=None, prompt="", **columns):
        self.left = list(replies)
        if first == "raise":
            raise OSError("no game today")
        return first

    async def step(self, text):
        said = self.left.pop(0)
        if said.startswith("until "):
            while not Path(said[6:]).exists():
                time.sleep(0.001)
        if said.startswith("then "):
            Path(said[5:]).touch()
        deeds = {
            "hang": lambda: time.sleep(1000),
            "raise": lambda: 1 / 0,
            "die": lambda: os._exit(3),
            "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "asked to stop": lambda: [os.kill(os.getpid(), n) for n in STOP_SIGNALS] and Reply("no", reward=self.pay),
            "memory": lambda: bytearray(64 * 2**30),
            "forks": lambda: [os.fork() or time.sleep(1000) for _ in range(20)] and time.sleep(1000),
            "writes": lambda: Reply(str(sum(os.write(2, b"x" * 2**20) for _ in range(2000))), is_done=True),
            "in C": lambda: ctypes.CDLL(None).sleep(1000),
            "closes": lambda: (os.closerange(3, 1000), time.sleep(60)),
            "ends its parent": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(60)),
            "flood": lambda: Reply("x" * 300_000),
            "long": lambda: Reply("x" * 100),
            "pid": lambda: Reply(str(os.getpid()), is_done=True),
            "nan": lambda: Reply("", reward=float("nan")),
        }
        if said.startswith("once "):
            _, number, marker = said.split(" ")
            try:
                Path(marker).touch(exist_ok=False)
            except FileExistsError:
                return Reply("again", reward=self.pay)
            os.kill(os.getpid(), int(number))
        if said in deeds:
            return deeds[said]()
        return Reply(said, reward=self.pay, is_done=said == "bye")
'''


@dataclass
class Parrot:
    """Answers turn by turn with the given tokens, and remembers what it was asked; its weights age with each answer."""

    answers: Sequence[Sequence[int]]
    version: int = 0
    with_routing: bool = False
    asked: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(0)
        [key] = keys
        turn = len(self.asked) % len(self.answers)
        self.asked.append((tuple(prompt), key, sampling.max_completion_length))
        tokens = tuple(self.answers[turn][: sampling.max_completion_length])
        logprobs = tuple(-0.5 - turn - 0.01 * place for place in range(len(tokens)))
        full = tuple(value - 1 for value in logprobs)
        is_ended = tokens[-1] == EOS
        self.version += 1
        routing = None
        if self.with_routing:
            routing = torch.full((len(prompt) + len(tokens), 1, 1), turn, dtype=torch.int16)
            routing[-1] = -1
        stop = "stop" if is_ended else "length"
        return [Completion(tokens, logprobs, full, self.version - 1, self.version, stop, routing)]

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        return [-1.0] * len(response)

    async def load(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    async def close(self) -> None:
        return


class InProcess(EnvWorkers):
    """Environments in this process: quick, for what cannot hang."""

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._hosting = EnvServer(plan)
        self._seconds = plan.timeout_seconds

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[EnvWorker]:
        host = EnvWorker(self, self._seconds, lambda worker: asyncio.sleep(0, "ended"))
        yield host
        if not host.is_sound:  # a process would be ended here
            await self.ask({"do": "close"}, 0)

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Answer from a thread, for the labor has a loop of its own."""
        return await asyncio.to_thread(self._hosting.answer, request)


@dataclass
class Graded:
    """Grades with the environment's reward, and remembers what it saw and refused."""

    samples: list[Sample] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def grade(self, sample: Sample) -> Grade:
        self.samples.append(sample)
        return Grade(sample.columns["environment_reward"])

    def refuse(self, sample: Sample, error: str) -> Grade:
        self.refused.append(error)
        return Grade(None, error=error)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with an environment that does as it is told."""
    path = tmp_path_factory.mktemp("environment") / "mine.py"
    path.write_text(MINE)
    return f"{path}:Scripted"


def tokenizer_with(template: str | None) -> Any:
    """The byte tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend.chat_template = template
    return tokenizer


CHATTY = tokenizer_with(CHAT)


def asking(
    engine: Engine,
    hosts: EnvWorkers,
    plan: EnvironmentConfig,
    graded: Graded,
    budget: int = 400,
    tokenizer: Any = CHATTY,
    weight: float = 1.0,
) -> Rollouter:
    """Who asks one rollout a task."""
    opening = beginning_of(tokenizer).opening
    conversation = MultiTurnRollout(
        engine, hosts, TurnTokenizer.over(tokenizer), plan, CHATTY.decode, graded.refuse, opening, reward_weight=weight
    )
    sampling = Sampling(max_completion_length=budget, stop_ids=(EOS,))
    return Rollouter(engine, graded, CHATTY.decode, sampling, generations=1, seed=7, conversation=conversation)


def task_of(replies: Sequence[str], **columns: Any) -> Task:
    """A question whose environment says these replies."""
    rendered = CHATTY.template([{"role": "user", "content": "q"}])
    return Task("t", tuple(CHATTY.encode(rendered)), "q", {"replies": list(replies), **columns})


def played(plan: EnvironmentConfig, task: Task, answers: Sequence[Sequence[int]], **more: Any) -> tuple[Any, ...]:
    """One rollout in this process, the engine and the grader."""
    engine, graded = Parrot(answers, with_routing=more.pop("with_routing", False)), Graded()
    rollouter = asking(engine, InProcess(plan), plan, graded, **more)
    group = asyncio.run(rollouter.run_group(task, 3, RolloutTimer()))
    return group.rollouts[0], engine, graded


def say(text: str) -> list[int]:
    """An answer with its end of turn."""
    return [*text.encode(), EOS]


@pytest.mark.parametrize(
    ("weight", "earned"), [(1.0, (0.25, 0.25, 0.25)), (2.0, (0.5, 0.5, -0.25)), (0.0, (0, 0, 0.75))]
)
def test_each_answer_keeps_what_it_earned(mine: str, tmp_path: Path, weight: float, earned: tuple[float, ...]):
    """The environment's reward times its weight; what else the grade has is the last answer's. A record keeps both."""
    plan = EnvironmentConfig(use=mine, max_turns=4)
    rollout, _, _ = played(plan, task_of(["a", "b", "bye"]), [say("x")], weight=weight)
    RolloutLog(tmp_path).write(1, [Group(task_of([]), (rollout,))])
    [recorded] = read_rollouts(tmp_path / "step-000001.jsonl")

    assert rollout.grade.reward == sum(earned) == 0.75
    assert (rollout.turn_rewards, rollout.turn_ends) == (earned, recorded.rollout.turn_ends)
    assert recorded.rollout.turn_rewards == earned
    assert len(recorded.rollout.turn_seconds) == len(earned)
    assert all(seconds > 0 for seconds in rollout.turn_seconds)


hostile = st.lists(st.sampled_from(["<|bos|>", "<|eos|>", "<|eo", "user\n", "é", "日本", " ", "x"]), max_size=6).map(
    "".join
)
token = st.one_of(st.integers(0, 255), st.sampled_from([256, 258]))


@given(st.data())
def test_what_is_trained_on_is_what_was_sampled(mine: str, data: st.DataObject):
    """Each turn is asked with every token so far as it was sampled; mask and log-probabilities are its own.

    Answers are any ids: half characters, control tokens in the middle, with or without their end token.
    """
    turns = data.draw(st.integers(1, 4))
    answers = [data.draw(st.lists(token, min_size=1, max_size=6)) for _ in range(turns)]
    answers = [[*a, EOS] if data.draw(st.booleans()) else a for a in answers]
    replies = data.draw(st.lists(hostile, min_size=turns, max_size=turns))
    longest = max(map(len, answers))
    plan = EnvironmentConfig(use=mine, max_turns=turns, max_turn_tokens=longest)
    rollout, engine, _ = played(plan, task_of(replies), answers, budget=10_000)

    whole = rollout.prompt + rollout.response
    place = len(rollout.prompt)
    for turn, (prompt, key, limit) in enumerate(engine.asked):
        assert prompt == whole[: len(prompt)]
        assert key == sample_key(7, 3, "t", 0, turn)
        assert limit == longest
        assert not any(rollout.mask[place - len(rollout.prompt) : len(prompt) - len(rollout.prompt)])
        start, size = len(prompt) - len(rollout.prompt), len(answers[turn])
        assert rollout.response[start : start + size] == tuple(answers[turn])
        assert all(rollout.mask[start : start + size])
        own = tuple(-0.5 - turn - 0.01 * n for n in range(size))
        assert rollout.logprobs[start : start + size] == own
        assert rollout.full_logprobs[start : start + size] == tuple(value - 1 for value in own)
        place = len(prompt) + size
        assert rollout.turn_ends[turn] == place - len(rollout.prompt)
    assert place == len(whole), "a conversation ends with what the policy said"
    assert sum(rollout.mask) == sum(map(len, answers))
    unchosen = [v for v, m in zip(rollout.logprobs, rollout.mask, strict=True) if not m]
    assert set(unchosen) <= {0.0}
    assert (rollout.oldest_version, rollout.newest_version) == (0, turns)


@pytest.mark.parametrize(
    ("asked", "seen"), [({"stop": "</say>", "tokenizer": "tiny"}, "4"), ({"stop_ids": (EOS, ord(">"))}, "4</say>")]
)
def test_a_turn_that_the_users_own_stop_ends_gets_the_end_of_turn_that_nobody_chose(
    mine: str, asked: dict[str, Any], seen: str
):
    """A stop string, seen up to it, or a token that is not the model's end; its tokens are trained, <|eos|> is not."""
    plan, engine, graded = EnvironmentConfig(use=mine), ScriptedEngine(lambda prompt, key: "4</say> x"), Graded()
    who = asking(engine, InProcess(plan), plan, graded)  # type: ignore[arg-type]
    who = replace(who, sampling=replace(who.sampling, **asked))
    rollout = asyncio.run(who.run_group(task_of(["more", "bye"]), 3, RolloutTimer())).rollouts[0]

    said = [row["content"] for row in graded.samples[0].columns["conversation"] if row["role"] == "assistant"]
    assert said == [seen, seen]
    assert graded.samples[0].completion == seen
    ids, mask = rollout.response, rollout.mask
    assert bytes(i for i, chosen in zip(ids, mask, strict=True) if chosen) == b"4</say>" * 2
    assert ids[7] == EOS
    assert not mask[7]


def test_a_conversation_reads_as_the_template_has_it(mine: str):
    """Prompt and response together are the rendered messages up to the last answer; the reward is the sum."""
    plan = EnvironmentConfig(use=mine, settings={"pay": 0.5})
    rollout, _, graded = played(plan, task_of(["no <|eos|>", "bye"], first="begin"), [say("4"), say("5")])

    messages = [("user", "q"), ("user", "begin"), ("assistant", "4"), ("user", "no <|eos|>"), ("assistant", "5")]
    text = CHATTY.template([{"role": role, "content": text} for role, text in messages])
    names = {256: b"<|bos|>", 257: b"<|eos|>"}
    spelled = b"".join(names.get(i) or bytes([i]) for i in rollout.prompt + rollout.response).decode()
    assert text.startswith(spelled + "\n")
    assert (rollout.ending.turns, rollout.ending.by, rollout.stop, rollout.grade.reward) == (2, "done", "stop", 1.0)
    [sample] = graded.samples
    assert sample.completion == "5"
    assert [m["content"] for m in sample.columns["conversation"]] == ["begin", "4", "no <|eos|>", "5"]
    assert (sample.columns["turns"], sample.columns["ended_by"], sample.is_truncated) == (2, "done", False)
    assert sample.completion_tokens == len(rollout.response)


def test_every_turn_is_written_with_the_variables_of_its_row(mine: str):
    """A column such as ``enable_thinking`` opens later answers as the first one, also behind an observation."""
    switched = tokenizer_with(CHAT.replace("assistant\n{% endif", "assistant\n{{ enable_thinking }}:{% endif"))
    begin, own = [{"role": "user", "content": "q"}], {"enable_thinking": False}
    task = Task("t", tuple(switched.encode(switched.template(begin, (), own))), "q", {"replies": ["no", "bye"]})
    task = replace(task, columns={**task.columns, "first": "begin"}, switches=own)

    rollout, _, _ = played(EnvironmentConfig(use=mine), task, [say("4"), say("5")], tokenizer=switched)

    text = switched.spelled([*rollout.prompt, *rollout.response])
    assert text.count("assistant\nFalse:") == text.count("assistant\n") == 2


def test_what_a_template_opens_is_seen_in_every_turn(mine: str):
    """A thought that the prompt begins stands before each answer for environment, reward and record, not in the ids."""
    thinking = tokenizer_with(CHAT.replace("assistant\n{% endif", "assistant\n<think>{% endif"))
    rendered = thinking.template([{"role": "user", "content": "q"}])
    task = Task("t", tuple(thinking.encode(rendered)), "q", {"replies": ["no", "bye"]})

    rollout, _, graded = played(EnvironmentConfig(use=mine), task, [say("a</think>4"), say("5")], tokenizer=thinking)

    [sample] = graded.samples
    assert sample.completion == "<think>5"
    assert [m["content"] for m in sample.columns["conversation"]] == ["<think>a</think>4", "no", "<think>5"]
    assert rollout.text.startswith("<think>a</think>4<|eos|>")
    assert rollout.response[: len(say("a</think>4"))] == tuple(say("a</think>4"))


def test_a_reward_in_trl_s_form_sees_every_message(mine: str):
    """With messages, a completion is the whole conversation, as TRL has it; as text it is the last answer."""
    _, _, graded = played(EnvironmentConfig(use=mine), task_of(["no", "bye"]), [say("4"), say("5")])

    def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return [0.0]

    [sample] = graded.samples
    asked = signature(score, "here").arguments([sample], True)
    assert [m["content"] for m in asked["completions"][0]] == ["4", "no", "5"]
    assert signature(score, "here").arguments([sample], False)["completions"] == ["5"]


@pytest.mark.parametrize(
    ("settings", "budget", "replies", "answers", "by", "turns"),
    [
        ({"max_turns": 2}, 400, ["a", "b", "c"], [say("1")], "turns", 2),
        ({}, 3, ["a"], [[65, 66, 67, 68]], "tokens", 1),  # the answer is cut: the environment does not see it
        ({}, 22, ["a", "b"], [say("1")], "tokens", 1),  # no room for reply and answer
        ({"max_reply_tokens": 40}, 400, ["long"], [say("1")], "flood", 1),
        ({}, 400, ["flood"], [say("1")], "flood", 1),
        ({}, 400, ["raise"], [say("1")], "fault", 1),
        ({}, 400, ["nan"], [say("1")], "fault", 1),
        ({}, 400, ["a", "bye"], [say("1")], "done", 2),
        ({"max_turn_tokens": 2}, 400, ["a", "bye"], [[65, 66, 67]], "done", 2),  # cut answers count as said
    ],
)
def test_each_budget_and_fault_ends_with_its_cause(
    mine: str, settings: dict[str, Any], budget: int, replies: list[str], answers: list[list[int]], by: str, turns: int
):
    """Turns, tokens, floods and faults; a response keeps to its budget, and only a budget truncates."""
    plan = EnvironmentConfig(use=mine, **settings)
    rollout, _, graded = played(plan, task_of(replies), answers, budget=budget)

    assert (rollout.ending.by, rollout.ending.turns) == (by, turns)
    assert (rollout.ending.cause is None) == (by not in ("flood", "fault"))
    assert len(rollout.response) <= budget
    assert rollout.is_truncated == graded.samples[0].is_truncated == (by in ("turns", "tokens"))
    assert graded.refused == []
    assert rollout.grade.error is None, "what follows an answer is graded and trained on"


def test_an_answer_that_was_cut_gets_its_end_of_turn_from_the_bridge(mine: str):
    """Its end token is there, and nobody chose it; an answer that ended itself gets none."""
    plan = EnvironmentConfig(use=mine, max_turn_tokens=2)
    cut, _, _ = played(plan, task_of(["a", "bye"]), [[65, 66, 67]])
    ended, _, _ = played(plan, task_of(["a", "bye"]), [say("A")])

    assert (cut.response[2], cut.mask[2], cut.response[3]) == (EOS, False, 10)
    assert (ended.response[1], ended.mask[1], ended.response[2]) == (EOS, True, 10)


def test_a_failure_before_the_first_answer_is_an_error(mine: str):
    """reset raises: refused with its cause, one padding token, nothing to train on, and a batch all the same."""
    plan = EnvironmentConfig(use=mine)
    task = task_of([], first="raise")
    rollout, engine, graded = played(plan, task, [say("1")])

    assert graded.refused == [rollout.grade.error]
    assert rollout.grade.error.startswith("environment: reset: OSError: no game today")
    assert (engine.asked, rollout.mask, rollout.ending.turns) == ([], (False,), 0)
    assert not collate([Group(task, (rollout,))], 1.0).mask.any()


def test_a_first_observation_counts_in_the_budget_and_may_flood(mine: str):
    """What is shown before the first answer leaves less room; too much of it is an error."""
    shown, engine, _ = played(EnvironmentConfig(use=mine), task_of(["bye"], first="begin"), [say("1")], budget=100)
    flooded, _, _ = played(EnvironmentConfig(use=mine), task_of(["bye"], first="x" * 90), [say("1")], budget=90)

    extra = len(shown.prompt) - len(task_of([]).prompt)
    assert extra > len("begin")
    assert engine.asked[0][2] == 100 - extra
    assert "a first observation of" in flooded.grade.error


def test_experts_come_from_the_turn_that_chose_with_them(mine: str):
    """The row before a sampled token is its own turn's, a reply's rows are the later turn's, the last is unknown."""
    plan = EnvironmentConfig(use=mine)
    rollout, engine, _ = played(plan, task_of(["ab", "bye"]), [say("1"), say("2")], with_routing=True)

    rows, second = rollout.routing[:, 0, 0].tolist(), len(engine.asked[1][0])
    first_end = len(rollout.prompt) + 2 - 1
    assert rows == [0] * first_end + [1] * (second + 2 - 1 - first_end) + [-1]


def test_conversations_are_measured_and_written_down(tmp_path: Path, mine: str):
    """Means over all of them, one fraction a cause; the record gives back what was written."""
    done, *_ = played(EnvironmentConfig(use=mine), task_of(["a", "bye"]), [say("1")])
    raised, *_ = played(EnvironmentConfig(use=mine), task_of(["raise"]), [say("1")])
    metrics = measure_turns([done, raised])
    log = RolloutLog(tmp_path)
    log.write(1, [Group(task_of([]), (done, raised))])

    assert (metrics["turns/mean"], metrics["turns/max"]) == (1.5, 2)
    assert (metrics["turns/ended_by_done_fraction"], metrics["turns/ended_by_fault_fraction"]) == (0.5, 0.5)
    assert metrics["turns/ended_by_turns_fraction"] == 0
    assert metrics["turns/reply_tokens_mean"] == (len(done.mask) - 4) / 2
    assert [r.rollout for r in read_rollouts(tmp_path / "step-000001.jsonl")] == [done, raised]
    assert measure_turns([replace(done, ending=None)]).values() == {}


@pytest.fixture
def several(mine: str) -> Callable[..., list[Rollout]]:
    """Play many tasks at once, with processes."""

    def play(plan: EnvironmentConfig, tasks: Sequence[Task], engine: Engine | None = None) -> list[Rollout]:
        async def all_of_them() -> list[Rollout]:
            async with EnvWorkers(plan) as hosts:
                rollouter = asking(engine or Parrot([say("1")]), hosts, plan, Graded())
                groups = await asyncio.gather(*(rollouter.run_group(task, 0, RolloutTimer()) for task in tasks))
            return [group.rollouts[0] for group in groups]

        return asyncio.run(all_of_them())

    return play


def test_a_tool_that_takes_long_holds_up_no_other_rollout(
    several: Callable[..., list[Rollout]], mine: str, tmp_path: Path
):
    """A tool that returns only when another conversation has come to its fourth turn returns; the engine is local."""
    event = tmp_path / "event"
    plan = EnvironmentConfig(use=mine, max_turns=5, max_turn_tokens=4, timeout_seconds=60)
    tasks = [task_of([f"until {event}", "bye"]), task_of(["a", "b", "c", f"then {event}", "bye"])]

    slow, other = several(plan, tasks, LocalEngine(tiny_model(0), kept_bytes=2**30))

    assert [(r.ending.by, r.ending.turns) for r in (slow, other)] == [("done", 2), ("done", 5)]


def test_what_hangs_raises_floods_or_dies_ends_its_own_rollout(several: Callable[..., list[Rollout]], mine: str):
    """Two processes for many rollouts at once: each bad one has its cause, and each good one is whole."""
    plan = EnvironmentConfig(use=mine, timeout_seconds=0.5, max_concurrent=2)
    deeds = ["hang", "raise", "flood", "die", "hang"]
    rollouts = several(plan, [task_of(replies) for deed in deeds for replies in ([deed], ["a", "bye"])])

    assert [r.ending.by for r in rollouts[::2]] == ["timeout", "fault", "flood", "fault", "timeout"]
    assert [r.ending.cause for r in rollouts[::2]] == [
        "no reply after 0.5 s",
        rollouts[2].ending.cause,
        "a reply of 300000 characters",
        "its process exited with status 3",
        "no reply after 0.5 s",
    ]
    assert rollouts[2].ending.cause.startswith("ZeroDivisionError: division by zero (mine.py:")
    assert [(r.ending.by, r.ending.turns, r.grade.reward) for r in rollouts[1::2]] == [("done", 2, 0.5)] * 5


def test_what_kills_the_parent_of_all_environments_costs_the_others_nothing(
    several: Callable[..., list[Rollout]], mine: str
):
    """Eight innocent conversations beside one that ends their common parent, again and again: each earns all of its
    reward, and the one that does it is an error, never a reward."""
    plan = EnvironmentConfig(use=mine, timeout_seconds=30, max_concurrent=9)
    innocent = [task_of(["a", "b", "c", "bye"]) for _ in range(8)]
    *good, bad = several(plan, [*innocent, task_of(["a", "ends its parent"])])

    assert [(r.grade.reward, r.ending.by, r.ending.turns) for r in good] == [(1.0, "done", 4)] * 8
    assert bad.grade.reward is None
    assert bad.grade.error.startswith("environment: its process ended with the process that started it")
    assert bad.grade.error.endswith(", 3 times")


def test_a_process_whose_parent_ends_before_it_is_ready_is_started_again(
    several: Callable[..., list[Rollout]], tmp_path: Path
):
    """Another conversation may end the common parent just then; here the first process that is made does it itself."""
    path, marker = tmp_path / "mine.py", tmp_path / "marker"
    path.write_text(
        f"{MINE}\n\ndef end_both():\n    if not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close()\n        os.kill(os.getppid(), signal.SIGKILL)\n"
        "        os._exit(1)\n\n\nos.register_at_fork(after_in_child=end_both)\n"
    )
    (done,) = several(EnvironmentConfig(use=f"{path}:Scripted"), [task_of(["a", "bye"])])

    assert marker.exists()
    assert done.ending.by == "done"


def test_guilty_conversations_cost_innocent_ones_nothing(several: Callable[..., list[Rollout]], mine: str):
    """Ten beside six that take memory, fork, write gigabytes, wait in C, close files or crash: each has its own end."""
    plan = EnvironmentConfig(use=mine, timeout_seconds=3, max_concurrent=16, memory_gib=1.0)
    deeds = ["memory", "forks", "writes", "in C", "closes", "segfault"]
    innocent = [task_of(["a", "b", "c", "bye"]) for _ in range(10)]
    played = several(plan, [*innocent, *(task_of(["a", deed]) for deed in deeds)])

    assert [(r.grade.reward, r.ending) for r in played[:10]] == [(1.0, Ending(4, "done"))] * 10
    assert [r.ending.by for r in played[10:]] == ["fault", "timeout", "done", "timeout", "fault", "fault"]
    assert played[10].ending.cause.startswith("MemoryError")
    assert [r.grade.reward for r in played[10:]] == [0.25] * 6


def test_an_environment_that_is_killed_from_outside_is_played_again(
    several: Callable[..., list[Rollout]], mine: str, tmp_path: Path
):
    """Once, as by the kernel's memory killer, or stopped: the same tokens and the whole reward. Always: an error. A
    fault of its own code (an exit, a segmentation fault, a closed connection) is none of this: it ends the rollout,
    which is graded as it stands. Signals that ask a run to stop do nothing."""
    plan = EnvironmentConfig(use=mine, timeout_seconds=2, max_concurrent=2)
    deeds = [f"once {number.value} {tmp_path}/{number.name}" for number in (signal.SIGKILL, signal.SIGSTOP)]
    deeds += ["killed", "stopped", "die", "segfault", "closes", "asked to stop"]
    played = several(plan, [task_of(["a", deed, "bye"]) for deed in deeds])

    assert [(r.grade.reward, r.ending) for r in (*played[:2], played[7])] == [(0.75, Ending(3, "done"))] * 3
    assert [r.grade.error for r in played[2:4]] == [
        "environment: its process was killed by SIGKILL (out of memory?), 3 times",
        "environment: its process was stopped by a signal, 3 times",
    ]
    assert [r.grade.reward for r in played[4:7]] == [0.25] * 3
    assert [r.ending.cause for r in played[4:7]] == [
        "its process exited with status 3",
        "its process was killed by SIGSEGV",
        "its process closed its connection, or sent what is no answer",
    ]


def test_a_process_serves_again_only_when_nothing_went_wrong(several: Callable[..., list[Rollout]], mine: str):
    """Its number stays the same over good rollouts; none is left at the end."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text() if children.exists() else ""
    plan = EnvironmentConfig(use=mine, max_concurrent=1, timeout_seconds=5)
    rollouts = several(plan, [task_of(["a", "pid"]), task_of(["pid"]), task_of(["raise"]), task_of(["a", "pid"])])

    assert [r.ending.by for r in rollouts] == ["done", "done", "fault", "done"]
    assert (children.read_text() if children.exists() else "") == before


def test_a_conversation_that_is_withdrawn_leaves_nothing_behind(mine: str):
    """Cancelled in the middle of a reply, its process is ended, and the place serves the next one."""
    plan = EnvironmentConfig(use=mine, max_concurrent=1, timeout_seconds=60)

    async def withdraw() -> Group:
        async with EnvWorkers(plan) as hosts:
            rollouter = asking(Parrot([say("1")]), hosts, plan, Graded())
            hanging = asyncio.ensure_future(rollouter.run_group(task_of(["hang"]), 0, RolloutTimer()))
            await asyncio.sleep(0.3)
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            return await rollouter.run_group(task_of(["a", "bye"]), 0, RolloutTimer())

    assert asyncio.run(withdraw()).rollouts[0].ending == Ending(2, "done")


def test_an_environment_that_cannot_be_built_is_said_at_once(mine: str):
    """Before a model is read: wrong names, wrong settings, and what its own code raises."""
    with pytest.raises(ConfigError, match="unknown class 'Script'; did you mean 'Scripted'"):
        describe(EnvironmentConfig(use=mine.replace("Scripted", "Script")))
    with pytest.raises(ConfigError, match=r"environment.settings \{'x': 1\} do not fit"):
        describe(EnvironmentConfig(use=mine, settings={"x": 1}))
    assert describe(EnvironmentConfig(use=mine)) == ()
