"""gnomon's statistics against those of scipy and statsmodels (`write_oracles.py`)."""

import json
from pathlib import Path

import pytest

from gnomon.core.errors import ConfigError
from gnomon.core.statistics import (
    bootstrap_interval,
    holm,
    paired_difference,
    student_p,
    student_quantile,
    wilson_interval,
)

ORACLES = json.loads(Path(__file__).with_name("oracles.json").read_text())


def test_students_t_is_scipys():
    """For 1 to a million degrees of freedom, also where the normal distribution is 15% off (1,001 degrees, t = 5)."""
    for t, df, p in ORACLES["student_p"]:
        assert student_p(t, df) == pytest.approx(p, rel=1e-9, abs=1e-300), (t, df)
        assert student_p(-t, df) == student_p(t, df)


def test_quantiles_of_students_t_are_scipys():
    """Down to p-values of 1e-25, which are beyond t = 10,000 with few degrees of freedom."""
    for p, df, t in ORACLES["student_quantile"]:
        assert student_quantile(p, df) == pytest.approx(t, rel=1e-9), (p, df)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan")])
def test_a_quantile_of_no_p_value_is_refused(p: float):
    """A p-value of 0 is beyond every t."""
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        student_quantile(p, 5)


def test_wilsons_interval_is_statsmodels():
    """At the ends, in the middle and of many trials, at three confidences."""
    for successes, trials, confidence, low, high in ORACLES["wilson"]:
        found = wilson_interval(successes, trials, confidence)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_holms_correction_is_statsmodels():
    """Of 1 to 20 p-values."""
    for given, corrected in ORACLES["holm"]:
        assert holm(given) == pytest.approx(corrected, rel=1e-12)


def test_the_paired_tests_are_statsmodels_and_scipys():
    """McNemar's exact test of 0-or-1 scores; the sign-flip test of means, over all patterns of signs."""
    for gained, lost, p in ORACLES["mcnemar"]:
        first, second = [0] * gained + [1] * lost + [1, 0], [1] * gained + [0] * lost + [1, 0]
        assert paired_difference(first, second).p_value == pytest.approx(p, rel=1e-9)
    for row in ORACLES["sign_flip"]:
        assert paired_difference(row["first"], row["second"]).p_value == pytest.approx(row["p"], rel=1e-9)


def test_the_bootstrap_is_scipys():
    """Percentiles of resampled means: equal but for what 10,000 draws leave open, a fiftieth of the width."""
    found, (low, high) = bootstrap_interval(ORACLES["bootstrap"]["values"]), ORACLES["bootstrap"]["ends"]
    assert (found.low, found.high) == pytest.approx((low, high), abs=(high - low) / 50)
