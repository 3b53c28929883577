"""The presets: one expression for each algorithm, in the order in which `gnomon algorithms` lists them.

A preset has the settings of its paper, except where `describe.NOTES` says otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from gnomon.algorithms.advantage_algebra import *
from gnomon.algorithms.advantages import *
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.corrections import *
from gnomon.algorithms.critic import CriticConfig, Pretraining
from gnomon.algorithms.loss_aggregation import *
from gnomon.algorithms.ratio_bounds import *
from gnomon.algorithms.ratios import Ratio
from gnomon.algorithms.regularizers import *
from gnomon.algorithms.returns import *
from gnomon.algorithms.sections import *
from gnomon.algorithms.surrogates import *

__all__ = [
    "A_STAR_PO", "BAPO", "CFPO", "CISPO", "CLIP_COV", "DAPO", "DECOUPLED_PPO", "DPO", "DPPO", "DPPO_KL", "DR_GRPO",
    "EXPERT_ITERATION", "FIPO", "FLASH_REINFORCE", "GDPO", "GIGPO", "GMPO", "GRPO", "GSPO", "GSPO_TOKEN",
    "HIGH_ENTROPY", "ICEPOP", "IPO", "IPO_PREFERENCE", "KL_COV", "KTO", "LITE_PPO", "LUFFY", "LUSPO", "M2PO", "MAXRL",
    "NAMED", "OPD", "OPO", "OTB", "P3O", "P3O_TWO_ANCHOR", "PASS_AT_K", "PPO", "PRESETS", "RAE", "RAFT", "REINFORCE",
    "REINFORCE_PP", "REINFORCE_PP_BASELINE", "REWARD_MODEL", "RLOO", "SAPO", "SCALERL", "SDFT", "SDPO", "SFT", "SPO",
    "SRFT", "VAPO", "VAPO_REVIEW", "VC_PPO", "VESPO",
]  # fmt: skip

REINFORCE = Algorithm(
    name="reinforce",
    paper="Williams 1992, Machine Learning 8, doi 10.1007/BF00992696",
    advantage=Returns(),
    ratio=Ratio(),
    surrogate=PolicyGradient(Unbounded()),
    aggregate=TokenMean(),
    num_generations=1,
)

RLOO = Algorithm(
    name="rloo",
    paper="Back to Basics: Revisiting REINFORCE Style Optimization, arXiv 2402.14740",
    advantage=LeaveOneOut(kl=0.05),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.2)),
    aggregate=SequenceMean(),
    num_generations=4,
)

REINFORCE_PP = replace(
    REINFORCE,
    name="reinforce-pp",
    paper="REINFORCE++, arXiv 2501.03262",
    advantage=Whitened(Returns(kl=0.01)),
    surrogate=ClippedSurrogate(Clip(0.2, 0.2)),
)

REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP,
    name="reinforce-pp-baseline",
    advantage=Whitened(GroupRelative(scale="none"), skip_degenerate=True),
    regularizers=(Kl("reference", 0.01, "k2"),),
    num_generations=8,
)

OPO = replace(
    REINFORCE,
    name="opo",
    paper="On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    advantage=OptimalBaseline(),
    num_generations=8,
)

RAE = Algorithm(
    name="rae",
    paper="SPIRAL: role-conditioned advantage estimation in self-play, arXiv 2506.24119",
    advantage=TrackedBaseline(normalize=False),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.2)),
    aggregate=TokenMean(),
    num_generations=1,
    tracker=RoleAverage(decay=0.95),
)

A_STAR_PO = Algorithm(
    name="a-star-po",
    paper="Accelerating RL for LLM Reasoning with Optimal Advantage Regression, arXiv 2505.20686",
    advantage=TrackedBaseline(normalize=False),
    ratio=Ratio(anchor="reference", level="sequence_product", clamp=math.inf),
    surrogate=Regression(1e-3),
    aggregate=SequenceMean(),
    num_generations=1,
    tracker=OptimalValue(beta=0.5, n0=8),
)

PPO = Algorithm(
    name="ppo",
    paper="Proximal Policy Optimization Algorithms, arXiv 1707.06347",
    advantage=Whitened(Gae(Fixed(0.95), value_lambda=0.95)),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.2)),
    aggregate=TokenMean(),
    updates=Updates(minibatches=4),
    num_generations=1,
    critic=CriticConfig(updates=Updates(minibatches=4), clip=0.5),
)

VC_PPO = replace(
    PPO,
    name="vc-ppo",
    paper="What's Behind PPO's Collapse in Long-CoT? Value Optimization Holds the Secret, arXiv 2503.01491",
    advantage=Gae(Fixed(0.95), value_lambda=1.0),
    aggregate=SequenceMean(),
    critic=CriticConfig(updates=Updates(minibatches=4), pretraining=Pretraining(100)),
)

GRPO = Algorithm(
    name="grpo",
    paper="DeepSeekMath, arXiv 2402.03300",
    advantage=GroupRelative(),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.2)),
    aggregate=SequenceMean(),
)

DR_GRPO = replace(
    GRPO,
    name="dr-grpo",
    paper="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    advantage=GroupRelative(scale="none"),
    aggregate=ConstantLength(3000),
)

DAPO = replace(
    GRPO,
    name="dapo",
    paper="DAPO, arXiv 2503.14476",
    surrogate=ClippedSurrogate(Clip(0.2, 0.28)),
    aggregate=TokenMean(),
    updates=Updates(minibatches=16),
    num_generations=16,
    keep=Informative(),
    overlong=OverlongPenalty(),
)

LITE_PPO = replace(
    GRPO,
    name="lite-ppo",
    paper="Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning, arXiv 2508.08221",
    advantage=GroupRelative(scale="batch"),
    aggregate=TokenMean(),
)

OTB = replace(
    GRPO,
    name="otb",
    paper="The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL, arXiv 2602.07078",
    advantage=OptimalTokenBaseline(),
    aggregate=TokenMean(),
)

GDPO = replace(
    GRPO,
    name="gdpo",
    paper="GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv 2601.05242",
    advantage=Normalized(PerReward(GroupRelative()), over="batch"),
)

GIGPO = replace(
    GRPO,
    name="gigpo",
    paper="Group-in-Group Policy Optimization for LLM Agent Training, arXiv 2505.10978",
    advantage=AdvantageSum((GroupRelative(), Scaled(StateRelative(gamma=0.95), 1.0))),
    aggregate=TokenMean(),
)

GSPO = replace(
    GRPO,
    name="gspo",
    paper="Group Sequence Policy Optimization, arXiv 2507.18071",
    ratio=Ratio(level="sequence"),
    surrogate=ClippedSurrogate(Clip(3e-4, 4e-4)),
    updates=Updates(minibatches=4),
)

GSPO_TOKEN = replace(
    GSPO,
    name="gspo-token",
    paper="Group Sequence Policy Optimization, section 4.3, arXiv 2507.18071",
    ratio=Ratio(level="sequence_token"),
)

GMPO = replace(
    GRPO, name="gmpo", paper="Geometric-Mean Policy Optimization, arXiv 2507.20673", surrogate=GeometricClip(0.4)
)

SAPO = replace(
    GRPO, name="sapo", paper="Soft Adaptive Policy Optimization, arXiv 2511.20347", surrogate=SigmoidGate(1.0, 1.05)
)

CISPO = replace(
    GRPO, name="cispo", paper="MiniMax-M1, arXiv 2506.13585", surrogate=PolicyGradient(Cap(5.0)), aggregate=TokenMean()
)

P3O = replace(
    CISPO,
    name="p3o",
    paper="Policy-on Policy-off Policy Optimization, arXiv 2605.12380; the original is arXiv 1905.01756",
    ratio=Ratio(anchor="behavior"),
    surrogate=PolicyGradient(EssCap()),
    regularizers=(EssKl(),),
)

P3O_TWO_ANCHOR = replace(
    P3O,
    name="p3o-two-anchor",
    paper="Policy-on Policy-off Policy Optimization, eq. 13, arXiv 2605.12380",
    surrogate=PolicyGradient(EssCap("both")),
    regularizers=(EssKl(anchor="mixture"),),
    updates=Updates(minibatches=4),
)

SPO = Algorithm(
    name="spo",
    paper="Single-stream Policy Optimization, arXiv 2509.13232",
    advantage=TrackedBaseline(),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.28)),
    aggregate=TokenMean(),
    updates=Updates(minibatches=8),
    num_generations=1,
    sampler=Prioritized(epsilon=0.05),
    tracker=TrackerConfig(),
)

VAPO = Algorithm(
    name="vapo",
    paper="VAPO: Efficient and Reliable RL for Advanced Reasoning Tasks, arXiv 2504.05118",
    advantage=Gae(LengthAdaptive(0.05), value_lambda=1.0),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.28)),
    aggregate=TokenMean(),
    regularizers=(PositiveNll(0.1),),
    updates=Updates(minibatches=16),
    num_generations=16,
    critic=CriticConfig(updates=Updates(minibatches=16), pretraining=Pretraining(50)),
)

VAPO_REVIEW = Algorithm(
    name="vapo-review",
    paper="VAPO, arXiv 2504.05118, as a published review of it describes it, which is another algorithm",
    advantage=Gae(LengthSigmoid(0.3, 0.95), value_lambda=1.0),
    ratio=Ratio(),
    surrogate=ClippedSurrogate(Clip(0.2, 0.28)),
    aggregate=TokenMean(),
    critic=CriticConfig(
        trunk="shared", learning_rate_ratio=1.0, order="before", pretraining=Pretraining(50, frozen_trunk=True)
    ),
    replay=SelfImitationBuffer(),
)

DECOUPLED_PPO = replace(
    GRPO,
    name="decoupled-ppo",
    paper="Batch size-invariance for policy optimization, arXiv 2110.00641; AReaL, arXiv 2505.24298",
    aggregate=TokenMean(),
    correction=TruncatedIS(5.0),
    updates=Updates(minibatches=4),
    num_generations=16,
)

OPD = replace(
    REINFORCE,
    name="opd",
    paper="On-Policy Distillation of Language Models, arXiv 2306.13649; per-token reverse KL, arXiv 2601.02780",
    advantage=ReverseKl(),
    num_generations=4,
)

IPO = replace(
    REINFORCE,
    name="ipo",
    paper="INTELLECT policy optimization, the default loss of prime-rl since 2026-09, pull requests 1930 and 3586",
    advantage=GroupRelative(scale="none"),
    ratio=Ratio(anchor="behavior"),
    correction=DivergenceMask(),
    num_generations=8,
)

DPPO = Algorithm(
    name="dppo",
    paper="Rethinking the Trust Region in LLM Reinforcement Learning, binary TV, arXiv 2602.04879",
    advantage=GroupRelative(scale="none"),
    ratio=Ratio(anchor="behavior"),
    surrogate=PolicyGradient(Unbounded()),
    aggregate=ConstantLength(8192),
    correction=DivergenceMask("tv", 0.15, side="outward"),
    updates=Updates(minibatches=8),
    num_generations=16,
)

DPPO_KL = replace(
    DPPO,
    name="dppo-kl",
    paper="Rethinking the Trust Region in LLM Reinforcement Learning, binary KL, arXiv 2602.04879",
    correction=DivergenceMask("kl", 0.05, side="outward"),
)

ICEPOP = replace(
    GRPO,
    name="icepop",
    paper="Every Step Evolves (Ring-1T), section on IcePop, arXiv 2510.18855",
    correction=MaskedIS(0.5, 5.0),
)

FLASH_REINFORCE = Algorithm(
    name="flash-reinforce",
    paper="FlashREINFORCE: Critic-Free Single-Rollout Asynchronous RL for Agentic Language Models, Hu et al. 2026",
    advantage=Returns(baseline="batch", over="response"),
    ratio=Ratio(anchor="behavior"),
    surrogate=PolicyGradient(Unbounded()),
    aggregate=SequenceMean(),
    correction=DivergenceMask("kl", 5e-3, level="sequence"),
    num_generations=1,
)

MAXRL = replace(
    GRPO,
    name="maxrl",
    paper="Maximum Likelihood Reinforcement Learning, arXiv 2602.02710",
    advantage=GroupRelative(scale="mean"),
    aggregate=TokenMean(),
    num_generations=16,
)

LUSPO = replace(
    GSPO,
    name="luspo",
    paper="Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261",
    surrogate=ClippedSurrogate(Clip(2e-3, 2.5e-3)),
    aggregate=SequenceSum(),
)

VESPO = Algorithm(
    name="vespo",
    paper="VESPO: Variational Sequence-Level Soft Policy Optimization, arXiv 2602.10693",
    advantage=GroupRelative(),
    ratio=Ratio(anchor="behavior", level="sequence_product"),
    surrogate=PolicyGradient(GammaKernel(2.0, 3.0), GammaKernel(3.0, 2.0)),
    aggregate=TokenMean(),
    updates=Updates(minibatches=4),
)

PASS_AT_K = replace(
    GRPO,
    name="pass-at-k",
    paper="Optimizing Language Models for Inference Time Objectives using Reinforcement Learning, arXiv 2503.19595",
    advantage=MarginalBest(),
)

CFPO = replace(
    GRPO,
    name="cfpo",
    paper="Clipping-Free Policy Optimization for Large Language Models, arXiv 2601.22801",
    surrogate=QuadraticPenalty(0.2),
)

HIGH_ENTROPY = replace(
    DAPO,
    name="high-entropy",
    paper="Beyond the 80/20 Rule: High-Entropy Minority Tokens, arXiv 2506.01939",
    correction=EntropyMask(0.2),
)

CLIP_COV = replace(
    GRPO,
    name="clip-cov",
    paper="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, Clip-Cov, arXiv 2505.22617",
    surrogate=ClippedSurrogate(Clip(1.0, 1.0)),
    aggregate=TokenMean(),
    correction=CovarianceMask(),
    updates=Updates(minibatches=8),
)

KL_COV = replace(
    CLIP_COV,
    name="kl-cov",
    paper="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, KL-Cov, arXiv 2505.22617",
    surrogate=PolicyGradient(Unbounded()),
    correction=None,
    regularizers=(CovarianceKl(),),
)

M2PO = replace(
    CISPO,
    name="m2po",
    paper="Prosperity before Collapse (M2PO), arXiv 2510.01161",
    ratio=Ratio(anchor="behavior"),
    surrogate=PolicyGradient(Unbounded()),
    correction=SecondMomentMask(0.04),
    updates=Updates(minibatches=4),
)

BAPO = replace(
    GRPO,
    name="bapo",
    paper="BAPO: Balanced Policy Optimization with Adaptive Clipping, arXiv 2510.18927",
    surrogate=BalancedSurrogate(),
    aggregate=TokenMean(),
    updates=Updates(epochs=2, minibatches=4),
)

FIPO = replace(
    DAPO,
    name="fipo",
    paper="FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization, arXiv 2603.19835",
    surrogate=ClippedSurrogate(Clip(0.2, 0.28), dual=10.0),
    correction=FutureInfluence(),
)

SCALERL = replace(
    CISPO,
    name="scalerl",
    paper="The Art of Scaling Reinforcement Learning Compute for LLMs, arXiv 2510.13786",
    advantage=Normalized(GroupRelative(scale="none"), over="batch"),
    ratio=Ratio(anchor="behavior"),
    aggregate=TokenMean("group"),
    num_generations=16,
    sampler=NoPositiveResampling(),
    keep=Informative(),
)

# The algorithms above, in their order: each can be tried on a recorded batch of log-probabilities.
PRESETS: Mapping[str, Algorithm] = {
    preset.name: preset for preset in list(globals().values()) if isinstance(preset, Algorithm)
}

SFT = replace(
    REINFORCE,
    name="sft",
    paper="Supervised fine-tuning; as in InstructGPT, arXiv 2203.02155, section 3.5",
    samples="data",
)
"""The dataset's answers with reward 1: the loss is the mean negative log-likelihood of a token (`gnomon sft`)."""

