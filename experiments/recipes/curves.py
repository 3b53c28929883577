"""Draw docs/recipes.svg from the recorded numbers of the recipes' twins.

python -m experiments.recipes.curves
"""

import json
from pathlib import Path

from gnomon.core.svg import Series, chart, write_svg

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "recipes.svg"


def picture() -> str:
    """Return the share of right held-out answers by step of each twin, with its 95% interval, as SVG."""
    series = []
    for path in sorted(HERE.glob("*-smol.json")):
        told = json.loads(path.read_text(encoding="utf-8"))["evaluations"]
        scores = [one["answer"] for one in told]
        series.append(
            Series(
                path.stem,
                [one["step"] for one in told],
                [score["mean"] for score in scores],
                [score["low"] for score in scores],
                [score["high"] for score in scores],
                style="points",
            )
        )
    return chart(series, "Right answers of 100 held-out questions", "step", "share of right answers", size=(640, 320))


if __name__ == "__main__":
    write_svg(PICTURE, picture())
