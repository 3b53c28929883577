"""Files of a model are read by libraries, which raise whatever they trip over; whoever reads one gets a ModelError."""

from collections.abc import Iterator
from contextlib import contextmanager

from gnomon.errors import ModelError


@contextmanager
def parsed(said: str, *passing: type[Exception]) -> Iterator[None]:
    """Turn any error of the block into a ModelError that begins with ``said``; one of ours, or ``passing``, stays.

    A damaged config.json alone makes transformers raise nine kinds of error, from OSError to ZeroDivisionError.
    """
    stays: tuple[type[Exception], ...] = (ModelError, MemoryError, *passing)
    try:
        yield
    except stays:
        raise
    except Exception as error:
        raise ModelError(f"{said}: {first_line(error)}") from error


@contextmanager
def untrusted(who: str, key: str) -> Iterator[None]:
    """Say of a model whose own code was not run which ``key`` would let it; any other error passes."""
    try:
        yield
    except ModelError as error:
        # transformers says so in words alone.
        if "custom code" not in str(error):
            raise
        raise ModelError(
            f"{who} brings its own code, which is not run; read it, and set {key} = true if you trust it"
        ) from error


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says.

    >>> first_line(ValueError("a\\nb")), first_line(KeyError())
    ('ValueError: a', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
