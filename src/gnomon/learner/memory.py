"""Out of memory: the same step again, in smaller micro-batches."""

from collections.abc import Callable
from typing import TypeVar

import torch

from gnomon.errors import LearnerError
from gnomon.learner.passes import Passes

T = TypeVar("T")
HALVINGS = 3


def within_memory(passes: Passes, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; where memory ends, halve the tokens of a micro-batch and do it again.

    Losses and gradients are sums over micro-batches, so a step in halves is the same step, to rounding; whoever was
    broken off has dropped its gradients, and nothing was updated. The smaller budget stays for the rest of the run.
    Raises: LearnerError with the numbers when three halvings in a row did not help.
    """
    for _ in range(HALVINGS):
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not passes.halve():
                raise
        # Outside of the handler: what the error's frames hold must be gone before memory is asked for again.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise LearnerError(
            f"out of memory with micro-batches of {passes.max_tokens} tokens, an eighth of what was begun with: "
            f"{error}. Set learner.gradient_checkpointing = true, lower sampling.max_completion_length, use lora, or a "
            "smaller model"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ended, of an accelerator or of the machine.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
