"""Agents call the policy: exact tokens, limits, and one cause for each rollout that breaks."""

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Completion, Grade, Group, Rollout, Task
from gnomon.engines.base import Sampling
from gnomon.engines.rng import sample_key
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.tiny import tiny_tokenizer
from gnomon.records.rollouts import RolloutLog, read_rollouts
from gnomon.rewards.base import Sample
from gnomon.rollouts.agent import AgentEndpoint, AgentRollout, AgentSession, PolicyTemplates
from gnomon.rollouts.agent_trial import try_agent
from gnomon.rollouts.collate import collate
from gnomon.rollouts.env_workers import EnvWorkerLost, EnvWorkers
from gnomon.rollouts.metrics import measure_turns
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.turn_tokens import TurnTokenizer

EOS = 257
CHAT = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
HOSTILE = tomllib.loads((Path(__file__).parent / "hostile_agents.toml").read_text())["agent"]
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@dataclass
class Parrot:
    """Answers call by call with the given tokens, and remembers what it was asked; its weights age with each answer."""

    answers: Sequence[Sequence[int]]
    version: int = 0
    beats: int = 0
    asked: list[tuple[tuple[int, ...], int, Sampling]] = field(default_factory=list)
    waiting: asyncio.Event | None = None
    error: Exception | None = None

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        turn = len(self.asked)
        self.asked.append((tuple(prompt), keys[0], sampling))
        await asyncio.sleep(0)
        if self.waiting is not None:
            await self.waiting.wait()
        if self.error is not None and turn:
            raise self.error
        tokens = tuple(self.answers[turn % len(self.answers)][: sampling.max_completion_length])
        logprobs = tuple(-0.5 - turn - 0.01 * place for place in range(len(tokens)))
        self.version += 1
        stop = "stop" if tokens[-1] == EOS else "length"
        full = tuple(value - 1 for value in logprobs)
        return [Completion(tokens, logprobs, full, self.version - 1, self.version, stop)]


def say(text: str) -> list[int]:
    """An answer with its end of turn."""
    return [*text.encode(), EOS]


