"""What clients ask for: answers as JSON, results of tools in any order, and paths by wrong methods."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pydantic
import pytest
from tests.rollouts.test_agent import ADD, EOS, PLAN, TEMPLATES, run, serving

from gnomon.core.sections import GrammarConfig
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.rewards.base import Sample
from gnomon.rollouts.agent_trial import try_agent
from gnomon.rollouts.chat_apis import CHAT_APIS, ApiError
from gnomon.testing import trial_model

SAMPLING = Sampling(max_completion_length=600, stop_ids=(EOS,), tokenizer=trial_model())


class Total(pydantic.BaseModel):
    """What an answer is to be."""

    total: int
    sure: bool


def schema(of: dict[str, Any]) -> dict[str, Any]:
    """A schema as OpenAI's chat completions take it."""
    return {"type": "json_schema", "json_schema": {"name": "total", "schema": of}}


@asynccontextmanager
async def answering(sampling: Sampling = SAMPLING):
    """A tiny model that answers one rollout's calls."""
    engine = LocalEngine(tiny_model(0, TinyConfig(context_length=1000)))
    try:
        async with serving(engine, sampling=sampling) as served:  # type: ignore[arg-type]
            yield served
    finally:
        await engine.close()


def test_each_interface_answers_in_its_form():
    """Official clients parse what they asked for; a conversation goes on with the parsed answer in one segment."""

    async def body() -> None:
        async with answering() as served, served.openai as client, served.anthropic as other:
            said: list[Any] = [{"role": "user", "content": "q"}]
            first = await client.chat.completions.parse(model="m", messages=said, response_format=Total)
            assert isinstance(first.choices[0].message.parsed, Total)
            told = {"role": "assistant", "content": first.choices[0].message.content, "parsed": {"total": 1}}
            said += [told, {"role": "user", "content": "and?"}]
            await client.chat.completions.create(
                model="m", messages=said, response_format={"type": "text"}, max_tokens=3
            )
            assert len(served.session.segments) == 1
            answered = await client.responses.parse(model="m", input="r", text_format=Total)
            assert isinstance(answered.output_parsed, Total)
            asked: Any = [{"role": "user", "content": "s"}]
            read = await other.messages.parse(model="m", max_tokens=300, messages=asked, output_format=Total)
            assert isinstance(read.parsed_output, Total)
            free = {"messages": asked, "response_format": {"type": "json_object"}, "stop": ["}"]}
            answer = await client.chat.completions.create(model="m", **free)
            assert str(answer.choices[0].message.content).startswith("{")

    run(body())


def test_both_log_probabilities_of_a_formatted_answer_are_kept():
    """`logprobs` are under the schema, and no lower than `full_logprobs`, the policy's own; free answers have one."""

    async def body() -> list[tuple[float, float]]:
        async with answering() as served, served.openai as client:
            asked: Any = {"model": "m", "messages": [{"role": "user", "content": "q"}], "max_tokens": 40}
            await asyncio.gather(
                client.chat.completions.create(**asked, response_format=schema({"enum": [True, False]})),
                client.chat.completions.create(**asked),
            )
            formatted, free = sorted((s.path for s in served.session.segments), key=lambda p: len(p.tokens))
            assert bytes(formatted.tokens[:-1]).decode() in ("true", "false")
            assert list(free.logprobs) == list(free.full_logprobs)
            return list(zip(formatted.logprobs, formatted.full_logprobs, strict=True))

    pairs = run(body())
    assert all(own > full + 1 for own, full in pairs)
    assert pairs[-1][0] == pytest.approx(0, abs=1e-5)  # nothing but the end may follow


@pytest.mark.parametrize(
    ("asked", "sampling", "said"),
    [
        ({"response_format": schema({"type": "object"}), "tools": [ADD]}, SAMPLING, "JSON calls no tool; leave out"),
        ({"response_format": schema({"type": "foo"})}, SAMPLING, "cannot be used: Invalid type: foo"),
        ({"response_format": schema("answer.json")}, SAMPLING, "is 'answer.json', which is of another type"),  # type: ignore[arg-type]
        ({"response_format": schema({"$ref": "http://127.0.0.1:9/schema"})}, SAMPLING, "does not fetch"),
        ({"response_format": schema({"enum": ["a" * 2_000_000]})}, SAMPLING, "it may have"),
        ({"response_format": {"type": "grammar"}}, SAMPLING, "response_format is of type 'grammar'; there are text"),
        (
            {"response_format": {"type": "json_object"}},
            replace(SAMPLING, grammar=GrammarConfig(regex="a+")),
            "answers of this run are text of the expression 'a+'",
        ),
        (
            {"response_format": {"type": "json_object"}},
            replace(SAMPLING, top_logprobs=0),
            "compares whole distributions",
        ),
        ({"stop": ["\N{REPLACEMENT CHARACTER}"]}, SAMPLING, "that character stands for bytes"),
        ({"stop": ["b"]}, replace(SAMPLING, stop=tuple("a" * n for n in range(1, 65))), "64 at most"),
    ],
)
def test_a_form_that_cannot_be_right_is_refused(asked: dict[str, Any], sampling: Sampling, said: str):
    """With status 400 and what is in its way; the rollout goes on."""

    async def body() -> None:
        async with answering(sampling) as served, served.openai as client:
            plain: Any = {"model": "m", "messages": [{"role": "user", "content": "q"}], "max_tokens": 2}
            with pytest.raises(openai.BadRequestError) as told:
                await client.chat.completions.create(**plain, **asked)
            assert said in told.value.message
            assert not served.session.over.done()

    run(body())


