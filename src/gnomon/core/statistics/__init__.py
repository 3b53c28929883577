"""What may be concluded from samples: rates, intervals, and differences with the chance that they are noise.

Held-out accuracy is a mean over *prompts* of a mean over samples. Prompts are what differs between two draws of a
test set, so every interval and every test here is over prompts, never over single samples.
"""

from gnomon.core.statistics.differences import FEWEST as FEWEST
from gnomon.core.statistics.differences import POWER as POWER
from gnomon.core.statistics.differences import SIGNIFICANCE as SIGNIFICANCE
from gnomon.core.statistics.differences import Difference as Difference
from gnomon.core.statistics.differences import holm as holm
from gnomon.core.statistics.differences import in_words as in_words
from gnomon.core.statistics.differences import paired_difference as paired_difference
from gnomon.core.statistics.differences import prompts_needed as prompts_needed
from gnomon.core.statistics.intervals import RESAMPLES as RESAMPLES
from gnomon.core.statistics.intervals import Interval as Interval
from gnomon.core.statistics.intervals import bootstrap_interval as bootstrap_interval
from gnomon.core.statistics.intervals import macro_interval as macro_interval
from gnomon.core.statistics.intervals import mean_interval as mean_interval
from gnomon.core.statistics.intervals import score_interval as score_interval
from gnomon.core.statistics.intervals import student_p as student_p
from gnomon.core.statistics.intervals import student_quantile as student_quantile
from gnomon.core.statistics.intervals import wilson_interval as wilson_interval
from gnomon.core.statistics.rates import avg_at_k as avg_at_k
from gnomon.core.statistics.rates import degenerate_probability as degenerate_probability
from gnomon.core.statistics.rates import draws_until_mixed as draws_until_mixed
from gnomon.core.statistics.rates import maj_at_k as maj_at_k
from gnomon.core.statistics.rates import pass_at_k as pass_at_k
