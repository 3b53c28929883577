"""A small language model and a byte tokenizer for tests, examples and first steps.

Both are ordinary Hugging Face objects, so tests of saving, loading, adapters and engines use the code of large models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load
from torch import nn

from gnomon.core.errors import ConfigError
from gnomon.models.place import TINY, TINY_MIXTURE, TINY_SUMS
from gnomon.models.tokenizer import Tokenizer, byte_characters, wrap
from gnomon.models.weights_check import no_bars

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
BYTES = 256
TAUGHT = f"model '{TINY_SUMS}' is '{TINY}' taught beforehand: of the sums of two digits it answers one in seven rightly"


@dataclass(frozen=True)
class TinyConfig:
    """Shape of a tiny Llama, or of a tiny mixture of experts.

    Attributes:
        architecture: "llama" is dense; "qwen3_moe" and "olmoe" have ``experts`` in each layer, half as wide as the
            dense one's, of which a router chooses ``experts_per_token``; gates sum to 1 in the first and not in the
            second.
        layers: Width must divide by heads, into an even head size.
        width: Width must divide by heads, into an even head size.
        heads: Width must divide by heads, into an even head size.
        kv_heads: Shared key and value heads.
        vocab_size: At least 259, the byte tokenizer's: 256 bytes and three control tokens.
        context_length: tokens.
        spread: Standard deviation of the initial weights; 0.1 makes a distribution with a clear shape (0.02, the usual
            value, gives one that is almost flat at this width).
        weights: File of trained weights beside this module; "" draws them from a seed.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocab_size: int = BYTES + 3
    context_length: int = 1024
    spread: float = 0.1
    architecture: Literal["llama", "qwen3_moe", "olmoe"] = "llama"
    experts: int = 4
    experts_per_token: int = 2
    weights: str = ""

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                f"TinyConfig: width {self.width} must divide by twice heads {self.heads}, "
                f"and heads by kv_heads {self.kv_heads}"
            )


TINY_MODELS: Mapping[str, TinyConfig] = {
    TINY: TinyConfig(),
    TINY_MIXTURE: TinyConfig(architecture="qwen3_moe"),
    TINY_SUMS: TinyConfig(weights="tiny_sums.safetensors"),
}
"""The built-in names and what they stand for."""


def tiny_model(seed: int = 0, config: TinyConfig | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a tiny model whose weights depend only on ``seed`` and ``config``, or are those of a file it names.

    Embeddings are tied.

    The defaults give about 91,000 parameters (a mixture has 140,000), and a forward pass takes about a millisecond.
    """
    from transformers import AutoModelForCausalLM

    shape = config or TinyConfig()
    # The caller's generator is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(_hugging_face(shape))
    if shape.weights and not next(model.parameters()).is_meta:
        trained = load((files("gnomon.models") / shape.weights).read_bytes())
        # safetensors stores a tied weight once.
        model.load_state_dict({**trained, "lm_head.weight": trained["model.embed_tokens.weight"]})
    return model.to(dtype).eval()


def tiny_tokenizer(config: TinyConfig | None = None) -> Tokenizer:
    """Return the byte tokenizer: ids are byte values, then <|bos|> 256, <|eos|> 257, <|pad|> 258.

    >>> tiny_tokenizer().encode("Hi!<|eos|>")
    [72, 105, 33, 257]
    >>> tiny_tokenizer().decode(tiny_tokenizer().encode_plain("<|eos|>"))
    '<|eos|>'
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    shape = config or TinyConfig()
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    # Without merges each byte stays a token of its own.
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, PAD)])
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BYTES)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=shape.context_length,
    )
    return wrap(fast, _hugging_face(shape))


def save_tiny(folder: Path, seed: int = 0, config: TinyConfig | None = None) -> Path:
    """Write the tiny model and its tokenizer as a Hugging Face folder and return it."""
    model: Any = tiny_model(seed, config)
    with no_bars():
        model.save_pretrained(folder)
    tiny_tokenizer(config).save(folder)
    return folder


def _hugging_face(shape: TinyConfig) -> Any:
    from transformers import AutoConfig

    mixture = {
        "moe_intermediate_size": shape.width,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": shape.architecture == "qwen3_moe",
    }
    dense = shape.architecture == "llama"
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        # OLMoE says the width of an expert here.
        intermediate_size=shape.width if shape.architecture == "olmoe" else 2 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=shape.context_length,
        initializer_range=shape.spread,
        tie_word_embeddings=True,
        bos_token_id=BYTES,
        eos_token_id=BYTES + 1,
        pad_token_id=BYTES + 2,
        **({} if dense else mixture),
    )
    # As `load_model` asks for it.
    config._attn_implementation = "sdpa"
    return config
