"""SIGKILL at any of fourteen points, then the same command again: the run that was never killed, to the bit."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.random_model import RANDOM
from tests.training.killed import POINTS, RARE, attempt, killed
from tests.training.runs import broken_off, left_out, same, trace
from transformers import AutoModelForCausalLM

from gnomon.algorithms import PRESETS
from gnomon.config.experiment import load
from gnomon.core.failpoints import POINTS as ALL_POINTS
from gnomon.records.rollouts import read_rollouts
from gnomon.training.api import resume, train_experiment
from gnomon.training.build_data import build_curriculum, questions

pytestmark = pytest.mark.timeout(1200)
STEPS = 3
# A machine that stands still for a while, or is stopped, must not look like a verifier that hangs: that is F5.
PATIENT = ("grading.deadline_seconds=600", "engine.timeout_seconds=600")
# A reward that an untrained model earns now and then, so that each step has something to learn.
REWARD = "rewards=[{kind='format', pattern='[!-P].*'}]"
COMMON = (
    REWARD, "task.size=40", "rollouts_per_step=8", "held_out.size=4", "evaluation.every=2", "grading.workers=1",
    "checkpoints.every=1", "checkpoints.keep_last=1", *PATIENT,
)  # fmt: skip
PRETRAINED = "algorithm.critic.pretraining.steps=2"
TAUGHT_TWICE = "algorithm.critic.updates.minibatches=2"
# What a setting for long answers, large batches or long runs must give up for three tokens and three steps.
SETTINGS: dict[str, tuple[str, ...]] = {
    "a-star-po": ("algorithm.tracker.n0=2",),
    "clip-cov": ("seed=1",),  # with seed 0 two updates have a gradient, and a run is killed at the third
    "dapo": ("algorithm.overlong=none",),
    "dr-grpo": ("algorithm.aggregate.length=3",),
    "opd": ("algorithm.reference.model=tiny-sums",),
    "ppo": (TAUGHT_TWICE,),
    "spo": ("algorithm.tracker.n0=2",),
    "vapo": (PRETRAINED, TAUGHT_TWICE),
    "vapo-review": (PRETRAINED, "algorithm.replay={every=1, rows=4, updates=1}"),
    "vc-ppo": (PRETRAINED, TAUGHT_TWICE),
}
QUICK = {"grpo": ("decode", "optimizer", "checkpoint-rename"), "spo": ("grade", "deliver", "checkpoint-file")}


def overrides(preset: str, *more: str) -> list[str]:
    """Return what is changed about the `tiny` experiment."""
    groups = ("algorithm.num_generations=2",) if PRESETS[preset].num_generations > 1 else ()
    updates = ("algorithm.updates.minibatches=2",)
    return [f"algorithm={preset}", f"steps={STEPS}", *COMMON, *groups, *updates, *SETTINGS.get(preset, ()), *more]


def cases() -> Iterator[object]:
    """Yield every preset with every point, all but a few of them marked as slow."""
    for preset in PRESETS:
        points = [p for p in POINTS if p not in QUICK.get(preset, ())]
        yield pytest.param(preset, points, marks=pytest.mark.slow, id=preset)
    for preset, points in QUICK.items():  # SPO's state has all parts of GRPO's
        yield pytest.param(preset, points, marks=pytest.mark.slow if preset == "grpo" else (), id=f"{preset}-quick")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a preset to a run that nothing interrupted, with all of its checkpoints."""
    made: dict[str, Path] = {}

    def run(preset: str) -> Path:
        if preset not in made:
            made[preset] = tmp_path_factory.mktemp(preset) / "run"
            assert attempt(made[preset], overrides(preset, "checkpoints.keep_last=9")) == 0
        return made[preset]

    return run


def test_every_point_is_died_at():
    """None of the program's points is left out, here or where the rare ones are tried."""
    assert {*POINTS, *RARE} == set(ALL_POINTS)


