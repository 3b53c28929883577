"""Everything that gnomon raises on purpose.

    GnomonError
    ├── UserError                 the input is wrong: exit code 2, one message, no traceback
    │   ├── ConfigError           a key, value, name or composition (also a ValueError)
    │   ├── DatasetError          rows of a dataset, all bad ones at once (also a ValueError)
    │   ├── ModelError            a model or tokenizer that cannot be loaded (also an OSError)
    │   ├── RewardError           a reward function that cannot be imported or called (also a TypeError)
    │   └── RunDirectoryError     a run that exists, is locked or cannot be written (also an OSError)
    └── RunError                  the run failed: exit code 1
        ├── GradingError          too many samples could not be graded (also a RuntimeError)
        ├── EngineError           generation failed (also a RuntimeError)
        ├── WeightSyncError       an engine does not hold the weights that it was sent (also a RuntimeError)
        ├── LearnerError          an update could not be made (also a RuntimeError)
        │   └── NotFiniteError    a number that would be trained on is NaN or infinite; nothing was changed
        ├── CheckpointError       no checkpoint can be trusted (also an OSError)
        ├── ClusterError          the Ray cluster that a run is on is gone (also a RuntimeError)
        ├── DiagnosedError        the diagnosis found what `doctor.stop_on` names (also a RuntimeError)
        └── Stopped               a signal asked the run to stop, and it did, after saving: exit code 128 + signal

Two more live in `gnomon.rewards.base` and never end a run: a verifier raises them about one sample.

    GnomonError
    ├── VerifierError             this sample cannot be judged: an error, not a zero (also a ValueError)
    └── NotApplicable             this reward says nothing about this sample; the other rewards still count

Each message says what was wrong, with the value, and what to do. All errors can be pickled.
"""

import dataclasses
import difflib
import errno
import importlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints


class GnomonError(Exception):
    """The root: `except gnomon.GnomonError` catches what gnomon raises on purpose."""


class UserError(GnomonError):
    """The input is wrong; nothing was loaded, changed or lost."""


class ConfigError(UserError, ValueError):
    """A configuration key, value, name or composition of pieces is wrong."""


class DatasetError(UserError, ValueError):
    """Rows of a dataset cannot be used; the message lists file, row, field and reason for each."""


class ModelError(UserError, OSError):
    """A model or tokenizer cannot be loaded."""


class RewardError(UserError, TypeError):
    """A reward function cannot be imported, or has a signature that is not known."""


class RunDirectoryError(UserError, OSError):
    """A run directory exists already, is in use, or cannot be written."""


class RunError(GnomonError):
    """The run failed after it began."""


class GradingError(RunError, RuntimeError):
    """More samples than allowed could not be graded."""


class EngineError(RunError, RuntimeError):
    """An engine could not generate."""


class WeightSyncError(RunError, RuntimeError):
    """An engine does not answer with the weights that it was sent."""


class LearnerError(RunError, RuntimeError):
    """The learner could not make an update."""


class NotFiniteError(LearnerError):
    """A loss, gradient, log-probability, value or reward is NaN, infinite or too large; nothing was changed."""


class CheckpointError(RunError, OSError):
    """No checkpoint can be trusted."""


class ClusterError(RunError, RuntimeError):
    """The Ray cluster that the run is on cannot be reached any more."""


class DiagnosedError(RunError, RuntimeError):
    """The diagnosis found what `doctor.stop_on` names; the run ended after a checkpoint, and can go on from it."""


class Stopped(RunError):
    """The run was asked to stop by a signal, and did so after publishing a checkpoint. args: message, signal."""


LIMITS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "a quota on this disk is used up",
    errno.EROFS: "this disk can only be read",
    errno.EFBIG: "a file would be larger than files may be here (ulimit -f raises that, or a quota does)",
    errno.EMFILE: "more files would be open than may be (ulimit -n 4096 raises that)",
    errno.ENFILE: "this machine has no room for more open files",
    errno.ENOMEM: "there is not enough memory (ulimit -v says how much may be taken)",
    errno.EAGAIN: "no more threads or processes can be started (ulimit -u and ulimit -v say what may be taken)",
}
"""What an operating system refuses for want of room, by error number, and what to type."""
# Compiled now: a pattern is compiled where it is first used, and here memory may have run out by then.
_AS_TEXT = (
    (re.compile(r"(?:os error |\[Errno |Os \{ code: )(\d+)"), 0),
    (re.compile("No space left on device"), errno.ENOSPC),
    (re.compile("can't start new thread"), errno.EAGAIN),
    (re.compile("std::bad_alloc"), errno.ENOMEM),
)
_LOST = re.compile("without (exception set|setting an exception)")


