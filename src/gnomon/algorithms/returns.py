"""Returns: what is earned from each token, answer or response on, with a critic (GAE) and without.

Everything is computed in float64 on the whole rollout batch, as in `advantages`.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from gnomon.algorithms.advantages import Groups, kl_needs, kl_penalty
from gnomon.algorithms.protocols import Advantage, Need
from gnomon.algorithms.ratios import masked
from gnomon.core.errors import ConfigError, bounded
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch

__all__ = [
    "Fixed", "Gae", "LengthAdaptive", "LengthSigmoid", "OptimalTokenBaseline", "Returns", "ReverseKl", "StateRelative",
]  # fmt: skip


@dataclass(frozen=True)
class Decisions:
    """The decisions of responses: each trained token, each answer of a conversation, or a response, as a whole.

    Attributes:
        ends (Bool[B T]): The last trained token of each decision.
        end (Int[B T]): Where the decision that a token belongs to ends; T for no decision.
    """

    ends: Tensor
    end: Tensor

    @classmethod
    def of(cls, batch: Batch, over: Literal["token", "turn", "response"]) -> "Decisions":
        """Return the decisions of a batch; a batch without turns has responses of one answer."""
        mask, width = batch.mask & batch.is_graded[:, None], batch.width
        column = torch.arange(width).expand(mask.shape)
        if over == "token":
            return cls(mask, torch.where(mask, column, width))
        turn = torch.zeros(mask.shape, dtype=torch.long)
        if over == "turn" and batch.turn is not None:
            turn = batch.turn.long()
        # ``following``: the turn of the next trained token, found by a running minimum from the right. Turns never
        # decrease.
        beyond = torch.iinfo(torch.long).max
        following = torch.where(mask, turn, beyond).flip(1).cummin(1).values.flip(1).roll(-1, 1)
        following[:, -1:] = beyond
        ends = mask & (following != turn)
        # The nearest end at or after each token, by the same running minimum.
        end = torch.where(ends, column, width).flip(1).cummin(1).values.flip(1)
        return cls(ends, torch.where(mask, end, width))

    def total(self, values: Tensor) -> Tensor:
        """Return Float64[B T]: the sum of ``values`` over each decision's tokens, where the decision ends."""
        rows, width = values.shape
        whole = torch.zeros(rows, width + 1, dtype=torch.float64)
        # One column more than there are tokens: tokens of no decision add to column T, which is cut off.
        return whole.scatter_add(1, self.end, values.double())[:, :width]

    def first(self, values: Tensor) -> Tensor:
        """Return Float64[B T]: ``values`` at each decision's first trained token, where the decision ends."""
        # ``earlier``: the end of the decision that the trained token before belongs to; a token whose end differs is a
        # first one.
        earlier = torch.where(self.end < values.shape[1], self.end, -1).cummax(1).values.roll(1, 1)
        earlier[:, :1] = -1
        return self.total(torch.where((self.end < values.shape[1]) & (self.end != earlier), values.double(), 0.0))

    def spread(self, values: Tensor) -> Tensor:
        """Return Float64[B T]: what ``values`` has at a decision's end on each of its tokens, 0 elsewhere."""
        # Column T is 0, which tokens of no decision read.
        padded = torch.cat([values, torch.zeros_like(values[:, :1])], 1) if values.shape[1] else values
        return padded.gather(1, self.end)


Unit = Literal["token", "turn"]


