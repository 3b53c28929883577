"""An experiment as it was written: tables and overrides, and a check of their names. No torch.

Torch and transformers take seconds of processor time to import. A misspelt name is found without them, from
known_names.json, which `gnomon config --names` writes and a test compares with the code.
"""

import dataclasses
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from gnomon.config.foreign_names import COMPOSED, FOREIGN, taken_out, translated
from gnomon.config.name_checks import (
    check_cuda,
    check_data,
    check_files,
    check_modules,
    check_pieces,
    declared_in,
    facts_of,
    has_gpu,
    known_names,
    needed_packages,
    of_verb,
    type_flaw,
    without_numbers,
)
from gnomon.core.atomic_files import read_plain, read_plain_text
from gnomon.core.combinations import (
    SettingsByKey,
    check_drawing,
    check_engines,
    check_learner,
    check_meaning,
    check_reference,
    of_table,
)
from gnomon.core.errors import (
    ConfigError,
    DatasetError,
    RunDirectoryError,
    UserError,
    holds,
    no_file,
    shortened,
    unknown,
)
from gnomon.core.optional import check_installed
from gnomon.core.sections import (
    ENGINE_KINDS,
    TABLE_SUFFIXES,
    BudgetConfig,
    CheckpointConfig,
    ClusterConfig,
    EngineConfig,
    EvalSampling,
    GradingConfig,
    RecordConfig,
    SamplingConfig,
    StalenessConfig,
    check_date,
    check_texts,
    check_values,
)
from gnomon.core.tables import build, canonical, flat, parse_toml, set_path, value_at
from gnomon.diagnosis.finding import SEVERITIES
from gnomon.models.place import (
    BUILT_IN,
    check_device,
    check_hub,
    check_modules_of,
    check_place,
)
from gnomon.records.directory import NO_TASK, RunDirectory
from gnomon.rewards.sandbox.packages import check_names as check_packages

NO_ALGORITHM = 'missing algorithm; write algorithm = "grpo" (`gnomon algorithms` lists them)'
OVERRIDE_HINT = "an override is key=value, such as steps=50 or algorithm.num_generations=4"
_PYTHON: Mapping[str, Any] = {"True": True, "False": False}
"""Truth values as other libraries' command lines have them."""
_OPENING = ("{", "[", '"', "'")

_OPEN = ("algorithm", "chat_template_kwargs", "environment", "evaluation", "rewards", "task")
"""Sections whose keys depend on a kind or a piece."""
_WORDS = ("algorithm", "cluster", "engine", "environment", "task")
"""Sections that a word may stand for, and so may entries of lists."""


