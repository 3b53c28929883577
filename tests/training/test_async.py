"""Answering goes on while the policy is updated; the walk, its clock and its ledger, with real learners."""

import asyncio
import io
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.random_model import RANDOM
from tests.training.runs import broken_off

from gnomon.algorithms import resolve
from gnomon.config.experiment import load
from gnomon.core.errors import EngineError, Stopped
from gnomon.core.metrics import Metrics
from gnomon.core.types import Completion, Grade, Snapshot, Task
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import tiny_model
from gnomon.records.console import Console
from gnomon.records.jsonl import JsonLines, read_rows
from gnomon.records.rollouts import RecordedRollout, read_rollouts
from gnomon.rewards.base import Sample
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.api import resume, train_experiment
from gnomon.training.run import Components, Progress, Run, Schedule, StopRequest
from gnomon.training.run_logger import RunLogger
from gnomon.training.train_loop import train

T = TypeVar("T")
PROMPTS = 2
PATIENCE_SECONDS = 0.2


@dataclass
class Letters:
    """Twenty-six prompts of one letter."""

    name: str = "letters"

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Task:
        return Task(f"letter-{index}", (65 + index,), chr(65 + index))


class Even:
    """Rewards answers with an even number of even tokens."""

    async def grade(self, sample: Sample) -> Grade:
        return Grade(float(sample.completion.count("0") % 2))


