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

from gnomon.core.errors import ConfigError, ModelError
from gnomon.engines.base import Sampling
from gnomon.models.attention import rotary_edge
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.decoder import RecomputeDecoder, tried_lengths
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tokenizer import context_of
from gnomon.models.weights_check import check_causal

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

MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
IDX = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
BETA = {**TURN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7}
NEWER: dict[str, Shape] = {
    "deepseek-v2": ("DeepseekV2", {**MLA}),
    "deepseek-v32": ("DeepseekV32", {**MLA, **IDX}),
    "glm-moe-dsa": ("GlmMoeDsa", {**MLA, **IDX}),
    "deepseek-v4": ("DeepseekV4", {}),
    "qwen3-5": ("Qwen3_5Text", {**NEXT, "initializer_range": 0.1}),
    "qwen3-5-moe": ("Qwen3_5MoeText", {**NEXT, **MOE, "shared_expert_intermediate_size": 16}),
    "minimax": ("MiniMax", {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    "minimax-m2": ("MiniMaxM2", {**EXPERTS}),
    "mimo-v2": ("MiMoV2Flash", {"sliding_window": 9, "head_dim": 8}),
    "doge all": ("Doge", {}),
    "jamba": ("Jamba", {**EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "bamba": ("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_chunk_size": 8, "attn_layer_indices": [1]}),
    "zamba2": ("Zamba2", {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1,
        "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1}),
    "granitemoehybrid": ("GraniteMoeHybrid", {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types":
        ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_chunk_size": 8, "shared_intermediate_size": 16}),
    "nemotron-h": ("NemotronH", {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "initializer_range": 0.1}),
    "afmoe": ("Afmoe", {**MOE, "sliding_window": 9, "num_experts": 4, "num_dense_layers": 1, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "exaone-moe": ("ExaoneMoe", {**MOE, "sliding_window": 9, "head_dim": 8, "layer_types": ["sliding_attention",
        "full_attention"]}),
    "lfm2-moe": ("Lfm2Moe", {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok":
        2, "moe_intermediate_size": 16, "num_dense_layers": 1}),
    "solar-open": ("SolarOpen", {**MLA, "head_dim": 8}),
    "ministral3": ("Ministral3", {"head_dim": 8, "rope_parameters": BETA}),
    "olmo-hybrid": ("OlmoHybrid", {**NEXT}),
    "recurrent-gemma": ("RecurrentGemma", {"attention_window_size": 9, "lru_width": 32, "block_types":
        ["recurrent", "attention"], "head_dim": 8}),
    "flex-olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "vaultgemma": ("VaultGemma", {"sliding_window": 9, "head_dim": 8}),
    "minicpm3": ("MiniCPM3", {**MLA}),
    "youtu": ("Youtu", {**MLA}),
    "jais2": ("Jais2", {}),
    "laguna": ("Laguna", {**MOE, "sliding_window": 9}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "ernie-moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
        "moe_layer_start_index": 1}),
    "glm4-moe": ("Glm4Moe", {**MLA, "head_dim": 8}),
    "glm4-moe-lite": ("Glm4MoeLite", {**MLA}),
    "gemma4": ("Gemma4Text", {"sliding_window": 9, "head_dim": 8, "initializer_range": 0.1}),
    "bitnet": ("BitNet", {}),
    "cwm": ("Cwm", {"sliding_window": 9}),
    "olmo3 yarn": ("Olmo3", {"sliding_window": 9, "rope_parameters": YARN}),
    "granitemoeshared": ("GraniteMoeShared", {"num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16}),
    "dots1": ("Dots1", {**MLA, "head_dim": 8, "sliding_window": 9, "max_window_layers": 1, "n_shared_experts":
        1}),
    "gemma3n": ("Gemma3nText", {"sliding_window": 9, "head_dim": 8, "layer_types": ["sliding_attention",
        "full_attention"], "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern":
        None}),
    "gemma3n shared": ("Gemma3nText", {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 8, "layer_types":
        ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern":
        None}),
    "gemma4 shared": ("Gemma4Text", {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 8, "layer_types":
        ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "initializer_range": 0.05}),
    "xlstm": ("xLSTM", {"num_heads": 4}),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32}),
    "falcon alibi": ("Falcon", {"alibi": True, "new_decoder_architecture": False}),
    "falcon old": ("Falcon", {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}),
    "nanochat": ("NanoChat", {}),
    "phi3 partial": ("Phi3", {"partial_rotary_factor": 0.5}),
    "qwen3 win": ("Qwen3", {"head_dim": 8, "sliding_window": 9, "use_sliding_window": True, "max_window_layers":
        1}),
    "qwen3moe win": ("Qwen3Moe", {**MOE, "head_dim": 8, "sliding_window": 9, "use_sliding_window": True,
        "max_window_layers": 1}),
    "olmoe clip": ("Olmoe", {**MOE, "clip_qkv": 0.5, "num_experts": 4}),
    "cohere2 moe": ("Cohere2Moe", {**MOE, "sliding_window": 9}),
    "zaya": ("Zaya", {}),
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
@pytest.mark.parametrize("name", [*MORE, *NEWER])
def test_more_rows_are_scored_and_drawn_as_if_alone(name: str):
    """The same of more architectures; those that this version of transformers lacks are left out.

    Doge sees ahead in transformers 5.16, and is refused there.
    """
    shape = (MORE | NEWER)[name]
    if name in NEWER and not hasattr(hf, f"{shape[0]}Config"):
        pytest.skip(f"transformers {hf.__version__} has no {shape[0]}")
    model = made(shape)
    if name == "doge all" and hf.__version__.startswith("5.16."):
        with pytest.raises(ModelError, match=r"transformers 5\.16.*or take another"):
            check_causal(model, "doge")
    else:
        assert max(differences(model)) <= 1e-5


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
