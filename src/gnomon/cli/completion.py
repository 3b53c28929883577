"""gnomon completion SHELL: a script that completes verbs, options, settings and names in bash, zsh or fish."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from gnomon.cli.arguments import loading_libraries, parser_of


def run(arguments: Sequence[str]) -> int:
    """Print the script; return the exit code."""
    given = parser_of("completion", __doc__).parse_args(arguments)
    with loading_libraries():
        verbs = every_verb()
    print(_SHELLS[given.shell](verbs), end="")
    return 0


@dataclass(frozen=True)
class Option:
    """One option of a verb.

    Attributes:
        name: As it is typed, such as "--out".
        meaning: Its help, in one line.
        takes_value: Whether a value follows.
        words: What the value may be; empty where it is free or a file.
    """

    name: str
    meaning: str
    takes_value: bool
    words: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """One verb: its meaning, its options, the words that its arguments may be, and the settings that it takes."""

    name: str
    meaning: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    settings: tuple[str, ...]


def every_verb() -> tuple[Verb, ...]:
    """Return the verbs of gnomon, read from their parsers."""
    from gnomon.cli.main import VERBS

    known = _names()
    found = []
    for name, meaning in VERBS.items():
        actions = parser_of(name, None)._actions
        shown = [action for action in actions if action.help is not argparse.SUPPRESS]
        words = [word for action in shown if not action.option_strings for word in _words(name, action, known)]
        is_set = any(action.metavar == "key=value" for action in shown)
        options = tuple(_option(name, action, known) for action in shown if action.option_strings)
        found.append(Verb(name, meaning, options, tuple(words), known["settings"] if is_set else ()))
    return tuple(found)


def _option(verb: str, action: argparse.Action, known: Mapping[str, tuple[str, ...]]) -> Option:
    meaning = " ".join((action.help or "").split())
    return Option(action.option_strings[-1], meaning, action.nargs != 0, _words(verb, action, known))


def _names() -> dict[str, tuple[str, ...]]:
    """Return the names that arguments may have, by argument."""
    from gnomon.algorithms import NAMED
    from gnomon.config.reading import built_in
    from gnomon.config.reference import kinds, settings
    from gnomon.tasks.benchmarks import BENCHMARKS

    # Keys of list entries have a number that nobody can complete.
    keys = [setting.key for setting in settings() if ".N" not in setting.key]
    return {
        "experiment": tuple(sorted(built_in())),
        "algorithms": tuple(NAMED),
        "rewards": tuple(kinds("rewards")),
        "tasks": (*kinds("task"), *BENCHMARKS),
        "settings": tuple(dict.fromkeys(keys)),
    }


def _words(verb: str, action: argparse.Action, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the words that an argument may be; empty where it is free or a file."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    # The names of arguments to the lists above: NAME of `gnomon tasks` is a task.
    kind = {"name": verb, "kind": verb, "key": "settings", "task": "tasks"}.get(action.dest, action.dest)
    return known.get(kind, ())


def bash(verbs: Sequence[Verb]) -> str:
    """Return the script for bash, which cuts a word at its equals sign before the function sees it."""
    cases = []
    for verb in verbs:
        values = [
            f"            {option.name}) words={_quoted(option.words)} ;;" for option in verb.options if option.words
        ]
        # After these the shell completes files by itself.
        free = "|".join(option.name for option in verb.options if option.takes_value and not option.words)
        values += [f"            {free}) ;;"] if free else []
        words = [*verb.words, *(option.name for option in verb.options), "--help"]
        cases.append(
            f"        {verb.name})\n            case $previous in\n"
            + "".join(f"    {value}\n" for value in values)
            + f"            *) words={_quoted(words)}; settings={_quoted(verb.settings)} ;;\n"
            + "        esac ;;"
        )
    names = [*(verb.name for verb in verbs), "--help", "--version"]
    return _filled("bash", verbs=_quoted(names), cases="\n".join(cases), presets=_quoted(_presets(verbs)))


def zsh(verbs: Sequence[Verb]) -> str:
    """Return the script for zsh: a function for ``compinit``."""
    cases = []
    for verb in verbs:
        lines = [_zsh_option(option) for option in verb.options]
        # The space before the function keeps zsh from putting words of its own before these.
        arguments = f'"*: : _gnomon_arguments {_quoted(verb.words)} {_quoted(verb.settings)}"'
        cases.append(f"        {verb.name}) _arguments {' '.join([*lines, arguments])} ;;")
    described = "\n".join(f"        {_single(f'{verb.name}:{verb.meaning}')}" for verb in verbs)
    return _filled("zsh", verbs=described, cases="\n".join(cases), presets=_quoted(_presets(verbs)))


def fish(verbs: Sequence[Verb]) -> str:
    """Return the script for fish: one `complete` for each verb, option and set of words."""
    lines = ["# Completions of gnomon for fish, written by `gnomon completion fish`."]
    for verb in verbs:
        lines.append(f"complete -c gnomon -n __fish_use_subcommand -f -a {verb.name} -d {_single(verb.meaning)}")
    for verb in verbs:
        here = f"complete -c gnomon -n '__fish_seen_subcommand_from {verb.name}'"
        for option in verb.options:
            value = (f" -x -a {_quoted(option.words)}" if option.words else " -r") if option.takes_value else ""
            lines.append(f"{here} -l {option.name.removeprefix('--')}{value} -d {_single(option.meaning)}")
        keys = [f"{key}=" for key in verb.settings]
        if keys:
            keys += [f"algorithm={name}" for name in _presets(verbs)]
        if verb.words or keys:
            lines.append(f"{here} -a {_quoted([*verb.words, *keys])}")
    return "\n".join(lines) + "\n"


_SHELLS: Mapping[str, Callable[[Sequence[Verb]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _presets(verbs: Sequence[Verb]) -> tuple[str, ...]:
    return next(verb.words for verb in verbs if verb.name == "algorithms")


def _filled(shell: str, **parts: str) -> str:
    """Return the script of a shell, whose @NAME@ are replaced by the parts of that name."""
    script = (files("gnomon.cli") / f"completion.{shell}").read_text(encoding="utf-8")
    return re.sub("@([a-z]+)@", lambda name: parts[name[1]], script)


def _zsh_option(option: Option) -> str:
    # Brackets and colons end a description.
    said = option.meaning.translate(str.maketrans("[]:", "();"))
    value = (f":value:({' '.join(option.words)})" if option.words else ":value:_files") if option.takes_value else ""
    return _single(f"{option.name}[{said}]{value}")


def _quoted(words: Sequence[str]) -> str:
    return _single(" ".join(words))


def _single(text: str) -> str:
    """Return a text in single quotes, as all three shells read it; a quote within becomes a typographic one."""
    return "'" + text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}") + "'"
