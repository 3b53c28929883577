"""A dissected batch as text: numbers, advantages, trust letters and gradients of several algorithms side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from gnomon.analysis.dissect.dissect import Dissection, cosines
from gnomon.records.batches import RecordedBatch

WIDTH = 100
SIDE_BY_SIDE = 5
STRIP = 60
LEGEND = " . as its ratio says   x no push (clipped, masked)   - less   + more   0 advantage 0   _ untrained"
_ROWS: Mapping[str, str] = {
    "gradient_norm": "gradient norm",
    "zero_gradient_token_fraction": "tokens without gradient",
    "clipped_fraction": "clipped, bound wins",
    "out_of_band_fraction": "outside the band",
    "capped_fraction": "weight capped",
    "mismatch/truncated_fraction": "correction capped",
    "mismatch/masked_fraction": "correction masked",
    "ess_fraction": "ESS, current/behavior",
    "ratio_max": "largest ratio",
}

Found = Mapping[str, Dissection]


def show(recorded: RecordedBatch, found: Found, source: str, rows: int, console: Console) -> None:
    """Print all tables, with at most ``rows`` sequences and tokens each; ``source`` names the batch."""
    console.print(Text(_head(recorded, source)))
    # More algorithms than columns fit side by side come in blocks below each other.
    blocks = [dict(list(found.items())[at : at + SIDE_BY_SIDE]) for at in range(0, len(found), SIDE_BY_SIDE)]
    for block in blocks:
        console.print(Group(*_tables(recorded, block, rows)))
    if len(found) > 1:
        for block in blocks:
            console.print(_title("cosine between gradients"), _cosines(found, list(block)), sep="\n")
    estimating = [name for name, d in found.items() if d.estimates_entropy]
    if estimating:
        names = ", ".join(_plain(name, WIDTH) for name in estimating)
        console.print(Text(f"\nEntropy is estimated from the sampled tokens, as -log current, for {names}."))
    if any(not math.isfinite(d.loss) for d in found.values()):
        console.print("A loss that is no number: ratios overflow, and a run would skip this step.")


def _tables(recorded: RecordedBatch, block: Found, rows: int) -> Iterator[RenderableType]:
    shown = min(rows, len(recorded.batch))
    yield from (_title("one step"), _numbers(block))
    yield from (_title("advantages, first to last trained token"), _advantages(recorded, block, shown))
    yield from _rest(len(recorded.batch) - shown, "sequences")
    yield from (_title("trust, a letter a token"), Text(LEGEND), *_trust(recorded, block, shown))
    yield from (_title("gradient, d loss / d log-probability, times 1000"), _gradients(recorded, block, rows))
    yield from _rest(int(recorded.batch.mask.sum()) - rows, "tokens, with smaller gradients")


def _head(recorded: RecordedBatch, source: str) -> str:
    batch = recorded.batch
    positions = int((batch.lengths - batch.prompt_lengths).sum())
    parts = [
        f"{len(batch)} sequences of {len(set(recorded.prompt_ids))} prompts",
        f"{int(batch.mask.sum())} trained tokens of {positions}",
        f"{int(batch.is_truncated.sum())} truncated",
        f"mean reward {float(batch.rewards.mean()):.4g}",
        f"temperature {batch.temperature:g}",
    ]
    if batch.rollout_id is not None:
        parts.insert(1, f"{len(batch.rollout_id.unique())} rollouts")
    if batch.component_rewards is not None:
        means = zip(batch.components, batch.component_weights, batch.component_rewards.mean(0).tolist(), strict=True)
        parts += [f"mean {_plain(name, 24)} {mean:.4g} (weight {weight:g})" for name, weight, mean in means]
    return f"{_plain(source, WIDTH)}\n{', '.join(parts)}"


def _title(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def _table(first: Sequence[str], names: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for heading in first:
        table.add_column(heading, no_wrap=True, max_width=24)
    for name in names:
        table.add_column(Text(_label(name)), justify="right", overflow="fold")
    return table


def _numbers(block: Found) -> Table:
    table = _table([""], list(block))
    table.add_row("loss", *(_short(d.loss) for d in block.values()))
    table.add_row("policy loss", *(_short(d.policy_loss) for d in block.values()))
    if any(d.value_loss is not None for d in block.values()):
        table.add_row("value loss, apart", *("-" if d.value_loss is None else _short(d.value_loss)
                                             for d in block.values()))  # fmt: skip
    for key, label in _ROWS.items():
        if any(key in d.statistics for d in block.values()):
            table.add_row(label, *(_short(d.statistics[key]) if key in d.statistics else "-" for d in block.values()))
    return table


def _advantages(recorded: RecordedBatch, block: Found, shown: int) -> Table:
    table = _table(["seq", "prompt", "reward", "tokens"], list(block))
    batch = recorded.batch
    for row in range(shown):
        mask = batch.mask[row]
        cells = [_ends(d.advantages[row][mask]) for d in block.values()]
        # Ids of one task set share their beginning.
        label = Text(_plain(recorded.prompt_ids[row][-16:], 16))
        table.add_row(str(row), label, f"{float(batch.rewards[row]):.4g}", str(int(mask.sum())), *cells)
    return table


def _trust(recorded: RecordedBatch, block: Found, shown: int) -> Iterator[RenderableType]:
    table = _table(["seq", "algorithm"], [])
    table.add_column("tokens", no_wrap=True)
    eventful = 0
    for row in range(shown):
        length = int(recorded.batch.lengths[row] - recorded.batch.prompt_lengths[row])
        for name, d in block.items():
            letters = d.trust[row][:length]
            # Rows in which no bound acted would be a wall of dots.
            if set(letters) & set("x-+"):
                strip = letters[:STRIP].replace(" ", "_") + (f" and {length - STRIP} more" if length > STRIP else "")
                table.add_row(str(row), Text(_label(name)), Text(strip))
                eventful += 1
    if eventful:
        yield table
    where = "The other rows'" if eventful else "All"
    yield Text(f" {where} tokens are pushed as their ratios say, or their advantage is 0.")


def _gradients(recorded: RecordedBatch, block: Found, rows: int) -> Table:
    batch = recorded.batch
    places = batch.mask.nonzero()
    chosen = _telling(batch.mask, [d.gradient for d in block.values()], rows)
    table = _table(["seq:pos", "current", "/behavior"], list(block))
    for at in chosen:
        row, position = places[at].tolist()
        log_ratio = float(recorded.current[row, position] - batch.behavior[row, position])
        # exp overflows in Python at 709.8, where torch would return inf.
        ratio = math.exp(log_ratio) if log_ratio < 700 else math.inf
        cells = [f"{_short(1000 * float(d.gradient[row, position]))} {d.trust[row][position]}" for d in block.values()]
        table.add_row(f"{row}:{position}", _short(float(recorded.current[row, position])), _short(ratio), *cells)
    return table


def _telling(mask: Tensor, gradients: Sequence[Tensor], count: int) -> list[int]:
    """Return the trained tokens with the largest gradients under any algorithm, as indices in row order."""
    flat = [gradient[mask].abs() for gradient in gradients]
    # Each algorithm's gradients relative to its own largest, or
    # the one with the largest loss weights would choose all rows.
    largest = torch.stack([g / g.max() if len(g) and float(g.max()) > 0 else g for g in flat]).amax(0)
    return sorted(largest.argsort(descending=True, stable=True)[:count].tolist())


def _cosines(found: Found, columns: Sequence[str]) -> Table:
    table = _table([""], columns)
    for name, row in cosines(found).items():
        table.add_row(Text(_label(name)), *("-" if math.isnan(row[c]) else f"{row[c]:.4f}" for c in columns))
    return table


def _rest(count: int, what: str) -> Iterator[RenderableType]:
    if count > 0:
        yield Text(f" ... and {count} more {what}: --rows N, or all with --json")


def _label(name: str) -> str:
    """Return the column's heading: a preset's name, or NAME of path.py:NAME."""
    return _plain(name.rpartition(":")[2], 24)


def _ends(values: Tensor) -> str:
    if len(values) == 0:
        return "-"
    first, last = _short(float(values[0])), _short(float(values[-1]))
    return first if bool((values == values[0]).all()) else f"{first} to {last}"


def _short(value: float) -> str:
    """Format four digits; exactly 0 is "0", which distinguishes it from a tiny number."""
    return "0" if value == 0 else f"{value:.4g}" if math.isfinite(value) else "no number"


def _plain(text: str, most: int) -> str:
    """Return text without control characters, cut to ``most`` characters."""
    visible = "".join(c if c.isprintable() else "?" for c in text)
    return visible if len(visible) <= most else visible[: most - 3] + "..."
