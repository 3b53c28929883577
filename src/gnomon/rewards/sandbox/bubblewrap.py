"""Bubblewrap: a setuid-free program that builds namespaces, where the system lets it."""

import os
import sysconfig
from collections.abc import Sequence

BUBBLEWRAP = "bubblewrap"
WALLS = (BUBBLEWRAP, "landlock", "seccomp")

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")


def wrapped(inner: Sequence[str], folder: str, files_mib: int) -> list[str]:
    """Return the command that runs ``inner`` in bubblewrap's namespaces.

    inner: an interpreter and its arguments. folder: of the code that it starts with. files_mib: that a program may
    write.
    Source: bubblewrap 0.8.0, https://github.com/containers/bubblewrap.
    """
    library, interpreter = sysconfig.get_path("stdlib"), os.path.realpath(inner[0])
    shown = [p for p in dict.fromkeys((*_SYSTEM, library, interpreter)) if os.path.exists(p)]
    binds = [word for path in shown for word in ("--ro-bind", path, path)]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv",
        "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONHASHSEED", "0",
        *binds, "--ro-bind", folder, folder, "--dev", "/dev", "--size", str(files_mib << 20),
        "--tmpfs", "/tmp", "--chdir", "/tmp", "--cap-drop", "ALL", interpreter, *inner[1:],
    ]  # fmt: skip
