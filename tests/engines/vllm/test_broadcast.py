"""A run whose weights go by vLLM's own transfer: all of it but NCCL, in whose place a plugin of vLLM's has sockets."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.cluster.running import LAYOUT, SECONDS, ends_in_words, numbers, running, until_step
from tests.engines.vllm.test_on_cluster import LONG_PATIENCE, trained
from tests.engines.vllm.test_walk import TINY, sampled

from gnomon.records.checkpoints import Checkpoints
from gnomon.records.jsonl import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PLUGIN = Path(__file__).parent / "plugin"
SETTINGS = ("engine=vllm", "cluster.transfer=sockets", "cluster.graders=1", "learner.precision=fp32")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What lets vLLM find the plugin, in every process of a run, and the plugin what shall go wrong."""
    faults = tmp_path / "faults"
    faults.mkdir()
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "GNOMON_SOCKETS_FAULTS": str(faults)}


def test_a_run_whose_weights_are_broadcast(
    folder: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Two learners and two vLLM engines, three steps: the local run's tokens; every publication proved."""
    local = trained(tmp_path / "local", folder, "engine=local")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    rows = trained(tmp_path / "vllm", folder, "--cluster", "ray", *LAYOUT, *SETTINGS, *LONG_PATIENCE)

    assert sampled(tmp_path / "vllm") == sampled(tmp_path / "local")
    assert [row["engines/alive"] for row in rows] == [2, 2, 2]
    assert [row["loss/policy"] for row in rows] == pytest.approx([row["loss/policy"] for row in local], abs=1e-4)
    assert max(row["mismatch/engine_abs_nats"] for row in rows) < 1e-4
    assert max(row["arrival/canary_abs_mean_nats"] for row in rows) < 1e-4
    assert len({(row["weights/sent_bytes"], row["weights/sent_tensors"]) for row in rows[1:]}) == 1
    assert rows[-1]["weights/sent_bytes"] > 0
    assert max(row["weights/overlap_fraction"] for row in rows) == 0


FATES = {
    "an engine is killed": ("kill-2", "engine engine-[12].* process [0-9]+ on .* is gone"),
    "the sender is killed": ("kill-0", "process 0 of the learner's 2 is gone"),
    "an engine stands still": ("stop-1", "stood still for|new weights did not reach all engines in .* from engine-"),
}


@pytest.mark.parametrize("name", FATES)
def test_whoever_dies_in_a_broadcast_ends_the_run(name: str, folder: Path, tmp_path: Path, environment: dict[str, str]):
    """Within 60 s, by a typed error that names who; no process is left, and the newest checkpoint is what it was."""
    fate, said = FATES[name]
    run = tmp_path / "run"
    with running(run, *endless(folder), "engine.timeout_seconds=30", environment=environment) as program:
        until_step(run, program)
        faults = Path(environment["GNOMON_SOCKETS_FAULTS"])
        (faults / fate).touch()
        until = time.monotonic() + SECONDS
        while not (faults / "done").exists() and time.monotonic() < until:
            time.sleep(0.05)
        ends_in_words(run, program, said)

    found = Checkpoints(run / "checkpoints").newest()
    assert found is not None
    assert found.step in {row["step"] for row in read_rows(run / "metrics.jsonl")}


def test_an_engine_that_dies_between_broadcasts_ends_the_run(folder: Path, tmp_path: Path, environment: dict[str, str]):
    """The same: nobody can join a group later."""
    run = tmp_path / "run"
    with running(run, *endless(folder), environment=environment) as program:
        until_step(run, program)
        os.kill(numbers(program.pid, "ray::EngineActor")[-1], signal.SIGKILL)
        ends_in_words(run, program, "engine-[12].* is gone")


def endless(folder: Path) -> list[str]:
    """Settings of a run whose weights are broadcast, and which does not end of itself."""
    tiny = [setting for setting in TINY if not setting.startswith("steps")]
    return [*tiny, f"model={folder}", *SETTINGS, "steps=100000", "cluster.start_seconds=240"]