def test_a_schema_that_ends_in_nothing_fails_its_own_call():
    """Of a text that needs a token which ends answers; what the engine answers beside it is as it is alone."""
    sampling = replace(SAMPLING, stop_ids=(EOS, ord("b")))
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "q"}], "max_tokens": 200}

    async def body(*forms: Any) -> list[Any]:
        async with answering(sampling) as served, served.openai as client:
            calls = [client.chat.completions.create(**asked, response_format=form) for form in forms]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert not served.session.over.done()
            return [str(one) if isinstance(one, Exception) else one.choices[0].message.content for one in found]

    long = schema({"enum": ["a" * 80]})
    beside, failed = run(body(long, schema({"enum": ["a" * 70 + "b"]})))
    assert "sampling.grammar ends in nothing after 71 tokens of an answer" in failed
    assert [beside] == run(body(long))
    assert json.loads(beside.rstrip("b")) == "a" * 80


AGENT = """
import json, openai

def act(prompt):
    asked = {"model": "m", "messages": [{"role": "user", "content": prompt}], "response_format": {"type": "FORM"}}
    with openai.OpenAI(max_retries=0) as client:
        return float(len(json.loads(client.chat.completions.create(**asked).choices[0].message.content)))
"""


@pytest.mark.parametrize(("form", "grammar"), [("json_object", None), ("text", '{"type": "object"}')])
def test_an_agent_of_json_is_tried_with_json(form: str, grammar: str | None, tmp_path: Path):
    """Made answers that break its format, or the run's grammar, are others that obey."""
    agent = tmp_path / "mine.py"
    agent.write_text(AGENT.replace("FORM", form))
    plan = replace(PLAN, use=f"{agent}:act")
    samples = [Sample("q", text, {}) for text in ("no JSON", '{"total": 3}')]

    asked = replace(SAMPLING, grammar=GrammarConfig(schema=grammar))
    assert run(try_agent(plan, [samples], TEMPLATES, asked)) == ()


CALLS = [("call_0_0", '{"a": 1}'), ("call_0_1", '{"a": 2}')]


def _by_chat(order: Sequence[int]) -> tuple[str, dict[str, Any]]:
    calls = [{"id": i, "type": "function", "function": {"name": "add", "arguments": a}} for i, a in CALLS]
    results = [{"role": "tool", "tool_call_id": CALLS[n][0], "content": f"r{n}"} for n in order]
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}, *results]
    return "/v1/chat/completions", {"messages": asked}


def _by_responses(order: Sequence[int]) -> tuple[str, dict[str, Any]]:
    calls = [{"type": "function_call", "call_id": i, "name": "add", "arguments": a} for i, a in CALLS]
    results = [{"type": "function_call_output", "call_id": CALLS[n][0], "output": f"r{n}"} for n in order]
    return "/v1/responses", {"input": [{"role": "user", "content": "q"}, *calls, *results]}


def _by_messages(order: Sequence[int]) -> tuple[str, dict[str, Any]]:
    calls = [{"type": "tool_use", "id": i, "name": "add", "input": json.loads(a)} for i, a in CALLS]
    results = [{"type": "tool_result", "tool_use_id": CALLS[n][0], "content": f"r{n}"} for n in order]
    said = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return "/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "q"}, *said]}


@pytest.mark.parametrize("form", [_by_chat, _by_responses, _by_messages])
def test_results_of_tools_stand_in_the_order_of_their_calls(
    form: Callable[[Sequence[int]], tuple[str, dict[str, Any]]],
):
    """Whichever came first, as a template shows no ids; of another call, or two of one, they are refused."""

    def read(*order: int) -> list[str]:
        path, body = form(order)
        return [message.text for message in CHAT_APIS[path].read(body, SAMPLING).messages if message.role == "tool"]

    assert read(1, 0) == read(0, 1) == ["r0", "r1"]
    assert read(1) == ["r1"]
    with pytest.raises(ApiError, match="one result at most for each of these"):
        read(0, 0)
    path, body = form([0])
    body = json.loads(json.dumps(body).replace("call_0_0", "call_7_7", 1))
    with pytest.raises(ApiError, match=r"are of the calls .*'call_0_0'.*, and the answer before made .*'call_7_7'"):
        CHAT_APIS[path].read(body, SAMPLING)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("HEAD", "/v1/messages", 405),
        ("DELETE", "/v1/responses", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models", 200),
    ],
)
def test_a_path_is_answered_by_its_own_method_alone(method: str, path: str, status: int):
    """Nothing is drawn for another, which a client sends by mistake; two at once are two calls."""

    async def body() -> list[int]:
        async with answering() as served:
            root = urlsplit(served.variables["ANTHROPIC_BASE_URL"])
            text = json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 2})
            key = served.variables["ANTHROPIC_API_KEY"]
            head = f"{method} {root.path}{path} HTTP/1.1\r\nx-api-key: {key}\r\ncontent-length: {len(text)}\r\n\r\n"

            async def status() -> int:
                reader, writer = await asyncio.open_connection(root.hostname, root.port)
                writer.write((head + text).encode())
                said = (await reader.read()).split()[1]
                writer.close()
                return int(said)

            found = await asyncio.gather(status(), status())
            assert not served.session.segments
            return found

    assert run(body()) == [status, status]
