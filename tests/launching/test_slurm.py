"""The Slurm recipe, really run: two "nodes" that are two Ray nodes of this machine, with a stand-in for srun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "slurm.sbatch"
SMALL = (
    "steps=6", "rollouts_per_step=16", "algorithm.num_generations=4", "task.size=60", "grading.workers=1",
    "evaluation.before=false", "checkpoints.every=2", "device=cpu", "cluster.start_seconds=200",
    "cluster.placement=spread",
)  # fmt: skip
SRUN = """#!/bin/bash
# Starts a process here, whatever node is named, and notes which.
while [[ $1 == --* ]]; do
  [[ $1 == --nodelist=* ]] && node=${1#--nodelist=}
  shift
done
echo "$node $*" >> "$STAND_IN_LOG"
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'node-1\\nnode-2\\n'; else echo "scontrol $*" >> "$STAND_IN_LOG"; fi
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (Path(sys.prefix) / "bin" / "ray").exists(), reason="ray is not installed"),
]


def slurm(folder: Path, run: Path, job: int) -> subprocess.Popen[str]:
    """Start the batch script as Slurm would start it on the first of two nodes."""
    made = folder / "bin"
    made.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (made / name).write_text(text)
        (made / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{made}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "STAND_IN_LOG": str(folder / "steps.txt"),
        "GNOMON_ENVIRONMENT": sys.prefix,
        "GNOMON_HEAD_ADDRESS": "127.0.0.1",
        "GNOMON_TOKENS": str(folder / "tokens"),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(RECIPE), "tiny", str(run), *SMALL]
    with (folder / f"job-{job}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True, start_new_session=True)


def rows(run: Path) -> list[int]:
    """Return the steps that are written down."""
    metrics = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_two_nodes_train_are_requeued_and_go_on(tmp_path: Path):
    """SIGTERM after two steps ends the job with a checkpoint, 143 and a requeue; the same command then finishes it.

    Both nodes joined with the token of a file that nobody else can read, and that is gone when the job is.
    """
    run = tmp_path / "run"
    first = slurm(tmp_path, run, 41)
    try:
        deadline = time.monotonic() + 300
        while len(rows(run)) < 2:
            assert first.poll() is None, (tmp_path / "job-41.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "job-41.log").read_text()[-3000:]
            time.sleep(0.2)
        (token,) = (tmp_path / "tokens").iterdir()
        assert token.stat().st_mode & 0o077 == 0
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 143, (tmp_path / "job-41.log").read_text()[-3000:]
    finally:
        _end(first)
    done = rows(run)
    said = (tmp_path / "steps.txt").read_text()

    assert 2 <= len(done) < 6
    assert "scontrol requeue 41" in said
    assert "node-1 ray start --head" in said
    assert "node-2 ray start --block --address=127.0.0.1:" in said
    assert list((tmp_path / "tokens").iterdir()) == []

    second = slurm(tmp_path, run, 42)
    try:
        assert second.wait(300) == 0, (tmp_path / "job-42.log").read_text()[-3000:]
    finally:
        _end(second)
    assert rows(run) == [1, 2, 3, 4, 5, 6]
    assert f"node-1 gnomon resume {run}" in (tmp_path / "steps.txt").read_text()


def _end(job: subprocess.Popen[str]) -> None:
    """Leave nothing of a job behind, whatever became of it."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)
