"""The run card: what a run ran on, and what it promises about being run again.

Only what is listed here is written: no environment variable, no token, no command line.
"""

import datetime
import functools
import hashlib
import json
import os
import platform
import secrets
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import read_plain_text, write_json
from gnomon.core.redaction import without_secrets
from gnomon.core.tables import packaged_toml, reach_table

PACKAGES = (
    "gnomon", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft",
    "reasoning-gym", "math-verify", "datasets", "pyarrow", "ray", "llguidance",
)  # fmt: skip
_LONGEST_END = 2000
PROMISES: Mapping[str, str] = packaged_toml("gnomon.records", "promises.toml")
"""What a run promises about being run again, by what weakens it."""


@dataclass(frozen=True)
class Card:
    """One session of a run: what it was started with. `run_card` fills it in.

    Attributes:
        device: As torch names it, with the processor's own name.
        threads: Of torch; sums depend on it.
        precision: Of the network's arithmetic.
        reproducibility, sandbox: The level, and what it means, in words.
        code: Commit of gnomon's source and of the working directory, each with ``dirty`` when files differ from it;
            None where there is no repository.
        source: SHA-256 of gnomon's own Python and C files, in a repository or not.
        slow: What is computed by a slower way than there could be, with the factor; what a trial on the loaded model
            finds comes behind it (`write_slow`).
        engines: Who draws the answers, with which weights, and whether it releases them while the learner works.
        native: What tells the functions in C, of a compiler for this processor, from any others; "" where there are
            none.
        foreign_code: The user's functions that it runs.
        seal: Shows that this user began it (`records/ownership.py`).
        trusted_models: Models whose own code may run, each with what tells that code from any other.
        sources: The user's files that it runs, each with its SHA-256.
        questions: A stamp of what it is trained on.
        settings: SHA-256 of the run's experiment, as the session found it.
        parent: The checkpoint of the run that it continues; "" for a run that continues none.
        cluster: What it computes on beside this machine, and who is let in there; "" for none.
    """

    started: str
    versions: Mapping[str, str]
    platform: str
    cpu: str
    cpu_count: int
    device: str
    threads: int
    seeds: Mapping[str, int]
    precision: str
    reproducibility: str
    sandbox: str
    code: Mapping[str, Mapping[str, Any] | None]
    foreign_code: Sequence[str] = ()
    seal: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    trusted_models: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    questions: str = ""
    settings: str = ""
    parent: str = ""
    cluster: str = ""
    native: str = ""
    engines: str = ""
    slow: Sequence[str] = ()


def run_card(
    device: str,
    threads: int,
    seeds: Mapping[str, int],
    precision: str,
    sandbox: str = "none: no model-written code",
    reproducibility: str | None = None,
) -> Card:
    """Return the card of a session that starts now; ``reproducibility`` is that of the device if nothing weakens it."""
    level = reproducibility or PROMISES["exact" if device == "cpu" else "lossless"]
    return Card(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **installed(PACKAGES)},
        platform=platform.platform(terse=True),
        cpu=cpu_name(),
        cpu_count=os.cpu_count() or 1,
        device=device,
        threads=threads,
        seeds=dict(seeds),
        precision=precision,
        reproducibility=level,
        sandbox=sandbox,
        code={"gnomon": _own_commit(), "working_directory": commit_of(Path.cwd())},
        source=_own_source(),
    )


def write_card(path: Path, card: Card) -> None:
    """Write the card as JSON, at once; a resumed run adds its session under ``resumed`` and keeps the first."""
    own = asdict(card)
    # The first session stays at the top of the card, and resumed ones are listed in it.
    first = _first(path)
    resumed = [] if first is None else first.get("resumed", [])
    write_json(path, own if first is None else {**first, "resumed": [*resumed, own]})


def write_slow(path: Path, said: str) -> None:
    """Add to the newest session of a card a slower way that a trial on the loaded model found, once."""
    card = _first(path)
    # Each session tries its model again and may find the same.
    if card is not None and said not in (known := sessions_of(card)[-1].setdefault("slow", [])):
        known.append(said)
        write_json(path, card)


def write_end(path: Path, error: Exception) -> None:
    """Add to the newest session of a card, as "ended", the error that ended it; a session that is over without one was
    stopped on purpose, came to its end, or was killed.
    """
    card = _first(path)
    if card is not None:
        newest = sessions_of(card)[-1]
        newest["ended"] = without_secrets(f"{type(error).__name__}: {error}")[:_LONGEST_END]
        write_json(path, card)


