"""Counter-based random numbers: a function of seed, step, task, sample and turn alone."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def sample_key(seed: int, step: int, task_id: str, sample: int, turn: int = 0) -> int:
    """Return the 128-bit key of one answer's draws.

    Order, batching, retries and the number of workers never change it, so a resumed run samples what the
    uninterrupted one would have. Ours: no peer saves or needs an engine's generator.

    >>> sample_key(0, 1, "a", 0) == sample_key(0, 1, "a", 0) != sample_key(0, 1, "a", 1)
    True
    """
    # A control character between the parts, so that "1" and "23" is another text than "12" and "3".
    text = f"{seed}\x1f{step}\x1f{task_id}\x1f{sample}\x1f{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


def uniforms(key: int, count: int) -> NDArray[np.float64]:
    """Return ``count`` uniforms in [0, 1): position t of the answer uses the t-th (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(key=key)).random(count)
