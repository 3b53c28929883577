"""Draw docs/quickstart.svg and docs/recipes.svg from the recorded numbers of the runs.

python -m experiments.recipes.curves
"""

import json
from pathlib import Path
from typing import Any

from gnomon.core.svg import Series, chart, write_svg

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"


def recorded(path: Path) -> Any:
    """Return what was recorded of a run."""
    return json.loads(path.read_text(encoding="utf-8"))


def held_out(name: str, evaluations: list[dict[str, Any]]) -> Series:
    """Return the share of right held-out answers by step, with its 95% interval, as points."""
    scores = [one["answer"] for one in evaluations]
    return Series(
        name,
        [one["step"] for one in evaluations],
        [score["mean"] for score in scores],
        [score["low"] for score in scores],
        [score["high"] for score in scores],
        style="points",
    )


def pictures() -> dict[Path, str]:
    """Return each picture's file and its SVG: the run of `make train`, and the recipes' twins."""
    run = recorded(HERE / "quickstart.json")
    rewards = run["rewards"]
    steps = [
        Series("training: 64 answers a step", list(range(1, len(rewards) + 1)), rewards),
        held_out("200 held-out questions", run["evaluations"]),
    ]
    twins = [held_out(path.stem, recorded(path)["evaluations"]) for path in sorted(HERE.glob("*-smol.json"))]
    size = (640, 320)
    return {
        DOCS / "quickstart.svg": chart(steps, "make train", "step", "share of right answers", size=size),
        DOCS / "recipes.svg": chart(
            twins, "Right answers of 100 held-out questions", "step", "share of right answers", size=size
        ),
    }


if __name__ == "__main__":
    for file, picture in pictures().items():
        write_svg(file, picture)
