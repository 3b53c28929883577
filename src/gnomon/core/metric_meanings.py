"""What each metric of a step means: the table behind the site's page and `StepMetrics.meaning`."""

import re
from collections.abc import Mapping

from gnomon.core.tables import packaged_toml

MEANINGS: Mapping[str, str] = packaged_toml("gnomon.core", "metric_meanings.toml")
"""The meaning of each metric by its name, in the order of a step; capitals stand for a name that a run gives."""

_CAPITALS = re.compile(r"[A-Z]+")


def metric_of(name: str) -> str | None:
    """Return the entry of `MEANINGS` that a metric's name belongs to; None for a metric of a user's own piece.

    >>> metric_of("loss/policy"), metric_of("reward/format_mean"), metric_of("mine/thing")
    ('loss/policy', 'reward/NAME_mean', None)
    """
    if name in MEANINGS:
        return name
    patterns = [entry for entry in MEANINGS if _CAPITALS.search(entry)]
    # The longest first: reward/NAME_leverage before loss/NAME.
    for entry in sorted(patterns, key=len, reverse=True):
        if re.fullmatch(_CAPITALS.sub(r"\\w[^/]*", entry), name):
            return entry
    return None
