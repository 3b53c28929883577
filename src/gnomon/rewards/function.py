"""A user's own reward function, named as ``module:function`` or ``path.py:function``."""

import copy
import difflib
import functools
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gnomon.core.atomic_files import real_path
from gnomon.core.errors import RewardError, unknown
from gnomon.core.processes.exceptions import exception_text
from gnomon.core.user_code import import_as_module, run_as_module
from gnomon.rewards.base import NotApplicable, Sample, Verifier, VerifierError

# The three signatures of a reward function, told apart by their parameters' names.
#
#     ours   (prompt, completion, **columns) -> float
#     trl    (prompts, completions, **columns) -> list[float | None]
#     verl   (data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}
#
# A function is called by keyword with those of the offered arguments that it names, and with all of them
# when it takes ``**columns``. All three may be ``async def``.

NO_COLUMN = "which is no column of this sample"
"""What the error says of a sample without a column that the function has to have."""
Style = Literal["ours", "trl", "verl"]
Function = Callable[..., Any]

# The parameter that only this style has.
_MARKS: dict[str, Style] = {"completion": "ours", "completions": "trl", "solution_str": "verl"}
# Parameters that can be passed by keyword; all three signatures are called that way.
_ASKABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_KNOWN = (*_MARKS, "prompt", "prompts", "data_source", "ground_truth", "extra_info")


@dataclass(frozen=True)
class Signature:
    """How one function wants to be called.

    Attributes:
        accepted: Its parameters' names.
        required: Those without default.
        takes_all: Whether it has ``**columns``.
    """

    style: Style
    accepted: frozenset[str]
    required: frozenset[str]
    takes_all: bool

    def arguments(self, samples: Sequence[Sample], messages: bool) -> dict[str, Any]:
        """Return what to call the function with: one sample, or in the list form several answers to one question.

        Args:
            messages: Whether prompt and completion are lists of chat messages instead of text.

        Raises:
            VerifierError: If it needs what the samples do not have.
        """
        sample = samples[0]
        offered = _trl(samples, messages) if self.style == "trl" else _OFFERS[self.style](sample, messages)
        missing = sorted(self.required - offered.keys())
        if missing:
            raise VerifierError(
                f"needs {', '.join(missing)}, {NO_COLUMN}; it has "
                f"{', '.join(sorted(map(str, sample.columns))) or 'none'}, and the question as "
                f"{'prompts' if self.style == 'trl' else 'prompt'}"
            )
        everything = self.takes_all and self.style != "verl"  # verl passes settings there, never columns
        return {k: v for k, v in offered.items() if k in self.accepted or everything}

    def rewards(self, result: Any, count: int) -> list[Any]:
        """Return the reward of each of ``count`` completions that the list form returned, None where none applies.

        Raises:
            VerifierError: For what is no list of that length.
        """
        # Arrays of NumPy and torch are accepted without importing either: a grading process loads no torch.
        is_array = len(getattr(result, "shape", ())) == 1 and hasattr(result, "tolist")
        found = result.tolist() if is_array else result
        if not isinstance(found, list | tuple):
            raise VerifierError(f"returned {type(result).__name__}, expected a list of {count} numbers")
        if len(found) != count:
            raise VerifierError(f"returned {len(found)} rewards for {count} completion{'s' if count > 1 else ''}")
        return list(found)

    def reward(self, result: Any) -> Any:
        """Return the one reward in what the function returned, not yet checked to be a number.

        Raises:
            VerifierError: For another shape.
            NotApplicable: For TRL's ``[None]``.
        """
        if self.style == "trl":
            (found,) = self.rewards(result, 1)
            if found is None:
                raise NotApplicable("returned [None]")
            return found
        if self.style == "verl" and isinstance(result, dict):
            if "score" not in result:
                raise VerifierError(f"returned a dict without 'score': {', '.join(map(str, result))}")
            return result["score"]
        return result


