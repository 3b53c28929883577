"""Losses and statistics that a learner adds up over micro-batches and processes, and its moving averages."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.algorithms.protocols import Loss
from gnomon.algorithms.ratios import Statistics
from gnomon.algorithms.sections import EmaProximal
from gnomon.core.errors import CheckpointError
from gnomon.core.metrics import EffectiveSize, Mean, Measure, Metrics, Sum
from gnomon.core.types import Batch, State
from gnomon.learner.mesh import Mesh, SingleProcess, agree
from gnomon.learner.optimizer import sound
from gnomon.learner.precision import Masters
from gnomon.models.logprobs import TokenScores
from gnomon.models.lora import trainable
from gnomon.models.quantized import stored


class MovingAverage:
    """A model whose trained weights follow another's. It is `Stateful`.

        n <- 1 + decay n;    average <- average + (weights - average) / n

    n starts at 1, for the initial weights, and tends to 1 / (1 - decay): every set of weights so far counts decay times
    as much as the one after it, and what they count sums to one from the beginning. Weights that are not trained (all
    but the adapters, with LoRA) are shared with the other model, not copied. The average is float32; the module holds
    its rounding.

    Args:
        model: The policy as it begins, whole.
        plan: See `EmaProximal`.

    Source: Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3.3.
    """

    def __init__(self, model: nn.Module, plan: EmaProximal) -> None:
        # deepcopy takes what its memo already has for copies: the frozen tensors are shared, and only trained ones are
        # copied.
        frozen: dict[int, Tensor] = {id(p): p for p in model.parameters() if not p.requires_grad}
        frozen |= {id(part): part for _, part in stored(model)}
        self.model = copy.deepcopy(model, frozen).eval()
        self._masters = Masters(trainable(self.model))
        self._decay = plan.decay
        self._count = torch.ones((), dtype=torch.float64)

    def spread(self, mesh: Mesh) -> None:
        """Let ``mesh`` hold it, a part in each of its processes; before the first step."""
        mesh.shard(self.model)
        self._masters = Masters(trainable(self.model), mesh)

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Make one step toward ``weights``, by the name of the parameter; others than the model's are left alone."""
        self._count.mul_(self._decay).add_(1)
        with torch.no_grad():
            for name, average in self._masters.parameters.items():
                average.lerp_(weights[name], 1 / float(self._count))
        self._masters.round_into_module()

    def changing(self) -> list[Tensor]:
        """Return the averages, as far as this process holds them, and n."""
        return [*(average.detach() for average in self._masters.parameters.values()), self._count]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Write copies of `changing` back, bit for bit."""
        for own, kept in zip(self.changing(), copies, strict=True):
            own.copy_(kept)
        self._masters.round_into_module()

    def state(self) -> State:
        """Return copies of the averages, on the CPU of rank 0, under their names, and n as ``count``."""
        averages = self._masters.parameters.items()
        tensors = {name: self._masters.full(name, average) for name, average in averages}
        return State(tensors, {"count": float(self._count)})

    def lend(self) -> State:
        """Return what this process holds of `state`, copied, since nothing is called back before the next step."""
        averages = self._masters.parameters.items()
        held = {name: self._masters.loan(name, average.detach().clone()) for name, average in averages}
        return State({}, {"count": float(self._count)}, {name: loan for name, loan in held.items() if loan is not None})

    def check(self, state: State) -> None:
        """Raise CheckpointError when ``state`` is of other parameters."""
        if self._masters.shapes != {name: tuple(t.shape) for name, t in state.tensors.items()}:
            raise CheckpointError("the saved average of the weights belongs to another model or set of trained weights")
        count: Any = state.values.get("count")
        if type(count) not in (int, float) or not 1 <= count < math.inf:
            raise ValueError(f"the count of an average is {str(count)[:60]}, and should be a number from 1")

    def restore(self, state: State) -> None:
        """Become the average that returned ``state``.

        Raises:
            CheckpointError: As `check`; nothing was changed then.
        """
        self.check(state)
        with torch.no_grad():
            for name, average in self._masters.parameters.items():
                average.copy_(sound(f"average of {name}", self._masters.shard_of(name, state.tensors[name])))
        self._count.fill_(float(state.values["count"]))
        self._masters.round_into_module()


class LaggedStatistics:
    """What the last finished optimizer step measured, and what the one under way has measured so far.

    Before the first step there is nothing, which is full trust: the effective size of nothing is 1. It is `Stateful`
    between steps.
    """

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._measured: Statistics | None = None

    def add(self, statistics: Statistics) -> None:
        """Add what was measured on some rows of the step under way."""
        self._measured = statistics if self._measured is None else self._measured + statistics

    def gather(self, mesh: Mesh) -> None:
        """Put together what the processes of ``mesh`` have measured, each on its own rows."""
        if mesh.is_whole:
            return
        mine = Statistics() if self._measured is None else self._measured
        sizes = [mine.behavior, mine.proximal]
        # float64, in which counts of tokens are exact and sums nearly so, however rows were dealt out.
        sums = mesh.all_reduce_sum(torch.tensor([[s.count, s.total, s.squares] for s in sizes], dtype=torch.float64))
        behavior, proximal = (
            replace(size, count=c, total=t, squares=q) for size, (c, t, q) in zip(sizes, sums.tolist(), strict=True)
        )
        self._measured = Statistics(behavior, proximal)

    def advance(self) -> None:
        """End the step: what it measured, if it did, is what the next one reads."""
        # A step without a trainable token measures nothing, and the one before it counts on.
        self.statistics = self.statistics if self._measured is None else self._measured
        self._measured = None

    def forget(self) -> None:
        """Drop what a step measured that came to nothing."""
        self._measured = None

    def state(self) -> State:
        """Return the sums of the last finished step."""
        sizes = {"behavior": self.statistics.behavior, "proximal": self.statistics.proximal}
        return State({}, {name: list(astuple(size)) for name, size in sizes.items()})

    def restore(self, state: State) -> None:
        """Become what returned ``state``; without one, as before the first step."""
        for name, sums in state.values.items():
            is_sound = (
                isinstance(sums, list) and len(sums) == 4 and all(type(number) in (int, float) for number in sums)
            )
            if not (is_sound and sums[0] < math.inf and not any(number < 0 for number in sums)):
                raise ValueError(f"the sums of {name} are {str(sums)[:60]}, and no step measures that")
        sizes: dict[str, Any] = {name: EffectiveSize(*sums) for name, sums in state.values.items()}
        self.statistics, self._measured = Statistics(**sizes), None


@dataclass
class ComputeStats:
    """Positions that went through the model, ``computed``, for ``real`` tokens of rows.

    Padding makes the first larger, prompts that rows share make it smaller.
    """

    computed: int = 0
    real: int = 0
    halvings: int = 0

    def add(self, cut: Batch, computed: int) -> None:
        """Count one pass over a cut."""
        self.computed += computed
        self.real += int(cut.lengths.sum())

    def take(self) -> Metrics:
        """Return what was counted, and begin again at zero."""
        metrics = Metrics.of(
            {
                "tokens/computed": Sum(self.computed),
                "learner/computed_per_token": Mean(self.computed, self.real),
            }
        )
        if self.halvings:
            metrics += Metrics.of({"learner/halved_micro_batches": Sum(self.halvings)})
        self.computed = self.real = self.halvings = 0
        return metrics


@dataclass
class LossAccumulator:
    """The losses of one optimizer step's cuts, added up: parts are sums, as the loss is.

    Attributes:
        mesh: Whose processes each have some of the cuts.
        stopped: Tokens with an advantage and without a gradient: a clip, a mask or a weight of 0 took it.
    """

    mesh: Mesh = field(default_factory=SingleProcess)
    parts: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    stopped: int = 0
    fault: str = ""

    def backward(self, loss: Loss, scores: TokenScores, cut: Batch) -> None:
        """Add one cut's loss, and its gradients to those of the weights."""
        self.add(loss)
        given = (scores.logprobs, scores.entropy, scores.anchor_kl)
        # These are no leaves, so their gradients are kept only on request; they say which tokens the loss moves.
        felt = [scored for scored in given if scored is not None and scored.requires_grad]
        for scored in felt:
            scored.retain_grad()
        loss.total.backward()
        assert cut.advantages is not None, "prepare comes first"
        stopped = cut.mask & (cut.advantages != 0)
        for scored in felt:
            if scored.grad is not None:
                stopped = stopped & (scored.grad == 0)
        self.stopped += int(stopped.sum())

    def add(self, loss: Loss) -> None:
        """Add one cut's loss."""
        total = float(loss.total.detach())
        if not math.isfinite(total) and not self.fault:
            # Noted and not raised here: the other processes would wait for this one in the next pass.
            self.fault = (
                f"the loss is not finite: {total}, from {_listed(loss.parts)}; no weight was changed. A "
                "log-probability, reward or advantage of this step is out of range: look at its rollouts"
            )
        for name, part in loss.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + part
        self.metrics += loss.metrics

    def check(self) -> None:
        """Raise NotFiniteError in every process when a loss was not finite in any, with its parts in that one.

        Not sooner: a process that left a step in its middle would let the others wait.
        """
        agree(self.mesh, self.fault)

    def take(self, trained: int) -> Metrics:
        """Return ``loss/NAME`` for each part, one sample an optimizer step, and the pieces' own metrics.

        What all processes return is to be added up: each its own sum, rank 0 the count.
        loss/stopped_token_fraction: of the ``trained`` tokens of the whole minibatch, rows without a gradient included.
        """
        count = int(self.mesh.rank == 0)
        parts: dict[str, Measure] = {f"loss/{name}": Mean(part, count) for name, part in self.parts.items()}
        stopped = {"loss/stopped_token_fraction": Mean(self.stopped, count * trained)}
        return Metrics.of(parts | stopped) + self.metrics


def once(mesh: Mesh, metrics: Metrics) -> Metrics:
    """Return metrics that are equal in every process from rank 0 alone, so that they count once in the sum of all."""
    return metrics if mesh.rank == 0 else Metrics()


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parts.items())
