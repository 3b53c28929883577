"""One run, one directory, one process that writes to it."""

import datetime
import difflib
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Self

from gnomon.core.atomic_files import open_plain, read_plain_text, real_path, refuse_special
from gnomon.core.errors import ConfigError, RunDirectoryError, shortened, unknown
from gnomon.core.tables import parse_toml

LOCK = ".lock"
_MOST_NAMED = 12
_HELD: set[int] = set()


def _forget_locks() -> None:
    # A forked child shares the lock with its parent: a worker that outlived a killed run would keep it locked.
    # flock belongs to the open file, which a fork shares; closing the copy does not unlock the parent's.
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_locks)


class _Entry:
    """A file or folder of a run: read from a `RunDirectory`, its path."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, run: "RunDirectory", owner: type | None = None) -> Path:
        return run.path.joinpath(*self._names)


@dataclass
class RunDirectory:
    """The files of one run, locked for the life of this process.

    The lock belongs to the kernel: it ends with the process, however that ends, so there is no stale lock to remove.
    Readers (`evaluate`, `report`, `watch`) need no lock: ``RunDirectory(path)`` names the files.
    """

    path: Path
    _lock: int | None = None

    experiment = _Entry("experiment.toml")
    """The resolved experiment."""
    card = _Entry("run.json")
    """The run card: what the run ran on, and what it promises."""
    learner_logs = _Entry("learner")
    """Logs of the learner's processes, written when one of them was lost."""
    waiting_models = _Entry("checkpoints", ".waiting")
    """Models that other processes wrote, on their way into a checkpoint on the same disk."""
    judged = _Entry("judged.jsonl")
    """What judges said, each reply once, by the digest of the request."""
    metrics = _Entry("metrics.jsonl")
    """The metrics: one object per step."""
    evaluations = _Entry("evaluations.jsonl")
    """The evaluations: one object per evaluation."""
    answers = _Entry("evaluations")
    """The folder of evaluation records: a file per evaluation, with each prompt's answers."""
    findings = _Entry("findings.jsonl")
    """The findings of the diagnosis: one object per finding."""
    diagnosis = _Entry("diagnosis.json")
    """The diagnosis at the newest step: every finding so far, in its newest words."""
    rollouts = _Entry("rollouts")
    """The folder of graded rollouts: a file per step."""
    batches = _Entry("batches")
    """The folder of training batches: a file per step."""
    prompts = _Entry("prompts.safetensors")
    """Keys of the training prompts, where something is remembered of each; a continued run knows them by these."""
    checkpoints = _Entry("checkpoints")
    """The folder of checkpoints."""
    saved = _Entry(".saved")
    """An empty file that marks that a checkpoint was published; without checkpoints later, these are lost."""
    pretraining = _Entry("pretraining.jsonl")
    """Value pre-training: one object per batch."""
    pretraining_checkpoints = _Entry("pretraining")
    """The folder of checkpoints of value pre-training; removed when that phase is over."""
    report = _Entry("report.html")
    """The page that `gnomon report` writes."""

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make a new run at ``path``, or take an empty directory.

        Raises:
            RunDirectoryError: Something is there already, another process has it, or it cannot be written.
        """
        cls.check_free(path)
        with _reported(path):
            path.mkdir(parents=True, exist_ok=True)
            made = cls(path, _lock(path))
        try:
            with _reported(path):
                _refuse_used(path)
        except RunDirectoryError:
            made.close()
            raise
        return made

    @classmethod
    def check_free(cls, path: Path, differs: str = "") -> None:
        """Refuse a path at which no new run can be made; nothing is made yet.

        Args:
            differs: Returns in which settings an existing run differs.

        Raises:
            RunDirectoryError: As `create`.
        """
        with _reported(path):
            if os.path.lexists(path / LOCK):
                # Someone may be at work: say who, before saying what is there.
                cls(path, _lock(path)).close()
            _refuse_used(path, differs)

    @staticmethod
    def check_place(path: Path) -> None:
        """Refuse a path below what is no folder, or may not be written.

        Raises:
            RunDirectoryError: The message says what is in the way.
        """
        # The nearest folder that is there: all below it would be made.
        above = next(each for each in path.absolute().parents if os.path.lexists(each))
        is_folder = os.path.isdir(above)
        # As a write is judged: by the effective user, whose capabilities count too.
        effective = os.access in os.supports_effective_ids
        if not is_folder or not os.access(above, os.W_OK | os.X_OK, effective_ids=effective):
            raise RunDirectoryError(
                f"{path} cannot be written: {'Permission denied' if is_folder else f'{above} is no folder'}; choose a "
                "directory that you may write to with --run-dir DIR"
            )

    @classmethod
    def named(cls, name: str, root: Path = Path("runs"), now: datetime.datetime | None = None) -> Self:
        """Make the new run ROOT/NAME-YYYYmmdd-HHMMSS, with -2, -3, ... when that is taken.

        Args:
            name: Letters, digits, dots, underscores and hyphens stay; anything else becomes a hyphen.
        """
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "run"
        return cls._numbered(root / f"{slug}-{now or datetime.datetime.now():%Y%m%d-%H%M%S}", 1)

    @classmethod
    def after(cls, parent: Path) -> Self:
        """Make a new run beside another one that it continues: PARENT-2, or -3, ... when that is taken."""
        # A run that continues another is PARENT-2; its own continuation is PARENT-3 and not PARENT-2-2.
        is_second = "continue_from" in cls(parent).table()
        return cls._numbered(parent.with_name(re.sub(r"-\d+$", "", parent.name)) if is_second else parent, 2)

    @classmethod
    def _numbered(cls, base: Path, number: int) -> Self:
        while True:
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            with _reported(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                # mkdir decides who gets the name where two runs begin in one second.
                try:
                    path.mkdir()
                except FileExistsError:
                    number += 1
                    continue
            return cls.create(path)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Take an existing run, to go on with it.

        Raises:
            RunDirectoryError: There is none, another process has it, a link in it leads out of it, or it cannot be
                written.
        """
        cls.check(path)
        # Before the lock: taking it writes into the directory.
        _refuse_links_out(path)
        cls(path).refuse_strange()
        with _reported(path):
            return cls(path, _lock(path))

    @staticmethod
    def named_by(run: Any) -> Path:
        """Return the folder of a run that is given by its path, or as `gnomon.train` returned it.

        Raises:
            RunDirectoryError: It is neither.
        """
        if not isinstance(run, str | os.PathLike):
            raise RunDirectoryError(
                f"a run is named by its folder, or given as train returned it; got {type(run).__name__}"
            )
        return Path(run)

    @classmethod
    def check(cls, path: Path) -> None:
        """Refuse a path that is no run.

        Raises:
            RunDirectoryError: There is no such run; the message names the nearest one.
        """
        if not os.path.isfile(path / "experiment.toml"):  # `Path.is_file` raises where a name is too long
            raise RunDirectoryError(_no_run(path))

    @classmethod
    def check_there(cls, *paths: Path, is_model: bool = False) -> None:
        """Refuse paths at which there is nothing, before a library is loaded; models may be asked for instead of runs.

        Raises:
            RunDirectoryError: The message names the nearest run.
        """
        for path in paths:
            if not os.path.lexists(path):
                said = f"there is no folder {path}: {_no_run(path)}; for a model of the hub {NO_TASK}"
                raise RunDirectoryError(said if is_model else _no_run(path))

    def table(self) -> dict[str, Any]:
        """Return the resolved experiment as a table.

        Raises:
            RunDirectoryError: It cannot be read: without it nothing that was measured can be judged.
        """
        try:
            table = parse_toml(read_plain_text(self.experiment))
        except (OSError, ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{self.experiment} cannot be read: {error}") from error
        if not table:
            raise RunDirectoryError(f"{self.experiment} cannot be read: it is empty")
        return table

    def refuse_strange(self) -> None:
        """Refuse a run in which something else is where a record belongs: going on removes and replaces records.

        Raises:
            RunDirectoryError: The message names it.
        """
        plain = [*self._written(), self.card, self.prompts, self.judged]
        for folder in self._folders():
            if os.path.lexists(folder) and not folder.is_dir():
                raise RunDirectoryError(f"{folder} is no folder, as a run writes it there; move it away")
            plain += folder.glob("step-*") if folder.is_dir() else []
        for path in plain:
            if path.exists():
                try:
                    refuse_special(path)
                except OSError as error:
                    raise RunDirectoryError(
                        f"{path} cannot be gone on with: {error.strerror}, as a run writes there; move it away"
                    ) from error

    def discard(self) -> None:
        """Remove a new run whose session never began (it has no card), so that its name is free again."""
        if not self.card.exists():
            self.experiment.unlink(missing_ok=True)
            (self.path / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()

    def set_aside(self) -> Path | None:
        """Move what was recorded into a new folder ``former-N`` and return that; None where nothing was."""
        there = [path for path in (*self._written(), *self._folders()) if os.path.lexists(path)]
        if not there:
            return None
        number = 1
        while os.path.lexists(aside := self.path / f"former-{number}"):
            number += 1
        aside.mkdir()
        for path in there:
            os.rename(path, aside / path.name)
        return aside

    def _written(self) -> tuple[Path, ...]:
        return self.metrics, self.evaluations, self.findings, self.pretraining, self.diagnosis

    def _folders(self) -> tuple[Path, ...]:
        return self.answers, self.rollouts, self.batches

    def close(self) -> None:
        """Let others have the run; called again, it does nothing."""
        if self._lock is not None and self._lock in _HELD:
            _HELD.discard(self._lock)
            os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _lock(path: Path) -> int:
    if (path / LOCK).is_symlink():
        raise RunDirectoryError(f"{path / LOCK} is a link, and locking would overwrite what it leads to; remove it")
    if (path / LOCK).exists():
        refuse_special(path / LOCK)
    # NONBLOCK, or opening a named pipe in its place would wait for
    # ever; NOFOLLOW for a link that was put there since the look above.
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    try:
        _flock(descriptor)
    except OSError as error:
        # The note of the process that holds the lock, for the message
        # alone: whether it lives, the kernel has just said.
        owner = os.pread(descriptor, 4096, 0)
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunDirectoryError(
                f"the run {path} is in use by {_said(owner)}; wait until it ends or stop it, "
                "or start another run with --run-dir DIR"
            ) from error
        raise
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": now}) + "\n"
    # Written only once the lock is held: the note never names a process that does not have the run.
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note.encode(), 0)
    _HELD.add(descriptor)
    return descriptor


def _flock(descriptor: int) -> None:
    """Lock, or raise what the kernel says; a reader that asks who has the run holds the lock for microseconds."""
    # `lock_owner` takes the lock for an instant to ask; a run must not fail because somebody looked.
    for pause in (0.01, 0.05, 0.2):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass(frozen=True)
class LockOwner:
    """The process that has a run, as it says of itself; zero and empty where it has said nothing yet."""

    pid: int = 0
    host: str = ""
    started: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started}" if self.pid else "another process"