def signature(function: Function, where: str) -> Signature:
    """Return the function's signature.

    Args:
        where: How the user named it, for messages.

    Raises:
        RewardError: That lists the three signatures when it has none of them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward '{where}': its parameters cannot be read ({error}); {_HOW}") from error
    names = [p.name for p in parameters if p.kind in _ASKABLE]
    shown = f"({', '.join(map(str, parameters))})"
    bare = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if bare:
        raise RewardError(f"reward '{where}' {shown}: {', '.join(bare)} cannot be passed by name; {_HOW}")
    marks = [name for name in names if name in _MARKS]
    if len(marks) != 1:
        raise RewardError(f"reward '{where}' {shown}: {_why(names, marks)}; {_HOW}")
    found = Signature(
        style=_MARKS[marks[0]],
        accepted=frozenset(names),
        required=frozenset(p.name for p in parameters if p.kind in _ASKABLE and p.default is inspect.Parameter.empty),
        takes_all=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )
    if "self" in found.required:
        raise RewardError(f"reward '{where}' {shown} is a method of a class; give that of an object, Rewards().score")
    unknown_here = sorted(found.required & _NEVER.keys())
    if found.style == "trl" and unknown_here:
        raise RewardError(f"reward '{where}' {shown}: {unknown_here[0]} is not passed; {_NEVER[unknown_here[0]]}")
    return found


_NEVER = {
    "completion_ids": "use the text in completions",
    "completions_ids": "use the text in completions",
    "prompt_ids": "use the text in prompts",
}
_HOW = (
    "a reward function is (prompt, completion, **columns) -> float, TRL's (prompts, completions, **columns) "
    "-> list[float | None], or verl's (data_source, solution_str, ground_truth, extra_info) -> float or dict"
)


def _why(names: list[str], marks: list[str]) -> str:
    if marks:
        return f"has both {' and '.join(marks)}, so it is not clear how to call it"
    if not names:
        return "has no named parameter"
    strange = [name for name in names if name not in _KNOWN]
    if strange and strange[0] in _NEVER:
        return f"{strange[0]} is not passed; {_NEVER[strange[0]]}"
    return unknown("parameter", strange[0], _KNOWN) if strange else "has none of " + ", ".join(_MARKS)


def _ours(sample: Sample, messages: bool) -> dict[str, Any]:
    asked, answered = spoken_by(sample, messages)
    return {**_named(sample.columns), "prompt": asked, "completion": answered}


def _trl(samples: Sequence[Sample], messages: bool) -> dict[str, Any]:
    spoken = [spoken_by(sample, messages) for sample in samples]
    names = dict.fromkeys(name for sample in samples for name in _named(sample.columns))
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    # TRL passes these to every function of its list form; a function that names them must still be callable.
    stand_ins = {"trainer_state": _Unknown(), "log_extra": _ignore, "log_metric": _ignore}
    return {**columns, **stand_ins, "prompts": [a for a, _ in spoken], "completions": [c for _, c in spoken]}


def _verl(sample: Sample, messages: bool) -> dict[str, Any]:
    nested = sample.columns.get("reward_model")
    nested_truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
    # verl's own datasets keep the truth under reward_model; the other
    # two columns serve rows that were written for gnomon or for TRL.
    truths = (nested_truth, sample.columns.get("ground_truth"), sample.columns.get("answer"))
    offered = {
        **_named(sample.columns),
        "data_source": sample.columns.get("data_source", ""),
        "solution_str": sample.completion,
        "extra_info": sample.columns.get("extra_info") or {},
    }
    # Without a truth the key is left out rather than None, so that the message names ground_truth as a missing column.
    truth = next((t for t in truths if t is not None), None)
    return offered if truth is None else {**offered, "ground_truth": truth}


def spoken_by(sample: Sample, messages: bool) -> tuple[Any, Any]:
    """Return question and answer as texts, or as lists of chat messages."""
    if not messages:
        return sample.prompt, sample.completion
    asked = [dict(message) for message in sample.messages] or [{"role": "user", "content": sample.prompt}]
    # Of a conversation every message, as TRL has it.
    answer = {"role": "assistant", "content": sample.completion}
    return asked, list(sample.columns.get("conversation") or [answer])


def _named(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if isinstance(name, str)}


class _Unknown:
    """What stands for TRL's trainer_state: a reward that reads the step from it would be silently wrong."""

    # Reading an attribute is the fault, not taking the parameter: many functions accept trainer_state and never use it.
    def __getattr__(self, name: str) -> Any:
        raise VerifierError(f"reads trainer_state.{name}, and a reward is told no step here: make it depend on none")


def _ignore(*_: Any, **__: Any) -> None:
    """Stand in for TRL's logging callbacks."""


_OFFERS: dict[Style, Callable[[Sample, bool], dict[str, Any]]] = {"ours": _ours, "verl": _verl}


