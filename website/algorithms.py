"""docs/algorithms.md and its picture, written by `python -m website.algorithms`: what each preset is, by its pieces."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from html import escape
from pathlib import Path

from website.pages import ROOT, table

from gnomon.algorithms import NAMED, Algorithm
from gnomon.algorithms.describe import NOTES, USES
from gnomon.algorithms.formulas import formula

PAGE, PICTURE = ROOT / "docs" / "algorithms.md", ROOT / "docs" / "algorithms.svg"
OPENING = """# Algorithms

Written by `python -m website.algorithms` from the presets themselves; a test compares. `gnomon algorithms NAME` \
prints a preset or a piece, with `PLACE=PIECE` behind it what it becomes with another piece, and with `--latex` the \
formula; `algorithm.PLACE=PIECE` trains that, and a piece may be your own ([Pieces of your own](pieces.md)). \
Formulas: $R$ is a response's reward, $x$ what a token earned, $V$ a critic's value and $v$ a tracked one; a bar is a \
mean and $s$ a deviation over the group $G$, the batch $B$ or one state $S$; $|o|$ counts trained tokens, $m$ is the \
ratio of proximal to behavior, $e$ an effective sample size.

## How they relate

![Each preset beneath the one that differs from it in the fewest pieces](algorithms.svg)

From GRPO on, each preset stands beneath the one with which it shares most pieces, followed by the pieces in which it \
differs from it. This is a likeness of formulas, not who invented what from whom.
"""
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
CLAIM = re.compile(r"\| \[(.+?)\]\(\.\./experiments/(\w+)/README\.md\) \(`\w+`\) \| ([a-z ]+) \|")

COSTS = """The cost is the seconds of scoring and one update as a multiple of GRPO's on the same made answers, in \
turns in one process ([growth table](../benchmarks/results/{name}); `python -m benchmarks growth --only algorithms`): \
passes of a critic or of another policy cost, formulas do not, and rows without anything to learn save. \
GRPO beside itself says what is noise, a tenth. Generation is in none."""
COST = re.compile(r"\| ([\w-]+) \| x grpo \| ([\d.]+) \| ([\d. to]+) \|")


def parts(algorithm: Algorithm) -> dict[str, object]:
    """Return what an algorithm is made of: its fields without name and paper, as far as they say something."""
    said = {f.name: (getattr(algorithm, f.name), f.default) for f in fields(algorithm)}
    return {
        name: value
        for name, (value, default) in said.items()
        if name not in ("name", "paper") and value not in (None, ()) and (value != default or name == "num_generations")
    }


def difference(one: Algorithm, other: Algorithm) -> list[str]:
    """Return the fields in which two algorithms differ, in the order of an algorithm's fields."""
    mine, theirs = parts(one), parts(other)
    return [f.name for f in fields(one) if mine.get(f.name) != theirs.get(f.name)]


def kinship(one: Algorithm, other: Algorithm) -> float:
    """Return how much two algorithms differ: 1 for another piece, a half for other settings of it, less for counts."""
    mine, theirs, total = parts(one), parts(other), 0.0
    for name in difference(one, other):
        same_kind = type(mine.get(name)) is type(theirs.get(name))
        total += 0.2 if name in ("num_generations", "updates") else 0.5 if same_kind else 1.0
    return total


def family() -> dict[str, str | None]:
    """Return each preset's parent: a minimum spanning tree by `kinship` from GRPO, the earlier preset on a tie."""
    names = list(NAMED)
    parent: dict[str, str | None] = {"grpo": None}
    while len(parent) < len(names):
        near = [
            (kinship(NAMED[new], NAMED[old]), names.index(old), names.index(new)) for old in parent for new in names
            if new not in parent
        ]  # fmt: skip
        _, old, new = min(near)
        parent[names[new]] = names[old]
    return parent