def refusal_of(error: BaseException) -> OSError | None:
    """Return what the operating system refused for want of room; None where ``error`` is of another kind.

    Libraries in other languages report such a refusal as text alone.

    >>> refusal_of(RuntimeError("I/O error: File too large (os error 27)"))
    OSError(27, 'I/O error: File too large (os error 27)')
    >>> refusal_of(ValueError("a number"))
    """
    # CPython loses a MemoryError now and then, and what it raises in its place could be a fault of an extension too.
    is_lost = isinstance(error, SystemError) and _LOST.search(str(error)) and memory_limits()
    if is_lost or isinstance(error, MemoryError):
        return OSError(errno.ENOMEM, str(error))
    # tempfile tries every folder and then raises this, whatever each refused for.
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return _refused_temporary(error)
    if isinstance(error, OSError) and error.errno is not None:
        return error if error.errno in LIMITS else None
    for pattern, number in _AS_TEXT:
        if found := pattern.search(str(error)):
            number = number or int(found[1])
            return OSError(number, str(error)) if number in LIMITS else None
    return None


def memory_limits() -> dict[str, int]:
    """Return the limits of memory that this process is under, in bytes, by the options of ulimit that set them."""
    if sys.platform == "win32":
        return {}
    import resource

    limits = {"-d": resource.getrlimit(resource.RLIMIT_DATA)[0], "-v": resource.getrlimit(resource.RLIMIT_AS)[0]}
    return {option: most for option, most in limits.items() if most != resource.RLIM_INFINITY}


def _refused_temporary(error: OSError) -> OSError:
    """Return why nothing temporary can be written, which Python leaves out of the error when it looked everywhere."""
    try:
        # One more try, in the folder that it would have taken, for the errno of its refusal.
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or "/tmp") as probe:
            probe.write(b"blat")
    except OSError as why:
        return OSError(why.errno if why.errno in LIMITS else errno.EROFS, error.strerror)
    return OSError(errno.ENOSPC, error.strerror)


_BOUND = re.compile(
    r"(?P<least>[-\d.]+)(?: \([\w ]+\))? or more.*|(?P<sign>at least|>=|above|>|below) (?P<edge>[-\d.]+)(?: and below "
    r"(?P<top>[-\d.]+))?.*|in (?P<open>[\[(])(?P<low>[-\d.]+), (?P<high>[-\d.]+)(?P<close>[\])])|finite"
)


def holds(bound: str, value: Any) -> bool:
    """Whether a number, or each of a list, is within a bound in words; what is no number is within all of them.

    >>> holds("at least 1 token", 0), holds("> 0 and finite", float("inf")), holds("in (0, 1]", [1, 0.5])
    (False, False, True)
    """
    if isinstance(value, tuple | list):
        return all(holds(bound, each) for each in value)
    if value is None or isinstance(value, str | Mapping):
        return True
    # The words that a message says are the words that are checked: a bound cannot say one thing and mean another.
    found = _BOUND.fullmatch(bound)
    assert found is not None, f"'{bound}' is no bound in words"
    if bound.endswith("finite") and not math.isfinite(value):
        return False
    if bound == "finite":
        return True
    if found["open"]:
        low, high = float(found["low"]), float(found["high"])
        is_above = value > low if found["open"] == "(" else value >= low
        return bool(is_above and (value < high if found["close"] == ")" else value <= high))
    if found["sign"] == "below":
        return bool(value < float(found["edge"]))
    if found["sign"] in ("above", ">"):
        return bool(value > float(found["edge"]) and (found["top"] is None or value < float(found["top"])))
    return bool(value >= float(found["least"] or found["edge"]))


def dotted(where: str, name: str) -> str:
    """Return the key of a setting below another one.

    >>> dotted("learner", "device"), dotted("", "steps")
    ('learner.device', 'steps')
    """
    return f"{where}.{name}" if where else name


