"""Conversations: what a former turn computed is not computed again, and nothing that is drawn changes."""

import asyncio
import random
from dataclasses import dataclass, replace
from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_architectures import ALIGNED, build, falcon_h1, mixtral, qwen3

from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.batcher import Batcher, Request
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.models.cpu.fused_decoder import FusedDecoder
from gnomon.models.cuda_graph_decoder import StaticDecoder, fastest_decoder, keeps_between_turns
from gnomon.models.decoder import AlignedDecoder, RecomputeDecoder, SameLengthDecoder, agrees
from gnomon.models.lora import merged_tensors
from gnomon.models.prefix import PrefixTree
from gnomon.models.tiny import tiny_model

PLENTY, LITTLE = 2**30, 24_000


@dataclass(frozen=True)
class Shape:
    """Conversations that are made: each turn's answer may have ``budget`` tokens, and is followed by a reply.

    Attributes:
        opening: Tokens that all prompts have in common, as a system message.
        exchanges: Whether the engine gets new weights between two turns of some conversations.
        rewrites: Whether some turns go on from the middle of what was said, as an agent does that shortens its history.
    """

    seed: int
    conversations: int = 5
    turns: int = 4
    opening: int = 0
    vocabulary: int = 96
    longest: int = 12
    concurrent: int = 3
    exchanges: bool = False
    rewrites: bool = False
    sampling: Sampling = Sampling(max_completion_length=8)


async def play(engine: LocalEngine, shape: Shape, load=None) -> tuple[list[list[Completion]], int]:
    """Return the answers of all conversations, turn by turn, and how many tokens were new in them.

    What is said depends on the shape alone, never on when an answer comes: with a barrier of a turn if weights change.
    """
    made = random.Random(shape.seed)
    opening = [made.randrange(1, shape.vocabulary) for _ in range(shape.opening)]
    starts = [opening + [made.randrange(1, shape.vocabulary) for _ in range(made.randint(1, 9))] for _ in range(3)]
    barrier = asyncio.Barrier(shape.conversations)
    new = 0

    async def one(number: int) -> list[Completion]:
        nonlocal new
        rng, said, answers = random.Random(f"{shape.seed} {number}"), list(starts[number % 3]), list[Completion]()
        seen = 0
        for turn in range(shape.turns):
            if shape.exchanges and await barrier.wait() == 0 and turn:
                await load(turn)
            if shape.exchanges:
                await barrier.wait()
            asked = replace(shape.sampling, max_completion_length=rng.randint(1, shape.sampling.max_completion_length))
            [done] = await engine.generate(said, [sample_key(shape.seed, 0, "a", number, turn)], asked)
            new += len(said) - seen + len(done.tokens) - 1
            seen = len(said) + len(done.tokens) - 1
            answers.append(done)
            said += done.tokens
            if shape.rewrites and turn % 2:
                seen = min(seen, cut := rng.randrange(1, len(said)))
                del said[cut:]
            said += [rng.randrange(1, shape.vocabulary) for _ in range(rng.randint(1, shape.longest))]
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        return answers

    found = await asyncio.gather(*(one(number) for number in range(shape.conversations)))
    await engine.close()
    return found, new


def talk(model, shape: Shape, kept: int, others=None) -> tuple[list[list[Completion]], int, int]:
    """Return answers, tokens that were new, and tokens that the engine computed."""

    async def body():
        engine = LocalEngine(model, shape.concurrent, shared=others is None, kept_bytes=kept)
        if others is None:
            answers, new = await play(engine, shape)
        else:
            await engine.load(Snapshot(0, lambda: merged_tensors(others[0])))
            answers, new = await play(
                engine, shape, lambda v: engine.load(Snapshot(v, lambda: merged_tensors(others[v % 2])))
            )
        return answers, new, engine.computed

    return asyncio.run(body())


