"""Who carries what a run asks of the ranks of its learner: the same for processes of this machine and of others."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Gone(Exception):
    """A rank is gone, or stands still. args: its number, and what is to be said of it: "is gone: it was killed"."""


@dataclass(frozen=True)
class Answer:
    """What a rank said: a value, or the ``kind`` and text (``said``) of what it raised."""

    value: Any
    error: Mapping[str, str] | None = None


class Crew(Protocol):
    """The ranks of one learner, each a `rank.Rank` in a process of its own, and the way to them.

    size: how many. device: "cpu" or "cuda", where each computes. meeting: where they find each other (`mesh.join`),
    known once they were opened. scratch: a folder of the run's, which ends with it. turns: who loads the model at the
    same time, one group after the other, so that a machine holds one whole copy at a time. is_shelving: whether weights
    are put where engines of other machines find them ("shelve"), rather than handed to the run ("weights").
    is_sending: whether that brings them to the engines, who then have that version and no other.
    """

    size: int
    device: str
    is_shelving: bool

    @property
    def is_sending(self) -> bool:
        """Whether weights are sent."""
        ...

    @property
    def meeting(self) -> str:
        """Where they find each other."""
        ...

    @property
    def scratch(self) -> Path:
        """For files on their way."""
        ...

    @property
    def turns(self) -> Sequence[Sequence[int]]:
        """Who loads when."""
        ...

    def open(self) -> None:
        """Start the ranks. Raises: LearnerError or UserError when they cannot be started."""
        ...

    def tell(self, ranks: Collection[int], do: str, arguments: Mapping[str, Any]) -> None:
        """Ask something of these ranks, without waiting. Raises: Gone; TypeError for what cannot travel."""
        ...

    def heard(self, waiting: Collection[int], seconds: float) -> Mapping[int, Answer]:
        """Return what was answered meanwhile, by rank; wait at most so long for the first. Raises: Gone."""
        ...

    def look(self) -> None:
        """See whether every rank lives, while nothing is asked of them. Raises: Gone."""
        ...

    def room(self, folder: Path) -> str:
        """Return the folder in which rank 0 shall write what is to be in ``folder`` in the end."""
        ...

    def bring(self, written: str, folder: Path) -> None:
        """Bring what rank 0 wrote into ``written`` to ``folder``, where that is another one."""
        ...

    def kill(self) -> None:
        """End all ranks at once."""
        ...

    def close(self) -> None:
        """Let them end, and see that they do. Twice is once."""
        ...
