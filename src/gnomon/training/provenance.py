"""Detect changes since the last session of a run: experiment, versions, hardware, the user's code."""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.algorithms.build import to_table as algorithm_table
from gnomon.config.experiment import Experiment
from gnomon.core.atomic_files import read_plain, read_plain_text
from gnomon.core.errors import ModelError
from gnomon.core.redaction import shortened
from gnomon.core.tables import parse_toml, reach, reach_table
from gnomon.models.remote_code import revision
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.reading import RunRecord
from gnomon.records.run_card import Card, newest_session
from gnomon.rewards.function import UserFunction
from gnomon.rewards.judge import RubricJudge
from gnomon.tasks.environment import PYTHON, SHELL

_MOST_DIFFERENCES, _LONGEST_VALUE = 5, 80
_COMMIT = 12
_MACHINE = {"device": "the device", "cpu": "the processor", "threads": "the number of threads"}


def is_begun(run_dir: Path, asked: str) -> bool:
    """Whether a run of this very experiment, as its file has it, is there: the same command goes on with it."""
    try:
        return read_plain(RunDirectory(run_dir).experiment) == asked.encode()
    except OSError:
        return False


def other_experiment(run_dir: Path, asked: str) -> str:
    """Return what differs between the experiment of the run that is there and this file; "" where none can be read."""
    try:
        there = parse_toml(read_plain_text(RunDirectory(run_dir).experiment))
    except (OSError, ValueError, RecursionError):
        return ""
    return listed(differences(there, tomllib.loads(asked))) if there else ""


