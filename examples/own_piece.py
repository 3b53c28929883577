"""New mathematics is one piece: a frozen dataclass whose fields are its settings and whose call is its formula.

gnomon train tiny algorithm=examples/own_piece.py:FADING steps=3 algorithm.updates.minibatches=2
gnomon dissect BATCH --algorithms cispo,examples/own_piece.py:FADING
"""

from dataclasses import dataclass, replace

from gnomon.algorithms import CISPO, PolicyGradient


@dataclass(frozen=True)
class Fading:
    """A trust region without an edge: a token counts less the farther its ratio is from 1, in nats, either way.

    weight = r exp(-(log r)^2 / (2 width^2)), the ratio times a bell; ``width`` > 0 in nats.
    """

    width: float = 0.5

    def __call__(self, ratio, statistics):
        """Return the bounded ratio Float[B T]."""
        return ratio * (-(ratio.log() ** 2) / (2 * self.width**2)).exp()


FADING = replace(CISPO, name="fading", paper="ours", surrogate=PolicyGradient(Fading()))
