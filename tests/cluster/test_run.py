"""A whole run on a cluster, as a person starts it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli_w
from tests.cluster.nodes import others
from tests.cluster.running import LAYOUT, MAIN
from tests.random_model import RANDOM

from gnomon.records.jsonl import read_rows


def gnomon(*arguments: str, seconds: float = 280.0, **environment: str) -> "subprocess.CompletedProcess[str]":
    """What the command said, and its exit code."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        env={**surroundings, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_learners_engines_and_graders_on_a_cluster_of_this_machine(tmp_path: Path):
    """Two of each train two steps; the card says what they were on; nothing but the result is on standard output."""
    run = tmp_path / "run"
    ran = gnomon("train", RANDOM, "--cluster", "ray", *LAYOUT, "steps=2", "--json", "--run-dir", str(run))

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 2
    card = json.loads((run / "run.json").read_text())
    assert card["cluster"].startswith(
        f"Ray {version('ray')}, started for this run, on loopback alone: 1 node, token auth"
    )
    assert card["reproducibility"].startswith("R2 lossless")
    rows = list(read_rows(run / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["engines/alive"] == 2
    assert rows[-1]["rollout/error_fraction"] == 0.0
    assert rows[-1]["mismatch/logprob_abs_mean_nats"] < 1e-5
    assert (run / "checkpoints" / "step-2" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mixture_in_turns_one_step_ahead(tmp_path: Path):
    """Two learners and two engines in their places train experts, replaying the engines' choices, a step behind them.

    Weights reach engines that slept; what engines and learners compute differs by rounding alone.
    """
    run, mixture = tmp_path / "run", ("model=tiny-moe", "algorithm.routing=behavior")
    turns = ("engine.sleeps=true", "max_staleness=1", "learner.optimizer.learning_rate=1e-6")
    ran = gnomon("train", RANDOM, "--cluster", "ray", *LAYOUT, *mixture, *turns, "steps=3", "--run-dir", str(run))

    assert ran.returncode == 0, ran.stderr
    rows = list(read_rows(run / "metrics.jsonl"))
    assert [row["stream/staleness_steps_max"] for row in rows] == [0, 1, 1]
    assert rows[0]["mismatch/engine_abs_nats"] < 1e-5
    assert all(row["weights/sent_tensors"] > 0 for row in rows)


ENGINES = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from examples.own_engine import Generate

class Stale(Generate):
    async def load(self, snapshot):
        self.version = snapshot.version
    async def fingerprints(self):
        return None
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "code"), [("Stale", 2), ("Generate", 0)])
def test_an_engine_of_ones_own_is_tried_on_a_cluster_too(kind: str, code: int, tmp_path: Path):
    """With halved weights before the first step: one that keeps its first ones is refused, and an honest one trains."""
    file = tmp_path / "mine.py"
    file.write_text(ENGINES)
    layout = [each.replace("engine.count=2", "engine.count=1") for each in LAYOUT]
    ran = gnomon(
        "train", RANDOM, "--cluster", "ray", *layout, f"engine={file}:{kind}", "steps=1", "--run-dir", f"{tmp_path}/run"
    )

    assert ran.returncode == code, ran.stderr
    said = "tried before training: engine engine-1 has the weights of version 1 as far as it can tell"
    assert (said in ran.stderr) == (kind == "Stale")
    assert bool((tmp_path / "run" / "metrics.jsonl").read_text()) == (kind != "Stale")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path: Path):
    """Begun with two learners on a cluster, it goes on with three, and then in one process without any cluster."""
    run = tmp_path / "run"
    begun = gnomon("train", RANDOM, "--cluster", "ray", *LAYOUT, "steps=2", "--run-dir", str(run))
    assert begun.returncode == 0, begun.stderr
    for steps, processes, cluster in ((4, 3, "ray"), (6, 1, "none")):
        table = tomllib.loads((run / "experiment.toml").read_text())
        table["steps"] = steps
        table["learner"]["processes"] = processes
        table["cluster"]["kind"] = cluster
        (run / "experiment.toml").write_text(tomli_w.dumps(table))
        ran = gnomon("resume", str(run), "--json")
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["steps"] == steps
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["address", "client"])
def test_a_cluster_of_others_is_joined_with_its_key(way: str, tmp_path: Path):
    """From one of its machines or from outside, with two nodes; without the key nobody comes in."""
    with others(2, 4) as there:
        where = {"address": there.address, "client": there.client}[way]
        command = ("train", RANDOM, "--cluster", where, *LAYOUT, "cluster.placement=spread", "steps=1", "--run-dir")
        key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": there.key}
        ran = gnomon(*command, str(tmp_path / "run"), **key)
        assert ran.returncode == 0, ran.stderr
        card = json.loads((tmp_path / "run" / "run.json").read_text())
        assert card["cluster"] == f"Ray {version('ray')}, joined at {where}: 2 nodes, token authentication on"
        again = gnomon(*command, str(tmp_path / "again"), RAY_AUTH_MODE="disabled")
        assert again.returncode == 2
        assert re.search(
            f"cluster.address = '{where}' cannot be joined: it asks for a key, and none was shown", again.stderr
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_key_that_does_not_fit_is_said_at_once(tmp_path: Path):
    """Another one than the cluster's, by both doors; and any where nobody asks; without one that cluster is joined."""
    shown = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "c" * 64}
    command = ("train", RANDOM, "steps=1", "cluster.start_seconds=60", "--run-dir", str(tmp_path / "run"), "--cluster")
    with others(4) as closed:
        for where in (closed.address, closed.client):
            ran = gnomon(*command, where, **shown)
            assert ran.returncode == 2
            assert f"'{where}' cannot be joined: it asks for a key, and the one that was shown" in ran.stderr
            assert "InvalidAuthToken" not in ran.stderr
    with others(4, is_open=True) as there:
        for where in (there.address, there.client):
            ran = gnomon(*command, where, **shown)
            assert ran.returncode == 2
            assert f"'{where}' asks nobody for a key, and this run shows one" in ran.stderr
        ran = gnomon(*command, there.address, RAY_AUTH_MODE="disabled")
    assert ran.returncode == 0, ran.stderr
    assert "warning: the Ray cluster asks nobody for a key" in ran.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["cluster"].endswith("NO authentication by token")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_too_small_a_cluster_is_refused_with_what_was_asked_and_what_there_is(tmp_path: Path):
    """One message, after as many seconds as were given, with exit code 2; and what no node could hold."""
    with others(3) as there:
        key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": there.key}
        command = ("train", RANDOM, "--cluster", there.address, *LAYOUT, "cluster.start_seconds=8")
        ran = gnomon(*command, "--run-dir", str(tmp_path / "run"), **key)
        wide = gnomon(*command, "grading.workers=4", "--run-dir", str(tmp_path / "wide"), **key)

    assert (ran.returncode, wide.returncode) == (2, 2)
    assert "on 1 node, and no node has room for 1 grader of 4 CPUs; set learner.processes" in wide.stderr
    assert (
        "2 learners of 1 CPU, 2 engines of 1 CPU, 2 graders of 1 CPU found no room on the cluster in 8 s" in ran.stderr
    )
    assert "it has 3 CPUs (3 free) and 0 GPUs (0 free) on 1 node; set learner.processes" in ran.stderr
