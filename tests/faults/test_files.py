"""Whatever bytes stand in a file that gnomon reads: one clear error, or what they say. Never anything else."""

import io
import json
import math
import string
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import save
from tests.random_model import RANDOM

from gnomon.config.experiment import from_table, load, to_toml
from gnomon.core.errors import RunError, UserError
from gnomon.records.batches import read_batch
from gnomon.records.checkpoints import Checkpoints, read_states
from gnomon.records.jsonl import JsonlSink, drop_after, read_rows
from gnomon.records.manifest import find_damage
from gnomon.records.rollouts import read_rollouts
from gnomon.records.run_card import questions_of, run_card, write_card
from gnomon.rollouts.curriculum.tracker import read_rates, read_values
from gnomon.tasks.tables import TableTask
from gnomon.training.evaluate import read_evaluations
from gnomon.training.nonfinite_guard import refused_in_a_row

QUICK, THOROUGH = 25, 1000
KNOWN = (UserError, RunError)
BATCH = {
    "format": "gnomon-batch/1",
    "temperature": 1.0,
    "sequences": [
        {"prompt_id": "a", "reward": 1.0, "mask": [1, 0], "current": [-1.0, 0.0], "behavior": [-1.0, 0.0]},
        {"prompt_id": "a", "reward": 0.0, "mask": [1, 1], "current": [-1.0, -2.0], "behavior": [-1.0, -2.0]},
    ],
}
ROLLOUT = {
    "step": 1, "group": 0, "kept": True, "question": "q", "task_id": "a", "text": "t", "reward": 1.0, "error": None,
    "parts": {"p": 1.0}, "stop": "stop", "oldest_version": 0, "newest_version": 0, "prompt": [1], "response": [2, 3],
    "logprobs": [-1.0, None], "mask": [1, 0], "full_logprobs": [-1.0, -1.0], "turns": 1, "ended_by": "done",
    "cause": None,
}  # fmt: skip
SCORE = {"mean": 0.5, "low": 0.1, "high": 0.9}
EVALUATION = {
    "step": 0, "task": "t", "prompts": 2, "samples": 1, "scores": {"a": SCORE, "reward": SCORE}, "pass_at": {"1": 0.5},
    "maj_at": {}, "length_tokens_mean": 2.0, "truncated_fraction": 0.0, "errors": 0, "seconds": 1.0,
}  # fmt: skip
ROW = {"step": 1, "seconds": 0.5, "learner/refused_steps": 0, "not_finite": ["a"], "a": None}
MANIFEST = {"format": "gnomon-checkpoint/2", "step": 5, "files": {"a": {"bytes": 1, "sha256": "0"}}, "sha256": "0"}
TABLE = [{"prompt": "1+1=", "answer": "2", "id": "a"}, {"prompt": [{"role": "user", "content": "x"}], "answer": 3}]


