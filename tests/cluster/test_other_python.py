"""Engines of a cluster in another Python environment than the run's: vLLM pins nearly everything."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cluster.test_run import LAYOUT, gnomon
from tests.random_model import RANDOM

from gnomon.cluster.ray import ResourceBundle, check_cluster
from gnomon.core.errors import ConfigError
from gnomon.core.sections import ClusterConfig
from gnomon.models.tiny import TinyConfig, save_tiny
from gnomon.records.jsonl import read_rows

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="make vllm makes it")
def test_vllm_answers_from_an_environment_of_its_own(tmp_path: Path):
    """The run has no vLLM; its two engines have, and hold the weights that two learners here send them."""
    model, run = save_tiny(tmp_path / "model", config=TinyConfig(width=128, context_length=96)), tmp_path / "run"
    engines = (f"model={model}", "engine=vllm", f"engine.python={PYTHON}", "engine.timeout_seconds=120")
    ran = gnomon(
        "train", RANDOM, "--cluster", "ray", *LAYOUT, *engines, "steps=2", "learner.precision=fp32", "--json",
        "--run-dir", str(run), VLLM_CPU_KVCACHE_SPACE="2",
    )  # fmt: skip

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 2
    rows = list(read_rows(run / "metrics.jsonl"))
    assert [row["engines/alive"] for row in rows] == [2, 2]
    assert max(row["arrival/canary_abs_mean_nats"] for row in rows) < 1e-4
    assert max(row["mismatch/engine_abs_nats"] for row in rows) < 1e-4


@pytest.mark.parametrize(("says", "has"), [("2.59.0 3.11.7", "2.59.0 3.11.7"), ("", "no Ray")])
def test_an_interpreter_with_another_ray_is_refused(says: str, has: str, tmp_path: Path):
    """Before anything is started, with what it has and what it needs."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"as they are here \({version('ray')} .*\), and has {has}; inst"):
        check_cluster(ClusterConfig("ray"), [ResourceBundle("engine", python=str(python))], 0)
