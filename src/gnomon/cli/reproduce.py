"""gnomon reproduce CLAIM: put a paper's claim to the test; --list shows all claims with their last verdicts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.cli.clone import enter_clone
from gnomon.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from experiments.claims.folders import ClaimFolder


def run(arguments: Sequence[str]) -> int:
    """Reproduce a claim, or list all claims; return the exit code, 0 for every verdict."""
    parser = parser_of("reproduce", __doc__)
    given = parser.parse_intermixed_args(arguments)
    if given.list == bool(given.claim):
        parser.error("name a claim, or ask for --list")
    if (given.list or given.write) and (given.finished or given.workers is not None):
        what, other = "--list" if given.list else "--write", "--finished" if given.finished else "--workers"
        parser.error(f"{what} runs nothing: leave {other} out")

    here = enter_clone("reproduce", "experiments")
    known = [path.parent.name for path in sorted((given.experiments or here).glob("*/claim.py"))]
    if given.claim and known and given.claim not in known:
        raise ConfigError(unknown("claim", given.claim, known))
    with loading_libraries():
        from experiments.claims.folders import chosen, claim_folders, experiments_folder

    root = experiments_folder(given.experiments)
    if given.list:
        return _list(claim_folders(root), given.json, given.write)
    folder = chosen(given.claim, root)
    if not given.write:
        _measure(folder, given.work, given.workers, not given.finished)
    _write([folder])
    return _show(folder, given.json)


def _measure(folder: "ClaimFolder", work: Path, workers: int | None, is_training: bool) -> None:
    from gnomon.analysis.compare.run import cores
    from gnomon.core.atomic_files import real_path
    from gnomon.records.console import Console

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    with Console() as console:
        folder.reproduce(real_path(work), console, workers or cores(), is_training)


def _write(folders: Sequence["ClaimFolder"]) -> None:
    """Write the pages of these claims, and the table of all claims if experiments/ lies beside docs/."""
    from experiments.claims.folders import claim_folders, write_text
    from experiments.claims.pages import TABLE, table, write_pages

    for folder in folders:
        write_pages(folder)
    for root in {folder.path.parent for folder in folders}:
        if (root.parent / TABLE).parent.is_dir():
            write_text(root.parent / TABLE, table(claim_folders(root)))


def _list(folders: dict[str, "ClaimFolder"], as_json: bool, is_written: bool) -> int:
    if is_written:
        _write(list(folders.values()))
    rows = [_row(folder) for folder in folders.values()]
    if as_json:
        short = ("claim", "title", "verdict", "checks", "expectations", "cpu_minutes", "date", "error")
        print(json.dumps({"claims": [{key: row[key] for key in short if key in row} for row in rows]}, allow_nan=False))
        return 0
    if not rows:
        print("no claim here")
        return 0
    wide = max(len(str(row["claim"])) for row in rows)
    for row in rows:
        said = row.get("title") or row["error"]
        print(f"{row['claim']:<{wide}}  {row['verdict']:<10}  {row.get('date', ''):<10}  {said}")
    return 0


def _row(folder: "ClaimFolder") -> dict[str, Any]:
    """Return a claim's row; an unreadable claim becomes a row with its error."""
    try:
        return folder.row(folder.tested())
    except ConfigError as error:
        return {"claim": folder.name, "verdict": "unreadable", "error": str(error)}


def _show(folder: "ClaimFolder", as_json: bool) -> int:
    from experiments.claims.pages import outdated

    tested = folder.tested()
    row, warning = folder.row(tested), outdated(folder.claim(), tested)
    if as_json:
        told = {key: value for key, value in row.items() if key != "curves"}
        print(json.dumps({**told, "are_remarks_outdated": bool(warning)}, allow_nan=False))
        return 0
    print(row["title"])
    checks = [{**found, "says": f"check: {found['says']}"} for found in row["checks"]]
    for found in [*checks, *row["expectations"]]:
        print(f"  {found['outcome']:<10}{found['says']}")
        if found["measured"]:
            print(f"{'':<12}{found['measured']}")
    print(f"verdict: {row['verdict']}")
    print(f"page     {folder.path / 'README.md'}")
    if warning:
        print(
            "warning: the remarks on the page were written for other numbers, and the page says so; read them again "
            f"and change them in {folder.path / 'claim.py'}, then: gnomon reproduce {row['claim']} --write"
        )
    return 0