def check_bounds(where: str, piece: object, **bounds: str | tuple[bool, str]) -> None:
    """Refuse ``piece`` when one of its fields is out of bounds, naming that field and its value alone.

    Args:
        where: What comes before the field's name, such as "learner.optimizer".
        bounds: For each field its bound in words, such as "at least 1", "above 0 and below 1" or "in [0, 1)"; or, where
            the words do not say it all, whether the bound holds, and the bound in words. None is within all bounds in
            words.

    Raises:
        ConfigError: A bound does not hold.

    >>> check_bounds("slice", slice(0, -1), start="at least 0", stop="at least 0")
    Traceback (most recent call last):
    ...
    gnomon.core.errors.ConfigError: slice.stop must be at least 0, got -1
    """
    broken = []
    for name, bound in bounds.items():
        value = getattr(piece, name)
        is_within, said = (holds(bound, value), bound) if isinstance(bound, str) else bound
        if not is_within:
            broken.append(f"{dotted(where, name)} must be {said}, got {value!r}")
    if broken:
        raise ConfigError("; ".join(broken))


def check_read(where: str, piece: object, **read: tuple[object, str]) -> None:
    """Refuse what is set in ``piece`` and read only beside another setting, which is not there.

    Args:
        where: As of `check_bounds`.
        piece: A dataclass, of which a field is set that differs from its default; or what is set, by name.
        read: For each field whether it is read, and what has to be set for it.

    Raises:
        ConfigError: Something is set that nothing reads.

    >>> check_read("judge", {"pause": 2}, pause=(False, "attempts = 2"))
    Traceback (most recent call last):
    ...
    gnomon.core.errors.ConfigError: judge.pause = 2 is read only with attempts = 2; set that, or leave pause out
    """
    given = piece
    if not isinstance(given, Mapping):
        # A field that equals its default may have been set to it; that harms nobody.
        defaults = {f.name: f.default for f in dataclasses.fields(piece)}  # type: ignore[arg-type]
        given = {name: value for name, value in vars(piece).items() if value != defaults[name] and value != {}}
    unread = [(name, needed) for name, (is_read, needed) in read.items() if name in given and not is_read]
    if unread:
        said = "{} = {!r} is read only with {}; set that, or leave {} out"
        raise ConfigError("; ".join(said.format(dotted(where, n), given[n], needed, n) for n, needed in unread))


C = TypeVar("C")


def bounded(where: str | None = "", **bounds: str) -> Callable[[type[C]], type[C]]:
    """Check the fields of a dataclass against `check_bounds` whenever it is made; stands below ``@dataclass``.

    What the class checks itself, in ``__post_init__``, comes after it. `bounds_of` are the bounds, so that settings are
    refused before torch is imported (`gnomon.config.reading`).

    Args:
        where: As of `check_bounds`; the name of the class by default, None for fields at the top of an experiment.
        bounds: As of `check_bounds`, in words.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... @bounded(width="> 0")
    ... class Frame:
    ...     width: int
    >>> Frame(0)
    Traceback (most recent call last):
    ...
    gnomon.core.errors.ConfigError: Frame.width must be > 0, got 0
    """

    def with_check(cls: type[C]) -> type[C]:
        own: Callable[[C], None] = vars(cls).get("__post_init__", lambda self: None)

        def __post_init__(self: C) -> None:
            place = cls.__name__ if where == "" else where or ""
            try:
                check_bounds(place, self, **bounds)
                own(self)
            except (AttributeError, KeyError, TypeError, OverflowError):
                # A comparison failed, most often because a field has another type than
                # it says. The type is then named; an error of the check itself goes on.
                _refuse_type(place, self)
                raise

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
        cls.__bounds__ = bounds  # type: ignore[attr-defined]
        return cls

    return with_check


def _refuse_type(where: str, piece: object) -> None:
    """Raise ConfigError for the first field of a dataclass that holds something of another type."""
    for name, hint in get_type_hints(type(piece)).items():
        value, kinds = getattr(piece, name), get_args(hint) or (hint,)
        if not {*kinds} <= {int, float, bool, NoneType}:
            # Tables are built on errors, and known here by name only.
            importlib.import_module("gnomon.core.tables").checked(hint, value, dotted(where, name))
        elif not isinstance(value, (*kinds, int)) or (isinstance(value, int) and abs(value) >= 2**1023):
            said = "a whole number" if float not in kinds else "a number"
            raise ConfigError(f"{dotted(where, name)} = {shortened(repr(value))}: should be {said}")


