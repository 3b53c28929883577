"""Seed Python, NumPy and torch before each sample, in the processes that run user code."""

import random
import sys
from typing import Any


def seed_all(seed: int, purpose: str) -> None:
    """Seed the global generators of this process with ``seed``.

    Python's always; NumPy's and torch's where they are imported already, so import them at the top of a file. Then a
    sample has the same draws in whichever process, after whatever others, and again in a run that was resumed; nothing
    of them has to be kept.

    Args:
        purpose: "reward" and "environment" draw different numbers from the same seed.

    >>> seed_all(3, "reward"); first = random.random()
    >>> seed_all(3, "reward"); first == random.random()
    True
    """
    # Derived, so that the three libraries do not draw from one another's seeds.
    source = random.Random(f"{purpose} {seed}")
    own, numpys, torchs = source.getrandbits(128), source.getrandbits(32), source.getrandbits(63)
    random.seed(own)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(numpys)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(torchs)
