"""Names of TRL, verl, OpenRLHF and prime-rl: what each is here, or what to do instead. No torch.

One table, foreign_names.toml, which an experiment, `gnomon config NAME` and docs/migrate.md read. A name is translated
and said back, left out because gnomon does what it asks for, or refused with what to do. Names that depend on the
composition of an algorithm (clips, KL, aggregation) are translated by `gnomon.algorithms.aliases`; the table says what
they become.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.tables import packaged_toml, value_at

Pairs = Mapping[str, Any]
_TABLE = packaged_toml("gnomon.config", "foreign_names.toml")
_NOTHING = (None, "None", "none", "null", "")
DEFERRED = ("prompts_per_step", "warmup_ratio", "ppo_mini_batch_size")
"""Names whose value depends on the algorithm or on other settings: kept until those are known."""


@dataclass(frozen=True)
class Counterpart:
    """What one name of another library is here.

    Attributes:
        says: Our key, or what to do; what a page and a refusal show.
        convert: From the other library's value to our keys and values; it returns None for a value that has no
            counterpart. None as a whole: no value has one.
        neutral: Values that ask for what gnomon does anyway.
        is_needless: Whether every value is left out, because it changes no result.
        holds: What a neutral value says of our settings, by patterns of their keys; "none" says that none is set.
    """

    says: str
    convert: Callable[[Any], Pairs | None] | None = None
    neutral: tuple[Any, ...] = ()
    is_needless: bool = False
    holds: Pairs = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        """Our key where the name is another word for it and the value stays; None otherwise."""
        return self.says if self.convert is not None and " " not in self.says else None


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


_WAYS: Mapping[str, Callable[[Any], Any]] = {
    "list": _values,
    "sinks": lambda value: [name for name in _values(value) if name not in (*_NOTHING, "console", "file")],
    "targets": lambda value: value if value == "all-linear" or not isinstance(value, str) else [value],
    "first": lambda value: listed[0] if len(listed := _values(value)) == 1 and isinstance(listed[0], str) else None,
    "compute_score": lambda value: [f"{value}:compute_score"],
}
"""Conversions that the table names in `by`."""


def _converted(entry: Mapping[str, Any], value: Any) -> Pairs | None:
    """Return our keys and values for a value of theirs, None where it has no counterpart."""
    # One name of theirs with several of ours, such as a pair of betas.
    if keys := entry.get("keys"):
        return dict(zip(keys, value, strict=True)) if len(keys) == len(_values(value)) else None
    if "values" in entry:
        made = entry["values"].get(_say(value) if isinstance(value, bool) else str(value))
    elif "replace" in entry:
        made = entry["replace"][1] if value == entry["replace"][0] else value
    elif "on" in entry:
        made = entry["on" if value else "off"]
    else:
        made = _WAYS[entry["by"]](value) if "by" in entry else value
    return None if made is None else {entry["key"]: deepcopy(made)}


def _counterpart(entry: str | Mapping[str, Any]) -> Counterpart:
    if isinstance(entry, str):
        entry = {"key": entry}
    says = next((entry[kind] for kind in ("needless", "instead", "says") if kind in entry), None)
    if says is None:
        shown = [f"{theirs} = {ours!r}" for theirs, ours in entry.get("values", {}).items()]
        shown += ["{} is {}".format(*entry["replace"])] if "replace" in entry else []
        says = entry["key"] + (f" ({', '.join(shown)})" if shown else "")
    says = _TABLE["texts"][says[1:]] if says.startswith("@") else says
    convert = partial(_converted, entry) if "key" in entry or "keys" in entry else None
    return Counterpart(says, convert, tuple(entry.get("neutral", ())), "needless" in entry, entry.get("holds", {}))


COMMON, TRL, VERL, OPENRLHF, PRIME_RL = (
    {name: _counterpart(entry) for name, entry in _TABLE[library].items()}
    for library in ("common", "trl", "verl", "openrlhf", "prime_rl")
)
COMPOSED: Mapping[str, str] = _TABLE["composed"]
"""Names that the algorithm's own composition translates, and what they become."""

