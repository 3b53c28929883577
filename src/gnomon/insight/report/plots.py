"""Which metrics stand in one picture, and what they are called there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gnomon.core.svg import COLORS


@dataclass(frozen=True)
class Plot:
    """One picture: metrics by name, and what each curve is called.

    Attributes:
        note: A sentence below it.
        colors: The number of a metric's color where it has one of its own, such as that of its stage.
    """

    title: str
    y_label: str
    names: Mapping[str, str]
    note: str = ""
    colors: Mapping[str, int] = field(default_factory=dict)


STAGES = ("generate", "grade", "score", "update", "publish", "track", "other", "between steps")
"""Where time goes, in the order of their colors."""
CAUSES = (
    "trained", "degenerate", "zero_advantage", "clipped", "truncated", "off_policy", "errored", "surplus", "refused"
)  # fmt: skip
"""What became of tokens, in the order of their colors."""


def color_of(name: str, among: Sequence[str]) -> int:
    """Return the number of the color that a stage or a cause has in every picture of a page."""
    return (among.index(name) if name in among else len(among)) % len(COLORS)


GROUPS = Plot(
    "Groups with zero reward std",
    "fraction of groups",
    {
        "rollout/degenerate_group_fraction": "all alike",
        "rollout/all_equal_best_fraction": "all 1",
        "rollout/all_equal_zero_fraction": "all 0",
    },
    "A group in which every answer earned the same teaches a group baseline nothing.",
)
LEARNING = (
    Plot("Response length", "tokens", {"rollout/length_tokens_mean": "mean", "rollout/length_tokens_max": "longest"}),
    Plot(
        "Truncated responses",
        "fraction of answers",
        {"rollout/truncated_fraction": "cut at the budget", "rollout/error_fraction": "errors of the verifier"},
    ),
)
POLICY = (
    Plot("Entropy", "nats a token", {"loss/entropy_nats": "entropy"}),
    Plot("Gradient norm", "before clipping", {"learner/gradient_norm": "norm"}),
    Plot(
        "Clip fraction",
        "fraction of tokens",
        {
            "loss/clipped_fraction": "bounded",
            "loss/clipped_low_fraction": "below",
            "loss/clipped_high_fraction": "above",
        },
        "Tokens whose push the algorithm's bound on the ratio took away or made smaller.",
    ),
    Plot(
        "Effective sample size",
        "fraction of tokens",
        {"loss/ess_fraction": "of the updates", "mismatch/ess_fraction": "when the step began"},
        "1 when all importance ratios are equal; towards 0 when few tokens carry the update.",
    ),
    Plot(
        "KL divergence",
        "nats a token",
        {"loss/kl_behavior_nats": "from the sampler", "loss/kl_proximal_nats": "within the step"},
    ),
    Plot("Learning rate", "", {"learner/learning_rate": "rate"}),
    Plot("Explained variance of the critic", "", {"critic/explained_variance": "explained"}),
    Plot("Values and returns", "reward", {"critic/value_mean": "value", "critic/return_mean": "return"}),
    Plot("Tracked success rate", "", {"tracker/value_mean": "value of the asked prompts"}),
)
STALENESS = (
    Plot(
        "Staleness",
        "steps",
        {
            "stream/staleness_steps_mean": "mean",
            "stream/staleness_steps_max": "oldest",
            "stream/steps_ahead": "asked ahead",
        },
        "Counted from the oldest token of an answer.",
    ),
    Plot(
        "Train-inference mismatch",
        "|nats| a token",
        {
            "mismatch/total_abs_nats": "total",
            "mismatch/engine_abs_nats": "engine",
            "mismatch/precision_abs_nats": "rounding",
            "mismatch/truncation_abs_nats": "top-p, top-k",
            "mismatch/temperature_abs_nats": "temperature",
            "mismatch/staleness_abs_nats": "staleness",
        },
        "How far the sampler's log-probabilities are from the learner's, in parts.",
    ),
)
TIME = (
    Plot(
        "Seconds of a step",
        "seconds",
        {
            "time/step_seconds": "step",
            "time/generate_seconds": "generate",
            "time/update_seconds": "update",
            "time/score_seconds": "score",
        },
        colors={"time/step_seconds": -1}
        | {f"time/{name}_seconds": color_of(name, STAGES) for name in ("generate", "update", "score")},
    ),
    Plot("Memory", "GiB at most", {"memory/peak_gib": "resident"}),
)
WASTE = (
    Plot("Wasted tokens", "fraction of tokens", {"tokens/wasted_fraction": "without a gradient"}),
)  # fmt: skip
