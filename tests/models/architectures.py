"""Small models of the architectures that are written out for a CPU."""

from typing import Any

import transformers as hf

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def llama(**changes: Any) -> Any:
    """Biases everywhere, an untied head."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE | changes, attention_bias=True, mlp_bias=True))


def mistral(**changes: Any) -> Any:
    """No window; heads wider than the model divided among them."""
    return hf.MistralForCausalLM(hf.MistralConfig(**SHAPE | changes, sliding_window=None, head_dim=16))


def qwen2(**changes: Any) -> Any:
    """Biases on queries, keys and values alone."""
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE | changes))


def qwen3(**changes: Any) -> Any:
    """Norms on queries and keys."""
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE | changes, head_dim=8))
