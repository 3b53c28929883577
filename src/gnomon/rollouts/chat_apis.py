"""The interfaces that agents call a model by, read into one request and written from one answer. No torch.

OpenAI's chat completions, completions and responses and Anthropic's messages, streamed or not. What would change the
distribution that tokens are drawn from is refused: the learner scores every token under the run's own sampling, and a
token that was drawn otherwise has another log-probability. What a chat template cannot show is refused too.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.sections import GrammarConfig, SamplingConfig

MODEL = "policy"
"""The model's name in replies. Requests may name any: every call is the policy's."""

_DEEPEST = 100


class ApiError(Exception):
    """A call that is not answered.

    Args:
        code: One word for programs, such as "context_length_exceeded".
        message: What is wrong and what to do.
        status: Of the reply; official clients try 408, 409, 429 and 500 again.
    """

    def __init__(self, code: str, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


@dataclass(frozen=True)
class ChatCall:
    """A call of a tool by an assistant: its name and its arguments, a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message of a request, whichever interface it came by.

    Attributes:
        role: "system", "user", "assistant" or "tool"; "text" for plain text, which no chat template shows.
        calls: Tool calls of an assistant.
        ids: By which a client names these calls; of a tool's message, that of the call that it answers.
    """

    role: str
    text: str
    calls: tuple[ChatCall, ...] = ()
    ids: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two messages have in common that say the same: clients trim answers, and write arguments anew."""
        if self.role != "assistant":
            return self.role, self.text
        return self.role, self.text.strip(), tuple((call.name, _canonical(call.arguments)) for call in self.calls)

    @property
    def shown(self) -> str:
        """The text as a policy writes it, calls in the form that `tasks/tools.py` reads."""
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
            for call in self.calls
        ]
        return "\n".join(filter(None, (self.text, *calls)))


@dataclass(frozen=True)
class ChatRequest:
    """What is asked of the policy.

    Attributes:
        tools: JSON schemas in OpenAI's form.
        reads_calls: Whether tool calls are read from the answer.
        max_tokens: Most tokens of the answer; None leaves it to the run.
        stop: Texts that end the answer.
        grammar: What the answer obeys.
        is_streamed: Whether the reply is a stream of events.
        has_usage: Whether a stream tells the number of tokens.
        model: The name that was asked for, which the reply repeats.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: GrammarConfig = GrammarConfig()
    is_streamed: bool = False
    has_usage: bool = False
    model: str = MODEL


@dataclass(frozen=True)
class ChatAnswer:
    """What the policy said.

    Attributes:
        number: Of the call, from 0; ids are made of it.
        calls: Tool calls that were read from the answer, which its text then lacks.
        is_cut: Whether a budget ended it.
    """

    number: int
    text: str
    calls: tuple[ChatCall, ...]
    is_cut: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> ChatMessage:
        """The answer as the message that a client sends back."""
        return ChatMessage("assistant", self.text, self.calls)


@dataclass(frozen=True)
class ChatApi:
    """One interface.

    Attributes:
        read: A request's body and the run's sampling to the request; raises `ApiError`.
        write: The body of the reply.
        stream: The events of the reply, each a name, "" for none, and its data.
        refuse: The body of an error.
    """

    read: Callable[[Mapping[str, Any], SamplingConfig], ChatRequest]
    write: Callable[[ChatRequest, ChatAnswer], dict[str, Any]]
    stream: Callable[[ChatRequest, ChatAnswer], Iterator[tuple[str, Any]]]
    refuse: Callable[[ApiError], dict[str, Any]]

    def reply(self, request: ChatRequest, answer: ChatAnswer) -> Any:
        """Return the reply: a JSON object, or the text of a stream of events."""
        if not request.is_streamed:
            return self.write(request, answer)
        events = [
            (f"event: {name}\n" if name else "") + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
            for name, data in self.stream(request, answer)
        ]
        return "".join(events)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def check_depth(body: Any) -> None:
    """Refuse lists and objects that lie too deep in each other: what compares and shows them calls itself as often.

    Raises:
        ApiError: Always then.
    """
    # Level by level and without recursion: what is checked is depth itself.
    level = [body]
    for _ in range(_DEEPEST):
        within = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [part for parts in within for part in parts]
    if level:
        raise ApiError("invalid_request", f"lists and objects lie more than {_DEEPEST} deep in each other")


def _need(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ApiError("invalid_request", f"{what} is {_short(value)}, which is of another type")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# What is said of sampling.

_OTHERWISE = "tokens are drawn as the run's file says, since the learner scores them so"


def _check_sampling(body: Mapping[str, Any], sampling: SamplingConfig, neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what would change the distribution, and what is not known.

    Args:
        neutral: Values of each known parameter that change nothing; () allows any.

    Raises:
        ApiError: Naming the parameter.
    """
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value, own = body.get(name), getattr(sampling, name)
        # vLLM's clients say -1 for "no top-k", where this run says 0.
        if value is not None and value != own and not (name == "top_k" and value == -1 and own == 0):
            raise ApiError(
                "unsupported_parameter",
                f"{name} = {_short(value)}, and this run draws with sampling.{name} = {own:g}: a token that is drawn "
                f"otherwise has another log-probability than the one it is trained with; leave {name} out",
            )
    for name, value in body.items():
        if value is None or name in ("temperature", "top_p", "top_k", "min_p"):
            continue
        if name not in neutral:
            raise ApiError("unsupported_parameter", f"{name} is not known here; leave it out ({_OTHERWISE})")
        if neutral[name] and value not in neutral[name]:
            raise ApiError(
                "unsupported_parameter", f"{name} = {_short(value)} cannot be followed ({_OTHERWISE}); leave it out"
            )


