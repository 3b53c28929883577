"""The common architecture (Llama, Mistral, Qwen2, Qwen3): recognize such models, and cut off first layers for trials.

The architecture is norm, attention with rotary positions, norm, gated feed-forward, which `fused_decoder` and
`fused_forward` implement for a CPU.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from gnomon.models.contexts import is_recomputed
from gnomon.models.cpu.packed_linear import may_copy
from gnomon.models.prefix import attends_fully

_TRIED_LAYERS = 2
_SOURCES = frozenset(f"transformers.models.{n}.modeling_{n}" for n in ("llama", "mistral", "qwen2", "qwen3"))
_ACTIVATIONS = frozenset({"transformers.activations", "torch.nn.modules.activation"})
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList)


def is_standard(model: Any) -> bool:
    """Whether every module of the model has the common form, unmodified, on a CPU, in eval mode.

    Adapters, experts, attention windows, other norms, hooks, sharded parameters and subclasses do not have the form.
    """
    kinds = {(type(p), p.device.type, p.dtype) for p in model.parameters()}
    return (
        not model.training
        and all(_is_known(m) for m in model.modules())
        # One type, device and precision for all parameters: the C functions take no mixtures.
        and len(kinds) == 1
        and next(iter(kinds))[:2] == (nn.Parameter, "cpu")
        and attends_fully(model)
    )


def is_standard_head(model: Any) -> bool:
    """Whether a causal language model `is_standard` with its head, and memory allows copies of its weights."""
    is_causal = type(model).__name__.endswith("ForCausalLM")
    return is_causal and is_standard(model) and may_copy([m for m in model.modules() if isinstance(m, nn.Linear)])


def beginning(network: Any, tokens: int | None = None) -> Any:
    """Return the first layers of a standard network in float32, with its head if it has one.

    Args:
        network: A network that `is_standard`.
        tokens: Size of the reduced vocabulary; None keeps all tokens.
    """
    config = deepcopy(network.config)
    config.num_hidden_layers = min(_TRIED_LAYERS, config.num_hidden_layers)
    if vars(config).get("layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    if tokens is not None:
        config.vocab_size, config.pad_token_id = min(tokens, config.vocab_size), None
    with torch.device("meta"):
        made = type(network)(config)
    own = network.state_dict()
    # Only what has a row a token is longer than it shall be.
    kept = {name: own[name][: len(like)].float() for name, like in made.state_dict().items()}
    made.load_state_dict(kept, assign=True)
    # Its tables are no part of the state, so those made on the meta device have no numbers.
    made.get_decoder().rotary_emb = deepcopy(network.get_decoder().rotary_emb)
    made.tie_weights()
    return made.requires_grad_(False).eval()


def has_inner_norms(attention: Any) -> bool:
    """Whether queries and keys are normalized per head."""
    return "q_norm" in dict(attention.named_children())


def is_silu(activation: nn.Module) -> bool:
    """Whether an activation is x / (1 + exp(-x))."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    is_activation = kind.__module__ in _ACTIVATIONS and not list(module.parameters())
    is_other = "forward" in vars(module) and not is_recomputed(module)
    is_untouched = not (module._forward_hooks or module._forward_pre_hooks or is_other)
    return is_untouched and (kind in _PLAIN or is_activation or kind.__module__ in _SOURCES)
