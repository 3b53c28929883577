"""The ``gnomon`` command. Each verb has one module, imported only when the verb is called."""

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from gnomon.core.errors import GnomonError, Stopped, UserError, unknown
from gnomon.core.progress import Steps, shown_by
from gnomon.core.redaction import for_people
from gnomon.core.user_code import told_before_code

VERBS = {
    "train": "train an experiment: a TOML file or the name of a built-in one",
    "resume": "go on with a run from its newest valid checkpoint",
    "watch": "see a run live on a terminal, or as lines in a log",
    "report": "write a run, or several beside each other, on one page that needs no server",
    "evaluate": "score a model or a run on held-out tasks, with intervals",
    "plan": "validate an experiment and say in plain words what a step does",
    "algorithms": "list the algorithms, or describe one",
    "rewards": "list the rewards, or describe one with its settings",
    "tasks": "list the tasks, or describe a kind, a test set or a generator",
    "config": "print the settings of an experiment: type, default, meaning",
    "compare": "several algorithms at one budget, over several seeds: curves, intervals, tests, cost",
    "dissect": "take one recorded batch apart: several algorithms' gradients side by side",
    "reproduce": "put a paper's claim to the test; --list shows all with their last verdicts",
    "doctor": "say in words what is wrong with a run, live or finished",
    "bench": "measure speed here: ours, the machine's limit, and TRL where it is installed",
    "export": "take a run's model away as Hugging Face safetensors",
}
HELP = "\n".join(
    [
        "usage: gnomon VERB [ARGUMENTS]",
        "",
        "Algorithm-first reinforcement learning for language models.",
        "",
        *(f"  {verb:<12}{text}" for verb, text in VERBS.items()),
        "",
        "`gnomon VERB --help` says what a verb takes; `gnomon --version` which version this is.",
        "First steps: `gnomon plan quickstart`, then `gnomon train quickstart`.",
    ]
)
_LIMITS = {
    errno.EFBIG: "a file would be larger than files may be here (ulimit -f raises that, or a quota does)",
    errno.EMFILE: "more files would be open than may be (ulimit -n 4096 raises that)",
    errno.ENFILE: "this machine has no room for more open files",
    errno.ENOMEM: "there is not enough memory (ulimit -v says how much may be taken)",
    errno.EDQUOT: "a quota on this disk is used up",
    errno.EROFS: "this disk can only be read",
}
FAILED, WRONG_INPUT, DISK_FULL, INTERRUPTED, STOPPED = 1, 2, 74, 130, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code.

    Returns:
        0 done; 1 the run failed; 2 the input is wrong; 74 the disk is full; 130 interrupted; 143 stopped by SIGTERM
            after
        saving a checkpoint.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        sys.excepthook = _show_unforeseen
    try:
        return _chosen(given)
    except BrokenPipeError:
        # The reader of the output is gone; the interpreter must not flush the output again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _chosen(given: Sequence[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    verb, rest = given[0], given[1:]
    if verb == "--version":
        from importlib.metadata import version

        print(f"gnomon {version('gnomon')}")
        return 0
    if verb not in VERBS:
        return _say(f"gnomon: {unknown('verb', verb, VERBS)}", WRONG_INPUT)
    return _run(verb, rest)


def _run(verb: str, rest: Sequence[str]) -> int:
    try:
        with shown_by(_on_standard_error), told_before_code(_say_whose_code):
            return int(importlib.import_module(f"gnomon.cli.{verb}").run(rest))
    except UserError as error:
        return _say(f"gnomon {verb}: {error}", WRONG_INPUT)
    except Stopped as error:
        return _say(f"gnomon {verb}: {error.args[0]}", 128 + error.args[1])
    except GnomonError as error:
        return _say(f"gnomon {verb}: the run failed: {error}", FAILED)
    except KeyboardInterrupt:
        return _say(f"gnomon {verb}: interrupted", INTERRUPTED)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _say(f"gnomon {verb}: the disk is full: {error}", DISK_FULL)
        if error.errno in _LIMITS:
            return _say(f"gnomon {verb}: {_LIMITS[error.errno]}: {error}", FAILED)
        raise
    except MemoryError as error:
        said = f": {error}" if str(error) else ""
        return _say(f"gnomon {verb}: there is not enough memory (ulimit -v says how much may be taken){said}", FAILED)


@contextmanager
def _on_standard_error(text: str, total: int, unit: str, is_brief: bool, /) -> Iterator[Steps]:
    """Show progress while no console is open."""
    from gnomon.records.console import Console

    with Console() as console, console.phase(text, total, unit, is_brief) as phase:
        yield phase


def _show_unforeseen(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error without secrets, so that users can share it."""
    print(for_people("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _say_whose_code(named: str) -> None:
    print(for_people(f"runs your code: {named}"), file=sys.stderr, flush=True)


def _say(message: str, code: int) -> int:
    print(for_people(message), file=sys.stderr)
    return code