def templates() -> PolicyTemplates:
    """The byte tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend.chat_template = CHAT
    return PolicyTemplates(tokenizer, TurnTokenizer.over(tokenizer))


TEMPLATES = templates()
SAMPLING = Sampling(max_completion_length=4000, stop_ids=(EOS,), tokenizer="tiny")
PLAN = EnvironmentConfig(kind="agent", use="mine.py:act", timeout_seconds=20.0, max_reply_tokens=2000)


def refused(sample: Sample, error: str) -> Grade:
    """The grade of what cannot be trained on."""
    return Grade(None, error=error)


@dataclass
class Served:
    """An open session with both official clients."""

    session: AgentSession
    variables: dict[str, str]

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.variables["OPENAI_BASE_URL"], api_key=self.variables["OPENAI_API_KEY"], max_retries=0
        )

    @property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.variables["ANTHROPIC_BASE_URL"], api_key=self.variables["ANTHROPIC_API_KEY"], max_retries=0
        )


@asynccontextmanager
async def serving(
    engine: Parrot,
    plan: EnvironmentConfig = PLAN,
    sampling: Sampling = SAMPLING,
    templates: PolicyTemplates | None = None,
) -> AsyncIterator[Served]:
    """Answer one rollout's calls in this process."""
    async with AgentEndpoint() as endpoint:
        policy = AgentRollout(engine, endpoint, None, templates or TEMPLATES, plan, refused)  # type: ignore[arg-type]
        session = AgentSession(policy, partial(sample_key, 0, 0, "t", 0), sampling)
        with endpoint.open(session) as variables:
            yield Served(session, variables)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, or fail: no test here takes so long."""
    return asyncio.run(asyncio.wait_for(body, 60))


def spelled(ids: Sequence[int]) -> str:
    """The text of ids, control tokens spelled."""
    return TEMPLATES.tokenizer.spelled(list(ids))


texts = st.lists(st.sampled_from(["<|bos|>", "<|eos|>", "<|eo", "user\n", "é", "日本", " ", "x"]), max_size=5).map(
    "".join
)


@settings(max_examples=40)
@given(st.data())
def test_what_is_trained_on_is_what_was_sampled(data: st.DataObject):
    """Each call is answered behind every token so far as it was sampled; mask and log-probabilities are its own.

    Answers are any ids, half characters and control tokens included, with or without their end of turn; clients send
    back what they were told.
    """
    token = st.one_of(st.integers(0, 255), st.sampled_from([256, 258]))
    answers = data.draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4))
    answers = [[*a, EOS] if data.draw(st.booleans()) else a for a in answers]
    engine = Parrot(answers)

    async def body() -> AgentSession:
        async with serving(engine) as served:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
            for answer in answers:
                request = {"model": "m", "messages": messages, "max_tokens": len(answer)}
                status, said = await _asked(served, request)
                assert status == 200, said
                messages += [said["choices"][0]["message"], {"role": "user", "content": data.draw(texts)}]
            return served.session

    [segment] = run(body()).segments
    path = segment.path
    whole, place = (*path.prompt, *path.tokens), len(path.prompt)
    for turn, (prompt, _, sampling) in enumerate(engine.asked):
        assert prompt == whole[: len(prompt)]
        assert sampling.max_completion_length == len(answers[turn])
        assert not any(path.mask[place - len(path.prompt) : len(prompt) - len(path.prompt)])
        start, size = len(prompt) - len(path.prompt), len(answers[turn])
        assert path.tokens[start : start + size] == answers[turn]
        assert all(path.mask[start : start + size])
        assert path.logprobs[start : start + size] == [-0.5 - turn - 0.01 * n for n in range(size)]
        place = len(prompt) + size
    assert place == len(whole), "a conversation ends with what the policy said"
    assert len({key for _, key, _ in engine.asked}) == len(answers), "draws of their own"


async def _asked(served: Served, body: Any, path: str = "OPENAI_BASE_URL") -> tuple[int, Any]:
    """Send what a client may not let through; return status and body."""
    return await served.session._answer(*_api(body))


def _api(body: Any) -> tuple[Any, Any]:
    from gnomon.rollouts.chat_apis import CHAT_APIS

    return CHAT_APIS["/v1/chat/completions"], json.loads(json.dumps(body))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_s_client_calls_a_tool(is_streamed: bool):
    """The call arrives as one, its result is appended, and the ids are the template's of the whole conversation."""
    engine = Parrot([say(f"I add.\n{CALL}"), say("2")])

    async def body() -> Served:
        async with serving(engine) as served, served.openai as client:
            messages: list[Any] = [{"role": "user", "content": "1+1"}]
            first = await _completed(client, messages, is_streamed)
            assert (first.content, first.end) == ("I add.", "tool_calls")
            [call] = first.calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            said = {"role": "assistant", "content": first.content, "tool_calls": [call.model_dump()]}
            messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "<|eos|>2"}]
            second = await _completed(client, messages, is_streamed)
            assert (second.content, second.end, second.calls) == ("2", "stop", [])
            return served

    path = run(body()).session.segments[0].path
    text = spelled((*path.prompt, *path.tokens))
    assert text.endswith(f"I add.\n{CALL}<|eos|>\n<|bos|>tool\n<|eos|>2<|eos|>\n<|bos|>assistant\n2<|eos|>")
    assert '{"name": "add"' in text
    assert path.tokens.count(EOS) == 3, "what a tool said is text"
    assert [m["role"] for m in path.said] == ["assistant", "tool", "assistant"]


@dataclass
class Completed:
    """What a client made of a reply."""

    content: str | None
    calls: list[Any]
    end: str
    tokens: int


