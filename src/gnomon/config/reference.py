"""Every setting of an experiment with its type, default and meaning, read from the classes that hold them."""

import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib.metadata import version
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gnomon.algorithms import GRPO, Algorithm
from gnomon.algorithms import NAMED as ALGORITHMS
from gnomon.algorithms.aliases import ALIASES as ALGORITHM_ALIASES
from gnomon.algorithms.aliases import PATHS as ALGORITHM_PATHS
from gnomon.algorithms.describe import kind_of, named_pieces
from gnomon.algorithms.pieces import slots
from gnomon.algorithms.sections import ReferencePolicy
from gnomon.algorithms.user_pieces import spelled
from gnomon.config.experiment import Experiment, facts
from gnomon.config.foreign_names import ALIASES
from gnomon.config.name_checks import without_numbers
from gnomon.config.reading import check_setting
from gnomon.core.errors import ConfigError, bounds_of, unknown
from gnomon.core.tables import flat, members, to_table
from gnomon.diagnosis.catalog import RULES
from gnomon.models.adapter_config import LoraConfig
from gnomon.tasks.benchmarks import BENCHMARKS, REFUSED
from gnomon.tasks.build import NAMED
from gnomon.tasks.published import PUBLISHED
from gnomon.tasks.reasoning import generators

_HEAD = """# Configuration

Every setting of an experiment, written by `gnomon config --markdown`. A TOML file sets
`learner.optimizer.learning_rate` as `learning_rate` below `[learner.optimizer]`; the command line sets the same key as
`learner.optimizer.learning_rate=1e-5`. `gnomon config KEY` prints one setting, `gnomon rewards` and `gnomon tasks`
print the kinds of rewards and tasks, and `gnomon algorithms PIECE` prints the settings of a piece of an algorithm."""
_KIND = "Decides which of the settings below apply."
_ENTRY = re.compile(r"^ {4}(\w+): (.*)$")


@dataclass(frozen=True)
class Setting:
    """One setting of an experiment.

    Attributes:
        key: Path of the setting, such as "learner.optimizer.learning_rate"; "rewards.N.weight" for each reward.
        type: What the value may be, as TOML: "float", '"wait" | "drop"'.
        default: The value without the setting, as TOML; None where it must be given.
        meaning: What the setting does, with its unit and range.
        kind: Name of the task, reward or environment that has the setting; "" for a setting of every experiment.
        aliases: Other libraries' names that are understood at the top of an experiment.
        bound: What a number may be, as `gnomon.core.errors.holds` reads it; "" for any.
    """

    key: str
    type: str
    default: str | None
    meaning: str
    kind: str = ""
    aliases: tuple[str, ...] = ()
    bound: str = ""

    def __str__(self) -> str:
        given = "must be given" if self.default is None else f"default {self.default}"
        lines = [self.key + (f"  (kind {self.kind})" if self.kind else ""), f"    {self.type}; {given}"]
        said = [self.meaning, *([f"Also understood: {', '.join(self.aliases)}."] if self.aliases else [])]
        wrapped = [textwrap.wrap(plain(text), 96, initial_indent="    ", subsequent_indent="    ") for text in said]
        return "\n".join([*lines, *(line for part in wrapped for line in part)])


def plain(text: str) -> str:
    """Return a text of a docstring without its marks of code.

    >>> plain("see ``staleness`` and `Experiment.steps`")
    'see staleness and Experiment.steps'
    """
    return text.replace("`", "")


