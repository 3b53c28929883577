"""Options that several verbs share: ``--restarts N`` and ``--cluster WHERE``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gnomon.core.redaction import for_people
from gnomon.training.supervisor import supervised


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster`` to ``parser``."""
    parser.add_argument(
        "--cluster",
        metavar="WHERE",
        help="ray starts a Ray cluster here; auto, HOST:PORT, ray://HOST:PORT join one",
    )


def cluster_overrides(parser: argparse.ArgumentParser, where: str | None) -> list[str]:
    """Return the override for ``--cluster``; end the program for an empty place."""
    if where == "":
        parser.error("--cluster needs a place: ray, auto, HOST:PORT or ray://HOST:PORT")
    return [] if where is None else [f'cluster="{where}"']


def add_restarts(parser: argparse.ArgumentParser) -> None:
    """Add ``--restarts``, and the hidden option by which a run reports to its supervisor."""
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="after a fault (a crash, out of memory, a lost engine) go on by itself, at most N times (default: 0)",
    )
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)


def restarted(arguments: Sequence[str], run: Path, restarts: int) -> int:
    """Run ``gnomon ARGUMENTS``, which trains in ``run``, again after each fault; return the exit code."""

    def say(line: str) -> None:
        print(for_people(f"gnomon {arguments[0]}: {line}"), file=sys.stderr, flush=True)

    return supervised(arguments, run, restarts, say)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 on, not {text!r}")
    return int(text)
