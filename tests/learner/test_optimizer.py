import math

import pytest
import torch
from torch import nn

from gnomon.core.errors import CheckpointError, ConfigError, LearnerError, NotFiniteError
from gnomon.core.types import Loan, State
from gnomon.learner.optimizer import Optimizer
from gnomon.learner.sections import OptimizerConfig


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_linear_ends_above_zero():
    """Warm-up 1/2, 1; then 4 steps left: 4/4, 3/4, 2/4, 1/4 of it, so no step has a rate of zero."""
    plan = OptimizerConfig(learning_rate=2.0, schedule="linear", warmup_steps=2)

    assert [plan.learning_rate_at(step, 6) for step in range(6)] == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_cosine_falls_to_the_final_fraction():
    """Over 4 steps: (1 + cos(pi k / 4)) / 2 is 1, 0.853553, 0.5, 0.146447; with floor 0.2 that is 0.2 + 0.8 x."""
    plan = OptimizerConfig(learning_rate=1.0, schedule="cosine", final_fraction=0.2)

    found = [plan.learning_rate_at(step, 4) for step in range(6)]

    assert found == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2])


def test_constant_stays():
    """Without warm-up every step has the same rate, whatever the number of steps."""
    plan = OptimizerConfig(learning_rate=3e-6)

    assert {plan.learning_rate_at(step, steps) for step in range(9) for steps in (0, 1, 9)} == {3e-6}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"learning_rate": math.inf}, "learning_rate must be > 0 and finite"),
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more steps"),
        ({"final_fraction": 1.5}, r"final_fraction must be in \[0, 1\]"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm must be > 0"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(setting, message):
    """The message names the field."""
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**setting)


def test_two_steps_of_adam_by_hand():
    """b1 0.5, b2 0.75, eps 1, rate 1, gradients 2 then 4.

    Step 1: m 1, v 1; corrected 2 and 4; moves 2 / (2 + 1). Step 2: m 2.5, v 4.75; corrected 2.5 / 0.75 and
    4.75 / 0.4375 = 10.857143; moves 3.333333 / (3.295018 + 1) = 0.776093.
    """
    weight = parameter(0.0)
    plan = OptimizerConfig(learning_rate=1.0, betas=(0.5, 0.75), epsilon=1.0, max_gradient_norm=math.inf)
    optimizer = Optimizer([("w", weight)], plan)

    for gradient in (2.0, 4.0):
        (gradient * weight).sum().backward()
        optimizer.step(1.0)

    assert weight.item() == pytest.approx(-(2 / 3 + 0.776093), abs=1e-6)


def test_a_long_gradient_is_scaled_to_the_limit_and_its_own_norm_is_returned():
    """Gradient (3, 4) of norm 5, limit 1: Adam with epsilon 1 sees (0.6, 0.8) and moves 0.6/1.6 and 0.8/1.8."""
    weight = parameter(0.0, 0.0)
    plan = OptimizerConfig(learning_rate=1.0, epsilon=1.0, max_gradient_norm=1.0)
    optimizer = Optimizer([("w", weight)], plan)

    (torch.tensor([3.0, 4.0]) * weight).sum().backward()

    assert optimizer.step(1.0) == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([-0.375, -0.4444444], abs=1e-5)


def test_only_matrices_decay():
    """With a zero gradient, rate 0.5 and decay 0.1 a matrix shrinks to 0.95; a vector stays."""
    matrix, vector = nn.Parameter(torch.ones(1, 1)), parameter(1.0)
    optimizer = Optimizer([("m", matrix), ("v", vector)], OptimizerConfig(weight_decay=0.1))

    (0 * matrix).sum().backward()
    (0 * vector).sum().backward()
    optimizer.step(0.5)

    assert (matrix.item(), vector.item()) == (pytest.approx(0.95), 1.0)


