"""Both ways of computing what lies between products."""

import pytest
import torch

from gnomon.models.native import kernels


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    """By functions in C, or by torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "kernels_for", lambda dtype: None)
    elif kernels.kernels_for(torch.float32) is None:
        pytest.skip("there is no C compiler here")
    return request.param