SDFT = Algorithm(
    name="sdft",
    paper="Self-Distillation Enables Continual Learning, arXiv 2601.19897",
    advantage=ConstantAdvantage(),
    ratio=Ratio(),
    surrogate=Distillation(),
    aggregate=TokenMean(),
    num_generations=1,
    reference=ReferencePolicy(
        "average", decay=0.98, prompt="{question}\n\nOne answer is:\n{answer}\n\nAnswer in your own words."
    ),
)
"""The policy learns its own distribution given a demonstration: {answer} of each row."""

SDPO = replace(
    SDFT,
    name="sdpo",
    paper="Reinforcement Learning via Self-Distillation, arXiv 2601.20802",
    num_generations=8,
    reference=ReferencePolicy(
        "average", prompt="{question}\n\nA correct answer is:\n{sibling}\n\nNow answer the question correctly."
    ),
)
"""The policy learns its own distribution given another answer of the group that succeeded."""

EXPERT_ITERATION = replace(
    REINFORCE,
    name="expert-iteration",
    paper="Beyond Human Data (ReST-EM), arXiv 2312.06585; rejection-sampled fine-tuning, arXiv 2308.01825",
    advantage=Accepted(),
    num_generations=8,
)

RAFT = replace(
    EXPERT_ITERATION,
    name="raft",
    paper="RAFT: Reward rAnked FineTuning, arXiv 2304.06767",
    advantage=Accepted(best=True),
)

