"""Draw gnomon's tokens in vLLM: vLLM's model makes the logits, gnomon's sampler chooses."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.core.sections import SamplingConfig
from gnomon.engines.base import Sampling
from gnomon.engines.grammar import Grammar, GrammarState, draw_under

ROW = "gnomon_row"
"""Under this name a request of vLLM carries its `SamplingRow`."""
PROCESSOR = f"{__name__}:Draws"
"""What vLLM imports, in whatever process holds its model; see `draws_processor`."""
_LEAST_TEMPERATURE = 0.01


def native_fault(sampling: SamplingConfig, key: str = "sampling") -> str | None:
    """Return why vLLM's own sampler cannot draw in this way, and what to set; None where it can.

    It says one log-probability of a token, after all truncation, where gnomon needs that without truncation beside it,
    and it raises temperatures below 0.01 to 0.01 (a constant of ``vllm.sampling_params``).
    """
    cut = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    said = [f"{key}.{name} = {getattr(sampling, name):g}" for name, is_cut in cut.items() if is_cut]
    said += [f"{key}.grammar"] if sampling.grammar.is_set else []
    if said:
        why = f"says no log-probability without {', '.join(said)} beside the one with it"
    elif 0 < sampling.temperature < _LEAST_TEMPERATURE:
        why = f"raises {key}.temperature = {sampling.temperature:g} to {_LEAST_TEMPERATURE:g}"
    else:
        return None
    return f"vLLM's own sampler {why}; draw from all tokens at another temperature, or set engine.draws = 'keyed'"


@dataclass(eq=False)
class SamplingRow:
    """One sequence in vLLM, and what was drawn for it.

    Attributes:
        uniforms: Random number for each position; empty for a row that is only scored.
        given: Tokens of a row that is only scored.
        name: Name by which another process finds the row.
        logprobs, full_logprobs: Log-probabilities by position, as in `Completion`. A position may be drawn again (a
            prompt that goes through in pieces, a row that vLLM paused): same u, same token.
    """

    sampling: Sampling
    uniforms: NDArray[np.float64]
    given: tuple[int, ...] = ()
    name: str = ""
    logprobs: dict[int, float] = field(default_factory=dict)
    full_logprobs: dict[int, float] = field(default_factory=dict)

    @functools.cached_property
    def grammar(self) -> GrammarState | None:
        """Where the row stands in its grammar, in the process that draws."""
        made = Grammar.of(self.sampling)
        return None if made is None else made.begin()


@functools.cache
def draws_processor() -> type:
    """Return the logits processor that leaves vLLM one token a row to choose: the one that `sampler.draw` drew.

    vLLM's own sampler draws from a generator whose state depends on what it drew before, and reports probabilities
    either before or after truncation. Here the token at position t depends on the logits and on the t-th uniform of
    the row's key alone, as in every engine of ours, and both log-probabilities come from one pass. vLLM is then asked
    for the likeliest token, which skips its sampler.

    A class made in a function, for its base exists only where vLLM is installed.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class Draws(LogitsProcessor):  # type: ignore[misc]
        """Maps rows of the logits to requests; see `draws_processor`."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._rows: dict[int, tuple[SamplingRow, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            """Whether greedy choice would be the same without it: no, and vLLM must therefore ask it."""
            return False

        def update_state(self, batch_update: Any) -> None:
            """Follow the rows that came, went and moved, in the order that vLLM prescribes."""
            if batch_update is None:
                return
            # vLLM prescribes this order: removed, added, moved.
            for index in batch_update.removed:
                self._rows.pop(index, None)
            for index, params, _, tokens in batch_update.added:
                self._rows.pop(index, None)
                if ROW in (params.extra_args or {}):
                    self._rows[index] = (params.extra_args[ROW], tokens)
            for source, target, way in batch_update.moved:
                moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
                if moved is not None:
                    self._rows[target] = moved
                if displaced is not None and way == MoveDirectionality.SWAP:
                    self._rows[source] = displaced

        def apply(self, logits: Tensor) -> Tensor:
            """Draw for every row that is ours and forbid everything else."""
            present = {i: entry for i, entry in self._rows.items() if i < logits.shape[0]}
            if present:
                choose(logits, present)
            return logits

    return Draws


def __getattr__(name: str) -> type:
    if name == PROCESSOR.partition(":")[2]:
        return draws_processor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def noted(worker: Any, names: Collection[str]) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """Return what was noted of rows in the process that holds the model: both log-probabilities, by the rows' names.

    Args:
        worker: vLLM's, which knows a row until the step after its last token.
    """
    states = [state.sampling_params for state in worker.model_runner.requests.values()]
    rows = [(one.extra_args or {}).get(ROW) for one in states if one is not None]
    return {row.name: (row.logprobs, row.full_logprobs) for row in rows if row is not None and row.name in names}


def choose(logits: Tensor, rows: dict[int, tuple[SamplingRow, list[int]]]) -> None:
    """Draw a token for each row, note its log-probabilities, and leave it the only possible one, in place.

    Args:
        logits: Float32[R V].
        rows: By index into ``logits``, each with the tokens that it has so far.
    """
    # Rows with equal settings are drawn together, and scored rows apart from drawn ones.
    settings: dict[tuple[Sampling, bool], list[int]] = {}
    for index, (row, _) in rows.items():
        settings.setdefault((row.sampling, bool(row.given)), []).append(index)
    for (sampling, is_given), where in settings.items():
        places = [len(rows[index][1]) for index in where]
        cut = torch.tensor(where, device=logits.device)
        if is_given:
            tokens = torch.tensor([rows[i][0].given[p] for i, p in zip(where, places, strict=True)])
            scaled = (logits[cut] / sampling.temperature).log_softmax(-1)
            own = full = scaled.gather(1, tokens.to(logits.device)[:, None])[:, 0]
        else:
            u = torch.tensor([rows[i][0].uniforms[p] for i, p in zip(where, places, strict=True)], dtype=torch.float64)
            states, said = [rows[i][0].grammar for i in where], [rows[i][1] for i in where]
            drawn = draw_under(states, said, logits[cut], u, sampling)
            tokens, own, full = drawn.tokens, drawn.logprobs, drawn.full_logprobs
            failed = [place for place, state in enumerate(states) if state is not None and state.fault]
            # NaN tells the engine's thread that the grammar ended in nothing, wherever the thread is.
            own = own.index_fill(0, torch.tensor(failed, device=own.device), torch.nan) if failed else own
        for i, place, p, q in zip(where, places, own.tolist(), full.tolist(), strict=True):
            rows[i][0].logprobs[place], rows[i][0].full_logprobs[place] = p, q
        # vLLM's greedy choice then has one token to take.
        logits[cut] = -torch.inf
        logits[cut, tokens.to(logits.device)] = 0.0