def built_in() -> dict[str, str]:
    """Return the built-in experiments, name to TOML text."""
    folder = files("gnomon.config") / "recipes"
    return {p.name.removesuffix(".toml"): p.read_text() for p in folder.iterdir() if p.name.endswith(".toml")}


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a TOML file or of a built-in experiment; a table is returned as it is."""
    if isinstance(source, Mapping):
        return dict(source)
    known = built_in()
    if str(source) in known:
        # A built-in name wins over a file of that name.
        return tomllib.loads(known[str(source)])
    path = Path(source)
    if "=" in str(source) and not os.path.exists(path):
        file = str(source).partition("=")[2]
        first = f": {file}" if file.endswith(".toml") else f", such as quickstart {source}"
        raise ConfigError(f"'{source}' is a setting, and an experiment comes first{first}")
    # Without an ending it was meant as a built-in name.
    if not re.fullmatch(r"\.[A-Za-z]\w*", path.suffix) and not os.path.exists(path):
        raise ConfigError(f"{unknown('experiment', str(source), known)}; or the path of a TOML file{_setting(path)}")
    try:
        return parse_toml(read_plain(path).decode("utf-8"))
    except OSError as error:
        said = no_file(path, (".toml",)) if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ConfigError(f"cannot read the experiment {path}: {said}{_setting(path)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}{_setting(path)}") from error


def _setting(path: Path) -> str:
    """Return what to type for what is a setting where an experiment is expected; nothing for another name."""
    name = str(path)
    if path.suffix == ".toml":
        return ""
    if name.lower().endswith((*TABLE_SUFFIXES, ".py")):
        key, what = ("rewards", f"{name}:FUNCTION") if path.suffix == ".py" else ("task", name)
        return f". An experiment is a TOML file or a built-in name; this file is a setting: quickstart {key}={what}"
    if name in known_names()["algorithms"]:
        return f". '{name}' is an algorithm: quickstart algorithm={name}"
    if name in known_names()["tasks"]:
        return f". '{name}' is a task: quickstart task={name}"
    if os.path.isfile(path / "experiment.toml"):
        run = shlex.quote(name)
        return f". It is a run: gnomon resume {run} goes on with it, gnomon train {run}/experiment.toml begins it again"
    # A built-in experiment with that model is the best start.
    having = [recipe for recipe, text in built_in().items() if tomllib.loads(text).get("model") == name]
    if having or os.path.isdir(path) or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return f". A model is a setting: {min(having, key=len, default='quickstart')} model={name}"
    return ""


def as_json(value: Any) -> Any:
    """Return what a file can hold of a value: dates as texts.

    Raises:
        ConfigError: It holds itself, or a table has a key that is no text.
    """
    try:
        return json.loads(json.dumps(value, default=str))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"an experiment holds texts, numbers, lists and tables, and this one cannot be read: {error}"
        ) from error


def parse_override(override: str) -> tuple[str, Any]:
    """Return path and value of "path=value"; the value is TOML, or else text; where text is asked, a bracket is text.

    Raises:
        ConfigError: For another form.
    """
    key, equals, text = override.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not key or not all(p.isidentifier() or p.isdecimal() for p in key.replace("-", "_").split(".")):
        raise ConfigError(f"cannot read the override {override!r}: {OVERRIDE_HINT}")
    kinds = known_names()["keys"].get(without_numbers(key.replace("-", "_")), {}).values()
    # The setting is text everywhere, so a bracket begins no list.
    if {*kinds} == {"text"} and text.strip()[:1] in ("[", "{"):
        return key.replace("-", "_"), text  # "[0-9]{3}" is no list
    try:
        return key.replace("-", "_"), as_json(parse_toml(f"value = {text}")["value"])
    except (ValueError, RecursionError) as error:
        if not isinstance(error, tomllib.TOMLDecodeError):
            raise ConfigError(f"the value of {key} is no sound TOML: {error}") from error
        is_text = re.match(r"\s*\{[A-Za-z_][\w.]*\}", text)  # "{question} Think.", which no table can be
        if text.strip()[:1] in _OPENING and not is_text:
            raise ConfigError(
                f"{key} = {text} is not TOML: {error}; is a bracket or a quote missing, or did the shell take one? "
                f'Quote the whole override, as in \'{key}=["a", "b"]\' or \'{key}={{piece = "TruncatedIS"}}\''
            ) from error
        return key.replace("-", "_"), _PYTHON.get(text, text)


def settle_length(whole: dict[str, Any], overridden: set[str]) -> None:
    """Leave out the steps or the epochs of a file where an override says the other.

    Raises:
        ConfigError: For both.
    """
    if "steps" not in whole or "epochs" not in whole:
        return
    # What the command line says counts more than the file; both in one place is a contradiction.
    newer = [key for key in ("steps", "epochs") if key in overridden]
    if len(newer) != 1:
        raise ConfigError(
            f"steps = {whole['steps']} and epochs = {whole['epochs']} both say how long the run is; leave one out"
        )
    whole.pop("epochs" if newer == ["steps"] else "steps")


def check_names(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str | tuple[str, Any]],
    algorithms: Sequence[str] = (),
    verb: str = "",
    is_here: bool = True,
    run_dir: Path | None = None,
) -> dict[str, Any]:
    """Refuse what does not exist, has a wrong type, or cannot be meant together, as far as that is known without torch.

    What may be right is left to the code that builds the experiment.

    Args:
        source: As in `read`.
        overrides: Settings as ``key=value``, or as a key and its value.
        algorithms: Names of algorithms in place of the experiment's.
        verb: "sft" or "reward-model", which use the experiment's algorithm only where they are about it.
        is_here: Whether it is to run on this machine.
        run_dir: Where a run is to be written; None writes none.

    Returns:
        What holds of the settings that are given, by their keys, and the name of the algorithm as "algorithm".

    Raises:
        ConfigError, ModelError, RunDirectoryError: The message has the nearest known name.
    """
    table = dict(read(source))
    foreign, _ = translated(taken_out(table))
    settings, _ = translated([parse_override(o) if isinstance(o, str) else o for o in overrides])
    # In the order in which they count: the file, its foreign names, the command line.
    given = [*_flat(table), *foreign, *settings]
    last, faults = latest(given), dict[str, UserError]()
    # Keys first: a value of an unknown key has no type to compare with.
    for key, _ in given:
        with _noted(faults):
            _check_key(key)
    if faults:
        raise _together(faults)
    own = (value for key, value in given if key.partition(".")[0] == "algorithm")
    is_own = any(re.search("\\w:\\w", str(value)) for value in own)  # path.py:NAME has fields of its own
    for key, value, kinds in [
        *((key, value, _kinds([(key, value)])) for key, value in as_json(table).items()),
        *((key, value, _kinds([*table.items(), *foreign, *settings])) for key, value in (*foreign, *settings)),
    ]:
        if not (is_own and key.partition(".")[0] == "algorithm"):
            with _noted(faults):
                _check_value(*_nested(key, value), kinds)
    named = last.get("algorithm", last.get("algorithm.preset"))
    if verb:
        with _noted(faults):
            named = of_verb(verb, named, dict(settings))
    for name, place in ((named, ""), *((each.strip(), f"{each}: ") for each in algorithms)):
        with _noted(faults):
            check_algorithm(name, place)
    for check in (
        _check_tasks, _check_rewards, _check_engine, check_files, check_modules, check_pieces, _check_rules,
        _check_lora, _check_runs,
    ):  # fmt: skip
        with _noted(faults):
            check(last)
    with _noted(faults):
        _check_beginning(last, is_here, bool(verb or algorithms))
    with _noted(faults):
        if run_dir is not None:
            _check_run_dir(run_dir, last)
    with _noted(faults):
        check_installed(needed_packages(flat(last)) if is_here else {})
    with _noted(faults):
        settle_length(dict(given), {key for key, _ in settings})
    if not faults:
        # Combinations only where every name and type is sound: else one slip would be reported twice.
        for name in [*algorithms] or [str(named)]:
            with _noted(faults):
                _check_combinations(given, name, is_here)
            with _noted(faults):
                check_data(last, name if is_here else "")
    # The hub is asked only where nothing else is wrong.
    if not faults and is_here:
        _check_models(last)
    if faults:
        raise _together(faults)
    return {**last, "algorithm": named}


def _check_models(last: Mapping[str, Any]) -> None:
    """Ask the hub for models that are neither built in nor here."""
    for key, model in flat(last).items():
        named = isinstance(model, str) and re.fullmatch(_MODELS, key) and model not in (*BUILT_IN, *_REFERENCES)
        if named and not os.path.exists(os.path.expanduser(model)):
            check_hub(model)


_MODELS = r"model|algorithm\.reference(\.tasks\.\d+)?\.model|rewards\.\d+(\.verifier)?\.model"
_REFERENCES = ("start", "average", "policy")


def latest(given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what holds of settings one after the other: a later one replaces all below its key.

    >>> latest([("task.kind", "table"), ("task.path", "a.csv"), ("task", "arithmetic")])
    {'task': 'arithmetic'}
    """
    last: dict[str, Any] = {}
    for key, value in given:
        # A table that is set anew forgets what was said of its parts.
        last = {each: known for each, known in last.items() if not each.startswith(f"{key}.")} | {key: value}
    return last


