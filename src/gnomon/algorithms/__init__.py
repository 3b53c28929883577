"""From rewards to a loss: pure, no input or output, no devices, no ranks."""

import warnings
from typing import Any

from gnomon.algorithms.advantages import (
    Fixed,
    Gae,
    GroupRelative,
    LeaveOneOut,
    LengthAdaptive,
    LengthSigmoid,
    OptimalBaseline,
    Returns,
    TrackedBaseline,
    Whitened,
)
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.aliases import FORMER
from gnomon.algorithms.build import Resolution, override, resolve, resolve_with_notes, to_table
from gnomon.algorithms.corrections import (
    Capped,
    MaskedIS,
    OffPolicyMask,
    ProbabilityMask,
    RejectionSampling,
    TruncatedIS,
)
from gnomon.algorithms.critic import CriticPlan, Pretraining
from gnomon.algorithms.describe import describe, summary
from gnomon.algorithms.loss_aggregation import ConstantLength, SequenceMean, SequenceSum, TokenMean
from gnomon.algorithms.metrics import measure_advantages, measure_values
from gnomon.algorithms.presets import (
    A_STAR_PO,
    CISPO,
    DAPO,
    DECOUPLED_PPO,
    DR_GRPO,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    LITE_PPO,
    OPO,
    P3O,
    P3O_TWO_ANCHOR,
    PPO,
    PRESETS,
    REINFORCE,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    SAPO,
    SPO,
    VAPO,
    VAPO_REVIEW,
    VC_PPO,
)
from gnomon.algorithms.protocols import Loss, LossInputs
from gnomon.algorithms.ratio_bounds import Cap, Clip, EssCap, Unbounded
from gnomon.algorithms.ratios import Ratio
from gnomon.algorithms.regularizers import Entropy, EssKl, Kl, PositiveNll, SelfImitation
from gnomon.algorithms.sections import (
    EmaProximal,
    Greso,
    Informative,
    OptimalValue,
    OverlongPenalty,
    Prioritized,
    SelfImitationBuffer,
    TrackerPlan,
    Uniform,
    Updates,
)
from gnomon.algorithms.surrogates import ClippedSurrogate, GeometricClip, PolicyGradient, Regression, SigmoidGate

__all__ = [
    "A_STAR_PO",
    "CISPO",
    "DAPO",
    "DECOUPLED_PPO",
    "DR_GRPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "GSPO_TOKEN",
    "LITE_PPO",
    "OPO",
    "P3O",
    "P3O_TWO_ANCHOR",
    "PPO",
    "PRESETS",
    "REINFORCE",
    "REINFORCE_PP",
    "REINFORCE_PP_BASELINE",
    "RLOO",
    "SAPO",
    "SPO",
    "VAPO",
    "VAPO_REVIEW",
    "VC_PPO",
    "Algorithm",
    "Cap",
    "Capped",
    "Clip",
    "ClippedSurrogate",
    "ConstantLength",
    "CriticPlan",
    "EmaProximal",
    "Entropy",
    "EssCap",
    "EssKl",
    "Fixed",
    "Gae",
    "GeometricClip",
    "Greso",
    "GroupRelative",
    "Informative",
    "Kl",
    "LeaveOneOut",
    "LengthAdaptive",
    "LengthSigmoid",
    "Loss",
    "LossInputs",
    "MaskedIS",
    "OffPolicyMask",
    "OptimalBaseline",
    "OptimalValue",
    "OverlongPenalty",
    "PolicyGradient",
    "PositiveNll",
    "Pretraining",
    "Prioritized",
    "ProbabilityMask",
    "Ratio",
    "Regression",
    "RejectionSampling",
    "Resolution",
    "Returns",
    "SelfImitation",
    "SelfImitationBuffer",
    "SequenceMean",
    "SequenceSum",
    "SigmoidGate",
    "TokenMean",
    "TrackedBaseline",
    "TrackerPlan",
    "TruncatedIS",
    "Unbounded",
    "Uniform",
    "Updates",
    "Whitened",
    "describe",
    "measure_advantages",
    "measure_values",
    "override",
    "resolve",
    "resolve_with_notes",
    "summary",
    "to_table",
]


def __getattr__(name: str) -> Any:
    if name not in FORMER:
        raise AttributeError(f"module 'gnomon.algorithms' has no attribute {name!r}")
    warnings.warn(f"gnomon.algorithms.{name} is gnomon.algorithms.{FORMER[name]} now", FutureWarning, stacklevel=2)
    return globals()[FORMER[name]]
