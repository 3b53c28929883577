"""Client and server without vLLM: any engine can be served."""

import asyncio
import contextlib
import socket

import pytest
import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.http import exchange
from gnomon.core.sections import EngineConfig
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.scripted import ScriptedEngine
from gnomon.engines.vllm.client import VllmServerEngine
from gnomon.engines.vllm.server import Service
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

PROMPT = [256, 50, 43, 50, 61]
SAMPLING = Sampling(temperature=0.8, top_p=0.9, max_completion_length=12, stop_ids=(257,))
KEY = "a key"


@contextlib.asynccontextmanager
async def serving(engine, timeout_seconds: float = 10.0, draws: str = "keyed"):
    """Serve an engine, and yield a client of it."""
    listening = socket.create_server(("127.0.0.1", 0))
    task = asyncio.ensure_future(Service(engine, KEY, draws).serve(listening))
    client = VllmServerEngine(listening.getsockname(), KEY, timeout_seconds)
    yield client
    await client.close()
    task.cancel()
    await asyncio.wait({task})
    await engine.close()


def local() -> LocalEngine:
    """A tiny model with weights of its own."""
    return LocalEngine(tiny_model(0), max_concurrent=3, shared=False)


def test_what_is_served_is_what_the_engine_says():
    """Answers, both log-probabilities, scores, versions and fingerprints pass unchanged, 128-bit keys too."""

    async def body():
        plain = local()
        async with serving(local()) as client:
            assert client.version == -1
            keys = [2**127 + 1, 5]
            expected = await plain.generate(PROMPT, keys, SAMPLING)
            assert await client.generate(PROMPT, keys, SAMPLING) == expected
            assert await client.generate(PROMPT, [], SAMPLING) == []
            assert await client.score(PROMPT, [65, 66], 0.7) == await plain.score(PROMPT, [65, 66], 0.7)
        await plain.close()

    asyncio.run(body())


def test_a_server_that_draws_otherwise_is_refused():
    """One that runs already may draw by vLLM's sampler, and a run that expects keyed draws says so in its card."""

    async def body():
        async with serving(local(), draws="vllm") as client:
            with pytest.raises(ConfigError, match=r"it draws by --draws vllm, and engine.draws = 'keyed'"):
                await client.generate(PROMPT, [0], SAMPLING)

    asyncio.run(body())


def test_weights_arrive_through_a_file_that_is_gone_afterwards(tmp_path, monkeypatch):
    """The snapshot's tensors arrive to the bit, those that share memory too; nobody else may read the file."""
    monkeypatch.setattr("gnomon.models.transfer.file._SHARED_MEMORY", tmp_path)
    seen = []

    class Watching(LocalEngine):
        async def load(self, snapshot):
            seen.extend(oct(place.stat().st_mode & 0o777) for place in tmp_path.iterdir())
            await super().load(snapshot)

    async def body():
        from gnomon.core.types import Snapshot
        from gnomon.models.lora import merged_tensors

        def tensors():
            return merged_tensors(tiny_model(3))

        async with serving(Watching(tiny_model(0), shared=False)) as client:
            await client.load(Snapshot(9, tensors))
            [done] = await client.generate(PROMPT, [1], SAMPLING)
            assert (client.version, done.oldest_version) == (9, 9)
            assert await client.fingerprints() == fingerprints(tensors())
            both = torch.zeros(3)
            with pytest.raises(EngineError, match="snapshot 10 does not fit"):
                await client.load(Snapshot(10, lambda: iter([("a", both), ("b", both)])))
            assert client.version == 9

    asyncio.run(body())
    assert seen == ["0o700", "0o700"]
    assert list(tmp_path.iterdir()) == []


def test_whoever_has_no_key_gets_nothing():
    """A wrong key is refused before the request is looked at, in words that name where the right one is."""

    async def body():
        async with serving(ScriptedEngine(lambda prompt, key: "4")) as client:
            port = client._address[1]
            status, answer = await exchange("127.0.0.1", port, "/generate", "wrong", {})
            assert (status, answer) == (401, {"error": "wrong key; the right one is in the server's GNOMON_ENGINE_KEY"})
            assert (await exchange("127.0.0.1", port, "/nothing", KEY, {}))[0] == 404
            status, answer = await exchange("127.0.0.1", port, "/generate", KEY, {"prompt": [1]})
            assert (status, answer["error"]) == (400, "not understood: KeyError: 'keys'")
            thief = VllmServerEngine(client._address, "wrong", 5.0)
            with pytest.raises(ConfigError, match="wrong key"):
                await thief.generate(PROMPT, [0], SAMPLING)

    asyncio.run(body())


