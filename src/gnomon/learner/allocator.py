"""Allocator and oneDNN tuning; after out of memory, the same step in smaller micro-batches."""

import ctypes
import os
import platform
from collections.abc import Callable
from typing import TypeVar

import torch

from gnomon.core.errors import LearnerError
from gnomon.learner.forward import ForwardRunner

# Allocator and oneDNN tuning: settings of glibc malloc, by the numbers that `mallopt` takes.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {
    "arena_max": (_ARENA_MAX, 1),
    "mmap_max": (_MMAP_MAX, 0),
    "trim_threshold": (_TRIM_THRESHOLD, -1),
    "top_pad": (_TOP_PAD, 2**28),
}
_CAPACITY, _PREPARED = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", 64


def tune_machine() -> None:
    """Tune the allocator, and what oneDNN keeps. Call it once, early: before the first product."""
    tune_allocator()
    bound_prepared_products()


def bound_prepared_products() -> None:
    """Let oneDNN keep 64 prepared products instead of 1,024, unless the environment says how many.

    It prepares each new shape of a low-precision product, in about 1.5 MB of which a third stays for good; a training
    step has some 20 shapes for each number of tokens (`models.device.round_up`). Making one again takes 0.4 ms. It
    changes no number that is computed.
    """
    os.environ.setdefault(_CAPACITY, str(_PREPARED))


def tune_allocator() -> dict[str, int]:
    """Tell glibc to keep freed memory instead of giving it back, and return the settings that it took.

    By default every large tensor gets fresh pages from the kernel, which are zeroed on first touch, and
    returns them when freed; a training step then spends more time in page faults than in arithmetic. Large
    allocations now come from the heap (``mmap_max`` 0), which never shrinks (``trim_threshold`` -1) and
    grows by 256 MiB (``top_pad``). All threads share one heap (``arena_max``), or what the thread that generates
    has freed would be of no use to the one that trains: on the fixed work of benchmarks/ 4.6 against 3.4 GiB. The
    price: the process keeps its largest size. Call it once, early; it changes no number that is computed.

    Empty on a system without glibc.
    Source: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return {}
    # mallopt returns 1 for a setting that it took.
    mallopt = ctypes.CDLL(None).mallopt
    return {name: value for name, (option, value) in _SETTINGS.items() if mallopt(option, value) == 1}


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

T = TypeVar("T")
HALVINGS = 3


def retry_on_oom(passes: ForwardRunner, work: Callable[[], T], steps_begun: Callable[[], int]) -> T:
    """Return what ``work`` returns; where memory ends, halve the tokens of a micro-batch and do it again.

    Losses and gradients are sums over micro-batches, so a step in halves is the same step, to rounding; the
    interrupted pass dropped its gradients, and nothing was updated. The smaller budget stays for the rest of the run.

    Args:
        steps_begun: Returns how many steps of an optimizer have begun: work that began one is not done again, or half
            of an update would be made twice.

    Raises:
        LearnerError: Three halvings in a row did not help, or memory ended while weights changed; the message holds
            the numbers.
    """
    before, halvings = steps_begun(), 0
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if steps_begun() != before:
                raise LearnerError(
                    f"out of memory while the weights were changed, so some are new and others not: {error}. Use lora, "
                    'learner.optimizer.moments = "8bit" or a smaller model, and resume from the newest checkpoint'
                ) from error
            if halvings == HALVINGS:
                raise LearnerError(
                    f"out of memory with micro-batches of {passes.max_tokens} tokens, an eighth of what was begun "
                    f"with: {error}. Set learner.gradient_checkpointing = true, lower "
                    "sampling.max_completion_length, use lora, or a smaller model"
                ) from error
            if not passes.halve():
                raise
        # Outside of the handler: what the error's frames hold must be gone before memory is asked for again.
        halvings += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ended, of an accelerator or of the machine.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    # Only torch's own caching allocator raises OutOfMemoryError: the driver, cuBLAS and the CPU raise RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
