"""The critic of an algorithm: its trunk, its loss, and when it is updated."""

from dataclasses import dataclass, field
from typing import Literal

from gnomon.algorithms.ratios import average, fraction, masked
from gnomon.algorithms.sections import Updates
from gnomon.core.errors import ConfigError, bounded
from gnomon.core.metrics import Mean, Metrics
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch


@dataclass(frozen=True)
@bounded(steps="at least 1", patience="at least 1", explained_variance="in (0, 1]")
class Pretraining:
    """A phase before the first step in which the critic alone learns, from answers of the unchanged policy.

    Its targets are Monte-Carlo returns (lambda 1), so that it does not learn from its own first guesses. It ends after
    ``steps`` rollout batches, or as soon as the explained variance of a batch that the critic had not seen reached
    ``explained_variance`` on ``patience`` batches in a row.

    Attributes:
        steps: Most rollout batches of the phase, >= 1.
        explained_variance: In (0, 1], or none to make all steps.
        patience: Batches in a row that must reach it, at least 1.
        frozen_trunk: Whether only the head learns in this phase; a shared trunk must be frozen, as the policy is.

    Source: VC-PPO, arXiv 2503.01491; 50 steps, VAPO, arXiv 2504.05118; the frozen trunk is the review's.
    """

    steps: int = 50
    explained_variance: float | None = None
    patience: int = 2
    frozen_trunk: bool = False


