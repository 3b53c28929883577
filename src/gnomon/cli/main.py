"""The gnomon command. Each verb has one module, imported only when the verb is called."""

import errno
import importlib
import keyword
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from gnomon.core.errors import LIMITS, GnomonError, Stopped, UserError, refusal_of, unknown
from gnomon.core.progress import Steps, use_progress
from gnomon.core.redaction import for_people
from gnomon.core.tables import packaged_toml
from gnomon.core.user_code import on_user_code, one_process

VERBS = {verb: table["about"] for verb, table in packaged_toml("gnomon.cli", "arguments.toml").items()}
HELP = f"""usage: gnomon VERB [ARGUMENTS]

Algorithm-first reinforcement learning for language models.

{chr(10).join(f"  {verb:<14}{text}" for verb, text in VERBS.items())}

`gnomon VERB --help` says what a verb takes; `gnomon --version` which version this is.
First steps: `gnomon train tiny` (seconds), then `gnomon train quickstart` (minutes)."""
# 74 is EX_IOERR of sysexits.h, 130 and 143 are 128 plus SIGINT and SIGTERM, as shells have them.
FAILED, WRONG_INPUT, DISK_FULL, INTERRUPTED, STOPPED = 1, 2, 74, 130, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code.

    Returns:
        0 done; 1 the run failed; 2 the input is wrong; 74 the disk is full; 130 interrupted; 143 stopped by SIGTERM
        after saving a checkpoint.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # Only as a program: a Python caller of `main` keeps its own hooks and streams.
        sys.excepthook = _show_unforeseen
        warnings.formatwarning = _in_words
        _open_standard_files()
        _have_home()
        try:
            os.getcwd()
        except OSError:
            return _say("gnomon: the working directory is gone; cd to a folder that is there", WRONG_INPUT)
        _keep_bytecode_whole()
    try:
        return _chosen(given)
    except BrokenPipeError:
        # The reader of the output is gone; the interpreter must not flush the output again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _open_standard_files() -> None:
    """Have standard output and error lead nowhere where they are closed, or the next file would take their numbers."""
    # The lowest free number is taken each time, so this fills 0, 1 and 2 where they are closed.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for name in ("stdout", "stderr"):
        # A reward that closes stdout would end every later line of the run with an error.
        getattr(sys, name).close = partial(_refuse_to_close, name)


def _refuse_to_close(name: str) -> NoReturn:
    """Raise ValueError where code of the user's closes what everybody else prints to."""
    caller = sys._getframe(1)
    raise ValueError(f"sys.{name}.close() in {caller.f_code.co_filename}, line {caller.f_lineno}: others print there")


def _have_home() -> None:
    """Let a user without a name and without HOME, as containers have, be at home where containers say so."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"


def _keep_bytecode_whole() -> None:
    """Write no compiled modules where the size of files is limited: Python would leave half of one, and read it later.

    Processes that this one starts write none either.
    """
    if sys.platform == "win32":
        return
    import resource

    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def _chosen(given: Sequence[str]) -> int:
    if given[:1] == ["help"] and len(given) > 1:
        given = [given[1], "--help"]
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    verb, rest = given[0], given[1:]
    if verb in ("--version", "-V", "version"):
        import gnomon

        print(f"gnomon {gnomon.__version__}")
        return 0
    if verb not in VERBS:
        # The usual word of other programs, or a verb of which this is the beginning.
        meant = {"run": "train"}.get(verb, next((each for each in VERBS if each.startswith(verb)), verb))
        hint = f". Did you mean: gnomon {meant}?" * (meant != verb)
        return _say(f"gnomon: {unknown('verb', verb, VERBS)}{hint}", WRONG_INPUT)
    return _run(verb, rest)


def module_of(verb: str) -> str:
    """Return the name of a verb's module, which has an underscore more where Python keeps the word for itself.

    >>> module_of("train"), module_of("continue")
    ('gnomon.cli.train', 'gnomon.cli.continue_')
    """
    return f"gnomon.cli.{verb.replace('-', '_')}{'_' if keyword.iskeyword(verb) else ''}"


def _run(verb: str, rest: Sequence[str]) -> int:
    # Given back where memory has run out, which then lacks even for saying so.
    spare = bytearray(2**22)
    try:
        # What every verb shares: progress on standard error, a word about the user's code, and one process to end.
        with use_progress(_on_standard_error), on_user_code(_say_whose_code), one_process():
            return int(importlib.import_module(module_of(verb)).run(rest))
    except UserError as error:
        return _say(f"gnomon {verb}: {error}", WRONG_INPUT)
    except Stopped as error:
        return _say(f"gnomon {verb}: {error.args[0]}", 128 + error.args[1])
    except GnomonError as error:
        return _say(f"gnomon {verb}: {'' if verb == 'export' else 'the run failed: '}{error}", FAILED)
    except KeyboardInterrupt:
        return _say(f"gnomon {verb}: interrupted", INTERRUPTED)
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if Path(last.filename).name == "argparse.py":  # --help, or what it cannot read
            raise
        where = "" if isinstance(error.code, str) else f" in {last.filename}, line {last.lineno}"
        return _say(
            f"gnomon {verb}: the run failed: it was ended by {error.code!r}{where}; raise an error there", FAILED
        )
    except BaseException as error:  # a panic of a library in Rust is no Exception
        # A limit of the machine (disk, memory, processes, files) is told in a line, and anything unforeseen as a
        # traceback.
        del spare
        refused = refusal_of(error)
        if refused is None:
            raise
        where = "standard output: " if refused.filename is None and _is_output_refused() else ""
        said = f": {where}{refused}" if refused.strerror else ""
        code = DISK_FULL if refused.errno == errno.ENOSPC else FAILED
        return _say(f"gnomon {verb}: {LIMITS[refused.errno or 0]}{said}", code)


def _is_output_refused() -> bool:
    """Whether what was printed cannot be written, so that it is not a file that is to blame."""
    try:
        print(flush=True)  # what could not be written is not always kept, so a flush alone may succeed
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
        return True
    return False


@contextmanager
def _on_standard_error(text: str, total: int, unit: str, is_brief: bool, /) -> Iterator[Steps]:
    """Show progress while no console is open."""
    from gnomon.records.console import Console

    with Console() as console, console.phase(text, total, unit, is_brief) as phase:
        yield phase


def _show_unforeseen(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error without secrets, so that users can share it."""
    print(for_people("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


_OWN = Path(__file__).parents[1]


def _in_words(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as it is shown: one of this package's about the run is one line without a place in the code."""
    if category is RuntimeWarning and Path(filename).is_relative_to(_OWN):
        return f"warning: {for_people(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _say_whose_code(named: str) -> None:
    print(for_people(f"runs your code: {named}"), file=sys.stderr, flush=True)


def _say(message: str, code: int) -> int:
    print(for_people(message), file=sys.stderr)
    return code
