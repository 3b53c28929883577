"""From rewards to a loss: pure, no input or output, no devices, no ranks."""

from gnomon.algorithms.advantages import (
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    Returns,
    Tracked,
    Whitened,
)
from gnomon.algorithms.aggregates import ConstantLength, SequenceMean, SequenceSum, TokenMean
from gnomon.algorithms.algorithm import Algorithm, Loss, LossView
from gnomon.algorithms.configure import Resolution, override, resolve, resolve_with_notes, to_table
from gnomon.algorithms.corrections import Masked, Truncated
from gnomon.algorithms.describe import describe, summary
from gnomon.algorithms.measure import measure_advantages
from gnomon.algorithms.plans import (
    Informative,
    OverlongPenalty,
    Prioritized,
    TrackerPlan,
    Uniform,
    Updates,
)
from gnomon.algorithms.presets import (
    CISPO,
    DAPO,
    DR_GRPO,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    LITE_PPO,
    OPO,
    P3O,
    PRESETS,
    REINFORCE,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    SAPO,
    SPO,
)
from gnomon.algorithms.ratios import Ratio
from gnomon.algorithms.regularizers import Entropy, EssKl, Kl, PositiveNll
from gnomon.algorithms.surrogates import GeometricClip, Pessimistic, Score, SoftGate
from gnomon.algorithms.trust import Cap, Clip, EssCap, Unbounded

__all__ = [
    "CISPO",
    "DAPO",
    "DR_GRPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "GSPO_TOKEN",
    "LITE_PPO",
    "OPO",
    "P3O",
    "PRESETS",
    "REINFORCE",
    "REINFORCE_PP",
    "REINFORCE_PP_BASELINE",
    "RLOO",
    "SAPO",
    "SPO",
    "Algorithm",
    "Cap",
    "Clip",
    "ConstantLength",
    "Entropy",
    "EssCap",
    "EssKl",
    "GeometricClip",
    "GroupRelative",
    "Informative",
    "Kl",
    "LeaveOneOut",
    "LengthWeighted",
    "Loss",
    "LossView",
    "Masked",
    "OverlongPenalty",
    "Pessimistic",
    "PositiveNll",
    "Prioritized",
    "Ratio",
    "Resolution",
    "Returns",
    "Score",
    "SequenceMean",
    "SequenceSum",
    "SoftGate",
    "TokenMean",
    "Tracked",
    "TrackerPlan",
    "Truncated",
    "Unbounded",
    "Uniform",
    "Updates",
    "Whitened",
    "describe",
    "measure_advantages",
    "override",
    "resolve",
    "resolve_with_notes",
    "summary",
    "to_table",
]
