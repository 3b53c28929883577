"""Cuts of a batch on their way through a model, and the count of what was computed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.learner.microbatches import Sharing, micro_batches, move
from gnomon.learner.plan import LearnerPlan, default_budget
from gnomon.learner.tally import Work
from gnomon.metrics import Metrics
from gnomon.models.logprobs import TokenScorer, TokenScores
from gnomon.models.modes import recomputing
from gnomon.models.prefix import crossing_tokens
from gnomon.models.routing import Routing, changed_fraction
from gnomon.models.values import Values, ValueScorer
from gnomon.progress import working
from gnomon.types import Batch

_STRETCH = 4


class Passes:
    """Forward passes of one learner, whichever model they go through.

    plan: its token budget, and whether activations are computed again. model: the policy; all models are on its device,
        and its shape decides how many tokens a cut holds and where the attention of shared prompts becomes dear.
    """

    def __init__(self, plan: LearnerPlan, model: nn.Module) -> None:
        self.work = Work()
        policy: Any = model
        self._plan = plan
        self._device = next(model.parameters()).device
        self.max_tokens = plan.max_tokens_per_micro_batch or default_budget(policy)
        # A budget chosen here stretches rather than compute a long prompt again; one that the user set does not.
        self._stretch = _STRETCH if plan.max_tokens_per_micro_batch is None else 1
        self._crossing = crossing_tokens(policy.config.get_text_config().hidden_size)

    def halve(self) -> bool:
        """Let cuts hold half as many tokens from now on, and return whether that is possible."""
        if self.max_tokens < 2:
            return False
        self.max_tokens //= 2
        self.work.halvings += 1
        return True

    def cuts(self, batch: Batch, rows: Tensor, scorer: TokenScorer | ValueScorer) -> Iterator[tuple[Tensor, Batch]]:
        """Yield ``rows`` Int[N] of ``batch`` in cuts that ``scorer`` computes within the budget: which rows, and those
        on the device.

        Rows whose routing is replayed count whole: where they disagree about their prompt it cannot be shared.
        """
        is_shared = scorer.shares_prompts and batch.routing is None
        sharing = Sharing(self._crossing, self._stretch * self.max_tokens) if is_shared else None
        with working("computing", len(rows), is_brief=True) as steps:
            for index, cut in micro_batches(batch, rows, self.max_tokens, sharing):
                yield index, move(cut, self._device)
                steps.advance(len(index))

    def score(self, scorer: TokenScorer, cut: Batch, with_entropy: bool = True) -> TokenScores:
        """Return log-probabilities and entropies of one cut, its routing replayed where it has one."""
        is_routed = cut.routing is not None or cut.free_routing is not None
        return self._score(scorer, cut, with_entropy, Routing(cut.routing) if is_routed else None)

    def value(self, scorer: ValueScorer, cut: Batch, is_trunk_frozen: bool = False) -> Values:
        """Return the values of one cut."""
        values = scorer(cut.tokens, cut.prompt_lengths, cut.lengths, cut.mask, is_trunk_frozen)
        self.work.add(cut, values.computed)
        return values

    def logprobs(self, scorer: TokenScorer, batch: Batch) -> Tensor:
        """Return Float32[B T] of all rows that have a trained token, without gradient."""
        result = torch.zeros(batch.mask.shape)
        with torch.no_grad():
            for index, cut in self.cuts(batch, batch.mask.any(1).nonzero()[:, 0], scorer):
                result[index, : cut.width] = self.score(scorer, cut, with_entropy=False).logprobs.cpu()
        return result

    def routes(self, scorer: TokenScorer, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return `logprobs` with free routers, and which experts Int16[B S L K] they chose; None if dense.

        -1 where nothing went through the model: in rows without a trained token, and behind the last one of a row.
        """
        result, experts = torch.zeros(batch.mask.shape), None
        with torch.no_grad():
            rows = batch.mask.any(1).nonzero()[:, 0]
            for index, cut in self.cuts(batch.with_fields(routing=None), rows, scorer):
                scores = self._score(scorer, cut, False, Routing())
                result[index, : cut.width] = scores.logprobs.cpu()
                if scores.experts is None:
                    continue
                if experts is None:
                    experts = torch.full((*batch.tokens.shape, *scores.experts.shape[2:]), -1, dtype=torch.int16)
                experts[index, : cut.tokens.shape[1]] = scores.experts.cpu()
        return result, experts

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing inside the block: what is computed there is no work of training."""
        work, self.work = self.work, Work()
        try:
            yield
        finally:
            self.work = work

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record gradients inside the block, with as few activations kept as the plan says."""
        saving: AbstractContextManager[None] = nullcontext()
        if self._plan.gradient_checkpointing:
            saving = recomputing(model)
        with torch.enable_grad(), saving:
            yield

    def _score(self, scorer: TokenScorer, cut: Batch, with_entropy: bool, routing: Routing | None) -> TokenScores:
        scores = scorer(cut.tokens, cut.prompt_lengths, cut.mask, cut.temperature, with_entropy, routing)
        self.work.add(cut, scores.computed)
        return scores


def measure_routing(scores: TokenScores, cut: Batch) -> Metrics:
    """Return how much of a cut's routing, replayed or not, the current router would choose otherwise."""
    recorded = cut.free_routing if cut.routing is None else cut.routing
    if recorded is None or scores.experts is None:
        return Metrics()
    changed = changed_fraction(scores.experts, recorded, cut.prompt_lengths, cut.mask)
    return Metrics.of({"routing/changed_fraction": changed})
