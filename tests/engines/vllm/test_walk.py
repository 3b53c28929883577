"""Whole runs that vLLM answers, each in a process of its own, since a process has one vLLM."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.training.runs import gnomon

from gnomon.records.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    "model=tiny", "device=cpu", "learner.precision=fp32", "task.size=40", "held_out.size=2", "rollouts_per_step=8",
    "steps=3",
    "algorithm.num_generations=4", "sampling.max_completion_length=6", "checkpoints.every=1",
)  # fmt: skip

RESUMED = """
import json, signal, sys
from pathlib import Path
from gnomon.core.errors import Stopped
from gnomon.config.experiment import load
from gnomon.training.api import resume, train_experiment
from gnomon.training.run import StopRequest

folder, overrides = Path(sys.argv[1]), json.loads(sys.argv[2])
train_experiment(load("tiny", [*overrides, "engine=local"]), folder / "local")
try:
    train_experiment(load("tiny", [*overrides, "engine=vllm"]), folder / "vllm", StopRequest(signal.SIGTERM, after=1))
except Stopped as stopped:
    print(stopped)
resume(folder / "vllm")
"""

PASSED_OVER = """
import asyncio, sys, torch
from gnomon.engines.pool import EnginePool
from gnomon.engines.vllm.engine import VllmEngine
from gnomon.core.errors import GnomonError
from gnomon.learner.sections import LearnerConfig
from gnomon.learner.learner import TorchLearner
from gnomon.training.weight_sync import CalibratedTolerance, VerifiedWeightSync
from gnomon.models.tiny import TinyConfig, tiny_model

def plant(worker):
    kind = type(worker.model_runner.get_model())
    load = kind.load_weights
    kind.load_weights = lambda self, weights: load(self, (pair for pair in weights if pair[0] != sys.argv[2]))

async def main():
    engine = VllmEngine(sys.argv[1], torch.float32)
    learner = TorchLearner(tiny_model(0, TinyConfig(width=128, context_length=96)), LearnerConfig(precision="fp32"), 9)
    sync = VerifiedWeightSync(EnginePool({"vllm": engine}), 259, None, CalibratedTolerance())
    await sync.publish(sync.engines, learner)
    engine._thread._engine.collective_rpc(plant)
    learner.advance()
    try:
        await sync.publish(sync.engines, learner)
    except GnomonError as error:
        print(f"{type(error).__name__}: {error}")
    await engine.close()

asyncio.run(main())
"""


def ran(*command: str) -> str:
    """Return what a program of this interpreter said, from the root of the repository."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def sampled(run: Path) -> list[tuple[str, list[int]]]:
    """Return task and tokens of every recorded rollout, in order."""
    rows = [row for path in sorted((run / "rollouts").iterdir()) for row in read_rows(path)]
    return [(row["task_id"], row["response"]) for row in rows]


def test_a_run_in_process_trains_on_what_the_local_engine_would_say_and_goes_on(folder: Path, tmp_path: Path):
    """Stopped after a step and resumed with a second vLLM: the local run's tokens, and its loss to 1e-4."""
    overrides = json.dumps([*TINY, f"model={folder}"])
    assert "stopped after step 1 of 3" in ran("-c", RESUMED, str(tmp_path), overrides)
    ours, theirs = ([*read_rows(tmp_path / name / "metrics.jsonl")] for name in ("vllm", "local"))

    assert sampled(tmp_path / "vllm") == sampled(tmp_path / "local")
    assert [row["step"] for row in ours] == [1, 2, 3]
    assert [row["loss/policy"] for row in ours] == pytest.approx([row["loss/policy"] for row in theirs], abs=1e-4)
    assert max(row["mismatch/engine_abs_nats"] for row in ours) < 1e-4
    assert max(row["arrival/canary_abs_mean_nats"] for row in ours) < 1e-4


def test_servers_staleness_rounding_and_an_environment_work_together(folder: Path, tmp_path: Path):
    """Two servers, a step ahead, with weights rounded to fp8, in conversations: each leaves its own trace."""
    settings = ["engine=vllm", "engine.server=start", "engine.count=2", "engine.rounding=fp8", "max_staleness=1"]
    command = gnomon("train", "examples/own_environment.toml", *TINY, f"model={folder}", *settings)[1:]
    ran(*command, "sampling.max_completion_length=40", "--run-dir", str(tmp_path / "run"))
    rows = [*read_rows(tmp_path / "run" / "metrics.jsonl")]

    assert [row["engines/alive"] for row in rows] == [2, 2, 2]
    assert [row["stream/staleness_steps_max"] for row in rows] == [0, 1, 1]
    assert all(row["mismatch/precision_abs_nats"] > 1e-3 for row in rows)
    assert all(row["arrival/canary_abs_mean_nats"] < 1e-4 for row in rows)
    assert max(row["turns/max"] for row in rows) > 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "model.layers.1.input_layernorm.weight",
            "EngineError: .* it took no new numbers for model.layers.1.input_layern",
        ),
        (
            "model.layers.1.mlp.gate_proj.weight",
            "(EngineError: .*not finite|WeightSyncError: .*computes something else)",
        ),
    ],
    ids=["a weight of its own", "a part of a fused one"],
)
def test_what_vllm_itself_passes_over_stops_the_run(folder: Path, name: str, said: str):
    """A weight that it does not load is a line in its log, and named here; of a fused one the canary notices."""
    assert re.search(said, ran("-c", PASSED_OVER, str(folder), name))
