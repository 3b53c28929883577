"""Which pieces fit where, and what a leaf of a table may be."""

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gnomon.algorithms import advantage_algebra as algebra
from gnomon.algorithms import advantages, corrections, ratio_bounds, regularizers, returns, surrogates
from gnomon.algorithms import loss_aggregation as aggregation
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.protocols import Advantage, Aggregate, Correction, Regularizer, Surrogate
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.tables import either

SLOTS: Mapping[Any, tuple[type, ...]] = {
    Advantage: (
        advantages.Accepted, advantages.ConstantAdvantage, advantages.GroupRelative, advantages.LeaveOneOut,
        advantages.MarginalBest, advantages.OptimalBaseline, returns.OptimalTokenBaseline, returns.Returns,
        returns.StateRelative, returns.ReverseKl, advantages.TrackedBaseline, returns.Gae, advantages.Whitened,
        algebra.AdvantageSum, algebra.Scaled, algebra.Where, algebra.Normalized, algebra.PerReward,
    ),
    algebra.Condition: (algebra.RewardAtLeast, algebra.InRole),
    returns.LambdaRule: (returns.Fixed, returns.LengthAdaptive, returns.LengthSigmoid),
    Surrogate: (
        surrogates.ClippedSurrogate, surrogates.BalancedSurrogate, surrogates.PolicyGradient, surrogates.SigmoidGate,
        surrogates.QuadraticPenalty, surrogates.GeometricClip, surrogates.Regression, surrogates.Distillation,
        surrogates.GivenShaping, surrogates.PreferenceLoss, surrogates.ProspectLoss,
    ),
    ratio_bounds.RatioBound: (
        ratio_bounds.Clip, ratio_bounds.Cap, ratio_bounds.EssCap, ratio_bounds.GammaKernel, ratio_bounds.Unbounded,
    ),
    Correction: (
        corrections.TruncatedIS, corrections.MaskedIS, corrections.RejectionSampling, corrections.OffPolicyMask,
        corrections.DivergenceMask, corrections.SecondMomentMask, corrections.EntropyMask, corrections.CovarianceMask,
        corrections.FutureInfluence, corrections.Capped,
    ),
    Regularizer: (
        regularizers.Kl, regularizers.EssKl, regularizers.CovarianceKl, regularizers.Entropy, regularizers.PositiveNll,
        regularizers.GivenNll, regularizers.SelfImitation,
    ),
    Aggregate: (aggregation.TokenMean, aggregation.SequenceMean, aggregation.SequenceSum, aggregation.ConstantLength),
}  # fmt: skip
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "'none'"}


@dataclass(frozen=True)
class Members:
    """The types that an annotation allows; ``sequence`` is X when it is tuple[X, ...]."""

    types: tuple[Any, ...]
    sequence: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.types)


def members(hint: Any) -> Members:
    """Return the types that ``hint`` allows.

    >>> members(int | None).types
    (<class 'int'>, <class 'NoneType'>)
    """
    if get_origin(hint) in (Union, types.UnionType):
        return Members(get_args(hint))
    if get_origin(hint) is tuple:
        return Members((hint,), get_args(hint)[0])
    return Members((hint,))


def choices(wanted: Members) -> dict[str, type]:
    """Return the pieces by name that fit; none for a leaf."""
    found: dict[str, type] = {}
    for member in wanted:
        own: tuple[type, ...] = (member,) if isinstance(member, type) and is_dataclass(member) else ()
        for cls in SLOTS.get(member, own):
            found[str(cls.__name__)] = cls
    return found


def slots() -> dict[str, dict[str, type]]:
    """Return the pieces by name for each place below an algorithm: its own parts first, then parts of pieces.

    >>> list(slots()["advantage.policy_lambda"])
    ['Fixed', 'LengthAdaptive', 'LengthSigmoid']
    """
    found: dict[str, dict[str, type]] = {}
    visited: list[tuple[str, type]] = [("", Algorithm)]
    for path, cls in visited:
        for name, hint in get_type_hints(cls).items():
            wanted = members(hint)
            fitting = choices(wanted if wanted.sequence is None else members(wanted.sequence))
            # A place that takes the same pieces as an earlier one is not listed again, which also ends the recursion.
            if fitting and fitting not in found.values():
                place = f"{path}.{name}" if path else name
                found[place] = found.get(place, {}) | fitting
                visited += [(place, piece) for piece in fitting.values()]
    return found


def leaf(hint: Any, value: Any, path: str) -> Any:
    """Return ``value`` when it is what ``hint`` says: no "5" for 5, no 1 for true, but 1 for 1.0.

    Raises:
        ConfigError: The message names the path, the value and what was expected.
    """
    expected: list[str] = []
    for member in members(hint):
        if get_origin(member) is Literal:
            options = get_args(member)
            if any(value == option and type(value) is type(option) for option in options):
                return value
            if isinstance(value, str) and all(isinstance(o, str) for o in options):
                raise ConfigError(f"{path} = {value!r}: {unknown('choice', value, options)}")
            expected += map(repr, options)
        elif member is float and type(value) in (int, float) and _is_float(value):
            # bool is a subclass of int, so types are compared and not `isinstance`.
            return float(value)
        elif member in (bool, int, str) and type(value) is member:
            return value
        else:
            expected.append(_EXPECTED.get(member, str(member)))
    raise ConfigError(f"{path} = {value!r}: should be {either(expected, value)}")


def _is_float(value: int | float) -> bool:
    """Whether a float can say it: infinity can, NaN and a whole number beyond 1e308 cannot be meant."""
    return not math.isnan(value) if isinstance(value, float) else abs(value) < 2**1023
