"""Free memory of the machine or of the cgroup."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """Return the bytes that are free, or could be without swapping, in the machine and in this process's container.

    The smaller of Linux' MemAvailable and what a memory limit of the control group leaves, where there is one; file
    pages that were not used lately count as free in both. None where neither is known.
    """
    known = [size for size in (_of_machine(meminfo), _of_group(group)) if size is not None]
    return min(known, default=None)


def _of_machine(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _of_group(folder: Path) -> int | None:
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
        pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    # The kernel drops such pages before it kills anything, so they are as good as free.
    return max(0, int(limit) - int(used) + int(pages.get("inactive_file", 0)))
