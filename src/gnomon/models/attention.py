"""gnomon's attention function behind transformers' interface; other cases go to plain SDPA."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gnomon.core.errors import ModelError
from gnomon.models.cpu.prefix_attention import PrefixLayout
from gnomon.models.forward import body_of
from gnomon.models.packed_attention import attend_packed, kernel_for

# The length at which a model's rotary positions become others, and with them every number of a row.
#
# longrope (Phi-3, Phi-4-mini, MiniCPM) has two tables, and a forward pass takes one of them by the longest row in it: a
# short row beside a long one, or padded to its length, gets the long one's. A row that grows over the length changes
# the
# table under the keys that are in its cache already. Dynamic NTK has a table for every length beyond the trained one.
# YaRN, Llama 3's and linear scaling are one table for all lengths.


def rotary_edge(config: Any) -> int | None:
    """Return the longest row, in tokens, that uses the first of several rotary tables; None for a single table.

    Up to this length a row's numbers do not depend on other rows. gnomon asks for no longer row (`context_of`).
    """
    text = config.get_text_config()
    stated = vars(text).get("rope_parameters")
    tables = [stated, *stated.values()] if isinstance(stated, Mapping) else []
    edges = [_edge(table, text) for table in tables if isinstance(table, Mapping)]
    return min((edge for edge in edges if edge is not None), default=None)


def edge_note(config: Any, context: int | None) -> str:
    """Return the reason for a context's length, as the end of a message; "" if positions end there."""
    edge = rotary_edge(config)
    text = config.get_text_config()
    if edge is None or edge != context or edge == vars(text).get("max_position_embeddings"):
        return ""
    return " (its rotary positions change at that length, so longer rows would be drawn with other numbers than scored)"


def _edge(table: Mapping[str, Any], text: Any) -> int | None:
    kind = table.get("rope_type", "default")
    if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
        return None
    longest = vars(text).get("max_position_embeddings")
    stated = longest if "dynamic" in kind else table.get("original_max_position_embeddings")
    stated = stated or vars(text).get("original_max_position_embeddings") or longest
    return None if stated is None else int(stated)


OWN = "gnomon_sdpa"
_ALTERING = ("position_bias", "softcap", "s_aux")


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
        return _by_branches(query, key, value, branches, settings), None
    rows, heads, length, size = query.shape
    shared = key.shape[1]
    is_masked_by_head = attention_mask is not None and attention_mask.shape[1] != 1
    if length != 1 or heads == shared or settings.get("position_bias") is not None or is_masked_by_head:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    out = functional.scaled_dot_product_attention(
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
    altering = [name for name in _ALTERING if settings.get(name) is not None]
    if altering or query.shape[0] * query.shape[2] != branches.positions:
        raise ModelError(f"attention of packed rows has no {', '.join(altering) or 'cache'}")
    window, scale = settings.get("sliding_window"), settings.get("scaling")
    branches.windows.append(window)
    return attend_packed((query, key, value), branches, query.shape[-1] ** -0.5 if scale is None else scale, window)


def use_own_attention(model: Any) -> None:
    """Make a model that uses SDPA use `attend`, also its backbone if the backbone has its own configuration."""
    AttentionInterface.register(OWN, attend)
    AttentionMaskInterface.register(OWN, sdpa_mask)
    for part in (model, body_of(model)):
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation == "sdpa":
            part.set_attn_implementation(OWN)


def attends_by_branches(model: Any) -> bool:
    """Whether packed rows of this model come with their branches, and not with a mask.

    Args:
        model: A model after `use_own_attention`.
    """
    implementation: str = body_of(model).config._attn_implementation
    return implementation == OWN and kernel_for(next(model.parameters()).device) != "dense"
