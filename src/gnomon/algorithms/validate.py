"""Compositions that cannot be meant are refused when they are made, saying what to do instead."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gnomon.algorithms.advantages import GroupRelative, Tracked, Whitened
from gnomon.algorithms.aggregates import SequenceMean, TokenMean
from gnomon.algorithms.corrections import OffPolicyMask, ProbabilityMask, Rejected
from gnomon.algorithms.plans import Greso, OptimalValue, Prioritized, TrackerPlan
from gnomon.algorithms.regularizers import EssKl
from gnomon.algorithms.surrogates import GeometricClip, Regression, Score, SoftGate
from gnomon.algorithms.trust import EssCap
from gnomon.errors import ConfigError

if TYPE_CHECKING:
    from gnomon.algorithms.algorithm import Algorithm


def validate(algorithm: "Algorithm") -> None:
    """Check a composition.

    Raises: ConfigError that lists everything that is wrong, each with its fix.
    """
    found = [
        *_counts(algorithm),
        *_advantage(algorithm),
        *_ratio(algorithm),
        *_surrogate(algorithm),
        *_regression(algorithm),
        *_critic(algorithm),
        *_policies(algorithm),
        *_prompts(algorithm),
        *_rewards(algorithm),
    ]
    if found:
        raise ConfigError(f"algorithm '{algorithm.name}': " + "; and ".join(found))


def uses_tracker(algorithm: "Algorithm") -> bool:
    """Whether the tracked success rate of a prompt is the baseline."""
    advantage = algorithm.advantage
    inner = advantage.of if isinstance(advantage, Whitened) else advantage
    return isinstance(inner, Tracked)


def anchors_on_both(algorithm: "Algorithm") -> bool:
    """Whether a piece looks at the proximal policy beside behavior, as P3O's two-anchor form does."""
    trust = algorithm.surrogate.trust if isinstance(algorithm.surrogate, Score) else None
    caps = isinstance(trust, EssCap) and trust.of == "both"
    return caps or any(isinstance(r, EssKl) and r.anchor == "mixture" for r in algorithm.regularizers)


def _counts(algorithm: "Algorithm") -> Iterator[str]:
    generations, fewest = algorithm.num_generations, algorithm.advantage.minimum_generations
    if generations < 1:
        yield f"num_generations must be at least 1, got {generations}"
    elif generations < fewest:
        yield (
            f"num_generations is {generations} (group size {generations}), but a group baseline "
            f"({type(algorithm.advantage).__name__}) compares responses to the same prompt; raise "
            f"num_generations to {fewest} or more, or use a tracked baseline, which needs no group: "
            "algorithm = 'spo'"
        )
    repeated = [name for name, n in Counter(r.name for r in algorithm.regularizers).items() if n > 1]
    if repeated:
        yield f"regularizers {', '.join(repeated)} appear more than once; add their coefficients up in one"


def _advantage(algorithm: "Algorithm") -> Iterator[str]:
    advantage = algorithm.advantage
    if not isinstance(advantage, Whitened):
        return
    inner = advantage.of
    if isinstance(inner, Whitened):
        yield "Whitened twice scales twice; keep one"
    if isinstance(inner, GroupRelative) and inner.scale != "none":
        yield (
            f"Whitened on top of GroupRelative(scale='{inner.scale}') scales twice; set advantage.of.scale = "
            "'none', or use GroupRelative without Whitened"
        )
    if isinstance(inner, Tracked) and inner.normalize:
        yield "Whitened on top of Tracked(normalize=True) scales twice; set advantage.of.normalize = false"


def _ratio(algorithm: "Algorithm") -> Iterator[str]:
    ratio, aggregate = algorithm.ratio, algorithm.aggregate
    if ratio.level != "token" and isinstance(aggregate, TokenMean):
        yield (
            f"a ratio of level '{ratio.level}' says one thing about a whole response, but TokenMean weighs "
            "it by length; set aggregate = SequenceMean, or ratio.level = 'token'"
        )
    is_filter = isinstance(algorithm.correction, Rejected | OffPolicyMask | ProbabilityMask)
    if ratio.anchor == "behavior" and algorithm.correction is not None and not is_filter:
        yield (
            "a ratio anchored on 'behavior' already covers the gap between behavior and proximal, and a "
            "correction would count it twice; remove the correction, or set ratio.anchor = 'proximal'"
        )


def _surrogate(algorithm: "Algorithm") -> Iterator[str]:
    surrogate, ratio = algorithm.surrogate, algorithm.ratio
    caps_by_size = isinstance(surrogate, Score) and isinstance(surrogate.trust, EssCap)
    ess_kl = any(isinstance(r, EssKl) for r in algorithm.regularizers)
    if (caps_by_size or ess_kl) and ratio.anchor != "behavior":
        piece = "EssCap" if caps_by_size else "EssKl"
        yield (
            f"{piece} measures how far the current policy is from the one that sampled, but the ratio is "
            f"anchored on '{ratio.anchor}'; set ratio.anchor = 'behavior'"
        )
    if caps_by_size and ratio.level != "token":
        yield f"EssCap counts tokens, but the ratio is of level '{ratio.level}'; set ratio.level = 'token'"
    if isinstance(surrogate, SoftGate) and algorithm.correction is not None:
        yield (
            "SoftGate fades ratios that are far from 1 and a correction weighs them again; remove the "
            "correction, or set surrogate = Pessimistic"
        )
    if isinstance(surrogate, GeometricClip) and ratio.level != "token":
        yield f"GeometricClip averages tokens itself; set ratio.level = 'token', got '{ratio.level}'"
    if isinstance(surrogate, GeometricClip) and not isinstance(algorithm.aggregate, SequenceMean):
        yield (
            "GeometricClip gives a loss to a whole response, which only SequenceMean counts once; set "
            f"aggregate = SequenceMean, got {type(algorithm.aggregate).__name__}"
        )


