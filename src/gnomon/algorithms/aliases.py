"""Other libraries' names for what we have: accepted beside the name of a preset, and said back.

Keys, and values of ``correction`` and ``routing``. Only where one thing can be meant. What depends on the composition
is decided by it, and refused with the right path when it cannot be.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gnomon.algorithms.advantages import GroupRelative, LeaveOneOut, Whitened
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.loss_aggregation import ConstantLength
from gnomon.algorithms.protocols import Regularizer
from gnomon.algorithms.regularizers import Entropy, Kl
from gnomon.algorithms.returns import Returns
from gnomon.algorithms.surrogates import ClippedSurrogate
from gnomon.core.errors import ConfigError
from gnomon.core.tables import canonical, packaged_toml

Changes = dict[str, Any]
Rule = Callable[[str, Any, Algorithm, Mapping[str, Any]], Changes]

_TABLE = packaged_toml("gnomon.algorithms", "aliases.toml")
_CLIPS: Mapping[str, str] = _TABLE["clips"]
_AGGREGATES: Mapping[str, str] = _TABLE["aggregates"]
_ESTIMATORS: Mapping[str, str] = _TABLE["estimators"]
PATHS: Mapping[str, str] = _TABLE["paths"]
FORMER: Mapping[str, str] = _TABLE["former"]
"""What pieces were called in gnomon 0.1's first months; understood in tables and in files of one's own."""
CORRECTIONS: Mapping[str, Changes] = _TABLE["corrections"]
"""What other libraries call a correction."""
_SCALES: Mapping[Any, str] = {True: "group", "group": "group", "batch": "batch", False: "none", "none": "none"}


def translate(table: Mapping[str, Any], base: Algorithm) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``table`` in our own names, and one sentence for each name that was another's.

    Raises:
        ConfigError: Such a name says nothing about ``base``, has a wrong value, or says the same as another.
    """
    table, notes = _values(table)
    ours: dict[str, Any] = {key: value for key, value in table.items() if key not in ALIASES}
    added: list[Regularizer] | None = None
    for key, value in table.items():
        if key not in ALIASES:
            continue
        for other, rule in ALIASES.items():
            if rule is ALIASES[key] and rule in _TERMS and other in table and table[other] != value:
                raise ConfigError(
                    f"'{key}' is given twice under two names: {key} = {value!r}, {other} = {table[other]!r}"
                )
        changes = ALIASES[key](key, value, base, table)
        if "regularizers" in changes:
            current = list(base.regularizers) if added is None else added
            added = _merge(current, changes.pop("regularizers"))
            notes.append(f"{key} = {_say(value)} is regularizers = {_say_terms(added)}")
        for path, new in changes.items():
            if path in ours and ours[path] != new:
                raise ConfigError(f"'{key}' is {path}, which is given twice: {ours[path]!r} and {new!r}")
            ours[path] = new
            notes.append(f"{key} = {_say(value)} is {path} = {_say(new)}")
    if added is not None:
        if any(k.split(".")[0] == "regularizers" for k in table):
            raise ConfigError("regularizers are given, and other libraries' names for them too; use one")
        ours["regularizers"] = added
    return ours, tuple(notes)


def piece_of(name: str) -> dict[str, Any] | None:
    """Return the table of the correction that other libraries call ``name``, or None.

    >>> piece_of("icepop")
    {'piece': 'MaskedIS', 'low': 0.5, 'high': 5.0}
    """
    return CORRECTIONS.get(canonical(name))


