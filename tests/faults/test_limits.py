"""What the operating system refuses: open files, file sizes, memory, room on a disk, standard output, a home."""

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.forked import Forked
from tests.forked import ended as finished
from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import LIMITS, ModelError, refusal_of
from gnomon.models.token_strings import parsed

GNOMON = [sys.executable, "-m", "gnomon"]
IS_ROOT = os.geteuid() == 0 and shutil.which("setpriv") is not None
KEPT = [f"--{which}-caps=+dac_override,+dac_read_search" for which in ("inh", "ambient")]
NAMELESS = ["setpriv", "--reuid", "54321", "--clear-groups", *KEPT]
SMALL = [
    "steps=1", "task.size=40", "rollouts_per_step=8", "held_out.size=3", "algorithm.num_generations=2",
    "grading.workers=1", "evaluation.before=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that is finished."""
    run = tmp_path_factory.mktemp("limits") / "base"
    assert main(["train", RANDOM, *SMALL, "records.batches=true", "--run-dir", str(run)]) == 0
    return run


def asked(
    arguments: list[str],
    before: Callable[[], object] | None = None,
    environment: Mapping[str, str | None] | None = None,
    stdout: int = subprocess.PIPE,
    program: Sequence[str] = GNOMON,
) -> "subprocess.CompletedProcess[str]":
    """Return how a new interpreter ended that was begun after ``before``. environment: as `Forked` takes it."""
    # Python writes half of a compiled module where a file may not be larger, and reads that half ever after.
    changed = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    return subprocess.run(
        [*program, *arguments],
        env={name: value for name, value in changed.items() if value is not None},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        timeout=120,
    )


def limited(kind: int, most: int) -> Callable[[], object]:
    """Return what gives a process that limit."""
    return partial(resource.setrlimit, kind, (most, most))


def forked(arguments: list[str], before: Callable[[], object]) -> "subprocess.CompletedProcess[str]":
    """Return how a command ended in a process that has imported everything before the limit."""
    return finished(Forked(arguments, before=before))


Start = Callable[..., "subprocess.CompletedProcess[str]"]


def is_in_words(ended: "subprocess.CompletedProcess[str]") -> bool:
    """Whether a command ended without a traceback, and said why where it failed."""
    return "Traceback" not in ended.stderr and (ended.returncode == 0 or "gnomon " in ended.stderr)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EMFILE, "x"), errno.EMFILE),
        (OSError(errno.EFBIG, "x"), errno.EFBIG),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), errno.EFBIG),
        (RuntimeError("No space left on device"), errno.ENOSPC),
        (RuntimeError("IoError: Too many open files (os error 24)"), errno.EMFILE),
        (RuntimeError("can't start new thread"), errno.EAGAIN),
        (BaseException("ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: WouldBlock }) }"), errno.EAGAIN),
        (MemoryError(), errno.ENOMEM),
        (OSError(errno.ENOENT, "x"), None),
        (RuntimeError("I/O error: No such file or directory (os error 2)"), None),
        (ValueError("28"), None),
        (ModelError("no weights"), None),
    ],
)
def test_a_refusal_is_told_from_other_errors_whoever_reports_it(error: BaseException, number: int | None):
    """By number, or by the text of libraries in other languages."""
    refused = refusal_of(error)

    assert (None if refused is None else refused.errno) == number
    assert number is None or number in LIMITS


@pytest.mark.parametrize("verb", ["plan", "train", "doctor"])
def test_no_folder_for_temporary_files_is_said(verb: str, tmp_path: Path):
    """Libraries ask for one while they are imported; where none can be written, Python leaves out the reason."""
    ended = asked([verb, "tiny" if verb != "doctor" else str(tmp_path)], limited(resource.RLIMIT_FSIZE, 0))

    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode in (1, 2)
    assert verb == "doctor" or "ulimit -f raises that" in ended.stderr


def test_an_error_that_python_lost_is_memory_only_under_a_limit_of_it():
    """CPython says so where a MemoryError was lost; without a limit of memory it is an extension's fault."""
    look = (
        "from gnomon.core.errors import refusal_of\n"
        "for said in ('error return without exception set', '<f> returned NULL without setting an exception', 'x'):\n"
        "    print(getattr(refusal_of(SystemError(said)), 'errno', None))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", look], preexec_fn=before, capture_output=True, text=True, check=True
        ).stdout.split()
        for before in (None, limited(resource.RLIMIT_DATA, 2_000_000_000))
    ]

    assert told == [["None"] * 3, [str(errno.ENOMEM)] * 2 + ["None"]]


