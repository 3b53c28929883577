"""Whether a cluster asks who comes, found out by asking a server that does as Ray's do."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from gnomon.cluster.ray import import_ray
from gnomon.cluster.start import accepts_token, auth_token, check_key, loopback_ray, show_key
from gnomon.core.errors import ConfigError

# ClusterInfoRequest of Ray's ray_client.proto: field 1, the type, is PING, 6.
PING = b"\x08\x06"


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
        assert [accepts_token(door + closed, key) for key in ("Bearer a", "Bearer b", "")] == [True, False, False]
        assert [accepts_token(door + wide, key) for key in ("Bearer a", "")] == [True, True]


def test_what_says_nothing_of_keys_is_left_to_ray():
    """Another kind of server, and one that does not answer: neither is refused for a key."""
    with server("Bearer a", grpc.StatusCode.UNIMPLEMENTED) as other:
        assert accepts_token(other) is None
        check_key(other, "")
        check_key(other, "Bearer b")
    assert accepts_token("127.0.0.1:1") is None


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


def test_the_key_is_read_where_ray_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The variable before the file that is named before the one at home; none where it is said to be open."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert auth_token() == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert auth_token() == "Bearer home"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    with pytest.raises(ConfigError, match=r"cannot be read from .*/named: No such file"):
        auth_token()
    (tmp_path / "named").write_text(" named ")
    assert auth_token() == "Bearer named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "said")
    assert auth_token() == "Bearer said"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert auth_token() == ""


def test_a_program_that_imported_ray_before_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch):
    """Ray has read its environment by then: it would show no key, and look for loopback's servers on the network."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "said")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token in its environment"):
        show_key()
    with pytest.raises(ConfigError, match="set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 and RAY_AUTH_MODE=token in"):
        loopback_ray.__wrapped__(import_ray)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    show_key()
