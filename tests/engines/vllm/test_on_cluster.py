"""vLLM in the actors of a Ray cluster: a whole run, and engines whose model is in two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.vllm.test_walk import ROOT, TINY, sampled
from tests.random_model import RANDOM
from tests.training.runs import gnomon

from gnomon.records.jsonl import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYOUT = ("--cluster", "ray", "learner.processes=2", "engine=vllm", "engine.count=2", "grading.workers=1")
LONG_PATIENCE = ("engine.timeout_seconds=120", "cluster.start_seconds=240")


def trained(folder: Path, model: Path, *settings: str) -> list[dict[str, float]]:
    """Return the measures of each step of a run in ``folder``."""
    command = gnomon("train", RANDOM, *TINY, f"model={model}", *settings, "--json", "--run-dir", str(folder))[1:]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    return [*read_rows(folder / "metrics.jsonl")]


def test_a_run_on_a_cluster_is_answered_by_vllm(folder: Path, tmp_path: Path):
    """Two learners and two vLLM engines, three steps: the local run's tokens; every publication proved."""
    local = trained(tmp_path / "local", folder, "engine=local")
    rows = trained(tmp_path / "vllm", folder, *LAYOUT, *LONG_PATIENCE)

    assert sampled(tmp_path / "vllm") == sampled(tmp_path / "local")
    assert [row["engines/alive"] for row in rows] == [2, 2, 2]
    assert [row["loss/policy"] for row in rows] == pytest.approx([row["loss/policy"] for row in local], abs=1e-4)
    assert max(row["mismatch/engine_abs_nats"] for row in rows) < 1e-4
    assert max(row["arrival/canary_abs_mean_nats"] for row in rows) < 1e-4
    # vLLM reloads as a whole, so both engines fetch every tensor after every step.
    assert len({row["weights/sent_tensors"] for row in rows[1:]}) == 1
    assert rows[-1]["weights/sent_bytes"] > 0


def test_engines_of_two_parts_answer_a_run_on_a_cluster(folder: Path, tmp_path: Path):
    """Tensor parallel: one engine, a place of two CPUs, two processes of vLLM's; tokens of the local run."""
    settings = ("engine.count=1", "engine.tensor_parallel=2", "learner.processes=1")
    trained(tmp_path / "local", folder, "engine=local")
    rows = trained(tmp_path / "vllm", folder, *LAYOUT, *LONG_PATIENCE, *settings)

    assert sampled(tmp_path / "vllm") == sampled(tmp_path / "local")
    assert [row["engines/alive"] for row in rows] == [1, 1, 1]
    assert max(row["arrival/canary_abs_mean_nats"] for row in rows) < 1e-4
