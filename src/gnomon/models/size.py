"""The size of a model before any weight is read."""

import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnomon.models.auto_class import empty_model
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.load import model_config
from gnomon.models.logprobs import TokenScorer
from gnomon.models.quantized import quantizable
from gnomon.models.routing import expert_count
from gnomon.models.slow import notify_slow
from gnomon.models.tiny import TINY_MODELS, tiny_model

_TRIED_WEIGHTS = 1 << 25
"""Of a model that is tried before it is loaded: 128 MiB, and less than a second."""
_TRIED_TOKENS = 64


@dataclass(frozen=True)
class ModelSize:
    """Size of a model, from its config.

    Attributes:
        parameters: Weights; a tied weight counts once.
        cache_bytes_per_token: KV cache of one position in bf16; 0 if the config does not say.
        experts: Per layer, 0 for a dense model.
        quantizable: Weights that `lora.base` would store in fewer bits.
        frozen: Weights that no text goes through: those for images.
    """

    parameters: int
    layers: int
    width: int
    vocabulary: int
    cache_bytes_per_token: int
    experts: int = 0
    quantizable: int = 0
    frozen: int = 0


def outline(name: str, trust_remote_code: bool = False) -> nn.Module:
    """Return the model ``name`` without weights: modules, names and shapes. Raises ModelError as `check_model` does."""
    if name in TINY_MODELS:
        return tiny_model(0, TINY_MODELS[name])
    model: nn.Module = empty_model(model_config(name, trust_remote_code), trust_remote_code)
    return model


def model_size(name: str, trust_remote_code: bool = False) -> ModelSize:
    """Return the size of the model ``name`` from its config.

    Raises:
        ModelError: As `check_model` does.
    """
    model: Any = outline(name, trust_remote_code)
    config = model.config.get_text_config()
    asking = getattr(config, "num_attention_heads", None) or 0  # a state-space model has none, and keeps no keys
    heads = getattr(config, "num_key_value_heads", None) or asking
    head = getattr(config, "head_dim", None) or config.hidden_size // max(asking, 1)
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        # Keys and values, two bytes each.
        cache_bytes_per_token=2 * 2 * config.num_hidden_layers * heads * head,
        experts=expert_count(model),
        quantizable=sum(layer.weight.numel() for layer in quantizable(model).values()),
        frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
    )


def foreseen_slow(model: Any) -> tuple[str, ...]:
    """Return what the trials of engine and learner say (`models.slow.warn_slow`) of a model without weights.

    Tried is a model of the same code with seeded weights and as few layers as have every kind of layer. Nothing is said
    of one that has more than 33 million weights even so, or that cannot be made: the run's own trial says it then.
    """
    said: dict[str, None] = {}
    # A dict as an ordered set: the listener adds each sentence once.
    with warnings.catch_warnings(), torch.random.fork_rng([]), notify_slow(said.setdefault):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            config = _fewest_layers(model.config)
            with torch.device("meta"):
                weights = sum(p.numel() for p in type(model)(config).parameters())
            if weights <= _TRIED_WEIGHTS:
                small = type(model)(config).eval()
                # Both are called for what they tell the listener above.
                fastest_decoder(small)
                TokenScorer(small)
        except Exception:  # whatever a stranger's code raises when its config is changed
            return ()
    return tuple(said)


def _fewest_layers(config: Any) -> Any:
    made = deepcopy(config)
    text = made.get_text_config()
    kinds = vars(text).get("layer_types") or [""] * 2
    count = next(n for n in range(1, len(kinds) + 1) if len(set(kinds[:n])) == len(set(kinds)))
    text.num_hidden_layers = count = min(max(2, count), text.num_hidden_layers)
    if vars(text).get("layer_types"):
        text.layer_types = kinds[:count]
    text.vocab_size, text.pad_token_id = min(_TRIED_TOKENS, text.vocab_size), None
    return made
