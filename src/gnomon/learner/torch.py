"""A learner in this process: one module, one optimizer, exact sums over micro-batches."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gnomon.algorithms.algorithm import Algorithm, Need
from gnomon.algorithms.statistics import Statistics
from gnomon.errors import CheckpointError, ConfigError
from gnomon.learner.microbatches import micro_batches, move
from gnomon.learner.optimizer import Optimizer
from gnomon.learner.plan import LearnerPlan
from gnomon.learner.tally import LossTally, Work
from gnomon.metrics import Last, Mean, Metrics, Sum
from gnomon.models.load import merged_tensors, trainable, write_model
from gnomon.models.logprobs import TokenScorer
from gnomon.models.modes import has_adapters, recomputing, without_adapters
from gnomon.types import Batch, Scores, Snapshot, State

T = TypeVar("T")


class TorchLearner:
    """Implements `Learner` on one device.

    The module may be shared with an engine in the same process: its tensors are only written in place, and
    only while `update` or `restore` runs. It is put in eval mode and stays there: dropout would make the
    ratio of two equal policies differ from one.

    model: a causal language model, in the precision that it shall compute in. Parameters in less than
        float32 get float32 masters here; those that need no gradient (all but the adapters, with LoRA) are
        never touched.
    plan: see `LearnerPlan`; its ``precision`` was acted on when the model was loaded.
    steps: training steps of the whole run, which schedules end at.
    reference: a frozen copy for the reference policy. With adapters none is needed: it is the model without
        them.
    """

    def __init__(self, model: nn.Module, plan: LearnerPlan, steps: int, reference: nn.Module | None = None) -> None:
        self._model: Any = model.eval()
        self._plan = plan
        self._steps = steps
        self._device = next(model.parameters()).device
        self._optimizer = Optimizer(trainable(model), plan.optimizer)
        self._scorer = TokenScorer(model)
        self._reference = None if reference is None else TokenScorer(reference.eval().requires_grad_(False))
        self._version = 0
        # Optimizer steps made, and made when `score` was last asked for the proximal policy.
        self._updates = 0
        self._scored_at: int | None = None
        self._work = Work()
        self._fingerprints: dict[str, str] = {}
        # One thread for all calls: they never overlap, and OpenMP keeps one team of threads.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    @property
    def version(self) -> int:
        """Finished training steps."""
        return self._version

    async def score(self, batch: Batch, needs: Set[Need]) -> Scores:
        """Return what is asked for, Float32[B T], 0 where the mask is false; no gradient.

        Raises: ConfigError when the reference is asked for and there is none, or values are (no critic).
        """
        return await self._run(lambda: self._score(batch, needs))

    async def update(self, minibatch: Batch, algorithm: Algorithm, step: int) -> Metrics:
        """Make one optimizer step on the weighed ``minibatch``, or none if no row of it can have a gradient.

        As long as no optimizer step was made since `score`, the proximal policy *is* the current one: the
        forward pass with the gradient then serves both, so that ratios are exactly one.
        Raises: LearnerError when a loss or the gradient is not finite; weights, moments and schedule are
            then what they were.
        """
        return await self._run(lambda: self._update(minibatch, algorithm, step))

    def advance(self) -> None:
        """Count one finished training step."""
        self._version += 1

    def snapshot(self) -> Snapshot:
        """Return the module's own tensors, adapters merged; read them before the next update."""
        return Snapshot(self._version, lambda: merged_tensors(self._model))

    def state(self) -> State:
        """Return copies of masters and moments; the version; which frozen weights they belong to; uncounted work.

        The module itself is not among them: it is the masters, rounded. With LoRA only adapters are.
        """
        work = [self._work.computed, self._work.real]
        values = {"version": self._version, "frozen": dict(self._frozen()), "work": work}
        return State(self._optimizer.state().tensors, values)

    def restore(self, state: State) -> None:
        """Become the learner that returned ``state``, bit for bit.

        Raises: CheckpointError when it was trained on another model, base or reference; nothing was changed
            then.
        """
        saved = state.values["frozen"]
        if saved != self._frozen():
            raise CheckpointError(
                f"the checkpoint was made on other frozen weights: it says {saved}, this run has "
                f"{self._frozen()}; resume with the model and reference that the run began with"
            )
        self._optimizer.restore(state)
        self._version = int(state.values["version"])
        self._work = Work(*(int(count) for count in state.values["work"]))
        self._scored_at = None

    def write_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, adapters merged, in the precision that it computes in."""
        write_model(merged_tensors(self._model), self._model.config, folder, self._model.generation_config)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _score(self, batch: Batch, needs: Set[Need]) -> Scores:
        if "values" in needs:
            raise ConfigError("values are asked for, but this learner has no critic")
        proximal = reference = None
        if "proximal" in needs:
            proximal = self._pass(self._scorer, batch)
            self._scored_at = self._updates
        if "reference" in needs:
            reference = self._score_reference(batch)
        return Scores(proximal=proximal, reference=reference)

    def _score_reference(self, batch: Batch) -> Tensor:
        if self._reference is not None:
            return self._pass(self._reference, batch)
        if not has_adapters(self._model):
            raise ConfigError(
                "the algorithm needs a reference policy, but the learner was given none; "
                "give TorchLearner(reference=...) a frozen copy of the initial model"
            )
        with without_adapters(self._model):
            return self._pass(self._scorer, batch)

    def _pass(self, scorer: TokenScorer, batch: Batch) -> Tensor:
        """Return log-probabilities of all rows that have a trained token, without gradient."""
        result = torch.zeros(batch.mask.shape)
        rows = batch.mask.any(1).nonzero()[:, 0]
        with torch.no_grad():
            for index, cut in micro_batches(batch, rows, self._plan.max_tokens_per_micro_batch):
                on = move(cut, self._device)
                scores = scorer(on.tokens, on.prompt_lengths, on.mask, on.temperature, with_entropy=False)
                self._work.add(cut, scores.computed)
                result[index, : cut.width] = scores.logprobs.cpu()
        return result

    def _update(self, minibatch: Batch, algorithm: Algorithm, step: int) -> Metrics:
        rows = algorithm.live_rows(minibatch).nonzero()[:, 0]
        learning_rate = self._plan.optimizer.learning_rate_at(step, self._steps)
        is_skipped = len(rows) == 0
        metrics = Metrics.of(
            {
                "learner/updates": Sum(int(not is_skipped)),
                "learner/skipped_updates": Sum(int(is_skipped)),
                "learner/learning_rate": Last(learning_rate),
            }
        )
        if is_skipped:
            return metrics + self._work.take()
        is_current = minibatch.proximal is not None and self._scored_at == self._updates
        statistics = self._statistics(minibatch, algorithm, is_current)
        if is_current:
            minibatch = minibatch.with_fields(proximal=None)
        tally = LossTally()
        try:
            self._accumulate(minibatch, rows, algorithm, statistics, tally)
            norm = self._optimizer.step(learning_rate)
        except BaseException:
            self._optimizer.drop_gradients()
            raise
        self._updates += 1
        return tally.take() + metrics + Metrics.of({"learner/gradient_norm": Mean(norm, 1)}) + self._work.take()

    def _statistics(self, minibatch: Batch, algorithm: Algorithm, is_current: bool) -> Statistics:
        """Return the statistics of the whole step under the current policy, before its first cut."""
        if not algorithm.reads_statistics:
            return Statistics()
        current = minibatch.proximal if is_current else None
        if current is None:
            current = self._pass(self._scorer, minibatch)
        return algorithm.statistics(current, minibatch)

    def _accumulate(
        self,
        minibatch: Batch,
        rows: Tensor,
        algorithm: Algorithm,
        statistics: Statistics,
        tally: LossTally,
    ) -> None:
        """Add up losses and gradients of all cuts."""
        saving = recomputing(self._model) if self._plan.gradient_checkpointing else nullcontext()
        with torch.enable_grad(), saving:
            for _, cut in micro_batches(minibatch, rows, self._plan.max_tokens_per_micro_batch):
                on = move(cut, self._device)
                scores = self._scorer(on.tokens, on.prompt_lengths, on.mask, on.temperature)
                self._work.add(cut, scores.computed)
                loss = algorithm.loss(scores.logprobs, scores.entropy, on, statistics)
                tally.add(loss)
                loss.total.backward()

    def _frozen(self) -> dict[str, str]:
        """Return fingerprints of the weights that are no part of the state but decide what it means."""
        if not self._fingerprints:
            frozen = [(n, p) for n, p in self._model.named_parameters() if not p.requires_grad]
            self._fingerprints["base"] = fingerprint(frozen)
            reference = [] if self._reference is None else self._reference.model.named_parameters()
            self._fingerprints["reference"] = fingerprint(reference)
        return self._fingerprints


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of names, shapes and every bit of the tensors; "" of nothing.

    >>> fingerprint([("a", torch.zeros(2))]) == fingerprint([("a", torch.zeros(3))])
    False
    """
    listed = list(named)
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in listed:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(plain.numpy().data)
    return digest.hexdigest() if listed else ""