@dataclass(frozen=True)
@bounded(kl=">= 0", gamma="in [0, 1]")
class Returns(Advantage):
    """The return from each token on, without a baseline, or less the mean reward of the batch.

    G_t = sum_{s >= t} gamma^(s - t) x_s, where x is the reward where it was earned (``Batch.step_rewards``; else on the
    last trained token) minus kl (log proximal - log reference) on every token. Only trained tokens are steps: tool
    output is skipped.

    Attributes:
        gamma: Discount of a step, in [0, 1]; at 0 a step gets what it earns itself.
        kl: Coefficient of the KL penalty, >= 0, rewards per nat.
        baseline: "none", or "batch", the mean of all graded rewards.
        over: What a step is: a "token"; a "turn", an answer of a conversation, whose tokens have its return; or a whole
            "response", all of whose tokens have all of its reward.

    Source: REINFORCE, Williams 1992; with kl, REINFORCE++, arXiv 2501.03262.
    """

    gamma: float = 1.0
    kl: float = 0.0
    baseline: Literal["none", "batch"] = "none"
    over: Literal["token", "turn", "response"] = "token"

    @property
    def needs(self) -> frozenset[Need]:
        """The reference, when the distance to it is part of the reward."""
        return kl_needs(self.kl)

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        rewards = batch.rewards.double()
        if self.baseline == "batch" and bool(batch.is_graded.any()):
            rewards = rewards - rewards[batch.is_graded].mean()
        steps = Decisions.of(batch, self.over)
        earned = steps.total(token_rewards(batch, rewards, self.kl))
        return _discounted(steps, earned, self.gamma)


@dataclass(frozen=True)
@bounded(gamma="in (0, 1]", epsilon=">= 0")
class StateRelative(Advantage):
    """Return from an answer of a conversation on, less the mean over the group's answers in the same state.

    A_k = (R_k - mean_state) / (std_state + epsilon), R_k = sum_{j >= k} gamma^(j - k) x_j over the answers j of a
    rollout. Answers of one group that were given in equal states are compared, whenever and in whichever of its
    rollouts that was. A state that is alone, or whose returns are all equal, gives exactly 0. A batch without turns has
    one answer a response, and its state is the prompt.

    Attributes:
        gamma: Discount of an answer, in (0, 1].
        scale: "state" divides by the deviation of the state's returns, "none" does not.
        ddof: 1 for the sample deviation, 0 for the population's.
        epsilon: >= 0, in rewards.

    Source: GiGPO, arXiv 2505.10978, section 4.2, eq. 6 and 7.
    """

    gamma: float = 0.95
    scale: Literal["state", "none"] = "state"
    ddof: Literal[0, 1] = 1
    epsilon: float = 1e-6
    minimum_generations: ClassVar[int] = 2

    def center(self, batch: Batch) -> Tensor:
        """Return R - mean Float64[B T]."""
        return self._compared(batch, "none")

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages Float[B T]."""
        return self._compared(batch, self.scale).to(batch.behavior.dtype), None

    def _compared(self, batch: Batch, scale: str) -> Tensor:
        steps = Decisions.of(batch, "turn")
        state = torch.zeros_like(batch.mask, dtype=torch.long) if batch.state is None else batch.state.long()
        if batch.state is None and batch.turn is not None and bool(batch.turn[steps.ends].any()):
            raise ConfigError(
                "StateRelative compares answers in equal states, and the batch has turns without states (Batch.state); "
                "give 'state' for every token of a recorded batch"
            )
        # (answers, 2): equal states of different groups are different states.
        pairs = torch.stack([batch.group[:, None].expand_as(state), state], 2)[steps.ends]
        # From here on (answers,): one entry for each answer of a conversation.
        index = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else pairs.new_zeros(0)
        states = Groups(index, torch.ones_like(index, dtype=torch.bool))
        returns = Returns(gamma=self.gamma, over="turn").center(batch)[steps.ends]
        compared = returns - states.mean(returns)
        if scale == "state":
            compared = compared / (states.deviation(returns, self.ddof) + self.epsilon)
        whole = torch.zeros(batch.mask.shape, dtype=torch.float64)
        whole[steps.ends] = torch.where(states.differ(returns), compared, 0.0)
        return steps.spread(whole)


@dataclass(frozen=True)
class OptimalTokenBaseline(Advantage):
    """The return from a token on, less the baseline of least variance for its place in the group's responses.

    A_t = G_t - sum_j W_jt G_jt / sum_j W_jt over the responses of the group that have a t-th trained token. W_t =
    sum_{s <= t} (1 - 2 p_s + sum p_s^2) is the squared gradient of the response so far, as it is at the logits of each
    token: the more undecided a response was, the more its return moves the weights and counts in the baseline. sum p^2
    is p^2 / p', with p' the token's probability at half the temperature (``Batch.sharpened``). Computed as sum_j W_jt
    (G_t - G_jt) / sum_j W_jt, so that equal returns give exactly 0.

    Attributes:
        singleton: What a token gets where no other response of the group is as long: its return ("raw", no baseline) or
            0 ("zero").

    Source: OTB, arXiv 2602.07078; "raw" is its code in verl.
    """

    singleton: Literal["raw", "zero"] = "raw"
    minimum_generations: ClassVar[int] = 2

    needs: ClassVar[frozenset[Need]] = frozenset({"proximal", "sharpened"})

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale.

        Raises:
            ConfigError: The policy was not scored.
        """
        if batch.proximal is None or batch.sharpened is None:
            missing = "proximal" if batch.proximal is None else "sharpened"
            raise ConfigError(f"OptimalTokenBaseline reads '{missing}' log-probabilities; score the batch for them")
        tokens = batch.mask & batch.is_graded[:, None]
        own, colder = (masked(policy.double(), tokens) for policy in (batch.proximal, batch.sharpened))
        # 1 - 2 p + sum p^2 without a difference of numbers near 1: (1 - p)^2, and the squares of all other tokens.
        squares = masked(torch.expm1(own).square() - (2 * own - colder).exp() * torch.expm1(colder), tokens)
        # Trained tokens move to the left, so that column t is the t-th trained token of every response.
        order = torch.argsort(~tokens, dim=1, stable=True)
        gains, weights, reached = (x.gather(1, order) for x in (Returns().center(batch), squares.cumsum(1), tokens))
        found = torch.zeros_like(gains)
        for group in batch.group.unique():
            rows = batch.group == group
            gain, there = gains[rows], reached[rows]
            weight = masked(weights[rows], there)
            # Where all responses are certain every weight is 0, and the plain mean is the baseline.
            weight = torch.where(weight.sum(0) > 0, weight, there.double())
            # (i, j, t): the return of response i less that of j, weighted by j; equal returns give exactly 0.
            compared = (weight * (gain[:, None] - gain)).sum(1) / torch.where(there.any(0), weight.sum(0), 1.0)
            is_alone = (there.sum(0) == 1) & (self.singleton == "raw")
            found[rows] = torch.where(is_alone, gain, compared)
        return masked(torch.zeros_like(found).scatter(1, order, found), tokens)


