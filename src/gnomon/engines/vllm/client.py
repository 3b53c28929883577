"""vLLM in a process of its own: the client of `vllm.server`, and how that is started."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.http import LOOPBACK, exchange
from gnomon.core.progress import show_progress
from gnomon.core.redaction import without_secrets
from gnomon.core.sections import EngineConfig
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.vllm.protocol import KEY, completion_from, fingerprint_from, sampling_to
from gnomon.models.transfer import file
from gnomon.models.transfer.fingerprint import Fingerprint

_LAST_LINES = 15
_STARTING_SECONDS = 600.0
"""How long a server that we started may load its model."""
_LOOKS = 8
"""How often a silent server is asked whether it works before its time is over."""


def check_address(server: str) -> tuple[str, int]:
    """Return host and port of a running server.

    Raises:
        ConfigError: This is no address on this machine, or the key is not in the environment.
    """
    parts = urlsplit(server)
    try:
        port = parts.port
    # `port` raises for what is no number from 0 to 65535.
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None:
        raise ConfigError(
            f"engine.server = '{server}' is neither \"start\" nor an address such as http://{LOOPBACK}:8777"
        )
    if parts.hostname not in (LOOPBACK, "localhost", "::1"):
        raise ConfigError(
            f"engine.server = '{server}' is on another machine, and weights travel as a file on this one; start the "
            f'server here, or use engine.server = "start"'
        )
    if parts.username or parts.password:
        raise ConfigError(f"engine.server is written into the run's files, so the key does not belong there; set {KEY}")
    if not os.environ.get(KEY):
        raise ConfigError(f"the server at {server} wants its key: set {KEY} to what it was started with")
    return parts.hostname, port


@dataclass(frozen=True)
class StartedServer:
    """A server process that gnomon started.

    Attributes:
        folder: Private to us, holds its log.
    """

    program: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def log(self) -> Path:
        """The file with the server's output."""
        return self.folder / "server.log"

    def ended(self) -> None:
        """Wait a moment for the end of the process: connections break before its last output is written."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.program.wait(timeout=5.0)

    def kill(self) -> None:
        """Kill the process and its children at once: the server has nothing to save."""
        if self.program.poll() is None:
            # Its whole process group: with tensor parallelism vLLM has processes of its own.
            os.killpg(self.program.pid, signal.SIGKILL)
        self.program.wait()
        if self.program.stdin is not None:
            self.program.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class VllmServerEngine:
    """An engine in another process; implements `Engine`.

    Weights travel as a safetensors file in shared memory, where there is room for it, and are exchanged between two
    tokens. A server that dies fails its callers at once; one that gives no answer for ``timeout_seconds`` counts as
    dead. One that gnomon started ends with gnomon, however that ends: it watches a pipe.

    Args:
        address: Host and port of the server.
        key: The secret that the server expects.
        started: The server's process, when gnomon started the server.
        draws: Who is to draw (`EngineConfig.draws`); a server that draws otherwise refuses to answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: str,
        timeout_seconds: float,
        started: StartedServer | None = None,
        draws: str = "keyed",
    ) -> None:
        self.version = -1
        self.beats = 0
        self._address = address
        self._key = key
        self._timeout = timeout_seconds
        self._started = started
        self._draws = draws
        self._latest_reply = 0.0
        # Until the first reply the server may still be loading its model.
        self._has_replied = False
        self._is_closed = False

    @classmethod
    def start(cls, model: str, plan: EngineConfig, dtype: torch.dtype) -> "VllmServerEngine":
        """Start a server and return at once; the first call waits until it has loaded its model."""
        folder, key = Path(tempfile.mkdtemp(prefix="gnomon-vllm-")), secrets.token_hex(16)
        # Ours before it is the server's: no other program can take the port in between, and calls queue until it
        # accepts them.
        with socket.create_server((LOOPBACK, 0), backlog=1024) as listening, (folder / "server.log").open("wb") as log:
            settings = ["--dtype", str(dtype).removeprefix("torch."), "--max-concurrent", str(plan.max_concurrent)]
            settings += ["--tensor-parallel", str(plan.tensor_parallel), "--draws", plan.draws]
            settings += ["--socket", str(listening.fileno()), "--guarded"]
            program = subprocess.Popen(
                [plan.python or sys.executable, "-P", "-m", "gnomon.engines.vllm.server", model, *settings],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, KEY: key, "PYTHONPATH": _path(folder)},
                pass_fds=(listening.fileno(),),
                start_new_session=True,
            )
            address = listening.getsockname()
        return cls(address, key, plan.timeout_seconds, StartedServer(program, folder), plan.draws)

    @classmethod
    def attach(cls, plan: EngineConfig) -> "VllmServerEngine":
        """Return the engine at ``plan.server``.

        Raises:
            ConfigError: As `check_address` does.
        """
        return cls(check_address(plan.server), os.environ[KEY], plan.timeout_seconds, draws=plan.draws)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``; see `VllmEngine.generate`.

        Raises:
            ConfigError: As it does.
            EngineError: The server is dead, hangs or fails.
        """
        asked = {"prompt": list(prompt), "keys": list(keys), "sampling": sampling_to(sampling)}
        asked["draws"] = self._draws
        return [completion_from(one) for one in (await self._call("/generate", asked))["completions"]]

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response``; see `VllmEngine.score`."""
        asked = {"prompt": list(prompt), "response": list(response), "temperature": temperature}
        scores: list[float] = (await self._call("/score", asked))["logprobs"]
        return scores

    async def load(self, snapshot: Snapshot) -> None:
        """Answer with these weights from now on; see `VllmEngine.load`."""
        self._check_open()
        # In a thread: writing gigabytes would hold up the event loop, and with it every other engine.
        path = await run_in_thread(lambda: file.write(snapshot.tensors()))
        try:
            with show_progress(
                "starting the vLLM server" if self._is_starting else "loading weights into the vLLM server"
            ):
                await self._call("/load", {"path": str(path), "version": snapshot.version})
        finally:
            file.remove(path)
        self.version = snapshot.version

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the fingerprints of what arrived at the server with the last `load`; see `Engine`."""
        named = (await self._call("/fingerprints", {}))["fingerprints"]
        return None if named is None else {name: fingerprint_from(values) for name, values in named.items()}

    async def close(self) -> None:
        """Kill the server if it is ours; later calls raise EngineError."""
        if not self._is_closed:
            self._is_closed = True
            if self._started is not None:
                await asyncio.to_thread(self._started.kill)

    async def _call(self, path: str, body: Any) -> Any:
        """Return the body of the reply; a cancelled caller closes the connection."""
        self._check_open()
        began = time.monotonic()
        asking = asyncio.ensure_future(exchange(*self._address, path, self._key, body))
        try:
            while not asking.done():
                patience = max(self._timeout, _STARTING_SECONDS) if self._is_starting else self._timeout
                left = patience - (time.monotonic() - max(began, self._latest_reply))
                if left <= 0:
                    raise EngineError(self._lost(f"has answered nothing for {patience:g} s"))
                asked, look = time.monotonic(), min(left, self._timeout / _LOOKS)
                await asyncio.wait({asking}, timeout=look)
                # What this process was stopped for, or its event loop held up, is no silence of the server.
                if (late := time.monotonic() - asked - look) > 1.0:
                    began = max(began, self._latest_reply) + late
                await self._listen_alongside(asking)
            status, answer = asking.result()
        except (OSError, EOFError, ValueError) as error:
            self._check_open()
            if self._started is not None:
                await asyncio.to_thread(self._started.ended)
            raise EngineError(self._lost(f"does not answer ({type(error).__name__}: {error})")) from error
        finally:
            asking.cancel()
        self._latest_reply, self._has_replied = time.monotonic(), True
        if status == 200:
            return answer
        said = answer.get("error", "nothing")
        if status in (400, 401, 404):
            raise ConfigError(f"the vLLM server at {self._where}: {said}")
        raise EngineError(self._lost(f"failed: {said}"))

    async def _listen_alongside(self, asking: "asyncio.Future[Any]") -> None:
        """Ask the server whether it works, until it answers, or the call does."""
        if asking.done():
            return
        if self._is_starting:
            self.beats += 1  # its process lives, and that is all that can be known
            return
        # Beside the call and not after it: the call may be answered while the server is asked.
        listening = asyncio.ensure_future(self._listen())
        try:
            await asyncio.wait({asking, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        """Note whether the server drew anything since the last look; one that does not say so said nothing."""
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError, TimeoutError):
            asking = exchange(*self._address, "/status", self._key, {})
            _, status = await asyncio.wait_for(asking, self._timeout / _LOOKS)
            if status["beats"] != self.beats:
                self.beats, self._latest_reply = int(status["beats"]), time.monotonic()

    @property
    def _is_starting(self) -> bool:
        """Whether it is ours, lives, and has not said anything yet."""
        return not self._has_replied and self._started is not None and self._started.program.poll() is None

    @property
    def _where(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}"

    def _lost(self, what: str) -> str:
        """Return one message with all that is known about the server."""
        if self._started is None:
            return f"the vLLM server at {self._where} {what}; it was not started by gnomon: look at its own log"
        program = self._started.program
        code = program.poll()
        state = "still runs" if code is None else f"exited with code {code}"
        lines = without_secrets(self._started.log.read_text(errors="replace")).splitlines()[-_LAST_LINES:]
        return f"the vLLM server at {self._where} {what}; process {program.pid} {state}; it last said:\n" + "\n".join(
            lines or ["(nothing)"]
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")


def _path(folder: Path) -> str:
    """Return where a server's interpreter finds this gnomon, and of what else is installed beside it nothing."""
    (folder / "path").mkdir()
    # engine.python may be another environment, whose own packages must not be shadowed by the run's.
    (folder / "path" / "gnomon").symlink_to(Path(__file__).parents[2], target_is_directory=True)
    return os.pathsep.join(filter(None, (str(folder / "path"), os.environ.get("PYTHONPATH", ""))))
