"""Experts of mixture models: written down, repeated, and compared."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gnomon.core.errors import ConfigError
from gnomon.models.contexts import recomputing
from gnomon.models.logprobs import TokenScorer, TokenScores
from gnomon.models.routing import Routing, changed_fraction, moe_layers, recording, replaying
from gnomon.models.tiny import TinyConfig, tiny_model

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt_oss": {},
    "granitemoe": {"logits_scaling": 2.0},
    "deepseek_v3": DEEPSEEK,
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 12},
}
ARCHITECTURES = ("qwen3_moe", "olmoe")


def build(name: str, seed: int = 0) -> Any:
    """A mixture of two layers, four experts and two of them a token."""
    if name in ARCHITECTURES:
        return tiny_model(seed, TinyConfig(width=16, heads=2, kv_heads=1, architecture=name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **(SMALL | OTHERS.get(name, {})))
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Four rows, two of one prompt; responses of one to four tokens."""
    tokens = torch.tensor([[9, 8, 7, 1, 2, 3, 4], [9, 8, 7, 5, 6, 0, 0], [6, 5, 1, 2, 0, 0, 0], [4, 3, 2, 1, 5, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    return tokens, torch.tensor([3, 3, 2, 3]), mask


def others(experts: Tensor) -> Tensor:
    """The same choice with every expert's neighbor instead."""
    return torch.where(experts >= 0, (experts + 1) % EXPERTS, -1)


def nudge(model: nn.Module) -> None:
    """Change every weight, the routers' by much."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def gradients(model: nn.Module, scores: TokenScores) -> list[Tensor]:
    """The gradients of a score of the scores, the model's own left clean."""
    model.zero_grad()
    (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_replaying_the_own_choice_changes_no_bit_and_another_does(name: str):
    """Whatever a router makes of its logits, its own indices give its own output; others' are obeyed."""
    model, (tokens, _, _) = build(name), rows()
    with torch.no_grad():
        free = model(tokens).logits
        with recording(model) as recorder:
            assert torch.equal(model(tokens).logits, free)
        experts = recorder.experts(*tokens.shape)
        assert experts is not None
        with replaying(model, experts) as again:
            replayed = model(tokens).logits
        assert torch.equal(replayed, free)
        assert torch.equal(again.experts(*tokens.shape), experts)
        with replaying(model, others(experts)):
            assert not torch.allclose(model(tokens).logits, free, atol=1e-4)

    assert torch.equal(model(tokens).logits, free)
    assert moe_layers(model) == LAYERS
    assert experts.shape == (*tokens.shape, LAYERS, CHOSEN)
    assert experts.dtype == torch.int16


def test_a_dense_model_has_no_routing():
    """Recording gives None and replaying changes nothing."""
    model, (tokens, prompts, mask) = tiny_model(0), rows()
    scorer = TokenScorer(model)
    with torch.no_grad():
        plain = scorer(tokens, prompts, mask)
        replayed = scorer(tokens, prompts, mask, routing=Routing(torch.zeros(*tokens.shape, 1, 2, dtype=torch.int16)))
        free = scorer(tokens, prompts, mask, routing=Routing())

    assert moe_layers(model) == 0
    assert torch.equal(plain.logprobs, replayed.logprobs)
    assert free.experts is None


@pytest.mark.parametrize(("name", "found"), [("jetmoe", "no such router"), ("phimoe", "0 times")])
def test_a_router_of_another_form_is_named(name: str, found: str):
    """A mixture whose router is not known runs freely, and says so when it is asked to record or replay."""
    shapes = {"kv_channels": 8, "num_key_value_heads": 2} if name == "jetmoe" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SMALL | shapes))).eval()
    tokens, prompts, mask = rows()
    scorer = TokenScorer(model)
    scorer(tokens, prompts, mask)

    with pytest.raises(ConfigError, match=f"(?s)(JetMoe|Phimoe).*{found}.*algorithm.routing"):
        scorer(tokens, prompts, mask, routing=Routing())


@pytest.mark.parametrize("name", [*ARCHITECTURES, "granitemoe"])
@pytest.mark.parametrize("shares", [True, False], ids=["packed", "plain"])
def test_the_ratio_of_an_unchanged_policy_is_exactly_one(name: str, shares: bool):
    """Scored with a gradient under the recorded routing, every log-probability is the recorded pass's, bit for bit."""
    model = build(name)
    scorer = TokenScorer(model)
    scorer.shares_prompts &= shares
    with torch.no_grad():
        recorded = scorer(*rows(), routing=Routing())
    current = scorer(*rows(), routing=Routing(recorded.experts))

    assert scorer.is_split
    assert (current.logprobs - recorded.logprobs).abs().max() == 0.0
    assert torch.equal(current.experts, recorded.experts)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_free_experts_change_with_the_weights_and_replayed_ones_do_not(name: str):
    """After an update the metric sees other free choices, while a replayed pass uses the recorded experts alone."""
    model, (tokens, prompts, mask) = build(name), rows()
    scorer = TokenScorer(model)
    first = torch.tensor([0, 1], dtype=torch.int16).expand(*tokens.shape, LAYERS, CHOSEN)
    with torch.no_grad():
        recorded = scorer(tokens, prompts, mask, routing=Routing()).experts
    nudge(model)
    free = scorer(tokens, prompts, mask, routing=Routing())
    replayed = scorer(tokens, prompts, mask, routing=Routing(recorded))
    of_first = scorer(tokens, prompts, mask, routing=Routing(first))
    gradients(model, of_first)

    assert changed_fraction(free.experts, recorded, prompts, mask).value > 0
    assert changed_fraction(replayed.experts, recorded, prompts, mask).value > 0
    assert not torch.equal(free.logprobs, replayed.logprobs)
    for layer in model.model.layers:
        used = layer.mlp.experts.down_proj.grad.abs().amax((1, 2)) > 0
        assert used.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_routers_learn_under_replay(name: str):
    """Gates come from the current logits: they change with the router's weight, which has a gradient."""
    model, (tokens, prompts, mask) = build(name), rows()
    scorer = TokenScorer(model)
    experts = torch.tensor([2, 0], dtype=torch.int16).expand(*tokens.shape, LAYERS, CHOSEN)
    before = scorer(tokens, prompts, mask, routing=Routing(experts))
    gradients(model, before)
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    assert all(bool((router.grad.abs().amax(1)[[0, 2]] > 0).all()) for router in routers)

    with torch.no_grad():
        routers[0][2] += 1.0
        after = scorer(tokens, prompts, mask, routing=Routing(experts))
    assert not torch.allclose(before.logprobs, after.logprobs, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_routing_of_prompts_is_replayed_too(name: str):
    """Other experts at the prompt alone change what its response is given, through attention."""
    model, (tokens, prompts, mask) = build(name), rows()
    scorer = TokenScorer(model)
    with torch.no_grad():
        recorded = scorer(tokens, prompts, mask, routing=Routing())
        is_before = torch.arange(tokens.shape[1]) < prompts[:, None] - 1
        experts = torch.where(is_before[:, :, None, None], others(recorded.experts), recorded.experts)
        replayed = scorer(tokens, prompts, mask, routing=Routing(experts))

    assert bool(((recorded.logprobs - replayed.logprobs).abs() > 1e-5)[mask].all())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_and_cuts_change_nothing_under_replay(name: str):
    """A row scored alone, without padding, has the scores and the gradient that it has among others."""
    model, (tokens, prompts, mask) = build(name), rows()
    scorer = TokenScorer(model)
    with torch.no_grad():
        experts = others(scorer(tokens, prompts, mask, routing=Routing()).experts)
    together = scorer(tokens, prompts, mask, routing=Routing(experts))
    whole = gradients(model, together)
    parts, summed = [], [torch.zeros_like(p) for p in model.parameters()]
    for row in range(len(tokens)):
        end = int(prompts[row]) + int(mask[row].nonzero().max()) + 1
        cut = (tokens[row : row + 1, :end], prompts[row : row + 1], mask[row : row + 1])
        parts.append(scorer(*cut, routing=Routing(experts[row : row + 1, :end])))
        summed = [a + b for a, b in zip(summed, gradients(model, parts[-1]), strict=True)]

    assert torch.allclose(torch.cat([part.logprobs for part in parts]), together.logprobs, atol=1e-6)
    assert all(torch.allclose(a, b, atol=5e-6) for a, b in zip(summed, whole, strict=True))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "granitemoe"])
