"""Effective sizes of the previous optimizer step, for losses that trust as far as the step before was trusted."""

from dataclasses import astuple, replace

import torch

from gnomon.algorithms.statistics import Statistics
from gnomon.learner.mesh import Mesh
from gnomon.metrics import EffectiveSize
from gnomon.types import State


class Lag:
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
        sums = mesh.total(torch.tensor([[s.count, s.total, s.squares] for s in sizes], dtype=torch.float64))
        both = [
            replace(size, count=c, total=t, squares=q) for size, (c, t, q) in zip(sizes, sums.tolist(), strict=True)
        ]
        self._measured = Statistics(*both)

    def advance(self) -> None:
        """End the step: what it measured, if it did, is what the next one reads."""
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
        sizes = {name: EffectiveSize(*sums) for name, sums in state.values.items()}
        self.statistics, self._measured = Statistics(**sizes), None
