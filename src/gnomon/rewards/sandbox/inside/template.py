"""A process that has imported the packages and forks a fresh one for each program: importing takes long.

It runs no program itself. It reads requests from one end of a pair of sockets that every process of the run that asks
has the other end of, and ends when all of those are gone.
"""

import array
import gc
import importlib
import os
import signal
import socket
import sys

from . import program, start

# What packages load when it is first used: a program would wait for it, and numpy's draws have a seed.
_LATE = (("numpy", "numpy.random"), ("scipy", "scipy.stats"), ("scipy", "scipy.signal"))
_ENDS = 5  # descriptors that come with a request: standard input, output and error, source, report


def main() -> None:
    """Import what programs may import, then fork for each request until nobody can ask any more."""
    sys.dont_write_bytecode = True
    start.pass_over_stop_signals()
    control, packages = int(sys.argv[1]), sys.argv[2:]
    asked = socket.socket(fileno=control)
    finder = program.AllowedPackages(packages)
    sys.meta_path.append(finder)
    try:
        for name in finder.names:
            importlib.import_module(name)
        for name in [late for package, late in _LATE if package in sys.modules]:
            importlib.import_module(name)
    except Exception as error:
        asked.send(f"{name} cannot be imported: {type(error).__name__}: {error}".encode()[:2000])
        return
    # What a forked program's start and end import, so that no child imports them again.
    for name in ("ast", "random", "traceback", "linecache", "json", "io"):
        importlib.import_module(name)
    gc.collect()
    # Objects of the template leave the collector's lists: a collection
    # in a child would write to their headers, and so copy their pages.
    gc.freeze()
    # Nobody waits for the children; the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    own = os.getpid()
    asked.send(b"ready")
    while True:
        said, ends = _received(asked)
        if not said:
            return
        if len(ends) == _ENDS and os.fork() == 0:
            # The child is a witness, which waits for its own child.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked.detach()
            start.forked(own, ends, control, said.decode().split("\0"))
        for end in ends:
            os.close(end)


def _received(asked: socket.socket) -> tuple[bytes, list[int]]:
    said, about, _, _ = asked.recvmsg(1 << 16, socket.CMSG_LEN(_ENDS * 4))
    ends = array.array("i")
    for level, kind, data in about:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            ends.frombytes(data[: len(data) - len(data) % ends.itemsize])
    return said, list(ends)