@dataclass(frozen=True)
class UserFunction(Verifier):
    """What a function of your own returns.

    `rewards/function.py` lists the signatures, sync or async. None is an error in gnomon's signature and in verl's;
    None in TRL's list means that this reward does not apply to the sample.

    Attributes:
        function: "module:function", found from the working directory or the Python path, or "path.py:function".
        kind: "function".
        messages: Whether prompt and completion are passed as chat messages, ``[{"role": ..., "content": ...}]``, or as
            text. "auto" gives TRL's list form messages where the dataset holds messages, as TRL does, and text
            otherwise.
        over: What the list form is called with: "group" is all answers to a question at once, "sample" a list of one
            for each answer. "auto" is the former. The other signatures are always called for each sample.

    Raises:
        RewardError: ``function`` has another form; `prepare` raises it when there is no such function.
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

        Raises:
            RewardError: Saying what was tried, and the nearest names.
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
        reward = how.reward(self._call_function((sample,)))
        if reward is None:
            raise VerifierError("returned None")
        return reward  # type: ignore[no-any-return] # checked where all rewards are

    def together(self, samples: Sequence[Sample]) -> list[Any]:
        """Return the reward of each answer to one question, from one call; None where none applies.

        Raises:
            VerifierError: If it returns what it may not; what the function raises goes through.
        """
        return find(self.function)[1].rewards(self._call_function(samples), len(samples))

    def _call_function(self, samples: Sequence[Sample]) -> Any:
        function, how = find(self.function)
        # TRL gives the list form messages exactly when the dataset holds messages.
        is_chat = how.style == "trl" and all(sample.messages for sample in samples)
        # What a function changes in its columns is not what the next reward, or a vote, should see.
        samples = [replace(sample, columns=copy.deepcopy(dict(sample.columns))) for sample in samples]
        result = function(**how.arguments(samples, is_chat if self.messages == "auto" else self.messages))
        # Runner.run takes a coroutine only, and an awaitable may be a
        # future or an object of the user's: `_await` makes one of any.
        return _runner().run(_await(result)) if inspect.isawaitable(result) else result


@functools.cache
def find(named: str) -> tuple[Function, Signature]:
    """Import a function by its name.

    Raises:
        RewardError: If the file, the module or the function is not there, when importing raises, or when its signature
            is not known.
    """
    function = find_member(named)
    return function, signature(function, named)


def find_member(named: str, role: str = "reward", kind: str = "function") -> Any:
    """Import what can be called by its name, "module:name" or "path.py:name".

    Args:
        role: What it is to be, for messages: "reward", "environment", "tool".
        kind: "function" or "class".

    Raises:
        RewardError: If the file, the module or the name is not there, or when importing raises.
    """
    source, _, name = named.rpartition(":")
    module = _from_file(source, f"{role} '{named}'") if source.endswith(".py") else _from_module(source, role, named)
    members = vars(module)
    # Read by vars() and not by getattr(): a module's own __getattr__ could answer to any misspelt name.
    if name not in members:
        here = [k for k, v in members.items() if callable(v) and not k.startswith("_")]
        raise RewardError(f"{role} '{named}': {unknown(kind, name, here)}")
    if not callable(members[name]):
        raise RewardError(f"{role} '{named}' is no {kind} but {type(members[name]).__name__}")
    return members[name]


def _from_file(source: str, said: str) -> ModuleType:
    path = real_path(Path(source).expanduser())
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
        raise RewardError(f"{said}: importing {path} raised {exception_text(error)}") from error


def _from_module(source: str, role: str, named: str) -> ModuleType:
    if os.getcwd() not in sys.path[:1]:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return import_as_module(source)
    except ModuleNotFoundError as error:
        # The module itself was found, and something that it imports is missing: another fault with another fix.
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise RewardError(f"{role} '{named}': importing {source} raised {exception_text(error)}") from error
        # For "a.b.c" the missing part may be "a.b"; near names are looked up in the folder of its parent.
        missing = error.name
        parent = missing.rpartition(".")[0]
        folders = vars(sys.modules[parent]).get("__path__", []) if parent in sys.modules else [os.getcwd()]
        near = _nearest(missing.rpartition(".")[2], [m.name for m in pkgutil.iter_modules(folders)])
        raise RewardError(
            f"{role} '{named}': there is no module {missing}{near}; looked in the working directory, "
            f"{os.getcwd()}, and on the Python path; a file is named with its ending, as {source}.py:FUNCTION"
        ) from error
    except BaseException as error:
        raise RewardError(f"{role} '{named}': importing {source} raised {exception_text(error)}") from error


def _nearest(name: str, names: Iterable[str]) -> str:
    listed = sorted(names)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f" (there are {', '.join(listed[:10])})" if listed else ""


async def _await(result: Any) -> Any:
    return await result


@functools.cache
def _runner() -> Any:
    import asyncio

    # One event loop for all samples: sessions and locks that a module keeps belong to a loop.
    return asyncio.Runner()