def test_what_is_computed_again_is_routed_again(name: str):
    """With layers computed again in the backward pass, after the block of the replay, gradients are the same bits."""
    model, (tokens, prompts, mask) = build(name), rows()
    scorer = TokenScorer(model)
    with torch.no_grad():
        experts = others(scorer(tokens, prompts, mask, routing=Routing()).experts)
    plain = gradients(model, scorer(tokens, prompts, mask, routing=Routing(experts)))
    free = gradients(model, scorer(tokens, prompts, mask))
    with recomputing(model):
        saved = gradients(model, scorer(tokens, prompts, mask, routing=Routing(experts)))

    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, free, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def test_rows_that_disagree_about_their_prompt_do_not_share_it():
    """Each keeps its own routing of the prompt, at the cost of computing it twice."""
    model, (tokens, prompts, mask) = build("qwen3_moe"), rows()
    scorer = TokenScorer(model)
    with torch.no_grad():
        recorded = scorer(tokens, prompts, mask, routing=Routing())
        experts = recorded.experts.clone()
        experts[1, :3] = others(experts[1, :3])
        mixed = scorer(tokens, prompts, mask, routing=Routing(experts))

    assert scorer.shares_prompts
    assert mixed.computed > recorded.computed
    assert torch.allclose(mixed.logprobs[[0, 2, 3]], recorded.logprobs[[0, 2, 3]], atol=1e-6)
    assert not torch.allclose(mixed.logprobs[1], recorded.logprobs[1], atol=1e-5)


