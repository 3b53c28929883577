"""``--restarts N``, of the verbs that train."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gnomon.core.redaction import for_people
from gnomon.training.supervisor import supervised

# ``--cluster WHERE``, of the verbs that take an experiment to a cluster or plan it there.


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take it."""
    parser.add_argument(
        "--cluster",
        metavar="WHERE",
        help="ray starts a Ray cluster here; auto, HOST:PORT, ray://HOST:PORT join one",
    )


def cluster_overrides(parser: argparse.ArgumentParser, where: str | None) -> list[str]:
    """Return what it stands for, as ``key=value``; ends the program where it says nothing."""
    if where == "":
        parser.error("--cluster needs a place: ray, auto, HOST:PORT or ray://HOST:PORT")
    return [] if where is None else [f'cluster="{where}"']


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
