"""What the numbers were measured on."""

import os
import platform
from typing import Any

_TOLD = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "neon", "sve")


def describe() -> dict[str, Any]:
    """Return processor, cores, memory, instruction sets for matrices, and the versions that compute; JSON values."""
    import torch

    from gnomon.learner.precision import resolve_precision
    from gnomon.records.run_card import cpu_name, installed

    capabilities = torch.cpu.get_capabilities()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "instructions": [name for name in _TOLD if capabilities.get(name, False)],
        "precision": resolve_precision("auto"),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": installed(("gnomon", "torch", "transformers")),
    }


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
