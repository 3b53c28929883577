"""The rule about speed."""

from dataclasses import dataclass
from typing import ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, Point, median, values
from gnomon.diagnosis.rule import Alarm, graded, remedy

STEP, TOKENS = "time/step_seconds", "tokens/generated"
STAGES = ("generate", "grade", "score", "update", "publish", "track")


@dataclass(frozen=True)
class Throughput:
    """Steps that take longer and longer for the same tokens.

    Compares medians of the last and the first steps, per step and per generated token: longer responses may take
    longer, and shorter responses leave the fixed cost of a step. The finding names the stage that grew most. If the
    other stages grew by ``others`` times or more, or one of the last steps was as fast as ever, another program uses
    the machine, and the finding is only a note.

    Attributes:
        skipped: First steps, which warm up.
        baseline: Steps.
        window: Steps.
        warning: Factor.
        severe: Factor.
        seconds: Smallest growth of a step; smaller changes are noise of the machine.
        others: Factor.

    References:
        rlprobe 0.1.0 (1.4, 3).
    """

    name: ClassVar[str] = "throughput"
    skipped: int = 1
    baseline: int = 8
    window: int = 6
    warning: float = 1.4
    severe: float = 3.0
    seconds: float = 0.3
    others: float = 1.4

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare the medians."""
        points = history.latest(STEP, self.window)
        first = history.first(STEP, self.skipped + self.baseline)[self.skipped :]
        if not points or len(first) < self.baseline or points[0][0] <= first[-1][0]:
            return None
        usual, now = median(first), median(points)
        if usual <= 0 or now - usual < self.seconds:
            return None
        times = min(now / usual, self._a_token(history, first))
        severity = graded(times, self.warning, self.severe)
        if severity is None:
            return None
        spent = {stage: self._spent(history, stage) for stage in STAGES}
        grown = {stage: after - before for stage, (before, after) in spent.items()}
        stage = max(grown, key=lambda name: grown[name])
        rest = (now - spent[stage][1]) / max(usual - spent[stage][0], 1e-9)
        is_machine = rest >= self.others or min(values(points)) < self.warning * usual
        (means, advice), (machine, look) = remedy(f"throughput.{stage}"), remedy("throughput.machine")
        return Alarm(
            "note" if is_machine else severity,
            points[0][0],
            f"a step takes {now:.3g} s where it took {usual:.3g} s, most of it in '{stage}' (+{grown[stage]:.3g} s)",
            {"step_seconds": now, "usual_seconds": usual, "times": times, "times_of_other_stages": rest},
            machine if is_machine else means,
            (*look, *advice) if is_machine else advice,
        )

    def _a_token(self, history: History, first: list[Point]) -> float:
        tokens = dict(history.first(TOKENS, self.skipped + self.baseline))
        recent, seconds = dict(history.latest(TOKENS, self.window)), dict(history.latest(STEP, self.window))
        before = median([(step, value / tokens[step]) for step, value in first if tokens.get(step)])
        after = median([(step, value / recent[step]) for step, value in seconds.items() if recent.get(step)])
        return after / before if before else 0.0

    def _spent(self, history: History, stage: str) -> tuple[float, float]:
        """Return the median seconds of a stage in the first steps and in the last steps."""
        name = f"time/{stage}_seconds"
        first = history.first(name, self.skipped + self.baseline)[self.skipped :]
        return median(first), median(history.latest(name, self.window))