async def _completed(client: openai.AsyncOpenAI, messages: list[Any], is_streamed: bool) -> Completed:
    asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": [ADD]}
    if not is_streamed:
        whole = await client.chat.completions.create(**asked)
    else:
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            whole = await stream.get_final_completion()
    [choice] = whole.choices
    assert whole.usage is not None
    return Completed(
        choice.message.content or None, choice.message.tool_calls or [], choice.finish_reason, whole.usage.total_tokens
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropic_s_client_calls_a_tool(is_streamed: bool):
    """Blocks become the same messages: the second call appends the tool's result to the first one's tokens."""
    engine = Parrot([say(f"I add.\n{CALL}"), say("2")])
    tool = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]

    async def body() -> Served:
        async with serving(engine) as served, served.anthropic as client:
            asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "system": "Be brief.", "tools": [tool]}

            async def said(messages: list[Any]) -> Any:
                if not is_streamed:
                    return await client.messages.create(messages=messages, **asked)
                async with client.messages.stream(messages=messages, **asked) as stream:
                    return await stream.get_final_message()

            messages: list[Any] = [{"role": "user", "content": "1+1"}]
            first = await said(messages)
            text, use = first.content
            assert (text.text, use.name, use.input, first.stop_reason) == ("I add.", "add", {"a": 1}, "tool_use")
            messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "2"}]}
            second = await said([*messages, {"role": "user", "content": [result]}])
            assert (second.content[0].text, second.stop_reason) == ("2", "end_turn")
            assert second.usage.output_tokens == 2
            return served

    [segment] = run(body()).session.segments
    assert len(segment.marks) == 2
    assert spelled(segment.path.prompt).startswith("<|bos|>system\nBe brief.")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_s_client_of_responses_calls_a_tool(is_streamed: bool):
    """Items become the same messages, a text and its call one answer; nothing is stored between calls."""
    engine = Parrot([say(f"I add.\n{CALL}"), say("2")])
    tool = {"type": "function", "strict": False, **ADD["function"]}  # type: ignore[dict-item]

    async def body() -> AgentSession:
        async with serving(engine) as served, served.openai as client:

            async def said(given: Any, **more: Any) -> Any:
                asked: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": [tool], **more}
                if not is_streamed:
                    return await client.responses.create(input=given, **asked)
                async with client.responses.stream(input=given, **asked) as stream:
                    return await stream.get_final_response()

            first = await said("1+1")
            text, call = first.output
            assert (first.output_text, call.name, json.loads(call.arguments)) == ("I add.", "add", {"a": 1})
            items: list[Any] = [{"role": "user", "content": "1+1"}]
            items += [text.model_dump(exclude_none=True), call.model_dump(exclude_none=True)]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
            second = await said(items)
            assert (second.output_text, second.status, second.usage.output_tokens) == ("2", "completed", 2)
            with pytest.raises(openai.BadRequestError, match="nothing is stored between calls"):
                await said("and?", previous_response_id=second.id)
            return served.session

    [segment] = run(body()).segments
    assert len(segment.marks) == 2


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": 0.2}, "temperature = 0.2, and this run draws with sampling.temperature = 1"),
        ({"top_p": 0.9}, "top_p = 0.9, and this run draws with sampling.top_p = 1"),
        ({"n": 2}, "n = 2 cannot be followed"),
        ({"frequency_penalty": 1.0}, "frequency_penalty = 1.0 cannot be followed"),
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice = 'required' cannot be followed"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is not known here"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop = "),
        ({"max_tokens": 0}, "max_tokens = 0: at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "'image_url'",
        ),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "messages end with"),
        ({"messages": [{"role": "user", "content": "q", "name": "Ann"}]}, "a message has 'name'"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search'"),
        ({"metadata": json.loads('{"a": ' * 101 + "1" + "}" * 101)}, "lie more than 100 deep in each other"),
        (
            {"messages": [{"role": "user", "content": "a" * 140_000}]},
            "the call is longer than the model's context of 1024",
        ),
    ],
)
def test_what_would_break_log_probabilities_is_refused(parameters: dict[str, Any], said: str):
    """With status 400, which clients do not try again, and the parameter's name; nothing was generated."""
    engine = Parrot([say("a")])

    async def body() -> None:
        async with serving(engine) as served, served.openai as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "q"}], **parameters}
            with pytest.raises(openai.BadRequestError, match=_literal(said)):
                await client.chat.completions.create(**asked)
            same = {"temperature": 1.0, "top_p": 1, "n": 1, "stop": None, "seed": 3, "user": "u", "tool_choice": "auto"}
            answer = await client.chat.completions.create(**{**asked, **dict.fromkeys(parameters), **_plain(), **same})
            assert answer.choices[0].message.content == "a"

    def _plain() -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "q"}], "extra_body": None, "tools": []}

    run(body())
    assert len(engine.asked) == 1


def _literal(text: str) -> str:
    import re

    return re.escape(text)


def test_a_stop_text_and_a_limit_of_the_client_s_end_an_answer():
    """The engine is asked with both; neither changes what a token is drawn from. The client sees what is before it."""
    engine = Parrot([say("a")])

    async def body() -> None:
        async with serving(engine, sampling=replace(SAMPLING, stop="END")) as served, served.openai as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
            await client.chat.completions.create(**asked, stop=["Observation:"], max_completion_tokens=7)

    run(body())
    [(_, _, sampling)] = engine.asked
    assert sampling.stop_strings == ("END", "Observation:")
    assert sampling.max_completion_length == 7


