"""Training from Python: a model, a dataset and rewards as objects or names, and any setting by its key."""

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import date
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isfunction, isgeneratorfunction, isroutine, signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from gnomon.config.name_checks import check_data
from gnomon.config.reading import as_json, check_evaluation, check_names, read
from gnomon.core.errors import ConfigError, shortened
from gnomon.core.tables import to_table
from gnomon.records.directory import RunDirectory, refuse_unchanged
from gnomon.rewards.function import signature as read_signature
from gnomon.training.objects import is_programs_own, write_callables, write_model, write_rows

# What needs torch is imported by the functions, after names and values were checked.
if TYPE_CHECKING:
    from gnomon.config.experiment import Experiment
    from gnomon.training.evaluate import Evaluation
    from gnomon.training.result import Result
    from gnomon.training.run import StopRequest
    from gnomon.training.run_logger import FinishedStep


class Settings(TypedDict, total=False):
    """The keys of an experiment that `train` takes, for editors; `gnomon config KEY` says what each means."""

    name: str
    task: str | Mapping[str, Any]
    steps: int
    epochs: float
    max_length: int
    budget: Mapping[str, Any]
    rollouts_per_step: int
    seed: int
    max_staleness: int | Literal["measured"]
    staleness: Mapping[str, Any]
    system: str
    chat_template_kwargs: Mapping[str, Any]
    template_date: str
    trust_remote_code: bool
    packages: Sequence[str]
    device: str
    held_out: Mapping[str, Any]
    sampling: Mapping[str, Any]
    engine: str | Mapping[str, Any]
    learner: Mapping[str, Any]
    lora: Mapping[str, Any]
    continue_from: str
    rollouts_from: str
    evaluation: Mapping[str, Any]
    checkpoints: Mapping[str, Any]
    grading: Mapping[str, Any]
    records: Mapping[str, Any]
    doctor: Mapping[str, Any]
    cluster: str | Mapping[str, Any]
    # Other libraries' names, and short ones.
    prompts_per_step: int
    num_generations: int
    learning_rate: float
    temperature: float
    max_completion_length: int
    max_response_length: int
    max_new_tokens: int
    max_steps: int
    precision: str
    environment: Any
    callbacks: "Sequence[Callable[[FinishedStep], None]]"
    eval_dataset: Any
    train_dataset: Any
    reward_funcs: Any
    reward_weights: Sequence[float]


def train(
    experiment: "str | Path | Experiment | None" = None,
    run_dir: str | Path | None = None,
    *,
    model: Any = None,
    dataset: Any = None,
    rewards: Any = None,
    algorithm: Any = None,
    **settings: Unpack[Settings],
) -> "Result":
    """Train a model, in a new run directory or in the one where the same run was begun.

    Objects that live in memory (rows, functions, a loaded model) are written to runs/inputs first, so that the run can
    be resumed and evaluated later.

    Args:
        experiment: A TOML file, a built-in name or an `Experiment` that the other arguments change; None begins with
            the defaults, and then ``model`` and ``dataset`` are needed.
        run_dir: Where to write the run; runs/NAME-DATE-TIME by default.
        model: A name, a folder, a loaded transformers model, or (model, tokenizer).
        dataset: A list of dicts, a `datasets.Dataset`, a table of pandas, polars or Arrow, a dict of columns, a
            generator of dicts, a path, the name of a task or of a dataset on the hub, or a table with a ``kind``. Rows
            need ``prompt`` (or ``question``, ``problem``, ``messages``), mostly ``answer``; rewards get all columns.
        rewards: One reward or a list: a function in gnomon's, TRL's or verl's signature, a kind such as "numeric",
            "path.py:function", a table with a ``kind``, or any of these with a weight, (reward, weight). Without it the
            task judges its own answers.
        algorithm: A preset such as "spo", an `Algorithm`, a function (a loss of ``view`` or an advantage of ``batch``,
            in GRPO), or a table with a preset and changes; "grpo" by default.
        **settings: ``environment``, a class with ``reset`` and ``step``, "path.py:Class", or a table; ``callbacks``,
            functions that are called after each step with a `FinishedStep`; ``eval_dataset``, as ``dataset``; and
            every other key of an experiment, nested as dicts or with dots in a dict (``steps=50``,
            ``learning_rate=1e-5``, ``sampling={"temperature": 0.8}``, ``**{"checkpoints.every": 10}``);
            `gnomon config` prints them.

    Returns:
        The run: ``run.metrics``, ``run.evaluations``, ``run.rollouts()``, ``run.generate(...)``, ``run.model()``.

    Raises:
        UserError: Something cannot be as it was asked for; no weight was loaded and no run directory is left.
        RunError: The run failed after it began.

    >>> train("quickstart", steps=50)  # doctest: +SKIP
    """
    others = {"model": model, "dataset": dataset, "rewards": rewards, "algorithm": algorithm, **settings}
    # ``table`` is the experiment to start from, ``given`` the settings that change it.
    table, given, callbacks = _described(experiment, others, "train", place := _new_run(run_dir))
    from gnomon.config.experiment import with_settings

    loaded = with_settings(table, [*given.items()])  # before torch is imported
    from gnomon.training.api import train_experiment

    return train_experiment(loaded, place, callbacks=callbacks)


