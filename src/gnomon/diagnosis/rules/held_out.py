"""The rules about held-out scores: rewards that they do not confirm, and a loss that rises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import LARGEST, History, Point, mean
from gnomon.diagnosis.rule import Alarm, remedy


@dataclass(frozen=True)
class HeldOutGap:
    """Training rewards that held-out prompts do not confirm.

    The gap is the mean training reward of the last steps minus the upper end of the held-out reward's 95% interval,
    divided by the training reward. So a lucky held-out set does not explain the gap. Severe if the training reward rose
    and the held-out reward did not. No finding if training asks harder prompts on purpose.

    Attributes:
        window: Steps before the evaluation.
        warning: Share of the training reward.
        severe: Share of the training reward.
        least: Smallest training reward.

    References:
        rldoctor 0.2.0 (.15, .30).
    """

    name: ClassVar[str] = "held-out-gap"
    window: int = 6
    warning: float = 0.15
    severe: float = 0.3
    least: float = 0.1

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the latest evaluation."""
        scored = [row for row in map(_score, history.evaluations) if row is not None]
        if not scored or scored[-1][0] < self.window:
            return None
        step, held_out, high = scored[-1]
        trained = self._trained(history, step)
        reward = mean(trained)
        if not trained or reward < self.least:
            return None
        gap = (reward - high) / reward
        if gap < self.warning:
            return None
        began = mean(history.rewards[: self.window])
        first = scored[0][1]
        has_risen, is_flat = reward - began > self.warning * reward, held_out - first < 0.25 * (reward - began)
        is_severe = gap >= self.severe and len(scored) > 1 and has_risen and is_flat
        return Alarm(
            "severe" if is_severe else "warning",
            trained[0][0],
            f"after step {step} the reward is {reward:.3g} in training and {held_out:.3g} (at most {high:.3g}) on "
            "held-out questions",
            {"training": reward, "held_out": held_out, "held_out_high": high, "held_out_at_first": first, "gap": gap},
            *remedy(self.name),
        )

    def _trained(self, history: History, step: int) -> list[Point]:
        return [point for point in history.rewards[-10 * self.window :] if step - self.window < point[0] <= step]


@dataclass(frozen=True)
class HeldOutLoss:
    """A held-out loss that rises while the dataset's answers are trained on.

    All evaluations are of the same rows, so little of a difference is noise. Severe where the loss is above that of the
    model before training.

    Attributes:
        warning: Rise above the lowest loss, as a share of it.

    References:
        Ours.
    """

    name: ClassVar[str] = "held-out-loss"
    warning: float = 0.03

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the latest evaluation against the lowest and the first."""
        found = [(row["step"], float(row["loss_nats"])) for row in history.evaluations if _has_loss(row)]
        best = min(found, key=lambda point: point[1], default=None)
        if best is None or found[-1][1] <= (1 + self.warning) * best[1]:
            return None
        step, loss = found[-1]
        trained = history.mean("loss/policy", min(5, history.steps)) or 0.0
        return Alarm(
            "severe" if loss > found[0][1] else "warning",
            best[0],
            f"the held-out loss is {loss:.4g} nats a token after step {step}, and was {best[1]:.4g} after {best[0]}",
            {"loss": loss, "lowest": best[1], "lowest_step": best[0], "at_first": found[0][1], "training": trained},
            *remedy(self.name, loss=f"{trained:.4g}", step=best[0]),
        )


def _has_loss(row: Mapping[str, Any]) -> bool:
    loss = row.get("loss_nats")
    return type(row.get("step")) is int and isinstance(loss, int | float) and abs(loss) <= LARGEST


def _score(row: Mapping[str, Any]) -> tuple[int, float, float] | None:
    """Return step, mean and upper end of an evaluation's reward; None if the row is invalid."""
    scores = row.get("scores")
    found = scores.get("reward") if isinstance(scores, Mapping) else None
    if not isinstance(found, Mapping) or type(row.get("step")) is not int:
        return None
    numbers: tuple[Any, Any] = (found.get("mean"), found.get("high"))
    if any(type(number) not in (int, float) or not abs(number) <= LARGEST for number in numbers):
        return None
    return row["step"], float(numbers[0]), float(numbers[1])
