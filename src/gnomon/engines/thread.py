"""The thread that generates: messages in, answers out, no event loop of its own."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.failpoints import failpoint
from gnomon.core.threads import release_omp_team, without_omp_team
from gnomon.core.types import Snapshot
from gnomon.engines.batcher import Batcher, Request
from gnomon.models.cuda_graph_decoder import fastest_decoder, keeps_between_turns
from gnomon.models.device import give_back
from gnomon.models.lora import merged_tensors


@dataclass(frozen=True)
class PendingCall:
    """A future of some event loop, answered from the worker's thread."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"

    @classmethod
    def here(cls) -> "PendingCall":
        """Return a new one for the running event loop."""
        loop = asyncio.get_running_loop()
        return cls(loop, loop.create_future())

    def answer(self, result: Any) -> None:
        """Wake the caller with a result."""
        self._tell(self.future.set_result, result)

    def fail(self, error: Exception) -> None:
        """Wake the caller with an error."""
        self._tell(self.future.set_exception, error)

    def is_waiting(self) -> bool:
        """Whether the caller still waits."""
        return not self.future.cancelled()

    def _tell(self, settle: Callable[[Any], None], outcome: Any) -> None:
        # A loop that ended has no callers left; a running loop may have cancelled the future by then.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else settle(outcome))


@dataclass(frozen=True)
class GenerateRequest:
    """Generate for these requests, which were made in one turn of the event loop."""

    requests: tuple[tuple[Request, PendingCall], ...]


@dataclass(frozen=True)
class LoadRequest:
    """Answer with these weights from now on."""

    snapshot: Snapshot
    waiter: PendingCall


@dataclass(frozen=True)
class InspectRequest:
    """Answer a question about the current weights, between two steps."""

    question: Callable[[nn.Module], Any]
    waiter: PendingCall


@dataclass(frozen=True)
class SleepRequest:
    """Release weights, keys and values as soon as no answer is on its way."""

    waiter: PendingCall


@dataclass(frozen=True)
class ShutdownRequest:
    """Stop."""


Message = GenerateRequest | LoadRequest | InspectRequest | SleepRequest | ShutdownRequest
_Outbox = list[Callable[[], None]]
_PATIENCE_SECONDS = 5.0
"""How long `stop` waits for the current step; a thread that hangs in it ends with the process."""