FOREIGN: Mapping[str, Counterpart] = {**PRIME_RL, **OPENRLHF, **VERL, **TRL, **COMMON}
SECTIONS = frozenset(name.partition(".")[0] for name in FOREIGN if "." in name) - {"algorithm", "model"}
"""Sections that another library's files have, and that an experiment has not."""
ALIASES: Mapping[str, str] = {
    name: counterpart.key
    for name, counterpart in FOREIGN.items()
    if counterpart.key is not None
    and "." not in name
    and counterpart.key not in DEFERRED
    and not counterpart.key.startswith("algorithm.")
}
"""Other libraries' names at the top of an experiment that are our keys under another name."""
_SWITCHES = {**_TABLE["switches"], "use_vllm": [name for name in TRL if name.startswith("vllm_")]}
"""Names that say nothing where another one is false."""
_MORE: Mapping[str, str] = _TABLE["more"]
"""Names that say nothing when they are true and another one says more."""


_HEAD = """# Names of other libraries

Written by `gnomon config --migration`. A configuration of TRL, verl, OpenRLHF or prime-rl mostly works as it is, in a
TOML file, on the command line (`save_steps=50`, `--save_steps 50`, `trainer.save_freq=50`) and in `gnomon.train(...)`.
Each name is translated and said back, left out because it changes no result, or refused with what to do.
`gnomon config NAME` says what one name is."""
_KEPT = {FOREIGN[name].says for name in DEFERRED}
_TITLES: Mapping[str, Mapping[str, Counterpart]] = {
    "TRL and transformers": TRL,
    "verl": VERL,
    "OpenRLHF": OPENRLHF,
    "prime-rl": PRIME_RL,
    "Short names": COMMON,
}


def as_markdown() -> str:
    """Return the page docs/migrate.md: a table for each library."""
    lines = [_HEAD]
    for title, names in _TITLES.items():
        rows = [f"| `{name}` | {_cell(counterpart)} |" for name, counterpart in names.items()]
        lines += ["", f"## {title}", "", "| name | here |", "|---|---|", *rows]
    composed = [f"| `{name}` | `{says}` |" for name, says in COMPOSED.items()]
    about = "An algorithm says whether it has such a part; a name that says nothing about it is refused."
    return "\n".join(
        [*lines, "", "## Parts of an algorithm", "", about, "", "| name | here |", "|---|---|", *composed, ""]
    )


def _cell(counterpart: Counterpart) -> str:
    if counterpart.key is not None:
        return f"`{counterpart.key}`"
    says = counterpart.says.replace("|", "\\|")
    if counterpart.is_needless:
        return f"left out: {says}"
    return says if counterpart.convert is not None or counterpart.says in _KEPT else f"write instead: {says}"


