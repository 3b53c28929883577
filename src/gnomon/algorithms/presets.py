"""Every algorithm, one expression each. A name alone is the paper's setting, except where `notes` says so."""

from collections.abc import Mapping

from gnomon.algorithms.advantages import (
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    Returns,
    Tracked,
    Whitened,
)
from gnomon.algorithms.aggregates import ConstantLength, SequenceMean, TokenMean
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.plans import Informative, OverlongPenalty, Prioritized, TrackerPlan, Updates
from gnomon.algorithms.ratios import Ratio
from gnomon.algorithms.regularizers import EssKl, Kl
from gnomon.algorithms.surrogates import GeometricClip, Pessimistic, Score, SoftGate
from gnomon.algorithms.trust import Cap, Clip, EssCap, Unbounded

REINFORCE = Algorithm(
    name="reinforce",
    paper="Williams 1992, Machine Learning 8, doi 10.1007/BF00992696",
    advantage=Returns(),
    ratio=Ratio(),
    surrogate=Score(Unbounded()),
    aggregate=TokenMean(),
    num_generations=1,
)

RLOO = Algorithm(
    name="rloo",
    paper="Back to Basics: Revisiting REINFORCE Style Optimization, arXiv 2402.14740",
    advantage=LeaveOneOut(kl=0.05),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.2)),
    aggregate=SequenceMean(),
    num_generations=4,
)

REINFORCE_PP = Algorithm(
    name="reinforce-pp",
    paper="REINFORCE++, arXiv 2501.03262",
    advantage=Whitened(Returns(kl=0.01)),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.2)),
    aggregate=TokenMean(),
    num_generations=1,
)

REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce-pp-baseline",
    paper="REINFORCE++, arXiv 2501.03262",
    advantage=Whitened(GroupRelative(scale="none"), skip_degenerate=True),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.2)),
    aggregate=TokenMean(),
    regularizers=(Kl("reference", 0.01, "k2"),),
)

OPO = Algorithm(
    name="opo",
    paper="On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    advantage=LengthWeighted(),
    ratio=Ratio(),
    surrogate=Score(Unbounded()),
    aggregate=TokenMean(),
)

GRPO = Algorithm(
    name="grpo",
    paper="DeepSeekMath, arXiv 2402.03300",
    advantage=GroupRelative(),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.2)),
    aggregate=SequenceMean(),
)

DR_GRPO = Algorithm(
    name="dr-grpo",
    paper="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    advantage=GroupRelative(scale="none"),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.2)),
    aggregate=ConstantLength(3000),
)

DAPO = Algorithm(
    name="dapo",
    paper="DAPO, arXiv 2503.14476",
    advantage=GroupRelative(),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.28)),
    aggregate=TokenMean(),
    updates=Updates(minibatches=16),
    num_generations=16,
    keep=Informative(),
    overlong=OverlongPenalty(),
)

LITE_PPO = Algorithm(
    name="lite-ppo",
    paper="Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning, arXiv 2508.08221",
    advantage=GroupRelative(scale="batch"),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.2)),
    aggregate=TokenMean(),
)

GSPO = Algorithm(
    name="gspo",
    paper="Group Sequence Policy Optimization, arXiv 2507.18071",
    advantage=GroupRelative(),
    ratio=Ratio(level="sequence"),
    surrogate=Pessimistic(Clip(3e-4, 4e-4)),
    aggregate=SequenceMean(),
    updates=Updates(minibatches=4),
)

GSPO_TOKEN = Algorithm(
    name="gspo-token",
    paper="Group Sequence Policy Optimization, section 4.3, arXiv 2507.18071",
    advantage=GroupRelative(),
    ratio=Ratio(level="sequence_token"),
    surrogate=Pessimistic(Clip(3e-4, 4e-4)),
    aggregate=SequenceMean(),
    updates=Updates(minibatches=4),
)

GMPO = Algorithm(
    name="gmpo",
    paper="Geometric-Mean Policy Optimization, arXiv 2507.20673",
    advantage=GroupRelative(),
    ratio=Ratio(),
    surrogate=GeometricClip(0.4),
    aggregate=SequenceMean(),
)

SAPO = Algorithm(
    name="sapo",
    paper="Soft Adaptive Policy Optimization, arXiv 2511.20347",
    advantage=GroupRelative(),
    ratio=Ratio(),
    surrogate=SoftGate(1.0, 1.05),
    aggregate=SequenceMean(),
)

CISPO = Algorithm(
    name="cispo",
    paper="MiniMax-M1, arXiv 2506.13585",
    advantage=GroupRelative(),
    ratio=Ratio(),
    surrogate=Score(Cap(5.0)),
    aggregate=TokenMean(),
)

P3O = Algorithm(
    name="p3o",
    paper="Policy-on Policy-off Policy Optimization, arXiv 2605.12380; the original is arXiv 1905.01756",
    advantage=GroupRelative(),
    ratio=Ratio(anchor="behavior"),
    surrogate=Score(EssCap()),
    aggregate=TokenMean(),
    regularizers=(EssKl(),),
)

SPO = Algorithm(
    name="spo",
    paper="Single-stream Policy Optimization, arXiv 2509.13232",
    advantage=Tracked(),
    ratio=Ratio(),
    surrogate=Pessimistic(Clip(0.2, 0.28)),
    aggregate=TokenMean(),
    updates=Updates(minibatches=8),
    num_generations=1,
    sampler=Prioritized(epsilon=0.05),
    tracker=TrackerPlan(),
)

_ALL = (
    REINFORCE,
    RLOO,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    OPO,
    GRPO,
    DR_GRPO,
    DAPO,
    LITE_PPO,
    GSPO,
    GSPO_TOKEN,
    GMPO,
    SAPO,
    CISPO,
    P3O,
    SPO,
)

PRESETS: Mapping[str, Algorithm] = {preset.name: preset for preset in _ALL}
