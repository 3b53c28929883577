"""gnomon watch RUN: a live view of a run, on a terminal or as lines; it reads files and disturbs nothing."""

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

from gnomon.cli.arguments import parser_of


def run(arguments: Sequence[str]) -> int:
    """Watch a run; return the exit code: with --plain 1 if the run ended before its last step."""
    parser = parser_of("watch", __doc__)
    given = parser.parse_args(arguments)
    if given.interval is not None and not 0.05 <= given.interval <= 86_400:
        parser.error(f"--interval should be from 0.05 to 86400 seconds, got {given.interval:g}")
    is_one_look = given.once or given.json
    again = {"--plain": given.plain, "--wait": given.wait, "--interval": given.interval is not None}
    if is_one_look and any(again.values()):
        looks, other = "--once" if given.once else "--json", next(name for name, is_given in again.items() if is_given)
        parser.error(f"{looks} looks once and ends, and {other} is for looking again and again: leave one of them out")
    _refuse_unreadable(given.run, given.wait, is_one_look)
    if is_one_look:
        return _once(given.run, given.json)
    if given.plain or not _is_screen():
        return _plain(given.run, given.interval or 5.0)
    return _live(given.run, given.interval or 1.0)


def _refuse_unreadable(run: Path, is_awaited: bool, is_one_look: bool) -> None:
    """Refuse a missing run, unless it is awaited or being created, and a run with an unreadable experiment or row.

    Raises:
        RunDirectoryError: If the run is refused.
    """
    from gnomon.core.errors import RunDirectoryError
    from gnomon.records.directory import RunDirectory, lock_owner
    from gnomon.records.jsonl import read_rows

    files = RunDirectory(run)
    if is_one_look or run.is_file():
        files.check(run)
    # A locked directory without an experiment is a run that begins right now.
    if not is_awaited and lock_owner(run) is None:
        try:
            files.check(run)
        except RunDirectoryError as error:
            raise RunDirectoryError(
                f"{error}; to wait until it begins: gnomon watch {quote(str(run))} --wait"
            ) from error
    if files.experiment.is_file():
        files.table()
        for rows in (files.metrics, files.evaluations, files.findings):
            # Raises for a file that cannot be read; a missing one is empty.
            next(read_rows(rows), None)


def _once(run: Path, as_json: bool) -> int:
    plain = _insight("plain")
    snapshot = _insight("watcher").Watcher(run).look()
    if as_json:
        print(json.dumps(plain.as_row(snapshot), allow_nan=False))
        return 0
    _say("\n".join(plain.once(snapshot, shutil.get_terminal_size((100, 24)).columns)))
    return 0


def _plain(run: Path, interval: float) -> int:
    watched = _insight("plain").follow(_insight("watcher").Watcher(run), interval, _say, time.sleep)
    return 0 if watched.state == "finished" else 1


def _live(run: Path, interval: float) -> int:
    from gnomon.core.errors import ConfigError

    if importlib.util.find_spec("textual") is None:
        raise ConfigError(
            "the live view needs textual, which is not installed; pip install 'gnomon[watch]', or see the same as "
            f"lines: gnomon watch {quote(str(run))} --plain"
        )
    app = _insight("app").WatchApp(_insight("watcher").Watcher(run), interval)
    app.run(mouse=False)
    return app.return_code or 0


def _insight(module: str) -> Any:
    """Return a module of the live view; the room is known here by its name only."""
    return import_module(f"gnomon.insight.watch.{module}")


def _is_screen() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _say(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    # A terminal that cannot show a character must not end the view.
    print(text.encode(encoding, "replace").decode(encoding), flush=True)