@dataclass(frozen=True)
@bounded(coefficient="> 0", gamma="in [0, 1]")
class ReverseKl(Advantage):
    """Distillation on the policy's own answers: each token is worth how much likelier the reference finds it.

    A_t = sum_{s >= t} gamma^(s - t) coefficient (log reference - log proximal), without the reward. The expected
    gradient at gamma 0 is that of -KL(current || reference) of each token's distribution, which is dense where a reward
    comes once. The reference is the teacher of `ReferencePolicy`; where a batch has ``teacher``, it is that.

    Attributes:
        coefficient: > 0, rewards per nat.
        gamma: Discount in [0, 1]; 0 looks at the token alone, 1 at what follows it too.

    Source: on-policy distillation, arXiv 2306.13649; as a reward of each token, MOPD, arXiv 2601.02780.
    """

    coefficient: float = 1.0
    gamma: float = 0.0
    reads_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        """Both policies."""
        return kl_needs(self.coefficient)

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        taught = batch if batch.teacher is None else batch.with_fields(reference=batch.teacher)
        return _discounted(Decisions.of(batch, "token"), -kl_penalty(taught, self.coefficient), self.gamma)


def last_trained(mask: Tensor) -> Tensor:
    """Return Int[B]: the position of each row's last trained token; of a row without one, the last position."""
    return mask.shape[1] - 1 - mask.int().flip(1).argmax(1)


def token_rewards(batch: Batch, rewards: Tensor, kl: float) -> Tensor:
    """Return Float64[B T]: rewards where they were earned, less every token's penalty.

    What ``rewards`` Float64[B] has beside ``Batch.step_rewards``, all of it where there are none, is on each response's
    last trained token.
    """
    steps = -kl_penalty(batch, kl)
    if not bool(batch.mask.any()):
        return steps
    rows = batch.mask.any(1).nonzero().squeeze(1)
    if batch.step_rewards is not None:
        steps, rewards = steps + masked(batch.step_rewards.double(), batch.mask), rewards - batch.rewards.double()
    # After step rewards were taken out of ``rewards``, only the remainder lies on the last token.
    steps[rows, last_trained(batch.mask)[rows]] += rewards[rows]
    return steps


