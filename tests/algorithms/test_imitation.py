"""Self-imitation: plain likelihood, or weighed by what the critic did not expect."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.imitation import imitation
from gnomon.algorithms.ratios import Statistics
from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import ConfigError
from gnomon.core.types import Batch

GOLDEN = vectors()
FIXTURE = GOLDEN["fixture"]
ALL = imitation(SelfImitationBuffer())
SURPLUS = imitation(SelfImitationBuffer(weigh="surplus"), CriticConfig(clip=0.01))


def doubles(key: str) -> Tensor:
    return torch.tensor(FIXTURE[key], dtype=torch.float64)


def fixture(**more: Any) -> Batch:
    """The reference's four responses, sampled by something that no longer matters."""
    mask = doubles("mask").bool()
    lengths = mask.sum(1)
    return Batch(
        tokens=torch.zeros(4, 1 + mask.shape[1], dtype=torch.long),
        prompt_lengths=torch.ones(4, dtype=torch.long),
        lengths=lengths + 1,
        mask=mask,
        rewards=doubles("rewards"),
        is_graded=torch.ones(4, dtype=torch.bool),
        is_truncated=torch.zeros(4, dtype=torch.bool),
        group=torch.arange(4),
        version=torch.zeros(4, dtype=torch.long),
        behavior=torch.zeros(mask.shape, dtype=torch.float64),
        full_behavior=torch.zeros(mask.shape, dtype=torch.float64),
        values=doubles("values"),
    ).with_fields(**more)


def loss(algorithm: Any, batch: Batch) -> tuple[float, Tensor]:
    """Return loss and gradient at the reference's current policy."""
    weighed = algorithm.weigh(algorithm.prepare(batch))
    current = doubles("lp").requires_grad_()
    found = algorithm.loss(current, torch.zeros_like(current), weighed, Statistics())
    found.total.backward()
    assert current.grad is not None
    return float(found.total.detach()), current.grad


def test_surplus_follows_the_reference():
    """(R - V)_+ of each token, the policy's loss with it, and the critic's one-sided loss before its coefficient."""
    prepared = SURPLUS.weigh(SURPLUS.prepare(fixture()))
    assert SURPLUS.critic is not None
    value, _ = SURPLUS.critic.loss(doubles("values"), prepared, one_sided=True)

    assert torch.allclose(prepared.advantages, torch.tensor(GOLDEN["sil"]["gap"], dtype=torch.float64), atol=1e-12)
    assert loss(SURPLUS, fixture())[0] == pytest.approx(GOLDEN["sil"]["policy_loss"], abs=1e-12)
    assert float(value) == pytest.approx(GOLDEN["sil"]["value_loss"], abs=1e-12)


def test_all_is_the_mean_negative_log_likelihood():
    """Its value is -mean log current over 15 tokens and its slope -1/15 on each, whatever sampled them."""
    mask, lp = fixture().mask, doubles("lp")
    value, slope = loss(ALL, fixture(behavior=doubles("rollout"), full_behavior=doubles("rollout")))

    assert value == pytest.approx(float(-lp[mask].mean()), abs=1e-12)
    assert torch.allclose(slope, -mask.double() / 15, atol=1e-12)
    assert (value, slope.tolist()) == (loss(ALL, fixture())[0], loss(ALL, fixture())[1].tolist())


def test_neither_looks_at_another_policy():
    """Only values are scored, for "surplus" alone; a policy that was scored would make the ratio other than one."""
    assert (ALL.needs, SURPLUS.needs) == (frozenset(), frozenset({"values"}))


def test_tokens_of_others_and_errors_are_not_imitated():
    """Tool output is masked, and a response that could not be graded has no weight."""
    mask = doubles("mask").bool()
    mask[1, 2:4] = False
    graded = torch.tensor([True, True, True, False])
    for algorithm in (ALL, SURPLUS):
        prepared = algorithm.prepare(fixture(mask=mask, is_graded=graded))
        assert prepared.advantages is not None
        assert bool((prepared.advantages[~mask] == 0).all())
        assert bool((prepared.advantages[3] == 0).all())


def test_surplus_has_no_gradient_into_the_values():
    """The critic learns from its own loss; here its values are numbers."""
    values = doubles("values").requires_grad_()
    advantages, returns = SURPLUS.advantage(fixture(values=values))

    assert returns is not None
    assert not advantages.requires_grad
    assert returns[0].tolist() == [1, 1, 1, 0, 0, 0]


def test_surplus_needs_values():
    """Without a critic's values there is nothing to compare with."""
    with pytest.raises(ConfigError, match="score the batch for 'values' first"):
        SURPLUS.prepare(fixture(values=None))
    with pytest.raises(ConfigError, match="reads the values of a critic, and there is none"):
        imitation(SelfImitationBuffer(weigh="surplus"))
