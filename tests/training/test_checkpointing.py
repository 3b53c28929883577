"""What a run saves, and what it refuses to start without."""

import asyncio
import errno
import io
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.runs import same, trace

from gnomon.algorithms import resolve
from gnomon.config.experiment import load
from gnomon.core import failpoints
from gnomon.core.errors import CheckpointError, ConfigError, Stopped
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch, Grade, State, Stateful, Task
from gnomon.engines.base import Sampling
from gnomon.engines.pool import EnginePool
from gnomon.engines.scripted import ScriptedEngine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.tiny import tiny_model, tiny_tokenizer
from gnomon.records.background import Background
from gnomon.records.checkpoints import CheckpointRef, Checkpoints
from gnomon.records.checkpoints import load as load_checkpoint
from gnomon.records.console import Console
from gnomon.records.jsonl import JsonLines, read_rows
from gnomon.records.rollouts import RolloutLog
from gnomon.rewards.base import Sample
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.api import resume, train_experiment
from gnomon.training.checkpointing import STATELESS, Saver, check_counted, restore
from gnomon.training.run import Components, Progress, Run, Schedule, StopRequest
from gnomon.training.run_logger import RunLogger
from gnomon.training.train_loop import train

STEPS = 4
QUICK = [
    "rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=40", "held_out.size=4", "rollouts_per_step=8",
    "algorithm.num_generations=4", f"steps={STEPS}", "evaluation.before=false", "grading.workers=1",
    "checkpoints.every=1",
]  # fmt: skip


@dataclass(frozen=True)
class Letters:
    """Twenty-six prompts of one letter."""

    name: str = "letters"

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Task:
        return Task(f"letter-{index}", (65 + index,), chr(65 + index))


@dataclass(frozen=True)
class Even:
    """Rewards answers of even length."""

    async def grade(self, sample: Sample) -> Grade:
        return Grade(float(len(sample.completion) % 2 == 0))


def decode(tokens: Any) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


Built = tuple[Run, dict[str, Stateful]]


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    """Return a run with a learner, a scripted engine and a curriculum, and its parts."""
    learner = TorchLearner(tiny_model(), LearnerConfig(precision="fp32"), steps=1)
    engine = EnginePool({"scripted": ScriptedEngine(lambda prompt, key: "4")})
    curriculum = UniformCurriculum(26, seed=0)
    rollouter = Rollouter(engine, Even(), decode, Sampling(max_completion_length=2), 4, 0)
    stream = RolloutScheduler(curriculum, Letters(), rollouter, 2)
    logger = RunLogger(Console(stream=io.StringIO()), [], JsonLines(tmp_path / "evaluations.jsonl"))
    run = Run(
        Components(resolve("grpo"), learner, engine, stream, curriculum),
        Schedule(steps=1, temperature=1.0, seed=0, save=lambda step, is_best: None),
        Progress(logger),
    )
    yield run, {"learner": learner, "curriculum": curriculum, "stream": stream, "budget": run.progress.budget}
    logger.close()


def test_a_run_whose_parts_are_all_registered_starts(built: Built):
    """And without any one of them it does not."""
    run, parts = built
    check_counted(run, parts)

    for left_out in parts:
        place = rf"run\.(components|progress)\.{left_out} \(gnomon.* can change from step to step"
        with pytest.raises(ConfigError, match=place):
            check_counted(run, {name: part for name, part in parts.items() if name != left_out})


class Remembering:
    """A tracker that nobody registered: it remembers whom it has seen."""

    def __init__(self) -> None:
        self.baseline: Callable[[str], float] | None = None
        self.seen: set[str] = set()

    async def observe(self, groups: Any, updates: Any) -> Metrics:
        self.seen |= {group.task.id for group in groups}
        return Metrics()


@dataclass(frozen=True)
class Halfway:
    """Frozen, and yet it remembers."""

    baseline: Callable[[str], float] | None = None
    seen: list[str] = field(default_factory=list)

    async def observe(self, groups: Any, updates: Any) -> Metrics:
        self.seen.extend(group.task.id for group in groups)
        return Metrics()


@pytest.mark.parametrize(
    ("tracking", "place"),
    [
        (Remembering(), r"run\.components\.tracking \(.*Remembering\)"),
        (Halfway(), r"run\.components\.tracking\.seen \(builtins\.list\)"),
    ],
)
def test_a_tracker_that_is_no_part_is_refused(built: Built, tracking: Any, place: str):
    """Whether it can change itself, or holds something that can; the message says where it is and what to do."""
    run, parts = built
    run.components.tracking = tracking

    with pytest.raises(ConfigError, match=rf"{place} can change from step to step.*\n.*state\(\) and restore\(\)"):
        check_counted(run, parts)


