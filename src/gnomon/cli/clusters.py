"""``--cluster WHERE``, of the verbs that take an experiment to a cluster or plan it there."""

import argparse


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
