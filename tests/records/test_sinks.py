"""Trackers fail, hang and crawl; the run does not notice."""

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gnomon.core.errors import ConfigError
from gnomon.records.sinks import ALIASES, TRACKERS, Aliased, BackgroundSink, build_sinks, check_sinks, with_aliases

Capture = pytest.CaptureFixture[str]


class Book:
    """A tracker that remembers, after doing what a test wants it to do."""

    def __init__(self, before: Callable[[], object] = lambda: None, at_finish: Callable[[], object] = lambda: None):
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False
        self.before, self.at_finish = before, at_finish

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.before()
        self.rows.append((step, dict(values)))

    def finish(self) -> None:
        self.at_finish()
        self.is_finished = True


def fail() -> None:
    raise ConnectionError("no route")


def test_rows_arrive_in_order_and_the_tracker_is_finished():
    """What is written before close arrives, then the tracker is closed."""
    book = Book()
    sink = BackgroundSink("book", lambda: book)
    for step in range(100):
        sink.write(step, {"x": float(step)})
    sink.close()

    assert book.rows == [(step, {"x": float(step)}) for step in range(100)]
    assert book.is_finished


@pytest.mark.parametrize("where", ["open", "log", "finish", "exit"])
def test_a_tracker_that_fails_is_switched_off_with_one_warning(where: str):
    """Wherever it fails, also by ending its thread, the run gets one line and no exception."""
    said: list[str] = []
    book = Book(before=fail if where == "log" else lambda: None, at_finish=fail if where == "finish" else lambda: None)

    def start() -> Book:
        if where == "open":
            fail()
        if where == "exit":
            raise SystemExit("no route")
        return book

    sink = BackgroundSink("book", start, said.append)
    for step in range(5):
        sink.write(step, {})
        time.sleep(0.005)
    sink.close()

    assert len(said) == 1
    assert "book failed and is off for this run, which goes on" in said[0]
    assert "no route" in said[0]


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_tracker_that_hangs_costs_nothing(where: str):
    """No write waits for it, rows beyond the queue are counted, and close gives up while it still hangs."""
    said: list[str] = []
    free = threading.Event()
    wait = lambda: free.wait()  # noqa: E731 - the same wait in three places
    nothing = lambda: None  # noqa: E731 - and its opposite
    book = Book(before=wait if where == "log" else nothing, at_finish=wait if where == "finish" else nothing)

    def start() -> Book:
        if where == "open":
            wait()
        return book

    sink = BackgroundSink("book", start, said.append, capacity=10, close_seconds=0.3)
    for step in range(50):
        sink.write(step, {"x": 1.0})
    sink.close()
    free.set()

    assert any("did not finish in 0.3 s and was left behind" in line for line in said)
    assert sink.dropped >= {"finish": 0}.get(where, 39)


def test_a_slow_tracker_drops_and_says_how_many():
    """50 rows into a queue of 5 that nobody empties meanwhile: no write waits, and the gaps are counted."""
    said: list[str] = []
    written = threading.Event()
    book = Book(before=written.wait)
    sink = BackgroundSink("book", lambda: book, said.append, capacity=5)
    for step in range(50):
        sink.write(step, {})
    written.set()
    sink.close()

    assert sink.dropped >= 44
    assert len(book.rows) + sink.dropped == 50
    assert said == [f"book was too slow: {sink.dropped} steps are missing there, and none in metrics.jsonl"]


def test_rows_are_copied():
    """A dictionary that is reused for the next step does not change what was written."""
    book = Book()
    sink = BackgroundSink("book", lambda: book)
    values = {"x": 1.0}
    sink.write(1, values)
    values["x"] = 2.0
    sink.close()

    assert book.rows == [(1, {"x": 1.0})]


