"""Whatever stands in the files of a study: what is compared, on which questions, what its runs and claims left behind.

As in `test_files.py`: one clear error of ours, or what the file says.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from experiments.claims.folders import CODE, RESULTS, ClaimFolder
from experiments.claims.pages import page, table
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.test_files import SOUND, changed, each_nasty, odd_line, odd_somewhere, places, spliced
from tests.faults.test_run_files import or_ours, with_file
from tests.insight.made_runs import add_rows, evaluation, made_run
from tests.random_model import RANDOM

from gnomon.analysis.compare.records import read_trained
from gnomon.analysis.compare.run import FORMAT, TERMS, Design, RunLimit, _refuse_other, _refuse_other_study
from gnomon.analysis.compare.statistics import ComparedSetting, summarize
from gnomon.config.experiment import from_table, load, to_toml
from gnomon.tasks.benchmarks import BENCHMARKS, BenchmarkTask
from gnomon.training.build_data import questions

QUICK, THOROUGH = 25, 1000
TINY = to_toml(load(RANDOM).experiment)
LIMIT = RunLimit(1000.0, "tokens")
CLAIM = """
from experiments.claims.definition import Claim, Level
from experiments.claims.estimates import MeasuredValues

CLAIM = Claim(
    title="Toys", source="made up", claim="B beats A.", protocol="None.",
    expectations=(Level("more", "a", "x", above=0.0),),
    measure=lambda place: Measured(),
)
"""
TESTED = {
    "date": "2026-01-01", "machine": "m", "versions": {"torch": "2"}, "seconds": 1.5, "cpu_minutes": 2.0,
    "numbers": {"a": {"x": {"0": 1.0, "1": 2.0}}}, "curves": {"a": {"y": {"0": [[1, 2.0]]}}}, "failures": ["f"],
}  # fmt: skip
# What `gnomon.tasks.verifiers_env.write_questions` writes of an environment of the verifiers package.
OF_VERIFIERS = {
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}], "answer": "2",
    "info": {"a": [1]}, "task": "default",
}  # fmt: skip
ROW = {"prompt": "3+4=", "answer": "7", "id": "h"}


def compared(path: Path) -> None:
    """Read an experiment that is compared."""
    design = Design.of(path, [], ["grpo", "spo"], 2, LIMIT)
    design.terms()
    for contestant in design.contestants:
        for seed in design.seed_numbers():
            design.job(contestant, seed, path.parent).experiment()


def entered(path: Path) -> None:
    """Read an experiment as one of the algorithms."""
    Design.of(RANDOM, [], ["spo", str(path)], 1, LIMIT)


def held_out(path: Path) -> None:
    """Read a table as what is held out of another task."""
    questions(load(RANDOM, [f"evaluation.task={{kind='table', path='{path}'}}", "held_out.size=2"]).experiment)


def benchmark(path: Path) -> None:
    """Read a local copy of a published test set, under every name."""
    for name in BENCHMARKS:
        or_ours(lambda name=name: BenchmarkTask(name, path=str(path)).questions())


def terms(path: Path) -> None:
    """Find this in the folder of a comparison."""
    folder = path.parent / "comparison"
    folder.mkdir(exist_ok=True)
    (folder / TERMS).write_bytes(path.read_bytes())
    _refuse_other_study(Design.of(RANDOM, [], ["grpo", "spo"], 2, LIMIT), folder)


def begun(path: Path) -> None:
    """Find this as the experiment of a study's run."""
    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    (folder / "experiment.toml").write_bytes(path.read_bytes())
    _refuse_other(folder, to_toml(load(RANDOM, ["steps=3"]).experiment))


def results(path: Path) -> None:
    """Find this as what a claim measured the last time."""
    folder = ClaimFolder(path.parent)
    (path.parent / CODE).write_text(CLAIM)
    (path.parent / RESULTS).write_bytes(path.read_bytes())
    tested = folder.tested()
    json.dumps(folder.row(tested))
    assert "Toys" in page("toy", folder.claim(), tested) + table({"toy": folder})


READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "compared": ("x.toml", compared, TINY.encode()),
    "entered": ("y.toml", entered, TINY.encode()),
    "held-out": ("x.jsonl", held_out, ROW),
    "held-out-json": ("x.json", held_out, [ROW, {"prompt": "1+1=", "answer": 2}]),
    "of-verifiers": ("x.jsonl", held_out, OF_VERIFIERS),
    "benchmark": ("x.jsonl", benchmark, {"question": "q", "problem": "p", "answer": "#### 72", "solution": "s"}),
    "terms": ("x.json", terms, {"format": FORMAT, "terms": Design.of(RANDOM, [], ["grpo", "spo"], 2, LIMIT).terms()}),
    "begun": ("x.toml", begun, TINY.encode()),
    "results": ("x.json", results, TESTED),
}


def tried(folder: Path, name: str, content: bytes) -> None:
    """Read a file with this content."""
    file, read, _ = READERS[name]
    path = folder / file
    path.write_bytes(content)
    or_ours(lambda: read(path))


