"""Findings as they stand, in a file of their own: a live view reads there what a diagnosis of the run would say now.

``findings.jsonl`` says what was news at which step, in the words of that step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.core.atomic_files import read_plain, write_durably
from gnomon.core.redaction import redacted
from gnomon.diagnosis.finding import Finding, newest
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import Warn, parsed, read_rows, sound


@dataclass
class CurrentFindings:
    """Writes ``diagnosis.json``: ``{"findings": [...]}``, the gravest first, each in its newest words.

    Written where something has changed. What cannot be written is counted and warned of once; it never ends a run.
    """

    path: Path
    warn: Warn
    lost: int = 0
    _said: bytes = b""

    def write(self, findings: Sequence[Finding]) -> None:
        """Replace what the file says; where nothing was ever found there is none."""
        if not findings and not self.path.exists():
            return
        rows = sound({"findings": [finding.as_row() for finding in findings]})
        text = json.dumps(redacted(rows), ensure_ascii=False, allow_nan=False)
        content = (text + "\n").encode(errors="backslashreplace")
        if content == self._said:
            return
        try:
            write_durably(self.path, content, is_synced=False)
            self._said = content
        except OSError as error:
            if self.lost == 0:
                self.warn(f"{self.path} cannot be written, the run goes on without its newest findings: {error}")
            self.lost += 1


def written(run: RunDirectory) -> list[Finding]:
    """Return what a run has said of itself, in its newest words where it wrote these down; what is damaged is left out.

    The gravest first.
    """
    try:
        current_findings = read_current_findings(read_plain(run.diagnosis))
    except OSError:
        current_findings = None
    if current_findings is not None:
        return current_findings
    found = (Finding.of_row(row) for row in read_rows(run.findings))
    return newest([finding for finding in found if finding is not None])


def read_current_findings(content: bytes) -> list[Finding] | None:
    """Return the findings of such a file, None where it holds none of them: it is no such file."""
    rows = (parsed(content) or {}).get("findings")
    if not isinstance(rows, list):
        return None
    found = (Finding.of_row(row) for row in rows)
    return [finding for finding in found if finding is not None]
