"""JSON in HTTP/1.1 on the loopback interface, one exchange a connection, and no body is read before a key was shown.

Small enough to be its own code, so that a server needs nothing that its interpreter may lack. curl and the clients of
OpenAI and Anthropic can talk to it.
"""

import asyncio
import contextlib
import json
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
MOST_BYTES = 1 << 26
"""Of a body: a million tokens with three numbers each take less."""
_MOST_HEADERS = 100
_LINE = 1 << 14
_STRANGERS, _STRANGER_SECONDS, _BODY_SECONDS, _LINGER_SECONDS = 64, 10.0, 60.0, 2.0

Answer = Callable[[Any], Awaitable[tuple[HTTPStatus, Any]]]


class WireError(ValueError):
    """The other side does not speak this language."""


class Refused(Exception):
    """A request whose body is not read.

    Args:
        status: The status of the reply.
        body: Its JSON.
    """

    def __init__(self, status: HTTPStatus, body: Any) -> None:
        super().__init__(str(body))
        self.status, self.body = status, body


@dataclass(frozen=True)
class Heard:
    """One request or reply.

    Attributes:
        first: Its first line, cut at blanks.
        headers: Headers by their names in lower case, and ``first[0]`` as ":method".
    """

    first: tuple[str, ...]
    headers: Mapping[str, str]
    body: dict[str, Any]


