"""Where a run computes: this machine's processor, or one of its NVIDIA GPUs."""

import os
import re

import torch
from torch import Tensor

from gnomon.core.errors import ConfigError

AUTO = "auto"
_FORM = re.compile(r"auto|cpu|cuda(:\d+)?")
_LEAST_MULTIPLE, _SHARE_BITS = 32, 5
_GIB = 2**30


def check_device(asked: str) -> None:
    """Check that ``asked`` names a device: "auto", "cpu", "cuda" or "cuda:N". Whether it exists is not looked at.

    Raises: ConfigError.

    >>> check_device("cuda:1")
    """
    if _FORM.fullmatch(asked):
        return
    hint = "; did you mean 'cuda'?" if asked.lower().startswith(("gpu", "nvidia", "cuda")) else ""
    raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got '{asked}'{hint}")


def resolve_device(asked: str = AUTO) -> torch.device:
    """Return the device that ``asked`` means on this machine; "auto" is the first GPU that PyTorch can use, or the CPU.

    Raises: ConfigError for another form, or for a GPU that is not there, saying what is.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    check_device(asked)
    if asked == "cpu" or (asked == AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    number = int(asked.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number < count:
        return torch.device("cuda", number)
    raise ConfigError(f"device = '{asked}': {_why_missing(count)}, or set device = 'cpu' (or 'auto')")


def describe_device(device: torch.device) -> str:
    """Return what a run's card says: a GPU's name, memory and CUDA version, and how it multiplies float32 matrices.

    "highest" is IEEE float32. With "high" a GPU rounds the factors to TF32, 10 bits of fraction: faster, and ratios of
    equal policies are then no longer one to 1e-6. gnomon leaves PyTorch's default, "highest", alone: speed comes from
    bfloat16 products, whose sums are float32.

    >>> describe_device(torch.device("cpu"))
    'cpu'
    """
    if device.type != "cuda":
        return str(device)
    found = torch.cuda.get_device_properties(device)
    return (
        f"{device} ({found.name}, {found.total_memory / _GIB:.0f} GiB, CUDA {torch.version.cuda}, "
        f"float32 products: {torch.get_float32_matmul_precision()})"
    )


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory that the device has of its own; 0 for the processor, which has the machine's."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def round_up(count: int, weight: Tensor) -> int:
    """Return the number of tokens, ``count`` or a little more, that products with ``weight`` are best made of.

    oneDNN, which multiplies low-precision matrices on a processor, prepares each new shape, and a part of what it
    prepares it never gives back: a gigabyte within ten steps of ever new lengths. These are multiples of 32, above
    2,048 of a 32nd of the power of two below: up to 3% more tokens, and each further doubling adds 32 shapes and no
    more. Other products need nothing.

    >>> low = torch.zeros(2, 2, dtype=torch.bfloat16)
    >>> [round_up(count, low) for count in (1, 500, 1025, 2049)], round_up(1025, torch.zeros(2, 2))
    ([32, 512, 1056, 2112], 1025)
    """
    if weight.device.type != "cpu" or weight.dtype == torch.float32 or count < 1:
        return count
    multiple = max(_LEAST_MULTIPLE, 1 << count.bit_length() - 1 >> _SHARE_BITS)
    return -(-count // multiple) * multiple


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was told: a clock read before that tells nothing."""
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