def _stops(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _need(value or [], list, "stop")
    if len(strings) > 16 or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in strings):
        raise ApiError("invalid_request", f"stop = {_short(value)}: at most 16 texts of 1 to 256 characters")
    return tuple(strings)


def _grammar(form: Any, what: str) -> GrammarConfig:
    """Return what an answer of this form obeys: any text, any object, or JSON of a schema."""
    kind = "text" if form is None else _need(form, Mapping, what).get("type")
    if kind == "text":
        return GrammarConfig()
    if kind not in ("json_object", "json_schema"):
        raise ApiError("invalid_request", f"{what} is of type {_short(kind)}; there are text, json_object, json_schema")
    if kind == "json_object":
        return GrammarConfig(schema={"type": "object"})
    schema = _need(form.get("json_schema", form), Mapping, what).get("schema")
    try:
        return GrammarConfig(schema=json.dumps(_need(schema, dict, f"the schema of {what}"), ensure_ascii=False))
    except ConfigError as error:
        raise ApiError("invalid_request", f"{what}: {error}") from error


def _limit(value: Any, what: str) -> int | None:
    if value is not None and _need(value, int, what) < 1:
        raise ApiError("invalid_request", f"{what} = {_short(value)}: at least 1")
    return value  # type: ignore[no-any-return]


