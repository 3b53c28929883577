"""Ratio and advantage to a loss for each token."""

from dataclasses import dataclass, field, replace
from typing import Literal

from gnomon.algorithms.protocols import LossInputs, PieceResult
from gnomon.algorithms.ratio_bounds import Clip, RatioBound
from gnomon.algorithms.ratios import Statistics, average, fraction, masked
from gnomon.algorithms.regularizers import exact_kl
from gnomon.core.errors import ConfigError, bounded, check_bounds
from gnomon.core.metrics import Last, Max, Mean, Measure, Metrics
from gnomon.core.optional import Tensor, torch

__all__ = [
    "BalancedSurrogate", "ClippedSurrogate", "Distillation", "GeometricClip", "GivenShaping", "PolicyGradient",
    "PreferenceLoss", "ProspectLoss", "QuadraticPenalty", "Regression", "SigmoidGate",
]  # fmt: skip

# Rounding of float32 log-probabilities, as a relative change of the ratio.
ROUNDING = 1e-6


@dataclass(frozen=True)
@bounded(dual="> 1")
class ClippedSurrogate:
    """The worse of the ratio and the clipped ratio: no gradient once a token moved far enough the right way.

    max(-A r, -A clip(r)); with ``dual`` and A < 0 at most -A dual.

    The gradient is exactly 0 for A > 0 above the band and A < 0 below it. ``dual`` also stops tokens with A < 0 whose
    ratio grew beyond it, where the loss would have no bound.

    Attributes:
        dual: > 1, or none.

    Source: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729 (TRL calls it ``delta``, verl ``clip_ratio_c``).
    """

    trust: Clip = field(default=Clip())
    dual: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trust, Clip):
            raise ConfigError(
                f"ClippedSurrogate compares with a Clip, got a {type(self.trust).__name__}; "
                "caps belong to PolicyGradient"
            )

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, and how often the clipped branch strictly won."""
        advantages, mask = view.advantages, view.batch.mask
        ratio = view.log_ratio.exp()
        free = -advantages * ratio
        # Detached: where the clipped branch wins there is no gradient.
        clipped = -advantages * self.trust(ratio.detach(), view.statistics)
        wins = clipped > free
        loss = torch.where(wins, clipped, free)
        above, below = ratio > 1 + self.trust.high, ratio < 1 - self.trust.low
        measured = {
            "loss/clipped_fraction": fraction(wins, mask),
            "loss/clipped_low_fraction": fraction(wins & below, mask),
            "loss/clipped_high_fraction": fraction(wins & above, mask),
            "loss/out_of_band_fraction": fraction(above | below, mask),
        }
        if self.dual is not None:
            bound = -advantages * self.dual
            # A constant has no gradient either.
            stopped = (advantages < 0) & (loss > bound)
            loss = torch.where(stopped, bound, loss)
            measured["loss/dual_clipped_fraction"] = fraction(stopped, mask)
        return loss, Metrics.of(measured) + ratio_metrics(view)


@dataclass(frozen=True)
class PolicyGradient:
    """The policy gradient weighted by a bounded ratio that has no gradient itself: no token is ever dropped.

    -sg[trust(r)] A log current. The value contains log-probabilities, so it cannot be compared between steps.
    ``loss/clipped_fraction`` is the fraction of tokens whose ratio the bound changed by more than a millionth (less is
    float32's rounding of log-probabilities), as is ``loss/capped_fraction``.

    Attributes:
        trust: The bound.
        negative: The bound of tokens with a negative advantage; none for the same.

    Source: CISPO, arXiv 2506.13585 with `Cap`; P3O, arXiv 2605.12380 with `EssCap`; REINFORCE with
        `Unbounded`; VESPO, arXiv 2602.10693 with `GammaKernel`.
    """

    trust: RatioBound
    negative: RatioBound | None = None

    @property
    def bounds(self) -> tuple[RatioBound, ...]:
        """Its bound, or both."""
        return (self.trust,) if self.negative is None else (self.trust, self.negative)

    @property
    def is_two_sided(self) -> bool:
        """Whether tokens with a negative advantage have a bound of their own; ``formulas.toml`` reads it."""
        return self.negative is not None

    @property
    def reads_both(self) -> bool:
        """Whether a bound looks at the proximal policy beside behavior."""
        return any(getattr(bound, "reads_both", False) for bound in self.bounds)

    def weight(self, view: LossInputs) -> Tensor:
        """Return the bounded ratio of each token Float[B T], without a gradient."""
        ratio = view.log_ratio.detach().exp()
        first, *other = (bound(ratio, view.statistics) for bound in self.bounds)
        return torch.where(view.advantages < 0, other[0], first) if other else first

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, and how often the ratio was bounded."""
        mask = view.batch.mask
        ratio = view.log_ratio.detach().exp()
        weight = self.weight(view)
        # The gradient is that of log current alone: the ratio weighs, and is not differentiated.
        loss = -weight * view.advantages * masked(view.current, mask)
        capped = fraction((weight - ratio).abs() > ROUNDING * torch.minimum(weight, ratio), mask)
        measured = {
            "loss/clipped_fraction": capped,
            "loss/capped_fraction": capped,
            "loss/weight_mean": average(weight, mask),
        }
        return loss, Metrics.of(measured) + ratio_metrics(view)


@dataclass(frozen=True)
@bounded(share="in (0, 1)", low="above 0", low_end="below 1", high="above 1", low_step="> 0", high_step="> 0")
class BalancedSurrogate:
    """PPO's clip with a band that widens until tokens of positive advantage make their share of the loss.

    share = P / (P + N), P the sum of A min(r, high) over the step's tokens with A > 0, N that of -A max(r, low) over
    those with A < 0. While it is below ``share``, low rises, which stops more tokens of negative advantage, and then
    high, which lets more of positive advantage on.

    Attributes:
        share: In (0, 1).
        low, low_end: First and last lower bound of the ratio, 0 < low <= low_end <= 1.
        high, high_end: First and last upper bound, 1 <= high <= high_end.
        low_step, high_step: > 0, how far a bound moves at once.

    Source: BAPO, arXiv 2510.18927; bounds and share are the paper's, order and steps its code's.
    """

    share: float = 0.5
    low: float = 0.6
    low_end: float = 0.9
    high: float = 1.2
    high_end: float = 3.0
    low_step: float = 0.05
    high_step: float = 0.05

    def __post_init__(self) -> None:
        check_bounds(
            "BalancedSurrogate",
            self,
            low=(0 < self.low <= self.low_end, "above 0 and at most low_end"),
            high=(1 < self.high <= self.high_end, "above 1 and at most high_end"),
        )

    def terms(self, view: LossInputs) -> dict[str, Tensor]:
        """Return ratio and advantage of each token."""
        return {"balance_ratio": view.log_ratio.detach().exp(), "balance_advantage": view.advantages}

    def band(self, statistics: Statistics) -> tuple[float, float]:
        """Return the bounds of the ratio in this step."""
        ratio, advantage = (statistics.values(name) for name in ("balance_ratio", "balance_advantage"))
        # Over the tokens of the whole step, so every micro-batch finds the same band.
        up, down = advantage > 0, advantage < 0
        # Low first, then high, as in the paper's code: each only moves while the share is short.
        low, high = self.low, self.high

        def is_short() -> bool:
            gain = float((advantage[up] * ratio[up].clamp(max=high)).sum())
            loss = float((-advantage[down] * ratio[down].clamp(min=low)).sum())
            return gain < self.share * (gain + loss)

        while low < self.low_end and is_short():
            low = min(low + self.low_step, self.low_end)
        while high < self.high_end and is_short():
            high = min(high + self.high_step, self.high_end)
        return low, high

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, the band, and how often the clipped branch strictly won."""
        low, high = self.band(view.statistics)
        loss, metrics = ClippedSurrogate(Clip(1 - low, high - 1))(view)
        return loss, metrics + Metrics.of({"loss/band_low": Last(low), "loss/band_high": Last(high)})


@dataclass(frozen=True)
@bounded(positive="> 0", negative="> 0")
class SigmoidGate:
    """A sigmoid of the ratio in place of a clip: the push fades smoothly on both sides of 1.

    -(4 / tau) sigmoid(tau (r - 1)) A. Its slope at r = 1 is that of the plain ratio, so on policy it is REINFORCE; its
    value is 2 A / tau there, so values cannot be compared with PPO's.

    Attributes:
        positive, negative: Tau for A > 0 and A <= 0, > 0, dimensionless; larger fades faster. Negative advantages fade
            a little faster because they push up all other tokens.

    Source: SAPO, arXiv 2511.20347.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token; nothing is clipped."""
        mask = view.batch.mask
        gentle = torch.full_like(view.advantages, self.positive)
        tau = torch.where(view.advantages > 0, gentle, self.negative)
        # 4 / tau makes the slope at ratio 1 that of the plain ratio: sigmoid'(0) = 1/4, times tau.
        gate = (4 / tau) * torch.sigmoid(tau * (view.log_ratio.exp() - 1))
        nothing = fraction(torch.zeros_like(mask), mask)
        return -gate * view.advantages, Metrics.of({"loss/clipped_fraction": nothing}) + ratio_metrics(view)


@dataclass(frozen=True)
@bounded(epsilon="> 0")
class QuadraticPenalty:
    """The plain ratio, held back by a parabola around 1 in place of a clip: there is a slope everywhere.

    -A r + |A| (r - 1)^2 / (2 epsilon). The best ratio is 1 + epsilon for A > 0 and 1 - epsilon for A < 0; beyond it the
    loss pulls back, where a clip stops pushing.

    Attributes:
        epsilon: > 0, dimensionless, where a clip of that width would act.

    Source: CFPO, arXiv 2601.22801; the objective is that of simple policy optimization, arXiv 2401.16025.
    """

    epsilon: float = 0.2

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token; nothing is clipped."""
        mask, ratio = view.batch.mask, view.log_ratio.exp()
        penalty = view.advantages.abs() * (ratio - 1).square() / (2 * self.epsilon)
        measured = {
            "loss/clipped_fraction": fraction(torch.zeros_like(mask), mask),
            "loss/out_of_band_fraction": fraction((ratio - 1).abs() > self.epsilon, mask),
        }
        return penalty - view.advantages * ratio, Metrics.of(measured) + ratio_metrics(view)


@dataclass(frozen=True)
@bounded(epsilon="> 0")
class GeometricClip:
    """The geometric mean of token ratios, each clipped on one side *before* the mean.

    -A exp(mean_t d_t), d = log-ratio, at most ``epsilon`` for A > 0 and at least -``epsilon`` for A < 0. Every trained
    token of a response carries the response's loss; with `SequenceMean` they add up to its mean. Without a clipped
    token this is GSPO without its clip. A is the mean over the response's tokens.

    Attributes:
        epsilon: > 0, nats; 0.4 is the band [e^-0.4, e^0.4]. Needs Ratio(level="token").

    Source: GMPO, arXiv 2507.20673.
    """

    epsilon: float = 0.4

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, and how many were clipped."""
        mask, shift = view.batch.mask, view.log_ratio
        length = mask.sum(1, keepdim=True).clamp(min=1)
        # (rows, 1): an advantage of each token is averaged, since the ratio is of the whole response.
        advantage = masked(view.advantages, mask).sum(1, keepdim=True) / length
        above, below = (advantage > 0) & (shift > self.epsilon), (advantage < 0) & (shift < -self.epsilon)
        # A clipped token counts in the mean and has no gradient.
        bounded = torch.where(above | below, shift.detach().clamp(-self.epsilon, self.epsilon), shift)
        ratio = (masked(bounded, mask).sum(1, keepdim=True) / length).exp()
        measured = {
            "loss/clipped_fraction": fraction(above | below, mask),
            "loss/clipped_low_fraction": fraction(below, mask),
            "loss/clipped_high_fraction": fraction(above, mask),
            "loss/out_of_band_fraction": fraction(shift.abs() > self.epsilon, mask),
        }
        return (-advantage * ratio).expand_as(shift), Metrics.of(measured) + ratio_metrics(view)


@dataclass(frozen=True)
@bounded(beta="> 0")
class Regression:
    """A regression in place of a policy gradient: the log-ratio to the reference shall become the advantage.

    (beta log(current(y) / reference(y)) - A)^2, with the sum over the response's tokens as the log-ratio. Its minimum
    is the policy that is best under a leash of strength beta to the reference. There is nothing to clip: it is a loss
    with a minimum. At A = 0 it still pulls towards the reference. Every trained token carries its response's loss; with
    `SequenceMean` they add up to its mean.

    Attributes:
        beta: > 0, rewards per nat. Needs Ratio(anchor="reference", level="sequence_product", clamp=inf).

    Source: A*-PO, arXiv 2505.20686, stage 2.
    """

    beta: float = 1e-3

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token; nothing is clipped."""
        mask = view.batch.mask
        nothing = fraction(torch.zeros_like(mask), mask)
        error = self.beta * view.log_ratio - view.advantages
        measured = {"loss/clipped_fraction": nothing, "loss/regression_error_rewards": average(error.abs(), mask)}
        return error.square(), Metrics.of(measured)


@dataclass(frozen=True)
@bounded(gamma="> 0")
class GivenShaping:
    """Another surrogate for what the policy sampled, and -A f(p) for a response that was given to it.

    p is the current probability of a token, f(p) = p / (p + gamma): its slope in log p is largest at p = gamma, so that
    unlikely tokens of a good answer are learned, where the plain ratio p to a policy that was sure of them would leave
    them.

    Attributes:
        of: The surrogate of sampled responses.
        gamma: > 0.

    Source: LUFFY, arXiv 2504.14945, policy shaping; gamma 0.1.
    """

    of: ClippedSurrogate | PolicyGradient = field(default=ClippedSurrogate())
    gamma: float = 0.1

    @property
    def bounds(self) -> tuple[RatioBound, ...]:
        """Those of the surrogate inside, which may read statistics of the step."""
        return getattr(self.of, "bounds", ())

    @property
    def reads_both(self) -> bool:
        """That of the surrogate inside."""
        return bool(getattr(self.of, "reads_both", False))

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, and how many are of given responses."""
        given = view.batch.is_given[:, None] & view.batch.mask
        # Given tokens have no ratio, so no bound acts on them.
        loss, measured = self.of(replace(view, log_ratio=masked(view.log_ratio, ~given)))
        p = masked(view.current, given).exp()
        shaped = torch.where(given, -view.advantages * p / (p + self.gamma), loss)
        return shaped, measured + Metrics.of({"loss/given_fraction": fraction(given, view.batch.mask)})


@dataclass(frozen=True)
@bounded(top_k=">= 0 (0 is the whole distribution)")
class Distillation:
    """The distance to a teacher's distributions in place of a policy gradient.

    A KL(current || reference) of each token, over the vocabulary at the places that were sampled: dense, and without
    the variance of the sampled token. With `ConstantAdvantage` it is distillation alone; another one weighs answers.

    Attributes:
        top_k: The likeliest tokens of the reference that are told apart; all others count as one event, so that the sum
            is at most the whole KL, which 0 takes. 8 bytes for each of them and each token of the answers.

    Source: SDFT, arXiv 2601.19897, and SDPO, arXiv 2601.20802, whose code keeps 100 tokens of the student.
    """

    top_k: int = 100

    @property
    def reference_top(self) -> int:
        """Likeliest tokens of the reference that it reads, 0 for all."""
        return self.top_k

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token; nothing is clipped."""
        mask = view.batch.mask
        kl = exact_kl(view, "Distillation", "train on it (sdft, sdpo), or dissect another algorithm")
        nothing = fraction(torch.zeros_like(mask), mask)
        measured = {"loss/clipped_fraction": nothing, "loss/kl_teacher_nats": average(kl, mask)}
        return view.advantages * kl, Metrics.of(measured)


@dataclass(frozen=True)
@bounded(beta="> 0", smoothing="in [0, 0.5)")
class PreferenceLoss:
    """Of two answers to a question, the one with the positive advantage shall gain more on the reference.

    m is the log-ratio to the reference of the chosen answer less that of the other. "logistic" is -(1 - s) log
    sigmoid(beta m) - s log sigmoid(-beta m), s the ``smoothing``; "squared" is (m - 1 / (2 beta))^2, which stops at a
    margin; "hinge" is max(0, 1 - beta m). Both answers carry their pair's loss, so `SequenceMean` is the mean over
    pairs, and m is summed over the step before the first cut: a pair may be cut. Two equal rewards have no gradient.

    Attributes:
        beta: > 0, per nat. Needs Ratio(anchor="reference") over sequences; level "sequence" is the mean of tokens.
        loss: Which of the three.
        smoothing: Share of pairs that are labelled wrongly, in [0, 0.5); for "logistic".

    Source: DPO, arXiv 2305.18290, eq. 7; IPO, arXiv 2310.12036, eq. 17; SLiC-HF, arXiv 2305.10425; cDPO for smoothing.
    """

    beta: float = 0.1
    loss: Literal["logistic", "squared", "hinge"] = "logistic"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        is_share = self.smoothing == 0 or (self.loss == "logistic" and 0 <= self.smoothing < 0.5)
        check_bounds("PreferenceLoss", self, smoothing=(is_share, 'in [0, 0.5), and 0 unless loss is "logistic"'))

    def terms(self, view: LossInputs) -> dict[str, Tensor]:
        """Return each token's share of its pair's margin, its share of a response, and the pair."""
        length = view.batch.mask.sum(1, keepdim=True).clamp(min=1)
        group = view.batch.group[:, None].expand_as(view.batch.mask)
        # The log-ratio of a response stands on each of its tokens, so each has 1 / length of it.
        share = view.advantages.sign() * view.log_ratio.double() / length
        return {"pair_margin": share, "pair_answers": 1 / length.double().expand_as(group), "pair_group": group}

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, how many pairs are in order, and their margin."""
        # +1 for the chosen answer's tokens, -1 for the other's, 0 where both earned the same.
        mask, side = view.batch.mask, view.advantages.sign()
        share, group = view.statistics.values("pair_margin"), view.statistics.values("pair_group")
        most = 1 + max(view.batch.group.tolist(), default=-1)
        # (groups,), then (rows,): the margin of each row's pair, summed over the whole step.
        margins = torch.bincount(group.long(), share, minlength=most)[view.batch.group]
        answers = torch.bincount(group.long(), view.statistics.values("pair_answers"), minlength=most)
        answers = answers.round()[view.batch.group, None].to(view.log_ratio.dtype)
        margin = margins.to(view.log_ratio.dtype)[:, None].expand_as(mask)
        # The margin's value, with the gradient of this row's own log-ratio.
        moving = margin + side * (view.log_ratio - view.log_ratio.detach())
        loss = self._of(moving)
        # Each answer has its own part of the gradient, and the mean is over all; one without a trained token is none.
        loss = answers * loss - (answers - 1) * loss.detach()
        weight = mask.double() / mask.sum(1, keepdim=True).clamp(min=1)
        rows = float(weight.sum())
        measured = {
            "loss/clipped_fraction": fraction(torch.zeros_like(mask), mask),
            "loss/preference_accuracy": Mean(float((weight * (margin > 0)).sum()), rows),
            "loss/preference_margin_nats": Mean(float((weight * margin).sum()), rows),
        }
        return loss, Metrics.of(measured)

    def _of(self, margin: Tensor) -> Tensor:
        if self.loss == "squared":
            return (margin - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return (1 - self.beta * margin).clamp(min=0)
        wrong, right = (torch.nn.functional.logsigmoid(side * self.beta * margin) for side in (-1, 1))
        return -(1 - self.smoothing) * right - self.smoothing * wrong


@dataclass(frozen=True)
@bounded(beta="> 0", desired=">= 0", undesired=">= 0")
class ProspectLoss:
    """An answer with a label alone: a desired one shall gain on the reference, an undesired one lose.

    lambda (1 - sigmoid(+-beta (d - z))), d the log-ratio to the reference, z = max(0, mean of d over answers to other
    questions), which estimates KL(current || reference) and has no gradient. The sign is that of the advantage. Rows
    without a reward are those other answers (`Composition.samples` "labels"): they have no loss, and the mean is over
    labelled rows.

    Attributes:
        beta: > 0, per nat. Needs Ratio("reference", "sequence_product", clamp=inf).
        desired, undesired: Lambda of each kind, >= 0; their ratio may balance the numbers of both.

    Source: KTO, arXiv 2402.01306, eq. 8.
    """

    beta: float = 0.1
    desired: float = 1.0
    undesired: float = 1.0

    def terms(self, view: LossInputs) -> dict[str, Tensor]:
        """Return each token's share of a row, of those with a label, and of the others' log-ratios."""
        row = 1 / view.batch.mask.sum(1, keepdim=True).clamp(min=1).double().expand_as(view.batch.mask)
        labelled = view.batch.is_graded[:, None]
        return {
            "prospect_rows": row,
            "prospect_labelled": row * labelled,
            "prospect_gain": torch.where(labelled, 0.0, view.log_ratio.double() * row),
        }

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, the KL, and how much each kind gained."""
        mask, labelled = view.batch.mask, view.batch.is_graded[:, None]
        rows, count, gain = (view.statistics.total(f"prospect_{name}") for name in ("rows", "labelled", "gain"))
        # Mean log-ratio of the unlabelled rows: answers to other questions.
        kl = max(0.0, gain / max(rows - count, 1.0))
        side = view.advantages.sign()
        weight = torch.full_like(side, self.undesired).masked_fill(side > 0, self.desired)
        # The aggregation divides by all rows; the mean is over labelled ones.
        weight = weight * labelled * rows / max(count, 1.0)
        loss = weight * (1 - torch.sigmoid(side * self.beta * (view.log_ratio - kl)))
        # Each labelled row weighs 1 in the means below.
        share = (mask * labelled).double() / mask.sum(1, keepdim=True).clamp(min=1)

        def mean(chosen: Tensor) -> Mean:
            return Mean(float((share * chosen * view.log_ratio.detach()).sum()), float((share * chosen).sum()))

        measured: dict[str, Measure] = {
            "loss/clipped_fraction": fraction(torch.zeros_like(mask), mask),
            "loss/preference_kl_nats": Last(kl),
            "loss/preference_desired_nats": mean(side > 0),
            "loss/preference_undesired_nats": mean(side < 0),
        }
        return loss, Metrics.of(measured)


def ratio_metrics(view: LossInputs) -> Metrics:
    """Return the largest ratio of a cut; nothing when no token is trained."""
    if not bool(view.batch.mask.any()):
        return Metrics()
    return Metrics.of({"loss/ratio_max": Max(float(view.log_ratio.detach()[view.batch.mask].max().exp()))})
