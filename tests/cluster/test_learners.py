"""A learner whose ranks are actors of a cluster is the learner in one process."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.here import standing
from tests.learner.together import alone, apart, moved, recipe_for, together, walk

from gnomon.algorithms import GRPO, PRESETS, Algorithm
from gnomon.cluster.learners import RayWorkerGroup
from gnomon.cluster.ray import Cluster
from gnomon.cluster.reaper import users_of
from gnomon.core.errors import LearnerError, NotFiniteError
from gnomon.core.types import Batch, State
from gnomon.learner.distributed import DistributedLearner, Rounding
from gnomon.learner.learner import TorchLearner
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.size import outline
from gnomon.models.transfer.rounding import rounded

PPO, VAPO = PRESETS["ppo"], PRESETS["vapo"]


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Room for two learners on this machine."""
    return standing()


@pytest.fixture(scope="module")
def started(cluster: Cluster) -> Iterator[tuple[DistributedLearner, State]]:
    """Ranks that every test shares, with a critic, and the state that they began with."""
    with together(recipe_for(PPO), RayWorkerGroup(cluster, "cpu")) as distributed:
        yield distributed, distributed.state()


@pytest.fixture
def distributed(started: tuple[DistributedLearner, State]) -> DistributedLearner:
    """The ranks, as they began."""
    distributed, first = started
    distributed.restore(first)
    return distributed


@pytest.fixture
def single() -> TorchLearner:
    """The same learner in this process."""
    return alone(recipe_for(PPO))


@pytest.fixture
def batches(make_batch: Callable[..., Batch]) -> list[Batch]:
    """Nine rows in three groups each, so that two ranks have unequal parts."""
    return [make_batch(seed, 3, 3) for seed in range(3)]


@pytest.mark.parametrize("algorithm", [GRPO, VAPO], ids=lambda a: a.name)
def test_ranks_make_the_steps_of_one_process(
    algorithm: Algorithm, distributed: DistributedLearner, single: TorchLearner, batches
):
    """Weights, moments and all that is measured, over three steps, to 1e-6 (P4)."""
    first = single.state().tensors
    mine, theirs = (walk(learner, algorithm, batches) for learner in (single, distributed))

    assert apart(distributed.state().tensors, single.state().tensors) < 1e-6
    assert moved(single.state().tensors, first) > 1e-3
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_the_same_steps_are_the_same_bits(
    distributed: DistributedLearner, started: tuple[DistributedLearner, State], batches
):
    """With the same ranks sums are made in the same order."""
    found = []
    for _ in range(2):
        distributed.restore(started[1])
        found.append((walk(distributed, GRPO, batches), distributed.state().tensors))

    assert found[0][0] == found[1][0]
    assert apart(found[0][1], found[1][1]) == 0.0


def test_weights_lie_where_engines_find_them(distributed: DistributedLearner, single: TorchLearner, batches):
    """A snapshot says where; it is the learner's weights, in any process, and can be lent back without passing here."""
    batch, before = batches[0], distributed.snapshot()
    held = {name: tensor.clone() for name, tensor in before.tensors()}
    walk(distributed, GRPO, batches[:1])
    walk(single, GRPO, batches[:1])
    after = distributed.snapshot()

    assert before.stored is not None
    assert after.stored is not None
    assert apart(dict(after.tensors()), dict(single.snapshot().tensors())) < 1e-6
    assert apart(dict(after.tensors()), held) > 1e-3
    lent = asyncio.run(distributed.logprobs(batch, after))
    assert float((lent - asyncio.run(distributed.logprobs(batch))).abs().max()) < 2e-6


def test_the_model_comes_from_a_disk_that_the_run_does_not_see(
    distributed: DistributedLearner, batches, tmp_path: Path
):
    """Rank 0 tells by a probe whether it sees the run's folder; if not, it keeps its files until they are fetched."""
    walk(distributed, GRPO, batches[:1])
    distributed.write_model(tmp_path / "seen")
    worker_group = distributed.worker_group
    assert isinstance(worker_group, RayWorkerGroup)
    first = worker_group.members[0]
    written = worker_group._asked(first, first.actor.output_dir.remote(str(tmp_path / "nothing"), "not this"))
    distributed._ask("write", folder=written)
    worker_group.fetch_output(written, tmp_path / "fetched")

    files = {p.relative_to(tmp_path / "seen") for p in (tmp_path / "seen").rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path / "fetched") for p in (tmp_path / "fetched").rglob("*") if p.is_file()} == files
    for name in files:
        assert (tmp_path / "seen" / name).read_bytes() == (tmp_path / "fetched" / name).read_bytes()
    assert not Path(written).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who listens where")