def same(kept: list[list[Completion]], plain: list[list[Completion]]) -> None:
    """Assert that tokens are equal, and log-probabilities to 1e-5."""
    for ours, theirs in zip(kept, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.full_logprobs == pytest.approx(other.full_logprobs, abs=1e-5)
            assert (one.oldest_version, one.newest_version) == (other.oldest_version, other.newest_version)
            assert (one.routing is None) == (other.routing is None)
            assert one.routing is None or torch.equal(one.routing, other.routing)


def tiny():
    """The built-in model, which the fused decoder computes."""
    return tiny_model(0)


SHAPES = [
    Shape(1),
    Shape(2, conversations=9, turns=3, opening=6, concurrent=8, longest=3),
    Shape(3, rewrites=True),
    Shape(4, sampling=Sampling(max_completion_length=8, top_p=0.8, temperature=0.7)),
]
EACH = Shape(10, turns=3, opening=6, rewrites=True, sampling=Sampling(max_completion_length=6, top_k=9))


@pytest.mark.parametrize(
    ("make", "shape", "kept"),
    [
        *((tiny, shape, kept) for shape in SHAPES for kept in (PLENTY, LITTLE)),
        *((make, EACH, PLENTY) for make in ALIGNED),
        (mixtral, Shape(11, sampling=Sampling(max_completion_length=6, record_routing=True)), PLENTY),
        *(
            pytest.param(make, shape, kept, marks=pytest.mark.slow)
            for make in ALIGNED
            for shape in SHAPES
            for kept in (PLENTY, LITTLE)
        ),
    ],
)
def test_tokens_and_logprobs_are_those_without_memory(make, shape, kept):
    """Of any shape, with plenty of memory and with so little that conversations lose what was kept of them."""
    model = make() if make is tiny else build(make)

    found, new, computed = talk(model, shape, kept)
    expected, _, plainly = talk(model, shape, 0)

    same(found, expected)
    assert computed < plainly
    assert computed <= new or kept == LITTLE


@pytest.mark.parametrize("shape", [Shape(5, conversations=3), Shape(6, conversations=3, turns=8, concurrent=2)])
def test_no_token_is_computed_twice(shape):
    """Conversations with nothing in common: the engine computes each new token once."""
    _, new, computed = talk(tiny(), shape, PLENTY)

    assert computed == new


def test_a_common_beginning_is_computed_once():
    """Nine conversations with three questions and one system message of 40 tokens: fewer tokens than are new."""
    _, new, computed = talk(tiny(), Shape(7, conversations=9, concurrent=2, opening=40), PLENTY)

    assert computed <= new - 7 * 40


@pytest.mark.parametrize("kept", [PLENTY, LITTLE])
def test_new_weights_drop_what_the_former_ones_computed(kept):
    """With other weights at each turn, answers are those of an engine that computes everything anew."""
    others, shape = [tiny_model(0), tiny_model(1)], Shape(8, exchanges=True, concurrent=8)

    found, _, _ = talk(tiny_model(2), shape, kept, others)
    expected, _, _ = talk(tiny_model(2), shape, 0, others)

    same(found, expected)


def test_a_row_under_which_weights_changed_is_not_kept():
    """Its next turn is computed whole with the new weights, as without memory; so are log-probabilities."""

    def two_turns(kept: int) -> tuple[list[Completion], int]:
        model, others = tiny_model(0), tiny_model(1)
        batcher = Batcher(fastest_decoder(model), 4, kept)
        batcher.set_version(0)
        request = Request((1, 2, 3), (5,), Sampling(max_completion_length=9), lambda: True)
        batcher.add([request])
        for _ in range(4):
            batcher.step()
        model.load_state_dict(others.state_dict())
        batcher.set_version(1)
        [first] = drain(batcher)
        batcher.add([replace(request, prompt=(1, 2, 3, *first.tokens, 7), completions={})])
        before = batcher.computed
        [second] = drain(batcher)
        return [first, second], batcher.computed - before

    with torch.no_grad():
        (found, computed), (expected, _) = two_turns(PLENTY), two_turns(0)

    same([found], [expected])
    assert found[0].oldest_version == 0 < found[0].newest_version
    assert computed == 3 + 9 + 1 + len(found[1].tokens) - 1


def drain(batcher: Batcher) -> list[Completion]:
    """Return the answers of all that is asked."""
    answers = []
    while not batcher.is_idle:
        answers += [done for _, each in batcher.step() for done in each]
    return answers


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12), st.integers(0, 60))
def test_the_tree_knows_the_longest_beginning(sequences, most):
    """Of what it holds, with the states of exactly these positions; it never holds more than it may."""
    tree, held = PrefixTree(), list[tuple[int, ...]]()

    for sequence in map(tuple, sequences):
        states = torch.tensor([[[hash(sequence[: n + 1]) % 1000.0] for n in range(len(sequence))]])
        tree.keep(
            sequence, lambda first, states=states: ([(states[:, first:].clone(), -states[:, first:])], None), most
        )
        held.append(sequence)
        assert tree.size <= most
        for asked in held:
            found = tree.find(asked)
            common = max(sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(asked, h, strict=False))) for h in held)
            assert found.length <= common
            assert found.length == len(asked) or most < 8 * sum(map(len, held))
            if found.length:
                [(keys, values)] = found.states
                assert keys[0, :, 0].tolist() == [hash(asked[: n + 1]) % 1000.0 for n in range(found.length)]
                assert torch.equal(values, -keys)


