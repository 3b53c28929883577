"""What several verbs share: settings as arguments, --restarts N and --cluster WHERE."""

import argparse
import difflib
import errno
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gnomon.core.errors import UserError, memory_limits
from gnomon.core.progress import show_progress
from gnomon.core.redaction import for_people
from gnomon.core.tables import packaged_toml
from gnomon.records.directory import RunDirectory
from gnomon.training.supervisor import reporting, run_with_restarts

if TYPE_CHECKING:
    from gnomon.config.experiment import Loaded
    from gnomon.training.result import Result

_SETTING = re.compile(r"[A-Za-z_][\w.-]*=")
# Above it an unknown option is taken for a misspelt one and not for a setting.
_LIKE_AN_OPTION = 0.75
# MB, as measured on a CPU and rounded up: 310 of data, 754 of addresses.
_LIBRARIES_TAKE = {"-d": 400, "-v": 800}


class _Form(argparse.HelpFormatter):
    """Help whose examples have a line each, so that none is broken."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        head, found, rest = text.partition("examples: ")
        return (
            f"examples:\n  {rest}".replace(", gnomon", "\n  gnomon")
            if found
            else super()._fill_text(head, width, indent)
        )


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb.

    Args:
        verb: The verb, such as "train".
        about: What the verb does: the docstring of its module.
        examples: What ``--help`` shows last.
        is_raw: Whether lines of ``about`` and ``examples`` are shown as they are.
        settings: As of `argparse.ArgumentParser`.
    """

    def __init__(
        self, verb: str, about: str | None, examples: str | None = None, is_raw: bool = False, **settings: Any
    ) -> None:
        form = argparse.RawDescriptionHelpFormatter if is_raw else _Form
        super().__init__(prog=f"gnomon {verb}", description=about, epilog=examples, formatter_class=form, **settings)


