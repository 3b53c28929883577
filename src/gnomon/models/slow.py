"""Find slow ways of computation in a model, from its config and the installed packages."""

import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gnomon.models.forward import CACHE_NAMES, accepted, cache_name

_ASKED = re.compile(r'_with_fallback\(\s*"(\w+)",\s*"(\w+)"')
# Cut by hand: inspect parses the whole file anew for every class, a third of a second each.
_CLASS = re.compile(r"^class (\w+)(.*\n(?:[ \t)].*\n|\n)*)", re.MULTILINE)

_SLOW = {
    "recomputed": "no cache gave the answers of {name}, so every token is drawn by a whole forward pass: 164 times as "
    "many tokens computed for answers of 256 to prompts of 100 (estimated)",
    "in waves": "no cache that rows can join gave the answers of {name}, so only prompts of one length are drawn "
    "together: drawing took 1.4 to 2.2 times as long as plain transformers with prompts of four lengths (measured)",
    "unrecorded": "recorded decoding steps (CUDA graphs) did not give the answers of {name}, so each kernel of a step "
    "is launched by itself: a step of 24 small layers took 8 times as long (measured on an H200)",
    "forgotten": "keys and values that are kept between turns did not give the answers of {name}, so each turn "
    "computes its conversation again: 4.5 times as many tokens at 8 turns of one length (estimated)",
    "kernel": "{name} is not used on {device}: {why}. Slower kernels take its place ({variable}; not measured)",
    "row by row": "{name} does more with its head's output than scaling or bounding it, so learning computes row by "
    "row: an update took 1.5 to 1.8 times as long as plain transformers (measured)",
}

_LISTENERS: list[Callable[[str], None]] = []
_LOCK = threading.Lock()


@contextmanager
def notify_slow(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener``, one thread at a time, with the sentence of each fall in this process inside the block."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def warn_slow(way: str, name: str, **facts: Any) -> None:
    """Warn that a trial on the loaded model gave up a faster way, with the factor, and tell it to `notify_slow`.

    What is known before a model is loaded is in `slow_parts`.

    Args:
        way: A key of ``_SLOW``.
        name: What was tried.
        **facts: What the sentence names besides.
    """
    said = _SLOW[way].format(name=name, **facts)
    # Engine and learner try their models in different threads.
    with _LOCK:
        for listener in tuple(_LISTENERS):
            listener(said)
    warnings.warn(said, RuntimeWarning, stacklevel=3)


def slow_parts(model: Any, prompt: float, answer: int, turns: int = 1, is_kept: bool = True) -> Iterator[str]:
    """Yield a sentence for each slow way of ``model``, which may be without weights.

    Args:
        model: The model.
        prompt: Tokens of a usual prompt, for the factor.
        answer: Tokens of the longest response, for the factor.
        turns: Most turns of a conversation.
        is_kept: Whether there is memory for keys and values between turns.
    """
    # 1 + 2 + ... + n turns are computed instead of n: (n + 1) / 2 times as many tokens.
    if turns > 1 and not (is_kept and is_attention_only(model)):
        why = (
            f"{type(model).__name__} has layers whose state is not kept"
            if is_kept
            else "with engine.kept_gib = 0 nothing is kept"
        )
        yield (
            f"{why}, so each turn computes its conversation again: {(turns + 1) / 2:g} times as many tokens at "
            f"{turns} turns of one length (estimated)"
        )
    text = model.config.get_text_config()
    if cache_name(accepted(model)) is None:
        yield (
            f"{type(model).__name__} takes no cache, so every token is drawn by a whole forward pass: about "
            f"{recomputing_factor(prompt, answer):,.0f} times as many tokens computed at answers of {answer} "
            "(estimated)"
        )
    if vars(text).get("attn_logit_softcapping") is not None:
        yield (
            "attention is eager, as SDPA does not bound scores as this model does: its scores of a row of T tokens are "
            "in memory, T * T a head (set by the model's attn_logit_softcapping)"
        )
    missing = [name for name in sorted(kernel_packages(model)) if find_spec(name) is None]
    if missing:
        yield (
            f"layers that carry a state are computed by transformers' plain PyTorch code, as {', '.join(missing)} "
            "are not installed: on a GPU several times slower (by their authors' numbers; not measured here)"
        )


def is_attention_only(model: Any) -> bool:
    """Whether every layer's cache is keys and values of all positions, or of a window of them."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=model.config).layers
    kinds = {type(layer) for layer in layers}
    return (
        cache_name(accepted(model)) in CACHE_NAMES[:2]
        and len(layers) == config.num_hidden_layers
        and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    )


def kernel_packages(model: Any) -> frozenset[str]:
    """Return the packages from which the model's layers take kernels if installed, by transformers' code."""
    kinds = {type(part) for part in model.modules() if type(part).__module__.startswith("transformers.")}
    found = frozenset[str]()
    for place in {kind.__module__ for kind in kinds}:
        # transformers imports such kernels lazily, and falls back to PyTorch without a message; only its source says
        # so.
        source = inspect.getsource(sys.modules[place])
        asked = _ASKED.findall(source)
        bodies = dict(_CLASS.findall(source)) if asked else {}
        used = [bodies[kind.__name__] for kind in kinds if kind.__module__ == place and kind.__name__ in bodies]
        if any(function in body for body in used for function, _ in asked):
            found |= {package for _, package in asked}
    return found


def recomputing_factor(prompt: float, answer: int) -> float:
    """Return how many times more tokens go through a model without a cache.

    >>> round(recomputing_factor(100, 256))
    164
    """
    return (answer * prompt + answer * (answer + 1) / 2) / max(1.0, prompt + answer)
