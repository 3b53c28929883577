"""Start a private Ray cluster on this machine for one run, by `ray start`, and connect to it."""

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gnomon.cluster.joining import connect
from gnomon.cluster.reaper import FAREWELL
from gnomon.core.errors import ConfigError
from gnomon.core.http import LOOPBACK

# Ray's switch for systems whose firewalls ask; switched off, Ray listens and connects on the loopback interface only.
_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_SWEEPING_SECONDS = 20.0
_LONGEST_PATH, _SHORT_PATH = 16, "/tmp"
# What Ray reads when it is imported.
_IMPORT = {_SWITCH: "0", "RAY_AUTH_MODE": "token"}
_SERVERS = {
    **_IMPORT,
    # Ray notices a dead or hanging node within 20 s with these numbers, and within a minute with its defaults.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "40",
}
# The system chooses the workers' ports.
_OPTIONS = ("--min-worker-port=0", "--max-worker-port=0", "--include-dashboard=false", "--disable-usage-stats")


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
    before: Mapping[str, str | None]

    def end(self) -> None:
        """End the cluster's servers, remove its files and restore the environment."""
        self.folder.end()
        _restore(self.before)


@functools.cache
def loopback_ray(imported: Callable[[], Any]) -> Any:
    """Import ray for a cluster on the loopback interface that asks for a key.

    Args:
        imported: Imports ray.

    Raises:
        ConfigError: If this program imported ray before.
    """
    before = {name: os.environ.get(name) for name in _IMPORT}
    if "ray" in sys.modules and before != _IMPORT:
        raise ConfigError(
            "this program imported Ray before, which then shows no key and does not look on loopback; set "
            f"{' and '.join(f'{name}={value}' for name, value in _IMPORT.items())} in its environment, "
            "or run `ray start --head` and set cluster.address"
        )
    os.environ.update(_IMPORT)
    try:
        return imported()
    finally:
        _restore(before)


def start(ray: Any, cpus: int, gpus: int, seconds: float) -> StartedCluster:
    """Start a cluster on this machine and connect to it.

    Args:
        ray: The ray module, as `loopback_ray` imports it.
        cpus: CPUs, as Ray counts them.
        gpus: GPUs.
        seconds: Time limit of the start, and again of the connection.

    Raises:
        ConfigError: If the cluster does not start in time.
    """
    if ray.is_initialized():
        raise ConfigError("this program uses a Ray cluster already; call ray.shutdown() first, or name its address")
    # Every user can read Ray's default folder, so use a private one.
    changed = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    started = StartedCluster(Folder.made(), {name: os.environ.get(name) for name in changed})
    try:
        why = _begin(ray, started.folder.path, cpus, gpus, seconds)
    except BaseException:
        started.end()
        raise
    if why:
        started.end()
        raise ConfigError(
            f"Ray cannot be started on this machine ({why}); set cluster.start_seconds higher, or remove cluster"
        )
    return started


def _begin(ray: Any, folder: Path, cpus: int, gpus: int, seconds: float) -> str:
    """Start servers and connect to them; return why this failed, or ""."""
    os.environ["RAY_AUTH_MODE"] = "token"
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_locked_away(folder / "key"))
    port, client_port = _free_ports(2)
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", *_OPTIONS]
    command += [f"--port={port}", f"--ray-client-server-port={client_port}", f"--temp-dir={folder / 'ray'}"]
    # The reaper finds the command by its file, should this program end now.
    with (folder / "start.log").open("w+") as said:
        try:
            # A signal to the run's process group, such as a scheduler's SIGTERM, must reach the run only: the run
            # finishes its step and saves, and needs the servers for this. With --block they would end with the head.
            ran = subprocess.run(
                [*command, f"--num-cpus={cpus}", f"--num-gpus={gpus}"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_SERVERS},
                timeout=seconds,
                check=False,
                process_group=0,
            )
        except subprocess.TimeoutExpired:
            return f"it was not there after {seconds:g} s"
        said.seek(0)
        if ran.returncode:
            return next((line.strip() for line in reversed(said.readlines()) if line.strip()), f"exit {ran.returncode}")
    return connect(ray, f"{LOOPBACK}:{port}", seconds)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in opened]


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _locked_away(path: Path) -> Path:
    """Write the key to a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_key())
    return path


@functools.cache
def _key() -> str:
    # One key per program, because Ray reads the key once and keeps it.
    return secrets.token_hex(32)
