"""From rewards to a loss: pure functions of tensors, without input or output, devices or ranks."""

import warnings
from typing import Any

from gnomon.algorithms.advantage_algebra import *
from gnomon.algorithms.advantages import *
from gnomon.algorithms.algorithm import Algorithm as Algorithm
from gnomon.algorithms.aliases import FORMER
from gnomon.algorithms.build import Resolution as Resolution
from gnomon.algorithms.build import override as override
from gnomon.algorithms.build import resolve as resolve
from gnomon.algorithms.build import resolve_with_notes as resolve_with_notes
from gnomon.algorithms.build import to_table as to_table
from gnomon.algorithms.corrections import *
from gnomon.algorithms.critic import CriticConfig as CriticConfig
from gnomon.algorithms.critic import Pretraining as Pretraining
from gnomon.algorithms.describe import describe as describe
from gnomon.algorithms.describe import summary as summary
from gnomon.algorithms.loss_aggregation import *
from gnomon.algorithms.metrics import measure_advantages as measure_advantages
from gnomon.algorithms.metrics import measure_values as measure_values
from gnomon.algorithms.presets import *
from gnomon.algorithms.protocols import Loss as Loss
from gnomon.algorithms.protocols import LossInputs as LossInputs
from gnomon.algorithms.ratio_bounds import *
from gnomon.algorithms.ratios import Ratio as Ratio
from gnomon.algorithms.regularizers import *
from gnomon.algorithms.returns import *
from gnomon.algorithms.sections import *
from gnomon.algorithms.surrogates import *


def __getattr__(name: str) -> Any:
    if name not in FORMER:
        raise AttributeError(f"module 'gnomon.algorithms' has no attribute {name!r}")
    warnings.warn(f"gnomon.algorithms.{name} is gnomon.algorithms.{FORMER[name]} now", FutureWarning, stacklevel=2)
    return globals()[FORMER[name]]
