"""gnomon tasks [NAME]: the tasks that an experiment may name, with their settings."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gnomon.cli.arguments import loading_libraries, parser_of
from gnomon.config.reading import check_named_task
from gnomon.core.errors import ConfigError, unknown


def run(arguments: Sequence[str]) -> int:
    """Print the kinds of tasks, or describe a kind, a test set or a generator; return the exit code."""
    given = parser_of("tasks", __doc__).parse_args(arguments)
    if given.name is not None:
        check_named_task(given.name)
    with loading_libraries():
        from gnomon.config.reference import describe_kind, kinds, of_kind

    if given.name is None or given.name in kinds("task"):
        chosen = kinds("task") if given.name is None else [given.name]
        rows: dict[str, Any] = {kind: [asdict(setting) for setting in of_kind("task", kind)] for kind in chosen}
        text = _everything() if given.name is None else describe_kind("task", given.name)
    else:
        rows, text = _test_set_or_generator(given.name)
    print(json.dumps(rows, indent=2, default=repr) if given.json else text)
    return 0


def _everything() -> str:
    from gnomon.config.reference import list_kinds
    from gnomon.tasks.benchmarks import BENCHMARKS
    from gnomon.tasks.published import PUBLISHED

    made = "\n".join(textwrap.wrap(", ".join(_generators()), 100)) or "`pip install reasoning-gym` brings them"
    return "\n\n".join(
        [
            list_kinds("task"),
            f"Training sets of kind published:\n{', '.join(PUBLISHED)}",
            f"Test sets of kind benchmark:\n{', '.join(BENCHMARKS)}",
            f"Generators of kind reasoning_gym:\n{made}",
        ]
    )


def _test_set_or_generator(name: str) -> tuple[dict[str, Any], str]:
    from gnomon.config.reference import kinds
    from gnomon.tasks.benchmarks import BENCHMARKS, REFUSED, spelled
    from gnomon.tasks.published import PUBLISHED
    from gnomon.tasks.reasoning import generator_settings

    if name in BENCHMARKS:
        # Functions that read rows have no meaning in print.
        said = {k: v for k, v in asdict(BENCHMARKS[name]).items() if not callable(v)}
        title = f'evaluation.task: kind = "benchmark", benchmark = "{name}"'
        if name in PUBLISHED:
            said |= {f"training.{key}": value for key, value in asdict(PUBLISHED[name]).items()}
            title += f'; task: kind = "published", set = "{name}"'
    elif name in PUBLISHED:
        said = asdict(PUBLISHED[name])
        title = f'task: kind = "published", set = "{name}"'
    elif name in _generators():
        said = {f"parameters.{key}": value for key, value in generator_settings(name).items()}
        title = f'task: kind = "reasoning_gym", generator = "{name}"'
    elif spelled(name) in REFUSED:
        raise ConfigError(f"'{name}' is known and cannot be asked: {REFUSED[spelled(name)]}")
    else:
        raise ConfigError(unknown("task", name, [*kinds("task"), *BENCHMARKS, *PUBLISHED, *_generators()]))
    return {name: said}, "\n".join([title, "", *(f"    {key} = {value!r}" for key, value in said.items())])


def _generators() -> tuple[str, ...]:
    """Return the names of reasoning-gym's generators; empty if reasoning-gym is not installed."""
    from gnomon.tasks.reasoning import generators

    try:
        return generators()
    except ConfigError:
        return ()
