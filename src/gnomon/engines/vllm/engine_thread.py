"""The thread that owns vLLM: messages in, answers out, new weights between two tokens."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from gnomon.core.errors import ConfigError, EngineError, ModelError
from gnomon.core.types import Completion
from gnomon.engines.base import ContextLimits, Sampling
from gnomon.engines.rng import uniforms
from gnomon.engines.stop_strings import StopStrings
from gnomon.engines.thread import LoadRequest, PendingCall, ShutdownRequest
from gnomon.engines.vllm.sampling import ROW, SamplingRow, noted
from gnomon.engines.vllm.setup import exchange_weights, pack, tear_down
from gnomon.engines.vllm.transfer import BEGIN, FINISH, note
from gnomon.engines.vllm.transfer import noted as prints_of
from gnomon.models.hf_names import HfNames
from gnomon.models.transfer.fingerprint import Fingerprint, fingerprint

_PATIENCE_SECONDS = 30.0
"""How long `stop` waits for the current step and for vLLM to be torn down."""


@dataclass(eq=False)
class ThreadCall:
    """One call of `generate` or `score`.

    Attributes:
        keys: Sampling keys of the wanted completions.
        given: The response to score, when there is no key.
        completions: Finished completions by position among the keys.
        stops: What ends rows besides stop tokens and the budget.

    Raises:
        ConfigError: Stop strings come without a tokenizer.
    """

    prompt: tuple[int, ...]
    keys: tuple[int, ...]
    sampling: Sampling
    waiter: PendingCall
    given: tuple[int, ...] = ()
    completions: dict[int, Completion] = field(default_factory=dict)
    stops: StopStrings | None = field(init=False)

    def __post_init__(self) -> None:
        self.stops = StopStrings.of(self.sampling)

    def is_ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last token of an answer ends it, before its budget does."""
        return tokens[-1] in self.sampling.stop_ids or (self.stops is not None and self.stops.are_completed_by(tokens))


@dataclass(frozen=True)
class Transfer:
    """One call of `VllmEngine.transfer`."""

    what: str
    told: Mapping[str, Any]
    version: int
    waiter: PendingCall


