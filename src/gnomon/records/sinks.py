"""Where metrics go beside the run's own file: trackers, which may fail, hang and be slow without the run noticing."""

import contextlib
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from gnomon.core.atomic_files import read_plain_text, write_durably
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.optional import check_installed
from gnomon.core.tables import flat, packaged_toml
from gnomon.records.jsonl import Warn, warn_on_stderr

ALIASES: Mapping[str, Sequence[str]] = packaged_toml("gnomon.records", "sink_aliases.toml")
"""Other libraries' names of a metric, by gnomon's name."""


def with_aliases(values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` and, beside them, the same numbers under the names of others.

    >>> with_aliases({"learner/learning_rate": 0.1, "reward/exact_mean": 1.0})  # doctest: +NORMALIZE_WHITESPACE
    {'learner/learning_rate': 0.1, 'reward/exact_mean': 1.0, 'learning_rate': 0.1, 'actor/lr': 0.1,
     'rewards/exact/mean': 1.0}
    """
    named = dict(values)
    for name, value in values.items():
        for alias in ALIASES.get(name, ()):
            # setdefault: a name of gnomon's own is never replaced by an alias.
            named.setdefault(alias, value)
        if name.startswith("reward/") and name.endswith("_mean"):
            named.setdefault(f"rewards/{name[len('reward/') : -len('_mean')]}/mean", value)
    return named


THREAD = "sink-"
"""How the names of threads of trackers begin."""

# The trackers that a run may write to; each library is imported when its tracker is opened, in its thread.


class Tracker(Protocol):
    """A tracker's place for metrics. Its methods may raise, hang or be slow."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""

    def finish(self) -> None:
        """Write out and close."""


@dataclass(frozen=True)
class TensorBoard:
    """Event files in RUN/tensorboard.

    Attributes:
        writer: `torch.utils.tensorboard.SummaryWriter`.
    """

    writer: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


@dataclass(frozen=True)
class LoggedRun:
    """A run of SwanLab, trackio or Weights & Biases, which have one interface."""

    run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at ``step``."""
        self.run.log(dict(values), step=step)

    def finish(self) -> None:
        """Upload what is left, and close."""
        self.run.finish()


def open_tensorboard(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open event files; on a resume, what was written after ``step`` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides steps that a resumed run makes again; at the very beginning there is nothing to hide.
    make: Any = SummaryWriter
    return TensorBoard(make(log_dir=str(directory / "tensorboard"), purge_step=step + 1 if step else None))


def open_wandb(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open a Weights & Biases run; its own environment variables (WANDB_PROJECT, WANDB_MODE, ...) hold.

    A resumed run goes on under the same identity, which lies in the run directory.
    """
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gnomon"),
        name=run_name,
        id=_identity(directory),
        resume="allow",
        dir=str(directory),
        config=dict(config),
        settings=wandb.Settings(console="off"),
    )
    return LoggedRun(run)


def open_trackio(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open a trackio run in its local database; a resumed run goes on under the same name."""
    import trackio

    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "gnomon"),
        name=run_name,
        config=dict(config),
        resume="allow",
        embed=False,
    )
    return LoggedRun(run)


def open_swanlab(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open a SwanLab run; its own environment variables (SWANLAB_MODE, SWANLAB_API_KEY, ...) hold.

    Without a key it fails where it would ask for one. A resumed run goes on under the same identity.
    """
    import swanlab

    run = swanlab.init(
        project=os.environ.get("SWANLAB_PROJ_NAME", "gnomon"),
        name=run_name,
        id=_identity(directory),
        resume="allow",
        log_dir=str(directory / "swanlog"),
        config=dict(config),
        settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
    )
    return LoggedRun(run)


@dataclass(frozen=True)
class MLflowRun:
    """A run on MLflow's tracking server or in its local database.

    Attributes:
        client: `mlflow.MlflowClient`.
    """

    client: Any
    run_id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step in one request."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        self.client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in values.items()])

    def finish(self) -> None:
        """Say that the run is over; a resumed run is open again."""
        self.client.set_terminated(self.run_id)


def open_mlflow(directory: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Open an MLflow run; its own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) hold.

    Settings are parameters under their dotted names. A resumed run goes on in the run that has its tag.
    """
    import mlflow
    from mlflow.entities import Param

    client, tag = mlflow.MlflowClient(), {"gnomon.run": _identity(directory)}
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "gnomon")).experiment_id
    found = client.search_runs([experiment], f"tags.`gnomon.run` = '{tag['gnomon.run']}'")
    if found:
        client.update_run(found[0].info.run_id, "RUNNING")
        return MLflowRun(client, found[0].info.run_id)
    run = client.create_run(experiment, run_name=run_name, tags=tag)
    client.log_batch(run.info.run_id, params=[Param(name, str(value)) for name, value in flat(config).items()])
    return MLflowRun(client, run.info.run_id)


def _identity(directory: Path) -> str:
    # Made up once: a resumed run must find its run at the tracker, and a copied directory is the same run.
    kept = directory / ".tracker-id"
    if not kept.exists():
        write_durably(kept, secrets.token_hex(8).encode())
    return read_plain_text(kept).strip()


TRACKERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "mlflow": open_mlflow,
    "swanlab": open_swanlab,
    "tensorboard": open_tensorboard,
    "trackio": open_trackio,
    "wandb": open_wandb,
}


class SinkOutput:
    """Standard output, of which the share of trackers goes to standard error.

    Trackers greet and say where a run lies; standard output belongs to results, which programs read.
    """

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout

    def write(self, text: str) -> int:
        """Write to standard output, or from the thread of a `BackgroundSink` to standard error."""
        # Told by the thread's name: trackers print from deep within their libraries.
        is_sink = threading.current_thread().name.startswith(THREAD)
        return (sys.stderr if is_sink else self._stdout).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


class Sink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; returns in milliseconds and never raises for a fault of its own."""

    def close(self) -> None:
        """Write what is waiting, as far as that is quick."""


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

    Args:
        capacity: Rows that may wait.
        close_seconds: How long `close` waits for them.
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
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)
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
            # The boundary of a tracker's code, in its own thread: every exception ends here.
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
    """Refuse trackers that are unknown.

    Raises:
        ConfigError: The message names the nearest known one.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"records.sinks: {unknown('sink', name, TRACKERS)}")


def build_sinks(
    names: Sequence[str],
    directory: Path,
    run_name: str,
    config: Mapping[str, Any],
    step: int = 0,
    is_aliased: bool = False,
) -> list[Sink]:
    """Return a sink for each named tracker, opening in the background.

    Args:
        directory: Of the run.
        config: The experiment as a table.
        step: At which a resumed run goes on; 0 for a new one.
        is_aliased: Also write the names that TRL's and verl's dashboards expect.

    Raises:
        ConfigError: As `check_sinks`, or a tracker is not installed.
    """
    check_sinks(names)
    check_installed({name: f"records.sinks = {name}" for name in names})

    # Once a process: a second run would wrap the wrapper.
    if names and not isinstance(sys.stdout, SinkOutput):
        sys.stdout = cast(TextIO, SinkOutput(sys.stdout))

    def start(name: str) -> Callable[[], Tracker]:
        return lambda: TRACKERS[name](directory, run_name, config, step)

    sinks: list[Sink] = [BackgroundSink(name, start(name)) for name in dict.fromkeys(names)]
    return [Aliased(sink) for sink in sinks] if is_aliased else sinks
