"""A world of its own, where the kernel lets this user have one: no network, no other process, a file system in
memory with Python's library in it, read-only, and one small folder to write in.

Root needs no user namespace to do this, and then becomes ``nobody``; anybody else becomes the only user of one.

Source: namespaces(7), user_namespaces(7), pivot_root(2), mount_setattr(2).
"""

import os
import struct

from . import kernel

NOBODY = 65534
WORK = "/tmp"

_MOUNTS, _CGROUPS, _NAMES, _IPC, _USERS, _PROCESSES, _NETWORK = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_ALL_BUT_USERS = _MOUNTS | _CGROUPS | _NAMES | _IPC | _PROCESSES | _NETWORK
_READ_ONLY, _NO_SET_ID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_SET_ATTRIBUTES, _PIVOT = 442, {kernel.X86: 155, kernel.ARM: 41}
_HERE, _WITH_ALL_BELOW = -100, 0x8000


def enter() -> bool:
    """Leave the machine's namespaces; children are in the new process namespace. False where not allowed."""
    user, group = os.geteuid(), os.getegid()
    # Root can mount without a user namespace, and a user namespace is what many systems forbid.
    if user == 0 and kernel.unshare(_ALL_BUT_USERS):
        return True
    if not kernel.unshare(_ALL_BUT_USERS | _USERS):
        return False
    # The kernel demands this order: a group map is refused until setgroups is denied.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def furnish(readable: list[str], hidden: list[str], packages: list[str], files_mib: int) -> None:
    """Replace the root of the file system by one in memory that has nothing but ``readable`` and `WORK`.

    Args:
        hidden: Folders below a readable one that stay empty but for ``packages``.
        files_mib: Room in `WORK`.

    Raises:
        OSError: If a mount is refused.
    """
    # Private first, or the mounts below would spread to the machine's own tree.
    kernel.mount("none", "/", "", _RECURSIVE | _PRIVATE)
    root = _place(readable + packages)
    kernel.mount("tmpfs", root, "tmpfs", _NO_SET_ID, "size=1m,nr_inodes=512,mode=755")
    for path in readable:
        _show(path, root)
    for path in hidden:
        kernel.mount("tmpfs", root + path, "tmpfs", _NO_SET_ID, "size=64k,nr_inodes=64,mode=555")
    # Packages under /tmp can be shown only after /tmp itself is mounted, or it would hide them.
    below = [path for path in packages if path.startswith(WORK + "/")]
    for path in packages:
        if path not in below:
            _show(path, root)
    os.makedirs(root + WORK, exist_ok=True)
    # Sealed before the writable folder is mounted: the seal holds for all mounts that are there by then.
    _read_only(root)
    limits = f"size={files_mib}m,nr_inodes=1024,mode=1777"
    kernel.mount("tmpfs", root + WORK, "tmpfs", _NO_SET_ID | _NO_DEVICES | _NO_EXECUTION, limits)
    for path in below:
        _show(path, root)
        _read_only(root + path)
    os.chdir(root)
    # The old root lands on top of the new one, where it can be let go without a folder to hold it.
    kernel.call(_PIVOT[kernel.MACHINE], b".", b".")
    kernel.unmount(".", _DETACH)
    os.chdir(WORK)


def _show(path: str, root: str) -> None:
    """Let the new root have what lies at ``path``, at the same place."""
    inside = root + path
    if os.path.isdir(path):
        _make_folders(inside)
    else:
        _make_folders(os.path.dirname(inside))
        os.close(os.open(inside, os.O_CREAT | os.O_CLOEXEC, 0o444))
    kernel.mount(path, inside, "", _BIND | _RECURSIVE)


def _make_folders(path: str) -> None:
    """Make a folder and those above it that are not there; they can be entered, and nobody can list them.

    What leads to the library is named as on the machine, but says nothing of what else lies there.
    """
    if not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        os.mkdir(path)
        os.chmod(path, 0o111)


def _place(readable: list[str]) -> str:
    """Return a folder to build the new root on: one that hides nothing that is still to be shown."""
    for place in ("/mnt", "/media", "/srv", "/tmp", "/var/tmp"):
        if os.path.isdir(place) and not any(path.startswith(place + "/") for path in readable):
            return place
    raise OSError("there is no folder to build a file system on")


def _read_only(root: str) -> None:
    attributes = struct.pack("4Q", _READ_ONLY | _NO_SET_ID, 0, 0, 0)
    kernel.call(_SET_ATTRIBUTES, _HERE, root.encode(), _WITH_ALL_BELOW, attributes, len(attributes))
