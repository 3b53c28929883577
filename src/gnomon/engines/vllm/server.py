"""The server program: vLLM in a process of its own. It answers callers on this machine that have the key.

    GNOMON_ENGINE_KEY=... python -m gnomon.engines.vllm.server MODEL --port 8777 [--dtype bfloat16]
        [--max-concurrent 64]

vLLM's own server was not used. It gives no probability without truncation beside that with it, and weights can be
exchanged in it only through endpoints for development, which let any caller call anything. Here the same engine
answers, by the same code, whether it is in the learner's process or not.
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
from gnomon.core.http import LOOPBACK, Answer, LoopbackServer, Refused
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine
from gnomon.engines.vllm.protocol import KEY, completion_to, fingerprint_to, sampling_from
from gnomon.models.transfer.file import read

Verb = Callable[[Any], Awaitable[Any]]


class Service:
    """Answers for an engine by a `LoopbackServer`; a caller that hangs up frees its rows.

    Args:
        engine: Any engine; it is not closed here.
        key: The secret that a caller must send.
        draws: Who draws (`EngineConfig.draws`); callers that expect another are refused.
    """

    def __init__(self, engine: Engine, key: str, draws: str = "keyed") -> None:
        self._engine = engine
        self._key = key
        self._draws = draws
        self._verbs: dict[str, Verb] = {
            "/generate": self._generate,
            "/score": self._score,
            "/load": self._load,
            "/fingerprints": self._fingerprints,
            "/status": self._status,
        }

    async def serve(self, listening: socket.socket) -> None:
        """Answer on a socket that listens, until cancelled."""
        await LoopbackServer(self._admit).serve(listening)

    def _admit(self, path: str, headers: Mapping[str, str]) -> Answer:
        """Check the key.

        Raises:
            Refused: The key is wrong.
        """
        brought = headers.get("authorization", "").removeprefix("Bearer ")
        # In constant time, so that the time of a refusal says nothing of the key.
        if not hmac.compare_digest(brought.encode(), self._key.encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, {"error": f"wrong key; the right one is in the server's {KEY}"})
        return partial(self._answer, path)

    async def _answer(self, path: str, body: Any) -> tuple[HTTPStatus, Any]:
        if path not in self._verbs:
            return HTTPStatus.NOT_FOUND, {"error": f"no {path} here; there are {', '.join(self._verbs)}"}
        try:
            return HTTPStatus.OK, await self._verbs[path](body)
        except ConfigError as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        # A body of another form is the caller's fault (400); anything else is the engine's (500), which ends it for
        # the pool.
        except (KeyError, TypeError) as error:
            return HTTPStatus.BAD_REQUEST, {"error": f"not understood: {type(error).__name__}: {error}"}
        except Exception as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}

    async def _generate(self, body: Any) -> Any:
        # A silent difference would make log-probabilities of another sampler's draws.
        if body.get("draws", self._draws) != self._draws:
            raise ConfigError(
                f"it draws by --draws {self._draws}, and engine.draws = '{body['draws']}'; set one to the other"
            )
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
    parser.add_argument("--draws", default="keyed", choices=["keyed", "vllm"], help="whose sampler draws")
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
    listening = (
        socket.socket(fileno=asked.socket)
        if asked.socket
        else socket.create_server((LOOPBACK, asked.port), backlog=1024)
    )
    from gnomon.engines.vllm.engine import VllmEngine

    try:
        dtype, parts = getattr(torch, asked.dtype), asked.tensor_parallel
        engine = VllmEngine(asked.model, dtype, asked.max_concurrent, parts, draws=asked.draws)
    except UserError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"serving {asked.model} on http://{LOOPBACK}:{listening.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Service(engine, key, asked.draws).serve(listening))
    asyncio.run(engine.close())


def _die_with_parent() -> None:
    """Wait for the end of standard input, which the system closes when the parent is gone, however it went."""
    # Not through sys.stdin, whose lock would then be held when this process ends in the ordinary way.
    while os.read(0, 1 << 16):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
