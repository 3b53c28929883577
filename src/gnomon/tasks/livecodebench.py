"""LiveCodeBench's rows: their cases, some of which are packed, and the question with its starter code."""

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping
from datetime import date
from typing import Any

from gnomon.core.errors import DatasetError

_MOST = 1 << 30
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_STARTER = "\n\nUse this starter code:\n```python\n{}\n```"


def cases_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the public and private cases of a row.

    Args:
        columns: ``public_test_cases`` as JSON; ``private_test_cases`` as JSON, or packed as published: base64 of zlib
            of a pickled text that is JSON. The text is read out of the pickle's instructions, none of which is run.

    Raises:
        ValueError: The cases are in another form.
    """
    return [*_listed(columns.get("public_test_cases")), *_listed(columns.get("private_test_cases"))]


def _listed(text: Any) -> list[dict[str, Any]]:
    if not isinstance(text, str):
        found = text
    elif text.lstrip()[:1] == "[":
        found = json.loads(text)
    else:
        found = json.loads(_unpacked(text))
    if not isinstance(found, list) or not all(isinstance(case, dict) for case in found):
        raise ValueError("the cases are no list of objects")
    return found


def _unpacked(text: str) -> str:
    try:
        unpacking = zlib.decompressobj()
        packed = unpacking.decompress(base64.b64decode(text, validate=True), _MOST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"packed cases cannot be unpacked: {error}") from error
    if unpacking.unconsumed_tail:
        raise ValueError(f"packed cases are larger than {_MOST >> 20} MiB")
    texts = [argument for code, argument, _ in pickletools.genops(packed) if code.name in _TEXTS]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError(f"packed cases hold {len(texts)} texts and not one")
    return texts[0]


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
