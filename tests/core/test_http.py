"""A server of this machine answers every caller, or says why not."""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import pytest

from gnomon.core.http import Answer, LoopbackServer, Refused, exchange


def admit(path: str, headers: Any) -> Answer:
    """Every caller's errors, by path."""
    if path == "/admit":
        raise ValueError("nothing foresaw it")

    async def answer(body: Any) -> Any:
        if path == "/reply":
            return 200, {"a set": {1}}
        if path == "/cancelled":
            raise asyncio.CancelledError
        raise ConnectionError("nothing foresaw it")

    return answer


def asked(server: LoopbackServer, path: str, body: Any) -> Any:
    """The reply of a server to one request."""

    async def exchanged() -> Any:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        serving = asyncio.ensure_future(server.serve(listening))
        replied = await exchange("127.0.0.1", port, path, "", body)
        serving.cancel()
        await asyncio.wait({serving})
        return replied

    return asyncio.run(asyncio.wait_for(exchanged(), 30))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/admit", "ValueError: nothing foresaw it (test_http.py, line"),
        ("/answer", "ConnectionError: nothing foresaw it (test_http.py, line"),
        ("/reply", "AttributeError"),
        ("/cancelled", "CancelledError"),
    ],
)
def test_an_error_that_nothing_foresaw_is_said(path: str, said: str):
    """With status 500, wherever it arises; one of an answer is none of the connection."""
    status, replied = asked(LoopbackServer(admit), path, {})
    assert (status, list(replied)) == (500, ["error"])
    assert said in replied["error"]


def test_a_caller_whose_body_is_not_read_gets_its_reply():
    """One too large, or of a caller without a key: the rest is discarded, and no connection is reset."""

    def refuse(path: str, headers: Any) -> Answer:
        raise Refused(HTTPStatus.UNAUTHORIZED, {"error": "no key"})

    large = {"text": "x" * 9_000_000}
    assert asked(LoopbackServer(refuse), "/answer", large) == (401, {"error": "no key"})
    status, replied = asked(LoopbackServer(admit, most_bytes=1000), "/answer", large)
    assert (status, "the most is 1000" in replied["error"]) == (400, True)
