"""Random bits that depend on a seed, a purpose and a number, and on nothing else."""

import hashlib

import numpy as np


def philox(seed: int, purpose: str, number: int) -> np.random.Philox:
    """Return the bits for the ``number``-th choice made for ``purpose``.

    Counter-based (Philox 4x64, keyed by a hash of the three), so resuming needs the number alone. Read it
    with ``random_raw``: NumPy guarantees the bits of its generators from version to version, but not what
    `Generator.permutation` or `Generator.choice` make of them.

    >>> int(philox(0, "a", 1).random_raw()) == int(philox(0, "a", 1).random_raw())
    True
    >>> int(philox(0, "a", 1).random_raw()) == int(philox(0, "a", 2).random_raw())
    False
    """
    text = f"{seed}\x1f{purpose}\x1f{number}"
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))
