"""New mathematics is one piece: a frozen dataclass whose fields are its settings and whose call is its formula.

gnomon train tiny algorithm=examples/own_piece.py:SIMPLE steps=3
gnomon dissect BATCH --algorithms grpo,examples/own_piece.py:SIMPLE
"""

from dataclasses import dataclass, replace

from gnomon.algorithms import GRPO, LossInputs
from gnomon.core.metrics import Metrics


@dataclass(frozen=True)
class Quadratic:
    """The plain ratio, held back by a parabola around 1 instead of a clip (simple policy optimization, 2401.16025)."""

    width: float = 0.2

    def __call__(self, view: LossInputs):
        """Return the loss of each token, and what was measured on the way."""
        ratio = view.log_ratio.exp()
        return -view.advantages * ratio + view.advantages.abs() * (ratio - 1) ** 2 / (2 * self.width), Metrics()


SIMPLE = replace(GRPO, name="simple", paper="arXiv 2401.16025", surrogate=Quadratic())