def claims() -> dict[str, list[str]]:
    """Return links to the claims whose arms train a preset, with their verdicts, by the preset's name."""
    found: dict[str, list[str]] = {name: [] for name in NAMED}
    shared = (ROOT / "experiments" / "claims" / "critic_arms.py").read_text(encoding="utf-8")
    for title, folder, verdict in CLAIM.findall((ROOT / "docs" / "claims.md").read_text(encoding="utf-8")):
        text = (ROOT / "experiments" / folder / "claim.py").read_text(encoding="utf-8")
        text += shared if "claims.critic_arms import" in text else ""
        for name in set(re.findall(r"algorithm=([\w-]+)", text)) & found.keys():
            found[name].append(f"[{title}](../experiments/{folder}/README.md) ({verdict})")
    return found


def costs() -> dict[str, tuple[str, str]]:
    """Return what an update cost against GRPO's on the same rows, and its spread, as the newest growth table has it."""
    rows = COST.findall(_growth_table().read_text(encoding="utf-8"))
    return {name: (median, spread) for name, median, spread in rows}


def _growth_table() -> Path:
    return max((ROOT / "benchmarks" / "results").glob("*-growth-*.md"), key=lambda path: path.stem[-10:])


def section(name: str, parent: str | None, tested: list[str], cost: tuple[str, str]) -> Iterator[str]:
    """Yield the paragraphs of a preset."""
    preset = NAMED[name]
    yield f"## {name}"
    yield ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", preset.paper) + "."
    yield f"**When.** {USES[name]}"
    if parent is not None:
        changed = ", ".join(f"`{part}`" for part in difference(preset, NAMED[parent]))
        yield f"**Of its pieces** {changed} are others than in [{parent}](#{parent})."
    yield table(["part", "what it is"], ([part, f"`{value!r}`"] for part, value in parts(preset).items()))
    yield "\n".join(f"- {label}: ${text}$" for label, text in formula(preset).items())
    if NOTES[name]:
        yield "**Where it differs, and why.**"
        yield "\n".join(f"- {note}" for note in NOTES[name])
    yield "**Tested by** " + (", ".join(tested) + "." if tested else "no claim of [experiments](claims.md).")
    yield f"**Cost.** {cost[0]} times GRPO's update on the same rows ({cost[1]})."


def page() -> str:
    """Return docs/algorithms.md."""
    parent, tested, cost = family(), claims(), costs()
    listed = table(["preset", "when", "cost"], ([f"[{name}](#{name})", USES[name], cost[name][0]] for name in NAMED))
    measured = COSTS.format(name=_growth_table().name)
    sections = (text for name in NAMED for text in section(name, parent[name], tested[name], cost[name]))
    return "\n\n".join([OPENING.rstrip(), measured, listed, *sections]) + "\n"


def picture() -> str:
    """Return docs/algorithms.svg: the family as an indented tree, each preset with the pieces that are its own."""
    parent = family()
    children: Mapping[str | None, list[str]] = {
        one: [name for name in NAMED if parent[name] == one] for one in (None, *NAMED)
    }
    rows: list[tuple[str, int]] = []

    def walk(name: str, depth: int) -> None:
        rows.append((name, depth))
        for child in children[name]:
            walk(child, depth + 1)

    walk(children[None][0], 0)
    place = {name: (16 + 28 * depth, 24 + 20 * row) for row, (name, depth) in enumerate(rows)}
    drawn = []
    for name, (x, y) in place.items():
        above = parent[name]
        own = "" if above is None else ", ".join(difference(NAMED[name], NAMED[above]))
        if above is not None:
            left, top = place[above]
            drawn.append(f'<path d="M{left + 6} {top + 6}V{y - 4}H{x - 4}"/>')
        drawn.append(f'<text x="{x}" y="{y}">{escape(name)}<tspan class="own" dx="10">{escape(own)}</tspan></text>')
    style = (
        "text{font:13px system-ui,sans-serif;fill:#24292f}.own{font-size:11px;fill:#6e7781}"
        "path{fill:none;stroke:#8c959f}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.own{fill:#9198a1}}"
    )
    title = "Each preset beneath the one that differs from it in the fewest pieces"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {34 + 20 * len(rows)}" role="img" '
        f'aria-label="{title}">\n<title>{title}</title>\n<style>{style}</style>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
