"""Places to plan for."""

from collections.abc import Callable
from typing import Any

import pytest

from gnomon.analysis.planner.deployment import Deployment, Lengths, PlannedJob
from gnomon.analysis.planner.hardware import GPUS, PUBLISHED
from gnomon.analysis.planner.shapes import SHAPES


@pytest.fixture
def make_place() -> Callable[..., Deployment]:
    """Return a maker of places: model, devices, and what is different in the job."""

    def make(model: str = "qwen3-8b", devices: int = 16, **job: Any) -> Deployment:
        asked = {"prompts": 16, "generations": 8, "prompt": 256, "answers": Lengths(500, 2000)} | job
        return Deployment(SHAPES[model], GPUS["h100"], PlannedJob(**asked), PUBLISHED, devices)

    return make
