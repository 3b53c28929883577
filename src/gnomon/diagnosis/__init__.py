"""What is wrong with a run, in words: rules over what it measured, while it trains and afterwards.

A finding can be read without the libraries that making one takes; `diagnose` loads them when it is first used.
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