def test_positions_without_a_routing_choose_freely():
    """-1 everywhere is no replay; -1 in some rows leaves those as they were."""
    model, (tokens, prompts, mask) = build("olmoe"), rows()
    scorer = TokenScorer(model)
    with torch.no_grad():
        free = scorer(tokens, prompts, mask, routing=Routing())
        nothing = scorer(tokens, prompts, mask, routing=Routing(torch.full_like(free.experts, -1)))
        experts = others(free.experts)
        experts[2:] = -1
        some = scorer(tokens, prompts, mask, routing=Routing(experts))

    assert torch.equal(free.logprobs, nothing.logprobs)
    assert torch.allclose(some.logprobs[2:], free.logprobs[2:], atol=1e-6)
    assert not torch.allclose(some.logprobs[:2], free.logprobs[:2], atol=1e-5)


def test_a_routing_of_another_shape_is_refused():
    """Other layers, other experts a token, or other positions were recorded on something else."""
    model, (tokens, _, _) = build("olmoe"), rows()
    shape = (*tokens.shape, LAYERS, CHOSEN)

    with pytest.raises(ConfigError, match="3 mixture layers cannot be replayed on a model of 2"):
        model_with(model, tokens, (*tokens.shape, 3, CHOSEN))
    for wrong in ((*shape[:3], 1), (4, 6, *shape[2:])):
        with pytest.raises(ConfigError, match="recorded on other rows or on another model"):
            model_with(model, tokens, wrong)


def model_with(model: Any, tokens: Tensor, shape: tuple[int, ...]) -> None:
    """Run the model under a routing of this shape."""
    with torch.no_grad(), replaying(model, torch.zeros(shape, dtype=torch.int16)):
        model(tokens)


def test_changed_fraction_compares_sets_where_trained_tokens_are_predicted():
    """Three trained tokens in two layers: one pair swapped its order, one an expert, one is unknown: 1 of 5."""
    recorded = torch.tensor([[[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]]])
    chosen = recorded.clone()
    chosen[0, 0, 0] = torch.tensor([2, 3])  # predicts a prompt token, which is not trained
    chosen[0, 1, 0] = torch.tensor([1, 0])
    chosen[0, 2, 1] = torch.tensor([2, 0])
    recorded[0, 3, 0] = -1
    mask = torch.tensor([[True, True, True]])

    changed = changed_fraction(chosen, recorded, torch.tensor([2]), mask)

    assert (changed.total, changed.count) == (1, 5)
