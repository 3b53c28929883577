"""Keep transformers' own progress bars and reports off the terminal, where our progress line is."""

from collections.abc import Iterator
from contextlib import contextmanager

_SILENT = 50  # logging.CRITICAL: nothing that transformers says of a loading is so urgent


@contextmanager
def no_bars() -> Iterator[None]:
    """Switch transformers' progress bars off inside the block."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextmanager
def no_report() -> Iterator[None]:
    """Keep what transformers says about a loading to itself, where gnomon says it: its bars, warnings and tables."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(_SILENT)
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(level)
