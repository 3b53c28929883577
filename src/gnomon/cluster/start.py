"""Start a private Ray cluster for one run or join another's, check its key, and detect that its head is gone."""

import atexit
import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gnomon.cluster.reaper import CLEAN_EXIT
from gnomon.core.errors import ConfigError
from gnomon.core.http import LOOPBACK
from gnomon.core.sections import ClusterConfig

# Join a Ray cluster that was started elsewhere, and check whether the cluster requires a key.

CLIENT = "ray://"
_ASK_SECONDS = 5.0
# Methods and messages for a head and for a Ray Client server. The server's message is ClusterInfoType.PING, the only
# one that the server answers before a client has joined.
_HEAD = "/ray.rpc.NodeInfoGcsService/CheckAlive", b""
_SERVER = "/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x06"
_MODE, _TOKEN = "RAY_AUTH_MODE", "token"
_SHOWN = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"


def check_key(address: str, key: str, called: str = "") -> None:
    """Refuse a cluster that does not accept this run's key. Ray's own message would come half a minute later.

    A key that the cluster does not require is refused as well: a run with a key takes the cluster for closed, and
    programs on the cluster, which have no key, could not reach the run and would end without a message.

    Args:
        address: "HOST:PORT" of a head, or "ray://HOST:PORT".
        key: As `auth_token` returns it, "" for none.
        called: The user's word for the address, if different.

    Raises:
        ConfigError: If the key does not fit.
    """
    said = f"cluster.address = '{called or address}'"
    if accepts_token(address, key) is False:
        shown = f"and the one that was shown ({_SHOWN}) is another" if key else "and none was shown"
        raise ConfigError(f"{said} cannot be joined: it asks for a key, {shown}; see `ray get-auth-token` there")
    # Asked without the key: a server that accepts that is open to everybody.
    if key and accepts_token(address):
        raise ConfigError(
            f"{said} asks nobody for a key, and this run shows one ({_SHOWN}): whoever reaches its ports can run "
            "programs on all its machines. Start it with RAY_AUTH_MODE=token and this key, or say that it shall stay "
            "open with RAY_AUTH_MODE=disabled"
        )


def accepts_token(address: str, key: str = "") -> bool | None:
    """Return whether the server at ``address`` accepts this key ("" for none); None if the server does not say."""
    import grpc

    method, asked = _SERVER if address.startswith(CLIENT) else _HEAD
    with grpc.insecure_channel(address.removeprefix(CLIENT)) as channel:
        ask = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(asked, timeout=_ASK_SECONDS, metadata=[("authorization", key)] if key else [])
        except grpc.RpcError as error:
            return False if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return True


def auth_token() -> str:
    """Return the authorization header that this program sends to Ray's servers; "" for none.

    Raises:
        ConfigError: If the file that RAY_AUTH_TOKEN_PATH names cannot be read.
    """
    if os.environ.get(_MODE, _TOKEN).lower() != _TOKEN:
        return ""
    key, named = os.environ.get("RAY_AUTH_TOKEN", "").strip(), os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named or Path.home() / ".ray" / "auth_token")
    if not key and (named or path.exists()):
        try:
            key = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"the key of the Ray cluster cannot be read from {path}: {error.strerror}") from error
    return f"Bearer {key}" if key else ""


def show_key() -> None:
    """Let Ray show this program's key, if it has one. Ray reads when it is imported whether to do so.

    Raises:
        ConfigError: If Ray was imported before.
    """
    if auth_token() and _MODE not in os.environ:
        if "ray" in sys.modules:
            raise ConfigError(
                f"this program has a key for Ray ({_SHOWN}) and imported Ray before, without {_MODE}, so the key is "
                f"not shown; set {_MODE}=token in its environment, or {_MODE}=disabled to join an open cluster"
            )
        os.environ[_MODE] = _TOKEN


_KNOCK_SECONDS = 5.0
_NOBODY = "Could not find any running Ray instance"
_START = (
    "start a cluster with `ray start --head` and name the address that it prints, or leave cluster.address empty "
    '(cluster = "ray") to start one here'
)


def check_port(address: str, called: str = "") -> None:
    """Check that a server listens at "HOST:PORT" or "ray://HOST:PORT".

    Args:
        address: The address.
        called: The user's word for the address, if different.

    Raises:
        ConfigError: If no server listens.
    """
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
    except OSError as error:
        there = f"at {address}, which it stands for" if called else "there"
        raise ConfigError(
            f"cluster.address = '{called or address}': nobody answers {there} ({error.strerror or error}); {_START}"
        ) from error