def _text(content: Any, what: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a text, or parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in _need(content, list, what):
        kind = _need(part, Mapping, what).get("type")
        if kind not in kinds:
            raise ApiError("unsupported_content", f"{what} has a part of type {_short(kind)}; the policy reads text")
        texts.append(_need(part.get("text"), str, what))
    return "".join(texts)


def _tools(body: Mapping[str, Any], kind: str, parameters: str, inside: str = "") -> tuple[dict[str, Any], ...]:
    """Return the tools of a request as JSON schemas in OpenAI's form.

    Args:
        kind: The only type that is understood.
        parameters: The key of the parameters' schema.
        inside: The key of the object that describes a tool; "" for the tool itself.
    """
    found = []
    for tool in _need(body.get("tools") or [], list, "tools"):
        # Anthropic's clients leave the type of a user's own tool out.
        usual = kind if kind == "custom" else None
        if (said := _need(tool, Mapping, "a tool").get("type", usual)) != kind:
            raise ApiError("unsupported_parameter", f"a tool of type {_short(said)}; only {kind} is understood")
        given = _need(tool.get(inside), Mapping, f"a tool's {inside}") if inside else tool
        function: dict[str, Any] = {"name": _need(given.get("name"), str, "a tool's name")}
        if given.get("description") is not None:
            function["description"] = _need(given["description"], str, "a tool's description")
        schema = given.get(parameters) or {"type": "object", "properties": {}}
        function["parameters"] = _need(schema, dict, "a tool's parameters")
        found.append({"type": "function", "function": function})
    return tuple(found)


def _arguments(value: Any) -> str:
    try:
        json.loads(_need(value, str, "arguments"))
    except (ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"the arguments of a tool call are not JSON: {_short(value)}") from error
    return str(value)


# OpenAI's chat completions.

_CHAT: Mapping[str, Sequence[Any]] = {
    "model": (), "messages": (), "tools": (), "stream": (), "stream_options": (), "stop": (), "max_tokens": (),
    "max_completion_tokens": (), "user": (), "metadata": (), "seed": (), "service_tier": (), "prompt_cache_key": (),
    "safety_identifier": (), "store": (False, True), "n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "parallel_tool_calls": (True,),
    "response_format": (), "tool_choice": ("auto", "none"), "modalities": (["text"],),
}  # fmt: skip


def _read_chat(body: Mapping[str, Any], sampling: SamplingConfig) -> ChatRequest:
    _check_sampling(body, sampling, _CHAT)
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise ApiError("invalid_request", "max_tokens and max_completion_tokens are one limit; leave one out")
    # The older and the newer name of one limit.
    name = "max_tokens" if body.get("max_tokens") is not None else "max_completion_tokens"
    messages = _need(body.get("messages"), list, "messages")
    return ChatRequest(
        messages=_checked(tuple(_chat_message(message) for message in messages)),
        tools=_tools(body, "function", "parameters", inside="function"),
        reads_calls=body.get("tool_choice") != "none",
        max_tokens=_limit(body.get(name), name),
        stop=_stops(body.get("stop")),
        grammar=_grammar(body.get("response_format"), "response_format"),
        is_streamed=bool(body.get("stream")),
        has_usage=bool(_need(body.get("stream_options") or {}, Mapping, "stream_options").get("include_usage")),
        model=_need(body.get("model", MODEL), str, "model"),
    )


def _checked(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    if not messages or messages[-1].role not in ("user", "tool"):
        raise ApiError(
            "invalid_request", "messages end with a user's or a tool's: the policy begins its answers itself"
        )
    return tuple(_in_order(messages))


def _in_order(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield messages, tools' results in the order of the calls: a chat template shows places and no ids.

    Raises:
        ApiError: A result is of no call of the answer before it, or one of several of a call.
    """
    calls: tuple[str, ...] = ()
    for is_result, part in itertools.groupby(messages, lambda message: message.role == "tool"):
        found = list(part)
        named = [message.ids[0] for message in found if message.ids]
        # Without an id on every call and every result the order of the request is taken.
        if is_result and all(calls) and calls and len(named) == len(found):
            if not set(named) <= set(calls) or len(set(named)) < len(named):
                raise ApiError(
                    "invalid_request",
                    f"tools' results are of the calls {_short(named)}, and the answer before made {_short(calls)}: one "
                    "result at most for each of these",
                )
            found.sort(key=lambda message: calls.index(message.ids[0]))
        yield from found
        calls = () if is_result else found[-1].ids


def _ids(*given: Any) -> tuple[str, ...]:
    """Return the ids of calls, "" for one that has none; nothing for a single one that has none."""
    ids = tuple(_need(each or "", str, "a call's id") for each in given)
    return () if ids == ("",) else ids


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _chat_message(message: Any) -> ChatMessage:
    role = _need(message, Mapping, "a message").get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError("invalid_request", f"a message has the role {_short(role)}, which is none of {list(_ROLES)}")
    # Fields that clients send back from an answer, and that change nothing in the template.
    known = {"assistant": ("tool_calls", "annotations", "parsed"), "tool": ("tool_call_id", "name")}.get(str(role), ())
    for key, value in message.items():
        if key not in ("role", "content", *known) and value:
            raise ApiError("unsupported_content", f"a message has {_short(key)}, which a chat template does not show")
    calls, made = [], _need(message.get("tool_calls") or [], list, "tool_calls")
    for call in made:
        function = _need(_need(call, Mapping, "a tool call").get("function"), Mapping, "a tool call's function")
        calls.append(ChatCall(_need(function.get("name"), str, "a call's name"), _arguments(function.get("arguments"))))
    ids = _ids(message.get("tool_call_id")) if role == "tool" else _ids(*(call.get("id") for call in made))
    return ChatMessage(_ROLES[role], _text(message.get("content"), f"a message of the {role}'s"), tuple(calls), ids)


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _chat_calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{answer.number}_{n}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for n, c in enumerate(answer.calls)
    ]


def _chat_end(answer: ChatAnswer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.calls else "stop"


def _chat_head(request: ChatRequest, answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": int(time.time()), "model": request.model}


def _write_chat(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    # OpenAI's content is null where there are tool calls alone.
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.calls:
        message["tool_calls"] = _chat_calls(answer)
    choice = {"index": 0, "message": message, "finish_reason": _chat_end(answer), "logprobs": None}
    return {**_chat_head(request, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _stream_chat(request: ChatRequest, answer: ChatAnswer) -> Iterator[tuple[str, Any]]:
    head = _chat_head(request, answer, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], end: str | None = None) -> tuple[str, Any]:
        return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}

    # One chunk with all of the text: the answer is complete when the stream begins.
    yield chunk({"role": "assistant", "content": answer.text})
    for index, call in enumerate(_chat_calls(answer)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _chat_end(answer))
    if request.has_usage:
        yield "", {**head, "choices": [], "usage": _usage(answer)}
    yield "", "[DONE]"


def _refuse_chat(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


# OpenAI's completions.

_COMPLETIONS: Mapping[str, Sequence[Any]] = {
    "model": (), "prompt": (), "stream": (), "stream_options": (), "stop": (), "max_tokens": (), "user": (), "seed": (),
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "logit_bias": ({},),
    "frequency_penalty": (0,), "presence_penalty": (0,),
}  # fmt: skip


def _read_completion(body: Mapping[str, Any], sampling: SamplingConfig) -> ChatRequest:
    _check_sampling(body, sampling, _COMPLETIONS)
    prompt = body.get("prompt")
    [text] = prompt if isinstance(prompt, list) and len(prompt) == 1 else [prompt]
    if not isinstance(text, str) or not text:
        raise ApiError("invalid_request", f"prompt = {_short(prompt)}: one text, of at least a character")
    return ChatRequest(
        messages=(ChatMessage("text", text),),
        reads_calls=False,
        max_tokens=_limit(body.get("max_tokens"), "max_tokens"),
        stop=_stops(body.get("stop")),
        is_streamed=bool(body.get("stream")),
        has_usage=bool(_need(body.get("stream_options") or {}, Mapping, "stream_options").get("include_usage")),
        model=_need(body.get("model", MODEL), str, "model"),
    )


def _write_completion(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    choice = {"index": 0, "text": answer.text, "finish_reason": _chat_end(answer), "logprobs": None}
    head = {**_chat_head(request, answer, "text_completion"), "id": f"cmpl-{answer.number}"}
    return {**head, "choices": [choice], "usage": _usage(answer)}


def _stream_completion(request: ChatRequest, answer: ChatAnswer) -> Iterator[tuple[str, Any]]:
    whole = _write_completion(request, answer)
    usage = whole.pop("usage")
    yield "", whole
    if request.has_usage:
        yield "", {**whole, "choices": [], "usage": usage}
    yield "", "[DONE]"


# OpenAI's responses.

_RESPONSES: Mapping[str, Sequence[Any]] = {
    "model": (), "input": (), "instructions": (), "tools": (), "stream": (), "stream_options": (), "include": (),
    "max_output_tokens": (), "metadata": (), "user": (), "service_tier": (), "store": (), "prompt_cache_key": (),
    "safety_identifier": (), "background": (False,), "truncation": ("disabled",), "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"), "text": (), "top_logprobs": (0,),
}  # fmt: skip


def _read_responses(body: Mapping[str, Any], sampling: SamplingConfig) -> ChatRequest:
    if body.get("previous_response_id") or body.get("conversation"):
        raise ApiError("unsupported_parameter", "nothing is stored between calls; send the whole conversation as input")
    _check_sampling(body, sampling, _RESPONSES)
    text = _need(body.get("text") or {}, Mapping, "text")
    _check_sampling(text, sampling, {"format": (), "verbosity": ("medium",)})
    given, told = body.get("input"), _need(body.get("instructions") or "", str, "instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _need(given, list, "input")
    messages = [ChatMessage("system", told)] if told else []
    for item in items:
        message = _item(item)
        if message.role == "assistant" and messages and messages[-1].role == "assistant":
            # A message and its calls are items of their own, and one answer.
            before = messages.pop()
            said = before.text + message.text
            message = ChatMessage("assistant", said, before.calls + message.calls, before.ids + message.ids)
        messages.append(message)
    return ChatRequest(
        messages=_checked(tuple(messages)),
        tools=_tools(body, "function", "parameters"),
        reads_calls=body.get("tool_choice") != "none",
        max_tokens=_limit(body.get("max_output_tokens"), "max_output_tokens"),
        grammar=_grammar(text.get("format"), "text.format"),
        is_streamed=bool(body.get("stream")),
        model=_need(body.get("model", MODEL), str, "model"),
    )


def _item(item: Any) -> ChatMessage:
    match _need(item, Mapping, "an item of the input").get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise ApiError("invalid_request", f"a message has the role {_short(role)}; there are {list(_ROLES)}")
            kinds = ("input_text", "output_text", "text")
            return ChatMessage(_ROLES[role], _text(item.get("content"), f"a message of the {role}'s", kinds))
        case "function_call":
            call = ChatCall(_need(item.get("name"), str, "a call's name"), _arguments(item.get("arguments")))
            return ChatMessage("assistant", "", (call,), _ids(item.get("call_id")))
        case "function_call_output":
            text = _text(item.get("output"), "a tool's output", ("input_text",))
            return ChatMessage("tool", text, ids=_ids(item.get("call_id")))
        case kind:
            raise ApiError("unsupported_content", f"an item of type {_short(kind)}; there are messages and calls")


def _write_responses(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    status = "incomplete" if answer.is_cut else "completed"
    text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    output: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        message = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant", "status": status}
        output.append({**message, "content": [text]})
    for n, call in enumerate(answer.calls):
        named = {"name": call.name, "arguments": call.arguments, "status": "completed"}
        number = f"{answer.number}_{n}"
        output.append({"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", **named})
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _stream_responses(request: ChatRequest, answer: ChatAnswer) -> Iterator[tuple[str, Any]]:
    whole, numbers = _write_responses(request, answer), itertools.count()

    def event(kind: str, **data: Any) -> tuple[str, Any]:
        return f"response.{kind}", {"type": f"response.{kind}", "sequence_number": next(numbers), **data}

    # The events of an answer that came piece by piece, in the order in which clients expect them.
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            [part] = item["content"]
            where["content_index"] = 0
            yield event("output_item.added", output_index=index, item={**item, "content": [], "status": "in_progress"})
            yield event("content_part.added", **where, part={**part, "text": ""})
            yield event("output_text.delta", **where, delta=part["text"], logprobs=[])
            yield event("output_text.done", **where, text=part["text"], logprobs=[])
            yield event("content_part.done", **where, part=part)
        else:
            empty = {**item, "arguments": "", "status": "in_progress"}
            yield event("output_item.added", output_index=index, item=empty)
            yield event("function_call_arguments.delta", **where, delta=item["arguments"])
            yield event("function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"])
        yield event("output_item.done", output_index=index, item=item)
    yield event("incomplete" if answer.is_cut else "completed", response=whole)


# Anthropic's messages.

_MESSAGES: Mapping[str, Sequence[Any]] = {
    "model": (), "messages": (), "system": (), "tools": (), "stream": (), "stop_sequences": (), "max_tokens": (),
    "metadata": (), "service_tier": (), "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},), "output_config": (),
}  # fmt: skip


def _read_messages(body: Mapping[str, Any], sampling: SamplingConfig) -> ChatRequest:
    _check_sampling(body, sampling, _MESSAGES)
    form = _need(body.get("output_config") or {}, Mapping, "output_config")
    _check_sampling(form, sampling, {"format": ()})
    system = _text(body.get("system"), "system")
    messages = [part for m in _need(body.get("messages"), list, "messages") for part in _blocks(m)]
    return ChatRequest(
        messages=_checked((*((ChatMessage("system", system),) if system else ()), *messages)),
        tools=_tools(body, "custom", "input_schema"),
        reads_calls=body.get("tool_choice") != {"type": "none"},
        max_tokens=_limit(_need(body.get("max_tokens"), int, "max_tokens"), "max_tokens"),
        grammar=_grammar(form.get("format"), "output_config.format"),
        stop=_stops(body.get("stop_sequences")),
        is_streamed=bool(body.get("stream")),
        model=_need(body.get("model", MODEL), str, "model"),
    )


def _blocks(message: Any) -> Iterator[ChatMessage]:
    """Yield a message's tool results, each a message of its own, and then the rest of it."""
    role, content = _need(message, Mapping, "a message").get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError("invalid_request", f"a message has the role {_short(role)}, neither user nor assistant")
    if isinstance(content, str):
        yield ChatMessage(role, content)
        return
    texts, calls, ids, has_results = [], [], [], False
    for block in _need(content, list, "content"):
        match _need(block, Mapping, "a content block").get("type"):
            case "text":
                texts.append(_need(block.get("text"), str, "a text block"))
            case "tool_use" if role == "assistant":
                arguments = json.dumps(_need(block.get("input"), dict, "a tool's input"), ensure_ascii=False)
                calls.append(ChatCall(_need(block.get("name"), str, "a tool's name"), arguments))
                ids.append(block.get("id"))
            case "tool_result" if role == "user":
                has_results = True
                text = _text(block.get("content"), "a tool's result")
                yield ChatMessage("tool", text, ids=_ids(block.get("tool_use_id")))
            case kind:
                raise ApiError("unsupported_content", f"a block of type {_short(kind)} of the {role}'s; text is read")
    # A user's message of tool results alone has nothing left to say.
    if texts or calls or not has_results:
        yield ChatMessage(role, "".join(texts), tuple(calls), _ids(*ids))


def _write_messages(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for n, call in enumerate(answer.calls):
        given = json.loads(call.arguments)
        content.append({"type": "tool_use", "id": f"toolu_{answer.number}_{n}", "name": call.name, "input": given})
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": "max_tokens" if answer.is_cut else "tool_use" if answer.calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _stream_messages(request: ChatRequest, answer: ChatAnswer) -> Iterator[tuple[str, Any]]:
    whole = _write_messages(request, answer)

    def event(name: str, **data: Any) -> tuple[str, Any]:
        return name, {"type": name, **data}

    begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if is_text
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        )
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": answer.completion_tokens})
    yield event("message_stop")


def _refuse_messages(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}


CHAT_APIS: Mapping[str, ChatApi] = {
    "/v1/chat/completions": ChatApi(_read_chat, _write_chat, _stream_chat, _refuse_chat),
    "/v1/completions": ChatApi(_read_completion, _write_completion, _stream_completion, _refuse_chat),
    "/v1/responses": ChatApi(_read_responses, _write_responses, _stream_responses, _refuse_chat),
    "/v1/messages": ChatApi(_read_messages, _write_messages, _stream_messages, _refuse_messages),
}
"""The interfaces by the path that their clients call."""