@pytest.mark.parametrize(("preset", "points"), list(cases()))
def test_a_run_killed_anywhere_is_the_run_that_was_not(
    tmp_path: Path, whole: Callable[[str], Path], preset: str, points: list[str]
):
    """Metrics, evaluations, rollouts and their log-probabilities, every part of the state, weights: byte for byte."""
    for point in points:
        run = killed(tmp_path / point, overrides(preset), point)

        same(trace(run, STEPS), trace(whole(preset), STEPS))
        left = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]
        assert set(left) <= {"best.json"}
        shutil.rmtree(run)


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path, whole: Callable[[str], Path]):
    """Each session of a run dies somewhere else, before it is through at last."""
    run = tmp_path / "run"
    for point in ("start", "backward", "checkpoint-retire", "record"):
        assert attempt(run, overrides("grpo"), f"{point}:1") == -9
    assert attempt(run, overrides("grpo")) == 0

    same(trace(run, STEPS), trace(whole("grpo"), STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_no_part_of_the_state_can_be_left_out(tmp_path: Path, whole: Callable[[str], Path], preset: str):
    """With any one part as another run begins, and all others restored, the rest of the run is another.

    Generators of the whole process are drawn from by nobody here, how far value pre-training is decides until it is
    over, and what engines may differ by is measured in low precision alone: `test_rare_parts.py` tries these.
    """
    other = tmp_path / "other"
    assert attempt(other, [*overrides(preset), "steps=0", "seed=1"]) == 0
    fresh = other / "checkpoints" / "step-0" / "state"
    parts = {path.stem for path in fresh.glob("*.json")} - {"generators", "pretraining"}
    assert parts >= {"learner", "curriculum", "stream"}

    for part in sorted(parts):
        run = broken_off(whole(preset), tmp_path / part, 2)
        left_out(run, 2, part, fresh)
        resume(run)

        assert trace(run, STEPS)["metrics"][2:] != trace(whole(preset), STEPS)["metrics"][2:], part


def starts_like_pickle(content: bytes) -> bool:
    """Whether these may be a pickle of any binary protocol, or an archive, as torch writes them."""
    return content[:1] == b"\x80" or content[:2] == b"PK" or content[:2] == b"\x1f\x8b"


def check_files(run: Path) -> Counter[str]:
    """Read every file of a run as what it says it is, and return how many there are of each kind."""
    kinds: Counter[str] = Counter()
    assert (run / ".saved").read_bytes() == b"", "a mark, not a file to read"
    for path in (path for path in run.rglob("*") if path.is_file() and path.name != ".saved"):
        content = path.read_bytes()
        assert not starts_like_pickle(content), path
        kinds[path.suffix] += 1
        if path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".json" or path.name == ".lock":
            json.loads(content)
        elif path.suffix == ".jsonl":
            for line in content.splitlines():
                json.loads(line)
        else:
            # report.html runs one script, its own, by digest (tests/insight).
            assert path.suffix in (".toml", ".jinja", ".html"), path
    return kinds


@pytest.mark.parametrize(
    "preset", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_nothing_on_disk_is_code(whole: Callable[[str], Path], preset: str):
    """Every file of a run is JSON, TOML, safetensors, a page or a chat template; there is no pickle of any kind."""
    kinds = check_files(whole(preset))

    assert kinds[".safetensors"] >= STEPS * 4
    assert kinds[".json"] >= STEPS * 4


@pytest.mark.parametrize("preset", ["grpo", pytest.param("vapo-review", marks=pytest.mark.slow)])
def test_a_checkpoint_is_a_model_as_it_lies(whole: Callable[[str], Path], preset: str):
    """transformers loads the folder itself, with the trained weights; the one weight file at its top is the model's."""
    folder = whole(preset) / "checkpoints" / f"step-{STEPS}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    masters = load_file(folder / "state" / "learner.safetensors")

    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    trained = dict(model.named_parameters())
    assert {name for name in trained if not torch.equal(trained[name], masters[f"master/{name}"])} == set()


# 4 steps of two different prompts ask no prompt twice: there are 60 of them.
OVERLAPPED = [
    REWARD, "task.size=80", "held_out.size=2", "rollouts_per_step=8", "algorithm.num_generations=4", "steps=4",
    "max_staleness=2", "evaluation.before=false", "grading.workers=1", "checkpoints.every=1", "checkpoints.keep_last=1",
    *PATIENT,
]  # fmt: skip


def ledger(run: Path) -> dict[int, Counter[str]]:
    """Return of each step how many rollouts of each prompt were trained on."""
    steps = {int(path.stem.split("-")[1]): read_rollouts(path) for path in sorted(run.glob("rollouts/*.jsonl"))}
    return {step: Counter(row.rollout.task_id for row in rows if row.is_kept) for step, rows in steps.items()}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_an_asynchronous_run_loses_no_rollout_and_trains_on_none_twice(tmp_path: Path, point: str):
    """Each prompt is in one step, with all its answers, or still on its way: none is missing, and none is twice."""
    run = killed(tmp_path / "killed", OVERLAPPED, point)
    steps = ledger(run)
    experiment = load(RANDOM, OVERLAPPED).experiment
    tasks = questions(experiment).split.train
    stream = json.loads((run / "checkpoints" / "step-4" / "state" / "stream.json").read_text())
    trained = [task for step in steps.values() for task in step]
    waiting = [tasks[index].id for index, *_ in stream["pending"]]
    order = build_curriculum(experiment.algorithm, tasks, experiment.seed).curriculum.take(len(trained) + len(waiting))

    assert list(steps) == [1, 2, 3, 4]
    assert [list(step.values()) for step in steps.values()] == [[4, 4]] * 4
    assert sorted(trained + waiting) == sorted(tasks[index].id for index in order)
    assert len(set(trained + waiting)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("point", ["decode", "update", "checkpoint-manifest"])
def test_what_was_on_its_way_is_asked_again_with_the_same_draws(tmp_path: Path, point: str):
    """Where the weights stay as they are, so does every answer of an asynchronous run that was killed."""
    options = [*OVERLAPPED, "learner.optimizer.learning_rate=1e-30"]
    assert attempt(tmp_path / "whole", options) == 0
    run = killed(tmp_path / "killed", options, point)

    def answers(folder: Path) -> dict[str, list[tuple[int, ...]]]:
        found: dict[str, list[tuple[int, ...]]] = {}
        for path in sorted(folder.glob("rollouts/*.jsonl")):
            for row in read_rollouts(path):
                found.setdefault(row.rollout.task_id, []).append(row.rollout.response)
        return found

    left, right = answers(run), answers(tmp_path / "whole")
    both = left.keys() & right.keys()
    assert len(both) >= 6
    assert {task: left[task] for task in both} == {task: right[task] for task in both}


def test_another_experiment_does_not_go_on_with_a_run(tmp_path: Path, whole: Callable[[str], Path]):
    """The same command finds its run finished; with one key changed it is refused, and nothing is touched."""
    run = broken_off(whole("grpo"), tmp_path / "run", STEPS)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    same_again = train_experiment(load(RANDOM, overrides("grpo", "checkpoints.keep_last=9")), run)

    assert same_again.steps == STEPS
    with pytest.raises(OSError, match="holds a run already"):
        train_experiment(load(RANDOM, overrides("grpo", "checkpoints.keep_last=9", "seed=3")), run)
    assert {path: path.read_bytes() for path in before} == before
