"""Generation in this process, with any causal language model that transformers loads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import nn

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import ContextLimits, Sampling
from gnomon.engines.batcher import Request
from gnomon.engines.thread import EngineThread, GenerateRequest, InspectRequest, LoadRequest, PendingCall, SleepRequest
from gnomon.models.decoder import context_length, vocabulary_size
from gnomon.models.lora import merged_tensors
from gnomon.models.reference import response_logprobs
from gnomon.models.transfer.fingerprint import Fingerprint, fingerprints

T = TypeVar("T")


class LocalEngine:
    """Continuous batching over a model in this process; implements `Engine`.

    Calls of `generate` made in one turn of the event loop are seen together; rows are admitted in call order, up to
    ``max_concurrent`` at a time; rows of one prompt share its prefill; a finished row's slot is given to the next.
    Given the same calls in the same order on an idle engine, results are equal to the bit; another order or batch
    changes rounding only. Calls that arrive while others run join when the thread next looks, which is a matter of
    time: repeatability to the bit then ends.

    Args:
        model: A causal language model as `load_model` returns it.
        shared: It is the learner's own module, whose weights change in place while nothing is generated, so `load` only
            notes the version; otherwise the module is the engine's (without adapters) and `load` copies and casts every
            weight into it.
        max_concurrent: Rows in the model at once; bounds the memory of keys and values. A shared engine on a CPU frees
            them, and its packed weights, while no caller waits; another keeps them for the next call.
        kept_bytes: Memory for keys and values of former answers, so that a prompt that begins with one computes its new
            tokens alone; 0 keeps none. They are dropped at `load`. What is computed together then depends on what was
            asked before, and with it the last bits.
    """

    def __init__(self, model: nn.Module, max_concurrent: int = 64, shared: bool = True, kept_bytes: int = 0) -> None:
        if max_concurrent <= 0:
            raise ConfigError(f"engine.max_concurrent must be > 0, got {max_concurrent}")
        self._limits = ContextLimits(context_length(model), vocabulary_size(model))
        self._shared = shared
        self._worker = EngineThread(model, shared, max_concurrent, kept_bytes)
        self._arrivals: list[tuple[Request, PendingCall]] = []
        self._posting: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights that answer now; -1 before the first `load`."""
        return self._worker.version

    @property
    def beats(self) -> int:
        """Steps and forward passes of the model so far."""
        return self._worker.beats

    @property
    def computed(self) -> int:
        """Tokens that went through the model so far, prompts included."""
        return self._worker.computed

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``; see `Engine`.

        A caller that is cancelled frees its rows at the next step.

        Raises:
            ConfigError: A prompt is empty, an id is outside the vocabulary, prompt and budget exceed the context, or
                stop strings come without a tokenizer.
            EngineError: The engine is closed or the model fails.
        """
        self._check_open()
        self._limits.check(prompt, sampling.max_completion_length)
        if not keys:
            return []
        waiter = PendingCall.here()
        request = Request(tuple(prompt), tuple(keys), sampling, waiter.is_waiting)
        # Calls of one turn of the event loop are collected, so that their order and batch do not depend on the
        # thread's timing.
        self._arrivals.append((request, waiter))
        # Another loop can be left here by a program that was interrupted before its turn ended.
        if self._posting is not waiter.loop:
            self._posting = waiter.loop
            waiter.loop.call_soon(self._post, waiter.loop, 0)
        completions: list[Completion] = await waiter.future
        return completions

    async def load(self, snapshot: Snapshot) -> None:
        """Answer with these weights from now on; rows on their way go on with them and say so in their versions.

        Raises:
            EngineError: Names or shapes are not this model's; its weights are as before then.
        """
        self._check_open()
        waiter = PendingCall.here()
        self._worker.send(LoadRequest(snapshot, waiter))
        await waiter.future

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response``; see `Engine`. Answers on their way wait for it.

        Computed by a plain forward pass of the engine's model; the decoder's way, token after token from a cache,
        differs from it by rounding.

        Raises:
            ConfigError: `generate` would raise it.
            EngineError: The engine is closed or the model fails.
        """
        self._check_open()
        self._limits.check(prompt, len(response))
        self._limits.check_ids("response", response)
        return await self._inspect(
            partial(response_logprobs, prompt=tuple(prompt), response=tuple(response), temperature=temperature)
        )

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the fingerprints of the engine's own weights, read from its model; None where it has none."""
        return None if self._shared else await self._inspect(lambda model: fingerprints(merged_tensors(model)))

    async def sleep(self) -> None:
        """Release weights, keys and values once all answers on their way are given; see `SleepingEngine`.

        Raises:
            EngineError: The engine is closed, or answers with the learner's own weights.
        """
        self._check_open()
        self._send_arrivals()
        if self._shared:
            raise EngineError("the engine answers with the learner's own weights, and has none that it could release")
        waiter = PendingCall.here()
        self._worker.send(SleepRequest(waiter))
        await waiter.future

    async def close(self) -> None:
        """Stop the thread; callers that still wait get an EngineError."""
        self._is_closed = True
        await asyncio.to_thread(self._worker.stop)

    async def _inspect(self, question: Callable[[nn.Module], T]) -> T:
        """Return what ``question`` says of the model, asked in the engine's thread."""
        self._check_open()
        waiter = PendingCall.here()
        self._worker.send(InspectRequest(question, waiter))
        answer: T = await waiter.future
        return answer

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _post(self, loop: asyncio.AbstractEventLoop, seen: int) -> None:
        """Send the arrivals once a whole turn of the loop has brought no more."""
        # A caller that was woken in this turn may ask at once; one more turn without arrivals says that all have
        # asked.
        if len(self._arrivals) > seen:
            loop.call_soon(self._post, loop, len(self._arrivals))
            return
        self._posting = None
        self._send_arrivals()

    def _send_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        if arrivals and not self._is_closed:
            self._worker.send(GenerateRequest(tuple(arrivals)))
            return
        for _, waiter in arrivals:
            waiter.fail(EngineError("the engine was closed"))
