"""verl 0.9.1 (`verl.trainer.ppo.core_algos`): advantages from the same rewards, groups and masks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gnomon.algorithms import (
    REINFORCE_PP_BASELINE,
    Fixed,
    Gae,
    GroupRelative,
    LeaveOneOut,
    OptimalBaseline,
    Returns,
    Whitened,
)
from gnomon.testing import make_batch


def estimate(verl: Any, name: str, batch: Any, **more: Any) -> Any:
    """Return advantages and returns of one of verl's estimators, 0 where masked."""
    mask = batch.mask.to(batch.behavior.dtype)
    given = {"token_level_rewards": verl.rewards(batch), "response_mask": mask}
    by_group = {} if name in ("gae", "reinforce_plus_plus") else {"index": np.array(batch.group.tolist())}
    advantages, returns = verl.core.get_adv_estimator_fn(name)(**given, **by_group, **more)
    return advantages * mask, returns * mask


@pytest.mark.parametrize(
    ("piece", "name", "more"),
    [
        (GroupRelative(), "grpo", {}),
        (GroupRelative(), "grpo_vectorized", {}),
        (GroupRelative(scale="none"), "grpo", {"norm_adv_by_std_in_grpo": False}),
        (LeaveOneOut(), "rloo", {}),
        (LeaveOneOut(), "rloo_vectorized", {}),
        (OptimalBaseline(), "opo", {}),
        (Whitened(GroupRelative(scale="none"), ddof=1), "reinforce_plus_plus_baseline", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_outcome_advantages(verl, problem, same, piece, name, more):
    """Group baselines and whitening are verl's, its sample deviation and epsilon given, a degenerate group included."""
    ours, _ = piece(problem.batch)

    same(ours, estimate(verl, name, problem.batch, **more)[0])


def test_degenerate_groups_in_float32(verl):
    """Six equal rewards of 0.3: verl's computed deviation lets rounding through, 0.029; ours is exactly 0."""
    batch = make_batch([0.3] * 6, [[1]] * 6, dtype=torch.float32)
    theirs, _ = estimate(verl, "grpo", batch)

    assert float(GroupRelative()(batch)[0].abs().max()) == 0
    assert 0.01 < float(theirs.abs().max()) < 0.1


@pytest.mark.parametrize(("piece", "name"), [(GroupRelative, "grpo"), (LeaveOneOut, "rloo")], ids=["grpo", "rloo"])
def test_a_group_of_one(verl, same, piece, name):
    """A group of one has its raw reward as advantage in verl (over 1 + 1e-6), our singleton = "raw"; default is 0."""
    batch = make_batch([0.7, 0.2, 0.4], [[1, 1], [1], [1, 1]], [0, 1, 1])
    theirs, _ = estimate(verl, name, batch)

    same(piece(singleton="raw")(batch)[0], theirs, 1e-6)
    assert piece()(batch)[0][0].tolist() == [0, 0]


def test_opo_of_a_group_of_one(verl):
    """verl's OPO has the raw reward there too; by the formula, and ours, a response is its own baseline."""
    batch = make_batch([0.7, 0.2, 0.4], [[1, 1], [1], [1, 1]], [0, 1, 1])

    assert float(estimate(verl, "opo", batch)[0][0, 0]) == 0.7
    assert float(OptimalBaseline()(batch)[0][0, 0]) == 0


def test_reinforce_pp(verl, problem, same):
    """Returns with the distance to the reference in the reward, discounted and whitened, are verl's, holes skipped."""
    batch = problem.batch
    shaped = verl.core.compute_rewards(verl.rewards(batch), batch.proximal, batch.reference, 0.1)
    mask = batch.mask.double()
    theirs, returns = verl.core.get_adv_estimator_fn("reinforce_plus_plus")(
        token_level_rewards=shaped, response_mask=mask, config=SimpleNamespace(gamma=0.9)
    )
    piece = Returns(gamma=0.9, kl=0.1)

    same(piece(batch)[0], returns)
    same(Whitened(piece, ddof=1)(batch)[0], theirs)


def test_whitening_by_the_population(verl, problem, same):
    """Our default whitens by the population's deviation, verl by the sample's: sqrt(N / (N - 1)) apart."""
    batch = problem.batch
    count = int(batch.mask.sum())
    ours, _ = Whitened(GroupRelative(scale="none"))(batch)

    same(ours * ((count - 1) / count) ** 0.5, estimate(verl, "reinforce_plus_plus_baseline", batch)[0], 1e-6)


def test_whitening_of_degenerate_groups(verl, problem):
    """Equal rewards push in verl's REINFORCE++-baseline, by minus the mean; in our preset they do not."""
    batch = problem.batch
    trained = batch.mask[:4]
    theirs, _ = estimate(verl, "reinforce_plus_plus_baseline", batch)

    assert bool((theirs[:4][trained].abs() > 1e-3).all())
    assert float(REINFORCE_PP_BASELINE.advantage(batch)[0][:4].abs().max()) == 0


@pytest.mark.parametrize(("gamma", "shared"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_gae(verl, problem, same, gamma, shared):
    """With one lambda for advantages and targets, verl's are ours: whitened by the sample, tool output skipped."""
    batch = problem.batch
    piece = Whitened(Gae(Fixed(shared), value_lambda=shared, gamma=gamma), ddof=1)
    advantages, returns = piece(batch)
    theirs = estimate(verl, "gae", batch, values=batch.values, gamma=gamma, lam=shared)

    same(advantages, theirs[0])
    same(returns, theirs[1])


def test_gae_with_two_lambdas(verl, problem, same):
    """Two lambdas are verl's estimator called twice: advantages with one, targets with the other."""
    batch = problem.batch
    advantages, returns = Whitened(Gae(Fixed(0.95), value_lambda=1.0), ddof=1)(batch)

    same(advantages, estimate(verl, "gae", batch, values=batch.values, gamma=1.0, lam=0.95)[0])
    same(returns, estimate(verl, "gae", batch, values=batch.values, gamma=1.0, lam=1.0)[1])
