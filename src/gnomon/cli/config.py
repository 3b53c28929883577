"""gnomon config [KEY]: the settings of an experiment, with type, default and meaning."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.config.foreign_names import as_markdown as migration_page
from gnomon.config.reading import check_setting


def run(arguments: Sequence[str]) -> int:
    """Print settings; return the exit code."""
    given = parser_of("config", __doc__).parse_args(arguments)
    if given.migration:
        print(migration_page(), end="")
        return 0
    if given.key is not None:
        check_setting(given.key)
    with loading_libraries():
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
