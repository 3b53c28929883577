"""Which runs this user began: a seal in a run's card that only this user's key makes.

A run directory can come from any user. What looks at one (`report`, `watch`, `doctor`) runs no code that it names;
`evaluate` and `compare` need a run's own rewards, and run them when this user began the run or went on with it.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.tables import value_at
from gnomon.models.place import cache_root
from gnomon.records.reading import RunRecord
from gnomon.records.run_card import sessions_of

TRUST = "GNOMON_TRUST_RUNS"
"""The environment variable that lets `evaluate` and `compare` run what another user's run names, where it is 1."""
_PYTHON = "python"  # the tool of gnomon's own


def named_code(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what an experiment's table may have executed, each with what it is; nothing is imported to know it.

    Args:
        table: As it was read, in any spelling. A text with a colon within the algorithm or a reward counts as a name of
            code, so more may be named than would be executed, and never less.
    """
    # The table is read raw and not as an experiment: building one would import what it names.
    named = [f"piece {text}" for text in _texts(table.get("algorithm")) if ":" in text]
    named += [f"reward {text}" for text in _texts(_functions(table.get("rewards"))) if ":" in text]
    judges = [one for one in _tables([table.get("rewards"), value_at(table, "evaluation.tasks")]) if "url" in one]
    # A judge is sent the prompts, the answers and the value of any variable that the table names.
    named += [f"judge at {one.get('url')} with the key in {one.get('variable') or 'no variable'}" for one in judges]
    named += [f"environment {text}" for text in _texts(value_at(table, "environment.use")) if text]
    named += [f"tool {text}" for text in _texts(value_at(table, "environment.tools")) if text != _PYTHON]
    named += [f"interpreter {text}" for text in _texts(value_at(table, "engine.python")) if text]
    # A server is sent this user's key and the prompts, and what it answers is scored.
    named += [f"server at {text}" for text in _texts(value_at(table, "engine.server")) if text not in ("", "start")]
    # What is said to a cluster and what it answers are pickles, which run what they name.
    cluster = table.get("cluster")
    reached = cluster.get("address") if isinstance(cluster, Mapping) else cluster
    named += [f"cluster at {text}" for text in _texts(reached) if ":" in text]
    if any(each.get("trust_remote_code") is True for each in _tables(table)):
        named.append(f"model {table.get('model')}, whose own code trust_remote_code lets run")
    return tuple(dict.fromkeys(named))


def seal(table: Mapping[str, Any]) -> str:
    """Return what this user's key makes of the code that a table names; "" where it names none."""
    named = named_code(table)
    return hmac.new(_key(), json.dumps(named).encode(), hashlib.sha256).hexdigest() if named else ""


def check_own(run: Path, table: Mapping[str, Any]) -> None:
    """Let a run's own code run if this user sealed the run.

    Args:
        table: Of the run's experiment.toml, as it was read.

    Raises:
        ConfigError: The message names the code and how to do without it.
    """
    named = named_code(table)
    if not named or os.environ.get(TRUST) == "1":
        return
    own = seal(table)
    brought = [session.get("seal") for session in sessions_of(RunRecord(run).card()) if isinstance(session, Mapping)]
    # A run is this user's own when they began it or went on with it, so any session's seal will do. The comparison
    # takes the same time for every text.
    if any(isinstance(text, str) and hmac.compare_digest(text.encode(), own.encode()) for text in brought):
        return
    some = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
    raise ConfigError(
        f"{run} was not begun by this user on this machine, and its experiment.toml names code: {some}\n"
        f"Read that code first; to run it, set {TRUST}=1. To evaluate the weights without it, name the checkpoint's\n"
        f"folder and a task of your own: gnomon evaluate {quote(f'{run}/checkpoints/step-N')} --task NAME"
    )


def _key() -> bytes:
    """Return this user's key, made at the first use."""
    path = cache_root() / "own-key"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # EXCL decides which of two processes makes the key; 0600 before the first byte is written.
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process was first
        return path.read_bytes()
    with os.fdopen(made, "wb") as file:
        file.write(secrets.token_bytes(32))
    return path.read_bytes()


def _nodes(node: Any) -> Iterator[Any]:
    """Yield a node and everything below it, keys left out."""
    yield node
    below = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    for inner in below:
        yield from _nodes(inner)


def _texts(node: Any) -> Iterator[str]:
    return (each for each in _nodes(node) if isinstance(each, str))


def _tables(node: Any) -> Iterator[Mapping[str, Any]]:
    return (each for each in _nodes(node) if isinstance(each, Mapping))


def _functions(rewards: Any) -> list[Any]:
    """Return what of the rewards may name a function: patterns of formats hold colons, and are no names."""
    nodes = rewards if isinstance(rewards, list) else [rewards]
    skipped = ("pattern", "part")
    return [[v for k, v in n.items() if k not in skipped] if isinstance(n, Mapping) else n for n in nodes]