async def hear(
    reader: asyncio.StreamReader,
    admit: Callable[[str, Mapping[str, str]], None] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Heard:
    """Return the next request or reply.

    Args:
        admit: Gets the path and the headers before the body is read, and raises to refuse the body.
        most_bytes: Of a body.

    Raises:
        WireError: The bytes are no message, the message is larger than ``most_bytes`` or its body no JSON object.
        EOFError, OSError: The connection ends before the message does.
    """
    first = tuple((await reader.readuntil(b"\r\n")).decode("latin-1").split())
    if len(first) < 3 or not any(part.startswith("HTTP/1.") for part in first):
        raise WireError("this is no HTTP")
    headers = {":method": first[0]}
    # The stream's own limit bounds each line; their number is bounded here.
    while line := (await reader.readuntil(b"\r\n")).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _MOST_HEADERS:
            raise WireError("too many headers")
    # Before the body: a caller without a key must not make this process hold and parse megabytes.
    if admit is not None:
        admit(first[1], headers)
    length = headers.get("content-length", "0")
    # Length before int: converting thousands of digits takes quadratic time.
    if not length.isdecimal() or len(length) > 12 or int(length) > most_bytes:
        raise WireError(f"a body of {length[:20]} bytes; the most is {most_bytes}")
    if "transfer-encoding" in headers:
        raise WireError("a body in chunks; send content-length")
    return Heard(first, headers, _body(await reader.readexactly(int(length))))


def _body(text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise WireError(f"a body is an object, this is a {type(said).__name__}")
    return said


def _reply(status: HTTPStatus, body: Any) -> bytes:
    """Return one reply; a text is a stream of events (SSE), anything else JSON."""
    return _message(f"HTTP/1.1 {status.value} {status.phrase}", {}, body)


async def exchange(host: str, port: int, path: str, key: str, body: Any) -> tuple[int, Any]:
    """Send one request; return the status and the body of its reply. Cancelled, it hangs up.

    Raises:
        OSError: No server listens there.
        WireError, EOFError: As `hear`.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        headers = {"Host": f"{host}:{port}", "Authorization": f"Bearer {key}"}
        await _send(writer, _message(f"POST {path} HTTP/1.1", headers, body))
        heard = await hear(reader)
    finally:
        writer.close()
    if not heard.first[1].isdecimal():
        raise WireError("this is no HTTP reply")
    return int(heard.first[1]), heard.body


def _message(first: str, headers: Mapping[str, str], body: Any) -> bytes:
    kind = "text/event-stream" if isinstance(body, str) else "application/json"
    text = (body if isinstance(body, str) else json.dumps(body)).encode()
    every = {**headers, "Content-Type": kind, "Content-Length": str(len(text)), "Connection": "close"}
    head = "".join(f"{line}\r\n" for line in (first, *(f"{name}: {value}" for name, value in every.items())))
    return head.encode("latin-1") + b"\r\n" + text


async def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(message)
    await writer.drain()


async def _send_last(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a reply to a request that was not read to its end, and discard the rest: closed at once, a connection is
    reset, and the caller never sees the reply.
    """
    await _send(writer, message)
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while await reader.read(1 << 16):
                pass


def described(error: BaseException) -> str:
    """Return an error that nothing foresaw with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


@dataclass
class LoopbackServer:
    """Answers callers of this machine that have a key. A caller that hangs up is cancelled.

    The key comes first: before a caller has shown it, no body is read, nothing is parsed but a hundred headers of at
    most 16 KiB, it has 10 s, and of more than 64 such callers the one that has waited longest is hung up on. With it, a
    body has 60 s to arrive, and as long to be taken.

    Attributes:
        admit: Gets path and headers, and returns what answers the body; raises `Refused`.
        let_go: Is told of what was admitted once its connection is over, answered or not.
        misread: Makes the body of the reply to what is no request, from the reason.
        failed: Is told of an error that nothing foresaw, with what was admitted if the key was right, and makes the
            body of the reply, whose status is 500.
        most_bytes: Of a body.
    """

    admit: Callable[[str, Mapping[str, str]], Answer]
    let_go: Callable[[Answer], None] = lambda answer: None
    misread: Callable[[str], Any] = lambda reason: {"error": f"not understood: {reason}"}
    most_bytes: int = MOST_BYTES
    failed: Callable[[Answer | None, BaseException], Any] = lambda answer, error: {"error": described(error)}
    _meetings: set["asyncio.Future[None]"] = field(default_factory=set, init=False)
    _strangers: dict[asyncio.StreamWriter, None] = field(default_factory=dict, init=False)

    async def serve(self, listening: socket.socket) -> None:
        """Answer on a socket that listens, until cancelled."""
        server = await asyncio.start_server(self._meet, sock=listening, limit=_LINE)
        try:
            async with server:
                await server.serve_forever()
        finally:
            for meeting in self._meetings:
                meeting.cancel()
            await asyncio.gather(*self._meetings, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Dicts keep the order of insertion, so the first one has waited longest.
        if len(self._strangers) >= _STRANGERS:
            next(iter(self._strangers)).transport.abort()
        self._strangers[writer] = None
        meeting = asyncio.ensure_future(self._converse(reader, writer))
        self._meetings.add(meeting)
        # A connection that breaks concerns its caller alone.
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            await meeting
        self._meetings.discard(meeting)
        self._strangers.pop(writer, None)
        writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        admitted: list[Answer] = []
        try:
            await self._exchange(reader, writer, admitted)
        finally:
            for answer in admitted:
                self.let_go(answer)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admitted: list[Answer]
    ) -> None:
        try:
            async with asyncio.timeout(_STRANGER_SECONDS) as deadline:
                heard = await hear(reader, partial(self._check, writer, deadline, admitted), self.most_bytes)
        except Refused as error:
            await _send_last(reader, writer, _reply(error.status, error.body))
            return
        except WireError as error:
            await _send_last(reader, writer, _reply(HTTPStatus.BAD_REQUEST, self.misread(str(error))))
            return
        answering = asyncio.ensure_future(admitted[0](heard.body))
        # A caller sends nothing after the body, so this read ends only when it hangs up.
        hanging_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                async with asyncio.timeout(_BODY_SECONDS):
                    await _send(writer, self._replied(admitted[0], answering))
        finally:
            answering.cancel()
            hanging_up.cancel()

    def _replied(self, answer: Answer, answering: "asyncio.Future[tuple[HTTPStatus, Any]]") -> bytes:
        try:
            return _reply(*answering.result())
        except (Exception, asyncio.CancelledError) as error:
            return _reply(HTTPStatus.INTERNAL_SERVER_ERROR, self.failed(answer, error))

    def _check(
        self,
        writer: asyncio.StreamWriter,
        deadline: asyncio.Timeout,
        admitted: list[Answer],
        path: str,
        headers: Mapping[str, str],
    ) -> None:
        """Check the key, and give a caller with the key time for a body."""
        try:
            admitted.append(self.admit(path, headers))
        except Refused:
            raise
        except Exception as error:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, self.failed(None, error)) from error
        # With the key a caller is no stranger: it counts in no limit and has longer for its body.
        self._strangers.pop(writer, None)
        deadline.reschedule(asyncio.get_running_loop().time() + _BODY_SECONDS)
