"""Places to plan for."""

from collections.abc import Callable
from typing import Any

import pytest

from gnomon.studies.capacity.efficiencies import PUBLISHED
from gnomon.studies.capacity.hardware import GPUS
from gnomon.studies.capacity.job import Job, Lengths
from gnomon.studies.capacity.place import Place
from gnomon.studies.capacity.shapes import SHAPES


@pytest.fixture
def make_place() -> Callable[..., Place]:
    """Return a maker of places: model, devices, and what is different in the job."""

    def make(model: str = "qwen3-8b", devices: int = 16, **job: Any) -> Place:
        asked = {"prompts": 16, "generations": 8, "prompt": 256, "answers": Lengths(500, 2000)} | job
        return Place(SHAPES[model], GPUS["h100"], Job(**asked), PUBLISHED, devices)

    return make
