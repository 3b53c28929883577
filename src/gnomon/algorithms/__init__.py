"""From rewards to a loss: pure functions of tensors, without input or output, devices or ranks."""

import warnings
from typing import Any

from gnomon.algorithms.advantage_algebra import AdvantageSum as AdvantageSum
from gnomon.algorithms.advantage_algebra import Condition as Condition
from gnomon.algorithms.advantage_algebra import InRole as InRole
from gnomon.algorithms.advantage_algebra import Normalized as Normalized
from gnomon.algorithms.advantage_algebra import PerReward as PerReward
from gnomon.algorithms.advantage_algebra import Requires as Requires
from gnomon.algorithms.advantage_algebra import RewardAtLeast as RewardAtLeast
from gnomon.algorithms.advantage_algebra import Scaled as Scaled
from gnomon.algorithms.advantage_algebra import Where as Where
from gnomon.algorithms.advantages import ConstantAdvantage as ConstantAdvantage
from gnomon.algorithms.advantages import Fixed as Fixed
from gnomon.algorithms.advantages import Gae as Gae
from gnomon.algorithms.advantages import GroupRelative as GroupRelative
from gnomon.algorithms.advantages import LeaveOneOut as LeaveOneOut
from gnomon.algorithms.advantages import LengthAdaptive as LengthAdaptive
from gnomon.algorithms.advantages import LengthSigmoid as LengthSigmoid
from gnomon.algorithms.advantages import OptimalBaseline as OptimalBaseline
from gnomon.algorithms.advantages import Returns as Returns
from gnomon.algorithms.advantages import ReverseKl as ReverseKl
from gnomon.algorithms.advantages import StateRelative as StateRelative
from gnomon.algorithms.advantages import TrackedBaseline as TrackedBaseline
from gnomon.algorithms.advantages import Whitened as Whitened
from gnomon.algorithms.algorithm import Algorithm as Algorithm
from gnomon.algorithms.aliases import FORMER
from gnomon.algorithms.build import Resolution as Resolution
from gnomon.algorithms.build import override as override
from gnomon.algorithms.build import resolve as resolve
from gnomon.algorithms.build import resolve_with_notes as resolve_with_notes
from gnomon.algorithms.build import to_table as to_table
from gnomon.algorithms.corrections import Capped as Capped
from gnomon.algorithms.corrections import MaskedIS as MaskedIS
from gnomon.algorithms.corrections import OffPolicyMask as OffPolicyMask
from gnomon.algorithms.corrections import ProbabilityMask as ProbabilityMask
from gnomon.algorithms.corrections import RejectionSampling as RejectionSampling
from gnomon.algorithms.corrections import TruncatedIS as TruncatedIS
from gnomon.algorithms.critic import CriticConfig as CriticConfig
from gnomon.algorithms.critic import Pretraining as Pretraining
from gnomon.algorithms.describe import describe as describe
from gnomon.algorithms.describe import summary as summary
from gnomon.algorithms.loss_aggregation import ConstantLength as ConstantLength
from gnomon.algorithms.loss_aggregation import SequenceMean as SequenceMean
from gnomon.algorithms.loss_aggregation import SequenceSum as SequenceSum
from gnomon.algorithms.loss_aggregation import TokenMean as TokenMean
from gnomon.algorithms.metrics import measure_advantages as measure_advantages
from gnomon.algorithms.metrics import measure_values as measure_values
from gnomon.algorithms.presets import A_STAR_PO as A_STAR_PO
from gnomon.algorithms.presets import CISPO as CISPO
from gnomon.algorithms.presets import DAPO as DAPO
from gnomon.algorithms.presets import DECOUPLED_PPO as DECOUPLED_PPO
from gnomon.algorithms.presets import DR_GRPO as DR_GRPO
from gnomon.algorithms.presets import GDPO as GDPO
from gnomon.algorithms.presets import GIGPO as GIGPO
from gnomon.algorithms.presets import GMPO as GMPO
from gnomon.algorithms.presets import GRPO as GRPO
from gnomon.algorithms.presets import GSPO as GSPO
from gnomon.algorithms.presets import GSPO_TOKEN as GSPO_TOKEN
from gnomon.algorithms.presets import LITE_PPO as LITE_PPO
from gnomon.algorithms.presets import NAMED as NAMED
from gnomon.algorithms.presets import OPD as OPD
from gnomon.algorithms.presets import OPO as OPO
from gnomon.algorithms.presets import P3O as P3O
from gnomon.algorithms.presets import P3O_TWO_ANCHOR as P3O_TWO_ANCHOR
from gnomon.algorithms.presets import PPO as PPO
from gnomon.algorithms.presets import PRESETS as PRESETS
from gnomon.algorithms.presets import RAE as RAE
from gnomon.algorithms.presets import REINFORCE as REINFORCE
from gnomon.algorithms.presets import REINFORCE_PP as REINFORCE_PP
from gnomon.algorithms.presets import REINFORCE_PP_BASELINE as REINFORCE_PP_BASELINE
from gnomon.algorithms.presets import RLOO as RLOO
from gnomon.algorithms.presets import SAPO as SAPO
from gnomon.algorithms.presets import SDFT as SDFT
from gnomon.algorithms.presets import SDPO as SDPO
from gnomon.algorithms.presets import SFT as SFT
from gnomon.algorithms.presets import SPO as SPO
from gnomon.algorithms.presets import VAPO as VAPO
from gnomon.algorithms.presets import VAPO_REVIEW as VAPO_REVIEW
from gnomon.algorithms.presets import VC_PPO as VC_PPO
from gnomon.algorithms.protocols import Loss as Loss
from gnomon.algorithms.protocols import LossInputs as LossInputs
from gnomon.algorithms.ratio_bounds import Cap as Cap
from gnomon.algorithms.ratio_bounds import Clip as Clip
from gnomon.algorithms.ratio_bounds import EssCap as EssCap
from gnomon.algorithms.ratio_bounds import Unbounded as Unbounded
from gnomon.algorithms.ratios import Ratio as Ratio
from gnomon.algorithms.regularizers import Entropy as Entropy
from gnomon.algorithms.regularizers import EssKl as EssKl
from gnomon.algorithms.regularizers import Kl as Kl
from gnomon.algorithms.regularizers import PositiveNll as PositiveNll
from gnomon.algorithms.regularizers import SelfImitation as SelfImitation
from gnomon.algorithms.sections import EmaProximal as EmaProximal
from gnomon.algorithms.sections import Greso as Greso
from gnomon.algorithms.sections import Informative as Informative
from gnomon.algorithms.sections import OptimalValue as OptimalValue
from gnomon.algorithms.sections import OverlongPenalty as OverlongPenalty
from gnomon.algorithms.sections import Prioritized as Prioritized
from gnomon.algorithms.sections import ReferencePolicy as ReferencePolicy
from gnomon.algorithms.sections import RoleAverage as RoleAverage
from gnomon.algorithms.sections import SelfImitationBuffer as SelfImitationBuffer
from gnomon.algorithms.sections import TaskTeacher as TaskTeacher
from gnomon.algorithms.sections import TrackerConfig as TrackerConfig
from gnomon.algorithms.sections import Uniform as Uniform
from gnomon.algorithms.sections import Updates as Updates
from gnomon.algorithms.surrogates import ClippedSurrogate as ClippedSurrogate
from gnomon.algorithms.surrogates import Distillation as Distillation
from gnomon.algorithms.surrogates import GeometricClip as GeometricClip
from gnomon.algorithms.surrogates import PolicyGradient as PolicyGradient
from gnomon.algorithms.surrogates import Regression as Regression
from gnomon.algorithms.surrogates import SigmoidGate as SigmoidGate


def __getattr__(name: str) -> Any:
    if name not in FORMER:
        raise AttributeError(f"module 'gnomon.algorithms' has no attribute {name!r}")
    warnings.warn(f"gnomon.algorithms.{name} is gnomon.algorithms.{FORMER[name]} now", FutureWarning, stacklevel=2)
    return globals()[FORMER[name]]
