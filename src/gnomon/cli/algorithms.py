"""``gnomon algorithms [NAME]``: what there is, and what the name of an algorithm or of a piece stands for."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the verb."""
    parser = argparse.ArgumentParser(prog="gnomon algorithms", description=__doc__)
    parser.add_argument("name", nargs="?", help="a preset, path.py:NAME of your own, or a piece such as Truncated")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the presets and pieces, or describe one; return the exit code."""
    given = build_parser().parse_args(arguments)

    rows, text = _everything() if given.name is None else _one(given.name)
    print(json.dumps(rows, indent=2) if given.json else text)
    return 0


def _everything() -> tuple[dict[str, Any], str]:
    """Return all presets as JSON, and presets and pieces as text."""
    from gnomon.algorithms import PRESETS
    from gnomon.algorithms.describe import as_row, pieces_summary, summary

    heading = "The pieces, by the part of an algorithm that they may be; `gnomon algorithms PIECE` says what one does."
    rows = {name: as_row(algorithm) for name, algorithm in PRESETS.items()}
    return rows, f"{summary()}\n\n{heading}\n\n{pieces_summary()}"


def _one(name: str) -> tuple[dict[str, Any], str]:
    """Return one algorithm or piece as JSON and as text."""
    from gnomon.algorithms import describe, resolve_with_notes
    from gnomon.algorithms.describe import as_row, find_piece, piece_text

    piece = find_piece(name)
    if piece is not None:
        said = piece_text(piece)
        return {said.name: asdict(said)}, str(said)
    resolution = resolve_with_notes(name)
    understood = [f"Understood: {note}." for note in resolution.notes]
    return {name: as_row(resolution.algorithm)}, "\n".join([*understood, describe(resolution.algorithm)])
