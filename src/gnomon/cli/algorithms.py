"""gnomon algorithms [NAME [key=value ...]]: what there is, and what an algorithm or a piece stands for."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gnomon.cli.arguments import parser_of
from gnomon.config.reading import check_named_algorithm, parse_override

if TYPE_CHECKING:
    from gnomon.algorithms.build import Resolution


def run(arguments: Sequence[str]) -> int:
    """Print the presets and pieces, or describe one; return the exit code."""
    parser = parser_of("algorithms", __doc__)
    given = parser.parse_intermixed_args(arguments)
    if given.name is not None:
        check_named_algorithm(given.name)
    if given.latex:
        if given.name is None or given.json:
            parser.error("--latex prints the formula of one algorithm: give its name, and leave --json out")
        print(_latex(given.name, given.overrides))
        return 0
    rows, text = _everything() if given.name is None else _one(given.name, given.overrides)
    print(json.dumps(rows, indent=2) if given.json else text)
    return 0


def composed(name: str, overrides: Sequence[str]) -> "Resolution":
    """Return the algorithm of that name with settings key=value, whose keys may begin with "algorithm."."""
    from gnomon.algorithms import resolve_with_notes

    changes = {path.removeprefix("algorithm."): value for path, value in map(parse_override, overrides)}
    return resolve_with_notes({"preset": name, **changes})


def _latex(name: str, overrides: Sequence[str]) -> str:
    """Return the formulas of an algorithm as the lines of an aligned equation."""
    from gnomon.algorithms.formulas import formula

    lines = [text.replace(" = ", " &= ", 1) for text in formula(composed(name, overrides).algorithm).values()]
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def _everything() -> tuple[dict[str, Any], str]:
    """Return all presets as JSON, and presets and pieces as text."""
    from gnomon.algorithms import NAMED
    from gnomon.algorithms.describe import as_row, pieces_summary, summary

    heading = "The pieces, by the part of an algorithm that they may be; `gnomon algorithms PIECE` says what one does."
    rows = {name: as_row(algorithm) for name, algorithm in NAMED.items()}
    return rows, f"{summary()}\n\n{heading}\n\n{pieces_summary()}"


def _one(name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return one algorithm or piece as JSON and as text."""
    from gnomon.algorithms import describe
    from gnomon.algorithms.describe import as_row, find_piece, piece_text

    piece = None if overrides else find_piece(name)
    if piece is not None:
        said = piece_text(piece)
        return {said.name: asdict(said)}, str(said)
    resolution = composed(name, overrides)
    understood = [f"Understood: {note}." for note in resolution.notes]
    return {name: as_row(resolution.algorithm)}, "\n".join([*understood, describe(resolution.algorithm)])
