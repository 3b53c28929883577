"""An environment is played with made answers before a model loads, in a process as in training."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.processes.client import ForkServer, Limits
from gnomon.core.processes.server import Channel
from gnomon.core.progress import working
from gnomon.rewards.base import Sample
from gnomon.rollouts.env_workers import environment_fork_server
from gnomon.tasks import env_adapter
from gnomon.tasks.environment import EnvironmentConfig

FORM = (
    "an environment is `reset(**columns) -> str | None` and `step(text: str) -> Reply | str`, "
    'Reply(text="", reward=None, is_done=False, role="user")'
)
_OURS = f"({Path(env_adapter.__file__).name}:"
_ENDED = "its process ended"
_MOST_HUNG = 2
_TRIES = 3
"""Conversations with one answer, where what ends their processes is not the environment."""


@dataclass(frozen=True)
class _Played:
    """One conversation of one answer.

    Attributes:
        where: What failed, "" for nothing.
    """

    sample: Sample
    where: str = ""
    cause: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether it was called or returned what none may be, whatever the answer."""
        return _OURS in self.cause

    @property
    def said(self) -> str:
        """The failure in words."""
        answer = "" if self.where == "reset" else f" to the answer {self.sample.completion!r}"
        return f"{self.where} failed{answer}: {self.cause}"


def try_environment(plan: EnvironmentConfig, questions: Sequence[Sequence[Sample]]) -> tuple[str, ...]:
    """Play one turn with each made answer to a few questions; each conversation has an instance of its own.

    Returns:
        What should be said, a sentence each.

    Raises:
        ConfigError: Naming the cause and the protocol's line when it takes or returns what no environment may, or fails
            in every conversation.
    """
    fork_server = environment_fork_server(plan)
    with working(f"trying the environment {plan.names}"):
        try:
            fork_server.open()
            played = list(_conversations(fork_server, plan, [sample for answers in questions for sample in answers]))
        finally:
            fork_server.close()
    failed = [one for one in played if one.where]
    fatal = next((one for one in failed if one.is_wrong), None)
    if fatal is None and failed and len(failed) == len(played):
        fatal = failed[0]
    if fatal is not None:
        many = "each" if len(failed) == len(played) else str(len(failed))
        columns = ", ".join(map(str, fatal.sample.columns)) or "none"
        raise ConfigError(
            f"environment '{plan.names}': {fatal.said}\n"
            f"so it was in {many} of the {len(played)} conversations that were tried; the row's columns are {columns}\n"
            f"{FORM}"
        )
    if not failed:
        return ()
    return (
        f"environment '{plan.names}' fails in {len(failed)} of {len(played)} conversations that were tried; "
        f"{failed[0].said}; a reply that fails ends a rollout, which is graded as it is",
    )


def _conversations(fork_server: ForkServer, plan: EnvironmentConfig, samples: Sequence[Sample]) -> Iterator[_Played]:
    hung = 0
    for sample in samples:
        if hung >= _MOST_HUNG:
            return
        for _ in range(_TRIES):
            pid, connection = fork_server.fork()
            with closing(connection):
                played = _played(connection, plan, sample)
            how = fork_server.end(pid)
            if played.cause != _ENDED or not how.is_foreign:
                break
        if played.cause == _ENDED:
            played = replace(played, cause=f"its process {how.words}")
        hung += played.cause.startswith("no reply after")
        yield played


def _played(connection: socket.socket, plan: EnvironmentConfig, sample: Sample) -> _Played:
    channel = Channel(connection)
    connection.settimeout(Limits().start_seconds)
    hello, _ = channel.receive()
    if hello is None or hello["fault"] is not None:
        return _Played(sample, "its process", _ENDED if hello is None else str(hello["fault"]))
    columns = {"seed": 0, **sample.columns}
    requests: Mapping[str, dict[str, Any]] = {
        "reset": {"prompt": sample.prompt, "columns": columns, "luck": 0},
        "step": {"text": sample.completion},
        "close": {},
    }
    connection.settimeout(plan.timeout_seconds)
    for where, request in requests.items():
        try:
            channel.send({"id": where, "do": where, **request})
            said, _ = channel.receive()
        except TimeoutError:
            return _Played(sample, where, f"no reply after {plan.timeout_seconds:g} s (environment.timeout_seconds)")
        except (OSError, EOFError):
            said = None
        if said is None:
            return _Played(sample, where, _ENDED)
        if said["fault"] is not None:
            return _Played(sample, where, str(said["fault"]))
    return _Played(sample)