def sft(
    experiment: "str | Path | Experiment | None" = None,
    run_dir: str | Path | None = None,
    *,
    model: Any = None,
    dataset: Any = None,
    **settings: Unpack[Settings],
) -> "Result":
    """Train a model on the answers of a dataset (supervised fine-tuning); the Python form of `gnomon sft`.

    Args:
        experiment: As of `train`; its algorithm is not used.
        run_dir: As of `train`.
        model: As of `train`.
        dataset: As of `train`. Rows have ``messages``, of which every assistant's is trained on, or ``prompt`` with
            ``completion`` or ``answer``.
        **settings: As of `train`, such as ``epochs=1``, ``max_length=1024``, ``learning_rate=1e-5``, ``lora={}``.
            With ``rewards``, held-out questions are answered and judged too.

    Returns:
        The run; ``run.evaluations[-1].loss_nats`` is the held-out loss, and `train` begins with ``model=run.model``.

    Raises:
        UserError: As of `train`.
        RunError: As of `train`.

    >>> rows = [{"prompt": "Capital of France?", "completion": "Paris."}]
    >>> sft(model="smollm2-135m-instruct", dataset=rows, epochs=3)  # doctest: +SKIP
    """
    others = {"model": model, "dataset": dataset, **settings}
    table, given, callbacks = _described(experiment, others, "sft", place := _new_run(run_dir))
    from gnomon.config.experiment import supervised

    loaded = supervised({"name": "sft", **table}, [*given.items()])
    from gnomon.training.api import train_experiment

    return train_experiment(loaded, place, callbacks=callbacks)


_TRAINERS: Mapping[str, str] = {
    "args": "settings are arguments themselves: learning_rate=1e-5, num_generations=8",
    "config": "settings are arguments themselves: learning_rate=1e-5, num_generations=8",
    "processing_class": "a tokenizer is given with its model: model=(model, tokenizer)",
    "tokenizer": "a tokenizer is given with its model: model=(model, tokenizer)",
    "peft_config": "an adapter is lora={'rank': 16, 'targets': ['q_proj', 'v_proj']}",
    "optimizers": "the optimizer is learner={'optimizer': {'learning_rate': 1e-5}}",
    "tools": "tools are environment={'kind': 'tools', 'tools': ['my.py:search']}",
}
"""Arguments of other trainers that are objects, and what to type."""


@dataclass(frozen=True)
class _Object:
    """What a program holds in memory, which becomes a setting after everything that has a name was checked."""

    written: Callable[[], Any]


def _described(
    experiment: "str | Path | Experiment | None", others: dict[str, Any], verb: str, run_dir: Path | None
) -> "tuple[dict[str, Any], dict[str, Any], tuple[Callable[[FinishedStep], None], ...]]":
    """Return the experiment's table, the settings that change it, and the callbacks."""
    for name in (each for each in others if each in _TRAINERS):
        raise ConfigError(f"{name} is an argument of other trainers; here {_TRAINERS[name]}")
    table = _base(experiment)
    if experiment is None and (
        others.get("model") is None or all(others.get(each) is None for each in ("dataset", "train_dataset", "task"))
    ):
        raise ConfigError(
            f'{verb} needs a model and a dataset, such as gnomon.{verb}(model="smollm2-135m-instruct", dataset=rows'
            f'{", rewards=[score]" if verb == "train" else ""}), or an experiment, such as gnomon.{verb}("quickstart")'
        )
    callbacks = _callbacks(others.pop("callbacks", None))
    given = _given(others)
    # A list of rewards replaces the experiment's list; other settings change single keys of it.
    if "rewards" in given:
        table["rewards"] = given.pop("rewards")
    if experiment is None and verb == "train":
        given.setdefault("algorithm", "grpo")
    checked = _checked(table, given, "" if verb == "train" else verb, run_dir or Path("runs", "run"))
    if experiment is None:
        table |= {key: checked.pop(key) for key in ("task", "model", "algorithm") if key in checked}
    return table, checked, callbacks


