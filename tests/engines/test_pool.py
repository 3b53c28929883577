"""Several engines as one: who is asked, what becomes of a lost one's questions, and when there is nobody left."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines import thread as worker
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.models.transfer.fingerprint import Fingerprint, fingerprint

PROMPT = [7, 8, 9]
SAMPLING = Sampling(max_completion_length=12, stop_ids=(257,))
WEIGHTS = Snapshot(0, lambda: iter(()))


def words(prompt: tuple[int, ...], key: int) -> list[int]:
    """Return an answer that the key decides."""
    return [(key * 7 + n) % 250 for n in range(1 + key % 5)]


def scripted(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(words, **settings)


@dataclass
class Faulty:
    """A scripted engine whose calls go through ``spoil`` once it has answered ``good`` of them; keeps a ledger."""

    spoil: Callable[[Completion], Any]
    good: int = 0
    latency_seconds: float = 0.0
    ledger: list[tuple[int, ...]] = field(default_factory=list)
    inner: ScriptedEngine = field(default_factory=scripted)

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def beats(self) -> int:
        return self.inner.beats

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.ledger.append(tuple(keys))
        number = len(self.ledger)
        await asyncio.sleep(self.latency_seconds)
        answers = await self.inner.generate(prompt, keys, sampling)
        if number <= self.good:
            return answers
        spoilt = [self.spoil(answer) for answer in answers]
        if any(isinstance(one, float) for one in spoilt):
            await asyncio.sleep(max(spoilt))
        return [one for one in spoilt if one is not None]

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        return [float("nan")] * len(response)

    async def load(self, snapshot: Snapshot) -> None:
        await self.inner.load(snapshot)

    async def fingerprints(self) -> None:
        return None

    async def close(self) -> None:
        await self.inner.close()


def dies(answer: Completion) -> Completion:
    raise EngineError("out of memory")


def breaks(answer: Completion) -> Completion:
    raise ConnectionResetError("the other side has gone")


def hangs(answer: Completion) -> float:
    return 1e6


def with_pool(pool: EnginePool, work: Callable[[EnginePool], Any]) -> Any:
    """Return what ``work`` returns of a pool that was given its first weights, and that is closed afterwards."""

    async def body() -> Any:
        await pool.load(WEIGHTS)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(body())


async def groups(pool: Engine, count: int = 12, size: int = 4) -> list[list[Completion]]:
    """Ask for so many groups at once, each with keys of its own."""
    asked = [pool.generate(PROMPT, range(size * n, size * (n + 1)), SAMPLING) for n in range(count)]
    return list(await asyncio.gather(*asked))


def tokens(answers: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[done.tokens for done in group] for group in answers]


ALONE = tokens(with_pool(EnginePool({"one": scripted()}), groups))

SPOILS = {
    "raises": (dies, "out of memory"),
    "loses its connection": (breaks, "ConnectionResetError: the other side has gone"),
    "hangs": (hangs, "it finished nothing in 0.2 seconds"),
    "too few": (lambda done: None, "0 answers to 4 keys"),
    "outside the vocabulary": (lambda done: replace(done, tokens=(300,) * len(done.tokens)), "outside the vocabulary"),
    "negative ids": (lambda done: replace(done, tokens=(-1,) * len(done.tokens)), "token ids from -1 to -1"),
    "not a number": (
        lambda done: replace(done, logprobs=(float("nan"),) * len(done.tokens)),
        "log-probabilities that are not finite",
    ),
    "impossible token": (
        lambda done: replace(done, full_logprobs=(float("-inf"),) * len(done.tokens)),
        "log-probabilities that are not finite",
    ),
    "above zero": (lambda done: replace(done, logprobs=(0.5,) * len(done.tokens)), "a log-probability of 0.5"),
    "other lengths": (lambda done: replace(done, logprobs=(*done.logprobs, -0.1)), "log-probabilities for"),
    "too long": (
        lambda done: replace(done, tokens=(1,) * 13, logprobs=(-0.1,) * 13, full_logprobs=(-0.1,) * 13),
        "13 tokens, more than the 12 asked for",
    ),
    "unknown weights": (lambda done: replace(done, newest_version=9), "weights of version 9"),
    "weights that went back": (
        lambda done: replace(done, oldest_version=0, newest_version=-1),
        "from version 0 back to -1",
    ),
    "tokens of another type": (lambda done: replace(done, tokens=tuple(map(float, done.tokens))), "not a tuple of int"),
    "tokens in a tensor": (lambda done: replace(done, tokens=torch.tensor(done.tokens)), "not a tuple of int"),
    "numbers in a tensor": (lambda done: replace(done, logprobs=torch.tensor(done.logprobs)), "not a tuple of float"),
    "tokens in a list": (lambda done: replace(done, tokens=list(done.tokens)), "not a tuple of int"),
    "fields alone": (lambda done: {"tokens": done.tokens}, "answer 1 of 4 is dict, not a Completion"),
    "nothing": (lambda done: replace(done, tokens=(), logprobs=(), full_logprobs=()), "no token"),
    "another word": (lambda done: replace(done, stop="eos"), "stop = 'eos', which is neither"),
    "an end that is none": (lambda done: replace(done, tokens=(*done.tokens[:-1], 1), stop="stop"), "ends in token 1"),
    "cut before the budget": (lambda done: replace(done, stop="length"), "stop = 'length' after"),
}


@pytest.mark.parametrize(("spoil", "cause"), SPOILS.values(), ids=SPOILS.keys())
@pytest.mark.parametrize("good", [0, 2])
def test_a_lost_engines_questions_are_asked_again_and_nothing_changes(spoil: Any, cause: str, good: int):
    """Whatever goes wrong: every group comes once, in its place, with the draws of a run without the fault."""
    said: list[str] = []
    bad, well = Faulty(spoil, good), scripted()
    pool = EnginePool({"bad": bad, "well": well}, 0.2, 258, warn=said.append)
    answers = with_pool(pool, groups)

    assert tokens(answers) == ALONE
    assert len(said) == 1
    assert said[0].startswith("lost engine bad: ")
    assert cause in said[0]
    assert said[0].endswith("; 1 of 2 engines go on, and are asked what it did not answer")
    values = pool.metrics().values()
    assert (values["engines/alive"], values["engines/lost"]) == (1, 1)
    assert values["engines/asked_again"] == len(bad.ledger) - good
    assert pool.metrics()["engines/lost"] == 0


@pytest.mark.parametrize(("spoil", "cause"), SPOILS.values(), ids=SPOILS.keys())
def test_one_engine_alone_is_guarded_too(spoil: Any, cause: str):
    """The last engine's fault is an EngineError that names it and its cause, for everybody who waits."""
    pool = EnginePool({"only": Faulty(spoil)}, 0.2, 258)

    with pytest.raises(EngineError, match="no engine is left to answer") as caught:
        with_pool(pool, groups)
    assert "(only: " in str(caught.value)
    assert cause in str(caught.value)


