"""Start a private Ray cluster on this machine for one run."""

import atexit
import contextlib
import functools
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gnomon.cluster.reaper import FAREWELL
from gnomon.core.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_SWEEPING_SECONDS = 20.0
_LONGEST_PATH, _SHORT_PATH = 16, "/tmp"
_KEYS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
# Ray notices a dead or hanging node within 20 s with these numbers, and within a minute with its defaults.
_WATCHED = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 2000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 40,
}


@dataclass(frozen=True)
class Folder:
    """A private folder and its reaper, the process that removes the folder however this program ends."""

    path: Path
    sweeper: "subprocess.Popen[bytes]"

    @classmethod
    def made(cls) -> Self:
        """Make a new folder and start its reaper."""
        # Paths of Unix sockets have a small limit.
        usual = tempfile.gettempdir()
        path = Path(tempfile.mkdtemp(prefix="gnomon-ray-", dir=usual if len(usual) <= _LONGEST_PATH else _SHORT_PATH))
        sweeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "gnomon.cluster.reaper", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        return cls(path, sweeper)

    def end(self) -> None:
        """Remove the folder."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.sweeper.communicate(FAREWELL, _SWEEPING_SECONDS)
        # Ray's threads in this process may have written to the folder again.
        shutil.rmtree(self.path, ignore_errors=True)
        atexit.register(shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class StartedCluster:
    """A started cluster: its folder and the former environment variables."""

    folder: Folder
    before: dict[str, str | None]
    is_over: threading.Event

    def end(self) -> None:
        """Remove the cluster's files and restore the environment."""
        self.folder.end()
        self.is_over.set()
        _reachable(True)
        for name, value in self.before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def start(ray: Any, cpus: int, gpus: int, seconds: float) -> StartedCluster:
    """Start a cluster on this machine.

    Args:
        ray: The ray module.
        cpus: CPUs, as Ray counts them.
        gpus: GPUs.
        seconds: Time limit.

    Raises:
        ConfigError: If the cluster does not start in time.
    """
    if ray.is_initialized():
        raise ConfigError("this program uses a Ray cluster already; call ray.shutdown() first, or name its address")
    before = {name: os.environ.get(name) for name in _KEYS}
    # Without RAY_AUTH_MODE Ray turns authentication on by itself and reads the key.
    os.environ.pop("RAY_AUTH_MODE", None)
    # Every user can read Ray's default folder, so use a private one.
    folder = Folder.made()
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_locked_away(folder.path / "key"))
    started = StartedCluster(folder, before, threading.Event())
    fault: list[BaseException] = []
    is_there = threading.Event()

    def begin() -> None:
        try:
            _initialize(ray, cpus, gpus, folder.path / "ray")
        except BaseException as error:
            fault.append(error)
        is_there.set()
        # Ray's servers die with the thread that started them, so keep the thread alive.
        started.is_over.wait()

    threading.Thread(target=begin, name="gnomon-ray", daemon=True).start()
    try:
        is_late = not is_there.wait(seconds)
    except BaseException:
        started.end()
        raise
    if is_late or fault:
        started.end()
        why = f"{type(fault[0]).__name__}: {fault[0]}" if fault else f"it was not there after {seconds:g} s"
        raise ConfigError(
            f"Ray cannot be started on this machine ({why}); set cluster.start_seconds higher, or remove cluster"
        )
    return started


def _initialize(ray: Any, cpus: int, gpus: int, folder: Path) -> None:
    _reachable(False)
    with _in_groups_of_their_own():
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="gnomon",
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(folder),
            _system_config=_WATCHED,
        )


@contextlib.contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Make each server that Ray starts the leader of its own process group.

    A signal to the run's group, such as a scheduler's SIGTERM, must reach the run only: the run finishes its step and
        saves,
    and needs Ray's servers for this. The servers end with the run anyway.
    """
    from ray._private import services

    here = vars(services)
    plain = here["ConsolePopen"]
    here["ConsolePopen"] = functools.partial(plain, process_group=0)
    try:
        yield
    finally:
        here["ConsolePopen"] = plain


def _reachable(is_by_others: bool) -> None:
    # Ray's switch for systems whose firewalls ask; switched off, Ray listens on the loopback interface only.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = is_by_others


def _locked_away(path: Path) -> Path:
    """Write the key to a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_key())
    return path


@functools.cache
def _key() -> str:
    # One key per program, because Ray reads the key once and keeps it.
    return secrets.token_hex(32)
