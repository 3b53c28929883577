"""Diagnose a run, live or finished, by rules over its metrics.

`Finding` can be imported without heavy libraries; `diagnose` loads them at its first use.
"""

from typing import TYPE_CHECKING, Any

from gnomon.diagnosis.finding import Finding, FindingSample

if TYPE_CHECKING:
    from gnomon.diagnosis.recorded import diagnose

__all__ = ["Finding", "FindingSample", "diagnose"]


def __getattr__(name: str) -> Any:
    if name != "diagnose":
        raise AttributeError(f"module 'gnomon.diagnosis' has no attribute {name!r}; it has {', '.join(__all__)}")
    from gnomon.diagnosis.recorded import diagnose

    return diagnose
