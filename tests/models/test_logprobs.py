"""Log-probabilities and entropies of responses, against the plain formula."""

from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gnomon.core.errors import ConfigError
from gnomon.learner.forward import scorer_on
from gnomon.models.head import chosen_logprobs
from gnomon.models.logprobs import TokenScorer

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = (1.0, None)
"""What a model's end does to its head's output: nothing."""
MODELS: dict[str, tuple[Any, Any, tuple[float, float | None]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE), PLAIN),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True), PLAIN),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE), PLAIN),
    "gpt2": (
        GPT2LMHeadModel, GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, bos_token_id=1), PLAIN,
    ),
    "opt": (
        OPTForCausalLM,
        OPTConfig(vocab_size=61, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
                  word_embed_proj_dim=16, max_position_embeddings=64),
        PLAIN,
    ),
    # Logits bounded, multiplied, divided.
    "gemma2": (
        Gemma2ForCausalLM, Gemma2Config(**SHAPE, final_logit_softcapping=3.0, sliding_window=4), (1.0, 3.0),
    ),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config(**SHAPE, logit_scale=0.25, sliding_window=4), (0.25, None)),
    "granite": (GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=4.0), (0.25, None)),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    architecture, config, _ = MODELS[name]
    torch.manual_seed(seed)
    return architecture(config).to(dtype).eval()


def micro_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of different prompt and response lengths; one response has a hole, one is empty."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 61, (3, 11))
    prompts = torch.tensor([3, 5, 2])
    mask = torch.tensor(
        [[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]],
        dtype=torch.bool,
    )
    return tokens, prompts, mask


