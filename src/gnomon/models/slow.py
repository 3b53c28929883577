"""What of a model is computed by a slower way than there could be, by its config and by what is installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from gnomon.models.forward import accepted, cache_name

_STATES = ("mamba", "linear_attention", "recurrent", "conv", "hybrid")
_KERNELS = ("causal_conv1d", "mamba_ssm", "fla")


def slow_parts(model: Any, prompt: float, answer: int) -> Iterator[str]:
    """Yield a sentence for each slower way that ``model`` goes, which may be without weights.

    prompt, answer: tokens of a usual prompt and of the longest answer, by which the factor is reckoned.
    """
    text = model.config.get_text_config()
    if cache_name(accepted(model)) is None:
        yield (
            f"{type(model).__name__} takes no cache, so every token is drawn by a whole forward pass: about "
            f"{recomputing_factor(prompt, answer):,.0f} times as many tokens computed at answers of {answer} (reckoned)"
        )
    if vars(text).get("attn_logit_softcapping") is not None:
        yield (
            "attention is eager, as SDPA does not bound scores as this model does: its scores of a row of T tokens are "
            "in memory, T * T a head (set by the model's attn_logit_softcapping)"
        )
    kinds = (str(model.config.model_type), *map(str, vars(text).get("layer_types") or ()))
    missing = [name for name in _KERNELS if find_spec(name) is None]
    if missing and any(state in kind for kind in kinds for state in _STATES):
        yield (
            f"layers that carry a state are computed by transformers' plain PyTorch code, as {', '.join(missing)} "
            "are not installed: on a GPU several times slower (by their authors' numbers; not measured here)"
        )


def recomputing_factor(prompt: float, answer: int) -> float:
    """Return how many times the tokens go through a model when every one is drawn by a whole forward pass.

    >>> round(recomputing_factor(100, 256))
    164
    """
    return (answer * prompt + answer * (answer + 1) / 2) / max(1.0, prompt + answer)
