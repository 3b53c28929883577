"""Models of known shapes with random weights, made where they compute: no download, no tokenizer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnomon.models.adapter_config import LoraConfig
from gnomon.models.lora import adapt


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model. lora: rank of adapters, where a GPU of 141 GB has no room for masters and moments of all weights.

    Full training in bf16 takes 18 bytes a parameter (weight 2, master 4, gradient 4, moments 8): 147 GB for 8 billion.
    """

    name: str
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    is_tied: bool
    lora: int = 0


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6b", 1024, 3072, 28, 16, 8, 128, 151_936, True),
        Shape("1.7b", 2048, 6144, 28, 16, 8, 128, 151_936, True),
        Shape("8b", 4096, 12_288, 36, 32, 8, 128, 151_936, False, lora=32),
        Shape("small", 64, 128, 2, 4, 2, 16, 512, True),
        Shape("small-lora", 64, 128, 2, 4, 2, 16, 512, False, lora=4),
    )
}


def make(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0, adapters: bool = True) -> Any:
    """Return the model in eval mode on ``device``, with adapters where the shape has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=40_960,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    rotary = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert all(buffer.dtype == torch.float32 for buffer in rotary), "rotary tables are float32 in every precision"
    return adapt(model, LoraConfig(rank=shape.lora)) if shape.lora and adapters else model


def products(model: Any) -> int:
    """Return the weights that multiply every token of a forward pass: linear layers without the head."""
    head = model.get_output_embeddings()
    return sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and m is not head)


def head_weights(model: Any) -> int:
    """Return the weights of the head."""
    return int(model.get_output_embeddings().weight.numel())