def test_when_the_last_one_goes_each_is_named():
    """Three engines, three causes, one message."""
    pool = EnginePool({"a": Faulty(dies), "b": Faulty(hangs), "c": Faulty(lambda done: None)}, 0.2, warn=lambda _: None)

    with pytest.raises(EngineError) as caught:
        with_pool(pool, groups)
    for part in ("a: out of memory", "b: it finished nothing in 0.2 seconds", "c: it answered garbage: 0 answers"):
        assert part in str(caught.value)


def test_the_engine_with_the_least_to_do_is_asked():
    """Twelve groups of 4 over three engines of one speed: four each, in turn; a big group counts by its rows."""
    ledgers = [Faulty(dies, 10**6, 0.01) for _ in range(3)]
    named = {f"e{n}": engine for n, engine in enumerate(ledgers)}
    with_pool(EnginePool(named), groups)
    assert [[keys[0] // 4 for keys in engine.ledger] for engine in ledgers] == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
    ]

    async def uneven(pool: EnginePool) -> None:
        await asyncio.gather(*(pool.generate(PROMPT, range(n), SAMPLING) for n in (9, 2, 3, 3, 2)))

    ledgers = [Faulty(dies, 10**6, 0.01) for _ in range(2)]
    with_pool(EnginePool({"a": ledgers[0], "b": ledgers[1]}), uneven)
    assert [[len(keys) for keys in engine.ledger] for engine in ledgers] == [[9], [2, 3, 3, 2]]


def test_a_prompt_that_is_too_long_is_the_callers_own():
    """A ConfigError goes to whoever asked, no other engine is asked, and nobody is lost."""
    said: list[str] = []
    pool = EnginePool({n: scripted(context_length=20) for n in "ab"}, warn=said.append)

    async def ask(pool: EnginePool) -> None:
        with pytest.raises(ConfigError, match="exceed the context of 20"):
            await pool.generate([1] * 9, [0], SAMPLING)
        assert len(await pool.generate([1] * 8, [0], SAMPLING)) == 1

    with_pool(pool, ask)
    assert said == []
    assert pool.metrics()["engines/alive"] == 2


@dataclass
class Slow(ScriptedEngine):
    """Takes half a second for an answer, and says that it works only if it does."""

    is_working: bool = True

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        for _ in range(20):
            await asyncio.sleep(0.025)
            self.beats += self.is_working
        return await super().generate(prompt, keys, sampling)


@pytest.mark.parametrize("is_working", [True, False])
def test_a_long_answer_is_no_hang(is_working: bool):
    """An answer that takes several timeouts is waited for while tokens are drawn, and only then."""
    pool = EnginePool({"a": Slow(lambda prompt, key: "4", is_working=is_working)}, 0.2)

    async def ask(pool: EnginePool) -> None:
        if is_working:
            assert len(await pool.generate([1], [0], SAMPLING)) == 1
        else:
            with pytest.raises(EngineError, match=r"it finished nothing in 0\.2 seconds"):
                await pool.generate([1], [0], SAMPLING)

    with_pool(pool, ask)


@dataclass
class Stubborn(ScriptedEngine):
    """Answers, and does not take other weights as it should: hangs, raises, or stays what it was."""

    how: str = "hangs"

    async def load(self, snapshot: Snapshot) -> None:
        if snapshot.version < 3:
            await super().load(snapshot)
        elif self.how == "hangs":
            await asyncio.sleep(1e6)
        elif self.how == "raises":
            raise EngineError("snapshot 3 does not fit")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("hangs", "it did not take new weights in 0.3 seconds"),
        ("raises", "snapshot 3 does not fit"),
        ("ignores", "it says version 0 after it was given 3"),
    ],
)
def test_an_engine_that_does_not_take_new_weights_is_lost(how: str, cause: str):
    """Also while it goes on answering; the others have the new version, which is the pool's."""
    said: list[str] = []
    pool = EnginePool({"bad": Stubborn(words, how=how), "well": scripted()}, 0.3, warn=said.append)

    async def work(pool: EnginePool) -> list[list[Completion]]:
        async def busily() -> None:
            while True:
                await asyncio.gather(groups(pool), asyncio.sleep(0.02))

        busy = asyncio.create_task(busily())
        await pool.load(Snapshot(3, WEIGHTS.tensors))
        busy.cancel()
        return await groups(pool)

    answers = with_pool(pool, work)
    assert pool.version == 3
    assert {done.oldest_version for group in answers for done in group} == {3}
    assert [cause in line for line in said] == [True]


