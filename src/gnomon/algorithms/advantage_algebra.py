"""Advantages made of advantages: sums, multiples, choices, normal forms, and one for each of several rewards.

What such an advantage needs, and how many rollouts of a prompt, follows from its parts. Everything is computed in
float64 on the whole rollout batch, as its parts are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from gnomon.algorithms.advantages import Found, GroupRelative, Groups, Modified, TrackedBaseline, exactly, rounded
from gnomon.algorithms.protocols import Advantage, Composed, Need, parts_of
from gnomon.algorithms.ratios import masked
from gnomon.core.errors import ConfigError, GradingError, bounded, unknown
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch

__all__ = [
    "AdvantageSum", "Condition", "InRole", "Normalized", "PerReward", "Requires", "RewardAtLeast", "Scaled", "Where",
]  # fmt: skip


@dataclass(frozen=True)
class AdvantageSum(Composed):
    """The sum of several advantages.

    A = sum_k A_k. One of them at most reads a critic, whose targets are those of the sum.

    Attributes:
        terms: At least one.

    Raises:
        ConfigError: There is no term, or two read a critic.
    """

    terms: tuple[Advantage, ...]

    def __post_init__(self) -> None:
        given: object = self.terms
        # TOML gives lists; a frozen dataclass must be hashable.
        if isinstance(given, list):
            object.__setattr__(self, "terms", tuple(given))
        if not given or not isinstance(given, list | tuple):
            raise ConfigError("AdvantageSum has no term; give it one, such as terms = [{piece = 'GroupRelative'}]")
        _check_one_critic("AdvantageSum", self.terms)

    @property
    def parts(self) -> Mapping[str, Advantage]:
        """The terms."""
        return {f"terms.{number}": term for number, term in enumerate(self.terms)}

    def center(self, batch: Batch) -> Tensor:
        """Return the sum of the terms before their scales, Float64[B T]."""
        return torch.stack([term.center(batch).double() for term in self.terms]).sum(0)

    def __call__(self, batch: Batch) -> Found:
        """Return advantages Float[B T], and the targets of the term that has any."""
        found = [exactly(term, batch) for term in self.terms]
        targets = next((returns for _, returns in found if returns is not None), None)
        return rounded(torch.stack([advantages for advantages, _ in found]).sum(0), targets, batch)


@dataclass(frozen=True)
class Scaled(Modified):
    """A multiple of another advantage.

    A = factor A_of. The targets of a critic are left as they are.

    Attributes:
        of: The advantage.
        factor: Dimensionless.
    """

    of: Advantage
    factor: float

    def center(self, batch: Batch) -> Tensor:
        """Return the multiple before its scale, Float64[B T]."""
        return self.factor * self.of.center(batch)

    def __call__(self, batch: Batch) -> Found:
        """Return advantages Float[B T]."""
        advantages, returns = exactly(self.of, batch)
        return rounded(self.factor * advantages, returns, batch)


class Condition(Protocol):
    """What is true of some tokens of a batch."""

    @property
    def needs(self) -> frozenset[Need]:
        """Fields of the batch that it reads beside rewards; by default none."""
        return frozenset()

    @property
    def components(self) -> frozenset[str]:
        """Names of the rewards that it reads; by default none."""
        return frozenset()

    def __call__(self, batch: Batch) -> Tensor:
        """Return Bool[B T]."""


@dataclass(frozen=True)
class RewardAtLeast(Condition):
    """True of the responses whose reward, or one of its components, is at least ``value``.

    Attributes:
        value: In rewards; of a component before its weight.
        component: Name of the component; "" is the whole reward.
    """

    value: float = 1.0
    component: str = ""

    @property
    def needs(self) -> frozenset[Need]:
        """The rewards one by one, for a component."""
        return frozenset({"component_rewards"}) if self.component else frozenset()

    @property
    def components(self) -> frozenset[str]:
        """The component."""
        return frozenset({self.component} - {""})

    def __call__(self, batch: Batch) -> Tensor:
        """Return Bool[B T]."""
        # (rows,), then the same for every token of a row.
        rewards = component(batch, self.component) if self.component else batch.rewards
        return (rewards >= self.value)[:, None].expand_as(batch.mask)


@dataclass(frozen=True)
class InRole(Condition):
    """True of the responses in which the policy had this role.

    Attributes:
        role: As in ``Batch.role``.
    """

    role: str

    needs: ClassVar[frozenset[Need]] = frozenset({"role"})

    def __call__(self, batch: Batch) -> Tensor:
        """Return Bool[B T]."""
        if not batch.role:
            raise ConfigError(f"InRole('{self.role}') reads roles, and the batch has none (Batch.role)")
        has = torch.tensor([role == self.role for role in batch.role], dtype=torch.bool)
        return has[:, None].expand_as(batch.mask)


@dataclass(frozen=True)
class Where(Composed):
    """One advantage where a condition holds, another one elsewhere.

    A_t = A_then,t where the condition holds of token t, else A_otherwise,t. Statistics of both are of the whole batch:
    a group's mean is over all of its responses, whichever of them the condition holds of.

    Attributes:
        condition: What is asked.
        then: The advantage where it holds.
        otherwise: The advantage elsewhere.

    Raises:
        ConfigError: Both read a critic.
    """

    condition: Condition
    then: Advantage
    otherwise: Advantage

    def __post_init__(self) -> None:
        _check_one_critic("Where", (self.then, self.otherwise))

    @property
    def parts(self) -> Mapping[str, Advantage]:
        """Both advantages."""
        return {"then": self.then, "otherwise": self.otherwise}

    @property
    def components(self) -> frozenset[str]:
        """Those of the condition."""
        return self.condition.components

    @property
    def needs(self) -> frozenset[Need]:
        """Those of the condition and of both advantages."""
        return self.condition.needs | self.then.needs | self.otherwise.needs

    def center(self, batch: Batch) -> Tensor:
        """Return the chosen advantages before their scales, Float64[B T]."""
        return torch.where(self.condition(batch), self.then.center(batch).double(), self.otherwise.center(batch))

    def __call__(self, batch: Batch) -> Found:
        """Return advantages Float[B T], and the targets of the one that has any."""
        (here, targets), (there, others) = exactly(self.then, batch), exactly(self.otherwise, batch)
        chosen = torch.where(self.condition(batch), here, there)
        return rounded(chosen, others if targets is None else targets, batch)


@dataclass(frozen=True)
@bounded(epsilon=">= 0")
class Normalized(Modified):
    """Another advantage, less its mean and divided by its deviation over responses; or divided by the length.

    (A - mean) / (deviation + epsilon), where each response counts once, with the mean of A over its trained tokens.
    Equal numbers give exactly 0; a response without a trained token has none. `Whitened` counts tokens instead.

    Attributes:
        of: The advantage.
        over: "group", the responses to one prompt; "batch", all responses; "length" divides each token's advantage by
            the number of trained tokens of its response and shifts nothing.
        epsilon: >= 0, in units of the advantage.
        ddof: 1 for the sample deviation, 0 for the population's.

    Source: GDPO, arXiv 2601.05242, for "batch".
    """

    of: Advantage
    over: Literal["group", "batch", "length"] = "batch"
    epsilon: float = 1e-6
    ddof: Literal[0, 1] = 1

    @property
    def minimum_generations(self) -> int:
        """That of the advantage inside; 2 or more over a group."""
        return max(self.of.minimum_generations, 2 if self.over == "group" else 1)

    def center(self, batch: Batch) -> Tensor:
        """Return the advantage inside before its scale, Float64[B T]."""
        return self.of.center(batch)

    def __call__(self, batch: Batch) -> Found:
        """Return advantages Float[B T]."""
        inner, returns = exactly(self.of, batch)
        tokens, lengths = batch.mask & batch.is_graded[:, None], batch.mask.sum(1).clamp(min=1)
        if self.over == "length" or batch.width == 0:
            return rounded(inner / lengths[:, None], returns, batch)
        # Equal numbers have that mean exactly, whatever their count; a computed one differs in the last digit.
        high, low = (torch.where(tokens, sign * inner, -math.inf).amax(1) for sign in (1.0, -1.0))
        means = torch.where(high == -low, high, masked(inner, tokens).sum(1) / lengths)
        index = Groups.of(batch).index if self.over == "group" else torch.zeros(len(batch), dtype=torch.long)
        groups = Groups(index, tokens.any(1))
        scale = groups.deviation(means, self.ddof) + self.epsilon
        scaled = (inner - groups.mean(means)[:, None]) / scale[:, None]
        return rounded(torch.where(tokens & groups.differ(means)[:, None], scaled, 0.0), returns, batch)


@dataclass(frozen=True)
class Requires:
    """A reward that counts only where another one was earned; elsewhere it is 0.

    Attributes:
        reward: Name of the component that is conditioned.
        on: Name of the component that must hold.
        at_least: Its smallest value, before its weight.

    Raises:
        ConfigError: A reward is its own condition.

    Source: GDPO, arXiv 2601.05242, section 3.2.
    """

    reward: str
    on: str
    at_least: float = 1.0

    def __post_init__(self) -> None:
        if self.reward == self.on:
            raise ConfigError(
                f"Requires: '{self.reward}' would count where it was earned itself; name another reward as `on`"
            )


@dataclass(frozen=True)
class PerReward(Modified):
    """The weighted sum of an advantage of each reward by itself.

    A = sum_c weight_c A_of(r_c). With a scale inside each reward is normalized before it is weighed, so that a reward
    of small spread is not lost in one of large spread; without one, A is the advantage of the weighted sum.

    Attributes:
        of: The advantage of one reward; it reads neither a critic nor a tracker nor the reference.
        requires: Rewards that count only where others hold; one that is named twice, where both do.

    Raises:
        ConfigError: The advantage inside reads what is not one reward's own.

    Source: GDPO, arXiv 2601.05242, eq. 4 and 5.
    """

    of: Advantage = field(default=GroupRelative())
    requires: tuple[Requires, ...] = ()

    def __post_init__(self) -> None:
        for _, part in parts_of(self.of):
            foreign = set[str](getattr(part, "needs", ())) & {"values", "reference", "component_rewards"}
            foreign |= {"the tracked value"} if isinstance(part, TrackedBaseline) else set()
            foreign |= set() if getattr(part, "reads_rewards", True) else {"no reward"}
            if foreign:
                raise ConfigError(
                    f"PerReward takes an advantage of one reward, and {type(part).__name__} reads "
                    f"{', '.join(sorted(foreign))}; set of = {{piece = 'GroupRelative'}}, and add what concerns the "
                    "whole reward with AdvantageSum"
                )

    @property
    def needs(self) -> frozenset[Need]:
        """The rewards one by one, and what the advantage inside needs."""
        return self.of.needs | frozenset[Need]({"component_rewards"})

    @property
    def components(self) -> frozenset[str]:
        """Those that a requirement names."""
        return frozenset(name for each in self.requires for name in (each.reward, each.on))

    def center(self, batch: Batch) -> Tensor:
        """Return the weighted sum before scales, Float64[B T]."""
        return torch.stack([weight * self.of.center(each) for weight, each in self._batches(batch)]).sum(0)

    def __call__(self, batch: Batch) -> Found:
        """Return advantages Float[B T]."""
        found = [weight * exactly(self.of, each)[0] for weight, each in self._batches(batch)]
        return rounded(torch.stack(found).sum(0), None, batch)

    def _batches(self, batch: Batch) -> list[tuple[float, Batch]]:
        """Return each component's weight, and the batch as if that were the reward; when it was earned is not known."""
        rewards = {name: component(batch, name) for name in batch.components}
        if not rewards:
            component(batch, "")
        for each in self.requires:
            # A reward that is named twice is multiplied by both conditions, one after the other.
            holds = component(batch, each.on) >= each.at_least
            found = rewards.get(each.reward)
            rewards[each.reward] = torch.where(holds, component(batch, each.reward) if found is None else found, 0.0)
        weights = batch.component_weights or (1.0,) * len(rewards)
        # Step rewards say when the sum was earned, not when this component was.
        alone = [batch.with_fields(rewards=values, step_rewards=None) for values in rewards.values()]
        return list(zip(weights, alone, strict=True))


