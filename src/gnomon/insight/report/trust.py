"""What an algorithm does with each recorded token: whether it trusts it, holds it back, or stops it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnomon.algorithms import Algorithm, resolve
from gnomon.algorithms.protocols import LossInputs
from gnomon.algorithms.ratios import masked
from gnomon.core.errors import ConfigError
from gnomon.core.types import Group, Task
from gnomon.core.user_code import without_code
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RecordedRollout
from gnomon.rollouts.collate import collate

_ROUNDING = 1e-4


def algorithm_of(record: RunRecord) -> Algorithm | None:
    """Return the run's algorithm; None where it cannot be read, or where that would run code that is not gnomon's."""
    table = record.experiment().get("algorithm")
    if not isinstance(table, Mapping):
        return None
    try:
        with without_code():
            return resolve(table)
    except (ConfigError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def trust_letters(algorithm: Algorithm, step: Sequence[RecordedRollout]) -> dict[int, str]:
    """Return what the algorithm's bound makes of each token of a step: place of the rollout to a letter a token.

    ``.`` pushed as its ratio says, ``x`` not at all, ``-`` less, ``+`` more, ``0`` of advantage 0, blank not trained.
    The ratio is proximal over behavior: how far the learner was from the sampler when the step began. Where the loss
    anchors on proximal it begins each step at 1 instead, and this is what its bound would say of the whole distance.

    Args:
        step: All rollouts of it. Those whose proximal log-probabilities are not known are left out; all of an algorithm
            that anchors on the reference, and of one whose bound follows from the ratios of a whole step that is known
            in part.
    """
    trained = [place for place, one in enumerate(step) if one.taught.advantages]
    known = [place for place in trained if step[place].taught.proximal]
    is_told = len(known) == len(trained) or algorithm.ratio.anchor != "behavior"
    # Distributions, entropies and the reference's log-probabilities are not recorded.
    reads_more = algorithm.reads_entropy or getattr(algorithm.surrogate, "reference_top", None) is not None
    if not known or not is_told or algorithm.ratio.anchor == "reference" or reads_more:
        return {}
    chosen = [step[place] for place in known]
    batch = collate([Group(Task(one.rollout.task_id, (), ""), (one.rollout,)) for one in chosen], 1.0)
    proximal = _matrix([one.taught.proximal for one in chosen], batch.width)
    advantages = masked(_matrix([one.taught.advantages for one in chosen], batch.width), batch.mask)
    behavior = batch.behavior.double()
    batch = batch.with_fields(behavior=behavior, proximal=proximal, advantages=advantages)
    leaf = proximal.clone().requires_grad_()
    ratio = algorithm.ratio(proximal, behavior, batch.mask)
    # A correction bounds proximal over behavior itself, beside a ratio that begins at 1.
    anchored = algorithm.ratio(leaf, behavior if algorithm.correction is None else proximal, batch.mask)
    view = LossInputs(batch, leaf, torch.zeros_like(leaf), proximal, anchored, algorithm.statistics(proximal, batch))
    per_token, _ = algorithm.surrogate(view)
    if algorithm.correction is not None:
        per_token = algorithm.correction(view)[0] * per_token
    (slope,) = torch.autograd.grad(masked(per_token, batch.mask).sum(), leaf)
    push = masked(-slope / advantages, advantages != 0)
    if algorithm.ratio.level == "sequence_product":
        push = push / batch.mask.sum(1, keepdim=True).clamp(min=1)
    letters = _letters(batch.mask, advantages, push, masked(ratio.exp(), batch.mask))
    return {p: text[: len(one.rollout.response)] for p, text, one in zip(known, letters, chosen, strict=True)}


def _matrix(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    padded = torch.zeros(len(rows), width, dtype=torch.float64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return padded.nan_to_num(0.0)


def _letters(mask: Tensor, advantages: Tensor, push: Tensor, ratio: Tensor) -> list[str]:
    # Recorded numbers are rounded, so only what differs clearly was bounded.
    marks = {
        "-": push < ratio * (1 - _ROUNDING),
        "+": push > ratio * (1 + _ROUNDING),
        "x": push == 0,
        "0": advantages == 0,
        " ": ~mask,
    }
    codes = torch.full_like(push, ord("."), dtype=torch.long)
    for letter, where in marks.items():
        codes[where] = ord(letter)
    return ["".join(map(chr, row)) for row in codes.tolist()]