def test_the_longest_unused_is_dropped_first():
    """Of three sequences in memory for two, the one that was asked for in between stays."""
    tree = PrefixTree()
    one = torch.zeros(1, 3, 1)
    for first in (1, 2, 3):
        tree.keep((first, 0, 0), lambda at: ([(one[:, at:], one[:, at:])], None), 48)
        tree.find((1, 0, 0))

    assert [tree.find((first, 0, 0)).length for first in (1, 2, 3)] == [3, 0, 3]


@pytest.mark.parametrize("make", [SameLengthDecoder, RecomputeDecoder])
def test_decoders_that_keep_nothing_say_so(make):
    """A hybrid's state is not kept, and the engine computes each turn again with the same answers."""
    model = build(falcon_h1)

    assert not make(model).keeps
    assert talk(model, Shape(9, turns=2), PLENTY)[2] == talk(model, Shape(9, turns=2), 0)[2]


def test_a_model_whose_rows_cannot_begin_with_kept_ones_is_found():
    """A model that numbers positions from the start of each call is tried, refused, and its slower way is said."""

    class Wrong(AlignedDecoder):
        """Continues at position 0."""

        def _at(self, positions):
            return super()._at(positions - positions if positions.shape[1] > 1 else positions)

    with torch.no_grad():
        assert all(agrees(make, build(qwen3), in_turns=True) for make in (AlignedDecoder, StaticDecoder, FusedDecoder))
        assert not agrees(Wrong, build(qwen3), in_turns=True)
        with pytest.warns(RuntimeWarning, match="computes its conversation again: 4.5 times"):
            assert not keeps_between_turns(Wrong(build(qwen3)), build(qwen3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ALIGNED)
def test_what_fresh_prompts_begin_with_is_computed_once(make):
    """Each row's logits are those of the row alone, and the common tokens of nine prompts are computed once.

    A prompt that is the common part and a token more may be known from an earlier call, and stays known.
    """
    model = build(make)
    made = random.Random(0)
    opening = tuple(made.randrange(3, 30) for _ in range(20))
    prompts = [(*opening, token, *range(5, 6 + token % 4)) for token in range(10, 19)]
    known = prompts[0][:21]
    decoder = AlignedDecoder(model)
    decoder.admit([known], 8, {known, *prompts})
    before = decoder.computed
    decoder.admit([known, *prompts], 8, frozenset())
    rows = [known, known, *prompts]
    together = decoder.step([row[-1] for row in rows], 8)

    assert decoder.computed - before == 20 + sum(len(prompt) - 21 for prompt in prompts) + len(rows)
    for row, found in zip(rows, together, strict=True):
        alone = AlignedDecoder(model)
        alone.admit([row], 8, frozenset())
        assert float((alone.step([row[-1]], 8)[0] - found).abs().max()) < 1e-4


def test_a_row_that_was_recorded_in_part_lends_nothing_to_one_that_asks_for_experts():
    """An answer begins unrecorded, and one with experts joins; what begins as the first has all of its experts."""
    model, drawn = build(mixtral), dict[int, Completion]()
    batcher = Batcher(AlignedDecoder(model), 4, PLENTY)
    opening, plain = (5, 6, 7, 8, 9), Sampling(max_completion_length=6)
    asks = Sampling(max_completion_length=2, record_routing=True)
    rounds = (((*opening, 1), plain, 1), ((3, 4), asks, 9), ((*opening, 2), asks, 9))
    with torch.no_grad():
        for number, (prompt, sampling, most) in enumerate(rounds):
            batcher.add([Request(prompt, (number,), sampling, lambda: True)])
            for _ in range(most):
                drawn |= {len(request.prompt): answers[0] for request, answers in batcher.step()}

    assert batcher.is_idle
    assert (drawn[len(opening) + 1].routing is None, drawn[2].routing is None) == (False, False)