@pytest.mark.parametrize("command", ["train tiny", "plan tiny", "evaluate tiny --task arithmetic"])
@pytest.mark.parametrize(("kind", "option"), [(resource.RLIMIT_DATA, "-d"), (resource.RLIMIT_AS, "-v")])
def test_too_little_memory_for_libraries_is_said_before_they_are_loaded(command: str, kind: int, option: str):
    """Native code that lacks memory aborts, hangs or is killed by a signal."""
    ended = asked(command.split(), limited(kind, 100_000_000))

    assert ended.returncode == 1, ended.stderr
    assert f"MB, and ulimit {option} allows 100 MB" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_python_without_docstrings_is_said_before_libraries_are_loaded(verb: str):
    """transformers reads docstrings while it is imported, and would end in a traceback of ninety lines."""
    ended = asked([verb, "tiny"], None, environment={"PYTHONOPTIMIZE": "2"})

    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "(PYTHONOPTIMIZE=2 or -OO), and transformers needs them; unset it" in ended.stderr


def test_a_model_is_not_blamed_for_a_full_disk():
    """What the system refused stays what it is; another error is the model's."""
    with pytest.raises(OSError, match="No space"), parsed("the model"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RuntimeError, match="new thread"), parsed("the model"):
        raise RuntimeError("can't start new thread")
    with pytest.raises(ModelError, match="the model: KeyError"), parsed("the model"):
        raise KeyError("a")


def test_no_compiled_module_is_written_where_file_sizes_are_limited(tmp_path: Path):
    """Python would leave half of a compiled module, and every later program would read that half."""
    (tmp_path / "mine.py").write_text("from gnomon.algorithms import GRPO\nOWN = GRPO\n")
    own = {"PYTHONDONTWRITEBYTECODE": None}

    for before, left in ((limited(resource.RLIMIT_FSIZE, 1 << 40), 1), (None, 2)):
        ended = asked(["algorithms", f"{tmp_path / 'mine.py'}:OWN"], before, environment=own)
        assert ended.returncode == 0, ended.stderr
        assert len(list(tmp_path.iterdir())) == left


def test_a_write_that_is_refused_names_its_file(tmp_path: Path):
    """The system's error of a write has no name of a file; a person needs it."""
    code = (
        "import resource, sys; from pathlib import Path; from gnomon.core.atomic_files import write_durably\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); write_durably(Path(sys.argv[1]), b'x' * 100)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "f"], capture_output=True, text=True, timeout=60)

    assert f"File too large: '{tmp_path / 'f'}'" in ended.stderr
    assert not list(tmp_path.iterdir())
    write_durably(tmp_path / "f", b"x")


@pytest.mark.usefixtures("base")  # which has every module compiled: graders do not inherit the variable of `asked`
@pytest.mark.parametrize(("most", "start"), [(1_000, forked), (20_000, forked), (300_000, forked)])
def test_training_within_a_limit_of_file_sizes_ends_in_words(tmp_path: Path, most: int, start: Start):
    """Exit code 1, what to type, and no traceback, whichever library wrote the file."""
    arguments = ["train", RANDOM, *SMALL, "--run-dir", str(tmp_path / "run")]
    ended = start(arguments, limited(resource.RLIMIT_FSIZE, most))

    assert ended.returncode == 1, ended.stderr
    assert is_in_words(ended)
    assert "ulimit -f raises that" in ended.stderr


@pytest.mark.parametrize(
    ("most", "start"), [pytest.param(16, asked, marks=pytest.mark.slow), (16, forked), (32, forked), (64, forked)]
)
def test_few_open_files_end_in_words_or_are_enough(tmp_path: Path, most: int, start: Start):
    """A training that needs more says what raises the limit, whether imports or the run itself find it."""
    arguments = ["train", RANDOM, *SMALL, "--run-dir", str(tmp_path / "run")]
    ended = start(arguments, limited(resource.RLIMIT_NOFILE, most))

    assert is_in_words(ended), ended.stderr
    assert ended.returncode == 0 or "ulimit -n 4096 raises that" in ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        *((resource.RLIMIT_NOFILE, most) for most in (8, 12, 18)),
        *((resource.RLIMIT_FSIZE, most) for most in (60_000, 600_000)),
        *((resource.RLIMIT_AS, most) for most in (700_000_000, 1_200_000_000)),
        *((resource.RLIMIT_DATA, most) for most in (450_000_000, 600_000_000)),
    ],
)
def test_a_whole_run_under_a_limit_trains_or_ends_in_words(tmp_path: Path, kind: int, most: int):
    """Right, or at most five lines that name the limit and no model or setting; what is there goes on without it."""
    run = tmp_path / "run"
    ended = asked(["train", RANDOM, *SMALL, "--run-dir", str(run)], limited(kind, most))
    said = ended.stderr.splitlines()

    assert "Traceback" not in ended.stderr, ended.stderr
    assert "Exception ignored" not in ended.stderr
    if ended.returncode:
        assert ended.returncode in (1, 74)
        last = max(number for number, line in enumerate(said) if line.startswith("gnomon "))
        assert len(said) - last <= 5
        assert "ulimit" in "".join(said[last:])
    if (run / "experiment.toml").exists():
        assert asked(["resume", str(run)]).returncode == 0
        assert '"step": 1' in (run / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="only root has no limit, and gives up its name")