def outcome(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what reading gave, or the error of ours that it raised; any other one passes."""
    try:
        return read(), None
    except KNOWN as error:
        return None, error


def lines(path: Path) -> list[Any]:
    return list(read_rows(path))


def sink(path: Path) -> None:
    opened = JsonlSink(path)
    opened.write(2, {"a": 1.0})
    opened.close()
    assert lines(path)[-1]["step"] == 2


def card(path: Path) -> None:
    questions_of(path)
    write_card(path, run_card("cpu", 1, {"run": 0}, "fp32"))
    assert isinstance(json.loads(path.read_text()), dict)


def tracked(path: Path) -> None:
    for read in (lambda: read_rates(path, "binary", 0.5), lambda: read_values(path)):
        found, error = outcome(read)
        assert error is None or str(path) in str(error)
        assert found is None or all(math.isfinite(rate) for rate in found.values())


def checkpoint(path: Path) -> None:
    folder = path.parent / "step-5"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(path.read_bytes())
    (folder / "a").write_bytes(b"0")
    assert find_damage(folder)
    (path.parent / "best.json").write_bytes(path.read_bytes())
    assert Checkpoints(path.parent).best() in (None, folder)


def states(path: Path) -> None:
    folder = path.parent / "state"
    folder.mkdir(exist_ok=True)
    for ending, sound in ((".json", b"{}"), (".safetensors", TENSORS)):
        (folder / f"part{ending}").write_bytes(path.read_bytes() if path.suffix == ending else sound)
    read_states(folder)


def as_parquet(rows: list[dict[str, str]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


TENSORS = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1, dtype=torch.int64)})
# Name of a file, who reads it, and a sound content: as JSON, or the bytes themselves.
READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "experiment": ("x.toml", load, to_toml(load(RANDOM).experiment).encode()),
    "batch": ("x.json", read_batch, BATCH),
    "rollouts": ("x.jsonl", lambda path: list(read_rollouts(path)), ROLLOUT),
    "evaluations": ("x.jsonl", read_evaluations, EVALUATION),
    "metrics": ("x.jsonl", lambda path: refused_in_a_row(lines(path)), ROW),
    "metrics-resumed": ("x.jsonl", sink, ROW),
    "metrics-rewound": ("x.jsonl", lambda path: drop_after(path, 1), ROW),
    "card": ("run.json", card, {"started": "x", "questions": "y", "resumed": [{}]}),
    "tracker": ("x.json", tracked, {"a": 0.5, "b": [1, 2]}),
    "manifest": ("x.json", checkpoint, MANIFEST),
    "states": ("x.json", states, {"a": 1}),
    "tensors": ("x.safetensors", states, TENSORS),
    "table-jsonl": ("x.jsonl", lambda path: TableTask(str(path)).questions(), TABLE[0]),
    "table-json": ("x.json", lambda path: TableTask(str(path)).questions(), TABLE),
    "table-parquet": (
        "x.parquet",
        lambda path: TableTask(str(path)).questions(),
        as_parquet([{"prompt": f"{n}+1=", "answer": f"{n + 1}", "id": f"{n}"} for n in range(5)]),
    ),
}
NASTY = [
    b"", b"\0", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"1e999999", b"NaN", b"-Infinity",
    b'{"step": Infinity, "seconds": NaN}', b'{"step": 1e400}', b"null", b"[]", b"{}", b'"\\ud800"', b"PAR1" * 4,
    b'{"sequences": {}}', b'{"format": "gnomon-batch/1", "sequences": [[]]}', b"a = 0x" + b"f" * 10_000,
    b"a = " + b"[" * 100_000, b"a" + b".a" * 50_000 + b" = 1", b"\xef\xbb\xbf{}", b"a = 1979-05-27T07:32:00Z",
]  # fmt: skip
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**18, 10**400, -(10**400)]),
    st.floats(),
    st.text(string.printable + "\u00e9\0", max_size=8),
    st.just([]),
    st.just({}),
    st.just([[1]]),
    st.just({"a": {"b": 1}}),
    st.just("../../etc/passwd"),
    st.just("/etc/passwd"),
)


def tried(folder: Path, name: str, content: bytes) -> None:
    """Read a file with this content: what is raised must be ours, of one message, and short."""
    file, read, _ = READERS[name]
    path = folder / file
    path.write_bytes(content)
    _, error = outcome(lambda: read(path))
    assert error is None or 0 < len(str(error)) < 20_000


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, below in inner for place in places(below, (*path, key)))]


def changed(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    """Return the value with something odd at one place."""
    if not place:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = changed(value[place[0]], place[1:], odd)
    return copy


def odd_somewhere(value: Any, data: st.DataObject) -> bytes:
    """Return the value as JSON, with something odd at any place."""
    return json.dumps(changed(value, data.draw(st.sampled_from(places(value))), data.draw(ODD))).encode()


def spliced(content: bytes, data: st.DataObject, end: int | None = None) -> bytes:
    """Return the bytes with up to three others in the place of up to three, at most ``end`` from the start."""
    at = data.draw(st.integers(0, len(content) if end is None else min(len(content), end)))
    return content[:at] + data.draw(st.binary(max_size=3)) + content[at + data.draw(st.integers(0, 3)) :]


def odd_line(content: bytes, data: st.DataObject) -> bytes:
    """Return lines of JSON with something odd at any place of one of them."""
    lines = content.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = odd_somewhere(json.loads(lines[at]), data)
    return b"\n".join(lines) + b"\n"


def each_nasty(place: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield each nasty content with a new folder for it."""
    for number, content in enumerate(NASTY):
        folder = place / str(number)
        folder.mkdir()
        yield folder, content


@pytest.mark.parametrize("name", READERS)
def test_nasty_contents_are_one_error(tmp_path: Path, name: str):
    """Nothing, no text, nesting without end, numbers beyond every type, and the wrong kind of file."""
    for folder, content in each_nasty(tmp_path):
        tried(folder, name, content)


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"manifest", "states", "tensors"}))
@pytest.mark.parametrize("kind", ["folder", "endless link"])
def test_what_cannot_be_opened_is_one_error(tmp_path: Path, name: str, kind: str):
    """A folder in the place of a file, or a link that leads to itself, is refused or passed over as damage is."""
    file, read, _ = READERS[name]
    path = tmp_path / file
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)

    _, error = outcome(lambda: read(path))

    assert error is None or 0 < len(str(error)) < 20_000


