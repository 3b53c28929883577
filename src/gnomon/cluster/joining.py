"""Join a Ray cluster that somebody else started, and check whether the cluster requires a key."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.sections import ClusterConfig

_CLIENT = "ray://"
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
        key: As `own_key` returns it, "" for none.
        called: The user's word for the address, if different.

    Raises:
        ConfigError: If the key does not fit.
    """
    said = f"cluster.address = '{called or address}'"
    if lets_in(address, key) is False:
        shown = f"and the one that was shown ({_SHOWN}) is another" if key else "and none was shown"
        raise ConfigError(f"{said} cannot be joined: it asks for a key, {shown}; see `ray get-auth-token` there")
    if key and lets_in(address):
        raise ConfigError(
            f"{said} asks nobody for a key, and this run shows one ({_SHOWN}): whoever reaches its ports can run "
            "programs on all its machines. Start it with RAY_AUTH_MODE=token and this key, or say that it shall stay "
            "open with RAY_AUTH_MODE=disabled"
        )


def lets_in(address: str, key: str = "") -> bool | None:
    """Return whether the server at ``address`` accepts this key ("" for none); None if the server does not say."""
    import grpc

    method, asked = _SERVER if address.startswith(_CLIENT) else _HEAD
    with grpc.insecure_channel(address.removeprefix(_CLIENT)) as channel:
        ask = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(asked, timeout=_ASK_SECONDS, metadata=[("authorization", key)] if key else [])
        except grpc.RpcError as error:
            return False if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return True


def own_key() -> str:
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
    if own_key() and _MODE not in os.environ:
        if "ray" in sys.modules:
            raise ConfigError(
                f"this program has a key for Ray ({_SHOWN}) and imported Ray before, without {_MODE}, so the key is "
                f"not shown; set {_MODE}=token in its environment, or {_MODE}=disabled to join an open cluster"
            )
        os.environ[_MODE] = _TOKEN


CLIENT = "ray://"
_KNOCK_SECONDS = 5.0
_NOBODY = "Could not find any running Ray instance"
_START = (
    "start a cluster with `ray start --head` and name the address that it prints, or leave cluster.address empty "
    '(cluster = "ray") to start one here'
)


def knock(address: str, called: str = "") -> None:
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
        knock(address, "auto")
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
        check_key(found, own_key(), plan.address if found != plan.address else "")
    why = connect(ray, found or plan.address, plan.start_seconds)
    if not found and _NOBODY in why:
        raise ConfigError(f"cluster.address = 'auto': no Ray cluster runs on this machine; {_START}")
    if why:
        key = "" if own_key() else ". No key was shown to it"
        raise ConfigError(f"cluster.address = '{plan.address}' cannot be joined: {why}{key}\n{_ADVICE}")
    if not found:
        check_key(head_of(ray, plan.address), own_key(), plan.address)
    if not own_key():
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
