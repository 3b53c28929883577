"""What may be concluded from samples: rates, intervals, and differences with the chance that they are noise.

Held-out accuracy is a mean over *prompts* of a mean over samples. Prompts are what differs between two draws of a
test set, so every interval and every test here is over prompts, never over single samples.
"""

from gnomon.core.statistics.differences import (
    FEWEST,
    POWER,
    SIGNIFICANCE,
    Difference,
    holm,
    in_words,
    paired_difference,
    prompts_needed,
)
from gnomon.core.statistics.intervals import (
    RESAMPLES,
    Interval,
    bootstrap_interval,
    mean_interval,
    score_interval,
    wilson_interval,
)
from gnomon.core.statistics.rates import avg_at_k, degenerate_probability, draws_until_mixed, maj_at_k, pass_at_k

__all__ = [
    "FEWEST",
    "POWER",
    "RESAMPLES",
    "SIGNIFICANCE",
    "Difference",
    "Interval",
    "avg_at_k",
    "bootstrap_interval",
    "degenerate_probability",
    "draws_until_mixed",
    "holm",
    "in_words",
    "maj_at_k",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "prompts_needed",
    "score_interval",
    "wilson_interval",
]
