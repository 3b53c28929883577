"""The device of a run: this machine's CPU, or one of its NVIDIA GPUs."""

import contextlib
import ctypes
import os

import torch
from torch import Tensor, nn

from gnomon.core.errors import ConfigError
from gnomon.models.packed_attention import kernel_for
from gnomon.models.place import check_device

AUTO = "auto"
_LEAST_MULTIPLE, _SHARE_BITS = 32, 5
_GIB = 2**30


def resolve_device(asked: str = AUTO) -> torch.device:
    """Return the device for ``asked`` on this machine; "auto" is PyTorch's first GPU, or the CPU.

    Raises:
        ConfigError: For any other form, or for a GPU that does not exist; or as `kernel_for` says.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    check_device(asked)
    # Called for its error: a wrong GNOMON_ATTENTION is said before a model is loaded.
    kernel_for(torch.device("cpu"))
    if asked == "cpu" or (asked == AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    number = int(asked.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number < count:
        return torch.device("cuda", number)
    raise ConfigError(f"device = '{asked}': {_why_missing(count)}, or set device = 'cpu' (or 'auto')")


def describe_device(device: torch.device) -> str:
    """Return the run card's entry: name, memory, CUDA version, kernel of shared prompts and float32 precision of a GPU.

    "highest" is IEEE float32. With "high" a GPU rounds factors to TF32, 10 bits of fraction: faster, but ratios of
    equal policies are then not one to 1e-6. gnomon keeps PyTorch's default, "highest". Speed comes from bfloat16
    products with float32 sums.

    >>> describe_device(torch.device("cpu"))
    'cpu'
    """
    if device.type != "cuda":
        return str(device)
    found = torch.cuda.get_device_properties(device)
    return (
        f"{device} ({found.name}, {found.total_memory / _GIB:.0f} GiB, CUDA {torch.version.cuda}, "
        f"shared prompts: {kernel_for(device)} attention, float32 products: {torch.get_float32_matmul_precision()})"
    )


def placed(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Return a loaded model on ``device``, with every weight in memory of its own.

    transformers maps a file's weights into memory where they are asked for in the file's precision. What another
    program then writes into the file changes the model without a word, a file cut short ends the process, and pages
    that were read once count as its memory.
    """
    moved = model.to(device)
    # A move to another device has copied them.
    if torch.device(device).type == "cpu":
        for tensor in (*moved.parameters(), *moved.buffers()):
            tensor.data = tensor.data.clone()
    return moved


def memory_of(device: torch.device) -> int:
    """Return the device's own memory in bytes; 0 for the CPU, which uses the machine's memory."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def round_up(count: int, weight: Tensor) -> int:
    """Return ``count`` or a slightly larger number of tokens that suits products with ``weight``.

    On a CPU, oneDNN prepares every new shape of a low-precision product and never frees a part of it: a gigabyte within
    ten steps of new lengths. The results are multiples of 32, above 2,048 of a 32nd of the power of two below: up to 3%
    more tokens, and at most 32 further shapes per doubling. Other products need no rounding.

    >>> low = torch.zeros(2, 2, dtype=torch.bfloat16)
    >>> [round_up(count, low) for count in (1, 500, 1025, 2049)], round_up(1025, torch.zeros(2, 2))
    ([32, 512, 1056, 2112], 1025)
    """
    if weight.device.type != "cpu" or weight.dtype == torch.float32 or count < 1:
        return count
    # The power of two at or below ``count``, over 32.
    multiple = max(_LEAST_MULTIPLE, 1 << count.bit_length() - 1 >> _SHARE_BITS)
    return -(-count // multiple) * multiple


def give_back(device: torch.device) -> None:
    """Give memory that tensors no longer use back to the device, for other processes: PyTorch, and glibc, keep it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def finish(device: torch.device) -> None:
    """Wait for the device, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _why_missing(count: int) -> str:
    if count:
        names = ", ".join(f"cuda:{n} ({torch.cuda.get_device_properties(n).name})" for n in range(count))
        return f"PyTorch sees {count} GPU{'s' if count > 1 else ''} here, {names}; choose one of them"
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA; install one that has it"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"
    return f"PyTorch {torch.__version__} finds no usable NVIDIA GPU here{shown}; see what `nvidia-smi` says"
