"""The reference policy of a learner: its first weights, their moving average, or teachers."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from gnomon.algorithms.sections import EmaProximal
from gnomon.core.errors import ConfigError
from gnomon.core.types import Batch, Scores
from gnomon.learner.forward import ForwardRunner, scorer_on
from gnomon.learner.loss import MovingAverage
from gnomon.learner.mesh import Mesh
from gnomon.models.contexts import has_adapters, without_adapters
from gnomon.models.logprobs import TokenScorer


@dataclass(frozen=True)
class ReferenceModels:
    """The models of a reference policy.

    Attributes:
        model: A frozen model: the policy's first weights, or a teacher. None is the policy without its adapters, or its
            ``average``.
        by_task: Teachers of the parts of a mixture of tasks, by the part's name.
        is_policy: The policy as it is when it is asked.
        average: Keeps a moving average of the policy's weights.
        top: Likeliest tokens that are scored beside the sampled one, 0 for all; None for none.
    """

    model: nn.Module | None = None
    by_task: Mapping[str, nn.Module] = field(default_factory=dict)
    is_policy: bool = False
    average: EmaProximal | None = None
    top: int | None = None

    @property
    def frozen(self) -> nn.Module | None:
        """All frozen models as one module; None without any."""
        several = [*dict.fromkeys(m for m in (self.model, *self.by_task.values()) if m is not None)]
        return several[0] if len(several) == 1 else nn.ModuleList(several) if several else None


class ReferenceScorer:
    """Scores batches under the reference policy; its own routers choose experts.

    Args:
        models: What it computes with; frozen by this.
        policy: The policy's module, whole.
        scorer: That of the policy.
        passes: What runs passes, on the mesh that the policy is on.
    """

    def __init__(self, models: ReferenceModels, policy: nn.Module, scorer: TokenScorer, passes: ForwardRunner) -> None:
        self._policy, self._scorer, self._passes = policy, scorer, passes
        self.average = None if models.average is None else MovingAverage(policy, models.average)
        named = {"": models.model if self.average is None else self.average.model, **models.by_task}
        self._frozen, self._top = models.frozen, models.top
        self._is_policy = models.is_policy
        if self._frozen is not None:
            self._frozen.eval().requires_grad_(False)
        self._scorers = {task: scorer_on(passes.mesh, model) for task, model in named.items() if model is not None}

    def spread(self, mesh: Mesh) -> None:
        """Let ``mesh`` hold its models, a part in each of its processes."""
        if self._frozen is not None:
            for model in self._frozen if isinstance(self._frozen, nn.ModuleList) else (self._frozen,):
                mesh.shard(model)
        if self.average is not None:
            self.average.spread(mesh)

    def score(self, batch: Batch) -> Scores:
        """Return ``reference`` and, where they are asked for, ``top_tokens`` and ``top_logprobs``; no gradient.

        Rows with a hint are scored behind that, in place of their prompt.

        Raises:
            ConfigError: There is no reference.
        """
        logprobs, tops = torch.zeros(batch.mask.shape), []
        for task, rows in self._rows_by_task(batch):
            # A replayed routing is the policy's choice of experts; the reference's routers make their own.
            part = _hinted(batch.rows(rows).with_fields(routing=None, free_routing=None))
            scorer = self._scorers.get(task)
            has_own = scorer is not None or self._is_policy
            if not has_own and not has_adapters(self._policy):
                raise ConfigError(
                    "the algorithm needs a reference policy, but the learner was given none; give "
                    "TorchLearner(reference=...) a frozen copy of the initial model"
                )
            # Without a model of its own, the reference is the policy's base weights.
            with nullcontext() if has_own else without_adapters(self._policy):
                if self._top is None:
                    logprobs[rows] = self._passes.logprobs(scorer or self._scorer, part)
                else:
                    logprobs[rows], top = self._passes.top(scorer or self._scorer, part, self._top)
                    tops.append((rows, top))
        if not tops:
            return Scores(reference=logprobs)
        # Teachers scored disjoint rows, task by task; this puts them back into the batch's order.
        order = torch.cat([rows for rows, _ in tops]).argsort()
        tokens, values = (torch.cat(parts)[order] for parts in zip(*(top for _, top in tops), strict=True))
        return Scores(reference=logprobs, top_tokens=tokens, top_logprobs=values)

    def _rows_by_task(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows that each teacher scores; "" are those of no teacher of their own."""
        # Of a part "a" and a part "a:b" the longer name comes first: an id begins with both.
        names = sorted(self._scorers.keys() - {""}, key=len, reverse=True)
        known = [next((n for n in names if task.startswith(f"{n}:")), "") for task in batch.task_ids]
        known = known or [""] * len(batch)
        for name in sorted(set(known)):
            yield name, torch.tensor([row for row, own in enumerate(known) if own == name])


def _hinted(batch: Batch) -> Batch:
    """Return the batch as the reference reads it: each response behind the row's hint; without one it is masked."""
    if batch.hints is None or batch.hint_lengths is None:
        return batch
    # The response moves from behind the prompt to behind the hint: its first column changes, its length does not.
    begins, ends = batch.hint_lengths[:, None], batch.hint_lengths + batch.lengths - batch.prompt_lengths
    places = torch.arange(int(ends.max()))
    answers = (places - begins + batch.prompt_lengths[:, None]).clamp(0, batch.tokens.shape[1] - 1)
    # (rows, positions): at each new position, the token of the response that belongs there; clamped where none does.
    own = batch.tokens.gather(1, answers)
    hints = batch.hints.gather(1, places.clamp(max=batch.hints.shape[1] - 1).expand(len(batch), -1))
    tokens = torch.where(places < begins, hints, torch.where(places < ends[:, None], own, 0))
    is_taught = batch.is_taught
    # A row of which nothing is asked keeps its prompt, so that it has one.
    width = max(tokens.shape[1], batch.tokens.shape[1])
    tokens, kept = (functional.pad(t, (0, width - t.shape[1])) for t in (tokens, batch.tokens))
    return batch.with_fields(
        tokens=torch.where(is_taught[:, None], tokens, kept),
        prompt_lengths=torch.where(is_taught, batch.hint_lengths, batch.prompt_lengths),
        lengths=torch.where(is_taught, ends, batch.lengths),
        mask=batch.mask & is_taught[:, None],
    )
