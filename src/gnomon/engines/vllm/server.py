"""The server program: vLLM in a process of its own. It answers callers on this machine that have the key.

    GNOMON_ENGINE_KEY=... python -m gnomon.engines.vllm.server MODEL --port 8777 [--dtype bfloat16]
        [--max-concurrent 64]

vLLM's own server was not used. It would say neither which weights drew which token nor a token's probability without
truncation, it draws from a generator that a retry cannot repeat, and weights can be exchanged in it only through
endpoints for development, which let any caller call anything. Here the same engine answers, by the same
code, whether it is in the learner's process or not.
"""

import argparse
import asyncio
import contextlib
import hmac
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import torch

from gnomon.core.errors import ConfigError, UserError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine
from gnomon.engines.vllm.protocol import KEY, LOOPBACK, completion_to, fingerprint_to, hear, reply, sampling_from
from gnomon.models.transfer.file import read

_STRANGERS, _STRANGER_SECONDS, _BODY_SECONDS = 64, 10.0, 60.0
_LINE = 1 << 14

Verb = Callable[[Any], Awaitable[Any]]


class Service:
    """Answers for an engine. A caller that hangs up is cancelled, which frees its rows.

    The key comes first: before a caller has shown it, no body is read, nothing is parsed but a hundred headers of at
    most 16 KiB, it has 10 s, and of more than 64 such callers the one that has waited longest is hung up on. With it, a
    body has 60 s to arrive.

    Args:
        engine: Any engine; it is not closed here.
        key: The secret that a caller must send.
    """

    def __init__(self, engine: Engine, key: str) -> None:
        self._engine = engine
        self._key = key
        self._meetings: set[asyncio.Future[None]] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._verbs: dict[str, Verb] = {
            "/generate": self._generate,
            "/score": self._score,
            "/load": self._load,
            "/fingerprints": self._fingerprints,
            "/status": self._status,
        }

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
        try:
            async with asyncio.timeout(_STRANGER_SECONDS) as deadline:
                heard = await hear(reader, partial(self._admit, writer, deadline))
        except PermissionError as error:
            await reply(writer, HTTPStatus.UNAUTHORIZED, {"error": str(error)})
            return
        except ValueError as error:
            await reply(writer, HTTPStatus.BAD_REQUEST, {"error": f"not understood: {error}"})
            return
        answering = asyncio.ensure_future(self._answer(heard.first[1], heard.body))
        hanging_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await reply(writer, *answering.result())
        finally:
            answering.cancel()
            hanging_up.cancel()

    def _admit(self, writer: asyncio.StreamWriter, deadline: asyncio.Timeout, headers: Mapping[str, str]) -> None:
        """Check the key, and give a caller with the key time for a body.

        Raises:
            PermissionError: The key is wrong.
        """
        brought = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(brought.encode(), self._key.encode()):
            raise PermissionError(f"wrong key; the right one is in the server's {KEY}")
        self._strangers.pop(writer, None)
        deadline.reschedule(asyncio.get_running_loop().time() + _BODY_SECONDS)

    async def _answer(self, path: str, body: Any) -> tuple[HTTPStatus, Any]:
        if path not in self._verbs:
            return HTTPStatus.NOT_FOUND, {"error": f"no {path} here; there are {', '.join(self._verbs)}"}
        try:
            return HTTPStatus.OK, await self._verbs[path](body)
        except ConfigError as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except (KeyError, TypeError) as error:
            return HTTPStatus.BAD_REQUEST, {"error": f"not understood: {type(error).__name__}: {error}"}
        except Exception as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}

    async def _generate(self, body: Any) -> Any:
        done = await self._engine.generate(body["prompt"], body["keys"], sampling_from(body["sampling"]))
        return {"completions": [completion_to(one) for one in done]}

    async def _score(self, body: Any) -> Any:
        return {"logprobs": await self._engine.score(body["prompt"], body["response"], body["temperature"])}

    async def _load(self, body: Any) -> Any:
        await self._engine.load(Snapshot(int(body["version"]), partial(read, str(body["path"]))))
        return {"version": self._engine.version}

    async def _fingerprints(self, body: Any) -> Any:
        held = await self._engine.fingerprints()
        named = None if held is None else {name: fingerprint_to(print_) for name, print_ in held.items()}
        return {"fingerprints": named}

    async def _status(self, body: Any) -> Any:
        return {"version": self._engine.version, "beats": self._engine.beats, "pid": os.getpid()}


def main(arguments: list[str] | None = None) -> None:
    """Load the model and serve until killed."""
    parser = argparse.ArgumentParser(prog="gnomon.engines.vllm.server", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-concurrent", type=int, default=64)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that hold the model together")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int)
    where.add_argument("--socket", type=int, help="the number of an inherited socket that listens")
    parser.add_argument("--guarded", action="store_true", help="end, with all children, when standard input ends")
    asked = parser.parse_args(arguments)
    # vLLM's children need not know it.
    key = os.environ.pop(KEY, "")
    if not key:
        sys.exit(f"set {KEY} to a key of your own, for example: export {KEY}=$(openssl rand -hex 16)")
    if asked.guarded:
        threading.Thread(target=_die_with_parent, name="gnomon-guard", daemon=True).start()
    listening = socket.socket(fileno=asked.socket) if asked.socket else _listen(asked.port)
    from gnomon.engines.vllm.engine import VllmEngine

    try:
        engine = VllmEngine(asked.model, getattr(torch, asked.dtype), asked.max_concurrent, asked.tensor_parallel)
    except UserError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"serving {asked.model} on http://{LOOPBACK}:{listening.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Service(engine, key).serve(listening))
    asyncio.run(engine.close())


def _listen(port: int) -> socket.socket:
    return socket.create_server((LOOPBACK, port), backlog=1024)


def _die_with_parent() -> None:
    """Wait for the end of standard input, which the system closes when the parent is gone, however it went."""
    # Not through sys.stdin, whose lock would then be held when this process ends in the ordinary way.
    while os.read(0, 1 << 16):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
