"""Hostile programs that a sandbox must stop: run at start, so that what is reported was tried and not hoped.

Each program prints ``OPEN`` when it reached what it should not reach.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SECRET = "GNOMON_PROBE_SECRET"
OPEN = "OPEN"
_PACKAGE = str(Path(__file__).resolve().parents[2])
# It waits for the end of what it reads, and so ends with the process that asks, however that ends.
_BYSTANDER = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]


@dataclass(frozen=True)
class Probe:
    """One hostile program.

    Attributes:
        name: What it tries.
        source: With ``{...}`` for the parts of a `Target`.
        causes: How it must end, where that is known; any of them. None stands for "ended by itself with status 0".
    """

    name: str
    source: str
    causes: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Target:
    """What the programs aim at: things outside that would be reached if there were no wall.

    Attributes:
        secret: A file that everybody may read.
        folder: One that everybody may write in.
        port: The port of a listening socket.
        process: The number of the process that runs the probes.
        bystander: The number of a process that may be killed.
        unix: Names of listening sockets of those families.
        abstract: Names of listening sockets of those families.
    """

    secret: str
    folder: str
    port: int
    process: int
    bystander: int
    unix: str
    abstract: str
    listeners: tuple[socket.socket, ...]

    def aim(self, probe: Probe) -> str:
        """Return the program, aimed here."""
        # Not str.format: programs are full of braces.
        source = probe.source
        for name in ("secret", "folder", "port", "process", "bystander", "unix", "abstract"):
            source = source.replace("{" + name + "}", str(getattr(self, name)))
        return source.replace("{home}", str(Path.home())).replace("{package}", _PACKAGE)

    def marks(self) -> list[str]:
        """Return what a program left behind or reached, and remove it."""
        left = os.listdir(self.folder)
        for name in left:
            os.unlink(f"{self.folder}/{name}")
        for listener in self.listeners:
            # A connection that is waiting to be accepted is the mark; none
            # raises at once, since the socket does not block.
            with suppress(BlockingIOError):
                listener.accept()[0].close()
                left.append(f"a connection to {listener.getsockname()!r}")
        if Path(self.secret).read_text() != SECRET:
            left.append("another secret")
        if _is_dead(self.bystander):
            left.append("a dead bystander")
        return left


@contextmanager
def targets() -> Iterator[Target]:
    """Set up what the programs aim at, and take it away again."""
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="gnomon-probe-"))
        os.chmod(root, 0o755)
        folder = Path(root) / "open"
        folder.mkdir()
        folder.chmod(0o777)
        secret = Path(root) / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o644)
        unix, abstract = f"{root}/socket", Path(root).name
        places: tuple[tuple[socket.AddressFamily, tuple[str, int] | str], ...] = (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, unix),
            (socket.AF_UNIX, "\0" + abstract),
        )
        listeners = tuple(stack.enter_context(socket.socket(family)) for family, _ in places)
        for listener, (_, place) in zip(listeners, places, strict=True):
            listener.bind(place)
            listener.listen()
            listener.setblocking(False)
        os.chmod(unix, 0o777)
        bystander = stack.enter_context(subprocess.Popen(_BYSTANDER, stdin=subprocess.PIPE))
        stack.callback(bystander.kill)
        port = listeners[0].getsockname()[1]
        yield Target(str(secret), str(folder), port, os.getpid(), bystander.pid, unix, abstract, listeners)


def _is_dead(pid: int) -> bool:
    # WNOWAIT leaves the dead child to be reaped by its Popen object.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


NINE = (
    Probe("read a file of the system", "print('OPEN' if open('/etc/passwd').read() else '')"),
    Probe("read a file of the user", "print('OPEN' if open('{secret}').read() else '')"),
    Probe("write outside", "open('{folder}/mark', 'w').write('x'); print('OPEN')"),
    Probe("connect by TCP", "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('OPEN')"),
    Probe("send by UDP", "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port})); print('OPEN')"),
    Probe("start a process", "import os; pid = os.fork(); print('OPEN', flush=True) if pid else os._exit(0)"),
    Probe("read the environment", "import os; print('OPEN' if 'GNOMON_PROBE_SECRET' in str(os.environ) else '')"),
    Probe("signal the parent", "import os; os.kill({process}, 0); print('OPEN')"),
    Probe("take 2 GiB", "x = bytearray(2 << 30); print('OPEN' if len(x) > 1 else '')"),
)