@dataclass(frozen=True)
@bounded(learning_rate_ratio="> 0 and finite", clip="> 0")
class CriticConfig:
    """A value model with one number a token: what the response's reward will be, seen from before that token.

    With ``target`` "pairs" it is a reward model instead: see `pair_loss`. Else

    loss = sum weights (V - V_target)^2 / 2; with ``clip`` c the larger of that and the same with V bounded to V_before
    +- c, so that one step cannot move it far.

    Attributes:
        trunk: "separate", a network of its own; or "shared", a head on the policy's hidden states, whose loss then
            moves the policy's weights too. The head is linear, without bias, and starts at zero.
        initial: For a separate trunk, "policy" (the run's model) or the folder of a critic that a run has saved, or of
            a reward model (sequence classification with one label).
        learning_rate_ratio: Learning rate as a multiple of the policy's, > 0; 2 is VAPO's (2e-6 to 1e-6).
        updates: The critic's own, on each rollout batch.
        clip: > 0, in rewards, or none.
        target: "returns" of the responses; or "pairs" of the dataset's answers, of which the value after the last
            token of the chosen one shall be above that of the other. No policy learns then.
        order: "after", advantages are of the critic that had not seen the batch; "before", the critic is taught the
            batch first, and what is left of its error, already partly explained away, becomes the advantage.
        pretraining: A phase before the first step in which the critic learns alone.
        trust_remote_code: Whether the own code of the model in ``initial`` may run; set it only for code that you have
            read.

    Source: PPO, arXiv 1707.06347; VAPO, arXiv 2504.05118; shared trunk and "before" are those of a review of it.
    """

    trunk: Literal["separate", "shared"] = "separate"
    initial: str = "policy"
    learning_rate_ratio: float = 2.0
    updates: Updates = field(default=Updates())
    clip: float | None = None
    target: Literal["returns", "pairs"] = "returns"
    order: Literal["after", "before"] = "after"
    pretraining: Pretraining | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.trunk == "shared" and self.initial != "policy":
            raise ConfigError(
                f"a shared trunk is the policy's, so it cannot begin as '{self.initial}'; set trunk = 'separate', or "
                "initial = 'policy'"
            )
        if self.trust_remote_code and self.initial == "policy":
            raise ConfigError(
                "this critic begins as the policy, whose own code the experiment's trust_remote_code is about; remove "
                "algorithm.critic.trust_remote_code, or name a folder as initial"
            )
        # Settings that mean something for a value model, and nothing for a reward model.
        usual = {"trunk": "shared", "updates": Updates(), "clip": None, "order": "after", "pretraining": None}
        others = [name for name, value in usual.items() if getattr(self, name) != value]
        if self.ranks_pairs and others:
            raise ConfigError(
                'critic.target = "pairs" makes a reward model of the run\'s own model, in one update a step, and '
                f'{", ".join(others)} say otherwise; leave them as algorithm = "reward-model" has them'
            )
        if self.trunk == "shared" and self.pretraining is not None and not self.pretraining.frozen_trunk:
            raise ConfigError(
                "pretraining a critic on a shared trunk would change the policy, which that phase leaves alone; set "
                "pretraining.frozen_trunk = true, or trunk = 'separate'"
            )

    @property
    def ranks_pairs(self) -> bool:
        """Whether it is a reward model."""
        return self.target == "pairs"

    @property
    def moves_policy_first(self) -> bool:
        """Whether its loss moves the policy's weights between the step's beginning and the policy's first update."""
        return self.trunk == "shared" and self.order == "before"

    def loss(self, values: Tensor, cut: Batch, one_sided: bool = False) -> tuple[Tensor, Metrics]:
        """Return the loss of one cut of a weighed value minibatch, and what was measured.

        Args:
            values: Values of the critic, Float[B T], in rewards, with a gradient.
            cut: Rows with returns, weights, and the values of the time when the rows were scored.
            one_sided: Whether only values below their return are wrong, as in self-imitation: a return that was reached
                once can be reached again.
        """
        assert cut.returns is not None, "prepare comes first"
        assert cut.weights is not None, "weigh comes first"
        mask, target = cut.mask, cut.returns.detach()
        error = masked(values - target, mask)
        if one_sided:
            error = error.clamp(max=0.0)
        loss = error.square()
        is_bounded = torch.zeros_like(mask)
        if self.clip is not None and cut.values is not None and not one_sided:
            before = cut.values.detach()
            bounded = masked(before + (values - before).clamp(-self.clip, self.clip) - target, mask).square()
            # Inside the band ``before + (values - before)`` may miss ``values`` by a rounding, which is no bound.
            is_bounded = ((values - before).abs() > self.clip) & (bounded > loss)
            # The larger of both: beyond the band the bounded loss has no gradient.
            loss = torch.where(is_bounded, bounded, loss)
        measured = {"critic/clipped_fraction": fraction(is_bounded, mask), "critic/loss": average(loss / 2, mask)}
        return (cut.weights * loss).sum() / 2, Metrics.of(measured)

    def pair_loss(self, scores: Tensor, cut: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss of one cut of pairs, -log sigmoid(score_chosen - score_other), and what was measured.

        Both answers of a pair carry its loss and have their own half of its gradient.

        Args:
            scores: Values after the last token of each row, Float[B], with a gradient.
            cut: Rows with weights, rewards 1 (chosen) and 0, and in ``returns`` the other answer's score before the
                step.

        Source: InstructGPT, arXiv 2203.02155, eq. 1.
        """
        assert cut.returns is not None, "value_minibatches comes first"
        assert cut.weights is not None, "value_minibatches comes first"
        # (rows,): an answer without a trained token weighs 0.
        share = cut.weights.sum(1)
        margin = (2 * cut.rewards - 1).to(scores.dtype) * (scores - cut.returns[:, 0].to(scores.dtype))
        loss = -torch.nn.functional.logsigmoid(margin)
        known, rows = margin.detach().double(), len(scores)
        measured = {
            "critic/loss": Mean(float(loss.detach().double().sum()), rows),
            "critic/preference_accuracy": Mean(float((known > 0).sum() + (known == 0).sum() / 2), rows),
            "critic/preference_margin": Mean(float(known.sum()), rows),
        }
        # The other answer's score is a constant here, so each row has half of the pair's gradient; doubled gradient,
        # plain value.
        return (share * (2 * loss - loss.detach())).sum(), Metrics.of(measured)
