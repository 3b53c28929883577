"""When to stop because grading fails too often."""

import re
from collections import Counter, deque
from dataclasses import dataclass

from gnomon.core.errors import ConfigError, GradingError
from gnomon.core.redaction import without_secrets
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample

SHOWN = 3
TAIL = 160


@dataclass(frozen=True)
class _Failure:
    task_id: str
    cause: str
    tail: str

    def __str__(self) -> str:
        return f"task {self.task_id}: {self.cause}; the completion ends with {self.tail!r}"


class FaultBudget:
    """Stops a run in which most conversations end in one fault of the user's environment or tool.

    One that a policy can bring about ends that rollout, which is graded; when more than half of the last ``window``
    conversations end in the same line of code, it is the code that is trained on.

    Args:
        fewest: Conversations before that.
    """

    def __init__(self, window: int = 50, fewest: int = 16) -> None:
        self._recent: deque[tuple[str, str] | None] = deque(maxlen=window)
        self._fewest = fewest

    def observe(self, cause: str | None) -> None:
        """Count one conversation; ``cause`` is that of the fault that ended it, None for any other end.

        Raises:
            GradingError: With the commonest cause.
        """
        self._recent.append(None if cause is None else (_kind(cause), cause))
        kinds = Counter(each[0] for each in self._recent if each is not None)
        # The conversation just observed must be of the most frequent kind: the error names its cause.
        count, recent = max(kinds.values(), default=0), len(self._recent)
        if cause is None or recent < self._fewest or 2 * count <= recent or kinds[_kind(cause)] != count:
            return
        raise GradingError(
            f"{count} of the last {recent} conversations ended because the environment failed in one way: {cause}\n"
            "Fix that line; a tool that may raise is answered with its error by environment.on_error = 'reply'."
        )


def _kind(cause: str) -> str:
    """Return the type and the place of a cause, without the values in its message."""
    # `exception_text` writes "KeyError: 'x' (file.py:12 in step)".
    # Values differ from conversation to conversation, the line does not.
    found = re.fullmatch(r"(\w+).*\((\S+:\d+ in \S+)\)", cause, re.DOTALL)
    return cause if found is None else " ".join(found.groups())


class ErrorBudget:
    """Stops a run in which more than ``max_fraction`` of the last ``window`` samples could not be graded.

    It stops as soon as that is certain: 11 errors in the first 11 samples already exceed 20% of 50. A few errors cost a
    few samples; many mean that the reward, not the policy, is what is being trained on.

    Args:
        max_fraction: In [0, 1); 0 stops at the first error.
        window: Samples, >= 1.
    """

    def __init__(self, max_fraction: float = 0.2, window: int = 50) -> None:
        if not 0 <= max_fraction < 1 or window < 1:
            raise ConfigError(
                f"ErrorBudget needs 0 <= max_fraction < 1 and window >= 1, got {max_fraction} and {window}"
            )
        self._max_fraction = max_fraction
        self._recent: deque[_Failure | None] = deque(maxlen=window)
        self._window = window

    def observe(self, grade: Grade, sample: Sample, task_id: str = "?") -> None:
        """Count one grade.

        Raises:
            GradingError: With the fraction and up to three samples to look at, latest first.
        """
        failure = (
            None if grade.error is None else _Failure(task_id, grade.error, without_secrets(sample.completion)[-TAIL:])
        )
        self._recent.append(failure)
        failures = [f for f in self._recent if f is not None]
        # Compared with a full window from the first sample on: a run stops only
        # when the bound is exceeded whatever the rest of the window will hold.
        if failure is None or len(failures) <= self._max_fraction * self._window:
            return
        listed = "\n  ".join(str(f) for f in failures[: -SHOWN - 1 : -1])
        count, recent = len(failures), len(self._recent)
        raise GradingError(
            f"{count} of the last {recent} samples ({count / recent:.0%}) "
            f"could not be graded, more than {self._max_fraction:.0%} of a window of {self._window}. "
            f"Look at:\n  {listed}\nFix the reward function, or allow more errors "
            "(grading.max_error_fraction)."
        )
