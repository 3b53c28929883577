"""The random numbers that belong to the whole process: Python's, NumPy's and torch's."""

import math
import random
from typing import Any

import numpy as np
import torch

from gnomon.core.errors import CheckpointError
from gnomon.core.types import State

_NUMPY = "MT19937"
_WORDS = 624


class Generators:
    """The generators that everybody in this process shares. `Stateful`.

    gnomon draws from none of them: its draws are functions of seed, step, task and place. A user's piece or a library
    may, so they begin with the run's seed and go on where a checkpoint found them.

    Args:
        seed: >= 0. Other GPUs' generators are kept only once torch has been asked to use a GPU.
    """

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        # NumPy takes 32 bits alone.
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def state(self) -> State:
        """Return where all of them are."""
        version, words, spare = random.getstate()
        _, keys, place, has_gauss, gauss = np.random.get_state()
        # int64, since torch has next to no operations for uint32; `restore` turns the words back.
        tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
        # Asking for a state would initialize CUDA, and take memory on a GPU that the run does not use.
        if torch.cuda.is_initialized():
            states = torch.cuda.get_rng_state_all()
            tensors |= {f"cuda/{number}": state for number, state in enumerate(states)}
        numpy: list[Any] = [int(place), int(has_gauss), float(gauss)]
        return State(tensors, {"python": [version, list(words), spare], "numpy": numpy})

    def restore(self, state: State) -> None:
        """Let all of them go on from there; GPUs that are not here any more are left out.

        Raises:
            CheckpointError: This Python numbers its states otherwise.
        """
        version, words, spare = state.values["python"]
        gauss = state.values["numpy"][2]
        if not all(type(kept) is float and math.isfinite(kept) for kept in (gauss, spare) if kept is not None):
            raise CheckpointError(f"random numbers that are kept for the next draw cannot be {spare} and {gauss}")
        try:
            random.setstate((version, tuple(words), spare))
        except (ValueError, TypeError, OverflowError) as error:
            raise CheckpointError(f"the state of Python's random numbers is of another Python: {error}") from error
        place, has_gauss, gauss = state.values["numpy"]
        if not (0 <= place <= _WORDS and has_gauss in (0, 1)):
            raise CheckpointError(f"the state of NumPy's random numbers cannot be at {place} of {_WORDS}")
        np.random.set_state((_NUMPY, state.tensors["numpy"].numpy().astype(np.uint32), place, has_gauss, gauss))
        torch.set_rng_state(state.tensors["torch"])
        if torch.cuda.is_available():
            for number in range(torch.cuda.device_count()):
                if f"cuda/{number}" in state.tensors:
                    torch.cuda.set_rng_state(state.tensors[f"cuda/{number}"], number)
