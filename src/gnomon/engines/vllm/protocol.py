"""What an engine and its server say to each other: JSON in HTTP/1.1, one exchange a connection.

Small enough to be its own code, so that the server needs nothing that its interpreter may lack, and tests can serve
any engine. `curl` can talk to it too.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from gnomon.core.types import Completion
from gnomon.engines.base import Sampling
from gnomon.models.transfer.fingerprint import Fingerprint

KEY = "GNOMON_ENGINE_KEY"
"""The environment variable that holds the key, here and at the client: an argument would be seen by everybody."""
LOOPBACK = "127.0.0.1"
MOST_BYTES = 1 << 26
"""Of a body: a million tokens with three numbers each take less."""
_MOST_HEADERS = 100


class WireError(ValueError):
    """The other side does not speak this language."""


@dataclass(frozen=True)
class Heard:
    """One request or reply.

    Attributes:
        first: Its first line, cut at blanks.
        headers: Headers by their names in lower case.
    """

    first: tuple[str, ...]
    headers: Mapping[str, str]
    body: dict[str, Any]


async def hear(reader: asyncio.StreamReader, admit: Callable[[Mapping[str, str]], None] | None = None) -> Heard:
    """Return the next request or reply.

    Args:
        admit: Gets the headers before the body is read, and raises to refuse the body.

    Raises:
        WireError: The bytes are no message, the message is larger than MOST_BYTES or its body no JSON object.
        EOFError, OSError: The connection ends before the message does.
    """
    first = tuple((await reader.readuntil(b"\r\n")).decode("latin-1").split())
    if len(first) < 3 or not any(part.startswith("HTTP/1.") for part in first):
        raise WireError("this is no HTTP")
    headers: dict[str, str] = {}
    while line := (await reader.readuntil(b"\r\n")).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _MOST_HEADERS:
            raise WireError("too many headers")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BYTES:
        raise WireError(f"a body of {length[:20]} bytes; the most is {MOST_BYTES}")
    if admit is not None:
        admit(headers)
    return Heard(first, headers, _body(await reader.readexactly(int(length))))


def _body(text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise WireError(f"a body is an object, this is a {type(said).__name__}")
    return said


async def reply(writer: asyncio.StreamWriter, status: HTTPStatus, body: Any) -> None:
    """Send one reply."""
    await _send(writer, f"HTTP/1.1 {status.value} {status.phrase}", {}, body)


async def exchange(host: str, port: int, path: str, key: str, body: Any) -> tuple[int, Any]:
    """Send one request; return the status and the body of its reply. Cancelled, it hangs up.

    Raises:
        OSError: No server listens there.
        WireError, EOFError: As `hear`.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        headers = {"Host": f"{host}:{port}", "Authorization": f"Bearer {key}"}
        await _send(writer, f"POST {path} HTTP/1.1", headers, body)
        heard = await hear(reader)
    finally:
        writer.close()
    if not heard.first[1].isdecimal():
        raise WireError("this is no HTTP reply")
    return int(heard.first[1]), heard.body


async def _send(writer: asyncio.StreamWriter, first: str, headers: Mapping[str, str], body: Any) -> None:
    text = json.dumps(body).encode()
    every = {**headers, "Content-Type": "application/json", "Content-Length": str(len(text)), "Connection": "close"}
    head = "".join(f"{line}\r\n" for line in (first, *(f"{name}: {value}" for name, value in every.items())))
    writer.write(head.encode("latin-1") + b"\r\n" + text)
    await writer.drain()


def sampling_to(sampling: Sampling) -> dict[str, Any]:
    """Return JSON values of sampling settings."""
    return asdict(sampling)


def sampling_from(values: Mapping[str, Any]) -> Sampling:
    """Return what `sampling_to` was given.

    Raises:
        TypeError: The names are not those of `Sampling`.
    """
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Sampling(**given)


def completion_to(done: Completion) -> dict[str, Any]:
    """Return JSON values of an answer; numbers survive to the bit. Which experts were chosen does not travel."""
    return {
        "tokens": done.tokens,
        "logprobs": done.logprobs,
        "full_logprobs": done.full_logprobs,
        "oldest_version": done.oldest_version,
        "newest_version": done.newest_version,
        "stop": done.stop,
    }


def completion_from(values: Mapping[str, Any]) -> Completion:
    """Return what `completion_to` was given."""
    sequences = {name: tuple(values[name]) for name in ("tokens", "logprobs", "full_logprobs")}
    return Completion(**{**values, **sequences})


def fingerprint_to(print_: Fingerprint) -> list[Any]:
    """Return JSON values of a fingerprint."""
    return [print_.dtype, list(print_.shape), print_.digest]


def fingerprint_from(values: tuple[str, list[int], int]) -> Fingerprint:
    """Return what `fingerprint_to` was given."""
    dtype, shape, digest = values
    return Fingerprint(dtype, tuple(shape), digest)
