"""Where metrics go beside the run's own file: trackers, which may fail, hang and be slow without the run noticing."""

import contextlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gnomon.errors import ConfigError, unknown
from gnomon.records.aliases import with_aliases
from gnomon.records.jsonl import Warn, warn_on_stderr
from gnomon.records.trackers import Tracker, open_tensorboard, open_trackio, open_wandb

TRACKERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": open_tensorboard,
    "trackio": open_trackio,
    "wandb": open_wandb,
}


class Sink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; returns in milliseconds and never raises for a fault of its own."""
        ...

    def close(self) -> None:
        """Write what is waiting, as far as that is quick."""
        ...


@dataclass(frozen=True)
class Aliased:
    """A sink that also gets the names of TRL and verl; see `aliases`."""

    sink: Sink

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the values on under more names."""
        self.sink.write(step, with_aliases(values))

    def close(self) -> None:
        """Close the sink."""
        self.sink.close()


class BackgroundSink:
    """A tracker in a thread of its own, behind a bounded queue.

    The run only ever puts a row into the queue. When the queue is full, rows are dropped and counted: a gap in a
    dashboard is cheaper than a slower run, and the run's own file has every row. The first failure, while opening,
    logging or finishing, ends the tracker with one warning.
    capacity: rows that may wait. close_seconds: how long `close` waits for them.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Tracker],
        warn: Warn = warn_on_stderr,
        capacity: int = 1000,
        close_seconds: float = 10.0,
    ) -> None:
        self.name, self.dropped, self.is_disabled = name, 0, False
        self._start, self._warn, self._close_seconds = start, warn, close_seconds
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(capacity)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a row, or drop it."""
        if self.is_disabled:
            return
        try:
            self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Wait a while for the queue to empty and the tracker to finish; then leave it behind."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive() and not self.is_disabled:
            self.is_disabled = True
            self._warn(f"{self.name} did not finish in {self._close_seconds:g} s and was left behind")
        if self.dropped:
            self._warn(f"{self.name} was too slow: {self.dropped} steps are missing there, and none in metrics.jsonl")

    def _work(self) -> None:
        try:
            tracker = self._start()
            for step, values in iter(self._next, None):
                tracker.log(step, values)
            tracker.finish()
        except BaseException as error:
            # The boundary of somebody else's code, in its own thread: whatever it throws ends here.
            if not self.is_disabled:
                self.is_disabled = True
                reason = f"{type(error).__name__}: {error}"
                self._warn(f"{self.name} failed and is off for this run, which goes on: {reason}")

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        try:
            return self._rows.get_nowait()
        except queue.Empty:
            # `close` wakes a waiting thread with None; with a full queue it cannot, but then nothing waits here.
            return None if self._is_closing.is_set() else self._rows.get()


def check_sinks(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before anything is loaded.

    Raises: ConfigError that names the nearest known one, or the command that installs it.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"records.sinks: {unknown('sink', name, TRACKERS)}")
        found = importlib.util.find_spec(name)
        # A folder of that name in the working directory (wandb makes one) is found as a package without a file.
        if found is None or found.origin is None:
            raise ConfigError(
                f"records.sinks names {name}, which is not installed; pip install 'gnomon[{name}]', "
                f"or leave {name} out of records.sinks (metrics.jsonl is always written)"
            )


def build_sinks(
    names: Sequence[str],
    directory: Path,
    run_name: str,
    config: Mapping[str, Any],
    step: int = 0,
    is_aliased: bool = False,
) -> list[Sink]:
    """Return a sink for each named tracker, opening in the background.

    directory: of the run. config: the experiment as a table. step: at which a resumed run goes on; 0 for a new one.
    is_aliased: also write the names that TRL's and verl's dashboards expect.
    Raises: ConfigError as `check_sinks`.
    """
    check_sinks(names)

    def start(name: str) -> Callable[[], Tracker]:
        return lambda: TRACKERS[name](directory, run_name, config, step)

    sinks: list[Sink] = [BackgroundSink(name, start(name)) for name in dict.fromkeys(names)]
    return [Aliased(sink) for sink in sinks] if is_aliased else sinks
