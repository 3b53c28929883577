"""A pool of engines: the engine with the least work answers, and the requests of a lost engine are repeated."""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gnomon.core.errors import EngineError, GnomonError, UserError
from gnomon.core.metrics import Last, Measure, Metrics, Sum
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Engine, Sampling, SleepingEngine
from gnomon.engines.grammar import Grammar
from gnomon.engines.stop_strings import StopStrings
from gnomon.models.transfer.fingerprint import Fingerprint, differences
from gnomon.models.transfer.remote_weights import sent

ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0: what is left of a normalization in low precision."""


@dataclass(frozen=True)
class CompletionValidator:
    """The request that completions are checked against.

    Attributes:
        answers: One for each key.
        vocabulary_size: Token ids are below it; None when it is not known.
        versions: Of all weights that the engine was ever given, -1 for those that it began with.
    """

    answers: int
    sampling: Sampling
    vocabulary_size: int | None
    versions: Collection[int]

    def fault(self, completions: Sequence[Completion]) -> str | None:
        """Return what is wrong with the first bad answer, in one line; None when nothing is.

        >>> done = Completion((1, 2), (-0.1, float("nan")), (-0.1, -0.2), 0, 0, "stop")
        >>> CompletionValidator(1, Sampling(), 10, {0}).fault([done])
        'answer 1 of 1 has log-probabilities that are not finite'
        """
        # An engine may be a user's own class, so nothing about its answer is taken for granted.
        if not isinstance(completions, list | tuple):
            return f"{type(completions).__name__}, not a list of Completion"
        if len(completions) != self.answers:
            return f"{len(completions)} answers to {self.answers} keys"
        for number, completion in enumerate(completions, start=1):
            if not isinstance(completion, Completion):
                return f"answer {number} of {self.answers} is {type(completion).__name__}, not a Completion"
            said = self._of_one(completion)
            if said is not None:
                return f"answer {number} of {self.answers} has {said}"
        return None

    def _of_one(self, completion: Completion) -> str | None:
        tokens, oldest, newest = completion.tokens, completion.oldest_version, completion.newest_version
        # The order matters: each check may rely on those before it.
        if not _are(tokens, int, is_tuple=True):
            return f"tokens {str(tokens)[:60]}, not a tuple of int"
        if not tokens:
            return "no token, not even the one that ends it"
        if len(tokens) > self.sampling.max_completion_length:
            return f"{len(tokens)} tokens, more than the {self.sampling.max_completion_length} asked for"
        beyond = math.inf if self.vocabulary_size is None else self.vocabulary_size
        if min(tokens) < 0 or max(tokens) >= beyond:
            return f"token ids from {min(tokens)} to {max(tokens)}, outside the vocabulary of {self.vocabulary_size}"
        for logprobs in (completion.logprobs, completion.full_logprobs):
            if not _are(logprobs, (float, int), is_tuple=True):
                return f"log-probabilities {str(logprobs)[:60]}, not a tuple of float"
            said = fault_of_logprobs(logprobs, len(tokens))
            if said is not None:
                return said
        stops = StopStrings.of(self.sampling)
        ended = None if stops is None else stops.first(tokens)
        if ended is not None and ended + 1 < len(tokens):
            return f"{len(tokens)} tokens, though the first {ended + 1} complete a stop string (sampling.stop)"
        grammar = Grammar.of(self.sampling)
        obeyed = len(tokens) if grammar is None else grammar.obeyed(tokens)
        if obeyed < len(tokens):
            return f"token {tokens[obeyed]} at place {obeyed + 1}, which sampling.grammar does not allow there"
        said = self._of_stop(completion, ended is not None)
        if said is not None:
            return said
        unknown = [version for version in (oldest, newest) if version not in self.versions]
        if unknown:
            return f"weights of version {unknown[0]}, which this engine was never given"
        return f"weights from version {oldest} back to {newest}" if oldest > newest else None

    def _of_stop(self, completion: Completion, is_string: bool) -> str | None:
        """Return what is wrong with how an answer says that it ended.

        Args:
            is_string: Whether a stop string does.
        """
        asked, tokens = self.sampling, completion.tokens
        is_ended = is_string or tokens[-1] in asked.stop_ids
        if completion.stop not in ("stop", "length"):
            return f"stop = {completion.stop!r}, which is neither 'stop' nor 'length'"
        if completion.stop == "stop" and not is_ended and (asked.stop_ids or asked.stop):
            return f"stop = 'stop', and ends in token {tokens[-1]}, which is none of those that end an answer"
        if completion.stop == "length" and (is_ended or len(tokens) < asked.max_completion_length):
            return f"stop = 'length' after {len(tokens)} of {asked.max_completion_length} tokens, the last {tokens[-1]}"
        return None


def _are(values: Any, kind: type | tuple[type, ...], is_tuple: bool = False) -> bool:
    """Whether these are a tuple, or a list too, of one kind; some thousand take microseconds."""
    is_kept = isinstance(values, tuple) or (isinstance(values, list) and not is_tuple)
    return is_kept and all(issubclass(found, kind) for found in set(map(type, values)))


def fault_of_logprobs(logprobs: Sequence[float], tokens: int) -> str | None:
    """Return why these cannot be the log-probabilities of that many tokens; None when they can."""
    if not _are(logprobs, (float, int)):
        return f"log-probabilities {str(logprobs)[:60]}, not a list of float"
    if len(logprobs) != tokens:
        return f"{len(logprobs)} log-probabilities for {tokens} tokens"
    # A sum is not finite as soon as one term is not; a maximum would pass over NaN.
    if not math.isfinite(sum(logprobs)):
        return "log-probabilities that are not finite"
    if logprobs and max(logprobs) > ROUNDING:
        return f"a log-probability of {max(logprobs):.3g}, which is above 0"
    return None


T = TypeVar("T")

# What the event loop may be late by before its delay counts as a stop of this process.
_GRACE_SECONDS = 1.0
_CLOSING_SECONDS = 15.0
# An engine is looked at this often within its timeout.
_LOOKS = 8


class ReplicaLost(Exception):
    """The engine was taken out while this call was in flight, or by it; the caller asks another engine."""


class Replica:
    """An engine whose calls are watched.

    It is taken out, for good, when a call raises anything but a `UserError` (that one is the caller's own), when
    nothing that was asked of it ends and nothing is drawn for ``timeout_seconds``, or when the pool says so. Every call
    in flight then raises `ReplicaLost` at once and is cancelled; no caller waits for an engine that may never answer.

    Args:
        name: Name of the engine in messages.
        engine: The engine.
        timeout_seconds: Seconds without any progress after which the engine counts as dead.
    """

    def __init__(self, name: str, engine: Engine, timeout_seconds: float) -> None:
        self.name, self.engine = name, engine
        self.rows = 0
        self.cause: str | None = None
        self.versions = {engine.version}
        self._timeout_seconds = timeout_seconds
        self._heard = 0.0
        self._beats = engine.beats
        self._calls: set[asyncio.Future[Any]] = set()
        self._gone: asyncio.Future[None] | None = None

    async def ask(self, call: Callable[[Engine], Awaitable[T]], rows: int = 0, is_alone: bool = False) -> T:
        """Return what ``call`` returns, within the patience that the engine has left.

        Args:
            call: What to do with the engine.
            rows: Number of completions that the call asks for.
            is_alone: Whether the call itself must end within the timeout. Otherwise any call that ends counts as a sign
                of life. A load may hang while answers still arrive, except the first load.

        Raises:
            ReplicaLost: The engine is lost.
            UserError: The engine raises it.
        """
        if self.cause is not None:
            raise ReplicaLost(self.cause)
        if not self._calls:
            self._gone = asyncio.get_running_loop().create_future()
        assert self._gone is not None, "made with the first call in flight"
        # A task of its own: a call that hangs is left behind when the engine is lost, and the caller goes on.
        task = asyncio.ensure_future(call(self.engine))
        task.add_done_callback(_retrieve)
        self._calls.add(task)
        self.rows += rows
        try:
            await self._patiently(task, self._gone, is_alone)
            return self._outcome(task)
        finally:
            task.cancel()
            self._calls.discard(task)
            self.rows -= rows

    async def idle(self) -> None:
        """Wait until nothing that was asked of the engine is on its way."""
        while self._calls:
            await asyncio.wait(set(self._calls))
            # Callbacks of the calls that ended run before the set is looked at again.
            await asyncio.sleep(0)

    def lose(self, cause: str) -> None:
        """Take the engine out, and wake all callers that wait for it."""
        if self.cause is None:
            self.cause = cause
            # All callers that wait for this engine wake at once.
            if self._gone is not None and not self._gone.done():
                self._gone.set_result(None)

    async def close(self) -> None:
        """Close the engine, giving up on one that does not let itself be closed; sooner on one that is lost."""
        closing = asyncio.ensure_future(self.engine.close())
        closing.add_done_callback(_retrieve)
        patience = _CLOSING_SECONDS if self.cause is None else min(_CLOSING_SECONDS, self._timeout_seconds)
        await asyncio.wait({closing}, timeout=patience)
        closing.cancel()

    async def _patiently(self, task: "asyncio.Future[T]", gone: "asyncio.Future[None]", is_alone: bool) -> None:
        """Wait until the call is done or the engine lost; lose it when it was silent for the whole timeout.

        After that comes a moment more, waited for apart: when the event loop itself was held up, whatever arrived
        meanwhile is noticed in it, and an engine that keeps watch itself may say more about its end. A time in which
        this process was stopped (Ctrl-Z), or its event loop held up, is no silence of the engine.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        # During the first load the engine may still be starting, and its progress count says that it lives.
        is_strict = is_alone and self.engine.version >= 0
        grace = min(_GRACE_SECONDS, self._timeout_seconds / 16)
        either: set[asyncio.Future[Any]] = {task, gone}
        while not task.done() and self.cause is None:
            self._listen()
            since = began if is_strict else max(began, self._heard)
            asked = clock()
            left = since + self._timeout_seconds - asked
            # Short looks, so that progress is noticed between them, and a stop of this process is not taken for an
            # engine's silence.
            look = max(min(left, self._timeout_seconds / _LOOKS), grace)
            await asyncio.wait(either, timeout=look, return_when=asyncio.FIRST_COMPLETED)
            # This process itself stood still, so the engine gets that time again.
            if (late := clock() - asked - look) > grace:
                began = since + late
                continue
            self._listen()
            is_silent = is_strict or since == max(began, self._heard)
            if left <= 0 and is_silent and not task.done():
                what = "it did not take new weights" if is_alone else "it finished nothing"
                self.lose(f"{what} in {self._timeout_seconds:g} seconds (engine.timeout_seconds)")

    def _listen(self) -> None:
        """Take tokens that were drawn for a sign of life, so that long answers are told from a hang."""
        if self.engine.beats != self._beats:
            self._beats, self._heard = self.engine.beats, asyncio.get_running_loop().time()

    def _outcome(self, task: "asyncio.Future[T]") -> T:
        if self.cause is not None:
            raise ReplicaLost(self.cause)
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and (error is None or isinstance(error, UserError)):
            self._heard = asyncio.get_running_loop().time()
            return task.result()
        self.lose(str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}")
        raise ReplicaLost(self.cause) from error


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Look at the outcome of an abandoned call, so that asyncio does not report it later."""
    if not task.cancelled():
        task.exception()


def _say(text: str) -> None:
    print(text, file=sys.stderr)


class EnginePool:
    """Several engines behind one interface; implements `Engine`.

    A call goes, whole, to the engine with the fewest answers on their way, the first named among equals: rows of one
    prompt share its prefill there, and with the same calls in the same order the same engines answer. Since draws
    depend on the key alone, which engine answers changes nothing but rounding.

    An engine that raises `EngineError` or dies, that finishes nothing and draws nothing (`Engine.beats`) for
    ``timeout_seconds`` while something was asked of it, or whose answers cannot be true (`CompletionValidator`: too
    few, tokens outside the vocabulary, log-probabilities that are NaN or above 0, weights that it was never given) is
    taken out and named. What it had not answered is asked again of another one, under the same keys: nothing of it was
    handed on, so no group is doubled and none is lost. A `UserError`, such as a prompt beyond the context, is the
    caller's own and not repeated on another engine. One engine is guarded in the same way.

    With ``restart``, a lost engine comes back: it is started anew in its place, given the present weights, and asked
    nothing until their fingerprints have proved that it holds them. The others do not wait for it. When the last one is
    lost, no caller waits.

    Args:
        engines: The engines by name; all have the same model.
        vocabulary_size: Vocabulary of the model; None checks only that token ids are not negative.
        warn: Gets one line for each engine that is lost, and one when the engine is back.
        restart: Starts a new engine for the name of a lost one, and raises a GnomonError when it gives up. Snapshots
            must be stored ones (`Snapshot.stored`), since they are read again later.
        all_required: Whether weights are broadcast to all engines at once, so that the loss of one engine ends the run.

    Source: ours. Other libraries restart the engine or end the run; keyed draws make a repetition elsewhere exact.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        timeout_seconds: float = 600.0,
        vocabulary_size: int | None = None,
        warn: Callable[[str], None] = _say,
        restart: Callable[[str], Awaitable[Engine]] | None = None,
        all_required: bool = False,
    ) -> None:
        self._members = [Replica(name, engine, timeout_seconds) for name, engine in engines.items()]
        self._timeout_seconds = timeout_seconds
        self._vocabulary_size = vocabulary_size
        self._warn = warn
        self._restart, self._all_required = restart, all_required
        self._is_closed = False
        self._lost = self._returned = self._asked_again = 0
        self._told: set[Replica] = set()
        self._present: Snapshot | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def version(self) -> int:
        """The oldest version among the engines that work; -1 before the first `load`."""
        return min((member.engine.version for member in self._alive()), default=-1)

    @property
    def beats(self) -> int:
        """Signs of work of all engines together."""
        return sum(member.engine.beats for member in self._members)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``; see `Engine`.

        Raises:
            EngineError: No engine is left; the message names each engine and its cause.
            ConfigError: An engine raises it.
        """

        def fault(member: Replica, answers: Sequence[Completion]) -> str | None:
            return CompletionValidator(len(keys), sampling, self._vocabulary_size, member.versions).fault(answers)

        return await self._routed(lambda engine: engine.generate(prompt, keys, sampling), fault, len(keys))

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response``, by one of the engines; see `Engine`."""

        def fault(member: Replica, logprobs: Sequence[float]) -> str | None:
            said = fault_of_logprobs(logprobs, len(response))
            return None if said is None else f"a score has {said}"

        return await self._routed(lambda engine: engine.score(prompt, response, temperature), fault, 1)

    async def load(self, snapshot: Snapshot) -> None:
        """Let every engine that works answer with these weights; one that cannot load them is lost.

        Raises:
            EngineError: No engine is left.
        """
        if self._restart is not None:
            self._present = snapshot
        try:
            await self._everywhere(lambda member: self._load(member, snapshot))
        finally:
            self._awake.set()

    async def sleep(self) -> None:
        """Let every engine release its weights once it has answered; later calls wait for the next load.

        Raises:
            EngineError: No engine is left.
        """
        self._awake.clear()

        async def rest(member: Replica) -> None:
            await member.idle()
            await member.ask(_sleep)

        await self._everywhere(rest)

    async def each(self, call: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Return what every engine that works answers to ``call``, by name; one that cannot is lost.

        Raises:
            EngineError: No engine is left.
        """
        answers: dict[str, T] = {}

        async def ask(member: Replica) -> None:
            answers[member.name] = await member.ask(call)

        await self._everywhere(ask)
        return {member.name: answers[member.name] for member in self._alive() if member.name in answers}

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the fingerprints of every engine's weights, as one mapping where all agree; see `Engine`.

        What another engine holds differently from the first, or lacks, is in it once more as "NAME of engine ENGINE", a
        name that was not sent. A comparison with the sent weights therefore finds each engine's fault.

        Raises:
            EngineError: No engine is left.
        """
        held = await self.each(lambda engine: engine.fingerprints())
        return _together({name: prints for name, prints in held.items() if prints is not None})

    async def close(self) -> None:
        """Close every engine, the lost ones too; one that hangs is left behind after a while."""
        self._is_closed = True
        self._awake.set()
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self._members))

    def metrics(self) -> Metrics:
        """Return engines that work; since the last call of this: engines lost and back, calls asked again elsewhere."""
        measured: dict[str, Measure] = {
            "engines/alive": Last(len(self._alive())),
            "engines/lost": Sum(self._lost),
            "engines/returned": Sum(self._returned),
            "engines/asked_again": Sum(self._asked_again),
        }
        self._lost = self._returned = self._asked_again = 0
        return Metrics.of(measured)

    async def _load(self, member: Replica, snapshot: Snapshot) -> None:
        member.versions.add(snapshot.version)
        await member.ask(lambda engine: engine.load(snapshot), is_alone=True)
        # An engine of a user's own may load and forget to say so; its answers would carry a wrong version.
        if member.engine.version != snapshot.version:
            member.lose(f"it says version {member.engine.version!r} after it was given {snapshot.version}")

    async def _everywhere(self, work: Callable[[Replica], Awaitable[None]]) -> None:
        self._check()

        async def one(member: Replica) -> None:
            with suppress(ReplicaLost):
                await work(member)
            self._note(member)
            # Checked as soon as one is lost: the others may wait for it in a broadcast for ever.
            if self._all_required:
                self._check()

        asked = [asyncio.ensure_future(one(member)) for member in self._alive()]
        try:
            await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
        self._check()

    async def _routed(
        self, call: Callable[[Engine], Awaitable[T]], fault: Callable[[Replica, T], str | None], rows: int
    ) -> T:
        """Return an answer without a fault, from the first engine that gives one."""
        while True:
            await self._awake.wait()
            self._check()
            member = min(self._alive(), key=lambda member: member.rows)
            try:
                answer = await member.ask(call, rows)
                # An answer that cannot be true is treated as a loss: what else the engine says is not to be believed
                # either.
                said = fault(member, answer)
                if said is None:
                    return answer
                member.lose(f"it answered garbage: {said}")
            except ReplicaLost:
                pass
            self._note(member)
            self._asked_again += bool(self._alive())

    def _note(self, member: Replica) -> None:
        """Tell of a member that was lost, once; closing the pool is no loss, and the last loss is an error."""
        if member.cause is None or member in self._told or self._is_closed:
            return
        self._told.add(member)
        self._lost += 1
        if self._restart is not None:
            task = asyncio.ensure_future(self._restore_replica(member, self._restart))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
        left = len(self._alive())
        if left and not self._all_required:
            others = f"{left} of {len(self._members)} engines go on, and are asked what it did not answer"
            self._warn(f"lost engine {member.name}: {member.cause}; {others}")

    async def _restore_replica(self, lost: Replica, restart: Callable[[str], Awaitable[Engine]]) -> None:
        """Put an engine that was started anew in the place of a lost one, as soon as it has proved its weights."""
        await lost.close()
        while True:
            try:
                member = Replica(lost.name, await restart(lost.name), self._timeout_seconds)
                try:
                    await self._awake.wait()
                    await self._prove(member)
                    # Only a replica that has proved its weights is asked anything.
                    self._members[self._members.index(lost)] = member
                finally:
                    if member not in self._members:
                        await member.close()
            except ReplicaLost:
                continue
            except GnomonError as error:
                self._warn(f"engine {lost.name} does not come back: {error}")
                return
            self._returned += 1
            # The other engines went to sleep while this one was started.
            if not self._awake.is_set():
                with suppress(ReplicaLost):
                    await member.ask(_sleep)
            self._warn(f"engine {lost.name} is back, and holds the weights of version {member.engine.version}")
            return

    async def _prove(self, member: Replica) -> None:
        """Let an engine without requests hold the present weights, also when others came meanwhile.

        Raises:
            ReplicaLost: The engine does not hold them.
        """
        snapshot: Snapshot | None = None
        # New weights may be published during the proof; then it begins again with those.
        while snapshot is not self._present:
            snapshot = self._present
            assert snapshot is not None, "a version is never taken back"
            await self._load(member, snapshot)
            held = await member.ask(lambda engine: engine.fingerprints())
            if held is not None:
                expected = await run_in_thread(partial(sent, snapshot, held))
                wrong = differences(expected, held)
                if wrong:
                    member.lose(f"it does not hold the weights of version {snapshot.version}: {wrong[0]}")
                    raise ReplicaLost(member.cause)

    def _alive(self) -> list[Replica]:
        return [member for member in self._members if member.cause is None]

    def _check(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")
        alive = self._alive()
        causes = "; ".join(f"{member.name}: {member.cause}" for member in self._members if member not in alive)
        if not alive:
            raise EngineError(f"no engine is left to answer ({causes})")
        if causes and self._all_required:
            raise EngineError(
                f"an engine is lost ({causes}), and the others, which weights are sent to together with it, cannot go "
                "on without; go on from the newest checkpoint with gnomon resume"
            )


async def _sleep(engine: Engine) -> None:
    if not isinstance(engine, SleepingEngine):
        raise EngineError(f"{type(engine).__name__} cannot release its weights (engine.sleeps)")
    await engine.sleep()


def _together(held: Mapping[str, Mapping[str, Fingerprint]]) -> dict[str, Fingerprint] | None:
    if not held:
        return None
    first = next(iter(held.values()))
    together = dict(first)
    for engine, other in held.items():
        different = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        together |= {f"{name} of engine {engine}": (other if name in other else first)[name] for name in different}
    return together
