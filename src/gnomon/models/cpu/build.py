"""Compile the C kernels for this machine's CPU, once, with the machine's compiler, and keep them in the cache."""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gnomon.core.atomic_files import write_durably
from gnomon.core.processes.stop_signals import stop_signals_blocked
from gnomon.core.threads import libgomp
from gnomon.models.place import cache_root

_HERE = Path(__file__).parent
_PROCESSOR = Path("/proc/cpuinfo")
_SECONDS = 120
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
# What a compiler says when a part of it is killed, or memory or the disk is full.
_PASSING = re.compile(
    rb"(?i)killed|terminat|no space left|disk quota|memory exhausted|out of memory|cannot allocate|bus error"
)
_WIDE = ("-mprefer-vector-width=512",)


def build(defines: tuple[str, ...], wanted: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library of all C files in this folder, or None if there is none.

    Compiling takes a second. The result lies in the cache (`cache_root`) under a name made of sources, flags, compiler
    and CPU. Without a library torch computes the same. There is no library without a compiler (``CC``, a command with
    its arguments, or cc); if torch does not use libgomp, whose threads the kernels need; with GNOMON_NATIVE=0; if other
    users can write into the cache, because its files become code of this process; if a function of ``wanted`` is
    missing; and after a failed build, which is remembered so that a compiler is tried once. A build that ended because
    its compiler was killed, or found no memory or no room on the disk, is not remembered: the next run tries again.

    Args:
        defines: Preprocessor definitions.
        wanted: Names of required functions.
    """
    if os.environ.get("GNOMON_NATIVE") == "0":
        return None
    openmp, compiler = libgomp(), _compiler()
    # The kernels use the threads that torch has: two OpenMP libraries would compete for the cores.
    if openmp is None or compiler is None:
        return None
    is_intel = platform.machine() in ("x86_64", "AMD64")
    flags = (*_FLAGS, *(_WIDE if is_intel else ()), *(f"-D{name}" for name in defines))
    try:
        sources, headers = sorted(_HERE.glob("*.c")), sorted(_HERE.glob("*.h"))
        texts = b"\0".join(f.read_bytes() for f in (*sources, *headers))
        # All that decides about the machine code is in the name, so that a library of another CPU or compiler is never
        # loaded.
        parts = [texts, " ".join(flags).encode(), shlex.join(compiler).encode(), _run([*compiler, "--version"])]
        path = cache_root() / "native" / f"{hashlib.sha256(b'|'.join((*parts, _processor()))).hexdigest()[:32]}.so"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        failed = path.with_suffix(".failed")
        if not is_own(path.parent) or failed.exists():
            return None
        if not path.is_file():
            _compile(compiler, flags, sources, path, failed)
        ctypes.CDLL(openmp._name, mode=ctypes.RTLD_GLOBAL)  # what the library calls and is not linked to
        library = ctypes.CDLL(str(path)) if is_own(path) else None
    except (OSError, subprocess.SubprocessError):
        return None
    return library if library is not None and all(hasattr(library, name) for name in wanted) else None


def is_own(path: Path) -> bool:
    """Whether only this user and the system can change a path and the folders above it.

    In a sticky folder that all users may write to, such as /tmp, no user can replace another user's files.
    """
    for place in (path.absolute(), *path.absolute().parents):
        found = place.stat()
        is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid not in (0, os.geteuid()) or (is_open and not found.st_mode & stat.S_ISVTX):
            return False
    return not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiler() -> list[str] | None:
    """Return the compiler's command line, or None."""
    try:
        words = shlex.split(os.environ.get("CC") or "cc")
    except ValueError:  # a quote that is not closed
        return None
    found = shutil.which(words[0]) if words else None
    return None if found is None else [found, *words[1:]]


def _compile(compiler: list[str], flags: Sequence[str], sources: Sequence[Path], path: Path, failed: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        try:
            for source, made in zip(sources, objects, strict=True):
                _run([*compiler, *flags, "-c", str(source), "-o", made])
            # Do not link to OpenMP, so that the kernels use the one that torch has loaded and no second one.
            _run([*compiler, "-shared", *objects, "-o", f"{folder}/made.so", "-lm"])
        except subprocess.CalledProcessError as error:
            if error.returncode > 0 and not _PASSING.search(error.stderr):
                write_durably(failed, error.stderr[-4000:] or b"the compiler failed without a word", is_synced=False)
            raise
        # Renamed at the end, so that no process loads a half-written library.
        os.chmod(f"{folder}/made.so", 0o600)
        os.replace(f"{folder}/made.so", path)


def _run(command: list[str]) -> bytes:
    environment = {**os.environ, "LC_ALL": "C"}  # so that `_PASSING` finds its words
    with stop_signals_blocked():
        return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True, env=environment).stdout


def _processor() -> bytes:
    """Return bytes that identify the kind of CPU."""
    try:
        lines = _PROCESSOR.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted))).encode()
