"""TRL 1.16.0 (`DPOTrainer`, `KTOTrainer`): losses of given answers by real trainers, their log-probabilities given."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import DPO, KTO, PreferenceLoss, ProspectLoss, Ratio
from gnomon.testing import loss_and_gradient

PREFERENCE = {"prompt": ["w2", "w3"], "chosen": ["w4", "w5"], "rejected": ["w6", "w7"]}
LABELLED = {"prompt": ["w2", "w3"], "completion": ["w4", "w5"], "label": [True, False]}


@pytest.fixture
def made(tmp_path: Path, tiny_model: Path) -> Callable[..., Any]:
    """Return how to make a trainer of given answers, which is told the reference's log-probabilities."""

    def make(name: str, rows: dict[str, list[Any]], **settings: Any) -> Any:
        import trl
        from datasets import Dataset

        plain = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
        config = getattr(trl, f"{name}Config")(
            output_dir=str(tmp_path), per_device_train_batch_size=2, **plain, **settings
        )
        trainer = getattr(trl, f"{name}Trainer")(
            model=str(tiny_model), args=config, train_dataset=Dataset.from_dict(rows)
        )
        trainer.precompute_ref_logps = True
        return trainer

    return make


def their_loss(trainer: Any, current: Tensor, mask: Tensor, **more: Tensor) -> tuple[float, Tensor]:
    """Return loss and d loss / d log-probabilities of a trainer whose model answers with ``current``."""
    leaf = current.clone().requires_grad_()
    nothing = torch.zeros_like(current)

    def model(**_: Any) -> Any:
        known = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
        return SimpleNamespace(log_probs=torch.where(mask, leaf, 0.0), **known)

    completion = torch.cat([torch.zeros_like(mask[:, :1]), mask], 1).long()
    whole = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion)}
    loss = trainer._compute_loss(model, {**whole, "completion_mask": completion, **more}, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


def summed(policy: Tensor | None, mask: Tensor) -> Tensor:
    """Return Float[B]: each answer's log-probability."""
    assert policy is not None
    return torch.where(mask, policy, 0.0).sum(1)


@pytest.mark.parametrize(
    ("kind", "level", "theirs"),
    [
        ("logistic", "sequence_product", "sigmoid"),
        ("logistic", "sequence", "sigmoid_norm"),
        ("hinge", "sequence_product", "hinge"),
        ("squared", "sequence", "ipo"),
    ],
    ids=["sigmoid", "sigmoid_norm", "hinge", "ipo"],
)
@pytest.mark.parametrize("seed", range(2))
def test_preferences(made, drawn, same, kind, level, theirs, seed):
    """Pairs in value and gradient; TRL's "ipo" is of means over tokens, the preset's of sums as in the paper."""
    problem = drawn(seed, prompts=8, generations=2)
    batch = problem.batch.with_fields(rewards=torch.tensor([1.0, 0.0] * 8, dtype=torch.float64), advantages=None)
    algorithm = replace(DPO, ratio=Ratio("reference", level, torch.inf), surrogate=PreferenceLoss(0.3, kind))
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), problem.current)
    order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    known = summed(batch.reference, batch.mask)

    found = their_loss(
        made("DPO", PREFERENCE, loss_type=[theirs], beta=0.3),
        problem.current[order],
        batch.mask[order],
        ref_chosen_logps=known[::2],
        ref_rejected_logps=known[1::2],
    )
    same((loss, gradient[order]), found)


@pytest.mark.parametrize("seed", range(4))
def test_labels(made, drawn, same, seed):
    """Answers with a label, the KL measured on other answers; lambdas of both kinds."""
    problem = drawn(seed, prompts=8, generations=2)
    is_labelled = torch.tensor([True, False] * 8)
    label = torch.tensor([True, True, False, True, False, False, True, False])
    rewards = torch.where(is_labelled, label.repeat_interleave(2).double() * 2 - 1, 0.0)
    batch = problem.batch.with_fields(rewards=rewards, is_graded=is_labelled, advantages=None)
    algorithm = replace(KTO, surrogate=ProspectLoss(0.3, 1.0, 1.5))
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), problem.current)
    trainer = made("KTO", LABELLED, beta=0.3, desirable_weight=1.0, undesirable_weight=1.5)
    now, known = summed(problem.current, batch.mask), summed(batch.reference, batch.mask)
    trainer._compute_kl_logps = lambda *_: now[~is_labelled]

    found = their_loss(
        trainer,
        problem.current[is_labelled],
        batch.mask[is_labelled],
        label=label,
        ref_logps=known[is_labelled],
        ref_KL_logps=known[~is_labelled],
    )
    same((loss, gradient[is_labelled]), found)
    assert not bool(gradient[~is_labelled].any())
