"""C for this very processor, built once with the machine's own compiler and kept in the cache."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gnomon.core.threads import libgomp
from gnomon.models.default import cache_root

_HERE = Path(__file__).parent
_PROCESSOR = Path("/proc/cpuinfo")
_SECONDS = 120
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_WIDE = ("-mprefer-vector-width=512",)


def build(defines: tuple[str, ...], wanted: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library of all C files here, compiled with ``defines``; None where it cannot be had.

    Takes a second when it is not in the cache (`cache_root`), under a name that tells sources, flags, compiler and
    processor. Without a compiler (``CC``, a command with its arguments, or cc), or where torch does not calculate with
    libgomp, whose threads these functions use, there is none: what they do is then done by torch. GNOMON_NATIVE=0 asks
    for that. None too where others can write into the cache, since what lies there becomes code of this process, where
    a library lacks a function that is ``wanted``, and where building failed before: that is remembered beside the
    library, so a compiler that cannot build these sources is asked once.
    """
    if os.environ.get("GNOMON_NATIVE") == "0":
        return None
    openmp, compiler = libgomp(), _compiler()
    if openmp is None or compiler is None:
        return None
    is_intel = platform.machine() in ("x86_64", "AMD64")
    flags = (*_FLAGS, *(_WIDE if is_intel else ()), *(f"-D{name}" for name in defines))
    try:
        sources, headers = sorted(_HERE.glob("*.c")), sorted(_HERE.glob("*.h"))
        texts = b"\0".join(f.read_bytes() for f in (*sources, *headers))
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
    """Whether a file or folder, and every folder above it, can be changed by this user and the system alone.

    A folder that everybody may write to and that is sticky, as /tmp is, lets nobody replace what is another's.
    """
    for place in (path.absolute(), *path.absolute().parents):
        found = place.stat()
        is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid not in (0, os.geteuid()) or (is_open and not found.st_mode & stat.S_ISVTX):
            return False
    return not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiler() -> list[str] | None:
    """Return the compiler's command line, None where there is none."""
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
            # Not linked to an OpenMP: the one that torch has loaded is used, and not a second one beside it.
            _run([*compiler, "-shared", *objects, "-o", f"{folder}/made.so", "-lm"])
        except subprocess.CalledProcessError as error:
            failed.write_bytes(error.stderr[-4000:] or b"the compiler failed without a word")
            raise
        os.chmod(f"{folder}/made.so", 0o600)
        os.replace(f"{folder}/made.so", path)


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True).stdout


def _processor() -> bytes:
    """Return what tells one kind of processor from another."""
    try:
        lines = _PROCESSOR.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted))).encode()
