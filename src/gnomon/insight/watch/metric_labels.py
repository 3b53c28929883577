"""The metrics that a live view shows, and how their numbers are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["share", "number", "count", "bytes"]


@dataclass(frozen=True)
class Term:
    """A metric under the name that a person reads.

    Attributes:
        meaning: What the metric says, in one line.
        least: The smallest range of values that is worth drawing.
    """

    name: str
    label: str
    form: Form
    meaning: str
    least: float = 0.01

    def said(self, value: float | None) -> str:
        """Return a value as it is written."""
        return "-" if value is None else written(value, self.form)


REWARD = Term("rollout/reward_mean", "reward", "number", "mean of all answers of a step, trained on or not")
LOSS = Term("loss/policy", "loss", "number", "mean negative log-likelihood of a token of the dataset's answers")
"""In the place of the reward where the dataset's answers are trained on."""
HEALTH: Sequence[Term] = (
    Term("loss/entropy_nats", "entropy", "number", "of the policy, nats a token; towards 0 it says one thing only"),
    Term("rollout/length_tokens_mean", "length", "number", "tokens of an answer"),
    Term("rollout/truncated_fraction", "truncated", "share", "answers that were cut off at their length limit"),
    Term("rollout/degenerate_group_fraction", "all alike", "share", "prompts whose answers all got one reward"),
    Term("rollout/error_fraction", "errors", "share", "answers that could not be judged"),
    Term("learner/gradient_norm", "gradient", "number", "norm before it is clipped"),
    Term("loss/clipped_fraction", "clipped", "share", "tokens whose ratio is beyond its bounds"),
    Term("loss/ess_fraction", "ESS", "share", "effective sample size of the importance ratios"),
    Term("loss/kl_behavior_nats", "KL behavior", "number", "nats a token from the weights that answered", 1e-4),
    Term("mismatch/logprob_abs_mean_nats", "mismatch", "number", "nats between engine and learner", 1e-5),
    Term("critic/explained_variance", "explained", "share", "of the returns' variance, by the critic"),
    Term("tokens/wasted_fraction", "wasted", "share", "generated tokens that had no gradient"),
)
FLOW: Sequence[Term] = (
    Term("stream/staleness_steps_mean", "staleness", "number", "steps between an answer and the weights it trains"),
    Term("time/step_seconds", "step", "number", "seconds of a step"),
    Term("tokens/generated", "tokens", "count", "generated in a step"),
    Term("learner/learning_rate", "rate", "number", "learning rate", 0.0),
    Term("memory/peak_bytes", "memory", "bytes", "largest size of the process so far"),
)
STAGES: Sequence[tuple[str, str]] = (
    ("generate", "answering"),
    ("grade", "grading"),
    ("score", "scoring"),
    ("update", "updating"),
    ("publish", "publishing"),
    ("track", "tracking"),
)
"""Stages of a step as they are measured, and as they are called."""


def written(value: float, form: Form = "number") -> str:
    """Return a number in at most eight characters.

    >>> written(0.53125), written(1234.5), written(3.2e-7), written(0.25, "share"), written(3 << 30, "bytes")
    ('0.531', '1234', '3.2e-07', '25%', '3.0 GiB')
    """
    if form == "share":
        return f"{100 * value:.0f}%"
    if form == "bytes":
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    if form == "count" or abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.1e}"
    if value != 0 and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
