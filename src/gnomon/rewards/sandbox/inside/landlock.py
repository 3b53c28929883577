"""Which files the program may touch: those under a few paths, whatever its user could do elsewhere.

Source: landlock(7). Version 1 (Linux 5.13) walls off files, 4 TCP, 6 signals and abstract sockets.
"""

import os
import struct

from .kernel import call

# Numbers of system calls are the same on every processor since Linux 5.1.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH = 1, 1

_WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FOLDER, _REMOVE_FILE, _MAKE_FOLDER, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_PIPE, _MAKE_LINK, _TRUNCATE = 1 << 10, 1 << 12, 1 << 14
_RIGHTS_OF = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS = (1 << 16) - 1
_TCP = 0b11
_SIGNALS_AND_ABSTRACT_SOCKETS = 0b11

_READ = _READ_FILE | _READ_FOLDER
_WRITE = (
    _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _MAKE_PIPE | _MAKE_LINK | _TRUNCATE
)  # fmt: skip
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE


def version() -> int:
    """Return the version that the kernel speaks, 0 where it has no Landlock or a container forbids it."""
    try:
        return call(_CREATE, 0, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(readable: list[str], writable: list[str]) -> int:
    """Let this process read under ``readable``, read and write under ``writable``, and nothing else, for good.

    Needs `kernel.never_gain_privileges` first.

    Returns:
        The version enforced, 0 for none.

    Raises:
        OSError: If the kernel refuses a rule.
    """
    speaks = version()
    if not speaks:
        return 0
    handled = _RIGHTS_OF.get(speaks, _ALL_RIGHTS)
    # An older kernel refuses a structure with fields that it does not know.
    fields = [handled] + [_TCP] * (speaks >= 4) + [_SIGNALS_AND_ABSTRACT_SOCKETS] * (speaks >= 6)
    ruleset = call(_CREATE, struct.pack(f"{len(fields)}Q", *fields), 8 * len(fields), 0)
    for path in readable:
        _allow(ruleset, path, _READ)
    for path in writable:
        _allow(ruleset, path, (_READ | _WRITE) & handled)
    call(_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return speaks


def _allow(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        # The kernel refuses a rule that gives a file the rights of folders.
        rights &= _OF_FILES
    call(_ADD, ruleset, _BENEATH, struct.pack("=Qi", rights, beneath), 0)
    os.close(beneath)
