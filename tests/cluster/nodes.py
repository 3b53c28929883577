"""Clusters that others started: a head and more nodes, all on this machine, with a key."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.running import family

_SECONDS = 150.0


@dataclass
class Others:
    """A cluster of others. address: of its head; client: for those who are no node of it. nodes: started, in order.

    key: "" lets everybody in.
    """

    folder: Path
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    port: int = 0
    client_port: int = 0
    nodes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def client(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What lets somebody in."""
        mode = "token" if self.key else "disabled"
        return {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": self.key, "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, cpus: int) -> None:
        """Start the head, or one more node, with so many CPUs."""
        common = [f"--num-cpus={cpus}", "--num-gpus=0", "--block", "--node-ip-address=127.0.0.1"]
        if self.nodes:
            place = [f"--address={self.address}"]
        else:
            self.port, self.client_port = free_ports(2)
            place = ["--head", f"--port={self.port}", f"--ray-client-server-port={self.client_port}"]
            place += [f"--temp-dir={self.folder}", "--include-dashboard=false", "--disable-usage-stats"]
        with (self.folder / f"node-{len(self.nodes)}.log").open("wb") as said:
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *common]
            self.nodes.append(
                subprocess.Popen(
                    command, stdout=said, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
                )
            )
        self._wait()

    def end(self) -> None:
        """Kill every node, the last one first."""
        for node in reversed(self.nodes):
            for number in (node.pid, *family(node.pid)):
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            node.wait()

    def _wait(self) -> None:
        said = self.folder / f"node-{len(self.nodes) - 1}.log"
        until = time.monotonic() + _SECONDS
        while "Ray runtime started" not in said.read_text():
            assert time.monotonic() < until, said.read_text()
            assert self.nodes[-1].poll() is None, said.read_text()
            time.sleep(0.2)


@contextmanager
def others(*cpus: int, is_open: bool = False) -> Iterator[Others]:
    """A cluster with a node for each number of CPUs, with a key or open; nobody of it is left afterwards."""
    # The paths of Ray's sockets may not be long.
    with TemporaryDirectory(prefix="others-", ignore_cleanup_errors=True) as folder:
        found = Others(Path(folder), "" if is_open else secrets.token_hex(32))
        try:
            for count in cpus:
                found.start(count)
            yield found
        finally:
            found.end()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at just now."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return ports
