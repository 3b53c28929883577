"""Which metrics stand in one picture, and what they are called there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnomon.core.svg import COLORS
from gnomon.core.tables import packaged_toml

Rows = Sequence[Mapping[str, Any]]
Z = 1.959964
"""Standard errors on each side of a mean in its 95% interval."""


@dataclass(frozen=True)
class Plot:
    """One picture: metrics by name, and what each curve is called.

    Attributes:
        note: A sentence below it.
        colors: The number of a metric's color where it has one of its own, such as that of its stage.
    """

    title: str
    y_label: str
    names: Mapping[str, str]
    note: str = ""
    colors: Mapping[str, int] = field(default_factory=dict)


STAGES = ("generate", "grade", "score", "update", "publish", "track", "other", "between steps")
"""Where time goes, in the order of their colors."""
CAUSES = (
    "trained", "degenerate", "zero_advantage", "clipped", "truncated", "off_policy", "errored", "surplus", "refused"
)  # fmt: skip
"""What became of tokens, in the order of their colors."""


def color_of(name: str, among: Sequence[str]) -> int:
    """Return the number of the color that a stage or a cause has in every picture of a page."""
    # A cause that is not listed, such as a user's, has the color after the last one.
    return (among.index(name) if name in among else len(among)) % len(COLORS)


def _plot(title: str, y_label: str, names: Mapping[str, str], note: str = "") -> Plot:
    """Return a plot; the time of a stage has the stage's color in it, and that of the step is black."""
    stages = {n: n.removeprefix("time/").removesuffix("_seconds") for n in names if n.startswith("time/")}
    colors = {n: -1 if stage == "step" else color_of(stage, STAGES) for n, stage in stages.items()}
    return Plot(title, y_label, names, note, colors)


PLOTS: Mapping[str, tuple[Plot, ...]] = {
    name: tuple(_plot(**each) for each in plots)
    for name, plots in packaged_toml("gnomon.insight", "words.toml")["plots"].items()
}
"""The plots of each part of a page."""
