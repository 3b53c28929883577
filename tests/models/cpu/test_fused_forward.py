"""A body written out with backward passes of its own: what the model's own code gives, value and gradient."""

from statistics import geometric_mean
from typing import Any

import pytest
import torch
import transformers as hf
from tests.models.architectures import SHAPE, llama, mistral, qwen2, qwen3

from gnomon.learner.precision import Masters
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.backbone import Backbone, can_fuse, kept_for_backward
from gnomon.models.contexts import recomputing
from gnomon.models.cpu.fused_forward import _stacked, kept_per_token
from gnomon.models.logprobs import TokenScorer, TokenScores
from gnomon.models.lora import adapt
from gnomon.models.tiny import TinyConfig, tiny_model

pytestmark = pytest.mark.usefixtures("way")

CHANGES = {"num_hidden_layers": 3, "initializer_range": 0.1}
LENGTHS = (31, 4, 20, 17, 1, 9)


def gelu(**changes: Any) -> Any:
    """One key and value head, tied embeddings, another activation."""
    shape = SHAPE | changes | {"num_key_value_heads": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, tie_word_embeddings=True, hidden_act="gelu"))


def made(make: Any, seed: int = 3) -> Any:
    """Return a model whose norms and biases are not what they begin as."""
    torch.manual_seed(seed)
    model = make(**CHANGES).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def loss(model: Any, is_shared: bool, is_written: bool) -> tuple[torch.Tensor, TokenScores]:
    """Return a loss that uses log-probabilities and entropies, and those."""
    scorer = TokenScorer(model)
    scorer._backbone._is_tried &= is_written
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (len(LENGTHS), 40), generator=generator)
    if is_shared:
        tokens[:3, :9], tokens[3:, :9] = tokens[0, :9], tokens[3, :9]
    mask = torch.arange(31) < torch.tensor(LENGTHS)[:, None]
    scores = scorer(tokens, torch.full((len(LENGTHS),), 9), mask)
    return (scores.logprobs * torch.linspace(-1, 1, 31)).sum() + 0.3 * scores.entropy.sum(), scores


def scored(model: Any, is_shared: bool, is_written: bool) -> list[torch.Tensor]:
    """Return log-probabilities, entropies and all gradients of `loss`."""
    total, scores = loss(model, is_shared, is_written)
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return [scores.logprobs.detach(), scores.entropy.detach(), *(g.float() for g in gradients)]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return the largest distance of two tensors, in lengths of the second."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def mean_distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return how far tensors are from the second ones on average, in lengths of those."""
    return sum(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)) / len(exact)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("make", [llama, gelu, mistral, qwen2, qwen3])
def test_values_and_gradients_are_the_models_own(make: Any, is_shared: bool):
    """In float32, every log-probability, entropy and gradient of a weight, to 3e-6 of its length."""
    model = made(make)
    assert TokenScorer(model)._backbone._is_tried

    assert distance(scored(model, is_shared, True), scored(model, is_shared, False)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gelu])
def test_gradients_that_are_added_up_where_they_belong_are_autograds(make: Any, dtype: torch.dtype):
    """With masters, over two backward passes, whether head and embedding are one weight or two; padding's row too."""
    model = made(make).to(dtype)
    model.get_decoder().embed_tokens.padding_idx = 5
    exact = [2 * gradient for gradient in scored(model, True, True)[2:]]
    masters = Masters(model.named_parameters())
    for _ in range(2):
        loss(model, True, True)[0].backward()

    assert all(weight.grad is None or weight.dtype == torch.float32 for weight in model.parameters())
    found = [master.grad for master in masters.parameters.values() if master.grad is not None]
    assert distance(found, exact) < (1e-6 if dtype == torch.float32 else 0.01)
    exact_rows = exact[0].abs().sum(1).eq(0)
    assert torch.equal(found[0].abs().sum(1).eq(0), exact_rows)


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_low_precision_is_no_further_from_the_truth_than_the_models_own_code(make: Any):
    """In bfloat16 log-probabilities, entropies and gradients are on average as far from float32 as its own are.

    One draw of weights says 0.9 to 1.2 by luck, so four are compared.
    """
    distances = []
    for seed in range(4):
        model = made(make, seed)
        exact = scored(model, True, False)
        model = model.to(torch.bfloat16)
        distances.append([mean_distance(scored(model, True, is_written), exact) for is_written in (True, False)])

    ours, own = (geometric_mean(each) for each in zip(*distances, strict=True))

    assert ours < 1.2 * own < 0.05


def test_what_is_kept_is_counted(way: str):
    """Numbers of a token that wait for the backward pass: counted by what autograd is given."""
    model = made(gelu)
    body = Backbone(model)
    kept: dict[int, int] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] == (2 * 64,):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // 4 // 128
        return tensor

    shared: set[int] = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
        hidden = body.plain(torch.randint(1, 96, (2, 64)))
    assert hidden.requires_grad
    turns = 2 * 8
    last = 32
    found = sum(size for place, size in kept.items() if place not in shared) - turns - last

    # Each of the seven norms keeps one number of a token, and the embedding its number in 8 bytes.
    assert kept_for_backward(model) == kept_per_token(model.get_decoder()) == found - 7 - 2


def test_layers_are_computed_again_where_that_is_asked_for():
    """Gradient checkpointing changes no bit, and keeps one state of each layer."""
    model, kept = made(qwen3), []
    expected = scored(model, True, True)
    with recomputing(model), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert can_fuse(model)
        found = scored(model, True, True)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(t.shape[-1] == 2 * SHAPE["intermediate_size"] for t in kept)


def test_other_models_stay_what_they_are():
    """Adapters, experts, windows, eager attention, hooks, training mode."""
    eager, hooked, training = (tiny_model(0) for _ in range(3))
    eager.set_attn_implementation("eager")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    training.train()
    windowed = hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=4)).eval()
    others = [eager, hooked, training, windowed, adapt(tiny_model(0), LoraConfig(rank=2))]
    others += [tiny_model(0, TinyConfig(architecture="qwen3_moe")), hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1))]

    assert can_fuse(tiny_model(0).eval())
    assert not any(can_fuse(other) for other in others)


def test_a_body_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """It is tried on the model's own first layers."""
    monkeypatch.setattr("gnomon.models.cpu.fused_forward._turned", lambda given, *_: given)

    assert not Backbone(made(llama))._is_tried


def test_weights_with_one_input_lie_in_one_tensor_and_are_the_same(tmp_path):
    """No product joins them, a change of one reaches it, and a file has each by its own name."""
    model = made(llama)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    body = Backbone(model)._model.get_decoder()
    for layer in body.layers:
        attention, feed = layer.self_attn, layer.mlp
        for family in ([attention.q_proj, attention.k_proj, attention.v_proj], [feed.gate_proj, feed.up_proj]):
            weights = [sibling.weight for sibling in family]
            joined = _stacked(weights)
            assert joined.data_ptr() == weights[0].data_ptr()
            assert torch.equal(joined, torch.cat(weights))
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).state_dict()
    for name, weight in before.items():
        assert torch.equal(model.state_dict()[name], weight)
        assert torch.equal(saved[name], weight)
    assert _stacked([torch.ones(2, 3), torch.zeros(1, 3)]).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
