"""The policy of a while ago: a moving average of the weights, which serves as the proximal policy."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gnomon.algorithms.plans import Ewma
from gnomon.errors import CheckpointError
from gnomon.learner.mesh import Mesh
from gnomon.learner.precision import Masters
from gnomon.models.load import trainable
from gnomon.types import State


class MovingAverage:
    """A model whose trained weights follow another's. It is `Stateful`.

        n <- 1 + decay n;    average <- average + (weights - average) / n

    n starts at 1, for the initial weights, and tends to 1 / (1 - decay): every set of weights so far counts decay times
    as much as the one after it, and what they count sums to one from the beginning.
    Weights that are not trained (all but the adapters, with LoRA) are shared with the other model, not copied. The
    average is float32; the module holds its rounding.

    model: the policy as it begins, whole. plan: see `Ewma`.
    Source: Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3.3.
    """

    def __init__(self, model: nn.Module, plan: Ewma) -> None:
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(model, frozen).eval()
        self._masters = Masters(trainable(self.model))
        self._decay = plan.decay
        self._count = 1.0

    def spread(self, mesh: Mesh) -> None:
        """Let ``mesh`` hold it, a part in each of its processes; before the first step."""
        mesh.shard(self.model)
        self._masters = Masters(trainable(self.model), mesh)

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Make one step toward ``weights``, by the name of the parameter; others than the model's are left alone."""
        self._count = 1 + self._decay * self._count
        with torch.no_grad():
            for name, average in self._masters.parameters.items():
                average.lerp_(weights[name], 1 / self._count)
        self._masters.round_into_module()

    def state(self) -> State:
        """Return copies of the averages, on the CPU of rank 0, under their names, and n as ``count``."""
        averages = self._masters.parameters.items()
        tensors = {name: self._masters.whole(name, average) for name, average in averages}
        return State(tensors, {"count": self._count})

    def check(self, state: State) -> None:
        """Raise CheckpointError when ``state`` is of other parameters."""
        if self._masters.shapes != {name: tuple(t.shape) for name, t in state.tensors.items()}:
            raise CheckpointError("the saved average of the weights belongs to another model or set of trained weights")

    def restore(self, state: State) -> None:
        """Become the average that returned ``state``. Raises: CheckpointError as `check`; nothing was changed then."""
        self.check(state)
        with torch.no_grad():
            for name, average in self._masters.parameters.items():
                average.copy_(self._masters.part(name, state.tensors[name]))
        self._count = float(state.values["count"])
        self._masters.round_into_module()
