"""Draw the speed-ups of simulated.json as one SVG: `python draw.py FOLDER` writes figure.svg into it."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 300, 200, 52, 40
COLORS = {
    "groups that wait for themselves": "#b08800",
    "group-free": "#0060c0",
    "group-free, the slow dropped": "#c03020",
    "group-synchronous, as many at once": "#808080",
}
CLAIM = 4.35


@dataclass(frozen=True)
class Panel:
    """One diagram: x values and a line a contender, both axes logarithmic. label: of the x axis."""

    title: str
    label: str
    xs: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    highest: float

    def draw(self, column: int) -> list[str]:
        """Return its SVG elements, in this column of the figure."""
        shift = f'<g transform="translate({LEFT + column * (WIDTH + 2 * LEFT)},{TOP})">'
        frame = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
        title = f'<text x="{WIDTH / 2}" y="-12" text-anchor="middle" font-weight="bold">{self.title}</text>'
        below = f'<text x="{WIDTH / 2}" y="{HEIGHT + 34}" text-anchor="middle">{self.label}</text>'
        claim = self._y(CLAIM)
        dashed = f'<path d="M0 {claim:.1f}H{WIDTH}" stroke="#333" stroke-dasharray="4 3"/>'
        said = f'<text x="4" y="{claim - 4:.1f}" fill="#333">{CLAIM}</text>'
        lines = [self._line(name, values) for name, values in self.lines.items()]
        return [shift, frame, title, below, dashed, said, *self._ticks(), *lines, "</g>"]

    def _ticks(self) -> list[str]:
        marks = [f'<text x="{self._x(x):.1f}" y="{HEIGHT + 16}" text-anchor="middle">{x:g}</text>' for x in self.xs]
        heights = [2.0**power for power in range(math.floor(math.log2(self.highest)) + 1)]
        marks += [f'<text x="-6" y="{self._y(y) + 4:.1f}" text-anchor="end">{y:g}</text>' for y in heights]
        return marks + [f'<path d="M0 {self._y(y):.1f}H{WIDTH}" stroke="#eee"/>' for y in heights]

    def _line(self, name: str, values: Sequence[float]) -> str:
        points = [f"{self._x(x):.1f} {self._y(y):.1f}" for x, y in zip(self.xs, values, strict=True)]
        return f'<path d="M{"L".join(points)}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>'

    def _x(self, x: float) -> float:
        low, high = math.log(self.xs[0]), math.log(self.xs[-1])
        return (math.log(x) - low) / (high - low) * (WIDTH - 30) + 15

    def _y(self, y: float) -> float:
        return HEIGHT * (1 - (math.log2(max(y, 1.0)) + 0.1) / (math.log2(self.highest) + 0.2))


def panel(title: str, label: str, table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Panel:
    """Return the diagram of one axis of the results."""
    lines = {name: [found[name]["speed_up"] for found in table.values()] for name in COLORS}
    return Panel(title, label, [float(x) for x in table], lines, 64.0)


def figure(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """Return the whole figure."""
    panels = [
        panel("the tail", "sigma of log seconds", results["tail"]),
        panel("the group size", "rollouts of a prompt", results["group_size"]),
        panel("the pool", "batches on their way", results["pool"]),
    ]
    wide, high = len(panels) * (WIDTH + 2 * LEFT), HEIGHT + TOP + 90
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="11">'
    )
    drawn = [element for column, one in enumerate(panels) for element in one.draw(column)]
    legend = [
        f'<text x="{LEFT + n * 260}" y="{high - 14}" fill="{color}" font-weight="bold">{name}</text>'
        for n, (name, color) in enumerate(COLORS.items())
    ]
    what = f'<text x="{LEFT}" y="14">trained rollouts a second, in multiples of group-synchronous batches</text>'
    return "\n".join([head, f'<rect width="{wide}" height="{high}" fill="#fff"/>', what, *drawn, *legend, "</svg>"])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "figure.svg").write_text(figure(json.loads((folder / "simulated.json").read_text())) + "\n")
