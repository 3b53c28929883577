"""The rules by name, and which of them a run is watched with."""

from collections.abc import Mapping, Sequence

from gnomon.core.errors import ConfigError, unknown
from gnomon.diagnosis.finding import SEVERITIES
from gnomon.diagnosis.rule import Rule
from gnomon.diagnosis.rules.groups import AllRight, AllWrong, DegenerateGroups, ZeroGradient
from gnomon.diagnosis.rules.held_out import HeldOutGap
from gnomon.diagnosis.rules.pace import Throughput
from gnomon.diagnosis.rules.policy import Clipping, EntropyCollapse, GradientNorm
from gnomon.diagnosis.rules.rewards import (
    ConstantPart,
    DominantPart,
    FormIgnored,
    NothingMoves,
    NotLearning,
    RewardFalls,
    VerifierErrors,
)
from gnomon.diagnosis.rules.state import CriticExplains, TrackerStarves
from gnomon.diagnosis.rules.texts import Duplicates, LengthReward, Repetition, Truncation
from gnomon.diagnosis.rules.trust import EffectiveSampleSize, EngineMismatch, RefusedSteps, WeightsNotArrived

_ALL: tuple[Rule, ...] = (
    RefusedSteps(),
    WeightsNotArrived(),
    RewardFalls(),
    AllWrong(),
    AllRight(),
    EntropyCollapse(),
    EngineMismatch(),
    EffectiveSampleSize(),
    GradientNorm(),
    Clipping(),
    VerifierErrors(),
    Duplicates(),
    LengthReward(),
    Truncation(),
    Repetition(),
    DominantPart(),
    ConstantPart(),
    FormIgnored(),
    DegenerateGroups(),
    ZeroGradient(),
    NotLearning(),
    NothingMoves(),
    CriticExplains(),
    TrackerStarves(),
    HeldOutGap(),
    Throughput(),
)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in _ALL}
"""Every rule, causes before what follows from them."""


def chosen(names: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules that a run is watched with: those named, all without one; never those named with a minus.

    >>> [rule.name for rule in chosen(["throughput", "all-wrong"])], len(chosen()) - len(chosen(["-throughput"]))
    (['all-wrong', 'throughput'], 1)

    Raises: ConfigError for a name that is no rule.
    """
    for name in names:
        if name.removeprefix("-") not in RULES:
            raise ConfigError(f"doctor.rules: {unknown('rule', name.removeprefix('-'), RULES)}")
    alone = [name for name in names if not name.startswith("-")] or list(RULES)
    return tuple(rule for name, rule in RULES.items() if name in alone and f"-{name}" not in names)


def check_stops(stop_on: Sequence[str]) -> None:
    """Refuse what is neither a severity nor a rule. Raises: ConfigError naming the nearest."""
    for name in stop_on:
        if name not in RULES and name not in SEVERITIES:
            raise ConfigError(f"doctor.stop_on: {unknown('severity or rule', name, [*SEVERITIES, *RULES])}")
