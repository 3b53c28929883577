"""Whether the head of a cluster is still there, found out by asking: Ray's own answer is to end the program."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_PAUSE = 1.0
_KNOCK_SECONDS = 2.0
_CLOSED_SECONDS = 6.0
_SILENT_SECONDS = 30.0
_ASK_SECONDS = 5.0


class HeadMonitor:
    """Two threads: one knocks at the head's port, the other asks it something and may never hear an answer.

    address: "HOST:PORT". ask: blocks until the head has answered. fault: "" while all is well; otherwise one line.
    A head whose port is closed is gone after 6 s; one that takes connections and does not answer, after 30 s.
    """

    def __init__(self, address: str, ask: Callable[[], object]) -> None:
        self.fault = ""
        self._address, self._ask = address, ask
        self._is_over = threading.Event()
        self._open = self._answered = time.monotonic()
        for work in (self._knock, self._converse):
            threading.Thread(target=work, name="gnomon-watch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()

    def _knock(self) -> None:
        host, _, port = self._address.rpartition(":")
        looked = time.monotonic()
        while not self._is_over.wait(_PAUSE):
            why = "nobody listens there any more"
            try:
                socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
                self._open = time.monotonic()
            except OSError as error:
                why = f"it cannot be reached: {error.strerror or error}"
            now = time.monotonic()
            if now - looked > _PAUSE + _KNOCK_SECONDS + 1.0:
                # This program itself stood still, so it heard nothing from anybody.
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
