"""Objects in memory become files that an experiment can name: rows, functions, classes and models of a Python program.

A run's record names files, so that a run can be resumed, evaluated and read by others. What a program holds in memory
is written once, below ``runs/inputs``, under a name that is a digest of its content.
"""

import functools
import hashlib
import inspect
import itertools
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from gnomon.core.atomic_files import real_path, write_durably
from gnomon.core.errors import ConfigError, UserError, on_one_line, shortened

INPUTS = Path("runs") / "inputs"
# 64 bits of SHA-256: two inputs share a folder with a probability below 1e-9 up to 100,000 inputs.
_DIGITS = 16
_MOST_ROWS = 2_000_000
"""Rows of what does not say how many it has, and may have no end."""
_SHIM = '''"""{names}, as a program held them in memory; written by gnomon.train.

{sources}
"""

import hashlib
import pickle
import sys
from pathlib import Path

for folder in {folders!r}:
    if folder not in sys.path:
        sys.path.append(folder)
content = Path(__file__).with_suffix(".pkl").read_bytes()
if hashlib.sha256(content).hexdigest() != {digest!r}:
    raise ImportError(f"{{Path(__file__).with_suffix('.pkl')}} is not the file that was written with {{__file__}}")
globals().update((name, pickle.loads(part)) for name, part in pickle.loads(content).items())
'''


def write_rows(rows: Iterable[Any], name: str = "dataset") -> str:
    """Write the rows of a dataset as JSONL, or as Parquet where numbers stand for classes (`datasets.ClassLabel`).

    Args:
        rows: Mappings from column to value: a list, a generator, a `datasets.Dataset`, or a table of Arrow. Arrays
            become lists.
        name: The argument that they were given as, for messages.

    Returns:
        The path of the file.

    Raises:
        ConfigError: There are no rows, a row is no mapping, or a value has no JSON form or is the number of a class
            whose name was lost; the message names row and column.
    """
    from gnomon.tasks.arrow_rows import first_unnamed, parquet_of

    # JSONL has no place for the names of classes.
    table = parquet_of(rows, _MOST_ROWS + 1)
    if table is not None:
        (count, content), form = table, "parquet"
    else:
        rows = rows.to_pylist() if hasattr(rows, "to_pylist") else rows  # Arrow's
        # A generator may never end.
        known = rows if hasattr(rows, "__len__") else itertools.islice(rows, _MOST_ROWS + 1)
        lines = [_line(row, f"{name}: row {number}") for number, row in enumerate(known, 1)]
        if (lost := first_unnamed(rows, lines)) is not None:
            row, column, value = lost
            numbers = f"for numbers .cast_column({column!r}, datasets.Value('int64')) before it, "
            raise ConfigError(
                f"{name}: row {row}, column {column!r}: {shortened(ascii(value))} is the number of a class, whose name "
                "map() of a stream or with_transform() lost; for names give map(..., features=...), "
                f"{numbers if type(value) is int else ''}or leave the column out: .remove_columns({column!r})"
            )
        # Half a surrogate pair is written as JSON writes it.
        count, content, form = len(lines), "".join(lines).encode("utf-8", "backslashreplace"), "jsonl"
    if not hasattr(rows, "__len__") and count > _MOST_ROWS:
        # islice would leave the types of a stream of `datasets` behind, and with them the names of classes.
        some = "rows.take(10000)" if hasattr(rows, "take") else "itertools.islice(rows, 10000)"
        raise ConfigError(
            f"{name} gave {_MOST_ROWS} rows and may have no end; give so many as are wanted: {name}={some}, or write "
            "them to a file"
        )
    if not count:
        raise ConfigError(f"{name} holds no rows; give a list of dicts such as {{'prompt': ..., 'answer': ...}}")
    path = _place(content) / f"dataset.{form}"
    write_durably(path, content)
    return str(real_path(path))


def _line(row: Any, place: str) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{place} is {type(row).__name__}, and should be a dict such as {{'prompt': ..., 'answer': ...}}"
        )
    try:
        return _json(row) + "\n"
    except (TypeError, ValueError, RecursionError):
        # Only now look for the column at fault: the row as a whole is written in one call.
        for column, value in row.items():
            try:
                _json({column: value})
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"{place}, column {column!r} cannot be written as JSON: {error}") from error
        raise


def _json(value: Any) -> str:
    return json.dumps(value, default=_listed, ensure_ascii=False)


def _listed(value: Any) -> Any:
    """Return an array or a scalar of NumPy or torch as Python has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form; write it as text, a number, a list or a dict")


def write_callables(named: Mapping[str, Callable[..., Any]], kind: str) -> dict[str, str]:
    """Write functions, classes and callable objects, so that other processes can import them.

    What the program's own files or a notebook define is written by value, with the variables that it reads, so that a
    resumed run does not depend on what became of the program. What an installed package defines is imported from there.

    Args:
        named: The objects under the names that they get.
        kind: What they are, "rewards", "environment" or "algorithm"; the file has that name.

    Returns:
        For each name, "path.py:name".

    Raises:
        ConfigError: An object holds something that no other process can have, such as an open file or a lock.
    """
    parts: dict[str, bytes] = {}
    for name, each in named.items():
        try:
            with _by_value(_module_of(each)):
                parts[name] = cloudpickle.dumps(each)
        except (TypeError, pickle.PicklingError, RecursionError) as error:
            raise ConfigError(
                f"{name} cannot be handed to the processes that call it: {on_one_line(str(error))}; create what it "
                "holds (a client, a lock, an open file) inside the function, or name it as path.py:name"
            ) from error
    content = pickle.dumps(parts)
    # The source code is for a reader of the file alone, inside a docstring, so its quotes are replaced.
    sources = "\n".join(filter(None, map(_source, named.values()))).replace("\\", "\\\\").replace('"""', "'''")
    shim = _SHIM.format(
        names=", ".join(named),
        sources=sources,
        folders=[folder for folder in sys.path if Path(folder).is_dir() and not _is_installed(folder)],
        digest=hashlib.sha256(content).hexdigest(),
    ).encode()
    path = _place(shim) / f"{kind}.py"
    # Data before code: a file of code that exists can always be imported.
    write_durably(path.with_suffix(".pkl"), content)
    write_durably(path, shim)
    return {name: f"{real_path(path)}:{name}" for name in named}