def test_the_version_of_the_pool_is_the_oldest():
    """While one engine still loads, nobody may believe that all answers are new."""
    slow = Stubborn(words)
    pool = EnginePool({"slow": slow, "quick": scripted()}, 0.2, warn=lambda _: None)

    async def work(pool: EnginePool) -> tuple[int, int]:
        loading = asyncio.create_task(pool.load(Snapshot(3, WEIGHTS.tensors)))
        await asyncio.sleep(0.05)
        before = pool.version
        await loading
        return before, pool.version

    assert with_pool(pool, work) == (0, 3)


def test_an_engine_that_is_slow_and_steady_is_not_lost():
    """Eight answers, each 0.15 s after the one before, are no silence of 0.3 s, long as the last one waits."""

    class OneByOne(ScriptedEngine):
        async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
            await asyncio.sleep(0.15 * (1 + keys[0]))
            return await super().generate(prompt, keys, sampling)

    async def work(pool: EnginePool) -> int:
        return len(await asyncio.gather(*(pool.generate(PROMPT, [n], SAMPLING) for n in range(8))))

    assert with_pool(EnginePool({"slow": OneByOne(words)}, 0.3), work) == 8


def test_a_loop_that_was_held_up_is_not_held_against_the_engine():
    """When somebody blocks the event loop beyond the timeout, answers that arrived meanwhile still count."""

    async def work(pool: EnginePool) -> int:
        asked = asyncio.create_task(groups(pool))
        await asyncio.sleep(0.01)
        time.sleep(0.5)
        return len(await asked)

    assert with_pool(EnginePool({"one": scripted(latency_seconds=0.1)}, 0.2), work) == 12


def test_a_process_that_was_stopped_waits_as_long_as_before():
    """Stopped again and again (Ctrl-Z, then fg) for longer than the timeout, it waits for an engine that works."""

    class Working(ScriptedEngine):
        async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
            for _ in range(4):
                await asyncio.sleep(0.01)
                time.sleep(0.6)  # nothing of this process runs meanwhile, the engine no more than the pool
            return await super().generate(prompt, keys, sampling)

    async def work(pool: EnginePool) -> int:
        return len(await pool.generate(PROMPT, [1], SAMPLING))

    assert with_pool(EnginePool({"one": Working(words)}, 0.3), work) == 1