_SECTIONS = {
    "budget": BudgetConfig, "checkpoints": CheckpointConfig, "cluster": ClusterConfig, "engine": EngineConfig,
    "evaluation.sampling": EvalSampling, "grading": GradingConfig, "records": RecordConfig,
    "sampling": SamplingConfig, "staleness": StalenessConfig,
}  # fmt: skip
_OWN_FACTS = ("num_generations", "scope", "routing", "demonstrated", "updates.minibatches")
"""What an algorithm says itself, and no piece of it changes."""


def _check_combinations(given: Sequence[tuple[str, Any]], name: Any, is_here: bool) -> None:
    """Refuse settings that cannot be meant together, as far as they say so without the algorithm's pieces."""
    known = known_names()
    # The defaults with everything that was given over them, as far as it is known without building the experiment.
    settings: dict[str, Any] = dict(known["defaults"])
    for key, value in given:
        key = {"engine": "engine.kind", "num_generations": "algorithm.num_generations"}.get(key, key)
        if key == "cluster" and isinstance(value, str):
            settings |= flat({"cluster": ClusterConfig.named(value)})
        elif key == "lora" or key.startswith("lora."):
            settings |= {"lora.rank": 1, **flat({key: value})}
        elif key == "environment" and isinstance(value, str):
            settings |= {"environment.kind": "class", "environment.use": value}
        else:
            settings |= flat({key: value})
    sections: dict[str, type] = dict(_SECTIONS)
    if any(key.startswith("environment.") for key in settings) and settings.get("environment.use") != "none":
        sections["environment"] = import_module("gnomon.tasks.environment").EnvironmentConfig
    for section, cls in sections.items():
        own: dict[str, Any] = {}
        for key, value in settings.items():
            if key.startswith(f"{section}."):
                set_path(own, key.removeprefix(f"{section}."), value)
        build(cls, own, section)
    # What is known of the preset; nothing of a user's own algorithm.
    facts = facts_of(str(name))
    found = dict(facts or {})
    its_own = {key: value for key, value in settings.items() if key.startswith("algorithm.")}
    # A piece was changed, so only those facts hold that no piece decides.
    if {key.removeprefix("algorithm.") for key in its_own} - {*_OWN_FACTS, "preset"} or set(settings) & {
        *known["aliases"]
    }:
        found = {key: value for key, value in found.items() if key.removeprefix("algorithm.") in _OWN_FACTS[:-1]}
    said = {f"algorithm.{name}": known["usual facts"][f"algorithm.{name}"] for name in _OWN_FACTS}
    found |= {key: value for key, value in its_own.items() if type(value) is type(said.get(key))}
    if "prompts_per_step" in settings:
        found.pop("algorithm.num_generations", None)
    plain = {key: value for key, value in settings.items() if key not in its_own}
    if facts and not facts["algorithm.hints"]:  # a preset whose reference is the usual one
        where, usual = "algorithm.reference", known["reference"]
        named = {key.removeprefix(f"{where}.").partition(".")[0]: value for key, value in its_own.items()}
        check_reference(where, {name: v for name, v in named.items() if name in usual and v != usual[name]})
    s = of_table({"algorithm.name": str(name).lower(), **plain, **found})
    check_meaning(s)
    if is_here:
        for check in (check_drawing, check_engines, check_learner):
            check(SettingsByKey({**s, **({"device": "cpu"} if s["device"] == "auto" and not has_gpu() else {})}))