def _values(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``table`` with our own names of routings and corrections, and a sentence for each that was another's."""
    ours, notes = dict(table), []
    routing, correction = ours.get("routing"), ours.get("correction")
    if isinstance(routing, str) and routing.upper() in _TABLE["routings"]:
        ours["routing"] = _TABLE["routings"][routing.upper()]
        notes.append(f"routing = {routing!r} is routing = {ours['routing']!r}")
    given = correction if isinstance(correction, Mapping) else {"piece": correction}
    named = given.get("piece")
    piece = piece_of(named) if isinstance(named, str) else None
    if piece is not None:
        ours["correction"] = {**piece, **{key: value for key, value in given.items() if key != "piece"}}
        notes.append(f"correction = {named!r} is correction = {_say(piece)}")
    return ours, notes


def former_pieces(table: Any, path: str = "algorithm") -> tuple[Any, list[str]]:
    """Return ``table`` with the present names of pieces, and a sentence for each that was a former one.

    >>> former_pieces({"surrogate": {"piece": "Score"}})
    ({'surrogate': {'piece': 'PolicyGradient'}}, ["algorithm.surrogate: piece 'Score' is 'PolicyGradient'"])
    """
    if isinstance(table, Mapping):
        found = {key: former_pieces(value, f"{path}.{key}") for key, value in table.items()}
        return {key: value for key, (value, _) in found.items()}, [n for _, notes in found.values() for n in notes]
    if isinstance(table, list | tuple):
        each = [former_pieces(value, f"{path}.{number}") for number, value in enumerate(table)]
        return [value for value, _ in each], [n for _, notes in each for n in notes]
    is_piece = isinstance(table, str) and table in FORMER and not path.endswith((".name", ".paper"))
    if not is_piece:
        return table, []
    return FORMER[table], [f"{path.removesuffix('.piece')}: piece {table!r} is {FORMER[table]!r}"]


def _same(path: str) -> Rule:
    return lambda key, value, base, table: {path: value}


def _clip_rule(sides: str) -> Rule:
    def rule(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
        if not isinstance(base.surrogate, ClippedSurrogate):
            raise ConfigError(
                f"'{key}' is a clip, and '{base.name}' has none: it uses {type(base.surrogate).__name__}; set a field "
                "of that instead, for example algorithm.surrogate.trust.cap, which is absolute (1 + epsilon_high)"
            )
        # TRL: epsilon is both sides, unless epsilon_high is given.
        # Either library's name for the upper bound, or ours.
        is_high_given = any(_CLIPS.get(k) == "high" or k == "surrogate.trust.high" for k in table)
        wanted = ["low"] if sides == "low high" and is_high_given else sides.split()
        return {f"surrogate.trust.{side}": value for side in wanted}

    return rule


def _dual(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
    if not isinstance(base.surrogate, ClippedSurrogate):
        raise ConfigError(f"'{key}' is a dual clip, and '{base.name}' has no clip: remove it")
    return {"surrogate.dual": value}


def _beta(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
    number = _number(key, value)
    advantage = base.advantage
    inner, path = advantage, "advantage.kl"
    if isinstance(advantage, Whitened):
        inner, path = advantage.of, "advantage.of.kl"
    # The preset has the KL in its reward, so the coefficient belongs there and not to a regularizer.
    if isinstance(inner, Returns | LeaveOneOut) and inner.kl > 0:
        return {path: number}
    estimator = next((_estimator(k, table[k]) for k in _ESTIMATOR_KEYS if k in table), None)
    there = next((r for r in base.regularizers if isinstance(r, Kl) and r.anchor == "reference"), Kl())
    return {"regularizers": Kl("reference", number, estimator or there.estimator)}  # type: ignore[arg-type]


def _kl_estimator(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
    estimator = _estimator(key, value)
    there = next((r for r in base.regularizers if isinstance(r, Kl) and r.anchor == "reference"), None)
    given = [k for k in _BETAS if k in table]
    if not given and there is None:
        raise ConfigError(f"'{key}' says how a KL is estimated, and '{base.name}' has none: set beta as well")
    coefficient = _number(given[0], table[given[0]]) if given else (there or Kl()).coefficient
    return {"regularizers": Kl("reference", coefficient, estimator)}  # type: ignore[arg-type]


def _entropy(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
    return {"regularizers": Entropy(_number(key, value))}


def _scale(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
    if not isinstance(base.advantage, GroupRelative):
        raise ConfigError(f"'{key}' scales group advantages, and '{base.name}' uses {type(base.advantage).__name__}")
    if not isinstance(value, bool | str) or value not in _SCALES:
        raise ConfigError(f"{key} = {value!r}: should be true, false, 'group', 'batch' or 'none'")
    return {"advantage.scale": _SCALES[value]}


def _aggregate(key: str, value: Any, base: Algorithm, table: Mapping[str, Any]) -> Changes:
    if not isinstance(value, str) or value not in _AGGREGATES:
        raise ConfigError(
            f"{key} = {value!r}: should be one of {', '.join(_AGGREGATES)}; a loss of another kind is another preset"
        )
    piece = _AGGREGATES[value]
    if piece != "ConstantLength":
        return {"aggregate": {"piece": piece}}
    if isinstance(base.aggregate, ConstantLength):
        return {"aggregate": {"piece": piece, "length": base.aggregate.length}}
    raise ConfigError(
        f"{key} = '{value}' divides by a constant that has to be said: set algorithm.aggregate = "
        "{piece = 'ConstantLength', length = <completion budget in tokens>}"
    )


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ConfigError(f"{key} = {value!r}: should be a number")
    return float(value)


def _estimator(key: str, value: Any) -> str:
    if not isinstance(value, str) or value not in _ESTIMATORS:
        raise ConfigError(f"{key} = {value!r}: should be one of {', '.join(_ESTIMATORS)}")
    return _ESTIMATORS[value]


def _merge(current: list[Regularizer], new: Regularizer) -> list[Regularizer]:
    # A regularizer of the same name is replaced; coefficient 0 removes it.
    kept = [r for r in current if r.name != new.name]
    is_off = isinstance(new, Kl | Entropy) and new.coefficient == 0
    return kept if is_off else [*kept, new]


def _say(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {new!r}" for key, new in value.items())
        return str(value["piece"]) if [*value] == ["piece"] else f"{{{inside}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _say_terms(terms: list[Regularizer]) -> str:
    return "[" + ", ".join(repr(t) for t in terms) + "]"


_BETAS = ("beta", "kl_coef", "kl_coeff", "kl_loss_coef")
_TERMS = (_beta, _kl_estimator, _entropy)
_ESTIMATOR_KEYS = ("kl_estimator", "kl_estimator_type", "kl_loss_type")
ALIASES: Mapping[str, Rule] = {
    **{key: _same(path) for key, path in PATHS.items()},
    **{key: _clip_rule(sides) for key, sides in _CLIPS.items()},
    **dict.fromkeys(("delta", "clip_c", "clip_ratio_c", "c_clip"), _dual),
    **dict.fromkeys(_BETAS, _beta),
    **dict.fromkeys(_ESTIMATOR_KEYS, _kl_estimator),
    **dict.fromkeys(("entropy_coef", "entropy_coeff"), _entropy),
    **dict.fromkeys(("scale_rewards", "normalize_std", "norm_adv_by_std_in_grpo"), _scale),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), _aggregate),
}