class EngineThread:
    """A thread that works with a model while callers wait, and sleeps otherwise. The first message starts the
    thread.
    """

    def __init__(self, model: nn.Module, shared: bool, max_concurrent: int, kept_bytes: int) -> None:
        self.version = -1
        self._steps = self._computed = 0
        self._model = model
        self._shared = shared
        self._max_concurrent = max_concurrent
        self._kept_bytes = kept_bytes
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._batcher: Batcher | None = None
        self._released: ReleasedWeights | None = None
        self._thread: threading.Thread | None = None

    @property
    def beats(self) -> int:
        """Signs of work so far: steps, and forward passes, of which a long prefill has many."""
        return self._steps + (0 if self._batcher is None else self._batcher.passes)

    @property
    def computed(self) -> int:
        """Tokens that went through the model so far."""
        return self._computed + (0 if self._batcher is None else self._batcher.computed)

    def send(self, message: GenerateRequest | LoadRequest | InspectRequest | SleepRequest) -> None:
        """Queue a message; it is looked at between two tokens."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gnomon-engine", daemon=True)
            self._thread.start()
        # OpenMP's threads of this thread spin for a while after its last product; the engine's need the cores.
        release_omp_team()
        self._inbox.put(message)

    def stop(self) -> None:
        """End the thread and fail all waiting callers. A thread that hangs is left behind."""
        if self._thread is not None:
            self._inbox.put(ShutdownRequest())
            self._thread.join(_PATIENCE_SECONDS)
            self._thread = None

    def _run(self) -> None:
        goes_on = True
        while goes_on and not isinstance(message := self._inbox.get(), ShutdownRequest):
            outbox: _Outbox = []
            with _Evaluating(self._model, self._shared):
                goes_on = without_omp_team(self._serve)(message, outbox)
            # Only now, with the training mode of a shared module restored, may the last callers go on.
            _deliver(outbox)

    def _serve(self, first: Message, outbox: _Outbox) -> bool:
        """Work until no caller waits, and leave the last answers in ``outbox``; return whether the thread goes on.

        A failure fails all callers that wait; the next message starts afresh.
        """
        waiters: dict[Request, PendingCall] = {}
        sleepers: list[PendingCall] = []
        message: Message | None = first
        try:
            if self._released is not None:
                return self._serve_asleep(first, self._released, outbox)
            # The decoder is chosen with the first message and in this thread, since its trials run the model.
            batcher = self._batcher = self._batcher or self._made()
            while not isinstance(message, ShutdownRequest):
                if isinstance(message, LoadRequest):
                    outbox.append(self._load(message, batcher))
                elif isinstance(message, InspectRequest):
                    outbox.append(partial(message.waiter.answer, message.question(self._model)))
                elif isinstance(message, SleepRequest):
                    sleepers.append(message.waiter)
                elif isinstance(message, GenerateRequest):
                    waiters.update(message.requests)
                    batcher.add([request for request, _ in message.requests])
                elif batcher.is_idle:
                    if self._shared or sleepers:  # the learner's turn, which needs the memory
                        batcher.release()
                    if sleepers:
                        # The counts of the batcher that goes stay in those of the engine.
                        self._steps, self._computed = self.beats, self.computed
                        # The decoder holds packed copies and caches; without the last reference their memory is free.
                        del batcher
                        self._batcher = None
                        self._released = ReleasedWeights(self._model)
                        outbox += [partial(sleeper.answer, None) for sleeper in sleepers]
                    return True
                else:
                    _deliver(outbox)
                    self._steps += 1
                    for request, answers in batcher.step():
                        waiter = waiters.pop(request)
                        refusal = partial(waiter.fail, ConfigError(request.fault))
                        outbox.append(refusal if request.fault else partial(waiter.answer, answers))
                    failpoint("decode")
                message = self._next()
        except Exception as error:
            self._batcher = None
            # The batcher is dropped with its rows: after a failed step the cache is in no known state.
            failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            failed = [
                *waiters.values(),
                *sleepers,
                *([message.waiter] if isinstance(message, LoadRequest | InspectRequest) else []),
            ]
            outbox += [partial(waiter.fail, failure) for waiter in failed]
            return True
        outbox += [partial(one.fail, EngineError("the engine was closed")) for one in (*waiters.values(), *sleepers)]
        return False

    def _serve_asleep(self, message: Message, released: "ReleasedWeights", outbox: _Outbox) -> bool:
        """Wake with the weights of a load; any other request to released weights fails."""
        if isinstance(message, ShutdownRequest):
            return False
        if isinstance(message, LoadRequest):
            released.restore()
            # No version is -2: what changed since one is not enough.
            problem = _copy(message.snapshot, self._model, -2)
            if problem is not None:
                self._released = ReleasedWeights(self._model)
                outbox.append(partial(message.waiter.fail, EngineError(f"{problem}; it had released its weights")))
                return True
            self._released, self._batcher = None, self._made()
            self.version = message.snapshot.version
            self._batcher.set_version(self.version)
            outbox.append(partial(message.waiter.answer, None))
            return True
        asleep = EngineError("the engine sleeps: it released its weights, and answers when it is given new ones (load)")
        asking = [w for _, w in message.requests] if isinstance(message, GenerateRequest) else [message.waiter]
        for waiter in asking:
            is_granted = isinstance(message, SleepRequest)
            outbox.append(partial(waiter.answer, None) if is_granted else partial(waiter.fail, asleep))
        return True

    def _made(self) -> Batcher:
        decoder = fastest_decoder(self._model)
        keeps = bool(self._kept_bytes) and keeps_between_turns(decoder, self._model)
        return Batcher(decoder, self._max_concurrent, self._kept_bytes if keeps else 0)

    def _next(self) -> Message | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _load(self, message: LoadRequest, batcher: Batcher) -> Callable[[], None]:
        problem = None if self._shared else _copy(message.snapshot, self._model, self.version)
        if problem is not None:
            return partial(message.waiter.fail, EngineError(problem))
        self.version = message.snapshot.version
        batcher.set_version(self.version)
        return partial(message.waiter.answer, None)


class _Evaluating:
    """Eval mode without gradients inside the block; a shared module gets its training mode back afterwards.

    Not inference mode for a shared module: a tensor that it keeps from there could not be used in a backward pass.
    """

    def __init__(self, model: nn.Module, shared: bool) -> None:
        self._model = model
        self._no_grad: Any = torch.no_grad() if shared else torch.inference_mode()
        self._was_training = False

    def __enter__(self) -> None:
        self._was_training = self._model.training
        if self._was_training:
            self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._no_grad.__exit__(*failure)
        if self._was_training:
            self._model.train()


class ReleasedWeights:
    """The places of a model's weights whose memory was given back.

    Parameters and buffers of the state that shared memory (tied or joined weights) share it again afterwards. Buffers
    outside of the state, such as frequencies of positions, are in no snapshot and stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self._device = next(model.parameters()).device
        self._sizes: dict[int, tuple[int, torch.device]] = {}
        self._places: list[tuple[Tensor, int, int, torch.Size, tuple[int, ...]]] = []
        with torch.inference_mode(False), torch.no_grad():
            # Tied weights are one tensor under two names.
            for tensor in {id(one): one for one in model.state_dict(keep_vars=True).values()}.values():
                memory = tensor.untyped_storage()
                self._sizes[memory.data_ptr()] = memory.nbytes(), tensor.device
                place = memory.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
                self._places.append((tensor, *place))
            for tensor, *_ in self._places:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        give_back(self._device)

    def restore(self) -> None:
        """Allocate the memory again; what is in it is undefined."""
        with torch.inference_mode(False), torch.no_grad():
            # One storage for all tensors that shared one, so that tied and joined weights are tied and joined again.
            memory = {key: torch.UntypedStorage(size, device=device) for key, (size, device) in self._sizes.items()}
            for tensor, key, offset, shape, stride in self._places:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = whole.set_(memory[key], offset, shape, stride)


