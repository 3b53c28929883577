"""The length at which a model's rotary positions become others, and with them every number of a row.

longrope (Phi-3, Phi-4-mini, MiniCPM) has two tables, and a forward pass takes one of them by the longest row in it: a
short row beside a long one, or padded to its length, gets the long one's. A row that grows over the length changes the
table under the keys that are in its cache already. Dynamic NTK has a table for every length beyond the trained one.
YaRN, Llama 3's and linear scaling are one table for all lengths.
"""

from collections.abc import Mapping
from typing import Any


def rotary_edge(config: Any) -> int | None:
    """Return the longest row in tokens that has the first of several rotary tables; None where there is one table.

    Below and at this length numbers depend on nobody else's; gnomon asks for no row beyond it (`context_of`).
    """
    text = config.get_text_config()
    stated = vars(text).get("rope_parameters")
    tables = [stated, *stated.values()] if isinstance(stated, Mapping) else []
    edges = [_edge(table, text) for table in tables if isinstance(table, Mapping)]
    return min((edge for edge in edges if edge is not None), default=None)


def edge_note(config: Any, context: int | None) -> str:
    """Return why a context is as short as it is, to follow its number in a message; "" where positions end there."""
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
