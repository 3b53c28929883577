"""An algorithm: a composition of pieces that was checked when it was made."""

from dataclasses import dataclass

from gnomon.algorithms.composition import Composition
from gnomon.algorithms.validate import validate


@dataclass(frozen=True)
class Algorithm(Composition):
    """A named composition. `repr` of it is the experiment's algorithm section.

    Its fields and its arithmetic are those of `Composition`.

    Raises:
        ConfigError: The composition contradicts itself; the message names the fix.
    """

    def __post_init__(self) -> None:
        validate(self)
