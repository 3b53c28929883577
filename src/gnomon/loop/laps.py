"""Where a step's seconds go."""

import time

from gnomon.metrics import Mean, Metrics
from gnomon.rollouts.rollout import Stopwatch


class Laps:
    """Wall-clock seconds between marks; each mark ends the stage that it names."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._began = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """Give the seconds since the last mark to ``stage``."""
        now = time.perf_counter()
        self._stages[stage] = now - self._last
        self._last = now

    def metrics(self, watch: Stopwatch) -> Metrics:
        """Return ``time/STAGE_seconds`` and ``time/step_seconds``; grading is the wait after the last completion."""
        stages = dict(self._stages)
        stages["grade"] = min(watch.grade_seconds, stages.get("generate", 0.0))
        stages["generate"] = stages.get("generate", 0.0) - stages["grade"]
        stages["step"] = self._last - self._began
        return Metrics.of({f"time/{stage}_seconds": Mean(seconds, 1) for stage, seconds in stages.items()})
