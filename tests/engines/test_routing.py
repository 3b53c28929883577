"""The experts that an engine used come with its answers, and give the learner the engine's own policy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.core.types import Completion
from gnomon.engines.base import Sampling
from gnomon.engines.batcher import Batcher, Request
from gnomon.engines.local import LocalEngine
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.decoder import AlignedDecoder, RecomputeDecoder, SameLengthDecoder
from gnomon.models.logprobs import TokenScorer
from gnomon.models.routing import Routing, recording
from gnomon.models.tiny import TinyConfig, tiny_model

LAYERS, CHOSEN = 2, 2
RECORDED = Sampling(max_completion_length=5, stop_ids=tuple(range(40)), record_routing=True)
PLAIN = replace(RECORDED, record_routing=False)
PROMPTS = ((7, 8, 9), (60, 51, 42, 10, 11), (5,), (7, 8, 9))


def build(architecture: Any = "qwen3_moe") -> Any:
    """A mixture of two layers; the engine changes how a model attends, so each test has its own."""
    return tiny_model(0, TinyConfig(width=16, heads=2, kv_heads=1, architecture=architecture))


def plain_routing(model: Any, prompt: tuple[int, ...], done: Completion) -> torch.Tensor:
    """The experts of one forward pass over the whole sequence, where the last token went nowhere."""
    ids = torch.tensor([[*prompt, *done.tokens]])
    with torch.no_grad(), recording(model) as recorder:
        model(input_ids=ids[:, :-1], use_cache=False)
    experts = recorder.experts(ids.shape[1] - 1)
    assert experts is not None
    return torch.cat([experts, torch.full((1, LAYERS, CHOSEN), -1, dtype=torch.int16)])


@torch.no_grad()
@pytest.mark.parametrize("decoder", [AlignedDecoder, SameLengthDecoder, RecomputeDecoder])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe"])
def test_every_position_has_the_experts_that_it_went_to(architecture: str, decoder: type):
    """However rows join, leave and share prompts, prompt and answer have the experts of a plain pass, the last none."""
    model = build(architecture)
    batcher = Batcher(decoder(model), max_concurrent=5)
    requests = [Request(prompt, (10 * n, 10 * n + 1), RECORDED, lambda: True) for n, prompt in enumerate(PROMPTS)]
    batcher.add(requests)
    answers: dict[int, list[Completion]] = {}
    while not batcher.is_idle:
        answers |= {requests.index(request): done for request, done in batcher.step()}

    assert len({len(done.tokens) for each in answers.values() for done in each}) > 1
    for number, completions in answers.items():
        for done in completions:
            assert done.routing is not None
            assert torch.equal(done.routing, plain_routing(model, PROMPTS[number], done))


def test_only_who_asks_is_given_the_routing(ask):
    """A request without it gets None beside one with it, a later one finds its kept prompt computed again."""
    model = build()
    answers = ask(
        LocalEngine(model, max_concurrent=2),
        [(PROMPTS[0], [1, 2], PLAIN), (PROMPTS[0], [1, 2], RECORDED), (PROMPTS[0], [3], PLAIN)],
    )

    assert [[done.routing is None for done in each] for each in answers] == [[True, True], [False, False], [True]]
    assert [done.tokens for done in answers[0]] == [done.tokens for done in answers[1]]
    for done in answers[1]:
        assert torch.equal(done.routing, plain_routing(model, PROMPTS[0], done))


def test_a_dense_model_and_a_script_have_no_routing(ask):
    """Asking for it changes nothing there."""
    [[dense]] = ask(LocalEngine(tiny_model(0)), [(PROMPTS[0], [1], RECORDED)])
    [[scripted]] = ask(ScriptedEngine(lambda prompt, key: "4"), [(PROMPTS[0], [1], RECORDED)])

    assert dense.routing is None
    assert scripted.routing is None


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe"])
def test_replayed_the_engines_experts_give_the_engines_logprobs(ask, architecture: str):
    """Between behavior and proximal only rounding is left: 1e-5 nats in float32; its free choice differs nowhere."""
    model = build(architecture)
    [completions] = ask(LocalEngine(model), [(PROMPTS[1], range(6), RECORDED)])
    scorer = TokenScorer(model)
    for done in completions:
        tokens = torch.tensor([[*PROMPTS[1], *done.tokens]])
        mask = torch.ones(1, len(done.tokens), dtype=torch.bool)
        scores = scorer(tokens, torch.tensor([5]), mask, routing=Routing(done.routing[None]))

        assert torch.allclose(scores.logprobs[0], torch.tensor(done.logprobs), atol=1e-5)
        assert torch.equal(scores.experts[0, :-1], done.routing[:-1])
