"""gnomon compare EXPERIMENT --algorithms a,b,c --seeds N --budget TOKENS: equal cost, several seeds, one page.

gnomon compare --logs NAME=DIR NAME=DIR ...: runs that exist, of gnomon, TRL, verl and prime-rl.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.config.reading import check_names
from gnomon.core.redaction import for_people


def run(arguments: Sequence[str]) -> int:
    """Compare algorithms on one experiment; return the exit code, 1 after failed runs."""
    parser = parser_of("compare", __doc__)
    given = parser.parse_intermixed_args(arguments)
    if given.logs:
        trains = ("experiment", "overrides", "algorithms", "budget", "seconds", "steps", "workers")
        if wrong := [name for name in trains if getattr(given, name)]:
            parser.error(f"--logs compares runs that exist: leave out {', '.join(wrong)}")
        return _compare_logs(given.logs, given.score, given.out, given.json)
    needed = {
        "an experiment": given.experiment,
        "--algorithms": given.algorithms,
        "one of --budget, --seconds and --steps": {given.budget, given.seconds, given.steps} != {None},
    }
    missing = [said for said, is_there in needed.items() if not is_there]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}; or --logs NAME=DIR ...")

    check_names(given.experiment, given.overrides, [n for n in given.algorithms.split(",") if not n.endswith(".toml")])
    with loading_libraries():
        from gnomon.analysis.compare.page import text
        from gnomon.analysis.compare.records import Unit
        from gnomon.analysis.compare.run import NUMBERS, PAGE, Design, RunLimit, conduct, folder_of
        from gnomon.core.errors import RunError
        from gnomon.records.console import Console

    asked: dict[Unit, float | None] = {"tokens": given.budget, "seconds": given.seconds, "steps": given.steps}
    # argparse allows one of the three alone.
    (chosen,) = [RunLimit(amount, unit) for unit, amount in asked.items() if amount is not None]
    design = Design.of(given.experiment, given.overrides, given.algorithms.split(","), given.seeds, chosen)
    folder = given.out or folder_of(design, given.experiment)
    with Console() as console:
        found = conduct(design, folder, given.workers, console)
    if given.json:
        print(json.dumps({**found.as_row(), "folder": str(folder), "page": str(folder / PAGE)}))
    else:
        print(f"{text(found)}\n\npage     {folder / PAGE}\nnumbers  {folder / NUMBERS}")
    # After the page was written, so that the runs that worked can be read.
    if found.failures:
        raise RunError(found.failures)
    return 0


def _compare_logs(
    given: Sequence[str], kind: Literal["held-out", "training"] | None, out: Path | None, as_json: bool
) -> int:
    with loading_libraries():
        from gnomon.analysis.compare.logs import arms_of, compare_logs, page, text
        from gnomon.core.atomic_files import write_page
        from gnomon.records.jsonl import sound

    found = compare_logs(arms_of(given), kind)
    row, said = found.as_row(), text(found)
    if out is not None:
        write_page(out, page(found).encode())
        row, said = row | {"page": str(out)}, f"{said}\n\npage     {out}"
    print(json.dumps(sound(row), allow_nan=False) if as_json else for_people(said))
    return 0