def _copy(snapshot: Snapshot, model: nn.Module, version: int) -> str | None:
    """Copy a snapshot into ``model``, which has weights of ``version``, in place.

    Return None, or why it does not fit, having changed nothing.
    """
    if snapshot.since not in (None, version):
        return f"snapshot {snapshot.version} has what changed since version {snapshot.since}; the engine has {version}"
    # Everything is compared before the first tensor is copied, so that a wrong snapshot changes nothing.
    given: dict[str, Tensor] = dict(snapshot.tensors())
    own = dict(merged_tensors(model))
    missing = [] if snapshot.since is not None else sorted(own.keys() - given.keys())
    extra = sorted(given.keys() - own.keys())
    if missing or extra:
        return f"snapshot {snapshot.version} does not fit the engine's model: missing {missing}, unknown {extra}"
    wrong = [f"{n} {tuple(t.shape)} for {tuple(own[n].shape)}" for n, t in given.items() if own[n].shape != t.shape]
    if wrong:
        return f"snapshot {snapshot.version} does not fit the engine's model: shapes {', '.join(wrong)}"
    for name, tensor in given.items():
        own[name].copy_(tensor)
        failpoint("exchange")
    return None


def _deliver(outbox: _Outbox) -> None:
    for tell in outbox:
        tell()
    outbox.clear()