def translated(pairs: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return settings under our keys, and a sentence for each that had another library's.

    Args:
        pairs: Keys and values as they were written, ours among them.

    Raises:
        ConfigError: Names or values that have no counterpart; the message says what to do, for three at most.

    >>> translated([("save_steps", 50), ("seed", 1)])
    ([('checkpoints.every', 50), ('seed', 1)], ['save_steps = 50 is checkpoints.every = 50'])
    """
    given = [part for name, value in pairs for part in _spread(name, value)]
    # Names that mean nothing because their switch is off, or because another name says more.
    off = {each for name, value in given if value is False for each in _SWITCHES.get(name, ())}
    off |= {name for name, value in given if value is True and any(each == _MORE.get(name) for each, _ in given)}
    ours: list[tuple[str, Any]] = []
    notes: list[str] = []
    refused: list[str] = []
    for name, value in given:
        counterpart = FOREIGN.get(name)
        if name in DEFERRED or (counterpart is None and not _is_theirs(name)):
            ours.append((name, value))
        elif counterpart is None:
            refused.append(f"{name}: no counterpart here; leave it out")
        elif name in off or value in _NOTHING:
            notes.append(f"{name} = {_say(value)} is left out")
        elif _is_among(value, counterpart.neutral):
            notes.append(f"{name} = {_say(value)} is left out: it is what gnomon does anyway")
        elif counterpart.is_needless:
            notes.append(f"{name} = {_say(value)} is left out: {counterpart.says}")
        elif (made := counterpart.convert(value) if counterpart.convert else None) is None:
            refused.append(f"{name} = {_say(value)}: {counterpart.says}")
        else:
            ours += made.items()
            notes += [f"{name} = {_say(value)} is {key} = {_say(new)}" for key, new in made.items()]
    if refused:
        more = [f"and {len(refused) - 3} more; docs/migrate.md has all names"] if len(refused) > 3 else []
        raise ConfigError(
            "names of another library have no such setting; instead:\n  " + "\n  ".join([*refused[:3], *more])
        )
    return ours, notes


def refuse_contradicted(pairs: Iterable[tuple[str, Any]], settings: Pairs) -> None:
    """Refuse a neutral value that this experiment does not agree with.

    Args:
        pairs: Keys and values as they were written, ours among them.
        settings: Every setting of the experiment, by its key.

    Raises:
        ConfigError: It names both, and what to type.
    """
    for name, value in (part for given in pairs for part in _spread(*given)):
        counterpart = FOREIGN.get(name)
        if counterpart is None or not _is_among(value, counterpart.neutral):
            continue
        for pattern, wanted in counterpart.holds.items():
            for key in settings:
                if fnmatchcase(key, pattern) and settings[key] != wanted:
                    above, _, last = key.rpartition(".")
                    fix = f"set {key} = {_say(wanted)}"
                    if wanted == "none":
                        fix = f"set {above} = none" if last == "piece" else "change one of them"
                    elif last.isdecimal():
                        fix = f"write {counterpart.says}"
                    said = f"{name} = {_say(value)}, and this experiment has {key} = {settings[key]!r}"
                    raise ConfigError(f"{said}; {fix}, or leave {name} out")


_WORKED_OUT: Mapping[str, str] = {
    "prompts_per_step": "rollouts_per_step",
    "warmup_ratio": "learner.optimizer.warmup_steps",
    "ppo_mini_batch_size": "algorithm.updates.minibatches",
    **{key: f"algorithm.{key}" for key in COMPOSED},
}
"""Names at the top of a table that become another setting once the algorithm is known, and that setting."""


def leave_older(whole: dict[str, Any], foreign: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Leave out names of a file that become a setting which the command line gives.

    Raises:
        ConfigError: A name and the setting that it becomes are given in one place, with values that differ.
    """
    for theirs, ours in _WORKED_OUT.items():
        # A warm-up of 0 steps beside a share of them says nothing, as in transformers.
        there = foreign.get(ours, value_at(whole, ours)) or None
        for above, below in (
            (foreign.get(theirs, whole.get(theirs)), there),
            (overrides.get(theirs), overrides.get(ours) or None),
        ):
            if None not in (above, below) and above != below:
                raise ConfigError(
                    f"{theirs} = {above!r} and {ours} = {below!r} say the same in two ways; leave one out"
                )
        if ours in overrides and theirs not in overrides:
            whole.pop(theirs, None)
            foreign.pop(theirs, None)


def refuse_twice(whole: Mapping[str, Any], foreign: Sequence[tuple[str, Any]]) -> None:
    """Refuse one setting under two names in one table.

    Raises:
        ConfigError: If two names set it to two values.
    """
    for number, (key, value) in enumerate(foreign):
        node = value_at(whole, key)
        others = [node] if node is not None and not isinstance(node, Mapping) else []
        others += [other for name, other in foreign[:number] if name == key]
        if any(other != value for other in others):
            raise ConfigError(f"{key} is given twice under two names: {others[0]!r} and {value!r}; leave one out")


def taken_out(table: dict[str, Any]) -> list[tuple[str, Any]]:
    """Take other libraries' names and sections out of the table of an experiment, and return them.

    >>> table = {"trainer": {"save_freq": 5}, "seed": 1}
    >>> taken_out(table), table
    ([('trainer', {'save_freq': 5})], {'seed': 1})
    """
    names = [key for key in table if (key in FOREIGN or key in SECTIONS) and key not in DEFERRED]
    names += ["model"] if isinstance(table.get("model"), dict) else []
    found = [(key, table.pop(key)) for key in names]
    algorithm = table.get("algorithm")
    return [*found, *(_below_algorithm(algorithm, "algorithm") if isinstance(algorithm, dict) else [])]


def _below_algorithm(node: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """Take verl's keys out of an algorithm, which has our own keys as well."""
    found: list[tuple[str, Any]] = []
    for key in list(node):
        name = f"{path}.{key}"
        if name in FOREIGN:
            found.append((name, node.pop(key)))
        elif isinstance(node[key], dict):
            inside = _below_algorithm(node[key], name)
            found += inside
            if inside and not node[key]:
                del node[key]
    return found


def _spread(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the keys within a section of another library, with dots."""
    # Only sections of another library are taken apart; ours keep their tables.
    if not isinstance(value, Mapping) or name in FOREIGN or not _is_theirs(f"{name}."):
        return [(name, value)]
    return [part for key, below in value.items() for part in _spread(f"{name}.{key}", below)]


def _is_theirs(name: str) -> bool:
    section, dot, _ = name.partition(".")
    return bool(dot) and section in (*SECTIONS, "model")


def _is_among(value: Any, neutral: Sequence[Any]) -> bool:
    # True == 1 in Python, and they are two settings.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _say(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
