"""The benchmark for a GPU, run small on the CPU: on a borrowed machine it must not fail for silly reasons."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.kernels import compare, distances
from tests.forked import Forked, ended

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "benchmarks.gpu", str(folder), "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_every_part_gives_its_numbers(tmp_path):
    """All laws hold on the CPU, and each model has a cold and a warm step with times, bounds and gaps."""
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert all(law["holds"] for law in report["parts"]["laws"].values())
    for model in ("small", "small-lora"):
        part = report["parts"][model]
        assert all(part[f"{kind} {each}"]["seconds"] > 0 for kind in ("cold", "warm") for each in ("step", "update"))
        assert part["warm score"]["gap_max"] < 1e-4
    page = (tmp_path / "gpu.md").read_text()
    assert "| small-lora | warm |" in page
    assert "**attention, shared" in page
    assert "| resume | yes |" in page


def test_each_kernel_is_tried_against_its_alternatives():
    """On a CPU a dense mask, padded blocks and the head's ways have times; what needs a GPU says why it is left out."""
    cpu = torch.device("cpu")
    rows = dict(compare(cpu, torch.float32, is_quick=True))
    timed = {name for name, row in rows.items() if row.get("seconds", 0) > 0}

    assert {name.rpartition(": ")[2] for name in timed} >= {"dense", "branches", "all logits", "the same with entropy"}
    assert all("FlexAttention does not support backward" in rows[n]["left out"] for n in rows if n.endswith(": flex"))
    assert all("left out" in row for name, row in rows.items() if name not in timed)
    assert distances(cpu)["holds"]


@pytest.mark.slow
def test_a_part_that_is_late_leaves_the_others_and_a_report(tmp_path):
    """With no time for the models, what was measured before is in the report, and the exit code says so."""
    ran = run(tmp_path, "--limit", "6", "--models", "small")
    assert ran.returncode == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert "no time was left" in report["parts"]["small"]["error"]
    assert "| small | stopped | no time was left |" in (tmp_path / "gpu.md").read_text()


def test_a_transfer_that_cannot_be_tried_says_why():
    """Without vLLM, or with fewer than two GPUs: one JSON object, and an exit code of its own."""
    code = "import runpy; runpy.run_module('benchmarks.gpu.transfer', run_name='__main__')"
    ran = ended(Forked([], code, environment={"CUDA_VISIBLE_DEVICES": ""}))

    assert ran.returncode == 2, ran.stderr
    assert json.loads(ran.stdout)["holds"] is None
    assert "vLLM is not installed" in ran.stdout or "it takes two GPUs" in ran.stdout
