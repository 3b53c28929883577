"""The critic in the learner: what it expects of a batch, and one optimizer step toward what came."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.protocols import Loss
from gnomon.core.metrics import Last, Mean, Metrics, Sum
from gnomon.core.types import Batch, State
from gnomon.learner.forward import Begun, ForwardRunner, move, trim
from gnomon.learner.loss import LossAccumulator
from gnomon.learner.mesh import Mesh, readable
from gnomon.learner.optimizer import Optimizer
from gnomon.models.critic import FOLDER, ValueHead, Values, ValueScorer, critic_writer
from gnomon.models.load import trainable
from gnomon.models.weight_files import Writer


@dataclass(frozen=True)
class CriticFit:
    """How one optimizer step of the critic is made.

    Attributes:
        plan: Its loss.
        learning_rate: Above 0.
        is_trunk_frozen: Only the head learns.
        one_sided: As in `CriticConfig.loss`.
    """

    plan: CriticConfig
    learning_rate: float
    is_trunk_frozen: bool = False
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

    def expect(self, batch: Batch, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return values Float32[B T] of the state before each trained token, and bootstrap Float32[B] of that after
        the last token; zeros elsewhere, and in rows without a trained token. No gradient.

        Args:
            first: Rows Int[N] that the next `fit` learns from; the graph of their first cut is kept for it.
        """
        self.forget()
        values, bootstrap = torch.zeros(batch.mask.shape), torch.zeros(len(batch))
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
        last = list(self._passes.cuts(batch, rows, self._scorer)) if len(rows) else []
        with torch.no_grad():
            for index, cut in self._passes.cuts(batch, rest, self._scorer) if len(rest) or not last else ():
                note(index, cut)
            for index, cut in last[1:]:
                note(index, cut)
        for index, cut in last[:1]:
            with self._passes.recording(self._scorer.trunk):
                found = note(index, cut)
            self._begun = Begun(batch.rows(first), torch.searchsorted(first, index), found)
        return self._mesh.total(values), self._mesh.total(bootstrap)

    def forget(self) -> None:
        """Drop what was computed for the next `fit`: weights change, or others were restored."""
        self._begun = None

    def fit(self, minibatch: Batch, guarded: CriticFit) -> Metrics:
        """Make one optimizer step on the weighed ``minibatch``, or none if no token of it counts.

        Raises:
            NotFiniteError: The loss or the gradient is not finite; nothing was changed then.
        """
        assert minibatch.weights is not None, "value_minibatches comes first"
        rows = ((minibatch.weights != 0) & minibatch.mask).any(1).nonzero()[:, 0]
        metrics = Metrics.of(
            {"critic/updates": Sum(int(len(rows) > 0)), "critic/learning_rate": Last(guarded.learning_rate)}
        )
        if len(rows) == 0:
            return (metrics if self._mesh.rank == 0 else Metrics()) + self._passes.work.take()
        tally = LossAccumulator(self._mesh)
        begun, self._begun = self._begun, None
        try:
            with self._passes.recording(self._scorer.trunk):
                self._accumulate(self._cuts(minibatch, rows, guarded, begun), guarded, tally)
            tally.check()
            norm = self.optimizer.step(guarded.learning_rate)
        except BaseException:
            self.optimizer.drop_gradients()
            raise
        gradient = Metrics.of({"critic/gradient_norm": Mean(norm, 1)})
        once = metrics + gradient if self._mesh.rank == 0 else Metrics()
        return tally.metrics + once + self._passes.work.take()

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
        self, minibatch: Batch, rows: Tensor, guarded: CriticFit, begun: Begun[Values] | None
    ) -> Iterator[tuple[Tensor, Batch, Values]]:
        """Yield `ForwardRunner.cuts` of ``rows`` Int[N], with values whose gradient is recorded."""
        live = torch.zeros(len(minibatch), dtype=torch.bool).index_fill(0, rows, True)
        known = None if begun is None or guarded.is_trunk_frozen else begun.within(minibatch, live)
        if begun is not None and known is not None:
            index, at = known
            found = begun.found
            cut, at = move(trim(minibatch.rows(index)), found.values.device), at.to(found.values.device)
            yield index, cut, Values(found.values[at, : cut.width], found.bootstrap[at], 0)
            rows = live.index_fill(0, index, False).nonzero()[:, 0]
            if len(rows) == 0:
                return
        for index, cut in self._passes.cuts(minibatch, rows, self._scorer):
            yield index, cut, self._passes.value(self._scorer, cut, guarded.is_trunk_frozen)

    def _accumulate(
        self, cuts: Iterable[tuple[Tensor, Batch, Values]], guarded: CriticFit, tally: LossAccumulator
    ) -> None:
        """Add up losses and gradients of all cuts; the weights are of the whole minibatch, so the sums are exact."""
        plan = guarded.plan
        for index, cut, found in cuts:
            if len(index) == 0:
                (0 * found.values).sum().backward()
                continue
            if plan.ranks_pairs:
                loss, measured = plan.pair_loss(found.bootstrap, cut)
            else:
                loss, measured = plan.loss(found.values, cut, guarded.one_sided)
            tally.add(Loss(loss, {"value": float(loss.detach())}, measured))
            loss.backward()
