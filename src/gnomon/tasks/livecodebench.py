"""LiveCodeBench's rows: their cases, some of which are packed, and the question with its starter code."""

import json
from collections.abc import Mapping
from datetime import date
from typing import Any

from gnomon.core.errors import DatasetError
from gnomon.rewards.code.published import PRIVATE, PUBLIC, unpacked

_STARTER = "\n\nUse this starter code:\n```python\n{}\n```"


def cases_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the public and private cases of a row.

    Args:
        columns: ``public_test_cases`` as JSON; ``private_test_cases`` as JSON, or packed as published (`unpacked`).

    Raises:
        ValueError: The cases are in another form.
    """
    return [*_listed(columns.get(PUBLIC)), *_listed(columns.get(PRIVATE))]


def _listed(cases: Any) -> list[dict[str, Any]]:
    found = cases
    if isinstance(cases, str):
        found = json.loads(cases if cases.lstrip()[:1] == "[" else unpacked(cases))
    if not isinstance(found, list) or not all(isinstance(case, dict) for case in found):
        raise ValueError("the cases are no list of objects")
    return found


def starter_of(columns: Mapping[str, Any]) -> str:
    """Return what follows the question: the code that an answer begins with, or where input and output are."""
    code = str(columns.get("starter_code") or "").rstrip()
    return _STARTER.format(code) if code else "\n\nRead from standard input and write to standard output."


def is_in_window(columns: Mapping[str, Any], since: date | None, until: date | None) -> bool:
    """Whether a row's contest was on ``since`` or later, and before ``until``.

    Raises:
        DatasetError: The row has no date.
    """
    if since is None and until is None:
        return True
    try:
        day = date.fromisoformat(str(columns.get("contest_date"))[:10])
    except ValueError as error:
        raise DatasetError(f"contest_date is no date: {columns.get('contest_date')!r}") from error
    return (since is None or day >= since) and (until is None or day < until)