class Shuffling:
    """A curriculum that draws from a generator of its own, and saves it or not."""

    def __init__(self, saves: bool) -> None:
        self._random = random.Random(0)
        self._saves = saves

    def take(self, count: int) -> list[int]:
        return self._random.sample(range(26), count)

    def observe(self, groups: Any) -> Metrics:
        return Metrics()

    def state(self) -> State:
        return State(values={"words": list(self._random.getstate()[1])} if self._saves else {})

    def restore(self, state: State) -> None:
        self._random.setstate((3, tuple(state.values["words"]), None))


def test_a_curriculum_that_does_not_save_its_generator_is_refused(built: Built):
    """It is one of the parts, and its place in its random numbers is not in its state; with that it is fine."""
    run, parts = built
    run.components.curriculum = parts["curriculum"] = run.components.stream.curriculum = Shuffling(saves=True)
    check_counted(run, parts)

    run.components.curriculum = parts["curriculum"] = run.components.stream.curriculum = Shuffling(saves=False)
    with pytest.raises(ConfigError, match=r"curriculum\._random \(random\.Random\) draws random numbers"):
        check_counted(run, parts)


def test_a_learner_with_noise_is_refused(built: Built):
    """A generator below the learner, which its state does not hold."""
    run, parts = built
    noise: Any = run.components.learner
    noise.generator = torch.Generator()

    with pytest.raises(ConfigError, match=r"learner\.generator \(torch\..*Generator\) draws random numbers"):
        check_counted(run, parts)


def test_what_a_closure_remembers_is_refused(built: Built):
    """A function that appends to a list of its own."""
    run, parts = built
    seen: list[int] = []
    run.schedule.save = lambda step, is_best: seen.append(step)

    with pytest.raises(ConfigError, match=r"run\.schedule\.save\.seen \(builtins\.list\) can change"):
        check_counted(run, parts)


def test_no_part_is_excused():
    """What is listed as stateless is nothing that could be saved, and each has its reason in words."""
    assert [kind.__name__ for kind in STATELESS if {"state", "restore"} <= set(dir(kind))] == []
    assert all(reason.strip() for reason in STATELESS.values())


def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path, built: Built):
    """With the names that it lacks and that it has beside; nothing was restored then."""
    Checkpoints(tmp_path).save(1, {"learner": State(), "tracker": State()}, lambda folder: None)
    _, parts = built

    with pytest.raises(CheckpointError, match=r"lacks \['budget', 'curriculum', 'stream'\] and has .*tracker"):
        restore(parts, CheckpointRef(tmp_path / "step-1", 1))


def saver(folder: Path, learner: TorchLearner, background: Background, said: io.StringIO) -> Saver:
    parts: dict[str, Stateful] = {"learner": learner}
    return Saver(Checkpoints(folder), parts, learner, tiny_tokenizer(), Console(stream=said), background)


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(tmp_path: Path):
    """Weights that change while they are written are written as they were: masters and the model alike."""
    learner = TorchLearner(tiny_model(), LearnerConfig(precision="fp32"), steps=1)
    before = learner.state().tensors["master/model.embed_tokens.weight"]
    with Background() as background:
        saves = saver(tmp_path, learner, background, io.StringIO())
        saves.save(1)
        nothing = {name: torch.zeros_like(tensor) for name, tensor in learner.state().tensors.items()}
        learner.restore(State(nothing, learner.state().values))
    state = load_checkpoint(tmp_path / "step-1")["learner"].tensors
    model = load_file(tmp_path / "step-1" / "model.safetensors")

    assert before.any()
    assert torch.equal(state["master/model.embed_tokens.weight"], before)
    assert torch.equal(model["model.embed_tokens.weight"], before)
    assert set(saves.metrics()) == {
        "time/checkpoint_wait_seconds", "time/checkpoint_write_seconds", "time/checkpoint_copy_seconds",
    }  # fmt: skip


