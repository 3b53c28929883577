"""Seeds of shuffles: each depends on the run's seed, the step and what is shuffled, and on nothing else."""

from gnomon.engines.draws import draw_key


def shuffle_seed(seed: int, step: int, shuffled: str) -> int:
    """Return the seed of one shuffle; ``shuffled`` names it, so that no two shuffles of a step share an order.

    >>> shuffle_seed(0, 1, "minibatches") == shuffle_seed(0, 1, "minibatches") != shuffle_seed(0, 1, "values")
    True
    """
    return draw_key(seed, step, shuffled, 0) & 0x7FFF_FFFF
