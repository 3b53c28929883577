"""Shapes of models, dense or mixtures of experts, from a config or from a list."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gnomon.analysis.planner.hardware import KNOWN
from gnomon.core.errors import ConfigError, unknown
from gnomon.models.size import outline
from gnomon.models.tiny import TINY_MODELS


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward part in every layer.

    Attributes:
        inner: Width of the dense feed-forward part, 0 if all layers have experts.
        experts: Experts of a layer, 0 for a dense model.
        chosen: Experts per token.
        expert_inner: Width of one expert.
        shared_inner: Width of the shared experts.
        dense_layers: Layers of a mixture without experts.
    """

    name: str
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    is_tied: bool = False
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0

    @property
    def attention(self) -> int:
        """Weights of a layer's four attention matrices."""
        return self.width * self.head * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert(self) -> int:
        """Weights of one expert."""
        return 3 * self.width * self.expert_inner

    @property
    def embedding(self) -> int:
        """Weights of the embedding, which has the head's size."""
        return self.vocabulary * self.width

    @cached_property
    def body(self) -> int:
        """Weights of all layers' matrices, with every expert."""
        return self._layers_with(self.experts)

    @cached_property
    def active(self) -> int:
        """Weights of all layers' matrices that one token uses."""
        return self._layers_with(self.chosen)

    @property
    def parameters(self) -> int:
        """All weights, without biases and with only two norms per layer (0.1% at most is missing)."""
        return self.body + self.embedding * (1 if self.is_tied else 2) + self.width * (2 * self.layers + 1)

    @property
    def active_parameters(self) -> int:
        """Weights that one token uses, with embedding and head: the number in a mixture's name."""
        return self.active + self.embedding * (1 if self.is_tied else 2)

    @property
    def layer(self) -> int:
        """Weights of the largest layer, which a device gathers as a whole."""
        dense = self.attention + 3 * self.width * self.inner
        return max(dense, self._expert_layer(self.experts)) if self.experts else dense

    @property
    def kept(self) -> int:
        """Numbers per token that one layer keeps for its backward pass.

        10 widths around attention and norms and four times the inner width (`learner.sections`). Measured: 20.8 widths
        for SmolLM2-135M, where the formula gives 20.7.
        """
        # A token passes the experts that it chose and the shared ones.
        inner = self.chosen * self.expert_inner + self.shared_inner if self.experts else self.inner
        return 10 * self.width + 4 * max(inner, self.inner if self.dense_layers else 0)

    def cache(self, parts: int, item: int) -> int:
        """Return bytes of one token's KV cache on each of ``parts`` devices; a head is never split."""
        return 2 * self.layers * max(1, self.kv_heads // parts) * self.head * item

    def read(self, rows: float) -> float:
        """Return the weights that one decoding step of ``rows`` responses reads, with the expected number of experts.

        A token uses each expert with probability p = chosen / experts, so ``rows`` tokens use 1 - (1 - p)^rows of them.
        Real routing is less even and uses fewer.
        """
        if not self.experts:
            return float(self.body + self.embedding)
        # The expected number of experts that at least one of the rows chose.
        met = self.experts * (1.0 - math.pow(1 - self.chosen / self.experts, rows))
        resting = self._layers_with(0) + self.embedding
        return resting + self.expert_layers * met * self.expert

    def adapters(self, rank: int) -> int:
        """Return the weights of adapters on every linear layer but the head (peft gives each expert its own)."""
        attention = self.width + self.heads * self.head
        # Query and output, then key and value: rank (d + k) for a d x k matrix.
        attention = 2 * attention + 2 * (self.width + self.kv_heads * self.head)
        dense = 3 * (self.width + self.inner) * (self.layers - self.expert_layers)
        experts = 3 * self.experts * (self.width + self.expert_inner) * self.expert_layers
        return rank * (self.layers * attention + dense + experts)

    def _expert_layer(self, experts: int) -> int:
        router = self.width * self.experts
        return self.attention + router + experts * self.expert + 3 * self.width * self.shared_inner

    def _layers_with(self, experts: int) -> int:
        dense = (self.layers - self.expert_layers) * (self.attention + 3 * self.width * self.inner)
        return dense + self.expert_layers * self._expert_layer(experts)


SHAPES = {name: ModelShape(name, **shape) for name, shape in KNOWN["shapes"].items()}
"""Shapes by name, from the models' public config.json."""

_KIND_OF_TRAINING = re.compile(
    r"-(instruct|it|pt|base|chat|thinking|sft|dpo|rlvr1?|hf|bf16|2507|0[1-9]25|1[0-2]24|v0\.\d)(?=-|$)"
)
"""What a name on the hub says of a model's training or date, and not of its shape."""

_DISTILLED = {
    **{f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("7b", "14b", "32b")},
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b", "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
}  # fmt: skip
"""Distillations that have the shape of the model that they began with; that of 1.5 billion has a head of its own."""

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def shape_of(model: str) -> ModelShape:
    """Return the shape of a known model, of a folder with a config.json, or of a model that gnomon can load.

    Raises:
        ConfigError: If the config lacks a number or has an unsupported architecture.
        ModelError: As `check_model` does.
    """
    known = SHAPES.get(plain_name(model))
    # A folder of that name is the user's own model, whatever its name says.
    if known is not None and not os.path.exists(model):
        return known
    config = Path(model) if Path(model).suffix == ".json" else Path(model) / "config.json"
    if config.is_file():
        try:
            content = json.loads(config.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{config} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{config} is no table of settings; a model's page on the hub has its config.json")
        return from_config(content, config.parent.name or str(config))
    if model in TINY_MODELS:
        whole: Any = outline(model)
        return from_config(whole.config.to_dict(), model)
    raise ConfigError(
        f"{unknown('model', plain_name(model), SHAPES)}; or a folder with a config.json, which a model's "
        "page on the hub has among its files"
    )


def plain_name(model: str) -> str:
    """Return the part of a hub name that says a model's shape.

    >>> plain_name("Qwen/Qwen3-4B-Thinking-2507"), plain_name("allenai/OLMo-2-1124-7B-Instruct")
    ('qwen3-4b', 'olmo-2-7b')
    """
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    # Variants of one family whose shape is that of the plain model.
    name = re.sub("(?<=qwen2.5-)math-|(?<=qwen2.5-)coder-|(?<=qwen3-)coder-", "", name)
    return _DISTILLED.get(name) or _KIND_OF_TRAINING.sub("", name)


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that a Hugging Face config describes.

    Raises:
        ConfigError: If the config lacks a number, has one that no model can have, or has latent attention.
    """
    # A multimodal model has its decoder's numbers in a table of their own.
    own = config.get("text_config")
    config = own if isinstance(own, Mapping) else config
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    inner = _first(config, "intermediate_size")
    # Without a feed-forward width, a third or more of the weights would be left out of every number.
    wanted = "moe_intermediate_size" if experts and not inner else "intermediate_size"
    missing = [key for key in (*_NEEDED, wanted) if not _first(config, key)]
    if missing:
        raise ConfigError(f"the config of {name} has no {', '.join(missing)} above 0, so its shape is not known")
    if config.get("kv_lora_rank"):
        raise ConfigError(f"{name} has latent attention (kv_lora_rank), for which the planner has no formulas")
    width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    expert_inner = _first(config, "moe_intermediate_size") or inner
    # Qwen gives the width of the shared experts, DeepSeek their number.
    shared = _first(config, "shared_expert_intermediate_size") or _first(config, "n_shared_experts") * expert_inner
    plain = config.get("mlp_only_layers")
    dense = _first(config, "first_k_dense_replace") + (len(plain) if isinstance(plain, list) else 0)
    chosen = _first(config, "num_experts_per_tok")
    if experts and not (chosen in range(1, experts + 1) and dense <= layers):
        raise ConfigError(
            f"the config of {name} has {experts} experts, of which num_experts_per_tok = {chosen} answer a token, and "
            f"{dense} of {layers} layers without any: no model has these numbers"
        )
    return ModelShape(
        name=name,
        width=width,
        inner=inner if not experts or dense else 0,
        layers=layers,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        head=_first(config, "head_dim") or width // heads,
        vocabulary=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        chosen=chosen if experts else 0,
        expert_inner=expert_inner if experts else 0,
        shared_inner=shared if experts else 0,
        dense_layers=dense if experts else 0,
    )


def _first(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of these keys' integers above 0, or 0."""
    return next((found for key in keys if type(found := config.get(key)) is int and found > 0), 0)