def bounds_of(cls: type) -> Mapping[str, str]:
    """Return what `bounded` checks of each field of a class, in words."""
    found: Mapping[str, str] = getattr(cls, "__bounds__", {})
    return found


def shortened(text: str, most: int = 80) -> str:
    """Return ``text``, or its beginning and how long it is.

    >>> shortened("a" * 100, 8)
    'aaaaaaaa... (100 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def on_one_line(text: str) -> str:
    r"""Return ``text`` as a message can show it: line ends, control characters and half surrogate pairs are spelled.

    >>> print(on_one_line("two words"), on_one_line("a\nb"))
    two words a\nb
    """
    return text if text.isprintable() else ascii(text)[1:-1]


_LIKENESS = 0.72
"""Share of equal letters, in order, from which a name may be another one misspelt (difflib's ratio)."""
_MOST_NAMES, _FEW_NAMES = 48, 12
"""Of more known names a message shows the nearest, or the first few."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return a sentence that says ``name`` is unknown and which known name is nearest.

    >>> unknown("term", "x", [])
    "unknown term 'x'. Known: none"
    >>> unknown("algorithm", "grop", ["grpo", "spo"])
    "unknown algorithm 'grop'; did you mean 'grpo'? Known: grpo, spo"
    >>> unknown("algorithm", "gpro", ["grpo", "gspo"])
    "unknown algorithm 'gpro'; did you mean 'grpo'? Known: grpo, gspo"
    >>> unknown("number", "x", map(str, range(100, 200)))
    "unknown number 'x'. Known: 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111 and 88 more"
    """
    # Sorted, so that a message is the same in every process.
    name, names = str(name), sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    # Two letters that changed places are the likeliest slip, and no worse a match than others.
    near.sort(key=lambda candidate: sorted(candidate) != sorted(name))
    meant = next((candidate for candidate in near if _is_slip(name, candidate)), None)
    hint = f"; did you mean '{meant}'?" if meant else "."
    shown = names if len(names) <= _MOST_NAMES else near or names[:_FEW_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"unknown {kind} '{shortened(on_one_line(name))}'{hint} Known: {', '.join(shown) or 'none'}{more}"


def no_file(path: Path, endings: Iterable[str]) -> str:
    """Return a sentence that says ``path`` does not exist, with the files beside it that may be meant.

    Args:
        path: A file or folder that is not there.
        endings: Of files that may be meant where no name is like it.
    """
    folder = path.parent
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which does not exist"
    if not folder.is_dir():
        return f"{path} does not exist, nor does its folder {folder}"
    fitting = (*endings, path.suffix or "/")
    names = sorted(each.name for each in folder.iterdir() if each.name.lower().endswith(fitting))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4)
    near = near or [name for name in names if name.lower().endswith(tuple(endings))][:3]
    hint = f"did you mean {', '.join(str(folder / name) for name in near)}?" if near else "nothing there is like it"
    return f"{path} does not exist; {hint}"


def _is_slip(name: str, known: str) -> bool:
    """Whether ``name`` may be a slip of the finger: a letter more, less, other or swapped, or nearly all the same.

    >>> [_is_slip(*pair) for pair in [("aks", "ask"), ("toi", "toy"), ("save_steps", "steps"), ("version", "train")]]
    [True, True, False, False]
    """
    if difflib.SequenceMatcher(None, name, known).ratio() >= _LIKENESS or sorted(name) == sorted(known):
        return True
    # What is left after the common beginning and end is where the two differ.
    first, second = name, known
    while first and second and first[0] == second[0]:
        first, second = first[1:], second[1:]
    while first and second and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    is_one = len(first) <= 1 and len(second) <= 1
    return (is_one or (len(first) == 2 and first == second[::-1])) and len(name) > 1


def named(kind: str, said: str) -> GnomonError | None:
    """Return the error of that name, as it was raised in another process; None for one that is not gnomon's.

    >>> named("EngineError", "gone"), named("ValueError", "bad")
    (EngineError('gone'), None)
    """
    found = globals().get(kind)
    return found(said) if isinstance(found, type) and issubclass(found, GnomonError) else None
