"""Numbers of a row are its own: what lies beside it changes none, below, at and beyond every length of the config."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from gnomon.core.errors import ConfigError
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.models.attention import rotary_edge
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.decoder import RecomputeDecoder, tried_lengths
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tokenizer import context_of

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
EDGE, LIMIT = 24, 64
TURN = {"rope_theta": 10000.0}
LONG = {
    **TURN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    "original_max_position_embeddings": EDGE,
}  # fmt: skip
YARN = {**TURN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": EDGE}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
DYNAMIC = {**TURN, "rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    **TURN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": EDGE,
}  # fmt: skip
TWO_TABLES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {**TURN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": EDGE},
}
LINEAR = {**TURN, "rope_type": "linear", "factor": 4.0}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
NEXT = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
STATE = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "head_dim": 8,
}  # fmt: skip

# Family, what its config changes.
FEW: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": EDGE}),
    "llama longrope": ("Llama", {"rope_parameters": LONG}),
    "llama dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn mscale": ("Llama", {"rope_parameters": MSCALE}),
    "llama yarn factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral window": ("Mistral", {"sliding_window": 9}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"sliding_window": 9, **CAPS}),
    "gemma3": ("Gemma3Text", {"sliding_window": 9, "head_dim": 8}),
    "gemma3 two tables": ("Gemma3Text", {"sliding_window": 9, "head_dim": 8, "rope_parameters": TWO_TABLES}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "gpt-oss sinks": ("GptOss", {"sliding_window": 9, **EXPERTS}),
    "llama4 chunks": ("Llama4Text", {"attention_chunk_size": 8, "intermediate_size_mlp": 48, **EXPERTS}),
    "cohere2": ("Cohere2", {"sliding_window": 9}),
    "olmo2": ("Olmo2", {}),
    "qwen3-next": ("Qwen3Next", {**NEXT, **LAYERS}),
    "mixtral": ("Mixtral", EXPERTS),
    "granite": ("Granite", {"logits_scaling": 2.0}),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PHIMOE = LONG | {"short_mscale": 1.0, "long_mscale": 1.0}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
LOCAL = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 9}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 longrope": ("Qwen3", {"rope_parameters": LONG, "head_dim": 8}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "mistral yarn": ("Mistral", {"rope_parameters": YARN, "sliding_window": None}),
    "mistral yarn mscale": ("Mistral", {"rope_parameters": YARN | {"mscale": 1.0}, "sliding_window": 9}),
    "deepseek v3 yarn mscale": ("DeepseekV3", {**LATENT, "rope_parameters": MSCALE}),
    "gpt-oss yarn": ("GptOss", {"sliding_window": 9, "rope_parameters": YARN | {"truncate": False}, **EXPERTS}),
    "gemma2 two windows": ("Gemma2", {"sliding_window": 5, "num_hidden_layers": 4, **CAPS}),
    "qwen3-next deeper": ("Qwen3Next", {**NEXT, "num_hidden_layers": 4, "layer_types": LAYERS["layer_types"] * 2}),
    "lfm2 deeper": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "phi3 window": ("Phi3", {"sliding_window": 9}),
    "phi3": ("Phi3", {}),
    "phi": ("Phi", {}),
    "phimoe longrope": ("Phimoe", {"num_local_experts": 4, "rope_parameters": PHIMOE}),
    "gemma2 wide": ("Gemma2", {"sliding_window": 20, **CAPS}),
    "gemma3 wide": ("Gemma3Text", {"sliding_window": 33, "head_dim": 8}),
    "qwen3 moe": ("Qwen3Moe", {**MOE, "head_dim": 8}),
    "qwen2 moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", {"sliding_window": 9}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "stablelm": ("StableLm", {}),
    "smollm3": ("SmolLM3", {}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 8}),
    "falcon-h1": ("FalconH1", STATE),
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


def made(family: str, changes: dict[str, Any]) -> Any:
    """Return a seeded model."""
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**SHAPE | changes)
    # Scores that are bounded are computed by eager attention, as `load_model` asks for.
    eager = {"attn_implementation": "eager"} if "attn_logit_softcapping" in changes else {}
    return hf.AutoModelForCausalLM.from_config(config, **eager).eval()


def alone(model: Any, row: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the log-probabilities of a row's answer by a plain forward pass of the row."""
    with torch.no_grad():
        policy = model(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1].float().log_softmax(-1)
    return policy.gather(1, row[prompt:, None])[:, 0]


