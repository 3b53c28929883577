"""All rules by name, and the choice of rules for a run."""

from collections.abc import Mapping, Sequence

from gnomon.core.errors import ConfigError, unknown
from gnomon.diagnosis.finding import SEVERITIES
from gnomon.diagnosis.rule import Rule
from gnomon.diagnosis.rules import policy, rewards

_ALL: tuple[Rule, ...] = (
    policy.RefusedSteps(), policy.WeightsNotArrived(), rewards.RewardFalls(), rewards.AllWrong(), rewards.AllRight(),
    policy.EntropyCollapse(), policy.EngineMismatch(), policy.EffectiveSampleSize(), policy.GradientNorm(),
    policy.Clipping(), rewards.VerifierErrors(), rewards.Duplicates(), rewards.LengthReward(), rewards.Truncation(),
    rewards.Repetition(), rewards.DominantPart(), rewards.ConstantPart(), rewards.FormIgnored(),
    rewards.DegenerateGroups(), rewards.ZeroGradient(), rewards.NotLearning(), rewards.NothingMoves(),
    policy.CriticExplains(), policy.TrackerStarves(), policy.HeldOutGap(), policy.HeldOutLoss(), policy.Throughput(),
)  # fmt: skip
RULES: Mapping[str, Rule] = {rule.name: rule for rule in _ALL}
"""Every rule; causes come before their consequences."""
SUPERVISED = frozenset(("not-finite", "gradient-norm", "held-out-loss", "throughput"))
"""Rules that have a meaning where answers are trained on that the run does not sample."""


def chosen(names: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules for a run: the named rules, or all rules, without the names that begin with a minus.

    >>> [rule.name for rule in chosen(["throughput", "all-wrong"])], len(chosen()) - len(chosen(["-throughput"]))
    (['all-wrong', 'throughput'], 1)

    Raises:
        ConfigError: If a name is not a rule.
    """
    for name in names:
        if name.removeprefix("-") not in RULES:
            raise ConfigError(f"doctor.rules: {unknown('rule', name.removeprefix('-'), RULES)}")
    alone = [name for name in names if not name.startswith("-")] or list(RULES)
    return tuple(rule for name, rule in RULES.items() if name in alone and f"-{name}" not in names)


def check_stops(stop_on: Sequence[str]) -> None:
    """Check names of severities and rules.

    Raises:
        ConfigError: If a name is neither; the message has the nearest valid name.
    """
    for name in stop_on:
        if name not in RULES and name not in SEVERITIES:
            raise ConfigError(f"doctor.stop_on: {unknown('severity or rule', name, [*SEVERITIES, *RULES])}")