def lock_owner(run: Path) -> LockOwner | None:
    """Return who works on the run at ``run`` now, None when no process does.

    The kernel is asked, for a note that a process left behind says nothing of whether it lives: with a shared lock that
    is given back at once. A run that begins in that very moment tries again.
    """
    try:
        with open_plain(run / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _said(file.read(4096))
    except OSError:
        return None
    return None


def _said(note: bytes) -> LockOwner:
    try:
        found = json.loads(note)
        owner = LockOwner(found["pid"], found["host"], found["started"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return LockOwner()
    is_sound = type(owner.pid) is int and isinstance(owner.host, str) and isinstance(owner.started, str)
    return owner if is_sound else LockOwner()


def _refuse_used(path: Path, differs: str = "") -> None:
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file, so no run can be written there; choose another --run-dir DIR")
    if path.is_dir() and any(entry.name != LOCK and not _is_torn(entry.name) for entry in path.iterdir()):
        is_run = (path / "experiment.toml").is_file()
        what, go_on = ("a run", f"go on with it: gnomon resume {quote(str(path))}; or ") if is_run else ("files", "")
        other = f" of another experiment ({differs})" if differs else ""
        raise RunDirectoryError(
            f"{path} holds {what} already{other}, and nothing is overwritten; {go_on}start another with --run-dir DIR"
        )


def _refuse_links_out(path: Path) -> None:
    """Refuse a run whose files or folders are links to elsewhere: what is resumed removes and replaces files."""
    for entry in path.iterdir():
        target = real_path(entry)
        if entry.is_symlink() and not target.is_relative_to(real_path(path)):
            raise RunDirectoryError(
                f"{entry} is a link that leads out of the run, to {target}; put the files themselves there, "
                "or link the whole run"
            )


def _is_torn(name: str) -> bool:
    """Whether this is what a crash leaves of an experiment that was being written down."""
    return re.fullmatch(r"\.experiment\.toml\.[0-9a-f]+\.tmp", name) is not None


def _no_run(path: Path) -> str:
    if not os.path.exists(path):
        siblings = path.parent.iterdir() if os.path.isdir(path.parent) else iter(())
        runs = [str(p) for p in siblings if (p / "experiment.toml").is_file()]
        # Of many runs those with the nearest names: a folder may hold hundreds.
        near = difflib.get_close_matches(str(path), runs, n=_MOST_NAMED, cutoff=0.0)
        hint = unknown("run", str(path), near) if near else f"there is no run {shortened(str(path))}"
        return f"{hint}; `gnomon train EXPERIMENT` starts one"
    return f"{path} is no run: it has no experiment.toml; `gnomon train EXPERIMENT --run-dir DIR` starts one"


NO_TASK = "the task must be named: --task arithmetic, a file, or a generator"


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a RunDirectoryError that names the path and the way out."""
    try:
        yield
    except OSError as error:
        # A full disk or an exhausted limit is told elsewhere: another directory would not help.
        if isinstance(error, RunDirectoryError) or error.errno in (errno.ENOSPC, errno.EFBIG, errno.EMFILE):
            raise
        raise RunDirectoryError(
            f"{path} cannot be written: {error.strerror or error}; "
            "choose a directory that you may write to with --run-dir DIR"
        ) from error


def refuse_unchanged(run: Path, settings: Sequence[Any]) -> None:
    """Raise ConfigError where a run is to be continued with nothing changed."""
    if not settings:
        raise ConfigError(
            f"{run} is continued with something changed, such as more steps in all: gnomon continue "
            f"{quote(str(run))} steps=200; to go on as it was begun, type gnomon resume {quote(str(run))}"
        )
