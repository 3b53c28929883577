"""A learner in this process: one module, one optimizer, exact sums over micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.protocols import Loss, Need
from gnomon.algorithms.ratios import Statistics
from gnomon.algorithms.sections import EmaProximal
from gnomon.core.errors import ConfigError
from gnomon.core.failpoints import failpoint
from gnomon.core.metrics import Last, Mean, Metrics, Sum
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Batch, Scores, Snapshot, State
from gnomon.learner.allocator import retry_on_oom
from gnomon.learner.base import PLAIN, check_composition, nest, unnest
from gnomon.learner.forward import Begun, ForwardRunner, Prefetched, measure_routing, move, scorer_on, trim
from gnomon.learner.frozen import FrozenWeights
from gnomon.learner.loss import ComputeStats, LaggedStatistics, LossAccumulator, MovingAverage, once
from gnomon.learner.mesh import Mesh, current_mesh, readable
from gnomon.learner.optimizer import Optimizer
from gnomon.learner.reference import ReferenceModels, ReferenceScorer
from gnomon.learner.sections import LearnerConfig
from gnomon.models.adapter_config import ADAPTER_FOLDER
from gnomon.models.critic import FOLDER, ValueHead, Values, ValueScorer, critic_writer
from gnomon.models.load import model_writer
from gnomon.models.logprobs import TokenScores
from gnomon.models.lora import adapter_writer, snapshot_of, trainable
from gnomon.models.quantized import layers_of
from gnomon.models.routing import can_record
from gnomon.models.weight_files import Writer


@dataclass(frozen=True)
class CriticFit:
    """Settings of one optimizer step of the critic.

    Attributes:
        plan: The critic's section, with its loss.
        learning_rate: Above 0.
        is_head_only: Only the head learns.
        one_sided: As in `CriticConfig.loss`.
    """

    plan: CriticConfig
    learning_rate: float
    is_head_only: bool = False
    one_sided: bool = False


def head_of(critic: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a head on the policy's trunk, which the policy's optimizer steps."""
    if not isinstance(critic, ValueHead):
        return []
    return [(f"value_head.{name}", parameter) for name, parameter in critic.named_parameters()]


def scorer_of(critic: nn.Module, policy: nn.Module, mesh: Mesh) -> ValueScorer:
    """Return what reads the values of a critic: a head on the trunk of ``policy``, or a model with its own.

    Both are whole still. A head stays so in every process of ``mesh``.
    """
    critic.eval()
    if isinstance(critic, ValueHead):
        return ValueScorer(policy, critic if mesh.device is None else critic.to(mesh.device))
    head = critic.get_submodule("score")
    assert isinstance(head, nn.Linear), "a critic that was loaded has a linear head"
    return ValueScorer(critic, head)


