"""The common architecture (Llama, Mistral, Qwen2, Qwen3): which models have it, and the first layers of one to try.

Norm, attention with rotary positions, norm, gated feed-forward: what `lean` and `body` write out for a CPU.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from gnomon.models.modes import is_recomputed
from gnomon.models.packed import may_copy
from gnomon.models.prefix import attends_fully

_TRIED_LAYERS = 2
_TRIED_TOKENS = 32
_SOURCES = frozenset(f"transformers.models.{n}.modeling_{n}" for n in ("llama", "mistral", "qwen2", "qwen3"))
_ACTIVATIONS = frozenset({"transformers.activations", "torch.nn.modules.activation"})
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList)


def is_standard(model: Any) -> bool:
    """Whether every module of the model is one that is written out here, untouched, on a CPU, and in eval mode.

    Adapters, experts, windows, norms of other kinds, hooks, parameters in parts and subclasses make it another model.
    """
    kinds = {(type(p), p.device.type, p.dtype) for p in model.parameters()}
    return (
        not model.training
        and all(_is_known(m) for m in model.modules())
        and len(kinds) == 1
        and next(iter(kinds))[:2] == (nn.Parameter, "cpu")
        and attends_fully(model)
    )


def is_standard_head(model: Any) -> bool:
    """Whether a causal language model `is_standard` with its head, and the machine has room for copies of it."""
    is_causal = type(model).__name__.endswith("ForCausalLM")
    return is_causal and is_standard(model) and may_copy([m for m in model.modules() if isinstance(m, nn.Linear)])


def beginning(model: Any) -> Any:
    """Return embedding, first layers and head of a model that `is_standard`, in float32."""
    config = deepcopy(model.config)
    config.num_hidden_layers = min(_TRIED_LAYERS, config.num_hidden_layers)
    if vars(config).get("layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device("meta"):
        made = type(model)(config)
    own = model.state_dict()
    made.load_state_dict({name: own[name].float() for name in made.state_dict()}, assign=True)
    made.model.rotary_emb = deepcopy(model.model.rotary_emb)
    made.tie_weights()
    return made.requires_grad_(False).eval()


def first_layers(body: Any) -> Any:
    """Return a body of the first layers of one that `is_standard`, and of its first tokens, in float32."""
    config = deepcopy(body.config)
    config.num_hidden_layers, config.pad_token_id = min(_TRIED_LAYERS, config.num_hidden_layers), None
    config.vocab_size = min(_TRIED_TOKENS, config.vocab_size)
    if vars(config).get("layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device("meta"):
        made = type(body)(config)
    own = body.state_dict()
    state = {name: own[name] for name in made.state_dict()}
    state["embed_tokens.weight"] = state["embed_tokens.weight"][: config.vocab_size]
    made.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    made.rotary_emb = deepcopy(body.rotary_emb)
    return made.requires_grad_(False).eval()


def has_inner_norms(attention: Any) -> bool:
    """Whether queries and keys are normed head by head."""
    return "q_norm" in dict(attention.named_children())


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    is_activation = kind.__module__ in _ACTIVATIONS and not list(module.parameters())
    is_other = "forward" in vars(module) and not is_recomputed(module)
    is_untouched = not (module._forward_hooks or module._forward_pre_hooks or is_other)
    return is_untouched and (kind in _PLAIN or is_activation or kind.__module__ in _SOURCES)