def _checked(
    source: Path | dict[str, Any], given: dict[str, Any], verb: str = "", run_dir: Path | None = None
) -> dict[str, Any]:
    """Return settings with objects written down, after what has a name was checked; no torch is imported before.

    Raises:
        UserError: As `check_names`.
    """
    objects = {key: value for key, value in given.items() if isinstance(value, _Object)}
    # What an experiment says beside an object is judged with the object, later.
    hidden = {key for key in given for each in objects if f"{key}.".startswith(f"{each}.")}
    table = {key: value for key, value in read(source).items() if key not in objects}
    # An algorithm that is an object is there, and nothing of it is known yet.
    unnamed: dict[str, Any] = {"algorithm": {}} if "algorithm" in objects else {}
    named = as_json({**unnamed, **{key: value for key, value in given.items() if key not in hidden}})
    known = check_names(table, [*named.items()], verb=verb, run_dir=run_dir)
    settings = {key: value.written() if isinstance(value, _Object) else value for key, value in given.items()}
    if objects:
        check_data({**known, **settings}, str(known["algorithm"]))
    return settings


def continue_(
    run: "str | Path | Result",
    run_dir: str | Path | None = None,
    *,
    dataset: Any = None,
    rewards: Any = None,
    algorithm: Any = None,
    **settings: Unpack[Settings],
) -> "Result":
    """Go on with a run after its end: with more steps in the same run, with other settings as another run.

    Another run begins with the weights and moments of the newest checkpoint, and with what is known of the prompts that
    stay; its steps count on. The page Reliability has a table of what may change.

    Args:
        run: The directory of the run, or the run as `train` returned it.
        run_dir: Where another run is written, also where only the steps change; RUN-2 beside the run by default.
        dataset: As for `train`.
        rewards: As for `train`.
        algorithm: As for `train`.
        **settings: Keys of an experiment that change, as for `train`; ``steps`` counts from the beginning of the run.

    Returns:
        The run: the same one, or another one.

    Raises:
        UserError: A setting cannot change, or there is nothing to continue; nothing was loaded or changed.
        RunError: The run failed after it began.

    >>> continue_("runs/first", steps=200)  # doctest: +SKIP
    """
    others: dict[str, Any] = {"dataset": dataset, "rewards": rewards, "algorithm": algorithm, **settings}
    callbacks = _callbacks(others.pop("callbacks", None))
    RunDirectory.check(place := RunDirectory.named_by(run))
    given, own = _given(others), _new_run(run_dir)
    refuse_unchanged(place, [*given])
    now = [*_checked(RunDirectory(place).experiment, given).items()]
    from gnomon.config.experiment import changed

    changed(place, now)
    from gnomon.training.api import continue_run

    return continue_run(place, now, own, callbacks=callbacks)


def evaluate(
    model: str | Path,
    task: str | Sequence[str] | None = None,
    samples: int | None = None,
    prompts: int | None = None,
    overrides: Sequence[str] = (),
    checkpoint: int | str = "newest",
) -> "Evaluation":
    """Score a model (folder or name) or a run's checkpoint on held-out tasks.

    The parameters are those of `EvalSpec` and `EvalTarget`; overrides such as sampling.temperature=0.6.

    Raises:
        UserError: If nothing there can be asked.
    """
    several = task if isinstance(task, list | tuple) else () if task is None else (task,)
    names = tuple(str(each) if isinstance(each, Path) else each for each in several)
    if isinstance(model, str | os.PathLike):
        check_evaluation(overrides, names, [os.fspath(model)])
    from gnomon.training.api import evaluate_each
    from gnomon.training.eval_spec import EvalSpec, EvalTarget

    (found,) = evaluate_each([EvalTarget(model, checkpoint)], EvalSpec(names, samples, prompts, tuple(overrides)))
    return found


def resume(
    run: "str | Path | Result",
    stop: "StopRequest | None" = None,
    callbacks: "tuple[Callable[[FinishedStep], None], ...]" = (),
) -> "Result":
    """Go on with a run from its newest valid checkpoint; a CPU run goes on bit for bit.

    Args:
        run: The directory of the run, or the run as `train` returned it.
        stop, callbacks: As of `train_experiment`.

    Raises:
        RunDirectoryError: There is no run, or another process has it.
        CheckpointError: All checkpoints are damaged.
    """
    RunDirectory.check(place := RunDirectory.named_by(run))
    from gnomon.training.api import resume

    return resume(place, stop, _callbacks(callbacks))


