"""What the cluster tests share."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.learner.conftest import build_batch

from gnomon.cluster.ray import import_ray
from gnomon.cluster.start import loopback_ray

# Ray keeps how it was imported first: as for a cluster that is started here, which the tests that join one allow.
loopback_ray(import_ray)


@pytest.fixture(scope="module")
def make_batch() -> Callable[..., Any]:
    """A maker of batches."""
    return build_batch