def _check_asked(reward: Any, place: str) -> None:
    """Refuse a judge or a reward model whose settings do not fit each other; their classes need no torch."""
    own = reward.get("verifier", reward) if isinstance(reward, Mapping) else {}
    name = {"judge": "RubricJudge", "model": "RewardModel"}.get(str(own.get("kind")))
    if name is not None:
        cls = getattr(import_module(f"gnomon.rewards.{own['kind']}"), name)
        build(
            cls, {key: value for key, value in own.items() if key in {f.name for f in dataclasses.fields(cls)}}, place
        )


def _check_rules(last: Mapping[str, Any]) -> None:
    """Refuse names of diagnosis rules that do not exist."""
    rules = known_names()["rules"]
    for key, kind, known in (("rules", "rule", rules), ("stop_on", "severity or rule", [*SEVERITIES, *rules])):
        for name in _texts(last.get(f"doctor.{key}")):
            # "-rule" takes a rule out of the list.
            bare = name.removeprefix("-") if key == "rules" else name
            if bare not in known:
                raise ConfigError(f"doctor.{key}: {unknown(kind, bare, known)}")


def _check_tasks(last: Mapping[str, Any]) -> None:
    sets = [each.get("task") if isinstance(each, Mapping) else each for each in _list(last.get("evaluation.tasks"))]
    whole = {name: last.get(f"task.{name}") for name in ("kind", "path", "parts", "generator")}
    for given in (whole, last.get("task"), last.get("evaluation.task"), *sets):
        parts = _list(given.get("parts")) if isinstance(given, Mapping) else []
        for named in (given, *(part.get("task") if isinstance(part, Mapping) else part for part in parts)):
            _check_task(named)


_TRL = {"accuracy_reward": "mathematics", "reasoning_accuracy_reward": "mathematics", "think_format_reward": "format"}


