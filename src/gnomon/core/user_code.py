"""A Python file of the user's, run as a module: the only place where a file that is named becomes code."""

import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from gnomon.core.errors import ConfigError
from gnomon.core.processes.stop_signals import STOP_SIGNALS

_TOLD: list[Callable[[str], None]] = []
_FORBIDDEN: list[bool] = []

end_at_once = os._exit
"""os._exit, which `one_process` does not refuse."""


@contextmanager
def on_user_code(tell: Callable[[str], None]) -> Iterator[None]:
    """Call ``tell``, during the block, with the name of each piece of user code before its import.

    >>> with on_user_code(print):
    ...     notify("mine.py:OWN")
    mine.py:OWN
    """
    _TOLD.append(tell)
    try:
        yield
    finally:
        _TOLD.remove(tell)


@contextmanager
def without_code() -> Iterator[None]:
    """Refuse, during the block, whatever names code that is not gnomon's own, in whichever form.

    >>> with without_code():
    ...     check_allowed("mine.py:OWN")
    Traceback (most recent call last):
    gnomon.core.errors.ConfigError: 'mine.py:OWN' is code, and none is run here
    """
    _FORBIDDEN.append(True)
    try:
        yield
    finally:
        _FORBIDDEN.pop()


def check_allowed(named: str) -> None:
    """Let ``named`` be looked up, imported already or not.

    Raises:
        ConfigError: The call is within `without_code`.
    """
    if _FORBIDDEN:
        raise ConfigError(f"'{named}' is code, and none is run here")


def notify(named: str) -> None:
    """Report that ``named`` is about to be imported, before any of its code runs."""
    if _TOLD:
        _TOLD[-1](named)


@contextmanager
def one_process() -> Iterator[None]:
    """Let what runs during the block neither end this process by os._exit nor return from the block in a copy of it.

    A status of 0 by os._exit would say that a run was done. A process that was forked during the block ends with it:
    it would train, or answer, beside the process that it is a copy of.

    Raises:
        SystemExit: os._exit was called in this process; its text names file and line.
    """
    # Whatever `os._exit` is now, which may be the refusal of a block around this one.
    pid, end = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        # A child may end itself.
        if os.getpid() != pid:
            end(status)
        caller = sys._getframe(1)
        raise SystemExit(f"os._exit({status}) in {caller.f_code.co_filename}, line {caller.f_lineno}")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end
        if os.getpid() != pid:
            end(0)


class Misbehaved(ConfigError):
    """Code of the user's took too long, or changed what belongs to the whole process."""


@contextmanager
def running_user_code(what: str, seconds: float = 120.0, may_fork: bool = True) -> Iterator[None]:
    """Bound what code of the user's does in this process during the block: its time, its output, what all code shares.

    Args:
        what: For messages: "importing mine.py:OWN". What it prints goes to standard error, so that results stay
            readable.
        may_fork: Whether it may copy this process; the copy ends with the block.

    Raises:
        Misbehaved: The code takes longer than ``seconds``, or changes the working directory, who handles signals, or
            torch's defaults, which are then as before.
        SystemExit: As `one_process`; also where it forks and may not.
    """

    def late(_: int, __: FrameType | None) -> NoReturn:
        raise Misbehaved(f"{what} took more than {seconds:g} s; an import or a piece must not start work, or wait")

    # Only the main thread may set handlers; in others the time is not bounded.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGALRM, late) if is_main else None
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        with redirect_stdout(sys.stderr), one_process(), sharing_nothing(what, may_fork):
            yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)


@contextmanager
def sharing_nothing(what: str, may_fork: bool = False) -> Iterator[None]:
    """Refuse what code of the user's changes, during the block, of what all code of this process shares, and undo it.

    Args:
        what: As of `running_user_code`.
        may_fork: Whether it may copy this process.

    Raises:
        Misbehaved: The working directory, who handles signals, or torch's defaults are others.
        SystemExit: It forks and may not.
    """

    def refuse() -> NoReturn:
        caller = sys._getframe(1)
        raise SystemExit(f"os.fork() in {caller.f_code.co_filename}, line {caller.f_lineno}: a copy would train, too")

    shared, fork = _shared(), os.fork
    before = {name: get() for name, (get, _) in shared.items()}
    try:
        if not may_fork:
            os.fork = refuse
        yield
    finally:
        os.fork = fork
        changed = {name: now for name, (get, _) in shared.items() if (now := get()) != before[name]}
        # Undone before the error is raised: the run may go on without this piece.
        for name in changed:
            shared[name][1](before[name])
    for name, now in changed.items():
        raise Misbehaved(f"{what} changed {name} from {before[name]} to {now}, for all of the run; leave it as it is")


def _shared() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return what all code of this process shares: how it is read and set."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "the working directory": (working_directory, os.chdir),
    }
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            found[f"who handles {number.name}"] = (partial(signal.getsignal, number), partial(signal.signal, number))
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "set_default_device"):
        found["torch's default type"] = torch.get_default_dtype, torch.set_default_dtype
        found["torch's default device"] = torch.get_default_device, partial(_set_device, torch)
        found["torch's gradients"] = torch.is_grad_enabled, torch.set_grad_enabled
        found["torch's float32 products"] = (
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision,
        )  # fmt: skip
    return found


def working_directory() -> str:
    """Return the working directory; "." where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return "."


def _set_device(torch: Any, device: Any) -> None:
    """Set the default device; no mode, which would slow every call, stands for the processor."""
    torch.set_default_device(None if device.type == "cpu" else device)


def run_as_module(path: Path, name: str) -> ModuleType:
    """Run the file under this module name and return the module; the name must be none that others import.

    Args:
        path: A file whose name ends in ``.py``.

    Raises:
        BaseException: The file raised it; the module name is free again then.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        with one_process():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_as_module(name: str) -> ModuleType:
    """Import a module of the user's by its name, as `importlib.import_module` does, within `one_process`."""
    with one_process():
        return importlib.import_module(name)
