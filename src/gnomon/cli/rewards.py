"""gnomon rewards [KIND]: the rewards that an experiment may name, with their settings."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.config.name_checks import known_names
from gnomon.core.errors import ConfigError, unknown


def run(arguments: Sequence[str]) -> int:
    """Print the kinds of rewards, or describe one; return the exit code."""
    given = parser_of("rewards", __doc__).parse_args(arguments)
    if given.kind is not None and given.kind not in known_names()["rewards"]:
        raise ConfigError(unknown("kind of reward", given.kind, known_names()["rewards"]))
    with loading_libraries():
        from gnomon.config.reference import describe_kind, kinds, list_kinds, of_kind

    if given.json:
        chosen = kinds("rewards") if given.kind is None else [given.kind]
        print(json.dumps({kind: [asdict(s) for s in of_kind("rewards", kind)] for kind in chosen}, indent=2))
        return 0
    if given.kind is not None:
        print(describe_kind("rewards", given.kind))
        return 0
    print(list_kinds("rewards"))
    print('\nA function of your own: rewards = ["path.py:function"]; see examples/own_reward.py.')
    return 0