@dataclass
class HalfwayEngine:
    """Half of each answer comes at once; the other half of those asked ahead only while an update runs.

    is_updating: set by the update. has_answered: set when an answer was finished meanwhile.
    """

    is_updating: threading.Event = field(default_factory=threading.Event)
    has_answered: threading.Event = field(default_factory=threading.Event)
    version: int = -1
    calls: int = 0

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.calls += 1
        oldest = self.version
        while self.calls > PROMPTS and not self.is_updating.is_set():
            await asyncio.sleep(0.001)
        if self.is_updating.is_set():
            self.has_answered.set()
        tokens = [tuple(key >> place & 127 for place in (0, 7)) for key in keys]
        return [Completion(t, (-5.0, -5.0), (-5.0, -5.0), oldest, self.version, "length") for t in tokens]

    async def load(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    async def close(self) -> None:
        return


class Watched(TorchLearner):
    """A learner whose update takes as long as an answer that arrives meanwhile, but not for ever."""

    def watch(self, engine: HalfwayEngine) -> list[bool]:
        """Return a list that says of each update whether an answer arrived while it ran."""
        self.engine, self.seen = engine, list[bool]()
        return self.seen

    def _update(self, *given: Any) -> Metrics:
        self.engine.is_updating.set()
        self.seen.append(self.engine.has_answered.wait(PATIENCE_SECONDS))
        return super()._update(*given)


class Blocking(Watched):
    """The same, computed where the event loop runs, as one would write it without thinking."""

    async def _run(self, work: Callable[[], T]) -> T:
        return work()


@dataclass
class Kept:
    """A sink that keeps what it is given."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def write(self, step: int, values: dict[str, float]) -> None:
        self.rows.append(dict(values))

    def close(self) -> None:
        return


def walked(folder: Path, kind: type[Watched]) -> tuple[list[bool], list[dict[str, float]]]:
    """Train one step while asking one step ahead; return what its update saw, and the metrics."""
    engine, sink = HalfwayEngine(), Kept()
    learner = kind(tiny_model(), LearnerConfig(precision="fp32"), steps=1)
    seen = learner.watch(engine)
    rollouter = Rollouter(
        engine, Even(), lambda ids: "".join(str(i % 2) for i in ids), Sampling(max_completion_length=2), 4, 0
    )
    curriculum = UniformCurriculum(26, seed=0)
    logger = RunLogger(Console(stream=io.StringIO()), [sink], JsonLines(folder / "evaluations.jsonl"))
    run = Run(
        Components(
            resolve("grpo"),
            learner,
            engine,
            RolloutScheduler(curriculum, Letters(), rollouter, PROMPTS, max_staleness=1),
            curriculum,
        ),
        Schedule(steps=1, temperature=1.0, seed=0, save=lambda step, is_best: None),
        Progress(logger),
    )
    asyncio.run(train(run))
    logger.close()
    return seen, sink.rows


def test_answers_arrive_while_an_update_runs(tmp_path: Path):
    """The update waits for an answer of the next step, which can only come if it leaves the event loop alone."""
    seen, rows = walked(tmp_path, Watched)

    assert seen == [True]
    assert rows[0]["learner/updates"] == 1
    assert rows[0]["stream/in_flight_groups"] == PROMPTS


def test_an_update_on_the_event_loop_would_make_the_walk_synchronous(tmp_path: Path):
    """The same walk with a learner that computes on the event loop: nothing arrives, which the test above would see."""
    seen, _ = walked(tmp_path, Blocking)

    assert seen == [False]


@dataclass
class Gate:
    """Grades of two prompts at first, and of two more whenever an update begins."""

    open: asyncio.Condition = field(default_factory=asyncio.Condition)
    known: list[str] = field(default_factory=list)
    most: int = PROMPTS

    async def grade(self, sample: Sample) -> Grade:
        if sample.prompt not in self.known:
            self.known.append(sample.prompt)
        async with self.open:
            await self.open.wait_for(lambda: self.known.index(sample.prompt) < self.most)
        return Grade(1.0)

    async def update(self) -> None:
        self.most += PROMPTS
        async with self.open:
            self.open.notify_all()


def test_one_step_ahead_answers_are_judged_while_the_engine_sleeps():
    """Grades of the next step come only while the learner works; each answer is of one version, a step old at most."""
    network, steps = tiny_model(), 4

    async def run() -> list[tuple[int, set[int]]]:
        pool, gate, found = EnginePool({"local": LocalEngine(tiny_model(), shared=False)}), Gate(), []
        rollouter = Rollouter(pool, gate, lambda ids: "", Sampling(max_completion_length=4), 4, 0)
        curriculum = UniformCurriculum(26, seed=0)
        stream = RolloutScheduler(curriculum, Letters(), rollouter, PROMPTS, max_staleness=1, rest=pool.sleep)
        await pool.load(Snapshot(0, lambda: merged_tensors(network)))
        async with stream:
            for step in range(steps):
                batch = await stream.next_batch()
                rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
                assert [rollout.oldest_version for rollout in rollouts] == [r.newest_version for r in rollouts]
                found.append((batch.in_flight, {step - rollout.oldest_version for rollout in rollouts}))
                await gate.update()
                while len(gate.known) - gate.most or any(not slot.is_ready for slot in stream._slots):
                    await asyncio.sleep(0)
                with pytest.raises(EngineError, match="the engine sleeps"):
                    await pool._members[0].engine.generate((65,), [1], Sampling(max_completion_length=1))
                await pool.load(Snapshot(step + 1, lambda: merged_tensors(network)))
        await pool.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [(PROMPTS, {0}), *[(PROMPTS, {1})] * (steps - 1)]


# 10 steps of two different prompts ask no prompt twice: there are 60 of them.
QUICK = (
    "task.size=80", "rollouts_per_step=8", "algorithm.num_generations=4", "steps=8", "checkpoints.every=2",
    "evaluation.before=false", "held_out.size=2", "sampling.max_completion_length=8",
    "learner.optimizer.learning_rate=1e-2",
)  # fmt: skip


def recorded(run: Path) -> dict[int, list[RecordedRollout]]:
    """Return the rollouts of each step."""
    return {int(p.stem.split("-")[1]): list(read_rollouts(p)) for p in sorted(run.glob("rollouts/*.jsonl"))}


def rows(run: Path) -> list[dict[str, Any]]:
    return list(read_rows(run / "metrics.jsonl"))


def test_weights_change_while_answers_are_half_generated(tmp_path: Path):
    """With a queue of answers before a small engine some are begun by one version and ended by another.

    None that is trained on has a token older than the bound. The answers are long and the steps small, so that no
    timing lets every publication fall between two answers, as it can when a policy has learned to end at once.
    """
    run = tmp_path / "run"
    long = ("sampling.max_completion_length=64", "learner.optimizer.learning_rate=1e-4", "engine.max_concurrent=3")
    train_experiment(load(RANDOM, [*QUICK, *long, "max_staleness=3"]), run)
    ages = [step - 1 - r.rollout.oldest_version for step, found in recorded(run).items() for r in found]
    spans = [r.rollout.newest_version - r.rollout.oldest_version for found in recorded(run).values() for r in found]

    assert max(ages) <= 3
    assert max(spans) >= 1
    assert [row["stream/staleness_steps_max"] for row in rows(run)] == [
        max(step - 1 - r.rollout.oldest_version for r in found) for step, found in recorded(run).items()
    ]


@pytest.mark.parametrize(
    "settings", [("max_staleness=2",), ("max_staleness=3", "staleness.slack=1", "staleness.stragglers=drop")]
)
def test_a_stopped_asynchronous_run_loses_no_prompt_and_trains_on_none_twice(tmp_path: Path, settings: tuple[str, ...]):
    """Stopped after step 1, resumed, and resumed from a crash: all steps whole, each prompt in one of them."""
    run, options = tmp_path / "run", [*QUICK, *settings, "checkpoints.keep_last=9"]
    with pytest.raises(Stopped):
        train_experiment(load(RANDOM, options), run, StopRequest(signal.SIGTERM, after=1))
    resume(run)
    again = broken_off(run, tmp_path / "again", 4)
    resume(again)

    for folder in (run, again):
        steps = recorded(folder)
        trained = Counter((r.rollout.task_id, n) for n, found in steps.items() for r in found if r.is_kept)
        assert list(steps) == list(range(1, 9))
        assert set(trained.values()) == {4}
        assert len({task for task, _ in trained}) == len(trained) == 16
        assert [row["stream/staleness_steps_max"] <= 3 for row in rows(folder)] == [True] * 8


def test_every_token_has_one_end(tmp_path: Path):
    """Trained, idle, failed, refused, surplus and distrusted tokens add up to those generated."""
    run = tmp_path / "run"
    trust = ("max_staleness=measured", "staleness.ess_floor=0.99", "staleness.stragglers=drop")
    reward = "rewards=[{kind='format', pattern='[!-P].*'}]"
    filtered = ("algorithm.keep=Informative", "algorithm.correction=Truncated")
    train_experiment(load(RANDOM, [*QUICK, *trust, *filtered, reward]), run)
    ends = ("trained", "idle", "failed", "refused", "surplus", "distrusted")

    for row in rows(run):
        assert sum(row[f"tokens/{name}"] for name in ends) == row["tokens/generated"]
    assert sum(row["tokens/refused"] for row in rows(run)) > 0
    assert sum(row["tokens/distrusted"] for row in rows(run)) > 0
    assert any(row["waste/off_policy_fraction"] > 0 for row in rows(run))
    assert sum(row["stream/distrusted_rollouts"] for row in rows(run)) % 4 == 0
    assert all(row["stream/admitted_ess_fraction"] >= row["stream/ess_fraction"] for row in rows(run))
    assert max(row["stream/steps_ahead"] for row in rows(run)) <= 8
