"""``--restarts N``, of the verbs that train."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gnomon.redaction import for_people
from gnomon.restarting import supervised


def add_restarts(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take it, and where a run reports to whoever restarts it."""
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="after a fault (a crash, out of memory, a lost engine) go on by itself, at most N times (default: 0)",
    )
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)


def restarted(arguments: Sequence[str], run: Path, restarts: int) -> int:
    """Run ``gnomon ARGUMENTS``, which trains in ``run``, and again after a fault; return the exit code."""

    def say(line: str) -> None:
        print(for_people(f"gnomon {arguments[0]}: {line}"), file=sys.stderr, flush=True)

    return supervised(arguments, run, restarts, say)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 on, not {text!r}")
    return int(text)