def changed_settings(there: Any, asked: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the leaves in which two tables differ: path to both values, None where a table has none.

    >>> changed_settings({"a": {"b": 1}}, {"a": {"b": 2}, "c": "x"})
    {'a.b': (1, 2), 'c': (None, 'x')}
    """
    if isinstance(there, dict) and isinstance(asked, dict):
        keys = sorted(there.keys() | asked.keys())
        below = [changed_settings(there.get(key), asked.get(key), f"{path}.{key}".lstrip(".")) for key in keys]
        return {place: values for found in below for place, values in found.items()}
    return {} if there == asked else {path: (there, asked)}


def differences(there: Any, asked: Any) -> list[str]:
    """Return what differs between two tables, one sentence a leaf.

    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": "x"})
    ['a.b is 1 there and 2 here', "c is nothing there and 'x' here"]
    """

    def said(value: Any) -> str:
        return "nothing" if value is None else shortened(repr(value), _LONGEST_VALUE)

    return [f"{path} is {said(a)} there and {said(b)} here" for path, (a, b) in changed_settings(there, asked).items()]


def listed(found: Sequence[str]) -> str:
    """Return the first few differences as one text, and how many more there are.

    >>> listed(["a", "b"])
    'a; b'
    """
    more = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def latest_session(run: Path) -> Mapping[str, Any]:
    """Return what the card says of the run's newest session; nothing where it is new, or its card is damaged."""
    return newest_session(RunRecord(run).card())


def changes(before: Mapping[str, Any], now: Card) -> list[str]:
    """Return what a session is told that does not run on what the one before it ran on; nothing where it does.

    Both are sound runs, but the bits that `Card.reproducibility` promises are of equal versions, processor and threads.
    """
    there = reach_table(before, "versions")
    found = [_went(name, there[name], now.versions[name]) for name in now.versions if name in there]
    found += [_went(called, before[key], getattr(now, key)) for key, called in _MACHINE.items() if key in before]
    # Files that were changed, or an installed copy, have no commit of their own.
    source = _went("gnomon's source", _short(before.get("source")), _short(now.source))
    commits = (_short(reach(code, "gnomon.commit")) for code in (before.get("code"), now.code))
    found.append(_went("gnomon's source", *commits) or source)
    said = [change for change in found if change]
    told = [f"since the last session {', '.join(said)}: numbers can come out otherwise than without"] if said else []
    if before.get("settings", now.settings) != now.settings:
        told.append("the run's experiment.toml was edited since the last session: steps from here on are another's")
    return told


def say_whose_code(experiment: Experiment, console: Console) -> None:
    """Say what code that is not gnomon's is about to run. What an algorithm names was said when that was loaded."""
    for code in foreign_code(experiment):
        console.say(f"runs your code: {code}")
    tasks = (reward for task in experiment.evaluation.tasks for reward in task.rewards)
    for judge in (r.verifier for r in (*experiment.rewards, *tasks) if isinstance(r.verifier, RubricJudge)):
        console.say(f"asks a judge: {judge.url}, {f'with the key in {judge.variable}' if judge.variable else 'no key'}")
    for model, own in own_code_of(experiment).items():
        console.warn(f"the own code of the model {model} may run (trust_remote_code): {own or 'it brings none'}")


def foreign_code(experiment: Experiment) -> tuple[str, ...]:
    """Return the user's own functions and classes that a run executes, each with what it is.

    They are as the experiment names them, and no name is looked for anywhere else, so nothing else of the user's runs.
    """
    named = [f"reward {r.verifier.function}" for r in experiment.rewards if isinstance(r.verifier, UserFunction)]
    named += [f"engine {experiment.engine.kind}"] if experiment.engine.is_own else []
    plan = experiment.environment
    if plan is not None:
        named += [f"environment {plan.use}"] if plan.use else []
        named += [f"agent {plan.names}"] if plan.command else []
        named += [f"tool {tool}" for tool in plan.tools if tool not in (PYTHON, SHELL)]
    return (*named, *(f"piece {piece}" for piece in _own_pieces(algorithm_table(experiment.algorithm))))


def sources_of(experiment: Experiment) -> dict[str, str]:
    """Return the user's files that a run executes, as the experiment names them, each with its SHA-256."""
    files = {code.partition(" ")[2].rpartition(":")[0] for code in foreign_code(experiment)}
    there = {name: Path(name) for name in sorted(files) if name.endswith(".py") and Path(name).is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()}


def own_code_of(experiment: Experiment) -> dict[str, str]:
    """Return the models whose own code may run, policy and critic, each with what tells that code from any other."""
    critic = experiment.algorithm.critic
    trusted = [experiment.model] if experiment.trust_remote_code else []
    trusted += [critic.initial] if critic is not None and critic.trust_remote_code else []
    return {model: revision(model) for model in trusted}


def refuse_other_code(before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Refuse a model's own code that is not what ran in the session before: nobody has said that it is trusted.

    Raises:
        ModelError: If it is another; none of it has run.
    """
    there = reach_table(before, "trusted_models")
    for model, own in now.items():
        if there.get(model, own) != own:
            raise ModelError(
                f"the own code of the model {model} is not what this run trusted so far: that was "
                f"{there[model] or 'none'}, and it is {own or 'none'} now; bring the former back, or read the new one "
                "and start another run with --run-dir DIR"
            )


def changed_code(before: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for each of the user's files that is not as it was in the session before."""
    there = reach_table(before, "sources")
    return [
        f"{name} has changed since this run last used it: earlier steps were made with the former code; to make all "
        "of them with the new one, start another run with --run-dir DIR"
        for name, digest in sources.items()
        if there.get(name, digest) != digest
    ]


def _own_pieces(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(piece := node.get("piece"), str) and ":" in piece:
            yield piece
        node = list(node.values())
    for below in node if isinstance(node, list) else ():
        yield from _own_pieces(below)


def _went(what: str, there: Any, here: Any) -> str:
    is_change = there is not None and here is not None and there != here
    return f"{what} went from {shortened(str(there), _LONGEST_VALUE)} to {here}" if is_change else ""


def _short(said: Any) -> str | None:
    return said[:_COMMIT] if isinstance(said, str) and said else None