def component(batch: Batch, name: str) -> Tensor:
    """Return one component of the reward, Float64[B], 0 for responses without a verdict.

    Raises:
        ConfigError: The batch does not have the rewards one by one, or none of this name.
        GradingError: A graded response has no such component; that is no 0.
    """
    if batch.component_rewards is None:
        raise ConfigError(
            "each reward by itself is read, and the batch has only their sum; collate it with the rewards' weights, or "
            "give 'component_rewards' for every sequence of a recorded batch"
        )
    if name not in batch.components:
        raise ConfigError(unknown("component of the reward", name, batch.components))
    # NaN marks a component that did not apply to a response.
    values = batch.component_rewards[:, batch.components.index(name)].double()
    lacking = int((values.isnan() & batch.is_graded).sum())
    if lacking:
        raise GradingError(
            f"the reward '{name}' did not apply to {lacking} of {int(batch.is_graded.sum())} responses, and each is "
            "read by itself, where a missing one is no 0; let it return a number for every response, or choose an "
            "algorithm that reads their sum"
        )
    return torch.where(batch.is_graded, values, 0.0)


def _check_one_critic(name: str, parts: tuple[Advantage, ...]) -> None:
    readers = [type(part).__name__ for part in parts if "values" in getattr(part, "needs", ())]
    if len(readers) > 1:
        raise ConfigError(
            f"{name}: {' and '.join(readers)} each have targets for the critic, which can learn one; use a critic in "
            "one of them"
        )
