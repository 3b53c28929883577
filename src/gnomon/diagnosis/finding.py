"""Findings and their samples. This module loads no tensor library, because the live display imports it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gnomon.records.jsonl import is_number, is_step

Severity = Literal["note", "warning", "severe"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Severities in rising order."""


@dataclass(frozen=True)
class FindingSample:
    """A rollout that illustrates a finding; long texts are cut in the middle."""

    step: int
    task_id: str
    question: str
    response: str
    reward: float | None
    error: str | None = None

    @classmethod
    def of_row(cls, row: Any) -> "FindingSample | None":
        """Read a sample from a JSON object; None if the object is not a sample."""
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
    """One problem of a run, with evidence.

    Attributes:
        rule: Name of the rule, such as "degenerate-groups".
        first_step: First step of the problem.
        step: Last step of the problem.
        summary: One sentence with numbers.
        evidence: The numbers by name.
        meaning: The usual cause.
        advice: What to try, the most likely remedy first.
        samples: At most five.
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
        """Read a finding from a JSON object; None if a field is invalid."""
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
    """Return the last finding of each rule, sorted by severity and then by step, highest first."""
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
