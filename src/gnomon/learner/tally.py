"""What a learner counts while it computes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.algorithms.protocols import Loss
from gnomon.learner.mesh import Alone, Mesh, agree
from gnomon.metrics import Mean, Measure, Metrics, Sum
from gnomon.models.logprobs import TokenScores
from gnomon.types import Batch


@dataclass
class Work:
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
class LossTally:
    """The losses of one optimizer step's cuts, added up: parts are sums, as the loss is.

    mesh: whose processes each have some of the cuts. stopped: tokens with an advantage and without a gradient: a clip,
    a mask or a weight of 0 took it.
    """

    mesh: Mesh = field(default_factory=Alone)
    parts: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    stopped: int = 0
    fault: str = ""

    def backward(self, loss: Loss, scores: TokenScores, cut: Batch) -> None:
        """Add one cut's loss, and its gradients to those of the weights."""
        self.add(loss)
        felt = [scored for scored in (scores.logprobs, scores.entropy) if scored.requires_grad]
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


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parts.items())