def distance(found: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest number if that is above 1."""
    return float((found.double() - exact).abs().max().detach() / exact.detach().abs().max().clamp(min=1.0))


def plain(model: Any, tokens: Tensor, prompts: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Row by row, no padding, every logit: what the definition says."""
    logprobs, entropy = (torch.zeros(mask.shape, dtype=model.dtype) for _ in range(2))
    for row in range(len(tokens)):
        policy = (model(input_ids=tokens[row : row + 1]).logits[0] / temperature).log_softmax(-1)
        for column in range(mask.shape[1]):
            if mask[row, column]:
                at = int(prompts[row]) + column
                logprobs[row, column] = policy[at - 1, tokens[row, at]]
                entropy[row, column] = -(policy[at - 1].exp() * policy[at - 1]).sum()
    return logprobs, entropy


def gradients(model: Any, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Of a loss that treats every token and both results differently."""
    weights = torch.linspace(-1.0, 2.0, logprobs.numel()).view(logprobs.shape)
    model.zero_grad()
    ((weights * logprobs).sum() + (weights.flip(1) * entropy).sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rounding(name: str, temperature: float, seed: int) -> list[tuple[float, float]]:
    """How far values and gradients are from float64's: the scorer's, and the plain formula's in float32."""
    model, batch = build(name, seed=seed), micro_batch()
    found = TokenScorer(model, chunk_tokens=4)(*batch, temperature)
    ways = [(found.logprobs, found.entropy), plain(model, *batch, temperature)]
    slopes = [gradients(model, *way) for way in ways]
    exact = plain(model.double(), *batch, temperature)
    wanted = gradients(model, *exact)
    assert all(slope.keys() == wanted.keys() for slope in slopes)
    return [
        (
            max(distance(result, value) for result, value in zip(way, exact, strict=True)),
            max(distance(slope[weight], gradient) for weight, gradient in wanted.items()),
        )
        for way, slope in zip(ways, slopes, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_the_plain_ones(name, temperature):
    """Log-probability, entropy and every gradient are those of full log-softmax, as near to float64 as float32 gets.

    Weights as wild as these make one draw's rounding anything from 1e-6 to 2e-5, so eight draws are compared.
    """
    found, own = zip(*(rounding(name, temperature, seed) for seed in range(8)), strict=True)

    assert max(value for value, _ in found) <= 2e-6
    assert geometric_mean(slope for _, slope in found) <= 2 * geometric_mean(slope for _, slope in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_does_to_its_heads_output_is_found(name, dtype):
    """Nothing, a factor, or a bound, in either precision, whatever the size of the logits."""
    assert TokenScorer(build(name, dtype))._end == pytest.approx(MODELS[name][2])


class Otherwise(LlamaForCausalLM):
    """A Llama whose logits are no multiple of its head's output, and no tanh of it."""

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Bend the logits."""
        output = super().forward(*inputs, **more)
        output.logits = output.logits.sign() * output.logits.abs().sqrt()
        return output


@pytest.mark.filterwarnings("ignore:Otherwise does more:RuntimeWarning")
def test_a_model_that_does_anything_else_is_computed_row_by_row():
    """And its numbers are a plain forward pass's all the same."""
    torch.manual_seed(7)
    model = Otherwise(LlamaConfig(**SHAPE)).eval()
    with pytest.warns(RuntimeWarning, match="Otherwise does more .* row by row: an update took 1.5 to 1.8 times"):
        scorer, (tokens, prompts, mask) = TokenScorer(model), micro_batch()

    with torch.no_grad():
        found = scorer(tokens, prompts, mask).logprobs
        policy = model(input_ids=tokens).logits.log_softmax(-1)

    assert not scorer.is_split
    parted: Any = SimpleNamespace(size=2, device=None)
    with pytest.raises(ConfigError, match=r"(?s)Otherwise does more with its head's output.*learner.processes = 1"):
        scorer_on(parted, model)
    for row, column in mask.nonzero().tolist():
        at = int(prompts[row]) + column
        assert float(found[row, column]) == pytest.approx(float(policy[row, at - 1, tokens[row, at]]), abs=1e-5)


def test_attention_is_told_causal_and_gets_no_mask(monkeypatch):
    """Transformers hands no mask to the attention kernel and sets is_causal."""
    seen = []
    kernel = nn.functional.scaled_dot_product_attention

    def watch(*arguments: Any, **settings: Any) -> Tensor:
        seen.append((settings["attn_mask"], settings["is_causal"]))
        result: Tensor = kernel(*arguments, **settings)
        return result

    model = build("llama")
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watch)
    model.get_decoder()(input_ids=micro_batch()[0], use_cache=False)

    assert seen == [(None, True)] * 2


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_what_stands_in_the_padding_does_not_matter(name):
    """Tokens behind a response change no bit of the scores; more of them, only rounding."""
    model = build(name)
    tokens, prompts, mask = micro_batch()
    lengths = prompts + torch.tensor([4, 6, 0])
    behind = torch.arange(11) >= lengths[:, None]
    filled = torch.where(behind, 0, tokens)
    longer = torch.cat([filled, torch.zeros(3, 4, dtype=torch.long)], 1)

    scorer = TokenScorer(model)
    scores = [scorer(t, prompts, mask).logprobs for t in (tokens, filled, longer)]

    assert torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[2], rtol=0, atol=5e-6)


def test_an_entropy_that_is_not_asked_for_is_zero_and_changes_nothing_else():
    """Without entropy the log-probabilities and their gradient are the same."""
    model = build("llama")
    scorer = TokenScorer(model)
    results = [scorer(*micro_batch(), with_entropy=wanted) for wanted in (True, False)]
    found = [gradients(model, r.logprobs, torch.zeros_like(r.logprobs)) for r in results]

    assert not results[1].entropy.any()
    torch.testing.assert_close(results[0].logprobs, results[1].logprobs, rtol=0, atol=1e-6)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_without_a_single_wanted_token_everything_is_zero(name):
    """A micro-batch whose mask is empty scores to zeros."""
    tokens, prompts, mask = micro_batch()
    scores = TokenScorer(build(name))(tokens, prompts, torch.zeros_like(mask))

    assert not scores.logprobs.any()
    assert not scores.entropy.any()


def test_a_response_without_a_prompt_is_refused():
    """Nothing predicts the first token of an empty prompt."""
    tokens, _, mask = micro_batch()
    with pytest.raises(ConfigError, match="a prompt has no token"):
        TokenScorer(build("llama"))(tokens, torch.tensor([0, 5, 2]), mask)


def test_a_chunk_holds_at_least_one_token():
    """chunk_tokens = 0 would never finish."""
    with pytest.raises(ConfigError, match="chunk_tokens must be at least 1, got 0"):
        TokenScorer(build("llama"), chunk_tokens=0)


def test_two_equal_logits_are_ln_2():
    """Logits (0, 0): log-probability -ln 2, entropy ln 2. Logits (ln 3, 0): -ln 4/3 and ln 4 - 3/4 ln 3."""
    head = nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[1.0], [0.0]])
    hidden = torch.tensor([[0.0], [3.0]]).log1p()  # 0 and ln 4
    hidden[1] = torch.tensor(3.0).log()

    logprobs, entropy = chosen_logprobs(hidden, head, torch.tensor([0, 0]), 1.0, 8, True)

    assert logprobs.tolist() == pytest.approx([-0.69314718, -0.28768207], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.69314718, 0.56233514], abs=1e-6)


