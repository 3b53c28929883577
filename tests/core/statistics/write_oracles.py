"""Write oracles.json: what scipy and statsmodels say, for the tests of gnomon's own statistics.

Neither is a dependency: in an environment that has both, `python tests/core/statistics/write_oracles.py`.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest

scipy, statsmodels = pytest.importorskip("scipy"), pytest.importorskip("statsmodels")

from scipy import stats  # noqa: E402
from statsmodels.stats.contingency_tables import mcnemar  # noqa: E402
from statsmodels.stats.multitest import multipletests  # noqa: E402
from statsmodels.stats.proportion import proportion_confint  # noqa: E402

DEGREES = (1, 1.7, 2, 4, 9.5, 30, 150, 999, 1000, 1001, 5000, 1e5, 1e6)


def _paired(random_of: random.Random) -> dict[str, object]:
    """Two lists of means of four 0-or-1 samples, and the exact two-sided sign-flip p-value of their differences."""
    first, second = ([random_of.randint(0, 4) / 4 for _ in range(9)] for _ in range(2))
    found = stats.permutation_test(
        (np.array(second) - np.array(first),),
        lambda gains, axis: abs(np.mean(gains, axis=axis)),
        permutation_type="samples",
        n_resamples=np.inf,
        alternative="greater",
    )
    return {"first": first, "second": second, "p": float(found.pvalue)}


def _welch(random_of: random.Random, counts: tuple[int, int]) -> list[object]:
    first, second = ([round(random_of.gauss(0.3, 0.1), 4) for _ in range(n)] for n in counts)
    found = stats.ttest_ind(second, first, equal_var=False)
    interval = found.confidence_interval()
    return [first, second, float(found.pvalue), float(interval.low), float(interval.high)]


def main() -> None:
    """Write the file."""
    seeded = random.Random(33)
    shares = [(0, 10), (1, 10), (5, 10), (10, 10), (3, 7), (999, 1000), (20000, 40000)]
    values = [round(seeded.betavariate(2, 3), 3) for _ in range(40)]
    lists = [[round(10 ** seeded.uniform(-6, 0), 9) for _ in range(n)] for n in (1, 2, 5, 20)]
    tables = [(1, 0), (6, 0), (7, 3), (40, 25), (300, 250)]
    oracles = {
        "versions": {"scipy": scipy.__version__, "statsmodels": statsmodels.__version__},
        "student_p": [[t, df, float(2 * stats.t.sf(t, df))] for df in DEGREES for t in (0.01, 0.8, 1.96, 5, 9, 40)],
        "student_quantile": [
            [p, df, float(stats.t.isf(p / 2, df))] for df in DEGREES for p in (0.9, 0.05, 1e-3, 1e-8, 1e-25)
        ],
        "wilson": [
            [k, n, c, *map(float, proportion_confint(k, n, 1 - c, method="wilson"))]
            for k, n in shares
            for c in (0.5, 0.95, 0.9999)
        ],
        "holm": [[ps, [float(p) for p in multipletests(ps, method="holm")[1]]] for ps in lists],
        "mcnemar": [[b, c, float(mcnemar([[0, b], [c, 0]], exact=True).pvalue)] for b, c in tables],
        "sign_flip": [_paired(seeded) for _ in range(6)],
        "welch": [_welch(seeded, counts) for counts in ((2, 2), (3, 5), (10, 4))],
        "bootstrap": {
            "values": values,
            "ends": [
                float(end)
                for end in stats.bootstrap(
                    (np.array(values),), np.mean, n_resamples=200_000, method="percentile", rng=1
                ).confidence_interval
            ],
        },
    }
    Path(__file__).with_name("oracles.json").write_text(json.dumps(oracles) + "\n")


if __name__ == "__main__":
    main()
