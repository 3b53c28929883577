"""What Ray says of an actor's end, in one line."""

import re

from gnomon.redaction import without_secrets

_LONGEST = 500
_DETAIL = "Worker exit detail:"
_UNAVAILABLE = r"The actor [0-9a-f]{8,} is unavailable: "
_ADVICE = r"Some common causes|The task may"


def cause_of(error: Exception) -> str:
    """Return what Ray found out, without the fields that name actor and task, conjectures and advice.

    >>> said = "The actor died.\\n\\tclass_name: Seat\\nWorker exit detail: End of file. Some common causes are: (1)"
    >>> cause_of(RuntimeError(said))
    'End of file.'
    >>> cause_of(RuntimeError("The actor 0123456789 is unavailable: gone. The task may be tried again"))
    'gone.'
    """
    lines = [line.strip() for line in without_secrets(str(error)).splitlines() if not line.startswith("\t")]
    whole = " ".join(" ".join(lines).split())
    said = whole.partition(_DETAIL)[2] if _DETAIL in whole else re.sub(_UNAVAILABLE, "", whole)
    return (re.split(_ADVICE, said)[0].strip() or whole)[:_LONGEST]