def test_a_bad_score_loses_the_engine_and_is_asked_elsewhere():
    """NaN is no log-probability."""
    said: list[str] = []
    pool = EnginePool({"bad": Faulty(dies), "well": Local(tiny_model(0))}, warn=said.append)

    async def work(pool: EnginePool) -> list[float]:
        return await pool.score(PROMPT, [1, 2], 1.0)

    assert len(asyncio.run(work(pool))) == 2
    assert "a score has log-probabilities that are not finite" in said[0]


@dataclass
class Holding(ScriptedEngine):
    """Says that it holds these weights."""

    weights: dict[str, float] = field(default_factory=dict)

    async def fingerprints(self) -> dict[str, Fingerprint]:
        return {name: fingerprint(torch.tensor([value])) for name, value in self.weights.items()}


def test_what_every_engine_holds_can_be_compared_with_what_was_sent():
    """Equal engines say what one says; a tensor that one holds wrongly, lacks or made up shows, whichever it is."""
    sent = {"a": 1.0, "b": 2.0}

    def held(*engines: dict[str, float]) -> dict[str, Fingerprint]:
        named = {f"e{n}": Holding(words, weights=weights) for n, weights in enumerate(engines)}
        return with_pool(EnginePool(named), lambda pool: pool.fingerprints())

    expected = held(sent)
    assert held(sent, sent, sent) == expected
    for wrong in ({"a": 1.0, "b": 3.0}, {"a": 1.0}, {**sent, "c": 0.0}):
        for order in ((sent, wrong), (wrong, sent), (wrong, wrong)):
            assert held(*order) != expected
    assert set(held(sent, {"a": 1.0, "b": 3.0})) == {"a", "b", "b of engine e1"}
    assert with_pool(EnginePool({"a": Faulty(dies)}), lambda pool: pool.fingerprints()) is None


class Local(LocalEngine):
    """The tiny model, whose score is a constant."""

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        return [-1.0] * len(response)


def test_real_engines_answer_as_one_of_them_would():
    """Two local engines of one model give the tokens that one gives, and go on when a third breaks on its way."""

    def local() -> LocalEngine:
        return LocalEngine(tiny_model(0, TinyConfig(context_length=96)), max_concurrent=8)

    async def ask(pool: EnginePool) -> list[list[tuple[int, ...]]]:
        found = tokens(await groups(pool, count=6))
        await pool.close()
        return found

    def answers(**engines: Engine) -> list[list[tuple[int, ...]]]:
        return asyncio.run(ask(EnginePool(engines, warn=lambda _: None)))

    alone = answers(a=local())
    assert answers(a=local(), b=local()) == alone
    assert answers(a=local(), b=Faulty(dies), c=local()) == alone


def test_a_cancelled_caller_cancels_its_call():
    """What nobody waits for any more takes no place: the rows in flight are given back."""
    ledgers = {name: Faulty(dies, 10**6, 0.05) for name in "ab"}

    async def work(pool: EnginePool) -> None:
        big = asyncio.create_task(pool.generate(PROMPT, range(50), SAMPLING))
        await asyncio.sleep(0.01)
        big.cancel()
        await asyncio.gather(big, return_exceptions=True)
        await pool.generate(PROMPT, [0], SAMPLING)

    with_pool(EnginePool(ledgers), work)
    assert Counter(len(engine.ledger) for engine in ledgers.values()) == Counter({2: 1, 0: 1})


class Blocked(torch.nn.Module):
    """A tiny model whose forward pass never ends until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(0)
        self.config, self.go = self.inner.config, threading.Event()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.go.wait()
        return self.inner(*args, **kwargs)


def test_a_thread_that_hangs_holds_up_neither_the_answer_nor_the_end(monkeypatch: pytest.MonkeyPatch):
    """The call ends with the timeout, closing and the event loop's own end soon after; let go, the thread ends too."""
    monkeypatch.setattr(worker, "_PATIENCE_SECONDS", 0.2)
    model = Blocked()
    with pytest.raises(EngineError, match=r"local: it finished nothing in 0\.5 seconds \(engine\.timeout_seconds\)"):
        asyncio.run(_ask_and_close(EnginePool({"local": LocalEngine(model)}, 0.5)))
    model.go.set()
    for thread in threading.enumerate():
        if thread.name == "gnomon-engine":
            thread.join(60)
            assert not thread.is_alive()


async def _ask_and_close(pool: EnginePool) -> None:
    try:
        await pool.generate(PROMPT, [0], SAMPLING)
    finally:
        await pool.close()
