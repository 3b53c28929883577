"""An exception in one line."""

import os
import traceback
from pathlib import Path

from gnomon.core.redaction import for_people, without_secrets

LONGEST = 300


def exception_text(error: BaseException) -> str:
    """Return type, message and the frame that raised: "ValueError: bad (rewards.py:3 in score)".

    >>> exception_text(ValueError("bad"))
    'ValueError: bad'
    """
    message = " ".join(without_secrets(str(error)).split())
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # The text of a SyntaxError names file and line; the last frame would be the importer's.
    if isinstance(error, SyntaxError) and error.filename:
        return shorten(said)
    if not frames:
        return shorten(said)
    last = frames[-1]
    place = f"{shorten(said)} ({Path(last.filename).name}:{last.lineno} in {last.name})"
    if isinstance(error, KeyError) and last.filename == type(os.environ).__getitem__.__code__.co_filename:
        return (
            f"{place}: not among the variables of this process; graders and environments see those that "
            "grading.environment names"
        )
    return place


def shorten(text: str) -> str:
    """Return ``text`` on one line of at most 300 characters, without secrets."""
    line = for_people(" ".join(without_secrets(text).split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
