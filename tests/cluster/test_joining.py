"""Whether a cluster asks who comes, found out by asking a server that does as Ray's do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from ray.core.generated.ray_client_pb2 import ClusterInfoRequest, ClusterInfoType

from gnomon.cluster.joining import check_key, lets_in
from gnomon.core.errors import ConfigError

PING = ClusterInfoRequest(type=ClusterInfoType.PING).SerializeToString()


@contextmanager
def server(key: str, code: grpc.StatusCode = grpc.StatusCode.UNAUTHENTICATED) -> Iterator[str]:
    """A server that answers who shows ``key``, and everybody where that is ""; others hear ``code``. Its address."""

    def head(_: bytes, context: grpc.ServicerContext) -> bytes:
        if key and dict(context.invocation_metadata()).get("authorization") != key:
            context.abort(code, "no")
        return b""

    def driver(request: bytes, context: grpc.ServicerContext) -> bytes:
        if request != PING:
            context.abort(grpc.StatusCode.NOT_FOUND, "Failed to serialize response!")
        return head(request, context)

    methods = {
        "ray.rpc.NodeInfoGcsService": {"CheckAlive": grpc.unary_unary_rpc_method_handler(head)},
        "ray.rpc.RayletDriver": {"ClusterInfo": grpc.unary_unary_rpc_method_handler(driver)},
    }
    one = grpc.server(ThreadPoolExecutor(1))
    one.add_generic_rpc_handlers(tuple(grpc.method_handlers_generic_handler(*each) for each in methods.items()))
    port = one.add_insecure_port("127.0.0.1:0")
    one.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        one.stop(None)


@pytest.mark.parametrize("door", ["", "ray://"])
def test_a_key_is_tried_at_either_door(door: str):
    """The one that fits is let in, another and none are not, and where nobody asks everybody is."""
    with server("Bearer a") as closed, server("") as wide:
        assert [lets_in(door + closed, key) for key in ("Bearer a", "Bearer b", "")] == [True, False, False]
        assert [lets_in(door + wide, key) for key in ("Bearer a", "")] == [True, True]


def test_what_says_nothing_of_keys_is_left_to_ray():
    """Another kind of server, and one that does not answer: neither is refused for a key."""
    with server("Bearer a", grpc.StatusCode.UNIMPLEMENTED) as other:
        assert lets_in(other) is None
        check_key(other, "")
        check_key(other, "Bearer b")
    assert lets_in("127.0.0.1:1") is None


def test_a_key_that_does_not_fit_is_refused_in_words():
    """None, another, and one that nobody asks for; the address is called what the user called it."""
    with server("Bearer a") as closed, server("") as wide:
        check_key(closed, "Bearer a")
        check_key(wide, "")
        with pytest.raises(ConfigError, match="'auto' cannot be joined: it asks for a key, and none was shown"):
            check_key(closed, "", "auto")
        with pytest.raises(ConfigError, match=r"and the one that was shown \(RAY_AUTH_TOKEN, .*\) is another"):
            check_key(closed, "Bearer b")
        with pytest.raises(
            ConfigError, match=r"asks nobody for a key, and this run shows one .*RAY_AUTH_MODE=disabled"
        ):
            check_key(wide, "Bearer a")
