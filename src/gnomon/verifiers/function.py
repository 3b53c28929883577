"""A user's own reward function, named as ``module:function`` or ``path.py:function``."""

import asyncio
import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gnomon.errors import RewardError, unknown
from gnomon.user_file import run_as_module
from gnomon.verifiers.base import Sample, Verifier, VerifierError
from gnomon.verifiers.cause import cause
from gnomon.verifiers.signatures import Function, Signature, signature


@dataclass(frozen=True)
class UserFunction(Verifier):
    """What a user's function returns.

    function: "module:function", found from the working directory or the Python path, or "path.py:function".
    messages: pass prompt and completion as chat messages, ``[{"role": ..., "content": ...}]``, or as text; "auto" gives
        TRL's list form messages where the dataset holds messages, as TRL does, and everything else text.
    over: what the list form is called with: "group", all answers to a question at once; "sample", a list of one for
        each; "auto" is the former, and the other signatures are always called for each sample.
    Signatures, sync or async: `verifiers/signatures.py`. None is an error in our signature and in verl's;
    None in TRL's list means that this reward does not apply to the sample.
    Raises: RewardError at construction when ``function`` has another form, in `prepare` when it is not found.
    """

    function: str
    kind: Literal["function"] = field(default="function", kw_only=True)
    messages: bool | Literal["auto"] = "auto"
    over: Literal["auto", "sample", "group"] = "auto"

    def __post_init__(self) -> None:
        source, _, function = self.function.rpartition(":")
        if not source.strip() or not function.isidentifier():
            raise RewardError(
                f"reward function '{self.function}' is named as module:function or path.py:function, "
                "for example rewards.py:score"
            )

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.function.rpartition(":")[2]

    def prepare(self) -> None:
        """Import the function and read its signature.

        Raises: RewardError saying what was tried, and the nearest names.
        """
        _, how = find(self.function)
        if self.over == "group" and how.style != "trl":
            raise RewardError(
                f"reward '{self.function}' is called for each sample; over = \"group\" is for the list form, "
                "(prompts, completions, **columns) -> list"
            )

    @property
    def is_joint(self) -> bool:
        """Whether it is called once for all answers to a question; imports it."""
        return self.over != "sample" and find(self.function)[1].style == "trl"

    def __call__(self, sample: Sample) -> float:
        """Call it with this sample; await it where it must be awaited."""
        _, how = find(self.function)
        reward = how.reward(self._called((sample,)))
        if reward is None:
            raise VerifierError("returned None")
        return reward  # type: ignore[no-any-return] # checked where all rewards are

    def together(self, samples: Sequence[Sample]) -> list[Any]:
        """Return the reward of each answer to one question, from one call; None where none applies.

        Raises: VerifierError, or whatever the function raises, for all of them.
        """
        return find(self.function)[1].rewards(self._called(samples), len(samples))

    def _called(self, samples: Sequence[Sample]) -> Any:
        function, how = find(self.function)
        is_chat = how.style == "trl" and all(sample.messages for sample in samples)
        result = function(**how.arguments(samples, is_chat if self.messages == "auto" else self.messages))
        return _runner().run(_await(result)) if inspect.isawaitable(result) else result


@functools.cache
def find(named: str) -> tuple[Function, Signature]:
    """Import a function by its name.

    Raises: RewardError when the file, the module or the function is not there, when importing raises, or when
        its signature is not known.
    """
    function = find_member(named)
    return function, signature(function, named)


def find_member(named: str, role: str = "reward", kind: str = "function") -> Any:
    """Import what can be called by its name, "module:name" or "path.py:name".

    role: what it is to be, for messages: "reward", "environment", "tool". kind: "function" or "class".
    Raises: RewardError when the file, the module or the name is not there, or when importing raises.
    """
    source, _, name = named.rpartition(":")
    module = _from_file(source, f"{role} '{named}'") if source.endswith(".py") else _from_module(source, role, named)
    members = vars(module)
    if name not in members:
        here = [k for k, v in members.items() if callable(v) and not k.startswith("_")]
        raise RewardError(f"{role} '{named}': {unknown(kind, name, here)}")
    if not callable(members[name]):
        raise RewardError(f"{role} '{named}' is no {kind} but {type(members[name]).__name__}")
    return members[name]


def _from_file(source: str, said: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        folder = path.parent
        there = [p.name for p in folder.glob("*.py")] if folder.is_dir() else []
        raise RewardError(
            f"{said}: there is no file {path}{_nearest(path.name, there)}; "
            f"a relative path starts at the working directory, {os.getcwd()}"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what it imports from beside it
    # A name of its own: a file called json.py must not replace the json that everyone else imports.
    try:
        return run_as_module(path, f"_reward_{path.stem}")
    except BaseException as error:
        raise RewardError(f"{said}: importing {path} raised {cause(error)}") from error


def _from_module(source: str, role: str, named: str) -> ModuleType:
    if os.getcwd() not in sys.path[:1]:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise RewardError(f"{role} '{named}': importing {source} raised {cause(error)}") from error
        missing = error.name
        parent = missing.rpartition(".")[0]
        folders = vars(sys.modules[parent]).get("__path__", []) if parent in sys.modules else [os.getcwd()]
        near = _nearest(missing.rpartition(".")[2], [m.name for m in pkgutil.iter_modules(folders)])
        raise RewardError(
            f"{role} '{named}': there is no module {missing}{near}; looked in the working directory, "
            f"{os.getcwd()}, and on the Python path; a file is named with its ending, as {source}.py:FUNCTION"
        ) from error
    except BaseException as error:
        raise RewardError(f"{role} '{named}': importing {source} raised {cause(error)}") from error


def _nearest(name: str, names: Iterable[str]) -> str:
    listed = sorted(names)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f" (there are {', '.join(listed[:10])})" if listed else ""


async def _await(result: Any) -> Any:
    return await result


@functools.cache
def _runner() -> "asyncio.Runner":
    # One event loop for all samples: sessions and locks that a module keeps belong to a loop.
    return asyncio.Runner()
