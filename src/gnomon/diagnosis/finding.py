"""What a rule found. Nothing here loads a tensor library, so that a live view can show findings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gnomon.records.jsonl import is_number, is_step

Severity = Literal["note", "warning", "severe"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""From what is good to know to what ruins a run."""


@dataclass(frozen=True)
class FindingSample:
    """A rollout that shows what is meant; in a finding long texts are cut in the middle."""

    step: int
    task_id: str
    question: str
    response: str
    reward: float | None
    error: str | None = None

    @classmethod
    def of_row(cls, row: Any) -> "FindingSample | None":
        """Return the sample of a JSON object, None where it is none."""
        if not isinstance(row, Mapping) or not is_step(row.get("step")):
            return None
        texts = [row.get(name) for name in ("task_id", "question", "response")]
        reward, error = row.get("reward"), row.get("error")
        is_sound = isinstance(error, str | None) and (reward is None or is_number(reward))
        if not is_sound or not all(isinstance(text, str) for text in texts):
            return None
        task_id, question, response = map(str, texts)
        return cls(row["step"], task_id, question, response, reward, error)


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
    samples: Sequence[FindingSample] = ()

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object for ``findings.jsonl``."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: Any) -> "Finding | None":
        """Return the finding of a JSON object, None where a field is not what it should be: a file may say anything."""
        if not isinstance(row, Mapping) or not _is_sound(row):
            return None
        samples = [FindingSample.of_row(sample) for sample in row["samples"]]
        return cls(
            rule=row["rule"],
            severity=row["severity"],
            first_step=row["first_step"],
            step=row["step"],
            summary=row["summary"],
            evidence=row["evidence"],
            meaning=row["meaning"],
            advice=tuple(row["advice"]),
            samples=tuple(sample for sample in samples if sample is not None),
        )


def newest(findings: Sequence[Finding]) -> list[Finding]:
    """Return the last of each rule, the gravest and then the newest first."""
    by_rule = {finding.rule: finding for finding in findings}
    return sorted(by_rule.values(), key=lambda finding: (-SEVERITIES.index(finding.severity), -finding.step))


def _is_sound(row: Mapping[str, Any]) -> bool:
    evidence, advice = row.get("evidence"), row.get("advice")
    return (
        all(isinstance(row.get(name), str) for name in ("rule", "summary", "meaning"))
        and all(is_step(row.get(name)) for name in ("step", "first_step"))
        and row.get("severity") in SEVERITIES
        and isinstance(evidence, Mapping)
        and all(map(is_number, evidence.values()))
        and isinstance(advice, list | tuple)
        and all(isinstance(line, str) for line in advice)
        and isinstance(row.get("samples"), list | tuple)
    )
