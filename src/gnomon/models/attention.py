"""gnomon's attention function behind transformers' interface; other cases go to plain SDPA."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gnomon.core.errors import ModelError
from gnomon.models.cpu.prefix_attention import Alteration, PrefixLayout
from gnomon.models.forward import body_of
from gnomon.models.packed_attention import attend_packed, kernel_for

# The length at which a model's rotary positions become others, and with them every number of a row.
#
# longrope (Phi-3, Phi-4-mini, MiniCPM) has two tables, and a forward pass takes one of them by the longest row in it: a
# short row beside a long one, or padded to its length, gets the long one's. A row that grows over the length changes
# the table under the keys that are in its cache already. Dynamic NTK has a table for every length beyond the trained
# one. YaRN, Llama 3's and linear scaling are one table for all lengths.


def rotary_edge(config: Any) -> int | None:
    """Return the longest row, in tokens, that uses the first of several rotary tables; None for a single table.

    Up to this length a row's numbers do not depend on other rows. gnomon asks for no longer row (`context_of`). Beyond
    ``keep_window_size`` tokens Doge chooses keys among all, also later ones, so there it counts as such a length.
    """
    text = config.get_text_config()
    stated = vars(text).get("rope_parameters")
    tables = [stated, *stated.values()] if isinstance(stated, Mapping) else []
    edges = [_edge(table, text) for table in tables if isinstance(table, Mapping)]
    edges.append(vars(text).get("keep_window_size"))
    return min((edge for edge in edges if edge is not None), default=None)


def longrope_scale(config: Any) -> float | None:
    """Return what longrope scales queries and keys by, as transformers reads the config; None for other positions."""
    if (vars(config).get("rope_parameters") or {}).get("rope_type") != "longrope":
        return None
    return float(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1])


def edge_note(config: Any, context: int | None) -> str:
    """Return the reason for a context's length, as the end of a message; "" if positions end there."""
    edge = rotary_edge(config)
    text = config.get_text_config()
    if edge is None or edge != context or edge == vars(text).get("max_position_embeddings"):
        return ""
    return " (its positions or keys change there, so longer rows would be drawn with other numbers than scored)"


def _edge(table: Mapping[str, Any], text: Any) -> int | None:
    kind = table.get("rope_type", "default")
    if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
        return None
    longest = vars(text).get("max_position_embeddings")
    stated = longest if "dynamic" in kind else table.get("original_max_position_embeddings")
    stated = stated or vars(text).get("original_max_position_embeddings") or longest
    return None if stated is None else int(stated)


# The names under which transformers finds gnomon's functions.
OWN, OWN_EAGER = "gnomon_sdpa", "gnomon_eager"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    branches: PrefixLayout | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as transformers' SDPA does, faster in two cases. Sums have another order: equal up to rounding.

    Packed rows come with ``branches``: see `packed_attention`. For one new position per row, the query heads that
    share a key become query rows. transformers copies keys and values for each query head of a group
    (`repeat_kv`), which for a group of 3 triples the memory that a decoding step reads.

    Raises:
        ModelError: If packed rows come with something that their kernels do not know.
    """
    if branches is not None:
        if settings.get("softcap") is not None or settings.get("s_aux") is not None:
            raise ModelError("SDPA, which rows of their own take, knows neither bounded scores nor sinks")
        return _by_branches(query, key, value, branches, settings), None
    rows, heads, length, size = query.shape
    shared = key.shape[1]
    is_masked_by_head = attention_mask is not None and attention_mask.shape[1] != 1
    if length != 1 or heads == shared or settings.get("position_bias") is not None or is_masked_by_head:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    out = functional.scaled_dot_product_attention(
        # (rows, key heads, group, size): the query heads of one key become its queries, and no key is copied.
        query.reshape(rows, shared, heads // shared, size),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=settings.get("dropout", 0.0),
        scale=settings.get("scaling"),
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def _by_branches(
    query: Tensor, key: Tensor, value: Tensor, branches: PrefixLayout, settings: Mapping[str, Any]
) -> Tensor:
    if settings.get("position_bias") is not None or query.shape[0] * query.shape[2] != branches.positions:
        raise ModelError("attention of packed rows has neither a bias of positions nor a cache")
    altered = Alteration(*(settings.get(name) for name in ("sliding_window", "softcap", "s_aux")))
    # `Backbone.packed` counts these: a layer that was not told its branches would attend to other responses.
    branches.windows.append(altered.window)
    scale = settings.get("scaling")
    return attend_packed((query, key, value), branches, query.shape[-1] ** -0.5 if scale is None else scale, altered)


def attend_eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    branches: PrefixLayout | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as the model's own file does, which knows bounded scores and sinks, but of packed rows."""
    if branches is not None:
        return _by_branches(query, key, value, branches, settings), None
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    found: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **settings)
    return found


def use_own_attention(model: Any) -> None:
    """Make a model that uses SDPA use `attend`, also its backbone if the backbone has its own configuration.

    A model that is eager because SDPA knows no bounds and no sinks uses `attend_eager`.
    """
    AttentionInterface.register(OWN, attend)
    AttentionMaskInterface.register(OWN, sdpa_mask)
    AttentionInterface.register(OWN_EAGER, attend_eager)
    AttentionMaskInterface.register(OWN_EAGER, eager_mask)
    for part in (model, body_of(model)):
        if not isinstance(part, PreTrainedModel):
            continue
        if part.config._attn_implementation == "sdpa":
            part.set_attn_implementation(OWN)
        elif part.config._attn_implementation == "eager" and _must_be_eager(part):
            part.set_attn_implementation(OWN_EAGER)


def _must_be_eager(model: Any) -> bool:
    is_bounded = vars(model.config.get_text_config()).get("attn_logit_softcapping") is not None
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return (is_bounded or has_sinks) and "eager_attention_forward" in vars(sys.modules[type(model).__module__])


def attends_by_branches(model: Any) -> bool:
    """Whether packed rows of this model come with their branches, and not with a mask.

    Args:
        model: A model after `use_own_attention`.
    """
    implementation: str = body_of(model).config._attn_implementation
    return implementation in (OWN, OWN_EAGER) and kernel_for(next(model.parameters()).device) != "dense"
