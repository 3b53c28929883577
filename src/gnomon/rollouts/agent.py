"""An agent's rollout: a program calls the policy by an interface of OpenAI or Anthropic, and its calls become tokens.

A call whose messages begin with what was said appends the tokens of the new messages behind the tokens that were
sampled: nothing is tokenized again. A call that begins otherwise (a shortened history, another role, other tools) opens
a new segment, a conversation of its own in the same rollout.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import urlsplit

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.http import LOOPBACK, Answer, LoopbackServer, Refused, described, exchange
from gnomon.core.sections import GrammarConfig
from gnomon.core.types import Completion, EndedBy, Ending, Grade, Message, Task
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.grammar import Grammar
from gnomon.engines.stop_strings import cut_at_stop
from gnomon.models.tokenizer import Tokenizer
from gnomon.rewards.base import Sample
from gnomon.rollouts.chat_apis import (
    CHAT_APIS,
    MODEL,
    ApiError,
    ChatAnswer,
    ChatApi,
    ChatCall,
    ChatMessage,
    ChatRequest,
    check_depth,
)
from gnomon.rollouts.env_workers import EnvAnswer, EnvError, EnvWorkerLost, EnvWorkers, answered
from gnomon.rollouts.multi_turn import TRIES, Trajectory, unopened
from gnomon.tasks.base import Further
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.environment import EnvironmentConfig, checked_rewards
from gnomon.tasks.tools import describe_tools, split_calls
from gnomon.tasks.turn_tokens import TurnTokenizer, tells_tools

_MOST_BYTES = 1 << 23
"""Of a request."""
_MOST_CHARACTERS = 128
"""Of a token, on average: a longer text is refused before anything of it is tokenized."""
_REFUSED_CALLS = 200
"""Calls that may be refused before a rollout ends: an agent in a loop."""
_ENDED_KEPT = 4096
"""Ended rollouts whose late callers are told so."""
_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class SegmentMark:
    """Where an answer of a segment ends.

    Attributes:
        messages: Messages up to it, itself included.
        tokens: Tokens of the segment's response up to it.
        is_ended: Whether its last token ends a turn.
    """

    messages: int
    tokens: int
    is_ended: bool


@dataclass
class AgentSegment:
    """A conversation that only grows.

    Attributes:
        said: What its messages say, in order (`ChatMessage.identity`).
        plain: Of a conversation in plain text, its text and its messages after each answer.
        is_busy: Whether a call that extends it is being answered.
    """

    path: Trajectory
    tools: tuple[Mapping[str, Any], ...]
    said: list[tuple[Any, ...]] = field(default_factory=list)
    marks: list[SegmentMark] = field(default_factory=list)
    plain: list[tuple[str, tuple[ChatMessage, ...]]] = field(default_factory=list)
    is_busy: bool = False


@dataclass(frozen=True)
class PolicyTemplates:
    """Messages to the policy's tokens, and its tokens to messages.

    Attributes:
        opening: What the ids before an answer open it with.
    """

    tokenizer: Tokenizer
    turns: TurnTokenizer
    opening: Callable[[Sequence[int]], str] = unopened
    _renderers: dict[str, ChatRenderer] = field(default_factory=dict)

    def prompt(self, request: ChatRequest) -> tuple[int, ...]:
        """Return the tokens of a conversation that begins.

        Raises:
            ConfigError, DatasetError: The chat template does not show all of it.
        """
        if request.messages[0].role == "text":
            return (*self.tokenizer.begin, *self.tokenizer.encode_plain("".join(m.text for m in request.messages)))
        schemas = json.dumps(request.tools)
        # One renderer for each set of tools: agents mostly send the same tools with each call.
        if schemas not in self._renderers:
            if len(self._renderers) > 64:
                self._renderers.clear()
            is_told = tells_tools(self.tokenizer, request.tools)
            told = None if is_told or not request.tools else describe_tools(request.tools)
            self._renderers[schemas] = ChatRenderer(self.tokenizer, None, tuple(request.tools) if is_told else (), told)
        return self._renderers[schemas](
            self._messages(request.messages), Further("the call", switches=self.turns.switches or {})
        )

    def reply(self, messages: Sequence[ChatMessage], is_ended: bool) -> tuple[int, ...]:
        """Return the tokens of messages behind an answer, as `TurnTokenizer.reply`; of plain text, its own."""
        if messages[0].role == "text":
            return tuple(self.tokenizer.encode_plain(messages[0].text))
        return self.turns.reply([(message.role, message.shown) for message in messages], is_ended)

    def _messages(self, messages: Sequence[ChatMessage]) -> list[Message]:
        has_tools = self.turns.has_tool_role
        roles = ["user" if m.role == "tool" and not has_tools else m.role for m in messages]
        return [{"role": role, "content": m.shown} for role, m in zip(roles, messages, strict=True)]


class AgentSession:
    """One rollout's calls of the policy, as the segments that they become.

    Args:
        policy: Engine, templates and limits.
        key: A call's number to the key of its draws.
        sampling: How all of its tokens are drawn.

    Attributes:
        over: Done when the agent is to be ended; with an exception when the run is to fail.
        ended_by: The limit that ended it, None for none.
        latest: The policy's latest answer; None before the first.
        is_cut: Whether its latest call found no room for an answer, or for the rest of one.
    """

    def __init__(self, policy: "AgentRollout", key: Callable[[int], int], sampling: Sampling) -> None:
        # Any process of the machine can reach a loopback port; only an agent that was given the key is answered.
        self.key = secrets.token_urlsafe(24)
        self.segments: list[AgentSegment] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended_by: EndedBy | None = None
        self.cause: str | None = None
        self.latest: str | None = None
        self.is_cut = False
        self._policy, self._draw, self._sampling = policy, key, sampling
        self._calls: set[Answer] = set()
        self._generating: set[asyncio.Future[list[Completion]]] = set()
        self._is_over = False
        self._asking = self._asked = self._answered = self._refused = 0
        self._prompts: Counter[int] = Counter()
        self._at_work: tuple[list[float], float] | None = None

    @property
    def answered(self) -> list[AgentSegment]:
        """The segments with an answer: one whose first call was under way at the end has none."""
        return [segment for segment in self.segments if segment.marks]

    @property
    def turns(self) -> int:
        """Answers of the policy."""
        return sum(len(segment.marks) for segment in self.segments)

    @property
    def seed(self) -> int:
        """Of what the agent and rewards draw."""
        return self._draw(0)

    def admit(self, method: str, path: str) -> Answer:
        """Return what answers a call at a path.

        Raises:
            Refused: There is no such path, not by this method, or as many calls are under way as may be.
        """
        api = CHAT_APIS.get(path)
        if api is None and path != "/v1/models":
            raise Refused(HTTPStatus.NOT_FOUND, _flat(f"no {path} here; there are {', '.join(CHAT_APIS)}"))
        if method != (wanted := "GET" if api is None else "POST"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, _flat(f"{method[:20]} {path} is not answered; use {wanted}"))
        if api is None:
            answer: Answer = partial(self._models)  # one of each call, by which its connection is told from others
            return answer
        most = self._policy.plan.max_calls
        # Refusals count, so that an agent which calls in a loop ends.
        if len(self._calls) >= most:
            self._refuse()
            reason = f"{most} calls are under way, as many as may be (environment.max_calls)"
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, api.refuse(ApiError("max_calls", reason)))
        answer = partial(self._answer, api)
        self._calls.add(answer)
        return answer

    def release(self, answer: Answer) -> None:
        """Forget a call that is over."""
        self._calls.discard(answer)

    async def idle(self, seconds: float) -> None:
        """Return when the agent has neither been answered nor waited for an answer for that long.

        Time in which this process stood still does not count.
        """
        left, answered = seconds, self._answered
        # Ticks instead of one long sleep: a process that was stopped (a debugger, a laptop's lid) adds one tick at
        # most.
        while left > 0:
            waited = min(left, _TICK_SECONDS)
            await asyncio.sleep(waited)
            left -= waited
            if self._asking or self._answered != answered:
                left, answered = seconds, self._answered

    async def _models(self, body: Any) -> tuple[HTTPStatus, Any]:
        return HTTPStatus.OK, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "gnomon"}]}

    async def _answer(self, api: ChatApi, body: Any) -> tuple[HTTPStatus, Any]:
        try:
            request = await _read(api, body, self._sampling)
            answer = await self.answer(request)
            return HTTPStatus.OK, api.reply(request, answer)
        except ApiError as error:
            self._refuse()
            return error.status, api.refuse(error)

    def _refuse(self) -> None:
        self._refused += 1
        if self._refused >= _REFUSED_CALLS:
            self._end("flood", f"{self._refused} calls that were refused")

    def close(self) -> None:
        """Answer no further call, and give up those that are being answered.

        Raises:
            Exception: What the engine raised.
        """
        self.clock()
        self._is_over = True
        # Cancelling them frees the engine for other rollouts at once.
        for generating in self._generating:
            generating.cancel()
        if self.over.done():
            self.over.result()

    def fail(self, why: str) -> str:
        """End the rollout for an error of this process, which is no agent's and is played again; return what to say."""
        if self._is_over:
            return "this rollout has ended"
        self._is_over, said = True, f"called the policy, and gnomon's endpoint failed: {why}"
        if not self.over.done():
            self.over.set_exception(EnvWorkerLost(said))
        return f"it {said}"

    def clock(self) -> None:
        """Count what the agent did behind its latest answer among that answer's seconds."""
        if self._at_work is not None and not self._asking:
            seconds, answered = self._at_work
            seconds[-1] += time.monotonic() - answered
        self._at_work = None

    def _end(self, by: EndedBy, cause: str | None, is_at_once: bool = True) -> None:
        if self.ended_by is None and not self._is_over:
            self.ended_by, self.cause = by, cause
        self._is_over = True
        if is_at_once and not self.over.done():
            self.over.set_result(None)

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Return the policy's answer, and keep its tokens.

        Raises:
            ApiError: The call cannot be answered: a limit is reached, or the template cannot show it.
        """
        # Not at once: the agent may still return its reward after its last answer.
        if self._asked >= self._policy.plan.max_turns or self._is_over:
            self._end("turns", None, is_at_once=False)
            raise ApiError("rollout_over", f"this rollout is over ({self.cause or 'environment.max_turns'}); end here")
        # Before anything is tokenized, which is the slow part.
        self._check_size(request)
        request = self._continued(request)
        segment, before = self._placed(request)
        left = self._room(segment, before)
        self.clock()
        self._asked, self._asking, segment.is_busy = self._asked + 1, self._asking + 1, True
        if not segment.marks:
            self.segments.append(segment)
        try:
            begun = time.monotonic()
            completion, asked = await self._generated(request, before, left)
            answer = self._kept(segment, request, before, completion, asked)
            answered = time.monotonic()
            segment.path.turn_seconds[-1] = answered - begun
            self._at_work = segment.path.turn_seconds, answered
        finally:
            self._asking, segment.is_busy = self._asking - 1, False
            if not segment.marks:
                self.segments.remove(segment)
        # The latest call decides: an agent that goes on in a shorter conversation was not cut off.
        self.is_cut = completion.stop == "length" and len(completion.tokens) >= left
        return answer

    async def _generated(self, request: ChatRequest, before: tuple[int, ...], left: int) -> tuple[Completion, Sampling]:
        """Return the policy's tokens behind ``before``, and how they were asked for.

        Raises:
            ApiError: The engine cannot, which also ends the run unless the call alone is at fault.
        """
        # The smallest of the three limits: what is left, a turn's, and the client's own.
        limit = min(left, self._policy.plan.max_turn_tokens or left, request.max_tokens or left)
        asked = replace(_under(self._sampling, request), max_completion_length=limit)
        generating = asyncio.ensure_future(self._policy.engine.generate(before, [self._key(before)], asked))
        self._generating.add(generating)
        try:
            [completion] = await generating
        except ConfigError as error:
            code = "invalid_request" if request.grammar.is_set else "context_length_exceeded"
            raise ApiError(code, str(error)) from error
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)
            raise ApiError("engine", "the policy cannot answer", HTTPStatus.FORBIDDEN) from error
        finally:
            generating.cancel()
            self._generating.discard(generating)
        return completion, asked

    def _kept(
        self, segment: AgentSegment, request: ChatRequest, before: tuple[int, ...], done: Completion, asked: Sampling
    ) -> ChatAnswer:
        """Append what the client said and what the policy answered to the segment; return the answer."""
        path, templates = segment.path, self._policy.templates
        text = templates.opening(before) + cut_at_stop(templates.tokenizer.decode(done.tokens), done, asked)
        shown, calls = split_calls(text) if request.tools and request.reads_calls else (text, ())
        answer = ChatAnswer(
            number=self._answered,
            text=shown,
            calls=tuple(ChatCall(c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in calls),
            is_cut=done.stop == "length",
            prompt_tokens=len(before),
            completion_tokens=len(done.tokens),
        )
        self._answered, self.latest = self._answered + 1, text
        new = request.messages[len(segment.said) :] if segment.marks else ()
        # The tokens between the former end of the segment and this answer: what the client said since.
        path.add_reply(before[len(path.prompt) + len(path.tokens) :], [(m.role, m.shown) for m in new])
        path.add_answer(done, text)
        spoken = (*request.messages, answer.message)
        segment.said = [message.identity for message in spoken]
        if spoken[0].role == "text":
            segment.plain.append(("".join(message.text for message in spoken), spoken))
        is_ended = done.tokens[-1] in templates.tokenizer.stop_ids
        segment.marks.append(SegmentMark(len(segment.said), len(path.tokens), is_ended))
        return answer

    def _continued(self, request: ChatRequest) -> ChatRequest:
        """Return plain text that begins with what was said as those messages and the rest."""
        text = request.messages[0].text
        if request.messages[0].role != "text":
            return request
        # Clients of plain text send everything again, so what was said is a prefix of the new text.
        known = [each for segment in self.segments for each in segment.plain if text.startswith(each[0])]
        if not known:
            return request
        # The longest text that was said is the latest state of its conversation.
        begun, messages = max(known, key=lambda each: len(each[0]))
        return replace(request, messages=(*messages, ChatMessage("text", text[len(begun) :])))

    def _found(self, request: ChatRequest) -> tuple[AgentSegment, SegmentMark] | None:
        """Return the longest beginning of the messages that was said, by its segment and its last answer."""
        asked = [message.identity for message in request.messages]
        # Most messages first; of equals one whose tip is free, which can be extended without a new segment.
        best: tuple[int, bool, AgentSegment, SegmentMark] | None = None
        for segment in self.segments:
            if segment.tools != request.tools:
                continue
            for mark in segment.marks:
                # An extension of the latest answer grows its segment; anything else opens another one.
                is_tip = mark is segment.marks[-1] and not segment.is_busy
                is_better = best is None or (mark.messages, is_tip) > best[:2]
                if is_better and mark.messages < len(asked) and segment.said[: mark.messages] == asked[: mark.messages]:
                    best = mark.messages, is_tip, segment, mark
        return None if best is None else best[2:]

    def _placed(self, request: ChatRequest) -> tuple[AgentSegment, tuple[int, ...]]:
        """Return the segment that a call belongs to, a new one or not, and all tokens before its answer.

        Raises:
            ApiError: The template does not show the messages, or they are too long.
        """
        plan, templates, version = self._policy.plan, self._policy.templates, self._policy.engine.version
        found = self._found(request)
        try:
            if found is None:
                before = templates.prompt(request)
            else:
                segment, mark = found
                reply = templates.reply(request.messages[mark.messages :], mark.is_ended)
                # Plain text that goes on behind an answer has no end of turn in it.
                kept = mark.tokens - (mark.is_ended and request.messages[0].role == "text")
                before = (*segment.path.prompt, *segment.path.tokens[:kept], *reply)
        except (ConfigError, DatasetError) as error:
            raise ApiError("invalid_request", str(error)) from error
        is_tip = found is not None and found[1] is found[0].marks[-1] and not found[0].is_busy
        if found is not None and is_tip and kept == found[1].tokens:
            if len(reply) > plan.max_reply_tokens:
                self._end("flood", f"a reply of {len(reply)} tokens, more than {plan.max_reply_tokens}")
                raise ApiError("flood", f"{self.cause} (environment.max_reply_tokens)")
            return found[0], before
        # A new segment begins with all tokens before the answer as its prompt, which is not trained on.
        return AgentSegment(Trajectory(before, version, seed=self._draw(0), role=_role(request)), request.tools), before

    def _check_size(self, request: ChatRequest) -> None:
        """Refuse a text that no context holds: to tokenize it would hold up all other rollouts.

        Raises:
            ApiError: None; an agent may shorten what it says and call again.
        """
        context = self._policy.templates.tokenizer.context_length
        size = sum(len(m.shown) + _MOST_CHARACTERS for m in request.messages) + len(json.dumps(request.tools))
        if context is not None and size > _MOST_CHARACTERS * context:
            self.is_cut = True
            raise ApiError("context_length_exceeded", f"the call is longer than the model's context of {context}")

    def _room(self, segment: AgentSegment, before: Sequence[int]) -> int:
        """Return how many tokens an answer behind ``before`` may have.

        Raises:
            ApiError: None; an agent may shorten what it says and call again.
        """
        # The completion budget is of the whole segment: all that follows its first prompt.
        most = self._sampling.max_completion_length
        left, limit = most + len(segment.path.prompt) - len(before), f"sampling.max_completion_length = {most}"
        context = self._policy.templates.tokenizer.context_length
        if context is not None and context - len(before) < left:
            left, limit = context - len(before), f"the model's context of {context}"
        longest = self._policy.plan.max_prompt_tokens
        if longest and not segment.marks and len(before) > longest:
            left, limit = 0, f"environment.max_prompt_tokens = {longest}"
        if left < 1:
            self.is_cut = True
            raise ApiError(
                "context_length_exceeded", f"a conversation of {len(before)} tokens leaves no room within {limit}"
            )
        return left

    def _key(self, before: Sequence[int]) -> int:
        """Return the key of an answer's draws, which depends on what was said and not on the order of calls."""
        # 56 bits of the prompt, then 8 of the count: the same prompt called again draws afresh.
        digest = hashlib.blake2b(array("q", before).tobytes(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        self._prompts[number] += 1
        return self._draw((number << 8) + self._prompts[number])


async def _read(api: ChatApi, body: Any, sampling: Sampling) -> ChatRequest:
    try:
        json.dumps(body, ensure_ascii=False).encode()
        check_depth(body)
        request = api.read(body, sampling)
        await _check_asked(request, sampling)
    except UnicodeEncodeError as error:
        raise ApiError("invalid_request", "a text has half a surrogate pair") from error
    except ConfigError as error:
        raise ApiError("invalid_request", str(error)) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"not understood: {type(error).__name__}: {error}") from error
    return request


async def _check_asked(request: ChatRequest, sampling: Sampling) -> None:
    """Refuse what no answer can be drawn by; a schema is worked out in a thread, so that no other call waits for it.

    Raises:
        ApiError, ConfigError: Naming what is in the way.
    """
    asked, why = _under(sampling, request), ""
    if not request.grammar.is_set:
        return
    if request.tools and request.reads_calls:
        why = "an answer that is held to JSON calls no tool; leave out its format or the tools"
    elif sampling.grammar not in (GrammarConfig(), request.grammar):
        why = f"answers of this run are {sampling.grammar.words} (sampling.grammar); leave out the format"
    elif sampling.top_logprobs is not None:
        why = "this run compares whole distributions, of which a format leaves nothing for most tokens; leave it out"
    if why:
        raise ApiError("unsupported_parameter", why)
    # Compiled grammars are cached, so the engine finds this one ready.
    await asyncio.to_thread(Grammar.of, asked)


def _under(sampling: Sampling, request: ChatRequest) -> Sampling:
    """Return how an answer is drawn that a client asks for.

    Raises:
        ConfigError: The stop texts of both together cannot be looked for.
    """
    grammar = request.grammar if request.grammar.is_set else sampling.grammar
    return replace(sampling, grammar=grammar, stop=(*sampling.stop_strings, *request.stop))


def _role(request: ChatRequest) -> str:
    """Return the model that a client asks for, where that can name a role."""
    return request.model if request.model != MODEL and re.fullmatch(r"[\w.-]{1,40}", request.model) else ""


def _flat(message: str) -> dict[str, Any]:
    """Return an error that clients of both kinds show."""
    error = {"type": "invalid_request_error", "message": message, "param": None, "code": None}
    return {"type": "error", "error": error}


class AgentEndpoint:
    """Where the agents of a run call the policy: one port of the loopback interface, an address and a key a rollout."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._ended: dict[str, str] = {}
        self._nobody = secrets.token_urlsafe(24)
        self._server = LoopbackServer(self._admit, self._let_go, _flat, _MOST_BYTES, self._failed)
        self._admitted: dict[Answer, AgentSession] = {}

    async def __aenter__(self) -> Self:
        listening = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._address = f"http://{LOOPBACK}:{listening.getsockname()[1]}"
        self._serving = asyncio.ensure_future(self._server.serve(listening))
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._serving.cancel()
        await asyncio.wait({self._serving})

    @contextlib.contextmanager
    def open(self, session: AgentSession) -> Iterator[dict[str, str]]:
        """Answer a session's calls during the block; give the environment variables by which clients find it."""
        number = secrets.token_hex(8)
        self._sessions[number] = session
        root = f"{self._address}/{number}"
        try:
            yield {
                # Old and new names of OpenAI's clients, and Anthropic's, whose client adds /v1 itself.
                "OPENAI_BASE_URL": f"{root}/v1",
                "OPENAI_API_BASE": f"{root}/v1",
                "OPENAI_API_KEY": session.key,
                "OPENAI_MODEL": MODEL,
                "ANTHROPIC_BASE_URL": root,
                "ANTHROPIC_API_KEY": session.key,
                "ANTHROPIC_MODEL": MODEL,
            }
        finally:
            del self._sessions[number]
            self._ended[number] = session.key
            if len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    def _admit(self, path: str, headers: Mapping[str, str]) -> Answer:
        """Check the key of a rollout's address.

        Raises:
            Refused: It is another, the rollout is over, or as `AgentSession.admit`.
        """
        number, _, rest = path.partition("?")[0].lstrip("/").partition("/")
        session = self._sessions.get(number)
        # An unknown address is compared with a key that nobody has, so that it takes as long as a wrong key.
        key = self._ended.get(number, self._nobody) if session is None else session.key
        brought = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(brought.encode(), key.encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, _flat("wrong key or address; both are a rollout's own"))
        if session is None:
            raise Refused(HTTPStatus.GONE, _flat("this rollout has ended"))
        try:
            answer = session.admit(headers[":method"], f"/{rest}")
        except Refused:
            raise
        except Exception as error:
            why = session.fail(described(error))
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, _flat(why)) from error
        self._admitted[answer] = session
        return answer

    def _failed(self, answer: Answer | None, error: BaseException) -> dict[str, Any]:
        """End the rollout whose call could not be answered; a caller without its key ends none."""
        why = described(error)
        return _flat(why if answer is None else self._admitted[answer].fail(why))

    def _let_go(self, answer: Answer) -> None:
        self._admitted.pop(answer).release(answer)


