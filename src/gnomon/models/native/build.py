"""C for this very processor, built once with the machine's own compiler and kept in the cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gnomon.models.default import cache_root
from gnomon.threads import libgomp

_HERE = Path(__file__).parent
_PROCESSOR = Path("/proc/cpuinfo")
_SECONDS = 120
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_WIDE = ("-mprefer-vector-width=512",)


def build(defines: tuple[str, ...]) -> ctypes.CDLL | None:
    """Return the library of all C files here, compiled with ``defines``; None where it cannot be had.

    Takes a second when it is not in the cache (`cache_root`), under a name that tells sources, flags, compiler and
    processor. Without a compiler (``CC``, or cc), or where torch does not calculate with libgomp, whose threads these
    functions use, there is none: what they do is then done by torch. GNOMON_NATIVE=0 asks for that.
    """
    if os.environ.get("GNOMON_NATIVE") == "0":
        return None
    openmp, compiler = libgomp(), shutil.which(os.environ.get("CC") or "cc")
    if openmp is None or compiler is None:
        return None
    is_intel = platform.machine() in ("x86_64", "AMD64")
    flags = (*_FLAGS, *(_WIDE if is_intel else ()), *(f"-D{name}" for name in defines))
    try:
        sources, headers = sorted(_HERE.glob("*.c")), sorted(_HERE.glob("*.h"))
        texts = b"\0".join(f.read_bytes() for f in (*sources, *headers))
        parts = [texts, " ".join(flags).encode(), _run([compiler, "--version"]), _processor()]
        path = cache_root() / "native" / f"{hashlib.sha256(b'|'.join(parts)).hexdigest()[:32]}.so"
        if not path.is_file():
            _compile(compiler, flags, sources, path)
        ctypes.CDLL(openmp._name, mode=ctypes.RTLD_GLOBAL)  # what the library calls and is not linked to
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        for source, made in zip(sources, objects, strict=True):
            _run([compiler, *flags, "-c", str(source), "-o", made])
        # Not linked to an OpenMP: the one that torch has loaded is used, and not a second one beside it.
        _run([compiler, "-shared", *objects, "-o", f"{folder}/made.so", "-lm"])
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