def is_programs_own(each: Any) -> bool:
    """Whether a class or function is of the program or notebook that runs, and no other program finds it by name.

    What is of gnomon, of an installed package or of a file that an experiment names is found.
    """
    return each.__module__ == "__main__" or _module_of(each) is not None


def _module_of(each: Any) -> ModuleType | None:
    """Return the module of the program's own that defines an object, None for a notebook or an installed package."""
    # A partial belongs to the module of the function inside.
    while isinstance(each, functools.partial):
        each = each.func
    module = sys.modules.get(getattr(each, "__module__", None) or type(each).__module__)
    file = getattr(module, "__file__", None)
    if (
        module is None
        or file is None
        or module.__name__ == "__main__"
        or module.__name__.startswith(("gnomon.", "gnomon_user_"))
    ):
        return None
    return None if _is_installed(file) else module


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    if module is None:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_installed(folder: str) -> bool:
    """Whether a folder of the import path is the interpreter's own, which every process has."""
    path = real_path(folder)
    return "site-packages" in path.parts or any(path.is_relative_to(p) for p in (sys.prefix, sys.base_prefix))


def _source(each: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(each)
    except (OSError, TypeError):
        return ""


def write_model(model: Any, tokenizer: Any) -> str:
    """Write a loaded transformers model and its tokenizer as a Hugging Face folder.

    Args:
        model: A causal language model of transformers.
        tokenizer: The model's tokenizer, or its name or folder; None loads the one that the model came with.

    Returns:
        The path of the folder.

    Raises:
        ConfigError: ``model`` has no ``save_pretrained``, code of the program's own or frozen weights, or no tokenizer
            is given and none is found.
    """
    from gnomon.models.load import load_tokenizer
    from gnomon.models.transfer.fingerprint import fingerprint

    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model is {type(model).__name__}; give a name, a folder, a transformers model, or (model, tokenizer)"
        )
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    elif isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(tokenizer)).backend
    elif not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(f"the tokenizer is {type(tokenizer).__name__}; give one of transformers, or a name or folder")
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    _check_is_in_files(model)
    INPUTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=INPUTS) as parent:
        part = Path(parent) / "model"
        tokenizer.save_pretrained(part)
        # The folder's name is a digest of all that goes into it, so the same model is written once.
        files = [file for file in sorted(part.rglob("*")) if file.is_file()]
        parts = [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
        parts += [f"{name} {fingerprint(tensor)}" for name, tensor in sorted(model.state_dict().items())]
        parts += [each.to_json_string() for each in (model.config, getattr(model, "generation_config", None)) if each]
        folder = _place("\n".join([*parts, repr(getattr(model, "peft_config", ""))]).encode()) / "model"
        if not folder.exists():
            _save(model, part)
            part.rename(folder)
    return str(real_path(folder))


def _save(model: Any, part: Path) -> None:
    """Save a model with the generation config that it has, which transformers may have read and would not write."""
    from gnomon.models.folder import savable

    own = getattr(model, "generation_config", None)
    kept, dropped = savable(own) if own else (own, ())
    if own is None or not dropped:
        model.save_pretrained(part)
        return
    try:
        model.generation_config = kept
        model.save_pretrained(part)
    finally:
        model.generation_config = own
    # It is repaired, and that is said, where the folder is read.
    (part / "generation_config.json").write_text(own.to_json_string())


def _check_is_in_files(model: Any) -> None:
    """Refuse a model with code of the program's own or frozen weights, since a folder holds numbers alone.

    Raises:
        ConfigError: Naming the layer or the weights.
    """
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for each in (type(module), vars(module).get("forward"), *hooks):
            # What transformers loads with trust_remote_code is among the model's files.
            if each and is_programs_own(each) and not each.__module__.startswith("transformers_modules."):
                code = getattr(each, "__qualname__", each)
                raise ConfigError(
                    f"model: {name or 'the model'} computes with {code} of this program, and its files hold weights "
                    "alone, so another model would be trained; give it without, or as a folder whose code is loaded "
                    "with trust_remote_code"
                )
    frozen = [name for name, each in model.named_parameters() if each.is_floating_point() and not each.requires_grad]
    if frozen and not hasattr(model, "peft_config"):
        raise ConfigError(
            f"model: requires_grad is False for {len(frozen)} weights ({shortened(', '.join(frozen))}), and gnomon "
            "trains all; type model.requires_grad_(True), or train an adapter on some layers: lora={'targets': [...]}"
        )


def _tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of the folder or hub name that a model was loaded from.

    Raises:
        ConfigError: For none.
    """
    from gnomon.models.load import load_tokenizer

    source = getattr(model.config, "name_or_path", "")
    try:
        return load_tokenizer(source).backend
    except UserError as error:
        raise ConfigError(
            f"model is a loaded {type(model).__name__} without its tokenizer, and none is at {source or 'its source'}: "
            "give model=(model, tokenizer)"
        ) from error


def _place(content: bytes) -> Path:
    """Return the folder of what has this content."""
    folder = INPUTS / hashlib.sha256(content).hexdigest()[:_DIGITS]
    folder.mkdir(parents=True, exist_ok=True)
    return folder