def _check_rewards(last: Mapping[str, Any]) -> None:
    known = known_names()["rewards"]
    # The kinds of tables were looked at with their other keys.
    for number, kind in ((n, each) for n, each in enumerate(_list(last.get("rewards"))) if isinstance(each, str)):
        if kind.endswith(".py"):
            raise ConfigError(f"rewards[{number}] = '{kind}': name the function in that file too, as {kind}:FUNCTION")
        if ":" not in kind and kind not in known:
            ours = f"; TRL's {kind} is '{_TRL[kind]}' here" if kind in _TRL else _several("rewards", kind)
            raise ConfigError(f"rewards[{number}].verifier: {unknown('kind', kind, known)}{ours}")
    for number, each in enumerate(_list(last.get("rewards"))):
        _check_asked(each, f"rewards[{number}].verifier")
        named = each if isinstance(each, str) else each.get("function")
        if isinstance(named, str) and (function := declared_in(named)) is not None:
            from gnomon.rewards.function import signature

            signature(function, named)


def _several(key: str, text: Any) -> str:
    """Return how a list is written, where a text has commas."""
    names = [name.strip() for name in text.split(",")] if isinstance(text, str) else []
    return f"; several are a list: '{key}={json.dumps(names)}'" if len(names) > 1 else ""


def _check_engine(last: Mapping[str, Any]) -> None:
    environment = last.get("environment")
    if isinstance(environment, str) and environment != "none" and ":" not in environment:
        raise ConfigError(
            f"environment = '{environment}': name a class of your own as 'path.py:Class', or a kind and what it uses, "
            "such as environment.kind=gymnasium environment.use=NAME"
        )
    check_device(str(last.get("device", "auto")))
    check_packages(_texts(last.get("packages")))
    engine = last.get("engine", last.get("engine.kind", "local"))
    if isinstance(engine, str) and ":" not in engine and engine not in ("local", "vllm"):
        raise ConfigError(f"engine.kind = {engine!r}: should be {ENGINE_KINDS}")


def _check_beginning(last: Mapping[str, Any], is_here: bool, has_algorithm: bool) -> None:
    if is_here:
        check_cuda(str(last.get("device", "auto")))
    if not has_algorithm and all(key.partition(".")[0] != "algorithm" for key in last):
        raise ConfigError(NO_ALGORITHM)
    model = last.get("model")
    if not isinstance(model, str) or model in BUILT_IN:
        return
    if is_here:  # a plan for other hardware needs config.json alone
        check_place(model)


@contextmanager
def _noted(faults: dict[str, UserError]) -> Iterator[None]:
    """Note an error of the user's that the block raises, so that all of them are told at once."""
    try:
        yield
    except UserError as fault:
        faults.setdefault(str(fault), fault)


def _together(faults: Mapping[str, UserError]) -> UserError:
    return ConfigError("; ".join(faults)) if len(faults) > 1 else next(iter(faults.values()))


def _check_runs(last: Mapping[str, Any]) -> None:
    """Refuse runs and adapters that are not there."""
    for key in ("continue_from", "rollouts_from"):
        if isinstance(run := last.get(key), str):
            RunDirectory.check_there(Path(run))
    adapter = last.get("lora.adapter")
    if isinstance(adapter, str) and adapter != "none" and not os.path.isdir(os.path.expanduser(adapter)):
        raise ConfigError(f"lora.adapter = '{adapter}' is no folder; give the one that holds adapter_config.json")


def _check_run_dir(run_dir: Path, last: Mapping[str, Any]) -> None:
    """Refuse a directory that cannot be written, or holds other files or a run in which a number is another.

    The run of the same experiment goes on.
    """
    RunDirectory.check_place(run_dir)
    try:
        there = parse_toml(read_plain_text(RunDirectory(run_dir).experiment))
    except (OSError, ValueError, RecursionError):
        there = {}
    known = ((key, value_at(there, key), now) for key, now in flat(last).items() if now and type(now) in (int, float))
    other = [f"{key} is {before!r} there and {now!r} here" for key, before, now in known if before not in (None, now)]
    if other or not there:
        RunDirectory.check_free(run_dir, "; ".join(other[:5]))


def _check_lora(last: Mapping[str, Any]) -> None:
    """Refuse modules that no model of the architecture has."""
    check_modules_of(str(last.get("model")), _texts(last.get("lora.targets")))


_TRAINING = (
    "budget", "checkpoints", "continue_from", "doctor", "epochs", "evaluation.before", "evaluation.every",
    "learner.gradient_checkpointing", "learner.offload", "learner.optimizer", "learner.processes", "max_staleness",
    "name", "records", "rollouts_from", "rollouts_per_step", "staleness", "steps",
)  # fmt: skip


