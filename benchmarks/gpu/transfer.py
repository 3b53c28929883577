"""Two GPUs, one command: ``python -m benchmarks.gpu.transfer`` sends weights from one to a vLLM on the other, by NCCL.

What must hold: twice, with other weights, the engine's fingerprints are those of the learner's tensors to the bit, and
it says what a local engine with them says. Then seconds a GiB, beside one copy of the same bytes from device to device.
Needs vLLM, no network and no tokenizer; from a checkout: ``PYTHONPATH=src``. Prints one JSON object; the exit code is 1
when the law does not hold, 2 where it cannot be tried. Never run so far: no session has had two GPUs.
"""

import asyncio
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.shapes import SHAPES, make
from gnomon.engines.local import LocalEngine
from gnomon.engines.vllm.transfer import BACKEND, Sender, rendezvous
from gnomon.models.lora import merged_tensors
from gnomon.models.transfer.fingerprint import fingerprints

PROMPT, RESPONSE = (5, 6, 7, 8), (9, 10, 11, 12, 13, 14)
BOUND_NATS = 0.2
PATIENCE_SECONDS = 300.0


def main() -> int:
    """Try the law, print what came of it, and return the exit code."""
    why = _missing()
    if why:
        print(json.dumps({"holds": None, "left out": why}))
        return 2
    found = law()
    print(json.dumps(found))
    return 0 if found["holds"] else 1


def law(shape: str = "0.6b") -> dict[str, Any]:
    """Return what was measured, ``holds`` among it."""
    device = torch.device("cuda:0")
    model = make(SHAPES[shape], device, torch.bfloat16)
    size = sum(tensor.nbytes for _, tensor in merged_tensors(model)) / 2**30
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = _Engine(folder)
        try:
            sender = Sender(rendezvous("127.0.0.1", [1]), [engine.tell], [1], lambda: merged_tensors(model))
            for engine.version in range(1, 5):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.0 + 2.0**-6)
                torch.cuda.synchronize()
                began = time.perf_counter()
                sent = sender.send()
                rows.append(_compared(model, sent, engine, time.perf_counter() - began))
            sender.close()
        finally:
            engine.close()
    holds = all(row["equal"] and row["apart_nats"] < BOUND_NATS for row in rows)
    seconds = min(row["seconds"] for row in rows) / size
    return {"holds": holds, "gib": size, "seconds_per_gib": seconds, "copy_seconds_per_gib": _copy(model), "rows": rows}


def _compared(model: Any, sent: Mapping[str, Any], engine: "_Engine", seconds: float) -> dict[str, Any]:
    """Return whether the engine holds and says what the model is."""
    held, said = engine.ask()
    local = LocalEngine(model, 1)
    wanted = asyncio.run(local.score(PROMPT, RESPONSE, 1.0))
    asyncio.run(local.close())
    apart = sum(abs(a - b) for a, b in zip(wanted, said, strict=True)) / len(wanted)
    return {
        "equal": dict(held) == dict(sent) == fingerprints(merged_tensors(model)),
        "apart_nats": apart,
        "seconds": seconds,
    }


def _copy(model: Any) -> float:
    """Return seconds a GiB of a plain copy to the other device."""
    tensors = [tensor for _, tensor in merged_tensors(model)]
    others = [torch.empty_like(tensor, device="cuda:1") for tensor in tensors]
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for there, here in zip(others, tensors, strict=True):
            there.copy_(here)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found) / (sum(tensor.nbytes for tensor in tensors) / 2**30)


class _Engine:
    """A vLLM in a process of its own, which sees the second GPU alone."""

    def __init__(self, folder: str) -> None:
        self.version = 0
        self._lock = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[1] if seen else "1"
        try:
            self._process = context.Process(target=_serve, args=(folder, theirs), daemon=True)
            self._process.start()
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if seen:
                os.environ["CUDA_VISIBLE_DEVICES"] = seen
        self._answer()

    def tell(self, what: str, told: Mapping[str, Any]) -> None:
        """Tell it a part of the transfer."""
        self._ask(what, dict(told))

    def ask(self) -> tuple[Mapping[str, Any], list[float]]:
        """Return its fingerprints, and what it says."""
        found: tuple[Mapping[str, Any], list[float]] = self._ask("", {})
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()

    def _ask(self, what: str, told: Mapping[str, Any]) -> Any:
        with self._lock:
            self._pipe.send((what, told, self.version))
            return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(PATIENCE_SECONDS):
            raise TimeoutError(f"the engine did not answer within {PATIENCE_SECONDS:g} s")
        value, error = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return value


def _serve(folder: str, pipe: Any) -> None:
    """Answer with one engine until killed."""
    from gnomon.engines.vllm.engine import VllmEngine

    async def serve() -> None:
        engine = VllmEngine(folder, torch.bfloat16, 4, receives=BACKEND)
        pipe.send((None, ""))
        while True:
            what, told, version = await asyncio.to_thread(pipe.recv)
            value, error = None, ""
            try:
                if what:
                    await engine.transfer(what, told, version)
                else:
                    value = await engine.fingerprints(), await engine.score(PROMPT, RESPONSE, 1.0)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            pipe.send((value, error))

    asyncio.run(serve())


def _missing() -> str:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    count = torch.cuda.device_count()
    return "" if count > 1 else f"it takes two GPUs, NCCL being between devices, and here are {count}"


if __name__ == "__main__":
    sys.exit(main())