@given(
    count=st.integers(1, 40),
    chunk=st.integers(1, 50),
    temperature=st.floats(0.3, 3.0),
    seed=st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_the_chunk_size_is_irrelevant(count, chunk, temperature, seed):
    """Cut anywhere, values and gradients equal those of the uncut log-softmax."""
    torch.manual_seed(seed)
    head = nn.Linear(6, 13)
    hidden = torch.randn(count, 6, requires_grad=True)
    targets = torch.randint(0, 13, (count,))
    weights = torch.randn(2, count)

    def run(logprobs: Tensor, entropy: Tensor) -> list[Tensor]:
        loss = (weights[0] * logprobs).sum() + (weights[1] * entropy).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, [hidden, head.weight, head.bias])]

    policy = (head(hidden) / temperature).log_softmax(-1)
    wanted = run(policy.gather(1, targets[:, None])[:, 0], -(policy.exp() * policy).sum(-1))
    found = run(*chosen_logprobs(hidden, head, targets, temperature, chunk, True))

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_logits_that_were_kept_serve_one_backward_pass_and_are_made_again_for_another(with_entropy):
    """Rows of one chunk keep their logits and use them up: the second gradient is the first, to rounding."""
    torch.manual_seed(0)
    head = nn.Linear(8, 40)
    hidden = torch.randn(5, 8, requires_grad=True)
    logprobs, entropy = chosen_logprobs(hidden, head, torch.randint(0, 40, (5,)), 0.7, 8, with_entropy)
    loss = (logprobs.square() + entropy).sum()

    first, second = (
        torch.autograd.grad(loss, (hidden, head.weight, head.bias), retain_graph=again) for again in (True, False)
    )

    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_bfloat16_products_are_followed_by_float32_sums():
    """With bfloat16 weights the results are those of float32 softmax on the bfloat16 logits."""
    torch.manual_seed(0)
    head = nn.Linear(8, 40, bias=False).bfloat16()
    hidden = torch.randn(5, 8).bfloat16()
    targets = torch.randint(0, 40, (5,))

    logprobs, entropy = chosen_logprobs(hidden, head, targets, 1.0, 2, True)

    policy = head(hidden).float().log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, policy.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, -(policy.exp() * policy).sum(-1), rtol=0, atol=1e-6)


def test_all_logits_never_exist():
    """No tensor of N x V numbers is made, forward or backward: the largest has chunk_tokens x V."""
    count, vocabulary, chunk = 64, 1000, 8
    head = nn.Linear(4, vocabulary, bias=False)
    hidden = torch.randn(count, 4, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        targets = torch.zeros(count, dtype=torch.long)
        logprobs, entropy = chosen_logprobs(hidden, head, targets, 1.0, chunk, True)
        (logprobs + entropy).sum().backward()

    assert largest == chunk * vocabulary
