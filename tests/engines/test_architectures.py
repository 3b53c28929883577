"""Any causal language model: what decides is the model's own forward pass, not its name."""

import pytest
import torch
import transformers as hf

from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.decoder import AlignedDecoder, HybridDecoder, RecomputeDecoder, SameLengthDecoder, choose_decoder
from gnomon.models.forward import accepted, cache_name

SIZE = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
LIMIT = {"max_position_embeddings": 128, "pad_token_id": 0}


def gpt2():
    """Learned positions, no shared heads, weights stored transposed."""
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2)
    )


def qwen3():
    """Norms on queries and keys."""
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZE, **HEADS, **LIMIT))


def gemma3():
    """A sliding window of 6 positions in every other layer."""
    layers = ["sliding_attention", "full_attention"]
    return hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SIZE, **HEADS, **LIMIT, sliding_window=6, layer_types=layers, query_pre_attn_scalar=8)
    )


def gemma2():
    """Sliding windows, and logits that are capped."""
    return hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **SIZE, **HEADS, **LIMIT, sliding_window=5, final_logit_softcapping=3.0, query_pre_attn_scalar=8
        )
    )


def mistral():
    """A sliding window in every layer."""
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZE, **HEADS, **LIMIT, sliding_window=4))


def bloom():
    """Positions by ALiBi, built from the attention mask."""
    return hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
    )


def opt():
    """Learned positions with an offset."""
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, init_std=0.2,
            max_position_embeddings=128, word_embed_proj_dim=32,
        )
    )  # fmt: skip


def mixtral():
    """Experts: a row's computation is routed token by token."""
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZE, **HEADS, **LIMIT, num_local_experts=4))


def mamba():
    """A state space model: no keys, no positions, nothing to align."""
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.2)
    )


def falcon_h1():
    """A hybrid of attention and state space in each layer."""
    return hf.FalconH1ForCausalLM(
        hf.FalconH1Config(
            **SIZE, **HEADS, **LIMIT, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, 
            mamba_n_groups=1, mamba_chunk_size=8,
        )
    )  # fmt: skip


ALIGNED = [gpt2, qwen3, gemma3, gemma2, mistral, bloom, opt, mixtral]
OTHERS = [mamba, falcon_h1]


def build(make):
    """Return the architecture's model with seeded weights."""
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ALIGNED + OTHERS, ids=lambda f: f.__name__)
def test_logprobs_are_those_of_a_plain_forward_pass(make, ask, score):
    """Ragged prompts beyond any sliding window, rows that join and leave: within 1e-5 of a full forward."""
    model = build(make)
    sampling = Sampling(max_completion_length=14, stop_ids=(1, 2, 3))
    prompts = [[5], [7, 9, 11], list(range(10, 27)), [8, 6, 4], list(range(40, 49))]
    asks = [(prompt, [10 * i, 10 * i + 1], sampling) for i, prompt in enumerate(prompts)]

    answers = ask(LocalEngine(model, max_concurrent=4), asks)

    for prompt, completions in zip(prompts, answers, strict=True):
        for done in completions:
            exact = score(model, prompt, done, 1.0)
            torch.testing.assert_close(torch.tensor(done.logprobs), exact, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ALIGNED, ids=lambda f: f.__name__)
def test_attention_models_are_batched_continuously(make):
    """The alignment is checked on the model itself, and chosen wherever it reproduces a forward pass."""
    assert isinstance(choose_decoder(build(make)), AlignedDecoder)


@pytest.mark.filterwarnings("ignore")
def test_a_hybrid_is_batched_continuously():
    """Each row has a state of its own, so a step needs no padding."""
    assert isinstance(choose_decoder(build(falcon_h1)), HybridDecoder)


def test_a_model_without_attention_runs_in_waves_and_that_is_said():
    """Its own cache is used as it is."""
    with pytest.warns(RuntimeWarning, match="MambaForCausalLM, so only prompts of one length .* 1.4 to 2.2 times"):
        assert isinstance(fastest_decoder(build(mamba)), SameLengthDecoder)


NAME = cache_name(accepted(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, **HEADS, **LIMIT)))) or ""


class Counting(hf.LlamaForCausalLM):
    """A Llama whose cache lies: with one, logits are shifted."""

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, **more):
        """Add what no cache should add."""
        cache = {} if past_key_values is None else {NAME: past_key_values}
        output = super().forward(input_ids, use_cache=use_cache, **cache, **more)
        if use_cache:
            output.logits = output.logits + torch.arange(96)
        return output


@pytest.mark.filterwarnings("ignore:no cache gave the answers:RuntimeWarning")
def test_a_model_whose_cache_cannot_be_trusted_is_recomputed(ask, score):
    """Neither way of caching reproduces its forward pass, so every step is a full one, and right."""
    torch.manual_seed(0)
    model = Counting(hf.LlamaConfig(**SIZE, **HEADS, **LIMIT)).eval()

    [[done], [other]] = ask(
        LocalEngine(model),
        [([5, 6], [1], Sampling(max_completion_length=6)), ([7], [2], Sampling(max_completion_length=3))],
    )

    assert isinstance(choose_decoder(model), RecomputeDecoder)
    exact = score(model, [5, 6], done, 1.0)
    torch.testing.assert_close(torch.tensor(done.logprobs), exact, atol=1e-5, rtol=0)
    assert len(other.tokens) == 3
