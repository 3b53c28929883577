"""Pieces of a user's own that pass their trial and go wrong in training: an error that names them, never a number."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gnomon.algorithms import GRPO, Algorithm, GroupRelative, PolicyGradient, TokenMean
from gnomon.algorithms.piece_calls import FORMS
from gnomon.algorithms.piece_trial import loss_and_gradient, make_batch, try_pieces
from gnomon.core.errors import LearnerError
from gnomon.core.metrics import Metrics
from gnomon.core.user_code import _shared

WIDE = 9
LOSS: dict[str, Callable[[Any], Any]] = {
    "returned a strided tensor of shape []": lambda view: (view.log_ratio.mean(), Metrics()),
    "of shape [4] on cpu for [4, 9]": lambda view: (view.log_ratio.sum(1), Metrics()),
    "of shape [4, 1]": lambda view: (view.log_ratio.sum(1, keepdim=True), Metrics()),
    "without a gradient": lambda view: (view.log_ratio.detach(), Metrics()),
    "returned float16": lambda view: (view.log_ratio.half(), Metrics()),
    "returned a sparse_coo tensor": lambda view: (view.log_ratio.to_sparse(), Metrics()),
    "on meta for": lambda view: (view.log_ratio.to("meta"), Metrics()),
    "returned Tensor, and not two values": lambda view: view.log_ratio,
    "returned NoneType": lambda view: None,
    "returned float for": lambda view: (1.0, Metrics()),
    "changed Batch.mask in place": lambda view: (view.batch.mask.zero_() + view.log_ratio, Metrics()),
    "changed Batch.rewards in place": lambda view: (view.log_ratio + view.batch.rewards.sub_(1)[:, None], Metrics()),
    "changed torch's default type": lambda view: torch.set_default_dtype(torch.float16),
    "changed torch's gradients": lambda view: torch._C._set_grad_enabled(False),
    "changed who handles SIGTERM": lambda view: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "changed the working directory": lambda view: os.chdir("/"),
    "raised IndexError": lambda view: view.log_ratio[99],
    "raised GeneratorExit": lambda view: (_ for _ in ()).throw(GeneratorExit),
}


@dataclass(frozen=True)
class Late:
    """A loss, or a trust region, that does something else once answers are long."""

    wrong: str = ""

    def __call__(self, seen: Any, statistics: Any = None) -> Any:
        """Return the plain loss of a view, or a ratio as it is."""
        if isinstance(seen, torch.Tensor):
            return seen.sum(1) if seen.shape[1] == WIDE else seen
        return LOSS[self.wrong](seen) if seen.log_ratio.shape[1] == WIDE else (
            -seen.advantages * seen.log_ratio.exp(), Metrics(),
        )  # fmt: skip


def trained(algorithm: Algorithm) -> None:
    """Make the loss of one step whose answers are longer than those of a trial."""
    rewards, mask = [1.0, 0.0, 1.0, 0.0], [[1] * WIDE] * 4
    batch = algorithm.prepare(make_batch(rewards, mask, [0, 0, 1, 1], torch.float32))
    loss_and_gradient(algorithm, batch, batch.behavior.clone().requires_grad_())


@pytest.mark.parametrize("wrong", LOSS)
def test_a_loss_that_goes_wrong_in_training_ends_the_run(wrong: str):
    """Piece, what it did and the protocol's line; and what all code shares is as before."""
    algorithm = replace(GRPO, surrogate=Late(wrong))
    try_pieces(algorithm)
    before = {name: get() for name, (get, _) in _shared().items()}

    with pytest.raises(LearnerError) as caught:
        trained(algorithm)

    assert wrong in str(caught.value)
    assert "Late`" in str(caught.value)
    assert FORMS["Surrogate"].line in str(caught.value)
    assert {name: get() for name, (get, _) in _shared().items()} == before


def test_a_part_of_a_users_within_a_piece_of_gnomons_is_looked_at():
    """A trust region that sums over tokens makes a loss of another shape."""
    algorithm = replace(GRPO, surrogate=PolicyGradient(Late()))
    try_pieces(algorithm)

    with pytest.raises(LearnerError, match=r"PolicyGradient` (raised RuntimeError|returned)"):
        trained(algorithm)


def short(batch: Any) -> Any:
    """Return advantages of a row each; of long answers one for all of them."""
    return batch.rewards.mean() if batch.mask.shape[1] == WIDE else batch.rewards - 0.5


def scalar(mask: torch.Tensor, group: torch.Tensor) -> Any:
    """Return weights; of long answers one for all of them."""
    return mask.sum() if mask.shape[1] == WIDE else mask / mask.sum().clamp(min=1)


@pytest.mark.parametrize(("place", "piece"), [("advantage", short), ("aggregate", scalar)])
def test_functions_are_looked_at_as_classes_are(place: str, piece: Any):
    """A number for all rows is never spread over them."""
    algorithm = replace(GRPO, **{place: piece})
    try_pieces(algorithm)

    with pytest.raises(LearnerError, match=r"shape \[\] on cpu for \[4, 9\]"):
        trained(algorithm)


def test_gnomons_own_pieces_are_called_as_they_are():
    """Nothing is looked at, and nothing costs."""
    trained(replace(GRPO, advantage=GroupRelative(), aggregate=TokenMean()))
