"""Histories and groups for the tests of rules, written as numbers."""

from collections.abc import Sequence

from gnomon.core.types import Grade, Group, Rollout, StopReason, Task
from gnomon.diagnosis.history import History


def history(**columns: float | Sequence[float | None]) -> History:
    """Return a history of columns by name, ``loss__entropy_nats`` for loss/entropy_nats; a number is constant.

    As many steps as the longest column has, from step 1.
    """
    steps = max(len(column) for column in columns.values() if not isinstance(column, float | int))
    made = History()
    for step in range(steps):
        row = {}
        for name, column in columns.items():
            value = column if isinstance(column, float | int) else column[step]
            row[name.replace("__", "/")] = value
        made.add(step + 1, row)
    return made


def rollout(
    tokens: Sequence[int],
    reward: float | None = 0.0,
    stop: StopReason = "stop",
    logprobs: Sequence[float] | None = None,
    parts: dict[str, float] | None = None,
) -> Rollout:
    """Return a graded answer; its tokens are each of probability 1/2 unless log-probabilities are given."""
    chances = tuple(logprobs if logprobs is not None else [-0.6931471805599453] * len(tokens))
    return Rollout(
        task_id="t",
        prompt=(1,),
        response=tuple(tokens),
        mask=(True,) * len(tokens),
        logprobs=chances,
        full_logprobs=chances,
        text=" ".join(map(str, tokens)),
        grade=Grade(reward, parts or {}, "broken" if reward is None else None),
        oldest_version=0,
        newest_version=0,
        stop=stop,
    )


def group(*rollouts: Rollout, name: str = "t") -> Group:
    """Return the answers to one task."""
    return Group(Task(name, (1,), f"question {name}"), rollouts)
