"""C is compiled once, for this processor, and done without where that cannot be."""

import os
import platform
import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gnomon.models.cpu import build as room
from gnomon.models.cpu.build import build
from gnomon.models.cpu.kernels import Kernels, kernels_for

HAS_ONE = build(()) is not None
FLAGS = room._FLAGS
needs_one = pytest.mark.skipif(not HAS_ONE, reason="there is no C compiler here")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, empty; what is compiled there is not made fast, which takes five times as long."""
    monkeypatch.setattr(room, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in FLAGS))
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def computed(kernels, size):
    """Return what functions with tiles of their own make of heads of a size."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(40, 9, size), (40, 5, size), (2, 2, 40, size), (2, 2, 40, size), (3, size), (3, size), (3, 333)]
    made, back, keys, values, cos, sin, logits = (torch.randn(shape, generator=generator) for shape in shapes)
    table = torch.tensor([[3, 4, 0, 2], [30, 10, 2, 0]]), torch.tensor([[7, 20], [27, 3]]), 3
    places = torch.tensor([(1, 2, 9, 5, 3), (0, 0, 3, 0, 1)])
    result, sums = kernels.branched(made, 5, table, 0.2)
    looked = kernels.attend(made[:3], (cos, sin), places, (keys, values), 4, 0.2)
    drawn = kernels.sample(logits, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), 0.7)
    return [result, kernels.branched_back(made, back, sums, table, 0.2), looked, keys, values, *drawn]


def program(folder, text):
    """Return the path of a program that does what ``text`` says."""
    path = folder / "cc"
    path.write_text(f"#!{sys.executable}\nimport sys\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_one
def test_it_is_compiled_once(cache, monkeypatch):
    """The second time nothing runs but the question for the compiler's version."""
    runs, run = [], room._run
    monkeypatch.setattr(room, "_run", lambda command: runs.append(command) or run(command))

    first = build(())
    made = len(runs)
    second = build(())

    assert first is not None
    assert second is not None
    assert made > 2
    assert runs[made:] == [[runs[0][0], "--version"]]
    assert len(list(cache.iterdir())) == 1
    assert cache.stat().st_mode & 0o077 == 0


@needs_one
def test_each_kind_of_number_is_a_library_of_its_own(cache, monkeypatch):
    """And so is each processor."""
    assert build(()) is not None
    assert build(("HALF",)) is not None
    monkeypatch.setattr(room, "_PROCESSOR", cache / "none")
    assert build(()) is not None

    assert len(list(cache.iterdir())) == 3


@needs_one
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of another processor's levels")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_processors_with_narrower_registers_compute_the_same(monkeypatch, level):
    """With four and eight numbers at a time: attention of packed rows and of decoding, and draws, to 1e-5."""
    monkeypatch.setattr(room, "_FLAGS", tuple(f"-march={level}" if "march" in flag else flag for flag in FLAGS))
    monkeypatch.setattr(room, "_WIDE", ())
    narrow, own = Kernels(build(())), kernels_for(torch.float32)

    for size in (16, 48, 64, 72, 160):
        for ours, theirs in zip(computed(narrow, size), computed(own, size), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_one
def test_two_may_build_at_once(cache):
    """Nobody loads half a library, and nothing but one is left."""
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(lambda _: build(()), range(2)))

    assert all(library is not None for library in libraries)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    ["sys.exit(1)", "open(sys.argv[sys.argv.index('-o') + 1], 'w').write('no library') if '-o' in sys.argv else 0"],
    ids=["fails", "lies"],
)
def test_a_compiler_that_does_not_work_is_done_without(tmp_path, monkeypatch, text):
    """One that fails, and one whose library cannot be loaded."""
    monkeypatch.setenv("CC", program(tmp_path, text))

    assert build(()) is None


def test_there_need_not_be_a_compiler(monkeypatch, cache):
    """Nor need it be used; nothing is written then."""
    monkeypatch.setenv("CC", os.devnull + "/none")
    assert build(()) is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("GNOMON_NATIVE", "0")
    assert build(()) is None

    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    """A file where the folder should be."""
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "taken"))

    assert build(()) is None


@needs_one
def test_a_compiler_is_a_command_line(monkeypatch, tmp_path):
    """CC may hold arguments, as make's does; what is no command line is no compiler."""
    monkeypatch.setenv("CC", "cc -DUNUSED='a b' -O1")
    assert build(()) is not None
    for text in ("cc 'never closed", " ", f"{tmp_path}/none -O1"):
        monkeypatch.setenv("CC", text)
        assert build(()) is None


def test_a_failure_is_remembered(monkeypatch, tmp_path, cache):
    """A compiler that cannot build these sources is asked once, and what it said is kept."""
    text = f"open({str(tmp_path / 'asked')!r}, 'a').write('x')\nsys.exit('no such flag' if '-c' in sys.argv else 0)"
    monkeypatch.setenv("CC", program(tmp_path, text))

    assert build(()) is None
    first = (tmp_path / "asked").read_text()
    assert build(()) is None
    assert (tmp_path / "asked").read_text() == first + "x"  # for its version
    assert [path.read_text().strip() for path in cache.glob("*.failed")] == ["no such flag"]


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGBUS)",
        "sys.exit('cc: fatal error: Killed signal terminated program cc1')",
        "sys.exit('/tmp/ccX.s: fatal error: error writing to /tmp/ccX.s: No space left on device')",
        "sys.exit('cc1: out of memory allocating 65536 bytes after a total of 1 bytes')",
        "sys.exit('virtual memory exhausted: Cannot allocate memory')",
    ],
)
def test_what_the_machine_did_to_a_compiler_is_not_remembered(monkeypatch, tmp_path, cache, end):
    """Killed, without memory or without room on the disk: the next process tries again, and leaves nothing behind."""
    text = f"import os, signal\nopen({str(tmp_path / 'asked')!r}, 'a').write('x')\nif '-c' in sys.argv:\n    {end}"
    monkeypatch.setenv("CC", program(tmp_path, text))

    assert build(()) is None
    first = (tmp_path / "asked").read_text()
    assert build(()) is None
    assert (tmp_path / "asked").read_text() == first + first
    assert list(cache.iterdir()) == []


@needs_one
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_cache_that_others_can_write_is_not_read(cache, mode):
    """Neither the folder nor the library in it: what lies there would become code of this process."""
    assert build(()) is not None
    [library] = cache.glob("*.so")
    library.chmod(mode)
    assert build(()) is None
    library.chmod(0o600)
    cache.chmod(mode)
    assert build(()) is None
    cache.chmod(0o700)
    assert build(()) is not None


@needs_one
def test_a_library_that_lacks_a_function_is_done_without():
    """One of other sources under the same name."""
    assert build((), ("norm", "gate")) is not None
    assert build((), ("norm", "not there")) is None


@needs_one
def test_memory_that_is_not_there_is_an_error():
    """Not a crash: what a function takes for itself is more than the machine has addresses for."""
    kernels = Kernels(build(()))
    made, table = torch.randn(4, 3, 16), (torch.tensor([[0, 1 << 44, 0, 0]]), torch.zeros(0, 2, dtype=torch.int64), 0)

    with pytest.raises(MemoryError, match="no memory for what a function in C needs"):
        kernels.branched(made, 1, table, 0.2)