def check_evaluation(overrides: Sequence[str], tasks: Sequence[str] = (), models: Sequence[str] = ()) -> None:
    """Refuse tasks that do not exist, and settings that do not, have another type, or are of training alone.

    With ``models``, packages and models that are missing are refused too, and models that no task is named for.

    Raises:
        ConfigError, DatasetError, ModelError, RunDirectoryError: The message has the setting, and what to do.
    """
    settings, _ = translated([parse_override(each) for each in overrides])
    kinds = _kinds(settings)
    for task in tasks:
        _check_task(task)
    for key, value in settings:
        _check_key(key)
        _check_value(*_nested(key, value), kinds)
        if any(key == each or key.startswith(f"{each}.") for each in _TRAINING):
            raise ConfigError(f"{key} = {value!r} is of training, and changes nothing in an evaluation; leave it out")
        if key == "model":
            raise ConfigError(f"the model of an evaluation is its first argument: gnomon evaluate {value}")
    if models:
        asked = {"evaluation.tasks": [*tasks], "model": [*models]}
        check_installed(needed_packages({**asked, **flat(dict(settings))}))
        sets = dict(settings).get("evaluation.tasks")
        if not tasks and not sets and not any(os.path.isfile(Path(each, "experiment.toml")) for each in models):
            raise no_task(models[0])
    for model in models:
        if not tasks and "/" in model:  # a model of the hub is asked about a task that is named
            RunDirectory.check_there(Path(model), is_model=True)
        if tasks and model not in BUILT_IN and not os.path.exists(model):
            check_place(model)
            check_hub(model)


def no_task(model: str) -> UserError:
    """Return what is wrong with evaluating what is no run without naming a task; a missing folder is said first."""
    try:
        RunDirectory.check_there(*[Path(model)] * (model not in BUILT_IN), is_model=True)
    except RunDirectoryError as error:
        return error
    return ConfigError(f"{model} is no run, so {NO_TASK}")