@dataclass(eq=False)
class ThreadAnswer:
    """One row of a call.

    Attributes:
        name: What vLLM calls it.
        versions: Versions of the weights that drew each token.
    """

    call: ThreadCall
    place: int
    name: str
    row: SamplingRow
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VllmThread:
    """Owns vLLM's engine: it is built, stepped, given weights and torn down in one thread.

    At most ``max_concurrent`` rows are in vLLM, the rest waits here, so that all of those in vLLM are being answered
    and a row's prompt is computed by the weights that its first token is drawn from. There is one place more, for a row
    that is scored: it overtakes all waiting requests, since the proof of new weights, and with it the whole run, waits
    for it.

    Args:
        make: Builds vLLM's engine, for one row more than ``max_concurrent`` (`setup.build`).
        dtype: Type of its weights.
        spelling: Their names.
        parts: Number of processes that hold the model together.
        is_native: Whether vLLM's own sampler draws.

    Raises:
        Exception: vLLM cannot be built.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        dtype: torch.dtype,
        max_concurrent: int,
        spelling: HfNames,
        parts: int = 1,
        is_native: bool = False,
    ) -> None:
        self.version = -1
        self.beats = 0
        self.taken: dict[str, Fingerprint] = {}
        self._make = make
        self._is_native = is_native
        self._is_own_process = parts > 1
        self._is_receiving = False
        self._dtype = dtype
        self._most = max_concurrent
        self._spelling = spelling
        self._inbox: SimpleQueue[ThreadCall | LoadRequest | Transfer | ShutdownRequest] = SimpleQueue()
        self._waiting: deque[ThreadAnswer] = deque()
        self._active: dict[str, ThreadAnswer] = {}
        self._count = self._loads = 0
        self._broken: EngineError | None = None
        self._engine: Any = None
        # The constructor waits for the build, so that its errors reach the caller.
        ready: Future[ContextLimits] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="gnomon-vllm", daemon=True)
        self._thread.start()
        self.limits = ready.result()

    def send(self, message: ThreadCall | LoadRequest | Transfer) -> None:
        """Queue a message; it is looked at between two tokens."""
        self._inbox.put(message)

    def stop(self) -> bool:
        """End the thread, fail all waiting callers, and free what vLLM holds; return whether it ended in time."""
        self._inbox.put(ShutdownRequest())
        self._thread.join(_PATIENCE_SECONDS)
        return not self._thread.is_alive()

    def _run(self, ready: "Future[ContextLimits]") -> None:
        try:
            self._engine = self._make()
            model = self._engine.vllm_config.model_config
            ready.set_result(ContextLimits(int(model.max_model_len), int(model.get_vocab_size())))
        except BaseException as error:
            ready.set_exception(error)
            return
        # All messages that are there come before the next step, so that weights and requests wait for one token at
        # most.
        while not isinstance(message := self._next(), ShutdownRequest):
            if message is not None:
                self._take(message)
                continue
            try:
                self._drop_unwanted()
                self._admit()
                if self._active:
                    self._step()
                    self.beats += 1
            except Exception as error:
                self._fail_all(self._break(error))
        self._fail_all(EngineError("the engine was closed"))
        tear_down(self._engine)

    def _next(self) -> ThreadCall | LoadRequest | Transfer | ShutdownRequest | None:
        """Return the next message; wait for one when there is nothing else to do, or only half of the weights."""
        is_idle = not self._active and not self._waiting
        try:
            return self._inbox.get(block=is_idle or self._is_receiving)
        except Empty:
            return None

    def _take(self, message: ThreadCall | LoadRequest | Transfer) -> None:
        if self._broken is not None:
            message.waiter.fail(self._broken)
        elif isinstance(message, LoadRequest):
            self._load(message)
        elif isinstance(message, Transfer):
            self._transfer(message)
        elif message.given:
            self._enqueue(message, 0, SamplingRow(message.sampling, uniforms(0, 0), message.given))
        else:
            # vLLM's own sampler draws its numbers itself.
            count = 0 if self._is_native else message.sampling.max_completion_length
            for place, key in enumerate(message.keys):
                self._enqueue(message, place, SamplingRow(message.sampling, uniforms(key, count)))

    def _enqueue(self, call: ThreadCall, place: int, row: SamplingRow) -> None:
        self._count += 1
        answer = ThreadAnswer(call, place, str(self._count), row)
        if call.given:
            # A score overtakes: the proof of new weights, and with it the whole run, waits for it.
            self._waiting.appendleft(answer)
        else:
            self._waiting.append(answer)

    def _load(self, message: LoadRequest) -> None:
        """Put new weights in place. Rows on their way go on with them; those without a token start afresh.

        vLLM finds a known prompt by its tokens and a salt; the salt counts the loads, so that no prompt that older
        weights computed is found again.
        """
        taken: dict[str, Fingerprint] = {}
        try:
            # Names and shapes are checked before vLLM is touched.
            tensors = self._spelling.spell(_noted(message.snapshot.tensors(), self._dtype, taken))
        except ModelError as error:
            message.waiter.fail(EngineError(f"snapshot {message.snapshot.version} does not fit the engine: {error}"))
            return
        try:
            self._settle()
            self._put_back()
            exchange_weights(self._engine, tensors)
        except Exception as error:
            message.waiter.fail(self._break(error))
            return
        self._loads += 1
        self.version, self.taken = message.snapshot.version, taken
        message.waiter.answer(None)

    def _put_back(self) -> None:
        """Let rows without a token start afresh."""
        # Their prompts were computed by the former weights, at least in part.
        begun = [answer for answer in self._active.values() if not answer.tokens]
        self._leave(begun)
        self._waiting.extendleft(reversed(begun))

    def _transfer(self, message: Transfer) -> None:
        """Do one part of a weight transfer. From its beginning to its end no token is drawn; then as after `_load`."""
        try:
            if message.what == BEGIN:
                self._settle()
                self._put_back()
                self._is_receiving = True
                self._engine.collective_rpc(note)
            self._engine.collective_rpc(message.what, kwargs=dict(message.told))
            if message.what == FINISH:
                found = self._engine.collective_rpc(prints_of)
                pack(self._engine, [missed for _, missed in found])
                # Every process of an engine receives all tensors, so the first one's fingerprints are those of all.
                self.taken = found[0][0]
                self._is_receiving = False
                self._loads += 1
                self.version = message.version
        except Exception as error:
            self._is_receiving = False
            message.waiter.fail(self._break(error))
            return
        message.waiter.answer(None)

    def _drop_unwanted(self) -> None:
        self._leave([answer for answer in self._active.values() if not answer.call.waiter.is_waiting()])
        if any(not answer.call.waiter.is_waiting() for answer in self._waiting):
            self._waiting = deque(answer for answer in self._waiting if answer.call.waiter.is_waiting())

    def _leave(self, answers: list[ThreadAnswer]) -> None:
        if answers:
            self._engine.abort_request([answer.name for answer in answers])
        for answer in answers:
            del self._active[answer.name]

    def _admit(self) -> None:
        from vllm import TokensPrompt

        while self._waiting and len(self._active) < self._most + bool(self._waiting[0].call.given):
            answer = self._waiting.popleft()
            # A name of its own each time: vLLM may still be putting the aborted one away.
            self._count += 1
            answer.name = answer.row.name = str(self._count)
            prompt = TokensPrompt(prompt_token_ids=list(answer.call.prompt), cache_salt=f"load {self._loads}")
            self._engine.add_request(answer.name, prompt, self._asked(answer))
            self._active[answer.name] = answer

    def _asked(self, answer: ThreadAnswer) -> Any:
        """Return vLLM's settings of a row."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        call, sampling = answer.call, answer.call.sampling
        # The logits processor leaves one token possible, which temperature 0 takes without drawing.
        told: dict[str, Any] = {"temperature": 0, "extra_args": {ROW: answer.row}}
        if self._is_read(call):
            # vLLM takes seeds of 63 bits, and keys have 128.
            seed = None if call.given else call.keys[answer.place] % 2**63
            told = {"temperature": sampling.temperature, "logprobs": 0, "seed": seed}
            told["trace_decode_token_ids"] = list(call.given) or None
        return SamplingParams(
            **told,
            max_tokens=len(call.given) or sampling.max_completion_length,
            ignore_eos=True,
            stop_token_ids=[] if call.given else list(sampling.stop_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            # A shallow copy, for a row of ours is written to.
            skip_clone=True,
        )

    def _step(self) -> None:
        finished: list[ThreadAnswer] = []
        stopped: list[ThreadAnswer] = []
        for output in self._engine.step():
            answer = self._active.get(output.request_id)
            # Its caller gave up, and vLLM had one more step of it on its way.
            if answer is None:
                continue
            has_ended = self._append(answer, output.outputs[0])
            if output.finished:
                finished.append(answer)
            elif has_ended:
                stopped.append(answer)
        if self._is_own_process:
            self._fetch([answer.name for answer in (*finished, *stopped) if not self._is_read(answer.call)])
        for answer in (*finished, *stopped):
            self._finish(answer)
        for answer in finished:
            del self._active[answer.name]
        self._leave(stopped)

    def _append(self, answer: ThreadAnswer, drawn: Any) -> bool:
        """Note what was drawn, up to a token that completes a stop string, which vLLM knows nothing of; say if so."""
        for place, token in enumerate(drawn.token_ids):
            if self._is_read(answer.call):
                said = float(drawn.logprobs[place][token].logprob)
                answer.row.logprobs[len(answer.tokens)] = answer.row.full_logprobs[len(answer.tokens)] = said
            answer.tokens.append(token)
            answer.versions.append(self.version)
            if answer.call.stops is not None and answer.call.stops.are_completed_by(answer.tokens):
                return True
        return False

    def _is_read(self, call: ThreadCall) -> bool:
        """Whether vLLM says the log-probabilities of these rows itself; otherwise our logits processor notes them."""
        return self._is_native and (not call.given or self._engine.vllm_config.model_config.enable_trace_replay)

    def _settle(self) -> None:
        """Take in what vLLM draws already, by the weights before: scheduled ahead, a step is always on its way."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            self._step()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _fetch(self, names: list[str]) -> None:
        """Bring what was noted of rows that are finished from the process that drew them."""
        if names:
            found = self._engine.collective_rpc(noted, args=(names,))[0]
            for name in set(names) & self._active.keys():
                row = self._active[name].row
                row.logprobs, row.full_logprobs = found[name]

    def _finish(self, answer: ThreadAnswer) -> None:
        call, row, count = answer.call, answer.row, len(answer.tokens)
        own = tuple(row.logprobs[place] for place in range(count))
        full = tuple(row.full_logprobs[place] for place in range(count))
        if call.sampling.grammar.is_set and math.isfinite(sum(full)) and not math.isfinite(sum(own)):
            why = "sampling.grammar ends in nothing: no token may follow in an answer, or the grammar is too complex"
            call.waiter.fail(ConfigError(why))
            return
        if not math.isfinite(sum(own)) or not math.isfinite(sum(full)):
            # In the cache too by now, from where they would spoil the answers of good weights.
            raise EngineError("the model's logits are not finite (NaN or infinite): its weights are damaged")
        if call.given:
            call.waiter.answer(list(full))
            return
        call.completions[answer.place] = Completion(
            tokens=tuple(answer.tokens),
            logprobs=own,
            full_logprobs=full,
            oldest_version=answer.versions[0],
            newest_version=answer.versions[-1],
            stop="stop" if call.is_ended(answer.tokens) else "length",
        )
        if len(call.completions) == len(call.keys):
            call.waiter.answer([call.completions[place] for place in range(len(call.keys))])

    def _break(self, error: Exception) -> EngineError:
        """Note that vLLM failed: what it holds cannot be trusted any more, so every later call fails alike."""
        self._broken = EngineError(f"vLLM cannot go on: {type(error).__name__}: {error}")
        self._broken.__cause__ = error
        return self._broken

    def _fail_all(self, error: EngineError) -> None:
        for answer in [*self._active.values(), *self._waiting]:
            answer.call.waiter.fail(error)
        self._active.clear()
        self._waiting.clear()


def _noted(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, taken: dict[str, Fingerprint]
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, noting the fingerprint of each as vLLM will hold it."""
    for name, tensor in tensors:
        taken[name] = fingerprint(tensor.to(dtype) if tensor.is_floating_point() else tensor)
        yield name, tensor
