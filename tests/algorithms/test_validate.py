"""Compositions that cannot be meant, each refused with its fix."""

from dataclasses import replace
from typing import Any

import pytest

from gnomon.algorithms import (
    A_STAR_PO,
    CISPO,
    DAPO,
    DR_GRPO,
    GMPO,
    GRPO,
    GSPO,
    P3O,
    PPO,
    PRESETS,
    REINFORCE_PP_BASELINE,
    SAPO,
    SPO,
    VAPO,
    VAPO_REVIEW,
    ConstantLength,
    CriticPlan,
    EssKl,
    Ewma,
    Greso,
    GroupRelative,
    Informative,
    Kl,
    OptimalValue,
    OverlongPenalty,
    Pessimistic,
    Prioritized,
    Ratio,
    Regression,
    Replay,
    SelfImitation,
    TokenMean,
    Tracked,
    TrackerPlan,
    Truncated,
    Updates,
    Whitened,
)
from gnomon.algorithms.trust import Cap
from gnomon.errors import ConfigError

REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("sequence ratio, token mean", GSPO, {"aggregate": TokenMean()}, "set aggregate = SequenceMean"),
    ("token mean, sequence ratio", DAPO, {"ratio": Ratio(level="sequence_token")}, "TokenMean"),
    ("behavior ratio, correction", P3O, {"correction": Truncated()}, "remove the correction"),
    ("group of one", GRPO, {"num_generations": 1}, r"group size 1.*raise num_generations to 2.*'spo'"),
    ("no generations", SPO, {"num_generations": 0}, "at least 1, got 0"),
    ("tracked without tracker", SPO, {"tracker": None}, "the baseline Tracked needs a tracker"),
    ("prioritized without tracker", GRPO, {"sampler": Prioritized()}, "sampler Prioritized needs a tracker"),
    ("tracked and keep", SPO, {"keep": Informative(), "num_generations": 4}, "remove keep"),
    ("keep of one", PRESETS["reinforce"], {"keep": Informative()}, "one response is never kept"),
    (
        "whitened group score",
        REINFORCE_PP_BASELINE,
        {"advantage": Whitened(GroupRelative())},
        "advantage.of.scale = 'none'",
    ),
    ("whitened twice", SPO, {"advantage": Whitened(Tracked())}, "advantage.of.normalize = false"),
    ("whitened whitened", DR_GRPO, {"advantage": Whitened(Whitened(GroupRelative("none")))}, "keep one"),
    (
        "drift that nobody measures",
        SPO,
        {"tracker": TrackerPlan(drift="accumulated"), "updates": Updates()},
        r"'replayed' or 'constant', or updates.minibatches >= 2",
    ),
    ("effective size of the wrong ratio", P3O, {"ratio": Ratio()}, "ratio.anchor = 'behavior'"),
    ("leash of the wrong ratio", CISPO, {"regularizers": (EssKl(),)}, "EssKl .* ratio.anchor = 'behavior'"),
    ("soft gate with a correction", SAPO, {"correction": Truncated()}, "SoftGate"),
    ("geometric clip, token mean", GMPO, {"aggregate": TokenMean()}, "only SequenceMean"),
    ("geometric clip, sequence ratio", GMPO, {"ratio": Ratio(level="sequence")}, "ratio.level = 'token'"),
    ("one term twice", GRPO, {"regularizers": (Kl(), Kl())}, "kl_reference appear more than once"),
    ("punished and masked", DAPO, {"mask_truncated": True}, "choose one"),
    ("lambda by length without a critic", VAPO, {"critic": None}, "Gae reads the values of a critic.*set critic"),
    (
        "a critic that nobody reads",
        GRPO,
        {"critic": CriticPlan()},
        "GroupRelative reads no values.*or remove the critic",
    ),
    ("imitation without a critic", GRPO, {"regularizers": (SelfImitation(),)}, "SelfImitation reads the values"),
    ("surplus without a critic", GRPO, {"replay": Replay(weigh="surplus")}, "or weigh = 'all'"),
    ("regression on a ratio", GRPO, {"surrogate": Regression()}, r"ratio = Ratio\(anchor = 'reference'"),
    ("ratio to the reference", GRPO, {"ratio": Ratio(anchor="reference")}, "set ratio.anchor = 'proximal'"),
    ("regression of tokens", A_STAR_PO, {"aggregate": ConstantLength(8)}, "set aggregate = SequenceMean"),
    ("regression, correction", A_STAR_PO, {"correction": Truncated()}, "remove the correction"),
    ("regression, scaled", A_STAR_PO, {"advantage": Tracked()}, "advantage.normalize = false"),
    ("scope that nobody reads", GRPO, {"scope": "lagged"}, "only a ratio to behavior reads; remove scope"),
    ("average that nobody reads", P3O, {"proximal": Ewma()}, "remove proximal"),
    ("average and drift", SPO, {"proximal": Ewma()}, "tracker.drift = 'constant'"),
    ("average and shared trunk", VAPO_REVIEW, {"proximal": Ewma()}, "critic.trunk = 'separate'"),
    (
        "uncertainty of fixed values",
        A_STAR_PO,
        {"sampler": Prioritized()},
        "needs a tracker; set tracker = TrackerPlan",
    ),
    ("values that nobody reads", GRPO, {"tracker": OptimalValue()}, "nothing reads tracker = OptimalValue"),
    ("skipping single responses", PPO, {"sampler": Greso()}, "num_generations to 2 or more"),
    ("binary tracker of other rewards", SPO, {"overlong": OverlongPenalty()}, "tracker.rewards = 'continuous'"),
]