def _kinds(given: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Return the kind of each section whose keys depend on one, where it is plain."""
    found: dict[str, str] = {}
    for key, value in given:
        if key.endswith(".kind") and isinstance(value, str):
            found[key.removesuffix(".kind")] = value
        elif isinstance(value, Mapping) and isinstance(value.get("kind"), str):
            found[key] = value["kind"]
        else:
            found.pop(key, None)
    return found


def _nested(key: str, value: Any) -> tuple[str, Any]:
    """Return the first name of a path, and the tables below it.

    >>> _nested("task.size", 3)
    ('task', {'size': 3})
    """
    first, *others = key.split(".")
    for name in reversed(others):
        value = {name: value}
    return first, value


def _check_value(key: str, value: Any, kinds: Mapping[str, str]) -> None:
    """Refuse a setting, or one below it, that its section does not have, or whose value is of another type.

    Args:
        key: Path of a setting.
        value: As TOML has it.
        kinds: Kinds of sections, as `_kinds` returns them.

    Raises:
        ConfigError: As the code that builds the experiment raises it.
    """
    at = key.rpartition(".")[0]
    path = without_numbers(key).replace("evaluation.tasks.N", "evaluation.tasks")
    # A task is the same wherever it stands: its settings are listed once, below "task".
    path = re.sub(r"^(evaluation\.tasks?\.task|evaluation\.task|task\.parts\.N\.task)(?=\.)", "task", path)
    path = path.replace(".verifier.", ".")
    section, _, name = path.rpartition(".")
    known = _settings_below().get(section, {})
    # A section of a known kind has that kind's settings alone.
    if kinds.get(at) in {kind for types in known.values() for kind in types}:
        known = {name: types for name, types in known.items() if {"", kinds[at]} & types.keys()}
    also = {"N"} | ({"extract", "verifier"} if section.endswith("rewards.N") else set())
    # A recorded experiment names the piece of each part of an algorithm, also where there is one only.
    also |= {"piece"} if section.startswith("algorithm.") else set()
    if {*known} == {"N"} and name != "N":
        raise ConfigError(f"{at} is a list: write [[{at}]] in a file, {at}.0.{name} on the command line")
    if section and known and name not in {*known, *also}:
        raise ConfigError(f"{at}: {unknown('key', name, known)}")
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for inner, each in inside:
        below = f"{key}.{inner}"
        if isinstance(value, Mapping) or isinstance(each, Mapping):
            _check_value(below, each, {**kinds, **_kinds([(key, value), (below, each)])})
    types = {said for kind, said in known.get(name, {}).items() if kind in ("", kinds.get(at, kind))}
    type_said = next(iter(types)) if len(types) == 1 else ""
    is_entry = key.rpartition(".")[2].isdecimal()
    type_said = type_said.removeprefix("list of ") if is_entry else type_said
    if type_said.startswith("list of "):
        if isinstance(value, Mapping) and not all(map(str.isdecimal, value)):
            way = f"[{{...}}, {{...}}], or one by its number as {key}.0.{next(iter(value))}"
            raise ConfigError(f"{key} = {value!r}: should be a list, such as {way}")
        for number, each in enumerate(value if isinstance(value, list) else [value]):
            is_plain = not isinstance(each, Mapping | list) and type_said != "list of table"
            if is_plain and (said := type_flaw(type_said[8:], each)) is not None:
                raise ConfigError(f"{key}[{number}] = {each!r}: should be {said}{_several(key, each)}")
    # Some sections may be given as one word (engine = "vllm"); others may not.
    has_word = isinstance(value, str) and (value == "none" or name in _WORDS or is_entry)
    is_table = type_said == "table" and not has_word
    if is_table and isinstance(value, str | int | float) and (inner := _settings_below().get(path)):
        said = ", ".join(f"{key}.{each} = ..." for each in list(inner)[:4])
        raise ConfigError(f"{key} = {str(value).lower()}: a section has settings of its own; set {said}")
    # What a task may be is said with the task.
    is_free = type_said == "table" and (has_word or name == "task")
    if type_said and not is_free and (said := type_flaw(type_said, value)) is not None:
        if name == "kind" and isinstance(value, str):
            kinds_here = re.findall('"(.*?)"', type_said)
            raise ConfigError(f"{at}: {unknown('kind', value, kinds_here)}")
        raise ConfigError(f"{key} = {value!r}: should be {said}")
    bounds = known_names()["bounds"].get(path, {})
    # Where kinds or pieces differ in a bound, the value must hold for one of them.
    found = sorted({bound for kind, bound in bounds.items() if kind in ("", kinds.get(at, kind))})
    if found and not any(not bound or holds(bound, value) for bound in found):
        raise ConfigError(f"{key} must be {' or '.join(found)}, got {shortened(repr(value))}")
    if isinstance(value, int | float):
        check_values(dict([_nested(key, value)]))
    elif isinstance(value, str):
        check_texts(value, key)
        if key == "template_date":
            check_date(value)


@cache
def _settings_below() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return for each section its settings, each with its type by kind; "" where pieces differ in it."""
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    for key, types in known_names()["keys"].items():
        section, _, name = key.rpartition(".")
        found.setdefault(section, {})[name] = types
        if section.endswith(".N"):  # a list of tables, which is no setting by itself
            outer, _, listed = section.removesuffix(".N").rpartition(".")
            found.setdefault(outer, {}).setdefault(listed, dict.fromkeys(types, "list"))
    for place, fields in known_names()["pieces"].items():
        section = "algorithm" if not place else f"algorithm.{place}"
        found[section] = {**{name: {"": said} for name, said in fields.items()}, **found.get(section, {})}
        if place == "regularizers":
            found[f"{section}.N"] = found[section]
    return found


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value and not (name.partition(".")[0] in _OPEN and "." in name):
            yield from _flat(value, name)
        else:
            yield name, value


def _list(value: Any) -> list[Any]:
    value = [value] if isinstance(value, str) else value
    return [each for each in value if isinstance(each, str | Mapping)] if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    """Return the texts of a list, or one that stands alone; whether the others may be there is asked elsewhere."""
    return [each for each in _list(value) if isinstance(each, str)]


def _check_key(key: str) -> None:
    """Refuse a key whose beginning no setting has.

    Raises:
        ConfigError: If no setting begins so; it names the nearest.
    """
    known: Mapping[str, Any] = known_names()["keys"]
    parts = key.split(".")
    top = {each.partition(".")[0] for each in known}
    if parts[0] not in top:
        if key not in (*COMPOSED, *FOREIGN):
            if parts[0] in FOREIGN:
                raise ConfigError(f"{key}: {parts[0]} is another library's name; here: {FOREIGN[parts[0]].says}")
            bare = [name for name in FOREIGN if "." not in name]
            raise ConfigError(unknown("key", parts[0], [*top, *bare, *COMPOSED]))
        return
    # Their keys depend on a kind, which `_check_value` looks at.
    if parts[0] in _OPEN:
        return
    for depth in range(1, len(parts)):
        path = ".".join(parts[:depth])
        # A section without listed settings takes any key.
        siblings = {each.split(".")[depth] for each in known if each.startswith(f"{path}.")}
        if siblings and parts[depth] not in siblings:
            raise ConfigError(f"{path}: {unknown('key', parts[depth], siblings)}")


def check_algorithm(name: Any, place: str = "") -> None:
    """Refuse a name that is no preset's.

    Raises:
        ConfigError: The message has the nearest preset, after ``place``.
    """
    presets: list[str] = known_names()["algorithms"]
    if isinstance(name, str) and ":" not in name and canonical(name) not in map(canonical, presets):
        several = f". Several are compared: gnomon compare EXPERIMENT --algorithms {name}" if "," in name else ""
        own = "; or your own as 'path.py:NAME'"
        raise ConfigError(f"{place}{unknown('algorithm', name.lower(), presets)}{own}{several}")


def check_setting(key: str) -> None:
    """Refuse a name that is no setting's, nor the end of one, nor another library's.

    Raises:
        ConfigError: The message has the nearest names, or what another library's name is here.
    """
    theirs = key.strip().removeprefix("--")
    wanted, known = without_numbers(theirs.replace("-", "_")), known_names()["keys"]
    if wanted in known_names()["aliases"] or any(f".{each}".endswith(f".{wanted}") for each in known):
        return
    if says := FOREIGN[theirs].says if theirs in FOREIGN else COMPOSED.get(theirs):
        raise ConfigError(f"{theirs} is another library's name; here: {says}")
    raise ConfigError(unknown("setting", key, [*known, *known_names()["aliases"]]))


def check_named_algorithm(name: str) -> None:
    """Refuse a name that is no algorithm's, no piece's, nor another library's for one.

    Raises:
        ConfigError: The message has the nearest names.
    """
    presets, pieces = known_names()["algorithms"], known_names()["named pieces"]
    if ":" not in name and canonical(name) not in map(canonical, [*presets, *pieces]):
        said = name.lower() if name.isupper() else name
        raise ConfigError(unknown("algorithm or piece", said, [*presets, *pieces.values()]))


def check_named_task(name: str) -> None:
    """Refuse a name that is neither a kind of task nor a task.

    Raises:
        ConfigError: The message has the nearest names.
    """
    kinds = known_names()["keys"]["task.kind"][""]
    if f'"{name}"' not in kinds.split(" | "):
        _check_task(name, (*re.findall(r'"(\w+)"', kinds), *known_names()["tasks"]))


def _check_task(name: Any, known: Sequence[str] = ()) -> None:
    """Refuse a name that is no task's; a file, a dataset and a generator of another reasoning-gym may exist."""
    ending = "" if known else f"; or a file ending in {', '.join(TABLE_SUFFIXES[:-1])} or {TABLE_SUFFIXES[-1]}"
    known = known or known_names()["tasks"]
    # A table's name is a label; its path must exist.
    file = name.get("path") if isinstance(name, Mapping) and name.get("kind") == "table" else name
    if isinstance(name, Mapping) and name.get("kind") == "reasoning_gym":
        name, known = name.get("generator"), known_names()["task packages"]["reasoning-gym"]
    file = file if isinstance(file, str) and "=" not in file and "://" not in file else ""
    if file.lower().endswith(TABLE_SUFFIXES) and not os.path.exists(file):
        raise DatasetError(no_file(Path(file), TABLE_SUFFIXES))
    is_known = isinstance(name, str) and canonical(name) in map(canonical, known)
    if isinstance(name, str) and os.path.isdir(name) and not is_known and (name[:1] in "./~" or "/" not in name):
        raise DatasetError(f"task '{name}' is a folder; give the file of questions in it")
    if not isinstance(name, str) or any(mark in name for mark in "/.=@") or os.path.exists(name):
        return
    try:
        # Another version may have generators that the list does not know.
        is_other = version("reasoning-gym") != known_names()["reasoning-gym"]
    except PackageNotFoundError:
        is_other = False
    if not is_other and not is_known:
        raise ConfigError(unknown("task", name, known) + ending)