def test_nobody_outside_reaches_a_cluster_that_was_started_here(cluster: Cluster, distributed: DistributedLearner):
    """All of its processes, the ranks' too, listen on loopback alone; its key is readable by this user alone."""
    assert cluster.is_own
    users = users_of(cluster.folder, ())
    assert len(users) >= 6
    links = [os.readlink(link) for user in users for link in Path(f"/proc/{user}/fd").iterdir() if link.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    listening = [line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and line[9] in own]

    assert len(listening) >= 6
    assert isinstance(distributed.worker_group, RayWorkerGroup)
    assert distributed.worker_group.rendezvous == str(distributed.worker_group.scratch / "rendezvous")
    assert stat.S_IMODE(distributed.worker_group.scratch.stat().st_mode) == 0o700
    # 127.0.0.1, the same as an IPv6 address, and ::1.
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert stat.S_IMODE(cluster.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((cluster.folder / "key").stat().st_mode) == 0o600


@pytest.mark.slow
def test_whoever_has_no_key_is_refused(cluster: Cluster):
    """The head answers this run, and nobody without its key, or with another one."""
    code = "import sys, ray; ray.init(address=sys.argv[1]); print('nodes:', len(ray.nodes()))"
    # Ray asks at the machine's address on the network where it is told the loopback's, unless it is switched off.
    unknown = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    unknown["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

    def ask(**environment: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", code, cluster.address]
        return subprocess.run(command, env={**unknown, **environment}, capture_output=True, text=True, check=False)

    known = ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=os.environ["RAY_AUTH_TOKEN_PATH"])
    assert "nodes: 1" in known.stdout, known.stderr
    for refused in (ask(RAY_AUTH_MODE="disabled"), ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)):
        assert refused.returncode != 0
        assert "nodes" not in refused.stdout
        assert "token" in refused.stderr


def test_what_is_not_finite_in_one_rank_changes_nothing_in_any(distributed: DistributedLearner, make_batch):
    """All raise, with the text of the one that has it, and the next step is as if it never was."""
    state, minibatch = distributed.state(), GRPO.weigh(GRPO.prepare(make_batch(0, 3, 3)))
    minibatch.advantages[0] = minibatch.advantages[0] + float("nan")

    with pytest.raises(NotFiniteError, match="not finite"):
        asyncio.run(distributed.update(minibatch, GRPO, 0))

    assert apart(distributed.state().tensors, state.tensors) == 0.0
    walk(distributed, GRPO, [make_batch(1, 3, 3)])


def test_a_rank_that_dies_ends_the_learner_in_words(distributed: DistributedLearner, make_batch):
    """At once, with rank, machine, end and what it wrote last; nothing more is asked. The last test here: nobody is
    left.
    """
    minibatch = GRPO.weigh(GRPO.prepare(make_batch(0, 3, 3)))
    minibatch.advantages[0] = minibatch.advantages[0] + float("nan")
    with pytest.raises(NotFiniteError):
        asyncio.run(distributed.update(minibatch, GRPO, 0))
    worker_group = distributed.worker_group
    assert isinstance(worker_group, RayWorkerGroup)
    numbers = [member.at.number for member in worker_group.members if member.at is not None]
    os.kill(numbers[1], signal.SIGKILL)

    words = (
        r"(?s)process 1 of the learner's 2 is gone \(on 127.0.0.1, pid \d+\): .*; it wrote last:\n.*NotFiniteError: "
    )
    with pytest.raises(LearnerError, match=words):
        asyncio.run(distributed.score(make_batch(0, 3, 3), {"proximal"}))

    with pytest.raises(LearnerError, match="go on from the newest checkpoint"):
        distributed.state()


@pytest.mark.slow
def test_a_place_is_free_again_when_its_actor_died(cluster: Cluster, make_batch):
    """One rank is a learner too; weights are rounded where they lie. It needs the room that the dead ones had."""
    axes = input_axes(outline("tiny"))
    with together(recipe_for(GRPO), RayWorkerGroup(cluster, "cpu")) as distributed:
        distributed._rounding = Rounding("int8", axes)
        single = alone(recipe_for(GRPO))
        sent = dict(rounded(single.snapshot(), "int8", axes).tensors())
        assert apart(dict(distributed.snapshot().tensors()), sent) == 0.0
