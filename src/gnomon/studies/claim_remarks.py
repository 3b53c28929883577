"""Which numbers the remarks of a claim's page were written for.

Remarks are written by hand, numbers are measured again: what was said of the ones need not hold of the others. So
beside the numbers stands for which ones the remarks were written, and a page with other ones says so by itself.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.studies.claims import Claim
from gnomon.studies.measured import Measured, NotMeasured


@dataclass(frozen=True)
class Remarked:
    """The numbers that remarks belong to. text, shown: digests of the remarks, and of what the page showed then.

    date: ISO, of the day on which those numbers were measured.
    """

    text: str
    shown: str
    date: str


def remarked(claim: Claim, measured: Measured, date: str, known: Remarked | None) -> Remarked | None:
    """Return what the remarks belong to: as known while their text is the same, else the numbers that are there now.

    Whoever changes the text has read the numbers. None for a claim without remarks.
    """
    text = _digest(claim.remarks)
    if not claim.remarks or (known is not None and known.text == text):
        return known if claim.remarks else None
    return Remarked(text, shown(claim, measured), date)


def is_outdated(claim: Claim, measured: Measured, known: Remarked | None) -> bool:
    """Whether the remarks are the ones that were written for other numbers than these."""
    return known is not None and known.text == _digest(claim.remarks) and known.shown != shown(claim, measured)


def shown(claim: Claim, measured: Measured) -> str:
    """Return a digest of what a page shows: verdict, outcomes, and numbers as they stand in its table."""
    verdict = claim.judge(measured)
    outcomes = [[outcome.word, outcome.measured] for outcome in (*verdict.checks, *verdict.outcomes)]
    numbers = {
        arm: {name: _estimated(measured, arm, name) for name in found} for arm, found in measured.numbers.items()
    }
    return _digest(json.dumps([verdict.word, outcomes, numbers], sort_keys=True))


def read_remarked(row: Any) -> Remarked | None:
    """Return what a file says; results from before say nothing. Raises: TypeError for something else."""
    if row is None:
        return None
    texts = [row.get(name) for name in ("text", "shown", "date")] if isinstance(row, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("remarks are no digests with a date")
    return Remarked(*map(str, texts))


def _estimated(measured: Measured, arm: str, name: str) -> str:
    try:
        return str(measured.estimate(arm, name))
    except NotMeasured:
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