def _discounted(steps: Decisions, earned: Tensor, gamma: float) -> Tensor:
    """Return Float64[B T]: what each step and the steps after it earn, on each of its tokens."""
    following = torch.zeros(len(earned), dtype=torch.float64)
    returns = torch.zeros_like(earned)
    # From the last token backwards; tokens inside a decision carry the value of its end.
    for t in range(earned.shape[1] - 1, -1, -1):
        following = torch.where(steps.ends[:, t], earned[:, t] + gamma * following, following)
        returns[:, t] = following
    return steps.spread(returns)


# Advantages from a critic: generalized advantage estimation, and how far it trusts the critic.
#
#     delta_t  = x_t + gamma V_{t+1} - V_t
#     A_t      = delta_t + gamma lambda A_{t+1}
#     V_target = A^(value lambda) + V
#
# lambda 1 is the return minus the value, whatever the critic says in between; lambda 0 believes the critic's next word.
# V_t is the value of the state *before* token t; after the last token it is 0, or what `Gae.truncation` says.


class LambdaRule(Protocol):
    """Lengths of responses to lambdas."""

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return Float64[B] in [0, 1] for ``lengths`` Int[B], trained tokens of each response."""


@dataclass(frozen=True)
@bounded(value="in [0, 1]")
class Fixed:
    """One lambda for every response.

    Attributes:
        value: In [0, 1].

    Source: GAE, arXiv 1506.02438; 0.95 with a value lambda of 1 is VC-PPO's, arXiv 2503.01491.
    """

    value: float = 0.95

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the value for each response."""
        return torch.full(lengths.shape, self.value, dtype=torch.float64)


@dataclass(frozen=True)
@bounded(alpha="> 0 and finite")
class LengthAdaptive:
    """lambda = 1 - 1 / (alpha length), at least 0: a horizon that is a fixed share of the response.

    The sum of the weights that a token gives to later errors, 1 / (1 - lambda), is alpha length. Made for long
    responses: at 1 / alpha tokens or fewer (20 by default) lambda would be negative and is 0, one-step differences of
    values that say nothing of the reward except at the last token. Raise ``alpha`` for short answers: alpha = 1 gives
    10 tokens lambda 0.9. ``advantage/lambda_floored_fraction`` counts them.

    Attributes:
        alpha: > 0, a share of the response.

    Source: VAPO, arXiv 2504.05118, section 4.2; the bound at 0 is ours, as the paper's responses are long.

    >>> LengthAdaptive(0.05)(torch.tensor([10, 100, 1000])).tolist()
    [0.0, 0.8, 0.98]
    """

    alpha: float = 0.05

    @property
    def shortest(self) -> int:
        """The shortest response, in tokens, that gets a lambda above 0."""
        return math.floor(1 / self.alpha) + 1

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return a lambda for each response."""
        return (1 - 1 / (self.alpha * lengths.double().clamp(min=1))).clamp(min=0.0)


@dataclass(frozen=True)
@bounded(low="in [0, 1]", high="in [0, 1]")
class LengthSigmoid:
    """lambda from how long a response is beside the others of its batch, between ``low`` and ``high``.

    low + (high - low) sigmoid((length - mean) / deviation), with the mean and the sample deviation (at least 1 token)
    of the batch. A response's advantages then depend on the others' lengths.

    Attributes:
        low, high: 0 <= low <= high <= 1.

    Source: a review of VAPO, its eq. 6 and code; the paper's own is `LengthAdaptive`.
    """

    low: float = 0.3
    high: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ConfigError(f"LengthSigmoid needs 0 <= low <= high <= 1, got {self.low}, {self.high}")

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return a lambda for each response; those without a trained token enter no statistic."""
        tokens = lengths.double()
        counted = tokens[tokens > 0]
        if len(counted) == 0:
            return torch.full_like(tokens, self.low)
        deviation = counted.std() if len(counted) > 1 else torch.zeros(())
        # At least one token of deviation, or equal lengths would divide by 0.
        place = (tokens - counted.mean()) / deviation.clamp(min=1.0)
        return self.low + (self.high - self.low) * place.sigmoid()