def attributes(cls: type) -> dict[str, str]:
    """Return the meaning of each attribute of ``cls``, from the Attributes section of its docstring.

    >>> attributes(type(Experiment.budget))["tokens"]
    'Tokens generated for training, whether they are trained on or not; 0 is no limit.'
    """
    texts = [inspect.getdoc(each) or "" for each in (cls, *cls.__bases__)]
    section = next((t for t in texts if "Attributes:\n" in t), "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            name = entry[1]
        # A line that begins no attribute goes on with the one before.
        found[name] = entry[2] if entry else f"{found[name]} {line.strip()}"
    return found


def settings() -> tuple[Setting, ...]:
    """Return every setting of an experiment, in the order of the classes; `gnomon algorithms` shows those of pieces."""
    return tuple(_of(Experiment, "", ""))


def named(key: str) -> tuple[Setting, ...]:
    """Return the settings that ``key`` names: one setting, a whole section, or an alias of either.

    Raises:
        ConfigError: No setting has that name; the message has the nearest names.

    >>> [setting.key for setting in named("learning_rate")]
    ['learner.optimizer.learning_rate']
    """
    check_setting(key)
    wanted = without_numbers(key.strip().removeprefix("--").replace("-", "_"))
    known = settings()
    # The whole key or an alias; else every key that ends so, such as "learning_rate".
    exact = {s.key for s in known if s.key == wanted or wanted in s.aliases}
    tails = exact or {s.key for s in known if s.key.endswith(f".{wanted}")}
    return tuple(s for s in known if any(s.key == tail or s.key.startswith(f"{tail}.") for tail in tails))


def _of(cls: type, path: str, kind: str) -> Iterator[Setting]:
    """Return the settings of ``cls``, which stands at ``path``; tasks within tasks and evaluations are as ``task``.

    Of a piece of an algorithm they are given where one class alone fits; `gnomon algorithms PIECE` has the others.
    """
    hints, meanings, is_piece = get_type_hints(cls), attributes(cls), f"{path}.".startswith("algorithm.")
    for f in fields(cls):
        if not f.init or (f.name == "kind" and kind):
            continue
        is_reward = f.name == "verifier"  # a reward's settings stand beside its weight
        key = path if is_reward else ".".join(filter(None, [path, f.name, "N" * (f.name in ("rewards", "parts"))]))
        below = _classes(hints[f.name])
        # A place of an algorithm with several pieces: `gnomon algorithms PIECE` lists their settings.
        below = below if len(below) < 2 or not is_piece else []
        if not is_reward:
            said = kind_of(hints[f.name]) if is_piece else _type(hints[f.name])
            bound = bounds_of(cls).get(f.name, "")
            yield Setting(key, said, _default(f), meanings.get(f.name, ""), kind, _aliases(key), bound)
        # Settings of a task within a task are those of ``task``, listed once.
        if f.name == "task" and path:
            continue
        if len(below) > 1:
            yield Setting(f"{key}.kind", " | ".join(spelled(_kind(each)) for each in below), None, _KIND)
        for each in below:
            yield from _of(each, key, _kind(each) if len(below) > 1 else kind)


def _classes(hint: Any) -> list[type]:
    found: list[type] = []
    for member in members(hint):
        inner = get_args(member)[:1] if get_origin(member) is tuple else (member,)
        found += [c for i in inner for c in members(i) if isinstance(c, type) and is_dataclass(c)]
    return found


def _kind(cls: type) -> str:
    hint = get_type_hints(cls).get("kind")
    return str(get_args(hint)[0]) if get_origin(hint) is Literal else ""


def _type(hint: Any) -> str:
    names: list[str] = []
    for member in members(hint):
        if get_origin(member) is Literal:
            names += map(spelled, get_args(member))
        elif get_origin(member) is tuple:
            names.append(f"list of {_type(get_args(member)[0])}")
        elif is_dataclass(member) or isinstance(get_origin(member), type):
            names.append("table")
        elif member is not types.NoneType:
            names.append({"str": "text", "bool": "true | false"}.get(member.__name__, member.__name__))
    return " | ".join(dict.fromkeys(names))


def _default(f: "Field[Any]") -> str | None:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    if default is MISSING:
        return None
    if default is None or default == ():
        return "none"
    return "its own" if is_dataclass(default) else "{}" if isinstance(default, Mapping) else spelled(default)


def _aliases(key: str) -> tuple[str, ...]:
    own = {**ALIASES, **{name: f"algorithm.{path}" for name, path in ALGORITHM_PATHS.items()}}
    return tuple(sorted(name for name, path in own.items() if path == key))


def kinds(path: str) -> dict[str, type]:
    """Return the classes that may stand at ``path``, "task" or "rewards", by their kind."""
    hint = get_type_hints(Experiment)[path]
    found = _classes(hint) if path == "task" else _classes(get_type_hints(_classes(hint)[0])["verifier"])
    return {_kind(cls): cls for cls in found}


def of_kind(path: str, kind: str) -> tuple[Setting, ...]:
    """Return the settings of one kind of "task" or "rewards".

    Raises:
        ConfigError: There is no such kind; the message has the nearest one.
    """
    known = kinds(path)
    if kind not in known:
        raise ConfigError(unknown(f"kind of {path.removesuffix('s')}", kind, known))
    return tuple(setting for setting in settings() if setting.kind == kind and setting.key.startswith(f"{path}."))


def describe_kind(path: str, kind: str) -> str:
    """Return one kind of "task" or "rewards" in words: what it is, and its settings.

    Raises:
        ConfigError: There is no such kind.
    """
    found = of_kind(path, kind)
    text = (inspect.getdoc(kinds(path)[kind]) or "").partition("\n\nAttributes:")[0]
    return "\n\n".join([f'{path}: kind = "{kind}"', plain(text), *map(str, found)])


def list_kinds(path: str) -> str:
    """Return the kinds of "task" or "rewards", each with the first sentence of its documentation."""
    lines = []
    for kind, cls in kinds(path).items():
        first = plain((inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " "))
        lines += textwrap.wrap(first, 100, initial_indent=f"{kind:<16}", subsequent_indent=" " * 16)
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the page docs/configuration.md: a table for each section of an experiment."""
    sections: dict[str, list[Setting]] = {}
    for each in settings():
        sections.setdefault(each.key.partition(".")[0] if "." in each.key else "", []).append(each)
    lines = [_HEAD]
    for section, found in sections.items():
        lines += ["", f"## {section or 'The experiment'}", ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|", *map(_row, found)]
    return "\n".join(lines) + "\n"


def as_names() -> str:
    """Return config/known_names.json: the names that are checked before torch is imported."""
    keys: dict[str, dict[str, str]] = {}
    for setting in settings():
        keys.setdefault(setting.key, {})[setting.kind] = setting.type
    pieces = {"": dict.fromkeys(("preset", "piece", *(f.name for f in fields(Algorithm)), *ALGORITHM_ALIASES), "")}
    for place, fitting in slots().items():
        pieces[place] = {"piece": ""}
        for piece in fitting.values():
            for f in (f for f in fields(piece) if f.init):
                said = kind_of(get_type_hints(piece)[f.name])
                # Pieces of one place may have a field of one name and two types: then any type may be right.
                pieces[place][f.name] = said if pieces[place].get(f.name, said) == said else ""
    bounds = {"algorithm.num_generations": {"": "at least 1"}}  # an algorithm says it with the change that fixes it
    for setting in settings():
        bounds.setdefault(setting.key, {}).setdefault(setting.kind, setting.bound)
    for place, fitting in slots().items():
        # The one place of an algorithm that is a list.
        within = place.replace("regularizers", "regularizers.N")
        for name, piece in fitting.items():
            for f in fields(piece):
                bounds.setdefault(f"algorithm.{within}.{f.name}", {})[name] = bounds_of(piece).get(f.name, "")
    # Facts of a preset are written as differences from GRPO's, which keeps the file short.
    usual = facts(GRPO)
    names = {
        "keys": dict(sorted(keys.items())),
        "pieces": {place: dict(sorted(found.items())) for place, found in pieces.items()},
        "named pieces": {name: piece.__name__ for name, piece in named_pieces().items()},
        "bounds": {key: found for key, found in sorted(bounds.items()) if any(found.values())},
        "aliases": sorted({alias for setting in settings() for alias in setting.aliases}),
        "algorithms": [*ALGORITHMS],
        "facts": {
            name: {key: value for key, value in facts(algorithm).items() if usual[key] != value}
            for name, algorithm in ALGORITHMS.items()
        },
        "usual facts": usual,
        "defaults": {**_defaults(), "lora.base": LoraConfig.base},
        "reference": to_table(ReferencePolicy()),
        "rules": [*RULES],
        "rewards": sorted(kinds("rewards")),
        "tasks": sorted({*NAMED, *BENCHMARKS, *REFUSED, *PUBLISHED, *generators()}),
        "task packages": {
            "reasoning-gym": [*generators()],
            "datasets": [*PUBLISHED, *(name for name, known in BENCHMARKS.items() if not known.files)],
        },
        "reasoning-gym": version("reasoning-gym"),
    }
    return json.dumps(names, indent=1) + "\n"


def _defaults() -> dict[str, Any]:
    """Return the default of every setting outside of the algorithm that has one, by its key."""
    given = {f.name: f.default for f in fields(Experiment) if f.default is not MISSING and f.default is not None}
    return flat({name: to_table(value) if is_dataclass(value) else value for name, value in given.items()})


def _row(setting: Setting) -> str:
    given = "must be given" if setting.default is None else f"`{setting.default}`"
    said = [setting.meaning, *([f"Also understood: {', '.join(setting.aliases)}."] if setting.aliases else [])]
    cells = [f"`{setting.key}`" + (f" ({setting.kind})" if setting.kind else ""), setting.type, given, " ".join(said)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('``', '`') for cell in cells)} |"