@dataclass(frozen=True)
class AgentRollout:
    """Runs an agent for each rollout; implements what `Rollouter` asks of a conversation.

    An agent that fails before the policy said anything is an error, and so is one that never calls. After that every
    end is trained on, for the reason that `MultiTurnRollout` gives. Its process ends with all that it started.

    Attributes:
        env_workers: The processes of a function or a command; None where a server is the agent.
        refuse: The grade of a rollout that cannot be trained on, counted against the error budget.
        reward_weight: Of the agent's own reward in the grade; all of it comes at the end, so it divides nothing.
        count: Is told of each rollout what fault ended it, None for any other end; raises when a run should end.
    """

    engine: Engine
    endpoint: AgentEndpoint
    env_workers: EnvWorkers | None
    templates: PolicyTemplates
    plan: EnvironmentConfig
    refuse: Callable[[Sample, str], Grade]
    reward_weight: float = 1.0
    count: Callable[[str | None], None] = lambda cause: None

    async def run(self, task: Task, key: Callable[[int], int], sampling: Sampling) -> Trajectory:
        """Return the trajectory of one rollout, its first segment; never raises for what an agent does.

        Args:
            task: What the agent is told, by its text and columns.
            key: A call's number to the key of its draws.
            sampling: How its tokens are drawn.
        """
        lost: list[str] = []
        templates = replace(self.templates, turns=replace(self.templates.turns, switches=task.switches))
        while len(lost) < TRIES:
            # A fresh session for each try: what a lost process had said is not trained on.
            session = AgentSession(replace(self, templates=templates), key, sampling)
            try:
                return await self._play(task, session, is_alone=bool(lost))
            except EnvWorkerLost as error:
                lost.append(str(error))
        path = Trajectory(task.prompt, self.engine.version, seed=key(0))
        path.error = f"agent: its process {lost[-1]}, {len(lost)} times"
        path.ending = Ending(0, "fault", path.error)
        return path

    async def _play(self, task: Task, session: AgentSession, is_alone: bool) -> Trajectory:
        """Return what one process of the agent lived through.

        Raises:
            EnvWorkerLost: If something else ended it.
        """
        said, cause = EnvAnswer((), 0.0, True), None
        by: EndedBy = "done"
        with self.endpoint.open(session) as variables:
            try:
                said = await self._acted(task, session, variables, is_alone)
            except EnvError as fault:
                by, cause = fault.by, fault.cause
            finally:
                session.close()
        # Nothing of the policy's to train on.
        if not session.answered:
            path = Trajectory(task.prompt, self.engine.version, seed=session.seed)
            cause = session.cause or cause or "it never had an answer of the policy"
            path.error, path.ending = f"agent: {cause}", Ending(0, "fault" if by == "done" else by, cause)
            return path
        # A limit that ended the rollout names the end, whatever the agent returned after it.
        if session.ended_by is not None:
            by, cause = session.ended_by, session.cause
        elif by == "done" and session.is_cut:
            by = "tokens"
        parts = self._parts(session, said.by_role is not None or self.plan.is_self_play)
        # An agent that pays by role must name each role that it called.
        unpaid = [part.role for part in parts if said.by_role is not None and (part.role or MODEL) not in said.by_role]
        if unpaid:
            by, cause = "fault", f"it paid {', '.join(said.by_role or ()) or 'none'}, and not '{unpaid[0] or MODEL}'"
        self.count(cause if by == "fault" else None)
        for part in parts:
            paths = [part, *part.further]
            part.reward = said.reward if said.by_role is None else said.by_role.get(part.role or MODEL, 0.0)
            part.answer = next((text for _, text in said.messages), part.answer)
            # All of an agent's reward comes at its end.
            paths[-1].turn_rewards[-1] += part.reward
            for path in paths:
                path.ending = Ending(sum(len(each.turn_ends) for each in paths), by, cause)
        parts[0].others = parts[1:]
        return parts[0]

    async def _acted(
        self, task: Task, session: AgentSession, variables: Mapping[str, str], is_alone: bool
    ) -> EnvAnswer:
        """Return what the agent returned.

        Raises:
            EnvError: It failed, or took too long.
            EnvWorkerLost: As `_play`.
        """
        seed = session.seed
        columns = {"seed": seed % 2**63, **task.columns}
        if self.env_workers is None:
            return await self._within(session, self._served(task, columns, variables))
        async with self.env_workers.alone() if is_alone else self.env_workers.open() as env_worker:
            try:
                return await self._within(session, env_worker.reset(task.text, columns, seed, variables))
            except EnvError as error:
                if error.by != "timeout":
                    raise
                raise await env_worker.blame(error.cause) from error
            finally:
                env_worker.is_sound = False  # what it started ends with it

    async def _within(self, session: AgentSession, work: Coroutine[Any, Any, EnvAnswer]) -> EnvAnswer:
        """Return what the agent returned, or end it.

        Raises:
            EnvError: It took too long, or reached a limit that ends it.
        """
        seconds = self.plan.timeout_seconds
        acting, idle = asyncio.ensure_future(work), asyncio.ensure_future(session.idle(seconds))
        # Whichever comes first: the agent's end, too long a silence, or a limit.
        parts: list[asyncio.Future[Any]] = [acting, idle, session.over]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if session.over.done():
                session.over.result()
                raise EnvError(session.ended_by or "flood", session.cause or "")
            if acting.done():
                return acting.result()
            raise EnvError("timeout", f"neither a call nor its end within {seconds:g} s")
        finally:
            for part in (acting, idle):
                part.cancel()
            await asyncio.gather(acting, idle, return_exceptions=True)

    async def _served(self, task: Task, columns: Mapping[str, Any], variables: Mapping[str, str]) -> EnvAnswer:
        """Return the reply of a server that is the agent.

        Raises:
            EnvError: It cannot be reached, or its reply is none.
        """
        parts = urlsplit(self.plan.server)
        body = {
            "prompt": task.text,
            "columns": columns,
            "base_url": variables["OPENAI_BASE_URL"],
            "api_key": variables["OPENAI_API_KEY"],
        }
        try:
            status, said = await exchange(str(parts.hostname), parts.port or 80, parts.path or "/", "", body)
            answer, reward = said.get("answer"), checked_rewards(said.get("reward"))
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise EnvError("fault", f"the server {self.plan.server}: {type(error).__name__}: {error}") from error
        if status != HTTPStatus.OK or not isinstance(answer, str | None):
            raise EnvError("fault", f"the server {self.plan.server} replied with status {status}: {str(said)[:200]}")
        return answered((("assistant", answer),) if answer else (), reward, True)

    def _parts(self, session: AgentSession, is_by_role: bool) -> list[Trajectory]:
        """Return the first segment with the others behind it; the policy's latest answer is the rollout's.

        Args:
            is_by_role: Returns that of each role by itself, whose answer is its own latest.
        """
        played: dict[str, list[Trajectory]] = {}
        for path in (segment.path for segment in session.answered):
            path.text = self.templates.opening(path.prompt) + self.templates.tokenizer.decode(path.tokens)
            played.setdefault(path.role if is_by_role else "", []).append(path)
        for first, *further in played.values():
            first.further, first.is_of_role = further, is_by_role
            first.answer = None if is_by_role else session.latest
        return [paths[0] for paths in played.values()]
