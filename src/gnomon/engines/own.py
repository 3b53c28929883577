"""A user's own engine, named as ``path.py:Class``: check the class before anything is loaded, make it, and try it."""

import asyncio
import inspect
import math
import os
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from gnomon.algorithms.user_pieces import load_object
from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.sections import EngineConfig
from gnomon.core.threads import release_omp_team
from gnomon.core.types import Completion, Snapshot
from gnomon.core.user_code import running_user_code, working_directory
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.pool import CompletionValidator, EnginePool, fault_of_logprobs
from gnomon.models.hf_names import as_folder
from gnomon.models.transfer.fingerprint import Fingerprint

T = TypeVar("T")

CONSTRUCTED_WITH = ("model", "dtype", "device", "max_concurrent")
"""The keyword arguments that an engine is made with, beside those of ``engine.settings``."""
TRIAL_NATS = 0.25
"""What log-probabilities of a token may differ by between `generate` and `score`, in the mean."""
_TRIAL_KEYS, _TRIAL_TOKENS = 8, 12
_DOUBT = math.log(1e12)
_OTHER_TEMPERATURES = (1 / 64, 1 / 8, 1 / 2, 2.0, 8.0)
_PUBLIC = [name for name in vars(Engine) if not name.startswith("_")]


def own_class(plan: EngineConfig) -> type:
    """Return the class that ``engine.kind`` names.

    Raises:
        ConfigError: There is no such class, it cannot be made with what it is given, or it lacks a method of `Engine`;
            the message has the protocol's line.
    """
    where = f"engine.kind = '{plan.kind}'"
    found = load_object(plan.kind)
    if not isinstance(found, type):
        raise ConfigError(f"{where} is {type(found).__name__}, and an engine is a class")
    try:
        # Only the names are bound: a wrong keyword is found before the class runs.
        inspect.signature(found).bind(**dict.fromkeys((*CONSTRUCTED_WITH, *plan.settings)))
    except TypeError as error:
        raise ConfigError(
            f"{where} is made with {', '.join(CONSTRUCTED_WITH)} and engine.settings = {plan.settings}, by keyword: "
            f"{error}"
        ) from error
    for name in _PUBLIC:
        promised, own = vars(Engine)[name], getattr(found, name, None)
        if isinstance(promised, property):
            continue  # may be set when it is made
        if not callable(own):
            raise ConfigError(f"{where} has no method {name}; {_line(name)}")
        if not inspect.iscoroutinefunction(own):
            raise ConfigError(f"{where}: {name} is not async; {_line(name)}")
        try:
            inspect.signature(own).bind(*inspect.signature(promised).parameters)
        except TypeError as error:
            raise ConfigError(f"{where}: {name} {error}; {_line(name)}") from error
    return found


def make_own(model: str, plan: EngineConfig, dtype: torch.dtype, device: torch.device) -> Engine:
    """Return a new engine of the user's class.

    Args:
        model: A folder, a hub name or a built-in name. A built-in model is written into a folder while it is loaded.

    Raises:
        ConfigError: As `own_class`, or the class raises an error, or what it made lacks ``version`` or ``beats``.
    """
    cls = own_class(plan)
    with tempfile.TemporaryDirectory(prefix="gnomon-engine-") as made:
        given = (as_folder(model, Path(made)), dtype, device, plan.max_concurrent)
        try:
            with running_user_code(f"making {plan.kind}", 600.0):
                engine: Any = cls(**dict(zip(CONSTRUCTED_WITH, given, strict=True)), **plan.settings)
                # `version` and `beats` may be attributes that the constructor sets, so only the object can tell.
                lacking = [name for name in _PUBLIC if not hasattr(engine, name)]
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{plan.kind} could not be made: {type(error).__name__}: {error}") from error
    for name in lacking:
        raise ConfigError(f"engine.kind = '{plan.kind}' has no {name}; {_line(name)}")
    return _InThread(engine)


