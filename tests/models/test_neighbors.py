"""Numbers of a row are its own: what lies beside it changes none, below, at and beyond every length of the config."""

from typing import Any

import pytest
import torch
import transformers as hf
from benchmarks.architectures import (
    ARCHITECTURES,
    CAPS,
    EDGE,
    EXPERTS,
    LIMIT,
    LLAMA3,
    LONG,
    MOE,
    MSCALE,
    NEXT,
    SHAPE,
    TURN,
    YARN,
    Shape,
    alone,
    differences,
    drawn,
    made,
)

from gnomon.core.errors import ConfigError
from gnomon.engines.base import Sampling
from gnomon.models.attention import rotary_edge
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.decoder import RecomputeDecoder, tried_lengths
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tokenizer import context_of

DYNAMIC = {**TURN, "rope_type": "dynamic", "factor": 2.0}
LINEAR = {**TURN, "rope_type": "linear", "factor": 4.0}

FEW: dict[str, Shape] = {
    **ARCHITECTURES,
    "llama longrope": ("Llama", {"rope_parameters": LONG}),
    "llama dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "llama yarn factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "qwen2 window": ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    "cohere2": ("Cohere2", {"sliding_window": 9}),
}
PHIMOE = LONG | {"short_mscale": 1.0, "long_mscale": 1.0}
LOCAL = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 9}
MORE: dict[str, Shape] = {
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn mscale": ("Llama", {"rope_parameters": MSCALE}),
    "llama linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma3": ("Gemma3Text", {"sliding_window": 9, "head_dim": 8}),
    "gpt-oss sinks": ("GptOss", {"sliding_window": 9, **EXPERTS}),
    "qwen3 longrope": ("Qwen3", {"rope_parameters": LONG, "head_dim": 8}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "mistral yarn": ("Mistral", {"rope_parameters": YARN, "sliding_window": None}),
    "mistral yarn mscale": ("Mistral", {"rope_parameters": YARN | {"mscale": 1.0}, "sliding_window": 9}),
    "gemma2 two windows": ("Gemma2", {"sliding_window": 5, "num_hidden_layers": 4, **CAPS}),
    "qwen3-next deeper": ("Qwen3Next", {**NEXT, "num_hidden_layers": 4, "layer_types": NEXT["layer_types"] * 2}),
    "lfm2 deeper": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "phi3 window": ("Phi3", {"sliding_window": 9}),
    "phi3": ("Phi3", {}),
    "phi": ("Phi", {}),
    "phimoe longrope": ("Phimoe", {"num_local_experts": 4, "rope_parameters": PHIMOE}),
    "gemma2 wide": ("Gemma2", {"sliding_window": 20, **CAPS}),
    "gemma3 wide": ("Gemma3Text", {"sliding_window": 33, "head_dim": 8}),
    "qwen2 moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", {"sliding_window": 9}),
    "cohere": ("Cohere", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "stablelm": ("StableLm", {}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm": ("Glm", {"head_dim": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 8}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "falcon-mamba": ("FalconMamba", {"state_size": 8}),
    "arcee": ("Arcee", {}),
    "seed-oss": ("SeedOss", {"head_dim": 8}),
    "helium": ("Helium", {"head_dim": 8}),
    "nemotron": ("Nemotron", {}),
    "persimmon": ("Persimmon", {}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "apertus": ("Apertus", {}),
    "diffllama": ("DiffLlama", {}),
    "llama4 wide chunks": ("Llama4Text", {"attention_chunk_size": 20, "intermediate_size_mlp": 48, **EXPERTS}),
    "gpt-oss wide": ("GptOss", {"sliding_window": 20, **EXPERTS}),
    "ministral": ("Ministral", {"sliding_window": 9, "head_dim": 8}),
    "gpt-bigcode": ("GPTBigCode", {}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "codegen": ("CodeGen", {"rotary_dim": 8}),
    "gpt-neo": ("GPTNeo", LOCAL),
    "biogpt": ("BioGpt", {}),
    "xglm": ("XGLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_rows_are_scored_and_drawn_as_if_alone(name: str):
    """Learner and engine, rows of all lengths together: within 1e-5 of a plain forward pass of each."""
    assert max(differences(made(FEW[name]))) <= 1e-5


@pytest.mark.filterwarnings("ignore")
def test_queries_scaled_by_length_are_those_of_their_own_row():
    """Llama 4's scale changes at 30 tokens here, beyond what a trial draws; shorter models keep the fast way."""
    scaled = {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "attn_scale": 0.7, "no_rope_layers": [1, 0]}
    model = made(("Llama4Text", {**scaled, **EXPERTS, "floor_scale": 30}))
    far = made(("Llama4Text", {**scaled, **EXPERTS, "floor_scale": LIMIT + 1}))

    assert max(differences(model)) <= 1e-5
    assert not fastest_decoder(model).joins
    assert fastest_decoder(far).joins


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_keeps_so_many_keys_of_a_row_gets_its_row_alone():
    """Doge's attention counts the keys of all that lie in a row: nothing is packed, and no row is longer."""
    model = made(("Doge", {"keep_window_size": EDGE}))
    tokens = torch.randint(3, 96, (16, EDGE), generator=torch.Generator().manual_seed(0))
    tokens[:, :4] = tokens[0, :4].clone()
    with torch.no_grad():
        scores = TokenScorer(model)(tokens, torch.full((16,), 4), torch.ones(16, EDGE - 4, dtype=torch.bool)).logprobs
    exact = torch.stack([alone(model, row, 4) for row in tokens])

    assert float((scores - exact).abs().max()) <= 1e-5
    with pytest.raises(ConfigError, match=f"beyond the model's context of {EDGE}"):
        drawn(model, [([5] * EDGE, [1], Sampling(max_completion_length=1))])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MORE)
def test_more_rows_are_scored_and_drawn_as_if_alone(name: str):
    """The same of more architectures."""
    assert max(differences(made(MORE[name]))) <= 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Phi-3, longrope", "llama longrope"])
def test_no_answer_crosses_the_length_at_which_positions_become_others(name: str):
    """What would be drawn with one table and scored with another is refused; up to there the fast way is used."""
    model = made(FEW[name])
    budget = Sampling(max_completion_length=5)

    with pytest.raises(ConfigError, match=f"beyond the model's context of {EDGE}"):
        drawn(model, [([5] * (EDGE - 4), [1], budget)])
    [[done]] = drawn(model, [([5] * (EDGE - 5), [1], budget)])

    assert done.tokens
    assert not isinstance(fastest_decoder(model), RecomputeDecoder)


@pytest.mark.parametrize(
    ("rope", "edge"),
    [
        (LONG, EDGE),
        (DYNAMIC, LIMIT),
        (YARN, None),
        (LLAMA3, None),
        (LINEAR, None),
        (TURN | {"rope_type": "default"}, None),
    ],
)
def test_edges_are_read_from_the_config(rope: dict[str, Any], edge: int | None):
    """Only tables that change with the length have one."""
    config = hf.LlamaConfig(**SHAPE, rope_parameters=rope)

    assert rotary_edge(config) == edge
    assert context_of(config) == (edge or LIMIT)


@pytest.mark.filterwarnings("ignore")
def test_windows_are_tried_when_a_decoder_is_chosen():
    """And chunks, and edges, unless that would take long."""
    assert tried_lengths(made(FEW["Gemma 2"])) == [9]
    assert tried_lengths(made(FEW["Llama 4"])) == [8]
    assert tried_lengths(made(FEW["Qwen2"])) == []
