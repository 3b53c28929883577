"""Runs whose engine and learner take turns with the memory: order, equal results, and what two processes hold."""

import asyncio
import gc
import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.random_model import RANDOM
from tests.training.runs import same, trace

from gnomon.config.experiment import load
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.learner.distributed import DistributedLearner
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.records.jsonl import read_rows
from gnomon.records.rollouts import read_rollouts
from gnomon.training.api import train_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
QUICK = [
    "rewards=[{kind='format', pattern='[!-P].*'}]",
    f"steps={STEPS}", "rollouts_per_step=16", "algorithm.num_generations=4", "checkpoints.every=1",
    "checkpoints.keep_last=9", "evaluation.every=1", "grading.workers=1", "learner.processes=2",
]  # fmt: skip


def train(run: Path, *more: str) -> Path:
    train_experiment(load(RANDOM, [*QUICK, *more]), run)
    return run


def live() -> int:
    """Return the bytes of all tensors of this process, each memory once."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def test_they_take_turns_and_the_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The learner scores and updates between sleep and load alone, the engine answers and is evaluated between load and
    sleep alone; while it sleeps this process holds less by its weights; what the run left behind is equal to the bit.
    """
    events = list[tuple[str, int]]()

    def noted(kind: type, name: str) -> None:
        plain = getattr(kind, name)

        async def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if name != "sleep":
                events.append((name, live()))
            found = await plain(self, *arguments, **named)
            if name == "sleep":
                events.append((name, live()))
            return found

        monkeypatch.setattr(kind, name, call)

    for name in ("sleep", "load", "generate"):
        noted(LocalEngine, name)
    for name in ("score", "update"):
        noted(DistributedLearner, name)
    turns = train(tmp_path / "turns", "engine.sleeps=true")
    order = " ".join(name for name, _ in events)
    asleep = [size for name, size in events if name in ("sleep", "score", "update")]
    awake = [size for name, size in events if name == "generate"]
    events.clear()
    usual = train(tmp_path / "usual")

    a_step = r"(generate )+sleep score update load (generate )+"
    assert re.fullmatch(rf"load (generate )+({a_step}){{{STEPS}}}", f"{order} "), order
    weights = sum(one.nbytes for _, one in merged_tensors(tiny_model(0)))
    assert min(awake) - max(asleep) > 0.9 * weights
    same(trace(turns, STEPS), trace(usual, STEPS))
    cards = [json.loads((run / "run.json").read_text())["engines"] for run in (turns, usual)]
    assert ["releases" in card for card in cards] == [True, False]


def test_one_step_ahead_they_take_turns_too(tmp_path: Path):
    """With max_staleness = 1 every answer is of one version and, after the first step, one step old.

    Which of the questions on their way a step takes depends on what has been graded by then. The eight that were asked
    before the first update are answered by the first weights, so in two runs they have the same answers.
    """
    runs = [train(tmp_path / name, "engine.sleeps=true", "max_staleness=1") for name in ("one", "other")]
    rows = list(read_rows(runs[0] / "metrics.jsonl"))
    answers = []
    for run in runs:
        steps = [
            [one.rollout for one in read_rollouts(run / "rollouts" / f"step-{step:06d}.jsonl")]
            for step in range(1, STEPS + 1)
        ]
        for step, rollouts in enumerate(steps, 1):
            assert {(one.oldest_version, one.newest_version) for one in rollouts} == {(max(0, step - 2),) * 2}
        answers.append(sorted((one.task_id, one.response) for one in [*steps[0], *steps[1]]))

    assert [row["stream/staleness_steps_max"] for row in rows] == [0, *[1] * (STEPS - 1)]
    assert len(answers[0]) == 32
    assert answers[0] == answers[1]


def resident() -> int:
    """Return the bytes of this process that are in memory and its own."""
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return 1024 * int(fields["RssAnon"])


def _hold_in_turn(pipe: Any) -> None:
    """Sleep and wake by command, in a process of its own; answer each with the memory that is resident."""
    config = TinyConfig(width=1024, layers=8, heads=8)

    async def serve() -> None:
        engine, sampling = LocalEngine(tiny_model(0, config), shared=False), Sampling(max_completion_length=8)
        for version in range(100):
            if not pipe.recv():
                break
            weights = [(name, one.clone()) for name, one in merged_tensors(tiny_model(0, config))]
            await engine.load(Snapshot(version, lambda weights=weights: iter(weights)))
            del weights
            await engine.generate([256, 70, 71], list(range(8)), sampling)
            pipe.send(resident())
            pipe.recv()
            await engine.sleep()
            pipe.send(resident())
        await engine.close()

    asyncio.run(serve())


def test_two_processes_hold_the_memory_in_turn():
    """Resident memory of each: with weights and packed copies while it is awake, and without them while it sleeps, over
    two rounds in which never both are awake; less by at least 0.7 of the weights.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_hold_in_turn, args=(theirs,)))
        processes[-1].start()
        pipes.append(ours)
    found = []
    for _ in range(2):
        for pipe in pipes:
            pipe.send(True)
            awake = pipe.recv()
            pipe.send(True)
            found.append((awake, pipe.recv()))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join(60)
    weights = sum(one.nbytes for _, one in merged_tensors(tiny_model(0, TinyConfig(width=1024, layers=8, heads=8))))
    for awake, asleep in found:
        assert awake - asleep > 0.7 * weights, (found, weights)