def write_extension(path: Path, settings: str, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Add to the card, under "extended", that a run was given more steps, or a larger budget.

    Args:
        settings: SHA-256 of the experiment as it is now; the newest session is said to have had it, for all steps that
            it made are those of the longer run.
        changed: The settings that changed, with the value before and the value now.
    """
    card = _first(path)
    if card is not None:
        sessions_of(card)[-1]["settings"] = settings
        before = card.get("extended")
        card["extended"] = [*(before if isinstance(before, list) else []), {k: list(v) for k, v in changed.items()}]
        write_json(path, card)


def end_of(card: Mapping[str, Any]) -> str:
    """Return the error that ended the newest session of a card that was read; "" where it says none.

    >>> end_of({"ended": "LearnerError: gone", "resumed": [{"ended": "EngineError: lost"}, {}]})
    ''
    """
    said = newest_session(card).get("ended")
    return said if isinstance(said, str) else ""


def sessions_of(card: Mapping[str, Any]) -> list[Any]:
    """Return the sessions of a card that was read, the newest last; those that were resumed may be anything."""
    resumed = card.get("resumed")
    return [card, *(resumed if isinstance(resumed, list) else [])]


def newest_session(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the newest session of a card that was read; nothing where that is no object."""
    newest = sessions_of(card)[-1]
    return newest if isinstance(newest, Mapping) else {}


def read_card(path: Path) -> dict[str, Any]:
    """Return a run's card; empty where there is none, or none that can be read."""
    try:
        found = json.loads(read_plain_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def reward_digests(experiment: Mapping[str, Any], card: Mapping[str, Any]) -> dict[str, str]:
    """Return of each reward that an experiment names what tells it from others of that name.

    Args:
        experiment: A resolved experiment's table.
        card: The run's card, which knows the content of the user's files.

    Returns:
        Six digits by name: of settings but the weight, and of a file's content rather than its place.

    >>> here, there = ({"rewards": [{"kind": "numeric", "which": which}]} for which in ("last", "first"))
    >>> reward_digests(here, {}) == reward_digests(there, {}), list(reward_digests(here, {}))
    (False, ['numeric'])
    """
    sources = reach_table(newest_session(card), "sources")
    found: dict[str, str] = {}
    given = experiment.get("rewards")
    for table in given if isinstance(given, list | tuple) else ():
        if isinstance(table, Mapping):
            # A resolved experiment has what judges in a table of its own.
            table = {**reach_table(table, "verifier"), **table}
            file, _, function = str(table.get("function", "")).rpartition(":")
            # The weight changes the sum of rewards and not what this
            # reward judges; a file's place says nothing of its content.
            what = {key: value for key, value in table.items() if key not in ("weight", "function", "verifier")}
            # The run card has the digest of each file at the run's
            # beginning, since the file may have changed afterwards.
            said = json.dumps([sorted(what.items(), key=str), sources.get(file, file), function], default=str)
            name = str(table.get("name") or function or table.get("kind", "reward"))
            found[name] = hashlib.sha256(said.encode()).hexdigest()[:6]
    return found


def rejudged(card: Mapping[str, Any]) -> list[str]:
    """Return the user's files that judge a run's answers and changed between its first session and its newest."""
    first, newest = reach_table(card, "sources"), reach_table(newest_session(card), "sources")
    code = card.get("foreign_code")
    named = [str(each).partition(" ") for each in (code if isinstance(code, list | tuple) else ())]
    judges = {where.rpartition(":")[0] for what, _, where in named if what not in ("piece", "engine")}
    return [name for name, digest in first.items() if name in judges and newest.get(name, digest) != digest]


def file_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each Python file that is there, by its name."""
    there = {name: Path(name) for name in sorted(set(names)) if name.endswith(".py") and Path(name).is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()}


def questions_of(path: Path) -> str:
    """Return the stamp of the questions that a run began with; "" where its card says nothing."""
    said = read_card(path).get("questions")
    return said if isinstance(said, str) else ""


def _first(path: Path) -> dict[str, Any] | None:
    """Return the card that is there; one that cannot be read is set aside, for it ends no run."""
    if not path.exists():
        return None
    try:
        found = json.loads(read_plain_text(path))
        # Written again with the new session, so it must be what JSON can say.
        json.dumps(found, allow_nan=False)
        if isinstance(found, dict) and isinstance(found.get("resumed", []), list):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    path.rename(path.with_name(f"damaged-{secrets.token_hex(4)}-{path.name}"))
    return None


@functools.cache
def installed(packages: tuple[str, ...]) -> Mapping[str, str]:
    """Return the version of each package that is installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit_of(folder: Path) -> dict[str, Any] | None:
    """Return the commit that ``folder`` is at and whether tracked files differ from it, or None outside git."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


@functools.cache
def _own_commit() -> Mapping[str, Any] | None:
    # An installed copy may lie untracked in another repository: that commit says nothing about it.
    source = Path(__file__).resolve()
    tracked = _git(source.parent, "ls-files", "--error-unmatch", source.name)
    return None if tracked is None else commit_of(source.parent)


@functools.cache
def _own_source() -> str:
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".c", ".h")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    # Without this option `git status` would take the repository's lock, and disturb a commit that is being made.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()
