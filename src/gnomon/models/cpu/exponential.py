"""A fast exponential function."""

import math

from torch import Tensor

_LOG2_E = math.log2(math.e)


def exp_(exponents: Tensor) -> Tensor:
    """Replace ``exponents``, of any shape, by e to their power, in place, in float32 with relative error 1e-7 per unit.

    PyTorch's exp on a CPU is MKL's, which on other makers' CPUs takes twice as long as PyTorch's own exp2: 2.6 against
    1.3 ms for 64 rows of 49,152 (AMD EPYC, one thread).

    >>> import torch
    >>> exp_(torch.tensor([-math.inf, 0.0])).tolist()
    [0.0, 1.0]
    """
    return exponents.mul_(_LOG2_E).exp2_() if exponents.device.type == "cpu" else exponents.exp_()