def _regression(algorithm: "Algorithm") -> Iterator[str]:
    ratio, regresses = algorithm.ratio, isinstance(algorithm.surrogate, Regression)
    if regresses and (ratio.anchor != "reference" or ratio.level != "sequence_product"):
        yield (
            "Regression compares the whole response's log-ratio to the reference with its advantage; set ratio = "
            "Ratio(anchor = 'reference', level = 'sequence_product', clamp = inf)"
        )
    if not regresses and ratio.anchor == "reference":
        yield (
            f"a ratio to the reference is no importance weight, which {type(algorithm.surrogate).__name__} takes it "
            "for; set ratio.anchor = 'proximal', or surrogate = Regression"
        )
    if regresses and not isinstance(algorithm.aggregate, SequenceMean):
        yield f"Regression has one error a response; set aggregate = SequenceMean, got {algorithm.aggregate}"
    if regresses and algorithm.correction is not None:
        yield "Regression is right for samples of any policy, and a correction would weigh them; remove the correction"
    if regresses and isinstance(algorithm.advantage, Tracked) and algorithm.advantage.normalize:
        yield "Regression aims at r - v in rewards, which a scale would change; set advantage.normalize = false"


def _critic(algorithm: "Algorithm") -> Iterator[str]:
    readers = [type(algorithm.advantage).__name__] if "values" in algorithm.advantage.needs else []
    readers += [type(r).__name__ for r in algorithm.regularizers if "values" in r.needs]
    if readers and algorithm.critic is None:
        yield (
            f"{' and '.join(readers)} reads the values of a critic, and there is none; set critic = CriticPlan, or an "
            "advantage without one, such as GroupRelative"
        )
    if algorithm.critic is not None and "values" not in algorithm.advantage.needs:
        yield (
            f"the critic has nobody to tell: {type(algorithm.advantage).__name__} reads no values; set advantage = "
            "Gae, or remove the critic"
        )
    if algorithm.replay is not None and algorithm.replay.weigh == "surplus" and algorithm.critic is None:
        yield "replay.weigh = 'surplus' compares with a critic, and there is none; set critic, or weigh = 'all'"
    if algorithm.critic is not None and algorithm.critic.trunk == "shared" and algorithm.proximal is not None:
        yield (
            "a shared trunk is moved by the value loss as well, which an averaged proximal policy does not follow; "
            + ("set critic.trunk = 'separate', or remove proximal")
        )


def _policies(algorithm: "Algorithm") -> Iterator[str]:
    if algorithm.scope != "step" and algorithm.ratio.anchor != "behavior":
        yield (
            f"scope = '{algorithm.scope}' is of effective sample sizes, which only a ratio to behavior reads; remove "
            "scope, or set ratio.anchor = 'behavior'"
        )
    if algorithm.proximal is not None and "proximal" not in algorithm.needs:
        yield "nothing reads the averaged proximal policy; remove proximal, or set ratio.anchor = 'proximal'"
    measures_drift = isinstance(algorithm.tracker, TrackerPlan) and algorithm.tracker.drift != "constant"
    if algorithm.proximal is not None and measures_drift:
        yield (
            "the tracker's drift would be measured from the averaged proximal policy; set tracker.drift = 'constant', "
            "or remove proximal"
        )


def _prompts(algorithm: "Algorithm") -> Iterator[str]:
    plan = algorithm.tracker
    if plan is None and uses_tracker(algorithm):
        yield "the baseline Tracked needs a tracker; set tracker = TrackerPlan, or advantage = GroupRelative"
    if isinstance(algorithm.sampler, Prioritized) and not isinstance(plan, TrackerPlan):
        yield "the sampler Prioritized needs a tracker; set tracker = TrackerPlan, or sampler = Uniform"
    if isinstance(plan, OptimalValue) and not uses_tracker(algorithm):
        yield "nothing reads tracker = OptimalValue; remove it, or set advantage = Tracked"
    if isinstance(algorithm.sampler, Greso) and algorithm.num_generations < 2:
        yield (
            "the sampler Greso skips prompts whose groups were all right or all wrong, and one response is always "
            "that; raise num_generations to 2 or more, or set sampler = Uniform"
        )
    if algorithm.keep is not None and uses_tracker(algorithm):
        yield (
            "keep drops groups of equal rewards, but a tracked baseline learns from single responses and "
            "none is wasted; remove keep"
        )
    elif algorithm.keep is not None and algorithm.num_generations < 2:
        yield "keep compares the rewards of a group, and one response is never kept; remove keep"
    if isinstance(plan, TrackerPlan) and plan.drift == "accumulated" and algorithm.updates.total == 1:
        yield (
            "tracker.drift = 'accumulated' adds up the drift that updates see after the first, and with one "
            "update a step there is nothing to measure; set tracker.drift = 'replayed' or 'constant', or "
            "updates.minibatches >= 2"
        )


def _rewards(algorithm: "Algorithm") -> Iterator[str]:
    plan = algorithm.tracker
    if isinstance(plan, TrackerPlan) and plan.rewards == "binary" and algorithm.overlong is not None:
        yield (
            "overlong makes rewards other than 0 and 1, which a binary tracker cannot count; set "
            "tracker.rewards = 'continuous', or remove overlong"
        )
    if algorithm.overlong is not None and algorithm.mask_truncated:
        yield (
            "overlong punishes truncated responses and mask_truncated leaves them out of the loss, so the "
            "punishment only shifts the others; choose one"
        )
