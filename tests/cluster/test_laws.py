"""What must hold for every algorithm when its learner is on a cluster: it is the learner of one process (P4)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.laws.batches import presets
from tests.learner.test_mesh_laws import STEPS, VARIANTS, drawn
from tests.learner.together import alone, apart, moved, recipe_for, together, walk

from gnomon.algorithms import Algorithm
from gnomon.cluster.learners import RayWorkerGroup
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core.sections import ClusterConfig
from gnomon.core.types import State
from gnomon.learner.distributed import DistributedLearner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Room for three learners on this machine."""
    found = Cluster.open(ClusterConfig(kind="ray", start_seconds=120.0), [ResourceBundle("learner")] * 3, print)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def gang_for(cluster: Cluster) -> Iterator[Callable[..., tuple[DistributedLearner, State]]]:
    """Started ranks for whatever networks an algorithm needs, one kind at a time, and the state they began with."""
    stack = ExitStack()
    started: dict[Any, tuple[DistributedLearner, State]] = {}

    def get(algorithm: Algorithm, **changes: Any) -> tuple[DistributedLearner, State]:
        kind = (algorithm.critic and algorithm.critic.trunk, "reference" in algorithm.needs, *changes)
        if kind not in started:
            stack.close()
            started.clear()
            distributed = stack.enter_context(
                together(recipe_for(algorithm, 3, **changes), RayWorkerGroup(cluster, "cpu"))
            )
            started[kind] = distributed, distributed.state()
        return started[kind]

    with stack:
        yield get


@pytest.mark.parametrize("algorithm", presets(), ids=lambda a: a.name)
def test_ranks_on_a_cluster_make_the_steps_of_one_process(algorithm: Algorithm, gang_for, make_batch):
    """Over 20 steps weights, moments and every measure are those of a single process, to 1e-6; a critic's to 2e-6."""
    distributed, first = gang_for(algorithm)
    distributed.restore(first)
    single, batches = alone(recipe_for(algorithm)), drawn(make_batch, STEPS)
    mine, theirs = (walk(learner, algorithm, batches) for learner in (single, distributed))
    after = single.state().tensors
    difference, far = apart(distributed.state().tensors, after), moved(after, first.tensors)
    print(f"{algorithm.name}: {difference:.2e} apart after moving by {far:.2e}")

    assert difference < (1e-6 if algorithm.critic is None else 2e-6)
    assert far > 1e-4
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("name", ["lora", "checkpointing"])
def test_adapters_and_recomputed_layers_are_trained_alike(name: str, gang_for, make_batch):
    """What is put where engines find it is merged, and equal to the single process's."""
    algorithm, changes = VARIANTS[name]
    single, batches = alone(recipe_for(algorithm, 1, **changes)), drawn(make_batch, 4)
    distributed, _ = gang_for(algorithm, **changes)
    for learner in (single, distributed):
        walk(learner, algorithm, batches)

    assert apart(distributed.state().tensors, single.state().tensors) < 2e-6
    assert apart(dict(distributed.snapshot().tensors()), dict(single.snapshot().tensors())) < 2e-6