@pytest.mark.parametrize("name", READERS)
def test_nasty_contents_are_one_error(tmp_path: Path, name: str):
    """Nothing, no text, nesting without end, numbers beyond every type, and the wrong kind of file."""
    for folder, content in each_nasty(tmp_path):
        tried(folder, name, content)


def _mutate(folder: Path, name: str, data: st.DataObject) -> None:
    """Read bytes that are noise, or a sound file of which one place or byte is another."""
    sound = READERS[name][2]
    if data.draw(st.integers(0, 7)) == 0:
        tried(folder, name, data.draw(st.binary(max_size=200)))
        return
    if READERS[name][0].endswith(".toml") and data.draw(st.booleans()):
        tried(folder, name, _odd_experiment(data))
        return
    content = sound if isinstance(sound, bytes) else odd_somewhere(sound, data)
    if isinstance(sound, bytes) or data.draw(st.booleans()):
        content = spliced(content, data)
    tried(folder, name, content)


def _odd_experiment(data: st.DataObject) -> bytes:
    """Return an experiment with something in one place that stands there in another experiment's other place."""
    place = data.draw(st.sampled_from([p for p in places(SOUND)[1:] if p]))
    value = SOUND
    for key in data.draw(st.sampled_from(places(SOUND)[1:])):
        value = value[key]
    table = changed(SOUND, place, value)
    try:
        return to_toml(from_table(table).experiment).encode()
    except ValueError:
        return json.dumps(table).encode()


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=QUICK)
def test_any_bytes_are_an_error_or_an_answer(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject):
    """Of every file of a study: noise, and sound files of which anything was changed."""
    _mutate(tmp_path_factory.mktemp("fuzz"), name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=THOROUGH)
def test_any_bytes_are_an_error_or_an_answer_very_often(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
):
    """The same, 1,000 times a file."""
    _mutate(tmp_path_factory.mktemp("fuzz"), name, data)


ANSWERED = {
    "prompt_id": "a", "question": "q", "scores": [1.0, 0.0], "answers": ["4", None], "lengths": [3, 9],
    "truncated": 0, "errors": 0,
}  # fmt: skip
EVALUATION = {
    "pass_at": {"1": 0.5}, "maj_at": {}, "length_tokens_mean": 2.0, "truncated_fraction": 0.0, "errors": 0,
    "seconds": 1.0,
}  # fmt: skip
FILES = ("metrics.jsonl", "evaluations.jsonl", "rollouts/step-000004.jsonl", "evaluations/step-000000.jsonl")
SETTING = ComparedSetting(
    "sums", "tiny", "arithmetic", "1,000 generated tokens", "tokens", 1000.0, 40, ("grpo", "p3o"), 2, 1
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run as a comparison reads it."""
    folder = made_run(tmp_path_factory.mktemp("compared") / "run", done=4, steps=4)
    (folder / "evaluations.jsonl").unlink()
    add_rows(folder / "evaluations.jsonl", [evaluation(0, 0.25) | EVALUATION])
    (folder / "evaluations").mkdir()
    add_rows(folder / "evaluations" / "step-000000.jsonl", [ANSWERED])
    return folder


def summed(folder: Path) -> None:
    """Read a run as two algorithms' and compare them."""
    runs = [read_trained(name, 0, folder) for name in ("grpo", "p3o")]
    json.dumps(summarize(SETTING, runs).as_row())


def test_a_sound_run_is_compared(run: Path):
    """So that passing all over would be noticed."""
    summed(run)


def _mutate_run(folder: Path, run: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    content = (run / name).read_bytes()
    content = odd_line(content, data) if data.draw(st.booleans()) else spliced(content, data)
    with_file(run, folder, name, content)
    or_ours(lambda: summed(folder))


@given(data=st.data())
@settings(max_examples=QUICK)
def test_any_change_of_a_run_is_an_error_or_compared(
    tmp_path_factory: pytest.TempPathFactory, run: Path, data: st.DataObject
):
    """One value, or a few bytes, of one file of a run that is compared are another."""
    _mutate_run(tmp_path_factory.mktemp("fuzz") / "run", run, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=THOROUGH)
def test_any_change_of_a_run_is_an_error_or_compared_very_often(
    tmp_path_factory: pytest.TempPathFactory, run: Path, data: st.DataObject
):
    """The same, 1,000 times."""
    _mutate_run(tmp_path_factory.mktemp("fuzz") / "run", run, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=100)
def test_a_data_set_on_disk_with_any_change_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """A folder that ``save_to_disk`` wrote, of which a few bytes of one file are others."""
    folder = tmp_path_factory.mktemp("saved") / "rows"
    datasets.Dataset.from_list([{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(4)]).save_to_disk(folder)
    path = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file())))
    path.write_bytes(spliced(path.read_bytes(), data))
    or_ours(lambda: held_out(folder))
