import asyncio

from gnomon.engines.base import Sampling
from gnomon.engines.scripted import ScriptedEngine


def answers(engine: ScriptedEngine, sampling: Sampling) -> list[tuple[tuple[int, ...], str]]:
    """Tokens and stop reason of keys 0, 1, 2."""
    return [(c.tokens, c.stop) for c in asyncio.run(engine.generate([7], [0, 1, 2], sampling))]


def test_a_text_is_encoded_and_ended_with_the_stop_token():
    """ "a", "aa", "aaa" with a budget of 3: the last has no room for its stop token and is cut."""
    engine = ScriptedEngine(lambda prompt, key: "a" * (key + 1))

    found = answers(engine, Sampling(max_completion_length=3, stop_ids=(257, 258)))

    assert found == [((97, 257), "stop"), ((97, 97, 257), "stop"), ((97, 97, 97), "length")]


def test_token_ids_are_cut_at_the_first_stop_token():
    """Ids may be given directly; what follows a stop token is dropped."""
    engine = ScriptedEngine(lambda prompt, key: [*prompt, 5, 9, 5], logprob=-0.5)

    assert answers(engine, Sampling(stop_ids=(9,)))[0] == ((7, 5, 9), "stop")
    [done] = asyncio.run(engine.generate([7], [0], Sampling(stop_ids=(9,))))
    assert done.logprobs == done.full_logprobs == (-0.5, -0.5, -0.5)


def test_latency_lets_others_go_first():
    """Of two engines asked at once, the one without latency answers first."""
    order = []

    async def one(name: str, seconds: float) -> None:
        await ScriptedEngine(lambda prompt, key: "x", latency_seconds=seconds).generate([1], [0], Sampling())
        order.append(name)

    async def both() -> None:
        await asyncio.gather(one("slow", 0.05), one("quick", 0.0))

    asyncio.run(both())
    assert order == ["quick", "slow"]


def test_each_answer_may_have_a_latency_of_its_own():
    """A call waits for its slowest answer alone: keys 1 and 2 take 0.02 s together, key 9 takes 0.09 s."""
    order = []
    engine = ScriptedEngine(lambda prompt, key: "x", latency_seconds=lambda prompt, key: 0.01 * key)

    async def one(keys: list[int]) -> None:
        await engine.generate([1], keys, Sampling())
        order.append(keys)

    async def all_of_them() -> None:
        await asyncio.gather(one([9]), one([1, 2]), one([0, 5]))

    asyncio.run(all_of_them())
    assert order == [[1, 2], [0, 5], [9]]
