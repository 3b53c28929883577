"""Terms that are added to the loss, each with its coefficient."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from gnomon.algorithms.corrections import covariance_terms, covariances
from gnomon.algorithms.protocols import LossInputs, Need, PieceResult, Regularizer
from gnomon.algorithms.ratio_bounds import smallest
from gnomon.algorithms.ratios import average, fraction, masked, threshold
from gnomon.core.errors import ConfigError, bounded, check_bounds
from gnomon.core.metrics import Mean, Metrics
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch

__all__ = ["CovarianceKl", "Entropy", "EssKl", "GivenNll", "Kl", "PositiveNll", "SelfImitation"]

Estimator = Literal["k2_grad_k3", "k1", "k2", "k3", "unbiased", "exact"]
# As in `corrections`.
CLAMP = 20.0


class _Weighted(Regularizer):
    """A regularizer with a coefficient. At coefficient 0 no row is computed for its sake."""

    coefficient: float

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        """Return the algorithm's weights Float[B T]; zeros at coefficient 0."""
        return default if self.coefficient else torch.zeros_like(default)


@dataclass(frozen=True)
@bounded(coefficient=">= 0", top_k=">= 0 (0 is the whole distribution)")
class Kl(_Weighted):
    """Coefficient times an estimate of KL(current || anchor) from the sampled tokens.

    With d = log current - log anchor and rho = current / behavior:

    | estimator  | value                 | slope in log current | expected gradient                         |
    |------------|-----------------------|----------------------|-------------------------------------------|
    | k2_grad_k3 | exp(-d) - 1 + d       | d                    | of KL(current || anchor), on policy       |
    | k1         | d                     | 1                    | none on policy: only to be looked at      |
    | k2         | d^2 / 2               | d                    | of KL(current || anchor), on policy       |
    | k3         | exp(-d) - 1 + d       | 1 - exp(-d)          | of KL(anchor || current): the *other* one |
    | unbiased   | rho (exp(-d) - 1 + d) | rho d                | of KL(current || anchor), for any samples |
    | exact      | over distributions    | its own              | KL(current || reference) of each token    |

    The default is right for few updates a step; "unbiased" for stale samples; "k3" is what GRPO printed. Exponents are
    bounded to +-20 in value and slope, so that a bounded token is still pushed the right way.

    Attributes:
        anchor: "reference" (frozen) or "behavior" (what sampled).
        coefficient: >= 0; at 0 nothing is scored.
        top_k: Of "exact", the likeliest tokens of the reference that are told apart, as in `Distillation`.

    Source: Schulman, "Approximating KL divergence", 2020; k3 in GRPO, arXiv 2402.03300; k2's gradient, arXiv
    2501.03262; rho k3, DeepSeek-V3.2.
    """

    anchor: Literal["reference", "behavior"] = "reference"
    coefficient: float = 0.0
    estimator: Estimator = "k2_grad_k3"
    top_k: int = 0

    def __post_init__(self) -> None:
        is_exact = self.estimator == "exact"
        check_bounds(
            "Kl",
            self,
            top_k=(self.top_k >= 0 and (is_exact or not self.top_k), '0, or with estimator = "exact" above it'),
            anchor=(not is_exact or self.anchor == "reference", '"reference" with estimator = "exact"'),
        )

    @property
    def name(self) -> str:
        """kl_reference or kl_behavior."""
        return f"kl_{self.anchor}"

    @property
    def needs(self) -> frozenset[Need]:
        """The reference, when it is the anchor and counts."""
        reads = self.anchor == "reference" and self.coefficient > 0
        return frozenset({"reference"}) if reads else frozenset()

    @property
    def reference_top(self) -> int | None:
        """Likeliest tokens of the reference that it reads, 0 for all; None for none."""
        return self.top_k if self.estimator == "exact" and self.coefficient > 0 else None

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token; the metric is without the coefficient."""
        if self.coefficient == 0:
            return torch.zeros_like(view.log_ratio), Metrics()
        batch = view.batch
        anchor = view.behavior if self.anchor == "behavior" else batch.reference
        if anchor is None:
            raise ConfigError("a KL to the reference needs 'reference' log-probabilities; score them first")
        estimate = kl_estimate(view, anchor, self.estimator)
        measured = {f"loss/{self.name}_estimate_nats": average(estimate, batch.mask)}
        return self.coefficient * estimate, Metrics.of(measured)


@dataclass(frozen=True)
@bounded(top_k=">= 0 (0 is the whole distribution)")
class EssKl(Regularizer):
    """(1 - e) times KL(current || anchor), or an estimate of it: less trust, shorter leash.

    e is the effective sample size of the whole optimizer step, without a gradient; on policy the term is exactly 0.

    Attributes:
        anchor: "behavior"; or "mixture", of behavior and proximal, each weighted by how little it is to be trusted: ((1
            - e_b) pi_b + (1 - e_p) pi_p) / (2 - e_b - e_p), and then e is the smaller of e_b and e_p.
        estimator: "unbiased" (rho d - rho + 1, ours: it estimates this KL from samples of behavior), "k3" (the
            reference code's, which estimates chi^2 - KL(behavior, current) and has no bound as rho goes to 0), or
            "exact" (the paper's sum over the distribution that each token was drawn from, which the engine returns with
            the token; of a local engine, without top-p, top-k and min-p). Needs Ratio(anchor="behavior").
        top_k: Of "exact", the likeliest tokens of behavior that are told apart; all others count as one event, so that
            the sum is at most the whole KL, which 0 takes. 8 bytes for each of them and each token of the answers.

    Raises:
        ConfigError: "exact" with "mixture", whose distribution is not kept; ``top_k`` with another estimator.

    Source: P3O, arXiv 2605.12380; "mixture" is its eq. 13.
    """

    estimator: Literal["unbiased", "k3", "exact"] = "unbiased"
    anchor: Literal["behavior", "mixture"] = "behavior"
    top_k: int = 0
    name: ClassVar[str] = "ess_kl"
    reads_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.estimator == "exact" and self.anchor == "mixture":
            raise ConfigError(
                'EssKl: estimator = "exact" needs the whole distribution, and that of the mixture is not kept; set '
                'anchor = "behavior", or estimator = "unbiased"'
            )
        if self.estimator != "exact" and self.top_k:
            raise ConfigError(
                f'EssKl: top_k = {self.top_k} is of estimator = "exact" alone; set it, or leave top_k out'
            )

    @property
    def top_logprobs(self) -> int | None:
        """Likeliest tokens of behavior that it reads, 0 for all; None for none."""
        return self.top_k if self.estimator == "exact" else None

    @property
    def reads_both(self) -> bool:
        """Whether it looks at the proximal policy beside behavior."""
        return self.anchor == "mixture"

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token; the metric is without the factor."""
        e, other = view.statistics.behavior.value, view.statistics.proximal.value
        anchor = view.behavior
        if self.anchor == "mixture":
            anchor = _mixture(view, 1 - e, 1 - other)
            e = smallest(e, other)
        estimate = kl_estimate(view, anchor, self.estimator)
        return (1 - e) * estimate, Metrics.of({"loss/ess_kl_estimate_nats": average(estimate, view.batch.mask)})


@dataclass(frozen=True)
class Entropy(_Weighted):
    """Minus coefficient times the entropy of the tempered policy: a reward for staying undecided.

    Attributes:
        coefficient: Rewards per nat; 0 computes nothing. A negative coefficient sharpens the distribution.
    """

    coefficient: float = 0.0
    name: ClassVar[str] = "entropy"

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token."""
        return -self.coefficient * masked(view.entropy, view.batch.mask), Metrics()


@dataclass(frozen=True)
@bounded(coefficient=">= 0", share="in (0, 1]")
class CovarianceKl(_Weighted):
    """Coefficient times |log-ratio| of the tokens whose covariance of log-probability and advantage is highest.

    c as in `CovarianceMask`. These tokens take the entropy away, so that they alone are held back, where a clip would
    stop rare tokens as well. The log-ratio is the algorithm's; in a step's first update the term is 0 without a slope.

    Attributes:
        coefficient: >= 0, rewards per nat.
        share: In (0, 1], of the step's trained tokens as many are held back, at least one.

    Source: KL-Cov, arXiv 2505.22617; 1 and 0.002 of its 7B recipe.
    """

    coefficient: float = 1.0
    share: float = 2e-3
    name: ClassVar[str] = "kl_covariance"

    def terms(self, view: LossInputs) -> dict[str, Tensor]:
        """Return what covariances are made of."""
        return covariance_terms(view, self.name)

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token; the metrics are without the coefficient."""
        listed, own = covariances(view, self.name)
        # Of the whole step, so that a cut holds back the same tokens.
        held = own > threshold(listed, len(listed) - max(int(self.share * len(listed)), 1))
        distance = torch.where(held, view.log_ratio.abs(), 0.0)
        measured = {
            "loss/kl_covariance_nats": average(distance, held & view.batch.mask),
            "loss/held_back_fraction": fraction(held, view.batch.mask),
        }
        return self.coefficient * distance, Metrics.of(measured)


@dataclass(frozen=True)
@bounded(coefficient=">= 0")
class PositiveNll(_Weighted):
    """Coefficient times the negative log-likelihood of correct responses: imitate what worked.

    -coefficient sum log current / N, over the N tokens of the *correct* responses of the minibatch, or 0.

    Attributes:
        coefficient: >= 0.
        above: A response is correct when its shaped reward exceeds this.

    Source: VAPO, arXiv 2504.05118.
    """

    coefficient: float = 0.1
    above: float = 0.0
    name: ClassVar[str] = "positive_nll"

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        """Return one over the number of tokens of correct responses, on these tokens."""
        tokens = self._tokens(batch) & (self.coefficient > 0)
        return tokens.to(default.dtype) / max(int(tokens.sum()), 1)

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token; the metrics are without the coefficient."""
        tokens = self._tokens(view.batch)
        nll = -masked(view.current, view.batch.mask)
        measured: dict[str, Mean] = {
            "loss/positive_nll_nats": average(nll, tokens),
            "loss/positive_token_fraction": fraction(tokens, view.batch.mask),
        }
        return self.coefficient * nll, Metrics.of(measured)

    def _tokens(self, batch: Batch) -> Tensor:
        return batch.mask & (batch.is_graded & (batch.rewards > self.above))[:, None]


@dataclass(frozen=True)
@bounded(coefficient=">= 0")
class GivenNll(_Weighted):
    """Coefficient times the negative log-likelihood of given responses, weighed by how sure the policy is.

    -coefficient sum w log current / N over the N tokens of responses that nobody sampled; w = exp(-entropy) without a
    gradient, so that an undecided policy is not dragged along.

    Attributes:
        coefficient: >= 0.
        by_entropy: False is plain supervised fine-tuning, w = 1.

    Source: SRFT, arXiv 2506.19767, which takes the entropy of the whole batch.
    """

    coefficient: float = 0.5
    by_entropy: bool = True
    name: ClassVar[str] = "given_nll"

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        """Return one over the number of tokens of given responses, on these tokens."""
        # Weights of their own: a mean over these tokens alone, whatever the policy loss counts.
        tokens = batch.mask & batch.is_given[:, None] & (self.coefficient > 0)
        return tokens.to(default.dtype) / max(int(tokens.sum()), 1)

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token; the metric is without coefficient and weight."""
        given = view.batch.mask & view.batch.is_given[:, None]
        nll = -masked(view.current, given)
        weight = (-masked(view.entropy.detach(), given)).exp() if self.by_entropy else 1.0
        return self.coefficient * weight * nll, Metrics.of({"loss/given_nll_nats": average(nll, given)})


@dataclass(frozen=True)
@bounded(coefficient=">= 0")
class SelfImitation(_Weighted):
    """Imitate responses of the batch that went better than the critic expected, by how much they did.

    -coefficient (V_target - V)_+ log current, the factor without a gradient. A response that was expected to succeed
    teaches nothing here; a lucky one is remembered.

    Attributes:
        coefficient: >= 0. For responses of earlier steps: `SelfImitationBuffer`, with weigh = "surplus".

    Source: Self-Imitation Learning, Oh et al. 2018, arXiv 1806.05635, eq. 2, on the current batch.
    """

    coefficient: float = 0.1
    name: ClassVar[str] = "self_imitation"

    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token; the metric is without the coefficient."""
        batch = view.batch
        if batch.values is None or batch.returns is None:
            raise ConfigError("SelfImitation needs a critic's values and returns; give the algorithm Gae and a critic")
        # In rewards, without a gradient: it weighs the likelihood and is not trained by it.
        surplus = masked(batch.returns - batch.values, batch.mask).clamp(min=0.0).detach()
        term = -surplus * masked(view.current, batch.mask)
        return self.coefficient * term, Metrics.of({"loss/surplus_mean_rewards": average(surplus, batch.mask)})


def _mixture(view: LossInputs, of_behavior: float, of_proximal: float) -> Tensor:
    """Return the logarithm of the weighted mean of behavior and proximal Float[B T]; of behavior if both weigh 0."""
    behavior, total = view.behavior, of_behavior + of_proximal
    if total == 0:
        return behavior
    # A weight of 0 becomes -inf, which logaddexp drops exactly; a tiny negative one is rounding of 1 - e.
    shares = torch.tensor([max(of_behavior, 0.0), max(of_proximal, 0.0)], dtype=torch.float64) / total
    first, second = shares.log().to(behavior)
    mask = view.batch.mask
    return torch.logaddexp(masked(behavior, mask) + first, masked(view.proximal, mask) + second)


def exact_kl(view: LossInputs, piece: str, fix: str) -> Tensor:
    """Return KL(current || anchor) over the distributions of each token Float[B T], 0 where masked or not taught.

    Raises:
        ConfigError: The batch has no distributions.
    """
    if view.anchor_kl is None:
        raise ConfigError(
            f"{piece} needs the distributions of each token, and the batch has none: the engine returned no "
            f"Completion.top, or it is a recorded batch; {fix}"
        )
    return masked(view.anchor_kl, view.batch.mask & view.batch.is_taught[:, None])


def kl_estimate(view: LossInputs, anchor: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate of each token Float[B T], 0 where masked, with the slope of the table in `Kl`."""
    if estimator == "exact":
        return exact_kl(view, "estimator = 'exact'", 'set estimator = "unbiased", or train on it')
    mask = view.batch.mask
    if anchor is view.batch.reference:
        mask = mask & view.batch.is_taught[:, None]
    current = masked(view.current, mask)
    d = masked(view.current.detach() - anchor, mask)
    # Bounded before exp. Value and slope apart: a clamp in the graph would turn the sign of k3's slope.
    inverse = (-d).clamp(-CLAMP, CLAMP).exp()
    k3 = inverse - 1 + d
    if estimator == "unbiased":
        rho = masked(view.current.detach() - view.behavior, mask).clamp(-CLAMP, CLAMP).exp()
        value, slope = rho * k3, rho * d
    elif estimator == "k1":
        value, slope = d, torch.ones_like(d)
    elif estimator == "k2":
        value, slope = d.square() / 2, d
    elif estimator == "k3":
        value, slope = k3, 1 - inverse
    else:
        value, slope = k3, d
    return value.detach() + slope.detach() * (current - current.detach())