@pytest.mark.parametrize("most", [1, 3, 12])
def test_few_threads_and_processes_end_in_words_or_are_enough(tmp_path: Path, most: int):
    """Threads of Python's, of a library in Rust (whose panic is no exception), and processes that grade."""
    arguments = ["train", RANDOM, *SMALL, "--run-dir", str(tmp_path / "run")]
    ended = asked(arguments, limited(resource.RLIMIT_NPROC, most), {"HOME": str(tmp_path)}, program=NAMELESS + GNOMON)

    assert ended.returncode == 1 or (ended.returncode == 0 and most == 12), ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0 or "ulimit -u" in ended.stderr.splitlines()[-1]


def _without_output() -> None:
    os.close(1)
    sys.stdout = None  # as an interpreter begins that has none


@pytest.mark.parametrize(
    ("verb", "start"),
    [
        ("watch", partial(forked, before=_without_output)),
        ("doctor", partial(forked, before=_without_output)),
        pytest.param("report", partial(asked, before=partial(os.close, 1)), marks=pytest.mark.slow),
    ],
)
def test_standard_output_that_is_closed_takes_no_files_number(base: Path, verb: str, start: Start):
    """A verb that reads ends with 0; a record is never written into by what is printed."""
    more = ["--once"] if verb == "watch" else []
    ended = start([verb, str(base), *more])

    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def _full_output() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.close(full)


@pytest.mark.parametrize("verb", ["algorithms", "doctor", "watch"])
def test_standard_output_that_is_full_is_named(base: Path, verb: str):
    """Exit code 74, and it is said that it is standard output which cannot be written."""
    arguments = {"algorithms": [], "doctor": [str(base)], "watch": [str(base), "--once"]}[verb]
    start = asked if verb == "doctor" else forked  # what an interpreter says of it at its own end
    ended = start([verb, *arguments], _full_output)

    assert ended.returncode == 74, ended.stderr
    assert "standard output" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_a_reader_that_has_gone_ends_a_verb_quietly(base: Path):
    """A closed pipe: no traceback, nothing of the interpreter's."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = asked(["doctor", str(base)], stdout=writing)
    finally:
        os.close(writing)

    assert ended.returncode in (0, 1)
    assert ended.stderr == ""


def test_a_user_without_a_name_a_home_and_a_language_plans():
    """As in a container that is begun with a number for a user (only root gives up its name), without UTF-8: what
    cannot be shown is replaced.
    """
    without = dict.fromkeys(("HOME", "USER", "LOGNAME", "LANG", "LC_ALL"))
    ascii_alone = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = [*(NAMELESS if IS_ROOT else ()), *GNOMON]
    ended = asked(["plan", RANDOM], environment={**without, **ascii_alone}, program=program)

    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def _leave_a_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


@pytest.mark.parametrize("verb", ["train", "plan", "doctor", "config"])
def test_a_working_directory_that_is_gone_is_said(verb: str):
    """Nothing relative can be read or written there; it is one line, and not a traceback."""
    done = finished(Forked([verb, "tiny"], before=_leave_a_folder))

    assert done.returncode == 2
    assert done.stderr == "gnomon: the working directory is gone; cd to a folder that is there\n"


@pytest.mark.parametrize("verb", ["export", "evaluate"])
def test_a_newest_checkpoint_that_is_damaged_is_said_by_whoever_reads_it(base: Path, tmp_path: Path, verb: str):
    """The older model is taken and named, in one line without a place in the code."""
    run = tmp_path / "run"
    shutil.copytree(base, run)
    (step,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(step, run / "checkpoints" / "step-2")
    (run / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"torn")
    done = finished(Forked([verb, str(run), *[str(tmp_path / "out")] * (verb == "export")]))

    assert done.returncode == 0
    assert re.search(
        r"(?m)^warning: the checkpoint .*step-2 is damaged and is not used: .*after step 1 is$", done.stderr
    )
