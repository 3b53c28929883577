"""What the cluster tests share."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.learner.conftest import build_batch


@pytest.fixture(scope="module")
def make_batch() -> Callable[..., Any]:
    """A maker of batches."""
    return build_batch