def load(run: "str | Path | Result") -> "Result":
    """Return a run that is on disk, finished or not.

    Args:
        run: The directory of the run.

    Raises:
        RunDirectoryError: There is no run, or the run has no checkpoint.

    >>> load("runs/first").metrics["rollout/reward_mean"]  # doctest: +SKIP
    """
    RunDirectory.check(place := RunDirectory.named_by(run))
    from gnomon.training.result import load

    return load(place)


def _callbacks(given: Any) -> "tuple[Callable[[FinishedStep], None], ...]":
    """Return what is called after each step.

    Raises:
        ConfigError: One is no function of one argument, or one that a call does not run.
    """
    given = () if given is None else given
    found = (given,) if callable(given) or not isinstance(given, Iterable) else tuple(given)
    for callback in found:
        is_plain = callable(callback)
        try:
            signature(callback).bind(None)
        except TypeError:
            is_plain = False
        except ValueError:  # a builtin function that does not say what it takes
            is_plain = True
        call = type(callback).__call__ if is_plain and not isroutine(callback) else callback
        if not is_plain or iscoroutinefunction(call) or isgeneratorfunction(call) or isasyncgenfunction(call):
            raise ConfigError(
                f"callbacks: {shortened(repr(callback))} is no plain function of one argument; one is called after "
                "each step with a FinishedStep: def tell(step): print(step.number)"
            )
    return found


def _given(others: dict[str, Any]) -> dict[str, Any]:
    """Return settings by their paths; of objects that take long to write, or need torch, how they are written."""
    model, dataset, rewards, algorithm = (others.pop(k, None) for k in ("model", "dataset", "rewards", "algorithm"))
    rewards = _only(rewards, "rewards", others, "reward_funcs")
    dataset = _only(dataset, "dataset", others, "train_dataset")
    weights, environment, evaluated = (others.pop(k, None) for k in ("reward_weights", "environment", "eval_dataset"))
    given: dict[str, Any] = {
        "task": None if dataset is None else _task(dataset, "dataset"),
        "algorithm": None if algorithm is None else _algorithm(algorithm),
        "rewards": None if rewards is None else _rewards(rewards, weights),
        "environment": None if environment is None else _environment(environment),
        "evaluation.task": None if evaluated is None else _task(evaluated, "eval_dataset"),
        "model": None if model is None else _model(model),
    }
    return {key: value for key, value in given.items() if value is not None} | dict(_flat(others))


def _only(given: Any, ours: str, settings: dict[str, Any], theirs: str) -> Any:
    """Return the one of two names that was given, and take TRL's out of the settings.

    Raises:
        ConfigError: For both.
    """
    if theirs in settings and given is not None:
        raise ConfigError(f"{theirs} is TRL's name for {ours}, which is given too; leave one out")
    return settings.pop(theirs, given)


def _base(experiment: "str | Path | Experiment | None") -> dict[str, Any]:
    if experiment is None:
        return {}
    if isinstance(experiment, str | Path | Mapping):
        return read(experiment)
    if not _is_a(experiment, "Experiment"):
        raise ConfigError(
            f"the first argument is {_kind(experiment)}, and an experiment is a TOML file or a built-in name; rows are "
            "dataset=rows, a model is model=..."
        )
    from gnomon.algorithms import resolve
    from gnomon.config.experiment import to_toml

    return tomllib.loads(to_toml(replace(experiment, algorithm=resolve(_algorithm_table(experiment.algorithm)))))


def _is_a(value: Any, name: str) -> bool:
    """Whether a value is of gnomon's class of that name, which is not imported to know that."""
    return type(value).__name__ == name and type(value).__module__.startswith("gnomon.")