class CriticLearner:
    """A value model and its optimizer.

    Args:
        critic: A value model with a trunk of its own (`load_critic`), or a `ValueHead` on the policy's trunk. On a
            shared trunk the policy's optimizer, which must have the head among its parameters, makes the critic's steps
            as well: two optimizers must not own master copies of one parameter.
        scorer: What `scorer_of` returned.
        optimizer: The learner's.
        passes: Runs and counts the forward passes.
    """

    def __init__(self, critic: nn.Module, scorer: ValueScorer, optimizer: Optimizer, passes: ForwardRunner) -> None:
        self.is_shared = isinstance(critic, ValueHead)
        self._critic = critic
        self._scorer = scorer
        self._passes = passes
        self._mesh = passes.mesh
        self.optimizer = optimizer
        self._begun: Begun[Values] | None = None
        if not self.is_shared:
            self._mesh.shard(critic)
            self.optimizer = Optimizer(trainable(critic), optimizer.plan, self._mesh)

    def values(self, batch: Batch, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return values Float32[B T] of the state before each trained token, and bootstrap Float32[B] of that after
        the last token; zeros elsewhere, and in rows without a trained token. No gradient.

        Args:
            first: Rows Int[N] that the next `fit` learns from; the graph of their first cut is kept for it.
        """
        self.forget()
        values, bootstrap = torch.zeros(batch.mask.shape), torch.zeros(len(batch))
        # Rows that nothing is trained on are not computed: their values are never read.
        live = batch.mask.any(1)
        first = torch.arange(0) if first is None or self._mesh.size > 1 else first
        rows = first[live[first]]
        rest = live.index_fill(0, rows, False).nonzero()[:, 0]

        def note(index: Tensor, cut: Batch) -> Values:
            found = self._passes.value(self._scorer, cut)
            values[index, : cut.width] = found.values.detach().cpu()
            bootstrap[index] = found.bootstrap.detach().cpu()
            return found

        # Last, so that no other pass is in memory beside the graph.
        last = list(self._passes.cuts(batch, rows, self._scorer))
        with torch.no_grad():
            for index, cut in chain(self._passes.cuts(batch, rest, self._scorer), last[1:]):
                note(index, cut)
        for index, cut in last[:1]:
            with self._passes.recording(self._scorer.backbone):
                found = note(index, cut)
            # `first` is sorted, so the position of each row of the cut within it is found by bisection.
            self._begun = Begun(batch.rows(first), torch.searchsorted(first, index), found)
        return self._mesh.all_reduce_sum(values), self._mesh.all_reduce_sum(bootstrap)

    def forget(self) -> None:
        """Drop what was computed for the next `fit`: weights change, or others were restored."""
        self._begun = None

    def fit(self, minibatch: Batch, settings: CriticFit) -> Metrics:
        """Make one optimizer step on the weighed ``minibatch``, or none if no token of it counts.

        Raises:
            NotFiniteError: The loss or the gradient is not finite; nothing was changed then.
        """
        assert minibatch.weights is not None, "value_minibatches comes first"
        rows = ((minibatch.weights != 0) & minibatch.mask).any(1).nonzero()[:, 0]
        metrics = Metrics.of(
            {"critic/updates": Sum(int(len(rows) > 0)), "critic/learning_rate": Last(settings.learning_rate)}
        )
        if len(rows) == 0:
            return once(self._mesh, metrics) + self._passes.work.take()
        losses = LossAccumulator(self._mesh)
        begun, self._begun = self._begun, None
        try:
            with self._passes.recording(self._scorer.backbone):
                self._accumulate(self._cuts(minibatch, rows, settings, begun), settings, losses)
            losses.check()
            # On a shared trunk this is the policy's optimizer, which steps the trunk's weights and the head together.
            norm = self.optimizer.step(settings.learning_rate)
        except BaseException:
            self.optimizer.drop_gradients()
            raise
        metrics += Metrics.of({"critic/gradient_norm": Mean(norm, 1)})
        return losses.metrics + once(self._mesh, metrics) + self._passes.work.take()

    def check(self, state: State) -> None:
        """Raise CheckpointError when ``state`` is of another critic."""
        if not self.is_shared:
            self.optimizer.check(state)

    def restore(self, state: State) -> None:
        """Become the critic that returned ``state``.

        Raises:
            CheckpointError: As `check`; nothing was changed then.
        """
        self.forget()
        if not self.is_shared:
            self.optimizer.restore(state)

    def writer(self, is_copied: bool) -> Writer:
        """Return what writes the critic into FOLDER/critic, in any thread; a head lies there alone.

        Not beside the policy's weights: some engines read every weight file that they find.

        Args:
            is_copied: As it is now; else as it is then, and every process calls it.
        """
        given = () if self.is_shared else readable(self._mesh, self._critic, is_copied)
        write = critic_writer(self._critic, *given)
        return lambda folder: write(None if folder is None else folder / FOLDER)

    def _cuts(
        self, minibatch: Batch, rows: Tensor, settings: CriticFit, begun: Begun[Values] | None
    ) -> Iterator[tuple[Tensor, Batch, Values]]:
        """Yield `ForwardRunner.cuts` of ``rows`` Int[N], with values whose gradient is recorded."""
        live = torch.zeros(len(minibatch), dtype=torch.bool).index_fill(0, rows, True)
        # A graph through the trunk is of no use where only the head learns.
        known = None if begun is None or settings.is_head_only else begun.within(minibatch, live)
        if begun is not None and known is not None:
            index, at = known
            found = begun.found
            cut, at = move(trim(minibatch.rows(index)), found.values.device), at.to(found.values.device)
            yield index, cut, Values(found.values[at, : cut.width], found.bootstrap[at], 0)
            rows = live.index_fill(0, index, False).nonzero()[:, 0]
        for index, cut in self._passes.cuts(minibatch, rows, self._scorer):
            yield index, cut, self._passes.value(self._scorer, cut, settings.is_head_only)

    def _accumulate(
        self, cuts: Iterable[tuple[Tensor, Batch, Values]], settings: CriticFit, losses: LossAccumulator
    ) -> None:
        """Add up losses and gradients of all cuts; the weights are of the whole minibatch, so the sums are exact."""
        plan = settings.plan
        for index, cut, found in cuts:
            if len(index) == 0:
                # A cut without a row: the backward pass moves nothing, but the other processes wait for its exchanges.
                (0 * found.values).sum().backward()
                continue
            if plan.ranks_pairs:
                loss, measured = plan.pair_loss(found.bootstrap, cut)
            else:
                loss, measured = plan.loss(found.values, cut, settings.one_sided)
            losses.add(Loss(loss, {"value": float(loss.detach())}, measured))
            loss.backward()


T = TypeVar("T")


class TorchLearner:
    """Implements `Learner` on one device.

    The module may be shared with an engine in the same process: its tensors are only written in place, and only while
    `update` or `restore` runs. It is put in eval mode for good: dropout would make the ratio of two equal policies
    differ from one.

    Args:
        model: A causal language model, in the precision that it shall compute in. Parameters in less than float32 get
            float32 masters here; those that need no gradient (all but the adapters, with LoRA) are never touched.
        plan: See `LearnerConfig`; its ``precision`` was acted on when the model was loaded.
        steps: Training steps of the whole run, which schedules end at.
        reference: A frozen copy for the reference policy, or whatever else it computes with. With adapters none is
            needed: it is the model without them.
        critic: A value model with a trunk of its own (`load_critic`), which gets an optimizer of its own; or a
            `ValueHead` on the model's trunk (`head_for`). On the same device.
        proximal: Keeps a moving average of the weights for the proximal policy, in a second module; without it that
            policy is the current one at the time of `score`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: LearnerConfig,
        steps: int,
        reference: ReferenceModels | nn.Module | None = None,
        critic: nn.Module | None = None,
        proximal: EmaProximal | None = None,
    ) -> None:
        self._model: Any = model.eval()
        self._plan = plan
        self._steps = steps
        self._mesh = mesh = current_mesh()
        self._passes = ForwardRunner(plan, model, mesh)
        # Probe the model before its parameters are sharded.
        self._scorer = scorer_on(mesh, model)
        self._is_mixture = can_record(model)
        models = reference if isinstance(reference, ReferenceModels) else ReferenceModels(reference)
        self._reference = ReferenceScorer(models, model, self._scorer, self._passes)
        # Averages copy the full model, so they are made before `shard` as well.
        self._frozen = FrozenWeights(model, models.frozen, mesh)
        self._average = None if proximal is None else MovingAverage(model, proximal)
        self._averaged = None if self._average is None else scorer_on(mesh, self._average.model)
        values = None if critic is None else scorer_of(critic, model, mesh)
        mesh.shard(model)
        self._reference.spread(mesh)
        if self._average is not None:
            self._average.spread(mesh)
        self._optimizer = Optimizer([*trainable(model), *head_of(critic)], plan.optimizer, mesh)
        self._critic = None
        if critic is not None and values is not None:
            self._critic = CriticLearner(critic, values, self._optimizer, self._passes)
        self._lag = LaggedStatistics()
        self._version = 0
        # Optimizer steps made on the policy's weights, and made when `score` was last asked for the proximal policy.
        self._updates = 0
        self._scored_at: int | None = None
        self._begun: Begun[TokenScores] | None = None
        self._kept: dict[Optimizer | MovingAverage, list[Tensor]] = {}
        self._kept_values: tuple[int, State, ComputeStats] | None = None
        # One thread for all calls: they never overlap, and OpenMP keeps one team of threads.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    @property
    def version(self) -> int:
        """Finished training steps."""
        return self._version

    async def score(self, batch: Batch, needs: Set[Need], first: Mapping[Need, Tensor] | None = None) -> Scores:
        """Return what is asked for, Float32[B T], 0 where the mask is false; no gradient.

        Args:
            first: Rows Int[N] that the next `update` ("proximal") and the next `fit` ("values") learn from. If no
                weight changes before it, it goes on from this pass, whose graph is kept: of as many rows as one
                micro-batch holds.

        Raises:
            ConfigError: The reference is asked for and there is none, or values are (no critic).
        """
        return await self._run(lambda: self._score(batch, needs, first or {}))

    async def logprobs(self, batch: Batch, weights: Snapshot | None = None) -> Tensor:
        """Return the log-probabilities of the trained weights, never of their average, or of ``weights``; no gradient.

        Args:
            weights: A complete snapshot of this model, which it computes with for one pass, in its own precision. Not
                while an engine that shares the module generates.
        """
        return await self._run(lambda: self._logprobs(batch, weights))

    async def token_stats(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the trained weights, never of their average; no gradient."""
        return await self._run(lambda: self._passes.token_stats(self._scorer, batch))

    async def update(self, minibatch: Batch, algorithm: Algorithm, step: int, rate: float = 1.0) -> Metrics:
        """Make one optimizer step on the weighed ``minibatch``, or none if no row of it can have a gradient.

        As long as no optimizer step was made since `score`, the proximal policy *is* the current one, unless it is an
        average: the forward pass with the gradient then serves both, so that ratios are exactly one.

        Raises:
            NotFiniteError: A loss or the gradient is not finite; weights, moments and schedule are then what they were.
        """
        return await self._run(lambda: self._update(minibatch, algorithm, step, rate))

    async def fit(self, minibatch: Batch, algorithm: Algorithm, step: int | None, one_sided: bool = False) -> Metrics:
        """Make one optimizer step of the critic on one of ``algorithm.value_minibatches``, or none if it has no token.

        With a trunk of its own the critic's loss never touches the policy; on a shared trunk it moves both.

        Raises:
            ConfigError: Without a critic.
            NotFiniteError: The loss or the gradient is not finite, and nothing was changed then.
        """
        return await self._run(lambda: self._fit(minibatch, algorithm, step, one_sided))

    def advance(self) -> None:
        """Count one finished training step."""
        self._version += 1
        self._forget()

    def snapshot(self) -> Snapshot:
        """Return the module's own tensors, adapters merged; read them before the next update."""
        return snapshot_of(self._version, lambda: self._mesh.export(self._model))

    def state(self) -> State:
        """Return copies of masters and moments; the version; which frozen weights they belong to; uncounted work.

        The module itself is not among them: it is the masters, rounded. With LoRA only adapters are. Where they exist,
        the critic's masters and moments come as ``critic/...``, the proximal average as ``proximal/...``.
        """
        return self._joined(lambda held: held.state())

    def lend(self) -> State:
        """Return what this process holds of `state`: masters and moments lent, without a copy, where they are on the
        CPU, to a writer that reads them before they change.
        """
        return self._joined(lambda held: held.lend())

    def _joined(self, ask: Callable[[Optimizer | MovingAverage], State]) -> State:
        parts = {"critic": State(), "proximal": State(), "lag": self._lag.state()}
        for name, held in self._further().items():
            # A head on the policy's trunk has its masters and moments in the policy's optimizer.
            owner = held.optimizer if isinstance(held, CriticLearner) else held
            if owner is not self._optimizer:
                parts[name] = ask(owner)
        own = ask(self._optimizer)
        work = self._mesh.all_reduce_sum(torch.tensor([self._passes.work.computed, self._passes.work.real])).tolist()
        frozen = self._frozen.fingerprints()
        values = {"version": self._version, "frozen": dict(frozen), "work": work, "has": self._composition()}
        return nest(State(own.tensors, values, own.lent), parts)

    def restore(self, state: State) -> None:
        """Become the learner that returned ``state``, bit for bit.

        Raises:
            CheckpointError: It was trained on another model, base or reference, or with another kind of critic or
                proximal policy; nothing was changed then.
        """
        # Everything is checked before the first tensor is written, so that a refused state changes nothing.
        self._check(state)
        self._optimizer.restore(state)
        for name, held in self._further().items():
            held.restore(unnest(state, name))
        self._lag.restore(unnest(state, "lag"))
        self._version = int(state.values["version"])
        self._passes.work = (
            ComputeStats(*(int(count) for count in state.values["work"])) if self._mesh.rank == 0 else ComputeStats()
        )
        self._scored_at = None
        self._forget()

    def keep(self) -> None:
        """Copy on the CPU what the next training step may change of what this process holds.

        A later call writes over the copy: memory for it is taken once.
        """
        for owner in self._changing():
            tensors = owner.changing()
            if owner not in self._kept:
                self._kept[owner] = [torch.empty_like(own, device="cpu") for own in tensors]
            for kept, own in zip(self._kept[owner], tensors, strict=True):
                kept.copy_(own)
        self._kept_values = (self._version, self._lag.state(), replace(self._passes.work))

    def undo(self) -> None:
        """Become, bit for bit, what this was when `keep` was last called; no process asks another one for anything."""
        assert self._kept_values is not None, "keep comes first"
        for owner in self._changing():
            owner.put_back(self._kept[owner])
        self._version, lag, work = self._kept_values
        self._lag.restore(lag)
        self._passes.work, self._scored_at = replace(work), None
        # A graph of the undone step could no longer be used, and would hold its memory until the next one.
        self._forget()

    def _changing(self) -> list[Optimizer | MovingAverage]:
        """Return what holds tensors that a step changes."""
        own = None if self._critic is None or self._critic.is_shared else self._critic.optimizer
        held = (self._optimizer, own, self._average, self._reference.average)
        return [part for part in held if part is not None]

    def close(self) -> None:
        """End its thread."""
        self._thread.shutdown(wait=False)

    def write_model(self, folder: Path | None) -> Mapping[Path, str]:
        """Write the model as a Hugging Face folder, adapters merged, in the precision that it computes in.

        Adapters come with it as they are, in peft's form, in the folder "adapter" in that one.

        A critic comes with it, in the folder "critic" in that one: a model, or the head of one on the model's trunk.

        Args:
            folder: None in all processes but one: each gives its share of a tensor after the other.

        Returns:
            The XXH3 of files of weights.

        Raises:
            NotFiniteError: A weight is not finite; nothing was written then.
        """
        return self.model_writer(is_copied=False)(folder)

    def model_writer(self, is_copied: bool = True) -> Writer:
        """Return what does `write_model` in any thread; ``is_copied``: the model as it is now, else as it is then.

        Raises:
            NotFiniteError: A weight is not finite.
        """
        # Each check is a sum over processes, so all processes must make the checks in the same order.
        for held in self._changing():
            if isinstance(held, Optimizer):
                held.check_finite()
        forms, read = readable(self._mesh, self._model, is_copied)
        write = model_writer(forms, self._model.config, self._model.generation_config, read)
        critic = None if self._critic is None else self._critic.writer(is_copied)
        masters = self._optimizer.masters
        adapters = {n: masters.full(n, m.detach()) for n, m in masters.parameters.items() if "lora_" in n}
        write_adapter = adapter_writer(self._model, adapters) if adapters else None

        def write_all(folder: Path | None) -> Mapping[Path, str]:
            critics: Mapping[Path, str] = {}
            try:
                hashes = write(folder)
                if write_adapter is not None and folder is not None:
                    write_adapter(folder / ADAPTER_FOLDER)
            finally:
                # Whatever met this process: the others read to the end.
                if critic is not None:
                    critics = critic(folder)
            return {**hashes, **critics}

        return write_all

    @property
    def model_bytes(self) -> int:
        """Bytes of the model in the precision that it computes in."""
        few: int = sum(layer.plain_bytes for _, layer in layers_of(self._model))
        return few + sum(int(parameter.nbytes) for parameter in self._model.parameters())

    async def _run(self, work: Callable[[], T]) -> T:
        return await run_in_thread(lambda: retry_on_oom(self._passes, work, self._steps_begun), self._thread)

    def _steps_begun(self) -> int:
        return sum(part.begun for part in self._changing() if isinstance(part, Optimizer))

    def _forget(self) -> None:
        """Drop what was computed for the next updates."""
        self._begun = None
        if self._critic is not None:
            self._critic.forget()

    def _score(self, batch: Batch, needs: Set[Need], first: Mapping[Need, Tensor]) -> Scores:
        proximal = sharpened = values = bootstrap = routing = free_routing = begun = None
        found = self._reference.score(batch) if "reference" in needs else Scores()
        # Before the pass whose graph is kept: the loss of an update reads the reference's likeliest tokens from it.
        batch = found.into(batch)
        if "values" in needs:
            values, bootstrap = self._known_critic().values(batch, first.get("values"))
        if "sharpened" in needs:
            # The softmax of doubled logits is the policy squared and normalized.
            colder = batch.with_fields(temperature=batch.temperature / 2)
            sharpened = self._passes.logprobs(self._averaged or self._scorer, colder)
        # The four ways to the same log-probabilities differ in what they keep beside them: the experts for replay, the
        # experts for watching, or the graph of the first cut.
        if "routing" in needs:
            proximal, routing = self._passes.routes(self._averaged or self._scorer, batch)
        elif "proximal" in needs and self._is_mixture and batch.routing is None:
            proximal, free_routing = self._passes.routes(self._averaged or self._scorer, batch)
        elif "proximal" in needs and "proximal" in first and self._averaged is None:
            proximal, begun = self._passes.begin(batch, first["proximal"], self._scorer, self._model)
        elif "proximal" in needs:
            proximal = self._passes.logprobs(self._averaged or self._scorer, batch)
        if "proximal" in needs:
            self._scored_at, self._begun = self._updates, begun
        return replace(
            found,
            proximal=proximal if "proximal" in needs else None,
            sharpened=sharpened,
            values=values,
            bootstrap=bootstrap,
            routing=routing,
            free_routing=free_routing,
        )

    def _logprobs(self, batch: Batch, weights: Snapshot | None) -> Tensor:
        exchanged = nullcontext() if weights is None else self._mesh.swap_weights(self._model, weights.tensors())
        with exchanged, self._passes.not_counted():
            return self._passes.logprobs(self._scorer, batch)

    def _update(self, minibatch: Batch, algorithm: Algorithm, step: int, rate: float) -> Metrics:
        # The graph of the scoring pass, if the weights have not moved since; used once, whatever happens.
        begun, self._begun = self._begun, None
        live = algorithm.live_rows(minibatch)
        learning_rate = rate * self._plan.optimizer.learning_rate_at(step, self._steps)
        is_skipped = not bool(live.any())
        metrics = Metrics.of(
            {
                "learner/updates": Sum(int(not is_skipped)),
                "learner/skipped_updates": Sum(int(is_skipped)),
                "learner/learning_rate": Last(learning_rate),
            }
        )
        if is_skipped:
            return once(self._mesh, metrics) + self._passes.work.take()
        # No optimizer step since `score`: proximal and current policy are the same weights.
        is_scored = minibatch.proximal is not None and self._scored_at == self._updates
        is_current = is_scored and self._average is None
        losses = LossAccumulator(self._mesh)
        try:
            with self._passes.recording(self._model):
                statistics, prefetched = self._statistics(minibatch, algorithm, live, is_current)
                # Scored at these very weights: without it the loss uses its own pass, and ratios are exactly 1.
                if is_current:
                    minibatch = minibatch.with_fields(proximal=None)
                    prefetched = prefetched or self._passes.resume(begun, minibatch, live, self._scorer)
                cuts = self._passes.with_grad(minibatch, live.nonzero()[:, 0], self._scorer, prefetched)
                self._accumulate(cuts, algorithm, statistics, losses)
            losses.check()
            if algorithm.scope == "lagged":
                self._lag.gather(self._mesh)
            # It checks the gradient before it moves a weight, so a failure leaves everything as it was.
            norm = self._optimizer.step(learning_rate)
        except BaseException:
            self._optimizer.drop_gradients()
            self._lag.forget()
            raise
        failpoint("update")
        self._updates += 1
        if self._critic is not None and self._critic.is_shared:
            self._critic.forget()
        self._lag.advance()
        for average in (self._average, self._reference.average):
            if average is not None:
                average.follow(self._optimizer.masters.parameters)
        metrics += Metrics.of({"learner/gradient_norm": Mean(norm, 1)})
        return losses.take(int(minibatch.mask.sum())) + once(self._mesh, metrics) + self._passes.work.take()

    def _statistics(
        self, minibatch: Batch, algorithm: Algorithm, live: Tensor, is_current: bool
    ) -> tuple[Statistics, Prefetched | None]:
        """Return the statistics that the step's loss reads, before its first cut: its own, or those of the last one.

        Its own need all cuts computed first, if the proximal policy just scored is not the current one. Those of the
        last one are measured on the way, in the passes that the loss makes; rows without a gradient have none there.
        """
        if algorithm.scope == "lagged":
            # Rows without a gradient make no pass in the loss, but the effective size is of all trained tokens.
            others = minibatch.rows((minibatch.mask.any(1) & ~live).nonzero()[:, 0])
            if len(others) > 0:
                known = others.proximal if is_current else None
                current = self._passes.logprobs(self._scorer, others) if known is None else known
                measured = algorithm.statistics(current, others)
                # Every process has computed all of these rows together, so only one may count them.
                self._lag.add(measured if self._mesh.rank == 0 else Statistics())
            return self._lag.statistics, None
        if not algorithm.reads_statistics:
            return Statistics(), None
        reads_entropy = algorithm.reads_entropy
        # The log-probabilities just scored are the current ones, so nothing has to be computed for the statistics.
        if is_current and minibatch.proximal is not None and not reads_entropy:
            return algorithm.statistics(minibatch.proximal, minibatch), None
        rows = live.nonzero()[:, 0]
        current, entropy, prefetched = self._passes.prefetch_first(minibatch, rows, self._scorer, reads_entropy)
        return algorithm.statistics(current, minibatch, entropy), prefetched

    def _accumulate(
        self,
        cuts: Iterable[tuple[Tensor, Batch, TokenScores]],
        algorithm: Algorithm,
        statistics: Statistics,
        losses: LossAccumulator,
    ) -> None:
        """Add up losses and gradients of all cuts."""
        for index, cut, scores in cuts:
            if len(index) == 0:
                # An empty cut of a mesh; see `CriticLearner._accumulate`.
                (0 * scores.logprobs).sum().backward()
                continue
            if algorithm.scope == "lagged":
                self._lag.add(algorithm.statistics(scores.logprobs, cut))
            loss = algorithm.loss(scores.logprobs, scores.entropy, cut, statistics, scores.anchor_kl)
            losses.backward(loss, scores, cut)
            losses.metrics += measure_routing(scores, cut)
            failpoint("backward")

    def _fit(self, minibatch: Batch, algorithm: Algorithm, step: int | None, one_sided: bool) -> Metrics:
        critic, plan = self._known_critic(), algorithm.critic
        if plan is None:
            raise ConfigError(f"the algorithm '{algorithm.name}' has no critic, so none can be taught; set critic")
        base = self._plan.optimizer
        settings = CriticFit(
            plan=plan,
            learning_rate=(base.learning_rate if step is None else base.learning_rate_at(step, self._steps))
            * plan.learning_rate_ratio,
            is_head_only=step is None and plan.pretraining is not None and plan.pretraining.frozen_trunk,
            one_sided=one_sided,
        )
        if critic.is_shared:
            self._begun = None
        metrics = critic.fit(minibatch, settings)
        assert minibatch.weights is not None, "value_minibatches comes first"
        has_token = bool(((minibatch.weights != 0) & minibatch.mask).any())
        # The policy's weights moved with the trunk, so log-probabilities that were scored before are of former
        # weights.
        if critic.is_shared and not settings.is_head_only and has_token:
            self._updates += 1
        return metrics

    def _known_critic(self) -> CriticLearner:
        if self._critic is None:
            raise ConfigError(
                "values are asked for, but this learner has no critic; give TorchLearner(critic=...) what load_critic "
                "or head_for returns"
            )
        return self._critic

    def _further(self) -> dict[str, CriticLearner | MovingAverage]:
        """Return what this learner has beside the policy, by the names under which its state holds them."""
        found = {"critic": self._critic, "proximal": self._average, "reference": self._reference.average}
        return {name: held for name, held in found.items() if held is not None}

    def _composition(self) -> dict[str, str]:
        """Return what the state has beside the policy, in words."""
        found = dict(PLAIN)
        if self._critic is not None:
            found["critic"] = "a critic on the policy's trunk" if self._critic.is_shared else "a separate critic"
        if self._average is not None:
            found["proximal"] = "an averaged proximal policy"
        if self._reference.average is not None:
            found["reference"] = "an averaged reference policy"
        return found

    def _check(self, state: State) -> None:
        check_composition(state, self._composition(), self._frozen.fingerprints())
        numbers = [state.values["version"], *state.values["work"]]
        if len(numbers) != 3 or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"version and work are {str(numbers)[:60]}, and should be counts")
        self._optimizer.check(state)
        for name, held in self._further().items():
            held.check(unnest(state, name))
