"""gnomon config [KEY]: the settings of an experiment, with type, default and meaning."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from gnomon.cli.arguments import VerbParser
from gnomon.config.foreign_names import as_markdown as migration_page
from gnomon.config.reading import check_setting
from gnomon.core.progress import working


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the verb."""
    parser = VerbParser(
        "config", __doc__, "examples: gnomon config learner.optimizer, gnomon config learning_rate, gnomon config"
    )
    parser.add_argument("key", nargs="?", help="a setting, a section, or another library's name for one")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list")
    form.add_argument("--markdown", action="store_true", help="print all settings as a page of tables")
    form.add_argument("--migration", action="store_true", help="print other libraries' names as a page of tables")
    form.add_argument("--names", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print settings; return the exit code."""
    given = build_parser().parse_args(arguments)
    if given.migration:
        print(migration_page(), end="")
        return 0
    if given.key is not None:
        check_setting(given.key)
    with working("loading libraries", is_brief=True):
        from gnomon.config.reference import as_markdown, as_names, named, settings

    if given.names:
        print(as_names(), end="")
        return 0

    found = settings() if given.key is None else named(given.key)
    if given.json:
        print(json.dumps([asdict(setting) for setting in found], indent=2))
    else:
        print(as_markdown() if given.markdown else "\n\n".join(map(str, found)), end="" if given.markdown else "\n")
    return 0