LUFFY = Algorithm(
    name="luffy",
    paper="Learning to Reason under Off-Policy Guidance, arXiv 2504.14945",
    advantage=GroupRelative(scale="none"),
    ratio=Ratio(),
    surrogate=GivenShaping(),
    aggregate=TokenMean(),
    demonstrated=True,
)

SRFT = replace(
    LUFFY,
    name="srft",
    paper="SRFT: A Single-Stage Method with Supervised and Reinforcement Fine-Tuning, arXiv 2506.19767",
    advantage=GroupRelative(),
    regularizers=(GivenNll(),),
)

DPO = Algorithm(
    name="dpo",
    paper="Direct Preference Optimization, arXiv 2305.18290",
    advantage=GroupRelative(scale="none"),
    ratio=Ratio(anchor="reference", level="sequence_product", clamp=math.inf),
    surrogate=PreferenceLoss(),
    aggregate=SequenceMean(),
    num_generations=2,
    samples="pairs",
)
"""The chosen and the rejected answer of each row: the chosen one gains on the reference."""

IPO_PREFERENCE = replace(
    DPO,
    name="ipo-preference",
    paper="A General Theoretical Paradigm to Understand Learning from Human Preferences (IPO), arXiv 2310.12036",
    surrogate=PreferenceLoss(loss="squared"),
)
"""As `DPO`, until the chosen answer has gained 1 / (2 beta) nats more than the other."""

KTO = replace(
    DPO,
    name="kto",
    paper="KTO: Model Alignment as Prospect Theoretic Optimization, arXiv 2402.01306",
    advantage=Returns(),
    surrogate=ProspectLoss(),
    samples="labels",
)
"""Each row's answer with its label, and beside it another row's answer, which only measures the KL."""

REWARD_MODEL = replace(
    DPO,
    name="reward-model",
    paper="Training language models to follow instructions with human feedback, section 3.5, arXiv 2203.02155",
    advantage=ConstantAdvantage(0.0),
    ratio=Ratio(),
    surrogate=PolicyGradient(Unbounded()),
    critic=CriticConfig("shared", learning_rate_ratio=1.0, target="pairs"),
)
"""No policy: the value after the chosen answer shall be above that after the rejected one (`gnomon reward-model`)."""

_OTHERS = (SFT, SDFT, SDPO, EXPERT_ITERATION, RAFT, LUFFY, SRFT, DPO, IPO_PREFERENCE, KTO, REWARD_MODEL)
NAMED: Mapping[str, Algorithm] = {**PRESETS, **{other.name: other for other in _OTHERS}}
"""All algorithms that have a name: also those that no recorded batch of log-probabilities has enough for."""