def test_noise_is_refused_and_the_next_caller_is_served():
    """Neither bytes that are no HTTP nor a body too large, too deep or no object nor a caller who hangs up disturbs
    anybody else.
    """
    head = f"POST / HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {{}}\r\n\r\n"
    bodies = (b"[" * 100_000, b"[]", b"9" * 5000, b"\xff\xfe", b'{"a": ')
    noises = [
        b"hello\r\n\r\n", b"\x00" * 9, head.format(99_999_999_999).encode(), head.format("9" * 5000).encode(),
        *(head.format(len(text)).encode() + text for text in bodies),
    ]  # fmt: skip

    async def body():
        async with serving(ScriptedEngine(lambda prompt, key: "4")) as client:
            for noise in noises:
                reader, writer = await asyncio.open_connection(*client._address)
                writer.write(noise)
                writer.write_eof()
                said = await asyncio.wait_for(reader.read(), 5)
                assert said.startswith(b"HTTP/1.1 400") or (said == b"" and b"HTTP" not in noise), noise[:80]
                writer.close()
            assert len(await client.generate(PROMPT, [0], SAMPLING)) == 1

    asyncio.run(body())


def test_a_refusal_stays_a_refusal_and_a_failure_a_failure():
    """ConfigError and EngineError of the engine arrive as such, with the address; so does any other exception."""

    def answer(prompt, key):
        if key == 1:
            raise RuntimeError("out of memory")
        return "4"

    async def body():
        async with serving(ScriptedEngine(answer, context_length=10)) as client:
            with pytest.raises(ConfigError, match=r"at http://127\.0\.0\.1:\d+: a prompt of 5 tokens"):
                await client.generate(PROMPT, [0], SAMPLING)
            with pytest.raises(EngineError, match="failed: RuntimeError: out of memory; it was not started by gnomon"):
                await client.generate([1], [1], Sampling(max_completion_length=2))

    asyncio.run(body())


def test_a_caller_that_is_cancelled_cancels_its_work():
    """The server notices that a client hung up, and cancels what it asked for."""
    ended = asyncio.Event()

    class Slow(ScriptedEngine):
        async def generate(self, prompt, keys, sampling):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.set()
                raise

    async def body():
        async with serving(Slow(lambda prompt, key: "4")) as client:
            asking = asyncio.ensure_future(client.generate(PROMPT, [0], SAMPLING))
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(body())


def test_a_server_that_answers_nobody_counts_as_dead():
    """After timeout_seconds without any reply; a reply to another caller in between is a sign of life."""

    def engine() -> ScriptedEngine:
        return ScriptedEngine(lambda prompt, key: "4", latency_seconds=1.2)

    async def body():
        async with serving(engine(), timeout_seconds=0.3) as client:
            with pytest.raises(EngineError, match=r"has answered nothing for 0\.3 s"):
                await client.generate(PROMPT, [0], SAMPLING)
        async with serving(engine(), timeout_seconds=0.9) as client:
            asking = asyncio.ensure_future(client.generate(PROMPT, [0], SAMPLING))
            await asyncio.sleep(0.6)
            await client.score(PROMPT, [65], 1.0)
            assert len(await asking) == 1

    asyncio.run(body())


def test_a_dead_address_is_an_error_at_once():
    """Nobody listens there: the message has the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()

    async def body():
        client = VllmServerEngine(address, KEY, 60.0)
        with pytest.raises(EngineError, match=rf"http://127\.0\.0\.1:{address[1]} does not answer"):
            await client.generate(PROMPT, [0], SAMPLING)
        await client.close()
        with pytest.raises(EngineError, match="engine is closed"):
            await client.generate(PROMPT, [0], SAMPLING)
        with pytest.raises(EngineError, match="engine is closed"):
            await client.load(None)

    asyncio.run(body())


def test_a_server_that_cannot_start_says_its_last_words(tmp_path):
    """Without vLLM the program ends; the first call gives its exit code and the end of its log, and close cleans up."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such thing\nexit 3\n")
    broken.chmod(0o755)

    async def body():
        plan = EngineConfig(kind="vllm", server="start", python=str(broken))
        client = VllmServerEngine.start("tiny", plan, torch.float32)
        with pytest.raises(EngineError, match=r"process \d+ exited with code 3; it last said:\nno such thing"):
            await client.generate(PROMPT, [0], SAMPLING)
        folder = client._started.folder
        assert folder.exists()
        await client.close()
        assert not folder.exists()

    asyncio.run(body())


def test_strangers_cost_neither_memory_nor_places():
    """A body of 60 MB with a wrong key is not read, of a hundred callers that say nothing those that waited longest are
    hung up on, and whoever has the key is answered all the same."""

    async def body():
        listening = socket.create_server(("127.0.0.1", 0))
        task = asyncio.ensure_future(Service(ScriptedEngine({}), KEY).serve(listening))
        address = listening.getsockname()
        silent = [await asyncio.open_connection(*address) for _ in range(100)]
        assert (await exchange(*address, "/status", KEY, {}))[0] == 200
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(silent[0][0].read(), 10) == b""
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /load HTTP/1.1\r\nAuthorization: Bearer no\r\nContent-Length: 60000000\r\n\r\n")
        assert b"401" in await asyncio.wait_for(reader.read(), 10)  # before any of the body was sent
        writer.close()
        for raw in (b"A: " + b"x" * 9000, b"Content-Length: " + b"9" * 4000, b"Content-Length: 99999999999"):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST /load HTTP/1.1\r\n" + raw + b"\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in await asyncio.wait_for(reader.read(100), 10)
            writer.close()
        for _, writer in silent:
            writer.close()
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(body())