@dataclass(frozen=True)
@bounded(kl=">= 0", value_lambda="in [0, 1]", gamma="in (0, 1]")
class Gae(Advantage):
    """The discounted sum of the critic's errors from each token on, and what the critic should have said.

    Only trained tokens are steps: tool output is skipped, its values unread. Rewards stand where they were earned
    (``Batch.step_rewards``), else on the last trained token. Advantages and targets may use different lambdas: long
    sums for the targets, so that the reward reaches early tokens, shorter ones for the policy, so that it is not noisy
    ("decoupled").

    Attributes:
        policy_lambda: Lambda of the advantages.
        value_lambda: Lambda of the targets, in [0, 1]; 1 gives the return itself.
        gamma: Discount of a step, in (0, 1].
        kl: >= 0, rewards per nat of log proximal - log reference, taken from every token's reward.
        truncation: The value after the last token of a response that ran out of budget: "terminal" is 0, right for
            verifiers that call it a failure; "value" is what the critic says (`Batch.bootstrap`), for rewards that
            would have gone on.
        over: What a step is: a "token", or a "turn", an answer of a conversation. A turn's value is that before its
            first token, and its tokens have its advantage and target.

    Source: GAE, arXiv 1506.02438; two lambdas, VC-PPO, arXiv 2503.01491.
    """

    policy_lambda: LambdaRule = field(default=Fixed(0.95))
    value_lambda: float = 1.0
    gamma: float = 1.0
    kl: float = 0.0
    truncation: Literal["terminal", "value"] = "terminal"
    over: Unit = "token"

    @property
    def needs(self) -> frozenset[Need]:
        """Values; and the reference, when the distance to it is part of the reward."""
        return frozenset[Need]({"values"}) | kl_needs(self.kl)

    def lambdas(self, batch: Batch) -> Tensor:
        """Return the policy's lambda of each response, Float64[B]."""
        return self.policy_lambda(Decisions.of(batch, self.over).ends.sum(1))

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        return self._advantages(batch, self.lambdas(batch))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages Float[B T], and the critic's targets."""
        advantages = self.center(batch)
        longer = torch.full((len(batch),), self.value_lambda, dtype=torch.float64)
        steps = Decisions.of(batch, self.over)
        # V_target = A with the target's lambda + V, at the end of each decision, spread over its tokens.
        returns = self._advantages(batch, longer) + steps.spread(steps.first(_values(batch)))
        return advantages.to(batch.behavior.dtype), returns.to(batch.behavior.dtype)

    def _advantages(self, batch: Batch, lambdas: Tensor) -> Tensor:
        """Return the discounted sums of errors Float64[B T], 0 where masked and for what could not be graded."""
        steps = Decisions.of(batch, self.over)
        rewards = steps.total(token_rewards(batch, batch.rewards.double(), self.kl))
        values = steps.first(_values(batch))
        following = torch.zeros(len(batch), dtype=torch.float64)
        if self.truncation == "value":
            if batch.bootstrap is None:
                raise ConfigError(
                    "truncation = 'value' needs the value after each response's last token (Batch.bootstrap, "
                    "'bootstrap' of a recorded sequence); score 'values' first, or set truncation = 'terminal'"
                )
            # V after the last token: 0 for a response that ended by itself.
            following = torch.where(batch.is_truncated & batch.is_graded, batch.bootstrap.double(), 0.0)
        advantage = torch.zeros(len(batch), dtype=torch.float64)
        result = torch.zeros_like(values)
        # Backwards through the decisions; a masked column passes both accumulators on unchanged.
        for t in range(batch.width - 1, -1, -1):
            is_step = steps.ends[:, t]
            error = rewards[:, t] + self.gamma * following - values[:, t]
            advantage = torch.where(is_step, error + self.gamma * lambdas * advantage, advantage)
            following = torch.where(is_step, values[:, t], following)
            result[:, t] = torch.where(is_step, advantage, 0.0)
        return steps.spread(result)


def _values(batch: Batch) -> Tensor:
    if batch.values is None:
        raise ConfigError("Gae needs the critic's 'values'; give the algorithm a critic, or the batch its values")
    return batch.values.double()
