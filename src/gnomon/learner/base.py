"""The learner's protocol, and state dicts with named parts."""

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Protocol

from torch import Tensor

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.protocols import Need
from gnomon.core.errors import CheckpointError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch, Scores, Snapshot, State

PLAIN = {
    "critic": "no critic",
    "proximal": "no averaged proximal policy",
    "reference": "no averaged reference policy",
}


def nest(whole: State, parts: Mapping[str, State]) -> State:
    """Return the state of a whole that has ``parts``, each under its name.

    >>> unnest(nest(State({}, {"version": 1}), {"critic": State({}, {"count": 2})}), "critic").values
    {'count': 2}
    """
    # Tensors share one flat namespace, since they become names in one file; values stay nested, as JSON can hold them
    # so.
    tensors, values, lent = dict(whole.tensors), dict(whole.values), dict(whole.lent)
    for name, state in parts.items():
        tensors |= {f"{name}/{key}": tensor for key, tensor in state.tensors.items()}
        lent |= {f"{name}/{key}": loan for key, loan in state.lent.items()}
        values[name] = dict(state.values)
    return State(tensors, values, lent)


def unnest(whole: State, name: str) -> State:
    """Return the part ``name`` of what `nest` made; an empty state where there is none."""
    start = f"{name}/"
    tensors = {key.removeprefix(start): tensor for key, tensor in whole.tensors.items() if key.startswith(start)}
    return State(tensors, whole.values.get(name, {}))


def check_composition(state: State, has: Mapping[str, str], frozen: Mapping[str, str]) -> None:
    """Raise CheckpointError when ``state`` is of a learner that ``has`` other pieces or stands on other ``frozen``
    weights.
    """
    # A checkpoint without the entry is of a learner that had none of the three.
    saved = PLAIN | state.values.get("has", PLAIN)
    for name in has:
        if saved[name] != has[name]:
            raise CheckpointError(
                f"the checkpoint was made with {str(saved[name])[:60]}, this run has {has[name]}; resume with the "
                "algorithm that the run began with"
            )
    there = state.values["frozen"]
    # Without a reference on one side nothing in the state stands on it.
    if any(there.get(name) != own and (name == "base" or (own and there.get(name))) for name, own in frozen.items()):
        raise CheckpointError(
            f"the checkpoint was made on other frozen weights: it says {str(there)[:200]}, this run has "
            f"{frozen}; resume with the model and reference that the run began with"
        )


class Learner(Protocol):
    """Turns a loss into new weights.

    A learner is `Stateful`: weights (fp32 masters), optimizer moments, schedule position, version, of the critic too.
    """

    @property
    def version(self) -> int:
        """Published steps so far: `advance` was called this often."""

    async def score(self, batch: Batch, needs: Set[Need], first: Mapping[Need, Tensor] | None = None) -> Scores:
        """Return the log-probabilities (or values) asked for, Float[B T], 0 where the mask is false; no gradient.

        Values come with the bootstrap, Float[B].

        Args:
            first: As `Algorithm.first_rows` returns them: rows Int[N] that the next update or fit learns from.
        """

    async def logprobs(self, batch: Batch, weights: Snapshot | None = None) -> Tensor:
        """Return the log-probabilities Float32[B T] of the weights that are trained, as they are now, in this
        learner's arithmetic; or those of ``weights``. For measuring: nothing is changed, and nothing counted.
        """

    async def token_stats(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies Float32[B T], nats, of the weights that are trained, as they are now;
        0 where the mask is false. For showing: nothing is changed, and nothing counted.
        """

    async def update(self, minibatch: Batch, algorithm: Algorithm, step: int, rate: float = 1.0) -> Metrics:
        """Make one optimizer step on ``minibatch`` (weights filled), or none if no token is trainable.

        Args:
            step: Training step; the schedule gives its learning rate.
            rate: Factor on the learning rate of this one update, above 0.

        Raises:
            NotFiniteError: A loss or gradient is not finite; nothing was changed then.
        """

    async def fit(self, minibatch: Batch, algorithm: Algorithm, step: int | None, one_sided: bool = False) -> Metrics:
        """Make one optimizer step of the critic on ``minibatch`` (weights, returns and values filled), or none.

        Args:
            step: Training step; None in value pre-training, where the rate follows no schedule and the trunk may be
                frozen.
            one_sided: Whether only values below their return are wrong (self-imitation).

        Raises:
            NotFiniteError: The loss or gradient is not finite; nothing was changed then.
        """

    def advance(self) -> None:
        """Count one finished training step: the next snapshot carries the next version."""

    def snapshot(self) -> Snapshot:
        """Return the weights for engines; nothing is copied in process."""

    def state(self) -> State:
        """Return weights, moments, schedule and version."""

    def restore(self, state: State) -> None:
        """Become the learner that returned ``state``."""

    def keep(self) -> None:
        """Copy what the next training step may change, each process what it holds."""

    def undo(self) -> None:
        """Become, bit for bit, what this was when `keep` was last called."""


class SavableLearner(Learner, Protocol):
    """A learner whose model can be written to a folder."""

    @property
    def model_bytes(self) -> int:
        """Bytes of memory that a copy of the model takes while `model_writer` waits."""

    def lend(self) -> State:
        """Return `state` for a writer, with tensors lent where that saves a copy; see `Loan`."""

    def close(self) -> None:
        """End the threads and processes that compute."""

    def write_model(self, folder: Path) -> Mapping[Path, str]:
        """Write the model as a Hugging Face folder, as it computes; a critic in the folder "critic" in that one.

        Returns:
            The XXH3 of files of weights.

        Raises:
            NotFiniteError: A weight is not finite; nothing was written then.
        """

    def model_writer(self) -> Callable[[Path], Mapping[Path, str]]:
        """Return what does `write_model` with the model as it is now, later and in any thread."""
