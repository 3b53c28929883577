"""The diagnosis of a run that trains: the rules look at each step, and each finding is written down once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from gnomon.core.sections import DoctorConfig
from gnomon.core.types import Group
from gnomon.diagnosis.catalog import chosen
from gnomon.diagnosis.current_findings import CurrentFindings
from gnomon.diagnosis.doctor import Doctor
from gnomon.diagnosis.finding import SEVERITIES, Finding
from gnomon.diagnosis.recorded import groups_of, replay
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import JsonLines, Warn
from gnomon.records.reading import RunRecord


@dataclass
class LiveDiagnosis:
    """Writes findings down when they are new or have become graver, says them once, and remembers which end the run.

    Attributes:
        standing: The file of all findings as they are now.
        warn: Is told of each finding that is no note, and again when it becomes severe.
        stop_on: Severities and rules.
        go_on: The command that resumes the run.
        reason_to_stop: The first finding to stop for, in a sentence.
    """

    doctor: Doctor
    file: JsonLines
    standing: CurrentFindings
    warn: Warn
    stop_on: Sequence[str] = ()
    go_on: str = ""
    reason_to_stop: str = ""
    _groups: Sequence[Group] = ()

    def observe(self, step: int, values: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Take the metrics and the answers of a step."""
        self._groups = groups
        self._hear(self.doctor.observe(step, values, lambda _: self._groups))

    def observe_evaluation(self, row: Mapping[str, Any]) -> None:
        """Take an evaluation, made after the last step."""
        self._hear(self.doctor.observe_evaluation(row, lambda _: self._groups))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _hear(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.file.append(finding.as_row())
            if finding.severity != "note":
                self.warn(f"{finding.rule} ({finding.severity}): {finding.summary}")
            if not self.reason_to_stop and self._is_reason(finding):
                self.reason_to_stop = (
                    f"the diagnosis found {finding.rule} ({finding.severity}), which doctor.stop_on names: "
                    f"{finding.summary}. Try: {finding.advice[0]}. To go on all the same: {self.go_on}"
                )
        self.standing.write(self.doctor.findings)

    def _is_reason(self, finding: Finding) -> bool:
        grave = [SEVERITIES.index(name) for name in self.stop_on if name in SEVERITIES]
        return finding.rule in self.stop_on or any(SEVERITIES.index(finding.severity) >= rank for rank in grave)


def live_diagnosis(directory: RunDirectory, plan: DoctorConfig, warn: Warn) -> LiveDiagnosis | None:
    """Return the diagnosis of a run, which knows what is written down of it already; None where it is off.

    What was found before is known again, so it is neither written nor said twice, and ends no run twice.
    """
    if not plan.on:
        return None
    record = RunRecord(directory.path)
    doctor = Doctor(record.experiment(), chosen(plan.rules))
    replay(doctor, record.metrics(), record.evaluations(), lambda step: groups_of(record.rollouts(step)))
    standing = CurrentFindings(directory.diagnosis, warn)
    standing.write(doctor.findings)
    go_on = f"gnomon resume {quote(str(directory.path))}"
    return LiveDiagnosis(doctor, JsonLines(directory.findings), standing, warn, plan.stops, go_on)
