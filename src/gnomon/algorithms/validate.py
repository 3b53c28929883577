"""Checks of a composition: contradictions are refused with the changes that fix them; remarks name what is unusual."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any

from gnomon.algorithms.advantage_algebra import Normalized, Scaled
from gnomon.algorithms.advantages import ConstantAdvantage, GroupRelative, TrackedBaseline, Whitened
from gnomon.algorithms.composition import Composition
from gnomon.algorithms.corrections import DivergenceMask, SecondMomentMask
from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.loss_aggregation import SequenceMean, TokenMean
from gnomon.algorithms.piece_checks import check_finite, check_places
from gnomon.algorithms.protocols import Advantage, Composed, Surrogate, parts_of
from gnomon.algorithms.ratio_bounds import Cap, EssCap, Unbounded
from gnomon.algorithms.ratios import Ratio
from gnomon.algorithms.regularizers import CovarianceKl, Entropy, EssKl, GivenNll, Kl
from gnomon.algorithms.returns import Gae, Returns, ReverseKl
from gnomon.algorithms.sections import (
    Greso,
    NoPositiveResampling,
    OptimalValue,
    Prioritized,
    ReferencePolicy,
    RoleAverage,
    TrackerConfig,
    Uniform,
    Updates,
)
from gnomon.algorithms.surrogates import (
    ClippedSurrogate,
    Distillation,
    GeometricClip,
    GivenShaping,
    PolicyGradient,
    PreferenceLoss,
    ProspectLoss,
    Regression,
    SigmoidGate,
)
from gnomon.algorithms.user_pieces import spelled
from gnomon.core.combinations import too_few
from gnomon.core.errors import ConfigError

_OFFERED = 3
"""Fixes that one message offers at most."""


@dataclass(frozen=True)
class Fix:
    """One value of a composition in place of another: ``path`` as "ratio.anchor", below the algorithm."""

    path: str
    value: Any

    def __str__(self) -> str:
        return f"algorithm.{self.path} = {spelled(self.value)}"


@dataclass(frozen=True)
class Refusal:
    """One mistake: what is wrong and why, and the changes that may fix it, the likeliest first."""

    reason: str
    candidates: tuple[Fix, ...] = ()


Rules = Callable[[Composition], list[Refusal]]
"""A composition to everything that is wrong with it."""


def said(refusal: Refusal, algorithm: Composition, rules: Rules) -> str:
    """Return the sentence of a refusal, with those of its fixes that work for this composition.

    A fix works when fewer mistakes are left than before. A user who follows fixes therefore arrives at a composition
    that builds.
    """
    fixes = list(islice(_working(refusal, algorithm, rules), _OFFERED))
    return f"{refusal.reason}; set {' or '.join(fixes)}" if fixes else refusal.reason


def _working(refusal: Refusal, algorithm: Composition, rules: Rules) -> Iterator[str]:
    """Yield the changes that fix something; two changes at once only where none does alone."""
    # Every candidate is tried on a copy: only what leaves fewer mistakes is offered.
    wrong = len(rules(algorithm))
    after = [(change, changed(algorithm, change)) for change in refusal.candidates]
    alone = [str(change) for change, altered in after if len(rules(altered)) < wrong]
    if alone:
        yield from alone
        return
    # Some mistakes need two changes at once.
    for first, altered in after:
        for second in (c for r in rules(altered) if r.reason != refusal.reason for c in r.candidates):
            if second.path != first.path and len(rules(changed(altered, second))) < wrong:
                yield f"{first} and {second}"


def changed(algorithm: Composition, change: Fix) -> Composition:
    """Return ``algorithm`` with a change, unchecked: what would be wrong with it is the question."""
    name, _, below = change.path.partition(".")
    # `replace` would run the checks of the composition, and this one may be wrong on purpose.
    altered = copy.copy(algorithm)
    object.__setattr__(altered, name, _within(getattr(algorithm, name), below, change.value))
    return altered


def _within(piece: Any, path: str, value: Any) -> Any:
    """Return a piece with one value of it replaced; a number in the path is a place in a tuple."""
    if not path:
        return value
    name, _, below = path.partition(".")
    if isinstance(piece, tuple):
        return tuple(_within(p, below, value) if n == int(name) else p for n, p in enumerate(piece))
    return replace(piece, **{name: _within(getattr(piece, name), below, value)})


def remarks(algorithm: Composition) -> tuple[str, ...]:
    """Return what is unusual about a composition, a sentence each that ends with what to set; mostly nothing.

    Unlike what `validate` refuses, each of these can be meant.

    >>> from gnomon.algorithms import OPO, Updates
    >>> from dataclasses import replace
    >>> remarks(OPO), len(remarks(replace(OPO, updates=Updates(minibatches=4))))
    ((), 1)
    """
    return (*_bounds(algorithm), *_idle(algorithm))


def _bounds(algorithm: Composition) -> Iterator[str]:
    (_, surrogate), updates = _of_sampled(algorithm), algorithm.updates
    is_free = isinstance(surrogate, PolicyGradient) and isinstance(surrogate.trust, Unbounded)
    # Something else than the bound keeps the policy near.
    is_held = any(isinstance(r, CovarianceKl) for r in algorithm.regularizers)
    is_held |= isinstance(algorithm.correction, DivergenceMask | SecondMomentMask)
    if is_free and updates.total > 1 and not is_held:
        yield (
            f"PolicyGradient(Unbounded) believes every ratio, and {updates.total} updates a step let the policy move "
            "away from the one that answered with nothing to stop it; set algorithm.updates = {epochs = 1, "
            "minibatches = 1}, or "
            'algorithm.surrogate.trust = "Cap".'
        )
    if algorithm.scope == "micro_batch":
        yield (
            'With algorithm.scope = "micro_batch" the loss depends on how the machine cuts a step '
            "(learner.max_tokens_per_micro_batch), so runs on different machines are different runs; set "
            'algorithm.scope = "step" for a loss that does not.'
        )


def _idle(algorithm: Composition) -> Iterator[str]:
    is_asked = isinstance(algorithm.sampler, Prioritized) or uses_tracker(algorithm)
    if isinstance(algorithm.tracker, TrackerConfig) and not is_asked:
        yield (
            "The tracker keeps a success rate of every prompt, and neither the baseline nor the sampler reads it; set "
            'algorithm.sampler = "Prioritized", or algorithm.tracker = "none".'
        )
    for regularizer in algorithm.regularizers:
        if isinstance(regularizer, Kl | Entropy) and regularizer.coefficient == 0:
            yield (
                f"The coefficient of {regularizer.name} is 0, so it has no part in the loss; leave it out of "
                "algorithm.regularizers, or give it a coefficient."
            )


_NO_CORRECTION = Fix("correction", None)
_SEQUENCE_MEAN = Fix("aggregate", SequenceMean())
_TOKEN_LEVEL = Fix("ratio.level", "token")
_TO_PROXIMAL, _TO_BEHAVIOR = Fix("ratio.anchor", "proximal"), Fix("ratio.anchor", "behavior")
_NO_AVERAGE = Fix("proximal", None)
_FIRST_REFERENCE = Fix("reference", ReferencePolicy())
_SAMPLED = Fix("samples", "policy")
_TRACKER, _CRITIC = Fix("tracker", TrackerConfig()), Fix("critic", CriticConfig())


def validate(algorithm: Composition) -> None:
    """Check a composition.

    Raises:
        ConfigError: The message lists everything that is wrong, each with the changes that fix it, as they are typed.
    """
    check_places(algorithm)
    check_finite(algorithm)
    found = refusals(algorithm)
    if found:
        wrong = "; and ".join(said(refusal, algorithm, refusals) for refusal in found)
        raise ConfigError(f"algorithm '{algorithm.name}': {wrong}")


def refusals(algorithm: Composition) -> list[Refusal]:
    """Return everything that is wrong."""
    rules = (
        _counts,
        _advantage,
        _ratio,
        _ess,
        _surrogate,
        _regression,
        _preference,
        _critic,
        _policies,
        _prompts,
        _keep,
        _rewards,
        _data,
    )
    return [refusal for rule in rules for refusal in rule(algorithm)]


def uses_tracker(algorithm: Composition) -> bool:
    """Whether the tracked success rate of a prompt is the baseline."""
    return any(isinstance(part, TrackedBaseline) for _, part in parts_of(algorithm.advantage))


def _refuse(reason: str, *candidates: Fix) -> Refusal:
    return Refusal(reason, candidates)


def _counts(algorithm: Composition) -> Iterator[Refusal]:
    generations, fewest = algorithm.num_generations, algorithm.advantage.minimum_generations
    enough = Fix("num_generations", max(1, fewest))
    if generations < 1:
        yield _refuse(f"num_generations must be at least 1, got {generations}", enough)
    elif generations < fewest:
        yield _refuse(too_few(generations, type(algorithm.advantage).__name__, fewest), enough)
    reads_given = isinstance(algorithm.surrogate, GivenShaping) or any(
        isinstance(r, GivenNll) for r in algorithm.regularizers
    )
    if algorithm.demonstrated and generations < 2:
        yield _refuse("demonstrated puts the dataset's answer beside the policy's own", Fix("num_generations", 2))
    if reads_given and not algorithm.demonstrated:
        yield _refuse("no response is given, and GivenShaping and GivenNll are about those", Fix("demonstrated", True))
    if "{sibling}" in algorithm.reference.prompt and generations < 2:
        yield _refuse(
            "reference.prompt shows {sibling}, another answer of the group, and a group has one answer, so that no row "
            "would be taught",
            Fix("num_generations", 2),
        )
    # Metrics and weights of regularizers are kept by name, so a name stands for one of them.
    repeated = [name for name, n in Counter(r.name for r in algorithm.regularizers).items() if n > 1]
    if repeated:
        first = {r.name: r for r in reversed(algorithm.regularizers)}
        yield _refuse(
            f"regularizers {', '.join(repeated)} appear more than once, where one with the coefficients added up would "
            "say the same",
            Fix("regularizers", tuple(reversed(first.values()))),
        )


def _advantage(algorithm: Composition) -> Iterator[Refusal]:
    if _is_nothing(algorithm.advantage) and not algorithm.ranks_pairs:
        number = {Scaled: [Fix("advantage.factor", 1.0)], ConstantAdvantage: [Fix("advantage.value", 1.0)]}
        fixes = (*number.get(type(algorithm.advantage), []), Fix("advantage", GroupRelative()))
        yield _refuse("an advantage that is always 0 teaches nothing", *fixes)
    said: set[tuple[str, str]] = set()
    for place, advantage in parts_of(algorithm.advantage):
        for refusal in _scaled_twice(place, advantage) if isinstance(advantage, Whitened | Normalized) else ():
            # Of what is nested the outermost is named: its remedy fixes all.
            if (place.removesuffix(".of"), refusal.reason) not in said:
                yield refusal
            said.add((place, refusal.reason))


def _is_nothing(advantage: Advantage) -> bool:
    """Whether an advantage is 0 for every batch."""
    if isinstance(advantage, ConstantAdvantage):
        return advantage.value == 0
    if isinstance(advantage, Scaled) and advantage.factor == 0:
        return True
    return isinstance(advantage, Composed) and all(map(_is_nothing, advantage.parts.values()))


def _scaled_twice(place: str, advantage: Whitened | Normalized) -> Iterator[Refusal]:
    inner, over = advantage.of, advantage.over if isinstance(advantage, Normalized) else "tokens"
    name = type(advantage).__name__
    if over != "length" and isinstance(inner, Scaled | ConstantAdvantage):
        lost = "a factor inside it has no effect" if isinstance(inner, Scaled) else "equal numbers become 0"
        factor, outside = 1.0, advantage.of
        # A factor moves outside the normal form, where it has an effect again.
        while isinstance(outside, Scaled):
            factor, outside = factor * outside.factor, outside.of
        outside = Scaled(replace(advantage, of=outside), factor) if isinstance(inner, Scaled) else inner
        yield _refuse(f"{name} divides by a deviation, so {lost}", Fix(place, outside))
    inner_over = inner.over if isinstance(inner, Normalized) else "tokens"
    if isinstance(inner, Whitened | Normalized) and over == inner_over:
        # The innermost advantage that is not scaled over the same responses.
        bare = inner.of
        while isinstance(bare, Whitened | Normalized) and getattr(bare, "over", "tokens") == over:
            bare = bare.of
        yield _refuse(f"{name} twice over the same scales twice", Fix(f"{place}.of", bare))
    if isinstance(inner, GroupRelative) and inner.scale != "none" and over in ("tokens", inner.scale):
        yield _refuse(
            f"{name} on top of GroupRelative(scale='{inner.scale}') scales twice",
            Fix(f"{place}.of.scale", "none"),
            Fix(place, inner),
        )
    if isinstance(inner, TrackedBaseline) and inner.normalize and over in ("tokens", "batch"):
        yield _refuse(
            f"{name} on top of TrackedBaseline(normalize=True) scales twice", Fix(f"{place}.of.normalize", False)
        )


def _ratio(algorithm: Composition) -> Iterator[Refusal]:
    ratio, surrogate = algorithm.ratio, algorithm.surrogate
    # A detached weight of a response leaves each token its own slope, which any mean may count.
    is_free = isinstance(surrogate, Regression | PreferenceLoss | ProspectLoss | PolicyGradient)
    if ratio.level != "token" and isinstance(algorithm.aggregate, TokenMean) and not is_free:
        yield _refuse(
            f"a ratio of level '{ratio.level}' says one thing about a whole response, but TokenMean counts tokens",
            _SEQUENCE_MEAN,
            _TOKEN_LEVEL,
        )
    # A filter leaves tokens out and weighs none, so it counts nothing twice.
    is_filter = getattr(algorithm.correction, "is_filter", False)
    if ratio.anchor == "behavior" and algorithm.correction is not None and not is_filter:
        yield _refuse(
            "a ratio anchored on 'behavior' already covers the gap between behavior and proximal, and a correction "
            "would count it twice",
            _NO_CORRECTION,
            _TO_PROXIMAL,
        )


def _of_sampled(algorithm: Composition) -> tuple[str, Surrogate]:
    """Return the surrogate of responses that the policy sampled, and its place below the algorithm."""
    surrogate = algorithm.surrogate
    return ("surrogate.of", surrogate.of) if isinstance(surrogate, GivenShaping) else ("surrogate", surrogate)


def _ess(algorithm: Composition) -> Iterator[Refusal]:
    (place, surrogate), ratio = _of_sampled(algorithm), algorithm.ratio
    caps_by_size = isinstance(surrogate, PolicyGradient) and any(isinstance(b, EssCap) for b in surrogate.bounds)
    why = (
        "measures how far the current policy is from the one that sampled, but the ratio is anchored on "
        f"'{ratio.anchor}'"
    )
    if caps_by_size and ratio.anchor != "behavior":
        yield _refuse(f"EssCap {why}", _TO_BEHAVIOR, Fix(f"{place}.trust", Cap()))
    without = tuple(r for r in algorithm.regularizers if not isinstance(r, EssKl))
    if without != algorithm.regularizers and ratio.anchor != "behavior":
        yield _refuse(f"EssKl {why}", _TO_BEHAVIOR, Fix("regularizers", without))
    if algorithm.asking and algorithm.scope == "lagged":
        yield _refuse(
            f"{type(algorithm.asking[0]).__name__} asks for sums of its own, which the step before has not kept "
            "(scope = 'lagged')",
            Fix("scope", "step"),
        )
    if caps_by_size and ratio.level != "token":
        yield _refuse(f"EssCap counts tokens, but the ratio is of level '{ratio.level}'", _TOKEN_LEVEL)


def _surrogate(algorithm: Composition) -> Iterator[Refusal]:
    surrogate, ratio = algorithm.surrogate, algorithm.ratio
    if isinstance(surrogate, SigmoidGate) and algorithm.correction is not None:
        yield _refuse(
            "SigmoidGate fades ratios that are far from 1 and a correction weighs them again",
            _NO_CORRECTION,
            Fix("surrogate", ClippedSurrogate()),
        )
    if isinstance(surrogate, Distillation) and algorithm.correction is not None:
        yield _refuse(
            "Distillation is over the distribution of each token, and a correction would weigh the one that was drawn",
            _NO_CORRECTION,
        )
    if isinstance(surrogate, GeometricClip) and ratio.level != "token":
        yield _refuse(f"GeometricClip averages tokens itself, but the ratio is of level '{ratio.level}'", _TOKEN_LEVEL)
    if isinstance(surrogate, GeometricClip) and not isinstance(algorithm.aggregate, SequenceMean):
        yield _refuse(
            "GeometricClip gives a loss to a whole response, which only SequenceMean counts once, got "
            f"{type(algorithm.aggregate).__name__}",
            _SEQUENCE_MEAN,
        )


def _regression(algorithm: Composition) -> Iterator[Refusal]:
    ratio, regresses = algorithm.ratio, isinstance(algorithm.surrogate, Regression)
    if regresses and (ratio.anchor != "reference" or ratio.level != "sequence_product"):
        yield _refuse(
            "Regression compares the whole response's log-ratio to the reference with its advantage",
            Fix("ratio", Ratio("reference", "sequence_product", inf)),
        )
    if not regresses and ratio.anchor == "reference" and not isinstance(algorithm.surrogate, _COMPARES):
        yield _refuse(
            f"a ratio to the reference is no importance weight, but {type(algorithm.surrogate).__name__} takes it so",
            _TO_PROXIMAL,
            Fix("surrogate", Regression()),
        )
    if regresses and not isinstance(algorithm.aggregate, SequenceMean):
        yield _refuse(f"Regression has one error a response, got {algorithm.aggregate}", _SEQUENCE_MEAN)
    if regresses and algorithm.correction is not None:
        yield _refuse(
            "Regression is right for samples of any policy, and a correction would weigh them", _NO_CORRECTION
        )
    if regresses and isinstance(algorithm.advantage, TrackedBaseline) and algorithm.advantage.normalize:
        yield _refuse(
            "Regression aims at r - v in rewards, which a scale would change", Fix("advantage.normalize", False)
        )


_COMPARES = PreferenceLoss | ProspectLoss


def _preference(algorithm: Composition) -> Iterator[Refusal]:
    surrogate, ratio, name = algorithm.surrogate, algorithm.ratio, type(algorithm.surrogate).__name__
    if algorithm.ranks_pairs and (algorithm.samples, algorithm.num_generations) != ("pairs", 2):
        yield _refuse(
            'critic.target = "pairs" learns from a chosen and a rejected answer',
            Fix("samples", "pairs"),
            Fix("num_generations", 2),
        )
    if algorithm.ranks_pairs and algorithm.advantage != ConstantAdvantage(0.0):
        yield _refuse("a reward model learns, and no policy does", Fix("advantage", ConstantAdvantage(0.0)))
    if algorithm.samples == "pairs" and not isinstance(surrogate, PreferenceLoss) and not algorithm.ranks_pairs:
        yield _refuse(
            "samples = 'pairs' has a chosen and a rejected answer", Fix("surrogate", PreferenceLoss()), _SAMPLED
        )
    if (algorithm.samples == "labels") != isinstance(surrogate, ProspectLoss):
        yield _refuse(
            "answers with a label (samples = 'labels') are what ProspectLoss judges, and nothing else does",
            Fix("surrogate", ProspectLoss()),
            Fix("samples", "labels"),
            _SAMPLED,
        )
    if not isinstance(surrogate, _COMPARES):
        return
    if ratio.anchor != "reference" or ratio.level not in ("sequence", "sequence_product"):
        yield _refuse(
            f"{name} compares log-ratios of whole responses to the reference",
            Fix("ratio", Ratio("reference", "sequence_product", inf)),
        )
    # Sampled answers make pairs too, and then several updates or left-out rows would take a pair apart.
    usual = (_SEQUENCE_MEAN, Fix("num_generations", 2))
    sampled = (Fix("updates", Updates()), _NO_CORRECTION, Fix("mask_truncated", False), Fix("demonstrated", False))
    for fix in usual if algorithm.is_supervised else (*usual, *sampled):
        if getattr(algorithm, fix.path) != fix.value:
            yield _refuse(f"{name} has one loss for a pair of answers, which one update sees whole", fix)


def _critic(algorithm: Composition) -> Iterator[Refusal]:
    critic, replay, name = algorithm.critic, algorithm.replay, type(algorithm.advantage).__name__
    reads = "values" in algorithm.advantage.needs
    why = "reads the values of a critic, and there is none"
    if reads and critic is None:
        yield _refuse(f"{name} {why}", _CRITIC, Fix("advantage", GroupRelative()))
    readers = [r for r in algorithm.regularizers if "values" in r.needs]
    if readers and critic is None:
        others = tuple(r for r in algorithm.regularizers if r not in readers)
        names = " and ".join(type(r).__name__ for r in readers)
        yield _refuse(f"{names} {why}", _CRITIC, Fix("regularizers", others))
    if critic is not None and not reads and not critic.ranks_pairs:
        yield _refuse(f"the critic has no reader: {name} reads no values", Fix("advantage", Gae()), Fix("critic", None))
    if replay is not None and replay.weigh == "surplus" and critic is None:
        yield _refuse(
            "replay.weigh = 'surplus' compares with a critic, and there is none", Fix("replay.weigh", "all"), _CRITIC
        )
    if replay is not None and replay.rows > replay.capacity:
        yield _refuse(
            f"replay draws {replay.rows} rows from a buffer of {replay.capacity}, which never holds as many",
            Fix("replay.rows", replay.capacity),
            Fix("replay.capacity", replay.rows),
        )
    if critic is not None and critic.trunk == "shared" and algorithm.proximal is not None:
        yield _refuse(
            "a shared trunk is moved by the value loss as well, which an averaged proximal policy does not follow",
            Fix("critic.trunk", "separate"),
            _NO_AVERAGE,
        )


def _policies(algorithm: Composition) -> Iterator[Refusal]:
    if algorithm.scope != "step" and algorithm.ratio.anchor != "behavior":
        yield _refuse(
            f"scope = '{algorithm.scope}' is of effective sample sizes, which only a ratio to behavior reads",
            Fix("scope", "step"),
            _TO_BEHAVIOR,
        )
    if algorithm.proximal is not None and "proximal" not in algorithm.needs:
        yield _refuse("nothing reads the averaged proximal policy", _NO_AVERAGE, _TO_PROXIMAL)
    if algorithm.reference != ReferencePolicy() and "reference" not in algorithm.needs:
        yield _refuse("nothing reads the reference policy", _FIRST_REFERENCE, Fix("advantage", ReverseKl()))
    if algorithm.reference_top is not None and algorithm.top_logprobs is not None:
        yield _refuse(
            "two pieces compare with whole distributions, of behavior and of the reference, and a batch keeps one",
            Fix("regularizers", tuple(r for r in algorithm.regularizers if not isinstance(r, EssKl))),
        )
    surrogate, counts = algorithm.surrogate, [getattr(r, "reference_top", None) for r in algorithm.regularizers]
    kept = algorithm.reference_top
    for number, count in enumerate(counts):
        if count is not None and count != kept:
            mine, name = Fix(f"regularizers.{number}.top_k", kept), type(surrogate).__name__
            yield _refuse(
                f"{name} compares with the {kept} likeliest tokens of the reference (0: all) and regularizers.{number} "
                f"with {count}, and a batch keeps one of the two",
                mine,
            )
    if algorithm.reference.prompt and algorithm.ratio.anchor == "reference":
        yield _refuse("a ratio to the reference compares answers to one question", Fix("reference.prompt", ""))
    # Drift is measured from the proximal policy, which must be the one that the step began with.
    measures_drift = isinstance(algorithm.tracker, TrackerConfig) and algorithm.tracker.drift != "constant"
    if algorithm.proximal is not None and measures_drift:
        yield _refuse(
            "the tracker's drift would be measured from the averaged proximal policy",
            Fix("tracker.drift", "constant"),
            _NO_AVERAGE,
        )


def _prompts(algorithm: Composition) -> Iterator[Refusal]:
    plan, uniform = algorithm.tracker, Fix("sampler", Uniform())
    if plan is None and uses_tracker(algorithm):
        yield _refuse("the advantage TrackedBaseline needs a tracker", _TRACKER, Fix("advantage", GroupRelative()))
    if isinstance(algorithm.sampler, Prioritized) and not isinstance(plan, TrackerConfig):
        yield _refuse("the sampler Prioritized needs a tracker", _TRACKER, uniform)
    if isinstance(plan, OptimalValue | RoleAverage) and not uses_tracker(algorithm):
        yield _refuse(
            f"nothing reads the values of tracker = {type(plan).__name__}",
            Fix("tracker", None),
            Fix("advantage", TrackedBaseline()),
        )
    if isinstance(algorithm.sampler, Greso) and algorithm.num_generations < 2:
        yield _refuse(
            "the sampler Greso skips prompts whose groups were all right or all wrong, and one response is always that",
            Fix("num_generations", 2),
            uniform,
        )
    if isinstance(algorithm.sampler, NoPositiveResampling) and algorithm.num_generations < 2:
        yield _refuse(
            "the sampler NoPositiveResampling drops a prompt by its pass rate, and one response passes by chance",
            Fix("num_generations", 2),
            uniform,
        )
    if isinstance(plan, TrackerConfig) and plan.drift == "accumulated" and algorithm.updates.total == 1:
        yield _refuse(
            "tracker.drift = 'accumulated' adds up the drift that updates see after the first, and with one update a "
            "step there is nothing to measure",
            Fix("tracker.drift", "replayed"),
            Fix("tracker.drift", "constant"),
            Fix("updates.minibatches", 2),
        )


def _keep(algorithm: Composition) -> Iterator[Refusal]:
    keeps_all = Fix("keep", None)
    if algorithm.keep is not None and uses_tracker(algorithm):
        yield _refuse(
            "keep drops groups of equal rewards, but a tracked baseline learns from each response alone", keeps_all
        )
    elif algorithm.keep is not None and algorithm.num_generations < 2:
        yield _refuse(
            "keep compares the rewards of a group, and one response is never kept", keeps_all, Fix("num_generations", 2)
        )


def _rewards(algorithm: Composition) -> Iterator[Refusal]:
    plan, unpunished = algorithm.tracker, Fix("overlong", None)
    if isinstance(plan, TrackerConfig) and plan.rewards == "binary" and algorithm.overlong is not None:
        yield _refuse(
            "overlong makes rewards other than 0 and 1, which a binary tracker cannot count",
            Fix("tracker.rewards", "continuous"),
            unpunished,
        )
    if algorithm.overlong is not None and algorithm.mask_truncated:
        yield _refuse(
            "overlong punishes truncated responses and mask_truncated leaves them out of the loss, so the punishment "
            "only shifts the others",
            Fix("mask_truncated", False),
            unpunished,
        )


_SUPERVISED: tuple[Fix, ...] = (
    Fix("advantage", Returns()),
    Fix("ratio", Ratio()),
    Fix("surrogate", PolicyGradient(Unbounded())),
    Fix("num_generations", 1),
    Fix("updates", Updates()),
    Fix("regularizers", ()),
    Fix("sampler", Uniform()),
    *(Fix(name, None) for name in ("correction", "tracker", "keep", "overlong", "critic", "proximal", "replay")),
    Fix("mask_truncated", False),
    Fix("demonstrated", False),
    Fix("routing", "free"),
    Fix("scope", "step"),
)
"""What the dataset's answers leave to choose: nothing but how the losses of tokens are added up."""


_PAIRED = {"pairs": "dpo", "labels": "kto"}


def _data(algorithm: Composition) -> Iterator[Refusal]:
    left: tuple[str, ...] = (
        ("advantage", "ratio", "surrogate", "num_generations", "regularizers") if algorithm.samples in _PAIRED else ()
    )
    left += ("critic",) if algorithm.ranks_pairs else ()
    fixed = (fix for fix in _SUPERVISED if fix.path not in left)
    # Each field that is not at its only sensible value is one mistake, and all are told in one sentence.
    others = [fix for fix in fixed if getattr(algorithm, fix.path) != fix.value]
    if algorithm.is_supervised and others:
        named = _PAIRED.get(algorithm.samples, "sft")
        yield _refuse(
            f"samples = '{algorithm.samples}' trains on the dataset's answers, which nobody sampled and nothing judges "
            f'(algorithm = "{named}"), and {", ".join(fix.path for fix in others)} is about sampled ones',
            *(others if len(others) == 1 else ()),
            _SAMPLED,
        )
