"""Identify a model's remote code, so that the code that runs is the code that a user has trusted."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnomon.core.errors import ModelError
from gnomon.models.token_strings import parsed

_CONFIG, _ELSEWHERE = "config.json", "--"


def revision(model: str) -> str:
    """Return an identifier of a model's code; "" without code. Nothing is executed or downloaded.

    For a folder, this is the SHA-256 of all Python files with their names. For a hub model, it is the commit in the
    local cache, and the commit of every other repository in its ``auto_map``.

    Args:
        model: A folder, a hub name or a built-in name.

    Raises:
        ModelError: If the config cannot be read.
    """
    folder = Path(model).expanduser()
    config = folder / _CONFIG if folder.is_dir() else _cached(model)
    if config is None or not config.is_file():
        return ""
    with parsed(f"model '{model}': its {_CONFIG} cannot be read"):
        named = list(_texts(json.loads(config.read_text(encoding="utf-8")).get("auto_map")))
    if not named:
        return ""
    # The hub's cache names a snapshot's folder after its commit.
    own = _digest(folder) if folder.is_dir() else f"commit {config.parent.name}"
    # "OTHER/REPOSITORY--module.Class": an auto_map may name code of another repository.
    others = sorted({name.partition(_ELSEWHERE)[0] for name in named if _ELSEWHERE in name})
    return ", ".join([own, *(f"{other} {_commit(other)}" for other in others)])


def _texts(node: Any) -> Iterator[str]:
    """Yield the classes that an ``auto_map`` names."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for below in node.values() if isinstance(node, dict) else node:
            yield from _texts(below)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*.py")):
            # Name and size before the content, so that no content moves between files unseen.
            digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    except OSError as error:
        raise ModelError(f"the code in model folder '{folder}' cannot be read: {error}") from error
    return f"sha256 {digest.hexdigest()}"


def _commit(repository: str) -> str:
    config = _cached(repository)
    return "of no known commit" if config is None else f"commit {config.parent.name}"


def _cached(name: str) -> Path | None:
    """Return a model's config in the local hub cache; its folder is named after the commit."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _CONFIG)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
