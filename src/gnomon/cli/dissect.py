"""gnomon dissect BATCH --algorithms a,b,c [key=value ...]: what each makes of one recorded batch, side by side."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.cli.algorithms import composed
from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.config.reading import check_algorithm
from gnomon.core.errors import ConfigError, no_file
from gnomon.core.progress import show_progress, track

if TYPE_CHECKING:
    from gnomon.algorithms import Algorithm


def run(arguments: Sequence[str]) -> int:
    """Dissect a batch, or verify the presets; return the exit code, 1 if a preset is wrong."""
    parser = parser_of("dissect", __doc__)
    given = parser.parse_intermixed_args(arguments)
    if given.verify:
        if given.batch or given.overrides:
            parser.error("--verify draws its own batches and checks algorithms as they are: give it neither")
        return _verify(given.algorithms, given.json)
    if not given.batch or not given.algorithms:
        parser.error("give a recorded batch and --algorithms a,b,c (`gnomon algorithms` lists them), or --verify")
    if given.rows < 1:
        parser.error(f"--rows should be at least 1, got {given.rows}")
    return _dissect(given.batch, given.algorithms, given.overrides, given.rows, given.json)


def _dissect(batch: str, names: str, overrides: Sequence[str], rows: int, as_json: bool) -> int:
    from rich.console import Console

    for name in filter(None, map(str.strip, names.split(","))):
        check_algorithm(name)
    if not os.path.exists(batch):
        raise ConfigError(no_file(Path(batch), (".json",)))
    with loading_libraries():
        from gnomon.analysis.dissect.dissect import as_row, decompose
        from gnomon.analysis.dissect.tables import WIDTH, show
        from gnomon.records.batches import read_batch

    algorithms, notes = _algorithms(names, overrides)
    with show_progress(f"reading {batch}"):
        recorded = read_batch(Path(batch))
    each = track(algorithms.items(), "taking it apart", len(algorithms))
    found = {name: decompose(algorithm, recorded.batch, recorded.current) for name, algorithm in each}
    if as_json:
        print(json.dumps(as_row(recorded, found), allow_nan=False))
        return 0
    for note in notes:
        print(f"note: {note}")
    show(recorded, found, batch, rows, Console(width=WIDTH, highlight=False))
    return 0


def _algorithms(names: str, overrides: Sequence[str]) -> tuple[Mapping[str, "Algorithm"], list[str]]:
    """Return the algorithms by their given names, each with every override, and notes about understood spellings."""
    found: dict[str, Algorithm] = {}
    notes: list[str] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            resolution = composed(name, overrides)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}" if overrides else str(error)) from error
        found[name] = resolution.algorithm
        notes += [note for note in resolution.notes if note not in notes]
    if not found:
        raise ConfigError("--algorithms names none; `gnomon algorithms` lists them")
    return found, notes


def _verify(names: str | None, as_json: bool) -> int:
    with loading_libraries():
        from gnomon.analysis.dissect.verify import verify

    report = verify() if names is None else verify(_algorithms(names, [])[0])
    print(json.dumps(report.as_row(), allow_nan=False) if as_json else report)
    return 0 if report.agrees else 1
