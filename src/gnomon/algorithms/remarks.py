"""Compositions that are legal and yet rarely meant: a sentence for each, to be read before training."""

from collections.abc import Iterator

from gnomon.algorithms.composition import Composition
from gnomon.algorithms.plans import Prioritized, TrackerPlan
from gnomon.algorithms.regularizers import Entropy, Kl
from gnomon.algorithms.surrogates import Score
from gnomon.algorithms.trust import Unbounded
from gnomon.algorithms.validate import uses_tracker


def remarks(algorithm: Composition) -> tuple[str, ...]:
    """Return what is unusual about a composition, a sentence each that ends with what to set; mostly nothing.

    Unlike what `validate` refuses, each of these can be meant.

    >>> from gnomon.algorithms import OPO, Updates
    >>> from dataclasses import replace
    >>> remarks(OPO), len(remarks(replace(OPO, updates=Updates(minibatches=4))))
    ((), 1)
    """
    return (*_bounds(algorithm), *_idle(algorithm))


def _bounds(algorithm: Composition) -> Iterator[str]:
    surrogate, updates = algorithm.surrogate, algorithm.updates
    if isinstance(surrogate, Score) and isinstance(surrogate.trust, Unbounded) and updates.total > 1:
        yield (
            f"Score(Unbounded) believes every ratio, and {updates.total} updates a step let the policy move away from "
            "the one that answered with nothing to stop it; set algorithm.updates = {epochs = 1, minibatches = 1}, or "
            'algorithm.surrogate.trust = "Cap".'
        )
    if algorithm.scope == "micro_batch":
        yield (
            'With algorithm.scope = "micro_batch" the loss depends on how the machine cuts a step '
            "(learner.max_tokens_per_micro_batch), so runs on different machines are different runs; set "
            'algorithm.scope = "step" for a loss that does not.'
        )


def _idle(algorithm: Composition) -> Iterator[str]:
    is_asked = isinstance(algorithm.sampler, Prioritized) or uses_tracker(algorithm)
    if isinstance(algorithm.tracker, TrackerPlan) and not is_asked:
        yield (
            "The tracker keeps a success rate of every prompt, and neither the baseline nor the sampler reads it; set "
            'algorithm.sampler = "Prioritized", or algorithm.tracker = "none".'
        )
    for regularizer in algorithm.regularizers:
        if isinstance(regularizer, Kl | Entropy) and regularizer.coefficient == 0:
            yield (
                f"The coefficient of {regularizer.name} is 0, so it has no part in the loss; leave it out of "
                "algorithm.regularizers, or give it a coefficient."
            )
