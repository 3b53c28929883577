"""What a router learns under replay: the derivative of the replayed pass, which is the free one's where they agree."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gnomon.models.logprobs import TokenScorer, TokenScores
from gnomon.models.routing import Routing
from gnomon.models.tiny import TinyConfig, tiny_model

EXPERTS = 4
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt_oss": {},
    "granitemoe": {"logits_scaling": 2.0},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 12},
}
TINY = ("qwen3_moe", "olmoe")
TOKENS = torch.tensor([[9, 8, 7, 1, 2, 3, 4], [9, 8, 7, 5, 6, 0, 0], [6, 5, 1, 2, 0, 0, 0]])
PROMPTS = torch.tensor([3, 3, 2])
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)


def build(name: str, per_token: int = 2) -> Any:
    """A mixture of two layers and four experts."""
    if name in TINY:
        shape = TinyConfig(width=16, heads=2, kv_heads=1, architecture=name, experts_per_token=per_token)  # type: ignore[arg-type]
        return tiny_model(0, shape)
    shape = {
        "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "initializer_range": 0.5, "num_local_experts": EXPERTS, "num_experts_per_tok": per_token,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **(shape | OTHERS[name]))
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def score(model: Any, routing: Routing | None) -> TokenScores:
    """The three rows, two of which share their prompt."""
    return TokenScorer(model)(TOKENS, PROMPTS, MASK, routing=routing)


def gradients(model: Any, scores: TokenScores) -> dict[str, Tensor]:
    """Those of a weighted sum of log-probabilities and entropies, of every parameter."""
    weights = torch.linspace(-1, 1, scores.logprobs.numel()).view_as(scores.logprobs)
    model.zero_grad()
    ((weights * scores.logprobs).sum() + 0.1 * scores.entropy.sum()).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("per_token", [1, 2])
@pytest.mark.parametrize("name", [*TINY, *OTHERS])
def test_the_own_choice_replayed_has_the_gradient_of_the_free_pass(name: str, per_token: int):
    """When a step begins, the replayed pass has every gradient of the free one, those of routers too."""
    model = build(name, per_token)
    with torch.no_grad():
        recorded = score(model, Routing())
    free = gradients(model, score(model, None))
    replayed = gradients(model, score(model, Routing(recorded.experts)))

    assert max(float((free[n] - replayed[n]).abs().max() / (1e-6 + free[n].abs().max())) for n in free) < 1e-5
    routers = [n for n in free if n.endswith(("gate.weight", "router.weight", "router.layer.weight"))]
    is_constant = per_token == 1 and name not in ("olmoe", "qwen2_moe")  # one gate that sums to 1 has no slope
    assert routers
    assert all(bool((free[n].abs().max() > 1e-6) != is_constant) for n in routers)


@pytest.mark.parametrize("name", TINY)
def test_a_routers_gradient_is_the_slope_of_the_replayed_pass(name: str):
    """Moved a little along a direction, the replayed sum moves by gradient times direction, at experts not its own."""
    model = build(name)
    with torch.no_grad():
        own = score(model, Routing()).experts
        assert own is not None
        routing = Routing(torch.where(own >= 0, (own + 1) % EXPERTS, -1))
    found = gradients(model, score(model, routing))
    generator, step = torch.Generator().manual_seed(1), 1e-2
    routers = {n: p for n, p in model.named_parameters() if n.endswith("gate.weight")}
    moves = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in routers.items()}

    def moved(size: float) -> float:
        with torch.no_grad():
            for n, p in routers.items():
                p += size * moves[n]
            scores = score(model, routing)
            for n, p in routers.items():
                p -= size * moves[n]
        weights = torch.linspace(-1, 1, scores.logprobs.numel()).view_as(scores.logprobs)
        return float((weights * scores.logprobs).sum() + 0.1 * scores.entropy.sum())

    slope = (moved(step) - moved(-step)) / (2 * step)
    expected = sum(float((found[n] * moves[n]).sum()) for n in routers)
    assert abs(expected) > 1e-2
    assert slope == pytest.approx(expected, rel=2e-2)