def test_where_memory_is_short_the_run_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With less free than the copy takes, the checkpoint is there when `save` returns; one warning for all of them."""
    learner, said = TorchLearner(tiny_model(), LearnerConfig(precision="fp32"), steps=1), io.StringIO()
    monkeypatch.setattr("gnomon.training.checkpointing.free_memory_bytes", lambda: 1000)
    with Background() as background:
        saves = saver(tmp_path, learner, background, said)
        for step in (1, 2):
            saves.save(step)
            assert (tmp_path / f"step-{step}" / "manifest.json").is_file()
        seconds = saves.metrics().values()

    assert said.getvalue().count("steps wait while checkpoints are written") == 1
    assert seconds["time/checkpoint_wait_seconds"] >= seconds["time/checkpoint_write_seconds"] > 0


def test_synchronous_and_asynchronous_runs_are_the_same_run(tmp_path: Path):
    """Same metrics, records, states and weights; each row says how long the step waited for checkpoints."""
    for is_asynchronous in ("true", "false"):
        options = [*QUICK, f"checkpoints.asynchronous={is_asynchronous}"]
        train_experiment(load("tiny", options), tmp_path / is_asynchronous)
    rows = list(read_rows(tmp_path / "true" / "metrics.jsonl"))

    same(trace(tmp_path / "true", STEPS), trace(tmp_path / "false", STEPS))
    assert all("time/checkpoint_wait_seconds" in row for row in rows)


def test_a_full_disk_ends_the_run_with_74_and_loses_nothing(tmp_path: Path):
    """The second checkpoint meets a full disk in the background: the next step ends the run; then it goes on."""
    run = tmp_path / "run"
    failpoints.arm("checkpoint-manifest:2:full")
    try:
        with pytest.raises(OSError, match="no space for the checkpoint of step 2") as raised:
            train_experiment(load("tiny", QUICK), run)
    finally:
        failpoints.arm("")
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1"]
    assert len(list(read_rows(run / "metrics.jsonl"))) < STEPS

    resume(run)
    train_experiment(load("tiny", QUICK), tmp_path / "whole")
    same(trace(run, STEPS), trace(tmp_path / "whole", STEPS))


def test_a_stopped_run_is_saved_when_it_says_so(tmp_path: Path):
    """The signal's checkpoint is written in the background as well, and `Stopped` comes after it has its name."""
    with pytest.raises(Stopped, match="stopped after step 1 of 4, and saved"):
        train_experiment(
            load("tiny", [*QUICK, "checkpoints.every=0"]), tmp_path / "run", StopRequest(signal.SIGTERM, after=1)
        )

    assert (tmp_path / "run" / "checkpoints" / "step-1" / "manifest.json").is_file()


def test_a_stop_whose_checkpoint_fails_does_not_say_that_it_is_saved(tmp_path: Path):
    """What is raised is the full disk."""
    failpoints.arm("checkpoint-manifest:1:full")
    try:
        with pytest.raises(OSError, match="no space for the checkpoint of step 1"):
            train_experiment(load("tiny", QUICK), tmp_path / "run", StopRequest(signal.SIGTERM, after=1))
    finally:
        failpoints.arm("")


def test_a_state_of_another_form_is_one_error_of_ours(tmp_path: Path, built: Built):
    """Its hashes are right, and its values are not what this version writes."""
    _, parts = built
    Checkpoints(tmp_path).save(1, {name: State() for name in parts}, lambda folder: None)

    with pytest.raises(CheckpointError, match=r"the part \w+ in .*step-1 is not what this version of gnomon writes"):
        restore(parts, CheckpointRef(tmp_path / "step-1", 1))


@dataclass
class Held(RolloutLog):
    """A record whose first step is written no earlier than the second step has its answers."""

    asked: threading.Event = field(default_factory=threading.Event)
    was_in_time: list[bool] = field(default_factory=list)

    def write(self, step: int, *told: Any) -> None:
        self.was_in_time.append(self.asked.wait(60))
        super().write(step, *told)


def test_a_step_goes_on_while_the_one_before_is_written_down(built: Built, tmp_path: Path):
    """The second step begins first; a checkpoint comes after the record of its step."""
    run, _ = built
    held, saved = Held(tmp_path / "rollouts"), []

    def collated(groups: Any, *how: Any) -> Batch:
        if run.components.learner.version == 1:
            held.asked.set()
        return collate(groups, *how)

    run.components.collate = collated
    run.progress.logger.rollouts, run.progress.logger.recorder = held, Background(what="the record of the step")
    run.schedule.steps = 2
    run.schedule.save = lambda step, _: saved.append([step, *sorted(p.name for p in held.directory.iterdir())])
    with run.progress.logger.recorder:
        asyncio.run(train(run))

    assert held.was_in_time == [True, True]
    assert saved == [[2, "step-000001.jsonl", "step-000002.jsonl"]]
