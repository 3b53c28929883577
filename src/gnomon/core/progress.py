"""Progress reporting, callable from any layer.

Code that reads a dataset, compares a checkpoint or starts a server lies far below the code that prints. Such code
reports what it does and how far it is, with `show_progress` or `track`. An open `Console` shows the reports; without a
console nothing is shown.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Steps(Protocol):
    """A stretch of work that is under way."""

    def advance(self, count: int = 1) -> None:
        """Note that so many more are done."""


class Show(Protocol):
    """Shows a stretch of work for as long as the block lasts."""

    def __call__(self, text: str, total: int, unit: str, is_brief: bool, /) -> AbstractContextManager[Steps]:
        """Begin to show it; the parameters are those of `show_progress`."""


class _NoDisplay:
    def advance(self, count: int = 1) -> None:
        """Nobody looks."""


# One list for the process, not a context variable: work in threads is shown as well.
_SHOWN: list[Show] = []


@contextmanager
def use_progress(show: Show) -> Iterator[None]:
    """Let ``show`` have what any thread of this process works on during the block; the latest one open has it all."""
    _SHOWN.append(show)
    try:
        yield
    finally:
        _SHOWN.remove(show)


@contextmanager
def show_progress(text: str, total: int = 0, unit: str = "", is_brief: bool = False) -> Iterator[Steps]:
    """Say that ``text`` is being done, for as long as the block lasts.

    Args:
        total: Number of units to do; 0 when the number is not known.
        unit: "bytes" for sizes, else "".
        is_brief: Whether no line is left in a log, for work that is repeated often.

    >>> with show_progress("adding", total=3) as steps:
    ...     steps.advance(2)
    """
    if not _SHOWN:
        yield _NoDisplay()
        return
    with _SHOWN[-1](text, total, unit, is_brief) as steps:
        yield steps


def track(items: Iterable[T], text: str, total: int, is_brief: bool = False) -> Iterator[T]:
    """Yield ``items``, of which there are ``total``, and say how many have been gone through.

    >>> sum(track([1, 2, 3], "adding", 3))
    6
    """
    with show_progress(text, total, is_brief=is_brief) as steps:
        for item in items:
            yield item
            steps.advance()


def log_to(tell: Callable[[str], None]) -> Show:
    """Return what tells each text once, when the work begins: for programs without a console.

    >>> with use_progress(log_to(print)), show_progress("adding"):
    ...     pass
    adding ...
    """

    @contextmanager
    def show(text: str, total: int, unit: str, is_brief: bool, /) -> Iterator[Steps]:
        if not is_brief:
            tell(f"{text} ...")
        yield _NoDisplay()

    return show
