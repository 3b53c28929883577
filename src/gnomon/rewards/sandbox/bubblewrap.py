"""Bubblewrap: a setuid-free program that builds namespaces, where the system lets it."""

import os
import sysconfig
from collections.abc import Sequence

BUBBLEWRAP = "bubblewrap"
WALLS = (BUBBLEWRAP, "landlock", "seccomp")
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that keep libraries of numbers from a thread for each core of the machine."""

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")


def wrapped(inner: Sequence[str], folders: Sequence[str], files_mib: int) -> list[str]:
    """Return the command that runs ``inner`` in bubblewrap's namespaces.

    Source: bubblewrap 0.8.0, https://github.com/containers/bubblewrap.

    Args:
        inner: An interpreter and its arguments.
        folders: Folders of the code that it starts with, and of packages.
        files_mib: That a program may write.
    """
    library, interpreter = sysconfig.get_path("stdlib"), os.path.realpath(inner[0])
    shown = [p for p in dict.fromkeys((*_SYSTEM, library, interpreter)) if os.path.exists(p)]
    binds = [word for path in shown for word in ("--ro-bind", path, path)]
    # Folders under /tmp must be bound after the tmpfs, which would hide them.
    late = [word for path in folders for word in ("--ro-bind", path, path)]
    threads = [word for name in ONE_THREAD for word in ("--setenv", name, "1")]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv",
        "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONHASHSEED", "0",
        *threads, *binds, "--dev", "/dev", "--size", str(files_mib << 20), "--tmpfs", "/tmp", *late,
        "--chdir", "/tmp", "--cap-drop", "ALL", interpreter, *inner[1:],
    ]  # fmt: skip
