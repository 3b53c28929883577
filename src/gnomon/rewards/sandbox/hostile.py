"""More hostile programs, by what they attack: too many to try at every start, all tried by the tests.

hostile.toml holds them. As in `probes`, a program prints ``OPEN`` when it reached what it should not.
"""

from collections.abc import Mapping
from typing import Any

from gnomon.core.tables import packaged_toml
from gnomon.rewards.sandbox.probes import Probe

_CALL = """
import ctypes, os
C = ctypes.CDLL(None, use_errno=True)
X = os.uname().machine == "x86_64"
def reach(result):
    error = ctypes.get_errno()
    print("OPEN" if result >= 0 or error not in (1, 13, 38, 95, 97) else "", result, error)
"""


def _probe(entry: Mapping[str, Any]) -> Probe:
    if "call" in entry:
        source = f"{_CALL}reach({entry['call']})"
    elif "nested" in entry:
        source = "x = " + "(" * entry["nested"] + ")" * entry["nested"]
    else:
        # No file of text holds a NUL or half a character.
        source = entry.get("program") or entry["escaped"].encode().decode("unicode_escape")
    return Probe(entry["name"], source, tuple(None if end == "status 0" else end for end in entry.get("ends", ())))


_TABLE = packaged_toml("gnomon.rewards.sandbox", "hostile.toml")
_AT_START: list[str] = _TABLE.pop("at_start")
RESOURCES, FILES, NETWORK, PROCESSES, KERNEL, SECRETS, ANSWERS, TIMING, PACKAGED = (
    tuple(map(_probe, _TABLE[attacked]))
    for attacked in (
        *("resources", "files", "network", "processes", "kernel", "secrets", "answers", "timing"),
        "packaged",
    )
)
ALL = RESOURCES + FILES + NETWORK + PROCESSES + KERNEL + SECRETS + ANSWERS + TIMING
"""All but those of PACKAGED, which go through packages that are allowed and are tried where those are."""
_BY_NAME = {probe.name: probe for probe in ALL}
MORE = tuple(_BY_NAME[name] for name in _AT_START)
"""What is tried at start once the nine were stopped: quick, one after the other in one program, and of what is outside
they touch nothing but their targets."""
