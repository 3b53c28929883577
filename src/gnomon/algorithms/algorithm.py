"""An algorithm: a composition of pieces that was checked when it was made."""

from dataclasses import dataclass, fields

from gnomon.algorithms.composition import Composition
from gnomon.algorithms.user_pieces import with_functions
from gnomon.algorithms.validate import validate
from gnomon.core.errors import ConfigError


@dataclass(frozen=True)
class Algorithm(Composition):
    """A named composition. `repr` of it is the experiment's algorithm section.

    Its fields and its arithmetic are those of `Composition`. A function may stand for a piece (`FunctionPiece`).

    Raises:
        ConfigError: The composition contradicts itself; the message names the fix.
    """

    def __post_init__(self) -> None:
        try:
            for field in fields(self):
                object.__setattr__(self, field.name, with_functions(getattr(self, field.name)))
            validate(self)
        except RecursionError:
            raise ConfigError(
                f"algorithm '{self.name}': its pieces are nested too deeply; add up with one sum"
            ) from None
