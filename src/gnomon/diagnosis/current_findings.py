"""The current findings in a file of their own, which a live display reads.

``findings.jsonl`` records each finding as it was when the finding was new.
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
    """Writes ``diagnosis.json``: ``{"findings": [...]}``, the most severe first.

    The file is written only when a finding has changed. A failed write is counted and reported once; a failed write
    never ends a run.
    """

    path: Path
    warn: Warn
    lost: int = 0
    _said: bytes = b""

    def write(self, findings: Sequence[Finding]) -> None:
        """Replace the file's content; without any findings so far, write no file."""
        if not findings and not self.path.exists():
            return
        # JSON has no NaN, and findings may quote secrets of the user's data.
        rows = sound({"findings": [finding.as_row() for finding in findings]})
        text = json.dumps(redacted(rows), ensure_ascii=False, allow_nan=False)
        content = (text + "\n").encode(errors="backslashreplace")
        if content == self._said:
            return
        try:
            # Not synced: the file is written again soon, and `findings.jsonl` is the record.
            write_durably(self.path, content, is_synced=False)
            self._said = content
        except OSError as error:
            if self.lost == 0:
                self.warn(f"{self.path} cannot be written, the run goes on without its newest findings: {error}")
            self.lost += 1


def written(run: RunDirectory) -> list[Finding]:
    """Return a run's recorded findings, the most severe first. Damaged lines are skipped."""
    try:
        current_findings = read_current_findings(read_plain(run.diagnosis))
    except OSError:
        current_findings = None
    if current_findings is not None:
        return current_findings
    found = (Finding.of_row(row) for row in read_rows(run.findings))
    return newest([finding for finding in found if finding is not None])


def read_current_findings(content: bytes) -> list[Finding] | None:
    """Return the findings of ``diagnosis.json``; None if the content is invalid."""
    rows = (parsed(content) or {}).get("findings")
    if not isinstance(rows, list):
        return None
    found = (Finding.of_row(row) for row in rows)
    return [finding for finding in found if finding is not None]