def test_limits_are_said_to_the_client_and_end_the_rollout():
    """More calls than max_turns, a conversation without room, too many calls at once: each with a reason."""

    async def body() -> None:
        plan = replace(PLAN, max_turns=2)
        async with serving(Parrot([say("a")]), plan) as served, served.openai as client:
            messages: list[Any] = [{"role": "user", "content": "q"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
                messages += [{"role": "user", "content": "go on"}]
            with pytest.raises(openai.BadRequestError, match="this rollout is over"):
                await client.chat.completions.create(model="m", messages=messages)
            assert served.session.ended_by == "turns"
        async with serving(Parrot([say("a")]), sampling=replace(SAMPLING, max_completion_length=4)) as served:
            async with served.openai as client:
                messages = messages[:3]
                await client.chat.completions.create(model="m", messages=messages[:1])
                with pytest.raises(openai.BadRequestError) as raised:
                    await client.chat.completions.create(model="m", messages=messages)
            assert raised.value.code == "context_length_exceeded"
            assert served.session.is_cut
        engine = Parrot([say("a")], waiting=asyncio.Event())
        async with serving(engine, replace(PLAN, max_calls=1)) as served, served.openai as client:
            first = asyncio.ensure_future(client.chat.completions.create(model="m", messages=messages[:1]))
            while not engine.asked:
                await asyncio.sleep(0.001)
            with pytest.raises(openai.RateLimitError, match="1 calls are under way"):
                await client.chat.completions.create(model="m", messages=messages[:1])
            assert engine.waiting is not None
            engine.waiting.set()
            await first

    run(body())


def test_a_call_after_the_end_is_told_so():
    """Status 410, which clients do not try again, for whoever has the key; the address alone says nothing."""

    async def body() -> None:
        async with AgentEndpoint() as endpoint:
            policy = AgentRollout(Parrot([say("a")]), endpoint, None, TEMPLATES, PLAN, refused)  # type: ignore[arg-type]
            with endpoint.open(AgentSession(policy, partial(sample_key, 0, 0, "t", 0), SAMPLING)) as variables:
                pass
            for key, status in ((variables["OPENAI_API_KEY"], 410), ("other", 401)):
                async with openai.AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=key) as client:
                    with pytest.raises(openai.APIStatusError) as raised:
                        await client.models.list()
                assert raised.value.status_code == status

    run(body())


def test_a_rewritten_history_opens_a_segment():
    """So do other tools and a call that says nothing new; a branch keeps the ids up to where it leaves what was said.

    Each token that was sampled is trained in one segment alone. What goes on from the first conversation is in it.
    """
    engine = Parrot([say("a"), say("b"), say("c"), say("d"), say("e")])

    async def body() -> AgentSession:
        async with serving(engine) as served, served.openai as client:
            user, more = {"role": "user", "content": "q"}, {"role": "user", "content": "more"}
            said, trimmed = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": " a\n"}
            for messages, given in (
                ([user], {}),
                ([user, trimmed, more], {}),
                ([{**user, "content": "In short: q, a."}], {}),
                ([user, said, {**more, "content": "other"}], {}),
                ([user, said, more], {"tools": [ADD]}),
            ):
                name = "judge" if given else "a name of 3 words"
                await client.chat.completions.create(model=name, messages=messages, **given)  # type: ignore
            return served.session

    session = run(body())
    first, short, branch, tools = session.segments
    assert [segment.path.role for segment in session.segments] == ["", "", "", "judge"]
    assert [len(segment.marks) for segment in session.segments] == [2, 1, 1, 1]
    assert [bytes(segment.path.tokens[-2:-1]) for segment in session.segments] == [b"b", b"c", b"d", b"e"]
    assert spelled(short.path.prompt) == "<|bos|>user\nIn short: q, a.<|eos|>\n<|bos|>assistant\n"
    common = (*first.path.prompt, *say("a"))
    assert branch.path.prompt[: len(common)] == common
    assert b"In short" not in spelled(tools.path.prompt).encode()
    assert session.latest == "e"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_s_client_completes_plain_text(is_streamed: bool):
    """A prompt that begins with what was said keeps its ids; behind an end of turn it is a segment without that."""
    cut = [*b"ab", 200, *b"c"]
    engine = Parrot([cut, say("d"), say("e"), say("f")])

    async def body() -> AgentSession:
        async with serving(engine) as served, served.openai as client:
            text = "<|eos|>q"
            for behind, most in ((" more", len(cut)), ("", 9), ("!", 9), ("", 9)):
                asked: dict[str, Any] = {"model": "m", "prompt": text, "max_tokens": most, "stream": is_streamed}
                said = await client.completions.create(**asked)
                parts = [part async for part in said] if is_streamed else [said]
                text += "".join(part.choices[0].text for part in parts) + behind
                assert parts[-1].choices[0].finish_reason == ("length" if behind == " more" else "stop")
            with pytest.raises(openai.BadRequestError, match="one text, of at least a character"):
                await client.completions.create(model="m", prompt=[1, 2])
            return served.session

    first, behind, other = run(body()).segments
    assert first.path.prompt == (256, *b"<|eos|>q"), "no control token but what every text begins with"
    assert first.path.tokens == [*cut, *b" more", *say("d")]
    assert first.path.mask == [True] * 4 + [False] * 5 + [True] * 2
    assert behind.path.prompt == (*first.path.prompt, *first.path.tokens[:-1])
    assert behind.path.tokens == say("e")
    assert other.path.prompt == (*behind.path.prompt, *b"e!")


def test_a_stop_token_of_the_users_own_is_text_that_stays():
    """It ends no turn: plain text goes on behind it in one segment, and a chat's next message behind an end of turn."""
    sampling = replace(SAMPLING, stop_ids=(EOS, ord("\n")))

    async def body() -> AgentSession:
        engine = ScriptedEngine(lambda prompt, key: "ab\nc")
        async with serving(engine, sampling=sampling) as served, served.openai as client:  # type: ignore[arg-type]
            for text in ("q", "qab\n", "qab\nab\n more"):
                await client.completions.create(model="m", prompt=text)
            chat: list[Any] = [{"role": "user", "content": "q"}]
            for _ in range(2):
                done = await client.chat.completions.create(model="m", messages=chat)
                chat += [{"role": "assistant", "content": done.choices[0].message.content}]
                chat += [{"role": "user", "content": "r"}]
            return served.session

    plain, chat = run(body()).segments
    assert plain.path.tokens == [*b"ab\nab\n moreab\n"]
    assert chat.path.tokens[:4] == say("ab\n")
    assert (chat.path.mask[:4], chat.path.tokens.count(EOS)) == ([True] * 3 + [False], 2)


def test_segments_are_rows_of_one_rollout(mine: Path, tmp_path: Path):
    """A batch has a row for each, with one rollout_id, group and reward; the record reads back as it was written."""
    code = "say(); history[:] = []; say('short'); say(); return 0.5"
    plan = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile")
    rollouts = played(plan, [task_of("a", code=code), task_of("b", code="say(); return 1.0")])
    groups = [Group(task_of("a"), (rollouts[0],)), Group(task_of("b"), (rollouts[1],))]
    batch = collate(groups, 1.0)

    assert [len(r.rows) for r in rollouts] == [2, 1]
    assert batch.rollout_id is not None
    assert (batch.rollout_id.tolist(), batch.group.tolist(), batch.rewards.tolist()) == (
        [0, 0, 1], [0, 0, 1], [0.5, 0.5, 1.0],
    )  # fmt: skip
    assert batch.turn is not None
    assert batch.step_rewards is not None
    assert [sorted(set(row[mask].tolist())) for row, mask in zip(batch.turn, batch.mask, strict=True)] == [
        [0], [1, 2], [0],
    ]  # fmt: skip
    assert batch.step_rewards.sum(1).tolist() == [0.0, 0.5, 1.0]
    assert rollouts[0].oldest_version == min(row.oldest_version for row in rollouts[0].rows)
    metrics = measure_turns(rollouts)
    assert (metrics["turns/segments_mean"], metrics["turns/mean"]) == (1.5, 2.0)
    assert not [name for name in metrics.values() if "role" in name]
    judge = replace(rollouts[0], segments=tuple(replace(row, role="judge") for row in rollouts[0].segments))
    metrics = measure_turns([judge, rollouts[1]])
    assert (metrics["turns/role_judge_answers_mean"], metrics["turns/role_none_answers_mean"]) == (2.0, 1.0)
    assert (metrics["turns/role_judge_reward_mean"], metrics["turns/role_none_reward_mean"]) == (0.5, 0.5)
    RolloutLog(tmp_path).write(1, groups, (), batch)
    read = [recorded.rollout for recorded in read_rollouts(tmp_path / "step-000001.jsonl")]
    assert read == rollouts


def test_a_call_that_is_given_up_leaves_nothing():
    """A client that hangs up takes its call back: the next one begins where that one did."""
    engine = Parrot([say("a")], waiting=asyncio.Event())

    async def body() -> AgentSession:
        async with serving(engine) as served, served.openai as client:
            messages: list[Any] = [{"role": "user", "content": "q"}]
            first = asyncio.ensure_future(client.chat.completions.create(model="m", messages=messages))
            while not engine.asked:
                await asyncio.sleep(0.001)
            first.cancel()
            while served.session.segments:
                await asyncio.sleep(0.001)
            assert engine.waiting is not None
            engine.waiting.set()
            await client.chat.completions.create(model="m", messages=messages)
            return served.session

    [segment] = run(body()).segments
    assert segment.path.tokens == say("a")


# Whole rollouts, with processes.

MINE = """
import os

import openai

from gnomon.tasks.environment import Reply


def adding(prompt, answer, seed, who="nobody"):
    client = openai.OpenAI(max_retries=0)
    messages = [{"role": "user", "content": prompt}]
    said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    return Reply(f"{who} says {said.choices[0].message.content}", reward=0.5)


async def slowly(prompt):
    async with openai.AsyncOpenAI(max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
    return 1
"""
THEIRS = """
import http.client
import json
import os
import subprocess
import threading
import time
from urllib.parse import urlsplit


def hostile(code, **columns):
    history = []
    address, token = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]

    def asked(body, key=token, path=address.path + "/chat/completions"):
        asking = http.client.HTTPConnection(address.netloc, timeout=10)
        asking.request("POST", path, body, {"Authorization": f"Bearer {key}"})
        reply = asking.getresponse()
        return reply.status, json.loads(reply.read())

    def raw(body, **more):
        return asked(body, **more)[0]

    def say(text="q", **more):
        history.append({"role": "user", "content": text})
        status, said = asked(json.dumps({"messages": history, **more}))
        if status != 200:
            history.pop()
            raise OSError(said["error"]["message"])
        history.append(said["choices"][0]["message"])

    def quietly(function):
        try:
            function()
        except OSError:
            pass

    body = "\\n".join("    " + line for line in code.splitlines())
    names = {**globals(), **locals()}
    exec("def act():\\n" + body, names)
    return names["act"]()
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of agents."""
    path = tmp_path_factory.mktemp("agents") / "mine.py"
    path.write_text(MINE)
    path.with_name("theirs.py").write_text(THEIRS)
    return path


@dataclass
class Graded:
    """Grades with the agent's own reward, and remembers what it saw."""

    samples: list[Sample] = field(default_factory=list)

    async def grade(self, sample: Sample) -> Grade:
        self.samples.append(sample)
        return Grade(sample.columns["environment_reward"])


def played(
    plan: EnvironmentConfig,
    tasks: Sequence[Task],
    engine: Parrot | None = None,
    graded: Graded | None = None,
    templates: PolicyTemplates = TEMPLATES,
) -> list[Rollout]:
    """One rollout of each task, at once."""
    return [group.rollouts[0] for group in grouped(plan, tasks, engine, graded, templates)]


def grouped(
    plan: EnvironmentConfig,
    tasks: Sequence[Task],
    engine: Parrot | None = None,
    graded: Graded | None = None,
    templates: PolicyTemplates = TEMPLATES,
) -> list[Group]:
    """A group of each task, with all that one rollout becomes."""

    async def body() -> list[Group]:
        policy, judge = engine or Parrot([say("4")]), graded or Graded()
        async with AgentEndpoint() as endpoint, EnvWorkers(plan) as hosts:
            agent = AgentRollout(policy, endpoint, None if plan.server else hosts, templates, plan, refused)  # type: ignore
            asking = Rollouter(policy, judge, TEMPLATES.tokenizer.decode, SAMPLING, 1, 7, agent)  # type: ignore
            return list(await asyncio.gather(*(asking.run_group(task, 3, RolloutTimer()) for task in tasks)))

    return run(body())


def task_of(name: str = "t", **columns: Any) -> Task:
    """A question with columns for the agent."""
    return Task(name, (1,), "2+2", columns)


def test_a_function_s_answer_and_reward_are_graded(mine: Path):
    """Plain or async; it gets the columns that it names and the settings, and may return a text, a reward or both."""
    graded = Graded()
    plan = replace(PLAN, use=f"{mine}:adding", settings={"who": "Ann"})
    [rollout] = played(plan, [task_of(answer="4")], graded=graded)

    assert (rollout.ending.turns, rollout.ending.by, rollout.grade.reward) == (1, "done", 0.5)  # type: ignore
    assert rollout.response == tuple(say("4"))
    assert graded.samples[0].completion == "Ann says 4"
    assert graded.samples[0].columns["answer"] == "4"
    [rollout] = played(replace(PLAN, use=f"{mine}:slowly"), [task_of()], graded=graded)
    assert rollout.grade.reward == 1.0
    assert graded.samples[1].completion == "4"


def test_calls_are_written_with_the_variables_of_the_row(mine: Path):
    """A column such as ``enable_thinking`` is the agent's argument, and begins the policy's answers as it says."""
    switched = templates()
    header = "assistant\n{{ enable_thinking }}:{% endif"
    switched.tokenizer.backend.chat_template = CHAT.replace("assistant\n{% endif", header)
    tasks = [replace(task_of(name, answer="4"), switches={"enable_thinking": name == "a"}) for name in "ab"]
    found = played(replace(PLAN, use=f"{mine}:adding"), tasks, templates=switched)
    assert [spelled(one.prompt).rpartition("\n")[2] for one in found] == ["True:", "False:"]


def test_roles_are_paid_and_compared_by_themselves(mine: Path):
    """A table of rewards makes a rollout of each role, in groups of one role; a role that is not in it is a fault."""
    play = "say(model='solver'); say(model='solver'); history[:] = []; say('c', model='critic'); history[:] = []; say()"
    plan = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile")
    paid, unpaid = (
        f"{play}; return {table}" for table in ({"solver": 1, "critic": -1.5, "policy": 0.5}, {"critic": 1})
    )
    groups = grouped(plan, [task_of(code=paid), task_of(code=unpaid)])
    each = [part for group in groups for part in group.by_role]
    batch = collate(each, 1.0, baseline=lambda task: float(len(task.columns["role"])))

    assert [[len(r.turn_ends) for r in group.rollouts] for group in groups] == [[2, 1, 1]] * 2
    assert batch.role == ("solver", "critic", "") * 2
    assert (batch.group.tolist(), batch.rollout_id) == ([0, 1, 2, 3, 4, 5], None)
    assert batch.rewards.tolist() == [1.0, -1.5, 0.5, 0.0, 1.0, 0.0]
    assert batch.baseline is not None
    assert batch.baseline.tolist() == [6.0, 6.0, 0.0] * 2
    assert [r.ending.cause for r in groups[1].rollouts] == ["it paid critic, and not 'solver'"] * 3  # type: ignore
    metrics = measure_turns(groups[0].rollouts)
    assert (metrics["turns/role_critic_reward_mean"], metrics["turns/role_solver_answers_mean"]) == (-1.5, 2.0)


def test_a_command_finds_the_policy_in_its_environment(tmp_path: Path):
    """Its standard input is the question as JSON; what it prints is its answer, and its last words are the cause."""
    (tmp_path / "act.py").write_text(
        "import json, os, sys, urllib.request\n"
        "task = json.load(sys.stdin)\n"
        "body = {'messages': [{'role': 'user', 'content': sys.argv[1] + task['answer']}]}\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "asked = urllib.request.Request(url, json.dumps(body).encode(), head)\n"
        "print(json.load(urllib.request.urlopen(asked))['choices'][0]['message']['content'] + '!')\n"
        "sys.exit(task['status'])\n"
    )
    graded, engine = Graded(), Parrot([say("4")])
    plan = replace(PLAN, use="", command=("python", str(tmp_path / "act.py"), "{prompt}="))
    rollouts = played(
        plan, [task_of("a", answer="4", status=0), task_of("b", answer="4", status="sad")], engine, graded
    )

    assert sorted(sample.completion for sample in graded.samples) == ["4", "4!"]
    assert "2+2=4" in spelled(engine.asked[0][0])
    assert [r.ending.by for r in rollouts] == ["done", "fault"]  # type: ignore
    assert rollouts[1].ending.cause == "python ended with status 1: sad"  # type: ignore


def test_a_server_is_told_where_to_call():
    """It gets question, columns, address and key, and its reply is the answer and the reward.

    A call that it leaves under way is given up: a conversation without an answer is no segment.
    """
    from gnomon.core.http import LoopbackServer

    async def body() -> None:
        import socket
        from http import HTTPStatus

        async def act(body: Any) -> Any:
            client = openai.AsyncOpenAI(base_url=body["base_url"], api_key=body["api_key"], max_retries=0)
            messages = [{"role": "user", "content": body["prompt"] + body["columns"]["more"]}]
            said = await client.chat.completions.create(model="m", messages=messages)  # type: ignore
            engine.waiting = asyncio.Event()
            messages[0]["content"] = "another"
            left.append(asyncio.ensure_future(client.chat.completions.create(model="m", messages=messages)))  # type: ignore
            while len(engine.asked) == 1:
                await asyncio.sleep(0)
            return HTTPStatus.OK, {"answer": f"{said.choices[0].message.content}!", "reward": 0.25}

        left: list[asyncio.Future[Any]] = []
        listening, graded, engine = socket.create_server(("127.0.0.1", 0)), Graded(), Parrot([say("4")])
        serving = asyncio.ensure_future(LoopbackServer(lambda path, headers: act).serve(listening))
        plan = replace(PLAN, use="", server=f"http://127.0.0.1:{listening.getsockname()[1]}/act")
        async with AgentEndpoint() as endpoint:
            agent = AgentRollout(engine, endpoint, None, TEMPLATES, plan, refused)  # type: ignore
            asking = Rollouter(engine, graded, TEMPLATES.tokenizer.decode, SAMPLING, 1, 7, agent)  # type: ignore
            group = await asking.run_group(task_of(more="="), 3, RolloutTimer())
            assert (group.rollouts[0].grade.reward, len(group.rollouts[0].rows)) == (0.25, 1)
            with pytest.raises(openai.OpenAIError):
                await left[0]
            assert graded.samples[0].completion == "4!"
            serving.cancel()
            await asyncio.wait({serving})
            group = await asking.run_group(task_of(more="="), 3, RolloutTimer())
            assert "ConnectionRefusedError" in str(group.rollouts[0].grade.error)

    run(body())


def test_hostile_agents_break_their_own_rollouts_alone(mine: Path):
    """All at once, beside good ones: each ends with its cause, the others are whole, and nothing is left running."""
    plan = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile", timeout_seconds=60.0, max_concurrent=8)
    good = [task_of(f"good {n}", code="say(); say(); return 1.0") for n in range(3)]
    bad = [task_of(each["name"], code=each["code"]) for each in HOSTILE]
    hangs = [each["by"] == "timeout" for each in HOSTILE]
    late = played(replace(plan, timeout_seconds=2.0), [task for task, hang in zip(bad, hangs, strict=True) if hang])
    early = played(plan, [*(task for task, hang in zip(bad, hangs, strict=True) if not hang), *good])
    rollouts = [(late if hang else early).pop(0) for hang in hangs] + early

    for each, rollout in zip(HOSTILE, rollouts, strict=False):
        ending = rollout.ending
        assert ending is not None
        assert ending.by == each["by"], (each["name"], ending, rollout.grade)
        assert each.get("cause", "") in str(ending.cause), each["name"]
        assert str(rollout.grade.error).startswith(str(each.get("error"))), each["name"]
    for rollout in rollouts[len(HOSTILE) :]:
        assert (rollout.grade.reward, rollout.ending.turns, rollout.ending.by) == (1.0, 2, "done")  # type: ignore


def test_an_engine_that_fails_ends_the_run(mine: Path):
    """It is no agent's doing: the call of a rollout raises what the engine raised, and its process is gone."""
    engine = Parrot([say("4")], error=EngineError("the engine is gone"))
    plan = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile")
    with pytest.raises(EngineError, match="the engine is gone"):
        played(plan, [task_of(code="say(); quietly(say); time.sleep(1000)")], engine)


@pytest.mark.parametrize("cause", ["OSError: [Errno 24] too many open files (test_agent.py", "CancelledError"])
def test_an_endpoint_that_fails_is_no_agent_s_doing(mine: Path, cause: str):
    """The client is told with status 500; the rollout is played again, and is an error with the cause, never graded.

    So it is with an error of the operating system, which is none of the connection, and a task that something ended.
    """

    def opened(ids: Sequence[int]) -> str:
        raise asyncio.CancelledError if cause == "CancelledError" else OSError(24, "too many open files")

    broken = replace(TEMPLATES, opening=opened)

    async def body() -> str:
        async with serving(Parrot([say("4")]), templates=broken) as served, served.openai as client:
            with pytest.raises(openai.InternalServerError) as raised:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
            with pytest.raises(EnvWorkerLost):
                served.session.close()
            return str(raised.value)

    assert f"gnomon's endpoint failed: {cause}" in run(body())
    plan = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile")
    [rollout] = played(plan, [task_of(code="quietly(say); return 1.0")], templates=broken)
    assert rollout.grade.reward is None
    assert f"gnomon's endpoint failed: {cause}" in str(rollout.grade.error)
    assert str(rollout.grade.error).endswith("3 times")


@pytest.mark.slow
def test_an_agent_that_something_stopped_is_played_again(mine: Path, tmp_path: Path):
    """Its time runs out while it stands still, which is no time of its own; one that only waits has had it."""
    stop = f"import os; once = {str(tmp_path / 'once')!r}; say(); first = not os.path.exists(once); open(once, 'w'); "
    stop += "first and os.kill(os.getpid(), 19); return 1.0"
    plan = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile", timeout_seconds=1.0)
    [again] = played(plan, [task_of(code=stop)])
    [waiting] = played(plan, [task_of(code="say(); time.sleep(1000)")])

    assert (again.grade.reward, again.ending.by) == (1.0, "done")  # type: ignore
    assert waiting.ending.by == "timeout"  # type: ignore


def test_an_agent_is_tried_before_a_model_loads(mine: Path):
    """One that never calls is refused with the cause; one that fails on made answers is said."""
    sample = Sample("2+2", "4", columns={"answer": "4"})
    asked = partial(try_agent, questions=[[sample]], templates=TEMPLATES, sampling=SAMPLING)
    assert run(asked(replace(PLAN, use=f"{mine}:adding"))) == ()
    with pytest.raises(ConfigError, match=r"missing 1 required .* 'code'[\s\S]*columns are answer\n.*OPENAI_BASE_URL"):
        run(asked(replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile")))
    failing = replace(PLAN, use=f"{mine.with_name('theirs.py')}:hostile", settings={"code": "say(); 1 / 0"})
    [note] = run(asked(failing))
    assert "fails in 1 of 1 rollouts that were tried: ZeroDivisionError" in note


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"use": ""}, 'kind = "agent" needs use = "path.py:function", command'),
        ({"command": ("a",)}, 'kind = "agent" needs'),
        ({"kind": "class", "command": ("a",)}, 'kind = "class" needs'),
        ({"use": "", "server": "127.0.0.1:9"}, "is no address such as http://"),
        ({"use": "", "server": "http://example.org:80/act"}, "is on another machine"),
        ({"max_calls": 0}, "max_calls"),
    ],
)
def test_what_names_no_agent_is_refused(given: dict[str, Any], said: str):
    """Exactly one of function, command and server; an address on this machine."""
    with pytest.raises(ConfigError, match=said):
        EnvironmentConfig(**{"kind": "agent", "use": "a.py:f", **given})