def _found_here() -> str:
    """Return the address that "auto" stands for, from the two places where Ray looks; "" for neither.

    Raises:
        ConfigError: If the recorded cluster is gone. Ray itself would wait.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    record = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    if not address and record.is_file():
        address = record.read_text(encoding="utf-8").strip()
    if address:
        check_port(address, "auto")
    return address


def join(ray: Any, plan: ClusterConfig, warn: Callable[[str], None]) -> None:
    """Connect to a cluster. The key is in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.

    Raises:
        ConfigError: If there is no cluster, the key does not fit, or this machine is not one of its nodes.
    """
    if ray.is_initialized():
        raise ConfigError("this program uses a Ray cluster already; call ray.shutdown() first")
    found = _found_here() if plan.address == "auto" else plan.address
    if found:
        check_key(found, auth_token(), plan.address if found != plan.address else "")
    why = connect(ray, found or plan.address, plan.start_seconds)
    if not found and _NOBODY in why:
        raise ConfigError(f"cluster.address = 'auto': no Ray cluster runs on this machine; {_START}")
    if why:
        key = "" if auth_token() else ". No key was shown to it"
        raise ConfigError(f"cluster.address = '{plan.address}' cannot be joined: {why}{key}\n{_ADVICE}")
    # Without a known address before, the key can be checked only once Ray has found the cluster.
    if not found:
        check_key(head_of(ray, plan.address), auth_token(), plan.address)
    if not auth_token():
        warn(
            "the Ray cluster asks nobody for a key: whoever reaches its ports can run programs on all its machines; "
            "start it with RAY_AUTH_MODE=token, and give every node and this run its key (ray get-auth-token)"
        )


def connect(ray: Any, address: str, seconds: float) -> str:
    """Connect to the cluster at ``address`` within ``seconds``; return why this failed, or ""."""
    fault: list[str] = []

    def work() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="gnomon")
        except Exception as error:
            fault.append(f"{type(error).__name__}: {error}".strip(" ."))

    logging.getLogger("ray").setLevel(logging.ERROR)
    # In a thread, because Ray would replace the main thread's signal handlers and may wait longer than our limit.
    connecting = threading.Thread(target=work, name="gnomon-ray", daemon=True)
    connecting.start()
    connecting.join(seconds)
    return f"no answer in {seconds:g} s" if connecting.is_alive() else "".join(fault)


def head_of(ray: Any, address: str) -> str:
    """Return the "HOST:PORT" at which this machine can monitor the cluster's head."""
    return address.removeprefix(CLIENT) if address.startswith(CLIENT) else ray.get_runtime_context().gcs_address


_ADVICE = (
    "HOST:PORT is for a machine that is one of its nodes, ray://HOST:PORT for any other; all need the same versions of "
    "Python and Ray, and the cluster's key in RAY_AUTH_TOKEN or ~/.ray/auth_token if it has one"
)


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
    reaper: "subprocess.Popen[bytes]"

    @classmethod
    def made(cls) -> Self:
        """Make a new folder and start its reaper."""
        # Paths of Unix sockets have a small limit.
        usual = tempfile.gettempdir()
        path = Path(tempfile.mkdtemp(prefix="gnomon-ray-", dir=usual if len(usual) <= _LONGEST_PATH else _SHORT_PATH))
        reaper = subprocess.Popen(
            [sys.executable, "-P", "-m", "gnomon.cluster.reaper", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        return cls(path, reaper)

    def end(self) -> None:
        """Remove the folder."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.reaper.communicate(CLEAN_EXIT, _SWEEPING_SECONDS)
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
    # Chosen here, so that two runs on one machine do not meet on Ray's fixed ports.
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


# Detect that a cluster's head is gone. Ray itself would end the program.

_PAUSE = 1.0
_MONITOR_KNOCK_SECONDS = 2.0
_CLOSED_SECONDS = 6.0
_SILENT_SECONDS = 30.0


class HeadMonitor:
    """Two threads: one connects to the head's port, the other asks the head a question that may never be answered.

    A head with a closed port counts as gone after 6 s; a head that accepts connections without answering, after 30 s.

    Attributes:
        fault: One line if the head is gone, otherwise "".

    Args:
        address: "HOST:PORT" of the head.
        ask: Blocks until the head has answered.
    """

    def __init__(self, address: str, ask: Callable[[], object]) -> None:
        self.fault = ""
        self._address, self._ask = address, ask
        self._is_over = threading.Event()
        self._open = self._answered = time.monotonic()
        # Two, since a question to a head that hangs never returns, and a port can be open without a head behind it.
        for work in (self._watch_head, self._converse):
            threading.Thread(target=work, name="gnomon-watch", daemon=True).start()

    def close(self) -> None:
        """Stop monitoring."""
        self._is_over.set()

    def check_alive(self) -> None:
        """Connect to the head now; without a moment's patience, for a caller who found something else dead."""
        if why := self._refused():
            self._say(f"the head of the Ray cluster at {self._address} is gone: {why}")

    def _refused(self) -> str:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _MONITOR_KNOCK_SECONDS).close()
        except OSError as error:
            return f"it cannot be reached: {error.strerror or error}"
        self._open = time.monotonic()
        return ""

    def _watch_head(self) -> None:
        looked = time.monotonic()
        while not self._is_over.wait(_PAUSE):
            why = self._refused()
            now = time.monotonic()
            if now - looked > _PAUSE + _MONITOR_KNOCK_SECONDS + 1.0:
                # This program itself was paused, so missing answers say nothing about the head.
                self._open = self._answered = now
            looked = now
            if now - self._open > _CLOSED_SECONDS:
                self._say(f"the head of the Ray cluster at {self._address} is gone: {why}")
            elif now - self._answered > _SILENT_SECONDS:
                self._say(f"the head of the Ray cluster at {self._address} has not answered for {_SILENT_SECONDS:g} s")

    def _converse(self) -> None:
        while not self._is_over.wait(_ASK_SECONDS):
            with contextlib.suppress(Exception):
                self._ask()
                self._answered = time.monotonic()

    def _say(self, fault: str) -> None:
        self.fault = self.fault or fault
