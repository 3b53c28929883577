"""Detect that a cluster's head is gone. Ray itself would end the program."""

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
        for work in (self._knock, self._converse):
            threading.Thread(target=work, name="gnomon-watch", daemon=True).start()

    def close(self) -> None:
        """Stop monitoring."""
        self._is_over.set()

    def look(self) -> None:
        """Connect to the head now; without a moment's patience, for a caller who found something else dead."""
        if why := self._refused():
            self._say(f"the head of the Ray cluster at {self._address} is gone: {why}")

    def _refused(self) -> str:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
        except OSError as error:
            return f"it cannot be reached: {error.strerror or error}"
        self._open = time.monotonic()
        return ""

    def _knock(self) -> None:
        looked = time.monotonic()
        while not self._is_over.wait(_PAUSE):
            why = self._refused()
            now = time.monotonic()
            if now - looked > _PAUSE + _KNOCK_SECONDS + 1.0:
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
