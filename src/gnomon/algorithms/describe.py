"""Algorithms in words, for `gnomon algorithms [NAME]`."""

import textwrap
from dataclasses import fields

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.notes import NOTES
from gnomon.algorithms.presets import PRESETS

WIDTH = 100
_LABEL = 16


def summary() -> str:
    """Return a line for each preset: its name, and the paper."""
    widest = max(len(name) for name in PRESETS)
    return "\n".join(f"{name:<{widest}}  {preset.paper}" for name, preset in PRESETS.items())


def describe(algorithm: Algorithm) -> str:
    """Return composition, defaults, paper, and where a preset differs from its paper and why."""
    lines = [algorithm.name, *_wrap("paper", algorithm.paper)]
    for f in fields(algorithm):
        value = getattr(algorithm, f.name)
        is_unsaid = value is None or value == () or (isinstance(value, bool | str) and value == f.default)
        if f.name not in ("name", "paper") and not is_unsaid:
            shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            lines += _wrap(f.name, shown)
    notes = notes_on(algorithm)
    if notes:
        lines += ["", "  where it differs, and why"]
        for note in notes:
            lines += _fill(note, "  - ", "    ")
    return "\n".join(lines)


def notes_on(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the notes of the preset that has the algorithm's name; none for a user's own.

    >>> notes_on(PRESETS["dr-grpo"])[0].startswith("aggregate.length is the paper's budget of 3000 tokens.")
    True
    """
    return NOTES.get(algorithm.name, ())


def _wrap(label: str, text: str) -> list[str]:
    first = f"  {label:<{_LABEL}}"
    return _fill(text, first, " " * len(first))


def _fill(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
