"""Reasoning-gym items made in a process of their own, so that the same settings give the same items.

Some generators iterate over sets of strings, whose order Python changes from process to process; others
draw from, or seed, the global random generators, or execute code snippets that print and write files. Here the string
hash is fixed, the global generators are seeded for each item, and nothing of it touches the training process or
its folder.
Request and items cross as JSON in which tuples and keys that are no text survive (`codec`).
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time
from typing import Any

from gnomon.core.errors import DatasetError
from gnomon.core.processes import codec

# Found by comparing 24 items of all generators of reasoning-gym 0.1.25 under two string hashes.
# codeio executes its snippets; about one item in sixty reads a clock and still differs.
GENERATORS = frozenset(
    {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "pool_matrix",
     "ransom_note", "word_ladder"}
)  # fmt: skip
_CHILD = "from gnomon.tasks.isolated import serve; serve()"


def generate_in_subprocess(generator: str, parameters: Mapping[str, Any], seed: int, size: int) -> list[dict[str, Any]]:
    """Return the ``size`` items of a generator, made in one child process.

    Their values are what `json_safe` makes of them. Takes about two seconds to start, and then as long as the generator
    needs for all items.

    Raises:
        DatasetError: Generation failed; the message holds the last line of the child's error output.
    """
    request = {"generator": generator, "parameters": dict(parameters), "seed": seed, "size": size}
    # Absolute, since the child starts in another folder; the empty entry, which means the current one, is left out.
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path if p)
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", _CHILD]
    # Some generators write files where they stand.
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            command, input=codec.encode(request), capture_output=True, env=environment, cwd=folder, check=False
        )
    if child.returncode != 0:
        lines = child.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise DatasetError(
            f"reasoning-gym generator '{generator}' failed with {dict(parameters)}: {lines[-1]}; "
            "change its parameters, or leave it out"
        )
    items: list[dict[str, Any]] = codec.decode(child.stdout)["items"]
    return items


def serve() -> None:
    """Read one request from standard input, write its items to standard output: the child's whole work."""
    request = codec.decode(sys.stdin.buffer.readline())
    seed, size = request["seed"], request["size"]
    # Snippets that print would break the one line of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        import numpy as np
        import reasoning_gym

        source = reasoning_gym.create_dataset(request["generator"], seed=seed, size=size, **request["parameters"])
        items = []
        for index in range(size):
            # Before each item and not once: item i must not depend on how much the items before it drew.
            random.seed(seed + index)
            np.random.seed(seed + index)
            items.append(json_safe(source[index]))
    sys.stdout.buffer.write(codec.encode({"items": items}))


def json_safe(value: Any) -> Any:
    """Return ``value`` such that ``json.dumps`` accepts it, changed as little as possible.

    Tuples and integer keys stay what they are (``json.dumps`` writes both), because scorers compare with
    them. Subclasses of str become str, sets become sorted lists, dates their ISO form, bytes hexadecimal,
    the rest text.

    >>> json_safe({"when": date(2026, 1, 2), 3: (1, {2, 1})})
    {'when': '2026-01-02', 3: (1, [1, 2])}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_json_key(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(json_safe(item) for item in value)
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((json_safe(item) for item in value), key=repr)
    if isinstance(value, date | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _json_key(key: Any) -> Any:
    return key if key is None or type(key) in (str, bool, int, float) else str(key)