def test_tensorboard_gets_every_scalar(tmp_path: Path):
    """The real writer, through its thread: the event file holds the values and their steps."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = build_sinks(["tensorboard"], tmp_path, "run", {})
    sink.write(1, {"loss/policy": 0.5})
    sink.write(2, {"loss/policy": 0.25})
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    assert [(e.step, e.value) for e in events.Scalars("loss/policy")] == [(1, 0.5), (2, 0.25)]


def test_mlflow_gets_settings_every_step_and_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real library: parameters by dotted name, steps and values; what is resumed goes on in the same run."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for step in (1, 2):
        (sink,) = build_sinks(["mlflow"], tmp_path, "first", {"task": {"size": 60}}, step - 1)
        sink.write(step, {"loss/policy": 1 / step})
        sink.close()
        assert not sink.is_disabled
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("gnomon").experiment_id])

    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss/policy")] == [(1, 1), (2, 0.5)]
    assert (run.data.params, run.info.run_name, run.info.status) == ({"task.size": "60"}, "first", "FINISHED")


def test_swanlab_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """The real library in its local mode: the run's folder has settings and values; its greeting is no result."""
    pytest.importorskip("swanlab")
    pytest.importorskip("swanboard")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    (sink,) = build_sinks(["swanlab"], tmp_path, "first", {"task": {"size": 60}})
    for step in (1, 2):
        sink.write(step, {"loss/policy": 1 / step})
    sink.close()
    assert not sink.is_disabled
    (folder,) = (tmp_path / "swanlog").glob("run-*")
    rows = [json.loads(line) for path in folder.glob("logs/*/*.log") for line in path.read_text().splitlines()]

    assert [(row["index"], row["data"]) for row in rows] == [(1, 1.0), (2, 0.5)]
    assert "size" in (folder / "files" / "config.yaml").read_text()
    assert capsys.readouterr().out == ""


def test_swanlab_without_a_key_is_one_warning_and_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    """On a terminal it would ask for a key; a run waits for nobody."""
    pytest.importorskip("swanlab")
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path))
    (sink,) = build_sinks(["swanlab"], tmp_path, "first", {})
    sink.close()

    assert "swanlab failed and is off for this run, which goes on: RuntimeError" in capsys.readouterr().err


def test_what_a_tracker_says_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """What a tracker prints while it opens and ends goes to standard error; what is printed beside it does not."""
    book = Book(at_finish=lambda: print("goodbye"))

    def start(*_: object) -> Book:
        print("welcome")
        return book

    monkeypatch.setitem(TRACKERS, "tensorboard", start)
    (sink,) = build_sinks(["tensorboard"], tmp_path, "run", {})
    print("result")
    sink.close()
    said = capsys.readouterr()

    assert (said.out, said.err) == ("result\n", "welcome\ngoodbye\n")


def test_an_unknown_sink_names_the_nearest():
    """A typing mistake costs no model load."""
    with pytest.raises(ConfigError, match="unknown sink 'tensorbord'; did you mean 'tensorboard'"):
        check_sinks(["tensorbord"])


@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed here")
def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At build time, before anything is loaded; a folder of that name in the working directory does not count."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"trackio \(records.sinks = trackio\); run: pip install trackio$"):
        build_sinks(["trackio"], tmp_path, "run", {})


def test_aliases_add_and_never_replace():
    """Names of TRL and verl come beside ours, with the same number; no alias stands for two of ours."""
    aliases = [alias for names in ALIASES.values() for alias in names]
    named = with_aliases({"rollout/reward_mean": 0.5, "reward/exact_mean": 1.0, "step": 3.0})

    assert len(aliases) == len(set(aliases))
    assert named == {
        "rollout/reward_mean": 0.5,
        "reward/exact_mean": 1.0,
        "step": 3.0,
        "reward": 0.5,
        "critic/score/mean": 0.5,
        "rewards/exact/mean": 1.0,
    }


def test_an_aliased_sink_writes_both():
    """The tracker sees our names and the others'."""
    book = Book()
    sink = Aliased(BackgroundSink("book", lambda: book))
    sink.write(1, {"learner/learning_rate": 0.1})
    sink.close()

    assert book.rows == [(1, {"learner/learning_rate": 0.1, "learning_rate": 0.1, "actor/lr": 0.1})]