def test_updates_too_small_for_bfloat16_add_up_in_the_masters():
    """Each step moves 0.001 down from 1. Below 1 bfloat16 steps by 1/256: one step rounds back to 1, and so would
    every other one; the master's fourth, 0.996, rounds to 255/256."""
    weight = parameter(1.0, dtype=torch.bfloat16)
    optimizer = Optimizer([("w", weight)], OptimizerConfig(learning_rate=1e-3))
    seen = []

    for _ in range(4):
        weight.sum().backward()
        optimizer.step(1e-3)
        seen.append(weight.item())

    assert seen[0] == 1.0
    assert seen[3] == 255 / 256
    assert optimizer.masters.parameters["w"].item() == pytest.approx(0.996, abs=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    """Weights and moments are what they were, and the bad gradient is gone: the next step is as if it never was."""
    weight, twin = parameter(1.0, 2.0), parameter(1.0, 2.0)
    optimizer, other = (Optimizer([("w", w)], OptimizerConfig()) for w in (weight, twin))
    for each, w in ((optimizer, weight), (other, twin)):
        (w**2).sum().backward()
        each.step(0.1)
    before = optimizer.state().tensors

    (weight * math.nan).sum().backward()
    with pytest.raises(LearnerError, match="the gradient is not finite"):
        optimizer.step(0.1)

    after = optimizer.state().tensors
    assert all(torch.equal(before[name], after[name]) for name in before)
    for each, w in ((optimizer, weight), (other, twin)):
        (w**2).sum().backward()
        each.step(0.1)
    assert torch.equal(weight, twin)


def test_a_state_of_other_parameters_is_refused():
    """The message names the first that differs."""
    state = Optimizer([("a", parameter(1.0))], OptimizerConfig()).state()
    optimizer = Optimizer([("a", parameter(1.0, 2.0))], OptimizerConfig())

    with pytest.raises(CheckpointError, match=r"2 differences: a"):
        optimizer.restore(state)


@pytest.mark.parametrize(
    ("name", "forged"),
    [
        *((name, value) for name in ("master/w", "moment1/w", "moment2/w", "steps") for value in (math.nan, math.inf)),
        *((name, -math.inf) for name in ("master/w", "moment1/w")),
        *((name, -1.0) for name in ("moment2/w", "steps")),
        *((name, None) for name in ("moment1/w", "moment2/w", "steps")),
    ],
)
def test_a_state_with_numbers_that_no_run_makes_is_refused(name: str, forged: float | None):
    """Not finite, a square below 0, fewer than no steps, or a moment that lacks though steps were made: by name."""
    weight = parameter(1.0, 2.0)
    optimizer = Optimizer([("w", weight)], OptimizerConfig())
    (weight**2).sum().backward()
    optimizer.step(0.1)
    tensors = dict(optimizer.state().tensors)
    tensors[name] = tensors[name].index_fill(0, torch.tensor([0]), 0.0 if forged is None else forged)
    if forged is None:
        del tensors[name]

    with pytest.raises(CheckpointError, match=name.partition("/")[0]):
        optimizer.restore(State(tensors))


def test_a_state_is_a_copy():
    """Training on does not change a state that was taken."""
    weight = parameter(1.0)
    optimizer = Optimizer([("w", weight)], OptimizerConfig())
    state = optimizer.state()

    weight.sum().backward()
    optimizer.step(0.1)

    assert state.tensors["master/w"].item() == 1.0
    assert "moment1/w" not in state.tensors


def test_what_is_lent_stays_what_it_was_through_a_step():
    """Masters and moments are lent as they are and copied when the step comes; a step that fails copies nothing."""
    weight = parameter(1.0, 2.0, dtype=torch.bfloat16)
    optimizer = Optimizer([("w", weight)], OptimizerConfig(learning_rate=0.1))
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.masters.parameters["w"].grad = torch.ones(2)
    optimizer.step(0.1)
    before = optimizer.state().tensors

    lent = optimizer.lend()
    assert lent.tensors.keys() | lent.lent.keys() == before.keys()
    assert lent.nbytes == optimizer.state().nbytes
    with lent.lent["master/w"].reading() as tensor:
        assert tensor.data_ptr() == optimizer.masters.parameters["w"].data_ptr()
    for gradient, is_copied in ((math.nan, False), (3.0, True)):
        optimizer.masters.parameters["w"].grad = torch.full((2,), gradient)
        if is_copied:
            optimizer.step(0.1)
        else:
            with pytest.raises(NotFiniteError):
                optimizer.step(0.1)
        with lent.lent["master/w"].reading() as tensor:
            assert (tensor.data_ptr() != optimizer.masters.parameters["w"].data_ptr()) == is_copied
    after = optimizer.state().tensors

    for name, loan in lent.lent.items():
        with loan.reading() as tensor:
            assert torch.equal(tensor, before[name])
            assert not torch.equal(tensor, after[name])


def test_what_is_lent_stays_what_it_was_when_another_state_comes():
    """Restoring writes into the same memory."""
    optimizer = Optimizer([("w", parameter(1.0, 2.0))], OptimizerConfig())
    other = optimizer.state()
    other.tensors["master/w"].fill_(9)
    lent = optimizer.lend()
    optimizer.restore(other)

    with lent.lent["master/w"].reading() as tensor:
        assert tensor.tolist() == [1.0, 2.0]
    assert optimizer.state().tensors["master/w"].tolist() == [9.0, 9.0]


class ShortOnce(Loan):
    """A loan for whose copy memory does not suffice the first time."""

    failed = False

    def recall(self) -> None:
        if not self.failed:
            self.failed = True
            raise MemoryError
        super().recall()


def test_what_was_lent_is_recalled_though_memory_ended_before_it_was():
    """The learner makes such a step again: a checkpoint that is being written still gets the numbers it was lent."""
    weight = parameter(1.0, 2.0)
    optimizer = Optimizer([("w", weight)], OptimizerConfig(learning_rate=0.5))
    lent = optimizer.lend().lent["master/w"]
    optimizer._loans.insert(0, ShortOnce(weight.detach()))
    weight.grad = torch.ones(2)
    with pytest.raises(MemoryError):
        optimizer.step(0.5)
    weight.grad = torch.ones(2)
    optimizer.step(0.5)

    with lent.reading() as told:
        assert told.tolist() == [1.0, 2.0]
    assert weight.tolist() != [1.0, 2.0]