def lengths_of(model: Any) -> list[int]:
    """Return lengths around every length at which the config changes behavior, and far from them."""
    text, limit = model.config.get_text_config(), context_of(model.config) or LIMIT
    stated = [vars(text).get(name) for name in ("sliding_window", "attention_chunk_size")]
    marks = [n for n in (*stated, rotary_edge(model.config), EDGE, limit) if isinstance(n, int)]
    near = {n + by for n in marks for by in (-1, 0, 1)} | {6, 40}
    longest = vars(text).get(text.attribute_map.get("max_position_embeddings", "max_position_embeddings")) or LIMIT
    return sorted(n for n in near if 6 <= n <= min(longest, LIMIT))


def check(model: Any, ask: Callable[..., Any]) -> None:
    """Compare learner and engine with a plain forward pass of each row alone."""
    lengths, prompt = lengths_of(model), 4
    tokens = torch.randint(3, 96, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    tokens[::2, :prompt] = tokens[0, :prompt]
    mask = torch.arange(max(lengths) - prompt) < (torch.tensor(lengths) - prompt)[:, None]
    with torch.no_grad():
        scores = TokenScorer(model)(tokens, torch.full((len(lengths),), prompt), mask).logprobs
    for row, length in enumerate(lengths):
        exact = alone(model, tokens[row, :length], prompt)
        torch.testing.assert_close(scores[row, : length - prompt], exact, atol=1e-5, rtol=0)

    limit = context_of(model.config) or LIMIT
    prompts = [tokens[row, : length - 4] for row, length in enumerate(lengths) if 6 <= length <= limit]
    asks = [(p.tolist(), [i], Sampling(max_completion_length=4)) for i, p in enumerate(prompts)]
    for given, [done] in zip(prompts, ask(LocalEngine(model, max_concurrent=5), asks), strict=True):
        whole = torch.cat([given, torch.tensor(done.tokens)])
        torch.testing.assert_close(torch.tensor(done.logprobs), alone(model, whole, len(given)), atol=1e-5, rtol=0)


@pytest.fixture
def ask() -> Callable[..., Any]:
    """Return a function that asks an engine everything at once."""

    async def together(engine: LocalEngine, asks: Any) -> Any:
        answers = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return answers

    return lambda engine, asks: asyncio.run(together(engine, asks))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_rows_are_scored_and_drawn_as_if_alone(name: str, ask: Callable[..., Any]):
    """Learner and engine, rows of all lengths together: within 1e-5 of a plain forward pass of each."""
    check(made(*FEW[name]), ask)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MORE)
def test_more_rows_are_scored_and_drawn_as_if_alone(name: str, ask: Callable[..., Any]):
    """The same of more architectures."""
    check(made(*MORE[name]), ask)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["phi3 longrope", "llama longrope"])
def test_no_answer_crosses_the_length_at_which_positions_become_others(name: str, ask: Callable[..., Any]):
    """What would be drawn with one table and scored with another is refused; up to there the fast way is used."""
    model = made(*FEW[name])
    budget = Sampling(max_completion_length=5)

    with pytest.raises(ConfigError, match=f"beyond the model's context of {EDGE}"):
        ask(LocalEngine(model), [([5] * (EDGE - 4), [1], budget)])
    [[done]] = ask(LocalEngine(model), [([5] * (EDGE - 5), [1], budget)])

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
    assert tried_lengths(made(*FEW["gemma2"])) == [9]
    assert tried_lengths(made(*FEW["llama4 chunks"])) == [8]
    assert tried_lengths(made(*FEW["qwen2"])) == []