def _new_run(place: Any) -> Path | None:
    if not isinstance(place, str | os.PathLike | None):
        raise ConfigError(f"run_dir is {_kind(place)}; give the folder of a new run, and rows as dataset=rows")
    if place is not None and (not (named := os.fspath(place)) or "\0" in named):
        raise ConfigError(f"run_dir = {named!r} names no folder; give the folder of a new run, or leave it out")
    return None if place is None else Path(place)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    """Return paths with values: a dict says what changes below a key, and leaves the rest as it is."""
    for name, value in settings.items():
        key = f"{path}.{name}" if path else name
        if _is_a(value, "Algorithm"):
            yield key, _algorithm_table(value)
        elif isfunction(value) and key.startswith("algorithm."):
            yield key, _written(value, "algorithm")
        elif is_dataclass(value) and not isinstance(value, type):
            yield key, to_table(value)
        elif isinstance(value, Mapping) and value and key not in ("task", "algorithm", "chat_template_kwargs"):
            # These tables are handed on whole: their keys depend on a kind or a preset, or are the user's own.
            yield from _flat(value, key)
        else:
            yield key, _plain(key, value)


def _plain(key: str, value: Any) -> Any:
    """Return a setting as a file has it; arrays and scalars of NumPy and torch, their types and devices are objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path) or type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if not isinstance(value, str | int | float | Mapping | Sequence | date | None) and not callable(value):
        raise ConfigError(f"{key} is {_kind(value)}; give text, a number, a list or a dict (gnomon config {key})")
    return value


def _model(model: Any) -> str | _Object:
    if isinstance(model, str | Path):
        return str(model)
    pair = tuple(model) if isinstance(model, tuple | list) else (model, None)
    if len(pair) != 2 or isinstance(pair[0], str | Path):
        raise ConfigError(
            f"model is {_kind(model)} of {len(pair)}, {', '.join(map(_kind, pair[:2]))}; give a name or a folder "
            "alone, or (model, tokenizer) as transformers has them; rows are dataset=rows"
        )
    return _Object(partial(write_model, *pair))


def _task(dataset: Any, name: str) -> Any:
    if is_dataclass(dataset) and not isinstance(dataset, type):
        return to_table(dataset)
    dataset = _rows(dataset)
    if isinstance(dataset, Mapping) and "kind" not in dataset:
        raise ConfigError(
            f"{name} is {type(dataset).__name__} with {shortened(', '.join(map(str, dataset))) or 'nothing'}; give one "
            f"split or a list of dicts such as {{'prompt': ..., 'answer': ...}}, columns as lists of one length, or a "
            "table with a kind"
        )
    if isinstance(dataset, str | Mapping):
        return dataset
    if isinstance(dataset, Path):
        return str(dataset)
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "to_pylist"):  # Arrow's
        raise ConfigError(
            f"{name} is {type(dataset).__name__}; give a list of dicts such as {{'prompt': ..., 'answer': ...}}, a "
            "datasets.Dataset, a generator, a path or a name"
        )
    return _Object(lambda: {"kind": "table", "path": write_rows(dataset, name)})


def _rows(dataset: Any) -> Any:
    """Return the rows of a table of pandas or polars, or of a dict of columns; anything else as it is."""
    # Polars, pandas, each without importing it.
    for form, arguments in (("to_dicts", ()), ("to_dict", ("records",))):
        if hasattr(dataset, "columns") and hasattr(dataset, form):
            return getattr(dataset, form)(*arguments)
    columns = list(dataset.values()) if isinstance(dataset, Mapping) else []
    is_even = columns and all(isinstance(each, list | tuple) and len(each) == len(columns[0]) for each in columns)
    if is_even and not all(isinstance(value, Mapping) for each in columns for value in each):  # those are splits
        return [dict(zip(dataset, row, strict=True)) for row in zip(*columns, strict=True)]
    return dataset


def _rewards(rewards: Any, weights: Sequence[float] | None) -> list[Any]:
    """Return the rewards as an experiment has them; functions are written down together."""
    # (reward, weight) is one reward; a tuple of two rewards is a list of two.
    is_pair = isinstance(rewards, tuple) and len(rewards) == 2 and isinstance(rewards[1], int | float)
    listed = [rewards] if is_pair or not isinstance(rewards, list | tuple) else list(rewards)
    if weights is not None:
        weights = [weights] if isinstance(weights, int | float) else list(weights)
        if len(weights) != len(listed):
            raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(listed)} rewards")
        listed = [(reward, weight) for reward, weight in zip(listed, weights, strict=True)]
    tables = [_reward(each) for each in listed]
    own = {f"reward_{number}": table for number, table in enumerate(tables) if callable(table.get("function"))}
    written = write_callables({name: table["function"] for name, table in own.items()}, "rewards") if own else {}
    taken: dict[str, Any] = {}
    for name, table in own.items():
        shown = getattr(table["function"], "__name__", type(table["function"]).__name__)
        is_own = shown.isidentifier() and taken.setdefault(shown, table["function"]) is table["function"]
        table.setdefault("name", shown if is_own else name)  # two lambdas are reward_0 and reward_1
        table["function"] = written[name]
    # A name alone stays one.
    return [next(iter(table.values())) if {*table} == {"kind"} else table for table in tables]


def _reward(reward: Any) -> dict[str, Any]:
    """Return one reward as a table whose function may still be an object."""
    if isinstance(reward, tuple) and len(reward) == 2:
        inner, weight = reward
        if isinstance(weight, str | None):
            raise ConfigError(f"a reward's weight is {weight!r}; give a number, as in (score, 0.5)")
        return {**_reward(inner), "weight": float(weight)}
    if is_dataclass(reward) and not isinstance(reward, type):
        return to_table(reward)
    if isinstance(reward, Mapping):
        if not {"kind", "function"} & set(reward):
            raise ConfigError(
                f"a reward is a dict with {shortened(', '.join(map(str, reward))) or 'nothing'}; give a function, or a "
                "dict with a kind or a function, such as {'function': score, 'name': 'mine', 'weight': 0.5}"
            )
        kind = {"kind": "function"} if "function" in reward else {}
        return {**kind, **reward}
    if isinstance(reward, str):
        return {"kind": "function", "function": reward} if ":" in reward else {"kind": reward}
    if isinstance(reward, type):
        raise ConfigError(
            f"a reward is the class {reward.__name__}; give an object of it: rewards=[{reward.__name__}()]"
        )
    if callable(reward):
        read_signature(reward, getattr(reward, "__name__", type(reward).__name__))
        return {"kind": "function", "function": reward}
    raise ConfigError(
        f"a reward is {type(reward).__name__}; give a function, a kind such as 'numeric', 'path.py:function', a table, "
        "or (reward, weight)"
    )


def _environment(environment: Any) -> Any:
    if is_dataclass(environment) and not isinstance(environment, type):
        return to_table(environment)
    if isinstance(environment, Mapping):
        table = dict(environment)
        if callable(table.get("use")):
            table["use"] = _written(table["use"], "environment")
        return table
    if isinstance(environment, str):
        return {"kind": "class", "use": environment}
    if callable(environment):
        return {"kind": "class", "use": _written(environment, "environment")}
    raise ConfigError(f"environment is {type(environment).__name__}; give a class, 'path.py:Class' or a table")


def _written(own: Callable[..., Any], kind: str) -> str:
    name = getattr(own, "__name__", kind).strip("<>")
    return write_callables({name: own}, kind)[name]


def _algorithm(algorithm: Any) -> Any:
    """Return an algorithm as an experiment has it, or how it becomes that."""
    if isinstance(algorithm, type | ModuleType):
        raise ConfigError(
            f"algorithm is {_kind(algorithm)}; give a preset such as 'spo', an Algorithm such as replace(GRPO, ...), a "
            "function, or a table with a preset"
        )
    parts = algorithm.values() if isinstance(algorithm, Mapping) else [algorithm]
    is_named = not any(isfunction(part) or is_dataclass(part) for part in parts)
    return algorithm if is_named else _Object(partial(_algorithm_table, algorithm))


def _algorithm_table(algorithm: Any) -> Any:
    """Return the table of an algorithm; what the program itself defines of it is written down."""
    from gnomon.algorithms import Algorithm, resolve
    from gnomon.algorithms.build import to_table as table_of
    from gnomon.algorithms.build import with_function
    from gnomon.algorithms.user_pieces import FunctionPiece, piece_name

    if isfunction(algorithm):
        algorithm = with_function(algorithm)
    elif isinstance(algorithm, Mapping):
        algorithm = resolve(algorithm)
    if not isinstance(algorithm, Algorithm):
        return algorithm
    own: dict[Any, str] = {}

    # Called for each piece as the table is made: it notes the program's own classes on the way.
    def collected(piece: Any) -> str:
        part = piece.own if isinstance(piece, FunctionPiece) else type(piece)
        if not is_programs_own(part):
            return piece_name(piece)
        name = part.__name__.strip("<>")
        return own.setdefault(part, f"{name}_{len(own)}" if name in own.values() else name)

    # The first pass finds what is the program's own, the second one names it by the file it was written to.
    table = table_of(algorithm, collected)
    if not own:
        return table
    written = write_callables({name: part for part, name in own.items()}, "algorithm")
    return table_of(algorithm, lambda piece: written.get(name := collected(piece), name))
