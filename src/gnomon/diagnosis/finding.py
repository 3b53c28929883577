"""What a rule found."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["note", "warning", "severe"]


@dataclass(frozen=True)
class Sample:
    """A rollout that shows what is meant; long texts are cut in the middle."""

    step: int
    task_id: str
    question: str
    response: str
    reward: float | None
    error: str | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with what shows it.

    rule: its name, such as "degenerate-groups". step: the last one it was seen at; first_step: where it began.
    summary: one sentence with the numbers. evidence: those numbers by name. meaning: what it usually means.
    advice: what to try, the likeliest first. samples: at most five.
    """

    rule: str
    severity: Severity
    first_step: int
    step: int
    summary: str
    evidence: Mapping[str, float]
    meaning: str
    advice: Sequence[str]
    samples: Sequence[Sample] = ()

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object for ``findings.jsonl``."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "Finding | None":
        """Return the finding of a row, None where it is none."""
        try:
            samples = tuple(Sample(**sample) for sample in row["samples"])
            return cls(**{**row, "samples": samples})
        except (TypeError, KeyError):
            return None
