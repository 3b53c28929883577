"""Whether a Ray cluster asks who comes, found out by asking it something with a key and without."""

from gnomon.errors import ConfigError

_CLIENT = "ray://"
_ASK_SECONDS = 5.0
# What a head and a Ray Client server are asked, each with its message: of the second ClusterInfoType.PING, the only
# one that it answers to somebody who has not joined.
_HEAD = "/ray.rpc.NodeInfoGcsService/CheckAlive", b""
_SERVER = "/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x06"
_SHOWN = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"


def check_key(address: str, key: str, called: str = "") -> None:
    """Refuse a cluster that a key does not fit, in words; Ray's own are of its sockets, half a minute later.

    A key that nobody asks for is refused as well: whoever shows it takes the cluster for closed, and programs there,
    which have none, are not let in here, so that they end without a word.

    address: "HOST:PORT" of a head, or "ray://HOST:PORT". key: as `own_key` returns it, "" for none. called: how the
    address was asked for, where that is another word.
    Raises: ConfigError.
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
    """Return whether what listens there answers someone with this key, "" for none; None where it does not say."""
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
    """Return what this program says to Ray's servers to be let in, "" where it says nothing."""
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

    return str(next(iter(get_auth_headers_if_auth_enabled({}).values()), ""))