def _mutate(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    """Read bytes that are noise, or a sound file of which one place or byte is another."""
    sound = READERS[name][2]
    folder = tmp_path_factory.mktemp("fuzz")
    if data.draw(st.integers(0, 3)) == 0:
        tried(folder, name, data.draw(st.binary(max_size=200)))
        return
    content = sound
    if not isinstance(sound, bytes):
        content = odd_somewhere(sound, data)
    if isinstance(sound, bytes) or data.draw(st.booleans()):
        content = spliced(content, data)
    tried(folder, name, content)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=QUICK)
def test_any_bytes_are_an_error_or_an_answer(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject):
    """Of every file that is read: noise, and sound files of which anything was changed."""
    _mutate(tmp_path_factory, name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=THOROUGH)
def test_any_bytes_are_an_error_or_an_answer_very_often(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
):
    """The same, 1,000 times a file."""
    _mutate(tmp_path_factory, name, data)


def _sound_experiment() -> dict[str, Any]:
    reward = "rewards=[{kind='numeric'}]"
    return tomllib.loads(to_toml(load(RANDOM, ["algorithm=spo", "algorithm.tracker.initial=prior", reward]).experiment))


def _experiment(data: st.DataObject, sound: dict[str, Any]) -> None:
    table = changed(sound, data.draw(st.sampled_from(places(sound)[1:])), data.draw(ODD))
    if data.draw(st.booleans()):
        table[data.draw(st.sampled_from(["prompts_per_step", "num_generations", "precision", "rewards", "x"]))] = (
            data.draw(ODD)
        )
    loaded, error = outcome(lambda: from_table(table))
    assert error is None or 0 < len(str(error)) < 20_000
    if loaded is None:
        return
    assert to_toml(from_table(tomllib.loads(to_toml(loaded.experiment))).experiment) == to_toml(loaded.experiment)


@given(data=st.data())
@settings(max_examples=4 * QUICK)
def test_an_experiment_with_anything_in_any_place_is_refused_or_meant(data: st.DataObject):
    """One value of a whole experiment replaced: a UserError, or an experiment that its record gives back."""
    _experiment(data, SOUND)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=2 * THOROUGH)
def test_an_experiment_with_anything_in_any_place_is_refused_or_meant_very_often(data: st.DataObject):
    """The same, 1,000 times."""
    _experiment(data, SOUND)


SOUND = _sound_experiment()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=1000000000000000000", "steps = 1000000000000000000 is more than 1000000000000"),
        ("rollouts_per_step=1000000000000", "rollouts_per_step = 1000000000000 is more than 1000000"),
        ("algorithm.num_generations=1000000000000", "algorithm.num_generations = 1000000000000 is more than"),
        ("task.size=1000000000000", "task.size = 1000000000000 is more than 10000000"),
        ("engine.count=1000000", "engine.count = 1000000 is more than 1000"),
        ("grading.workers=1000000", "grading.workers = 1000000 is more than 1000"),
        ("evaluation.samples=1000000000", "evaluation.samples = 1000000000 is more than 100000"),
        ("held_out.size=1000000000", "held_out.size = 1000000000 is more than 10000000"),
        ("algorithm.updates.epochs=1000000000", "epochs = 1000000000 is more than 10000"),
        ("task.terms=1000000000", "task.terms = 1000000000 is more than 10000"),
    ],
)
def test_absurd_counts_are_refused_before_memory_is_taken(override: str, message: str):
    """The key, its value and the largest that can be meant."""
    with pytest.raises(UserError) as raised:
        load(RANDOM, [override])

    assert message in str(raised.value)
