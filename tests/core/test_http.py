"""A server of this machine answers every caller, or says why not."""

import asyncio
import socket
from typing import Any

import pytest

from gnomon.core.http import Answer, LoopbackServer, exchange


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

    async def body() -> Any:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        serving = asyncio.ensure_future(LoopbackServer(admit).serve(listening))
        replied = await exchange("127.0.0.1", port, path, "", {})
        serving.cancel()
        await asyncio.wait({serving})
        return replied

    status, replied = asyncio.run(asyncio.wait_for(body(), 30))
    assert (status, list(replied)) == (500, ["error"])
    assert said in replied["error"]