@pytest.mark.parametrize(("base", "changes", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_be_meant_is_refused(base: Any, changes: dict[str, Any], message: str):
    """Each composition raises ConfigError that names the algorithm and the fix."""
    with pytest.raises(ConfigError, match=message) as raised:
        replace(base, **changes)

    assert str(raised.value).startswith(f"algorithm '{base.name}': ")


def test_everything_that_is_wrong_is_said_at_once():
    """Two mistakes make one error with both."""
    with pytest.raises(ConfigError, match=r"group size 1.*; and .*sampler Prioritized"):
        replace(GRPO, num_generations=1, sampler=Prioritized())


def test_a_dual_clip_needs_a_clip():
    """Caps belong to Score, which has no dual clip; a dual clip of at most 1 would stop every token."""
    with pytest.raises(ConfigError, match="caps belong to Score"):
        Pessimistic(Cap(5.0), dual=3.0)
    with pytest.raises(ConfigError, match="dual must be > 1, got 1"):
        Pessimistic(dual=1.0)


def test_what_can_be_meant_is_accepted():
    """A tracker may serve as curriculum of a group algorithm, and drift may add up over several updates."""
    replace(GRPO, sampler=Prioritized(), tracker=TrackerPlan())
    replace(SPO, tracker=TrackerPlan(drift="accumulated"))
    replace(SPO, num_generations=4)
    replace(SPO, overlong=OverlongPenalty(), tracker=TrackerPlan(rewards="continuous"))


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        (GRPO, set()),
        (SPO, {"proximal"}),
        (P3O, set()),
        (replace(P3O, updates=Updates(minibatches=4)), set()),
        (PRESETS["rloo"], {"proximal", "reference"}),
        (REINFORCE_PP_BASELINE, {"reference"}),
        (replace(GRPO, regularizers=(Kl(coefficient=0.0),)), set()),
    ],
    ids=lambda x: x.name if hasattr(x, "name") else "",
)
def test_nothing_is_scored_without_a_reader(algorithm: Any, needs: set[str]):
    """No proximal pass for one update or a behavior ratio, no reference pass at coefficient 0."""
    assert algorithm.needs == needs