class SettingsParser(VerbParser):
    """A parser whose ``overrides`` may also be written as options: ``--steps 10`` and ``--steps=10`` are ``steps=10``.

    An option without a value is true: ``--use_vllm``. The parser's own options keep their meaning and are not
    abbreviated, so that ``--seed 3`` is never read as ``--seeds 3``; what is nearly one of them is refused.
    """

    def __init__(self, verb: str, about: str | None, examples: str | None = None, is_raw: bool = False) -> None:
        super().__init__(verb, about, examples, is_raw, allow_abbrev=False)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as `argparse` does, with settings in all three forms."""
        return super().parse_intermixed_args(self._as_overrides(list(args or ())), namespace)

    def _as_overrides(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with every setting as key=value."""
        # The rules of argparse with settings as options: an option of the verb keeps its value, all else becomes
        # key=value.
        found: list[str] = []
        early: list[str] = []  # settings before the first argument, which is no setting
        remaining = list(arguments)
        while remaining:
            argument = remaining.pop(0)
            name, equals, value = argument.partition("=")
            if argument == "--" or not argument.startswith("--") or not name[2:]:
                found.append(argument)
                if not argument.startswith("-"):
                    found += early
                    early = []
            elif (option := self._option_string_actions.get(name)) is not None:
                found.append(argument)
                if option.nargs is None and not equals and remaining:
                    found.append(remaining.pop(0))
            elif self._resembles_an_option(name):
                found.append(argument)
            else:
                # Nothing follows that could be a value.
                is_flag = not equals and (
                    not remaining or remaining[0].startswith("--") or _SETTING.match(remaining[0])
                )
                value = value if equals else "true" if is_flag else remaining.pop(0)
                # argparse takes the first free argument for the experiment, so a setting before it has to wait.
                is_early = not any(not each.startswith("-") for each in found)
                (early if is_early else found).append(f"{name[2:]}={value}")
        return found + early

    def _resembles_an_option(self, name: str) -> bool:
        folded = name.replace("-", "").replace("_", "")
        options = [text for text, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        near = [text.replace("-", "") for text in options if text.startswith("--")]
        # A name with a dot can only be a setting.
        return "." not in name and bool(difflib.get_close_matches(folded, near, n=1, cutoff=_LIKE_AN_OPTION))

    def error(self, message: str) -> NoReturn:
        """End the program with what was wrong, and say how a setting is written where an option was misspelt."""
        found = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if found:
            options = [text for text in self._option_string_actions if text.startswith("--")]
            near = difflib.get_close_matches(found[1], options, n=1)
            hint = f"did you mean {near[0]}? A" if near else "a"
            message = f"{message}; {hint} setting of that name is {found[1].lstrip('-').replace('-', '_')}=VALUE"
        super().error(message)


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Say that PyTorch and what is built on it are loaded during the block.

    Raises:
        OSError: If the process may take less memory than they do. Native code that lacks memory aborts or hangs, so
            this is asked before.
        UserError: If Python was told to leave out docstrings, which transformers reads.
    """
    if sys.flags.optimize > 1:
        raise UserError(
            "Python runs without docstrings (PYTHONOPTIMIZE=2 or -OO), and transformers needs them; unset it"
        )
    for option, most in memory_limits().items() if "torch" not in sys.modules else ():
        if most < (least := _LIBRARIES_TAKE[option]) * 10**6:
            allowed = f"ulimit {option} allows {most // 10**6} MB"
            raise OSError(errno.ENOMEM, f"libraries alone take about {least} MB, and {allowed}")
    with show_progress("loading libraries", is_brief=True):
        yield


def parser_of(verb: str, about: str | None) -> VerbParser:
    """Return the parser of a verb with the arguments of ``arguments.toml``.

    Args:
        verb: The verb.
        about: What it does, in a docstring.
    """
    table = packaged_toml("gnomon.cli", "arguments.toml")[verb]
    make = SettingsParser if table.get("settings") else VerbParser
    parser = make(verb, about, table.get("examples"), table.get("raw", False))
    alone: Any = None
    for name, given in table["arguments"].items():
        # An argument without help is for programs, such as --report, and is not shown.
        settings = {"help": argparse.SUPPRESS, **given}
        if "type" in settings:
            settings["type"] = _TYPES[settings["type"]]
        is_alone = settings.pop("group", None) is not None
        alone = alone or (parser.add_mutually_exclusive_group() if is_alone else None)
        (alone if is_alone else parser).add_argument(name, **settings)
    return parser


def cluster_overrides(parser: argparse.ArgumentParser, where: str | None) -> list[str]:
    """Return the override for ``--cluster``; end the program for an empty place."""
    if where == "":
        parser.error("--cluster needs a place: ray, auto, HOST:PORT or ray://HOST:PORT")
    return [] if where is None else [f'cluster="{where}"']


def supervise(given: argparse.Namespace, command: Sequence[str], name: str, overrides: Sequence[str]) -> int:
    """Run ``gnomon COMMAND``, which begins a run, again after each fault; return the exit code.

    The run directory is chosen in advance, so that a restart finds the run again.
    """
    run_dir = given.run_dir
    if run_dir is None:
        names = [each.removeprefix("name=") for each in overrides if each.startswith("name=")]
        run_dir = chosen(RunDirectory.named(names[-1] if names else Path(name).stem))
    cluster = [] if given.cluster is None else ["--cluster", given.cluster]
    again = [*command, "--run-dir", str(run_dir), *cluster, *["--json"] * given.json]
    return restarted(again, run_dir, given.restarts)


def chosen(made: RunDirectory) -> Path:
    """Return the path of a directory that was just made, and give the directory back: the run makes it again."""
    made.close()
    made.discard()
    return made.path


def restarted(arguments: Sequence[str], run: Path, restarts: int) -> int:
    """Run ``gnomon ARGUMENTS``, which trains in ``run``, again after each fault; return the exit code."""

    def say(line: str) -> None:
        print(for_people(f"gnomon {arguments[0]}: {line}"), file=sys.stderr, flush=True)

    return run_with_restarts(arguments, run, restarts, say)


def trained(given: argparse.Namespace, make: Callable[[Any], "Loaded"]) -> int:
    """Train the experiment that is made of `gnomon.config.experiment`, and print the result; return the exit code."""
    with loading_libraries():
        experiments = import_module("gnomon.config.experiment")

    def train() -> "Result":
        # Made before torch is imported, which takes seconds: what is wrong with it is said at once.
        loaded = make(experiments)
        with loading_libraries():
            from gnomon.training.api import train_experiment
        return train_experiment(loaded, given.run_dir)

    return finished(given, train)


def finished(given: argparse.Namespace, train: Callable[[], "Result"]) -> int:
    """Train, reporting to a supervisor where there is one, and print the result; return the exit code."""
    from gnomon.cli.results import show

    # With --json standard output holds the one JSON object alone.
    with reporting(given.report), redirect_stdout(sys.stderr if given.json else sys.stdout):
        result = train()
    return show(result, as_json=given.json)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 on, not {text!r}")
    return int(text)


def _checkpoint(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int, "float": float, "path": Path, "count": _count, "checkpoint": _checkpoint,
}  # fmt: skip