class _InThread:
    """An engine in a thread of its own, so that one that computes or waits in a coroutine does not hold up the others.

    A call that never ends is noticed by the pool (``engine.timeout_seconds``); its thread ends with the process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def beats(self) -> int:
        return self._engine.beats

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        return await self._there(self._engine.generate(prompt, keys, sampling))

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        return await self._there(self._engine.score(prompt, response, temperature))

    async def load(self, snapshot: Snapshot) -> None:
        await self._there(self._engine.load(snapshot))

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        found: Mapping[str, Fingerprint] | None = await self._there(self._engine.fingerprints())
        if found is None:
            return None
        pairs: Any = found.items() if isinstance(found, Mapping) else [(None, None)]
        if not all(isinstance(name, str) and isinstance(one, Fingerprint) for name, one in pairs):
            raise EngineError(f"fingerprints returns {str(found)[:60]}; {_line('fingerprints')}")
        return found

    async def close(self) -> None:
        await self._there(self._engine.close())

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            # Made with the first call: an engine that is never asked needs no thread.
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="gnomon-own-engine", daemon=True).start()

        async def work() -> T:
            folder, kind, task = working_directory(), torch.get_default_dtype(), asyncio.current_task()
            try:
                return await call
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
                # What would end its thread, and let the caller wait, unless the caller itself gave up.
                if task is not None and task.cancelling():
                    raise
                raise EngineError(f"its code raised {error!r}") from error
            finally:
                release_omp_team()
                # Both belong to the process: the learner and the graders would go on in another folder or precision.
                if (working_directory(), torch.get_default_dtype()) != (folder, kind):
                    os.chdir(folder)
                    torch.set_default_dtype(kind)
                    raise EngineError(
                        "its code changed the working directory or torch's default type, for all of the run"
                    )

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))


async def try_own(kind: str, engines: EnginePool, prompt: Sequence[int], asked: Sampling, nats: float) -> str | None:
    """Hold the draws of engines of the user's own against their scores.

    Args:
        kind: Their ``engine.kind``, for messages.
        engines: All of them, which hold the weights that they answer with.
        prompt: Token ids of any text.
        asked: The run's sampling.
        nats: What `generate` and `score` may differ by for a token, in the mean.

    Returns:
        What a user should know though answers are right; None where nothing is to be said.

    Raises:
        ConfigError: An engine's draws are not of the distribution that it says; the message has the protocol's line.
        EngineError: No engine is left.
    """
    temperature = asked.temperature or 1.0

    async def fault_of(engine: Engine) -> str | None:
        fault = await fault_of_draws(engine, prompt, temperature, nats)
        return fault or (await fault_of_grammar(engine, prompt, asked) if asked.grammar.is_set else None)

    # Every engine is tried by itself: several may run on different machines.
    for name, fault in (await engines.each(fault_of)).items():
        if fault is not None:
            raise ConfigError(f"engine.kind = '{kind}', tried before training ({name}): {fault}; {_line('generate')}")
    sampling = Sampling(temperature=temperature, max_completion_length=1)
    # The same keys twice: an engine that draws by its key repeats itself.
    first, second = [await engines.generate(prompt, range(4 * _TRIAL_KEYS), sampling) for _ in range(2)]
    same = sum(one.tokens == other.tokens for one, other in zip(first, second, strict=True))
    if same >= len(first) / 2:  # rounding alone changes a few
        return None
    return (
        f"engine.kind = '{kind}' draws another token under the same key ({len(first) - same} of {len(first)} times): a "
        "run that is resumed, or asks a lost engine's answers again, gets others; draw by the key (engines/rng.py)"
    )


async def fault_of_draws(
    engine: Engine, prompt: Sequence[int], temperature: float = 1.0, nats: float = TRIAL_NATS
) -> str | None:
    """Return what contradicts an engine's own `score` in what it draws and says of its draws; None where nothing does.

    Each test bounds the chance that an honest engine fails by 1e-9, whatever the model:

    - an answer that repeats another key's, of n keys, has a probability of at most n p, p that of the answer;
    - draws x of p that have prod q(x) / p(x) >= 1e9, q at another temperature, have a probability of at most 1e-9
      (the ratio's expectation is 1; Markov's inequality). Greedy draws are of a temperature near 0.

    Args:
        engine: Asked for a few short answers, and some scores of each.
        prompt: Token ids of any text.
        temperature: Above 0.
        nats: What `generate` and `score` may differ by for a token, in the mean.

    References:
        Tests by betting: Shafer 2021, "Testing by betting", Journal of the Royal Statistical Society A 184.
    """
    sampling = Sampling(temperature=temperature, max_completion_length=_TRIAL_TOKENS)
    drawn = await engine.generate(prompt, range(_TRIAL_KEYS), sampling)
    fault = CompletionValidator(_TRIAL_KEYS, sampling, None, {engine.version}).fault(drawn)
    if fault is not None:
        return f"generate returns {fault}"

    async def scores(at: float) -> list[float]:
        return [value for done in drawn for value in await engine.score(prompt, done.tokens, at)]

    said, scored = [value for done in drawn for value in done.full_logprobs], await scores(temperature)
    if (fault := fault_of_logprobs(scored, len(said))) is not None:
        return f"score returns {fault}"
    gap = sum(abs(a - b) for a, b in zip(said, scored, strict=True)) / len(said)
    if gap > nats:
        return (
            f"generate says log-probabilities {_few(said)} of tokens that score gives {_few(scored)}, {gap:.3g} nats "
            f"apart on average, where {nats:.3g} is allowed: natural logarithms, of the weights that were loaded last"
        )
    repeated, seen, place = list[float](), set[tuple[int, ...]](), 0
    for done in drawn:
        if done.tokens in seen:
            # The logarithm of n p; a sum of such terms bounds the chance that all of these repetitions were luck.
            repeated.append(sum(scored[place : place + len(done.tokens)]) + math.log(_TRIAL_KEYS))
        seen.add(done.tokens)
        place += len(done.tokens)
    if sum(min(0.0, chance) for chance in repeated) < -_DOUBT:
        return (
            f"{_TRIAL_KEYS} keys have {len(seen)} different answers at temperature {temperature:g}, though an answer "
            f"has the probability {math.exp(sum(scored) / _TRIAL_KEYS):.2g}: each key draws its own"
        )
    for factor in _OTHER_TEMPERATURES:
        if sum(await scores(temperature * factor)) - sum(scored) > _DOUBT:
            return (
                f"its draws are likelier at temperature {temperature * factor:.2g} than at the {temperature:g} that "
                "was asked for, by its own score of their tokens"
            )
    return None


async def fault_of_grammar(engine: Engine, prompt: Sequence[int], asked: Sampling) -> str | None:
    """Return how an engine's answers break ``asked.grammar``; None where they obey it.

    Raises:
        ConfigError: It refuses the grammar.
    """
    sampling = replace(asked, max_completion_length=_TRIAL_TOKENS, record_routing=False, top_logprobs=None)
    drawn = await engine.generate(prompt, range(_TRIAL_KEYS), sampling)
    fault = CompletionValidator(_TRIAL_KEYS, sampling, None, {engine.version}).fault(drawn)
    return None if fault is None else f"generate returns {fault}"


def _few(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values[:3])


def _line(name: str) -> str:
    """Return what an engine promises under this name, in one line."""
    promised = vars(Engine)[name]
    said = (inspect.getdoc(promised) or "").partition("\n")[0]
    if isinstance(promised, property):
        return f"an engine has {name}: int. {said}"
    return f"an engine has async def {name}{inspect.signature(promised)}. {said}"
