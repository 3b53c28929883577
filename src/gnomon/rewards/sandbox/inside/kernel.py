"""System calls that Python 3.11 has no name for, by number, through the C library."""

import ctypes
import errno
import os

X86, ARM = "x86_64", "aarch64"
MACHINE = os.uname().machine

_LIBC = ctypes.CDLL(None, use_errno=True)

_PRCTL = {X86: 157, ARM: 167}
_CAPSET = {X86: 126, ARM: 91}
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38
_CAPABILITY_VERSION = 0x20080522


def call(number: int, *arguments: "int | bytes | ctypes.Array[ctypes.c_char]") -> int:
    """Return what the system call returns.

    Raises:
        OSError: With its number.
    """
    # ctypes passes a bare int as a C int of 32 bits, which would cut addresses and flags.
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _LIBC.syscall(ctypes.c_long(number), *words)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2).

    Raises:
        OSError: If the kernel refuses.
    """
    texts = [text.encode() or None for text in (source, target, kind)]
    if _LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: mount {target}")


def unmount(target: str, flags: int) -> None:
    """Call umount2(2).

    Raises:
        OSError: If the kernel refuses.
    """
    if _LIBC.umount2(target.encode(), flags) != 0:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: unmount {target}")


def unshare(flags: int) -> bool:
    """Enter namespaces of one's own; False where the system does not let this user."""
    if _LIBC.unshare(flags) == 0:
        return True
    if ctypes.get_errno() in (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOSPC, errno.EACCES):
        return False
    raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: unshare")


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends. Changing user or privileges undoes it."""
    call(_PRCTL[MACHINE], _SET_DEATH_SIGNAL, 9, 0, 0, 0)


def never_gain_privileges() -> None:
    """No set-user-id program and no file capability counts from now on; no other process may look inside."""
    call(_PRCTL[MACHINE], _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(_PRCTL[MACHINE], _SET_DUMPABLE, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, those of a root user included."""
    header = _CAPABILITY_VERSION.to_bytes(4, "little") + bytes(4)
    call(_CAPSET[MACHINE], header, bytes(24))


def reachable(paths: list[str]) -> bool:
    """Whether a user without any rights of its own can reach and list the folders at ``paths``."""
    for path in paths:
        folder = os.path.realpath(path)
        while True:
            # The permission to enter, for others; every folder up to the root must give it.
            if not os.stat(folder).st_mode & 0o001:
                return False
            if folder == "/":
                break
            folder = os.path.dirname(folder)
    return True
