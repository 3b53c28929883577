"""Groups to a batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Batch, Group, Rollout, Task, role_of


@dataclass(frozen=True)
class HintedPrompts:
    """What the reference policy is asked of each rollout of a group, where that is not what the policy was asked.

    Attributes:
        encode: Text to token ids of which none is a control token.
        success: Least reward of another rollout that is shown.
        context_length: Most tokens of hint and response; None where the model does not say.
    """

    encode: Callable[[str], Sequence[int]]
    success: float
    context_length: int | None = None

    def __call__(self, group: Group) -> list[tuple[int, ...]]:
        """Return token ids for each rollout; () where the hint shows a sibling and none succeeded, or none fits."""
        # The hint's pieces around each {sibling}: text before the first one, and after each.
        before, *others = group.task.hint
        rewards = [-math.inf if r.grade.reward is None else r.grade.reward for r in group.rollouts]
        found = []
        for own, rollout in enumerate(group.rollouts):
            best = max((n for n in range(len(rewards)) if n != own), key=rewards.__getitem__, default=own)
            has_sibling = best != own and rewards[best] >= self.success
            shown = tuple(self.encode(group.rollouts[best].text)) if others and has_sibling else ()
            hint = sum((piece for other in others for piece in (shown, other)), before)
            fits = self.context_length is None or len(hint) + len(rollout.response) <= self.context_length
            found.append(hint if fits and (has_sibling or not others) else ())
        return found


Collate = Callable[[Sequence[Group], float, Callable[[Task], float] | None], Batch]
"""Makes a batch of groups, the sampler's temperature and the tracked values."""


def collate(
    groups: Sequence[Group],
    temperature: float,
    baseline: Callable[[Task], float] | None = None,
    weights: Sequence[tuple[str, float]] = (),
    hinted: HintedPrompts | None = None,
) -> Batch:
    """Return the groups' rollouts as one `Batch`, group after group, a row for each segment.

    A rollout with an error keeps its row, with an empty mask: it is counted, enters no statistic and no loss.

    Args:
        baseline: Task to tracked value, read before these groups are observed; None without a tracker.
        weights: The parts of a reward, name and weight each; () leaves only the sum.
        hinted: What the reference policy is asked; None asks it what the policy was asked.

    Raises:
        ConfigError: If there is no rollout at all.
        EngineError: If some answers have their likeliest tokens and others not.
    """
    whole = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    # One row a segment; ``owners`` says which rollout each row belongs to.
    pairs = [(number, row) for number, rollout in whole for row in rollout.rows]
    owners = [place for place, (_, rollout) in enumerate(whole) for _ in rollout.rows]
    if not pairs:
        raise ConfigError("there is nothing to collate: no group has a rollout")
    rollouts = [rollout for _, rollout in pairs]
    # Token fields are (rows, width): position 0 is the first response token.
    width = max(len(r.response) for r in rollouts)
    graded = [r.grade.reward is not None for r in rollouts]
    top_tokens, top_logprobs = _top(rollouts, width)
    roles = tuple(role_of(groups[number].task) for number, _ in pairs)
    hints = None if hinted is None else [hint for group in groups for hint in _by_row(group, hinted(group))]
    return Batch(
        tokens=_pad([r.prompt + r.response for r in rollouts], torch.long),
        prompt_lengths=torch.tensor([len(r.prompt) for r in rollouts]),
        lengths=torch.tensor([len(r.prompt) + len(r.response) for r in rollouts]),
        mask=_pad([_trained(r) for r in rollouts], torch.bool, width),
        # In float64, for groups differ by little where rewards are large; errors are 0 here and never read.
        rewards=torch.tensor([r.grade.reward or 0.0 for r in rollouts], dtype=torch.float64),
        is_graded=torch.tensor(graded),
        is_truncated=torch.tensor([r.is_truncated for r in rollouts]),
        group=torch.tensor([number for number, _ in pairs]),
        # The oldest of several: staleness is bounded for every token.
        version=torch.tensor([r.oldest_version for r in rollouts]),
        behavior=_pad([r.logprobs for r in rollouts], torch.float32, width),
        full_behavior=_pad([r.full_logprobs for r in rollouts], torch.float32, width),
        temperature=temperature,
        task_ids=tuple(r.task_id for r in rollouts),
        baseline=None
        if baseline is None
        else torch.tensor([baseline(groups[number].task) for number, _ in pairs], dtype=torch.float64),
        routing=_routing(rollouts),
        # A row without a hint has the token 0 and the length 0: it is not taught.
        hints=None if hints is None else _pad([hint or (0,) for hint in hints], torch.long),
        hint_lengths=None if hints is None else torch.tensor([len(hint) for hint in hints]),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        role=roles if any(roles) else (),
        rollout_id=torch.tensor(owners) if len(pairs) > len(whole) else None,
        **_turns(rollouts, owners, width),
        component_rewards=_component_rewards(rollouts, [name for name, _ in weights]) if weights else None,
        components=tuple(name for name, _ in weights),
        component_weights=tuple(weight for _, weight in weights),
    )


def _turns(rollouts: Sequence[Rollout], owners: Sequence[int], width: int) -> dict[str, Any]:
    """Return ``turn``, ``state`` and ``step_rewards``; nothing where no rollout is a conversation.

    A state is what the policy saw since its last answer: a reply's tokens, or the prompt. Answers are counted over all
    segments of a rollout, which ``owners`` says of each row.
    """
    if not any(r.turn_ends for r in rollouts):
        return {}
    found = {name: torch.zeros(len(rollouts), width, dtype=torch.int32) for name in ("turn", "state")}
    steps = torch.zeros(len(rollouts), width, dtype=torch.float64)
    # Equal states get equal numbers, over all rollouts of the batch.
    states: dict[tuple[int, ...], int] = {}
    answered: dict[int, int] = {}
    for row, r in enumerate(rollouts):
        before = answered.get(owners[row], 0)
        # A rollout of one answer among conversations is a conversation of one turn.
        ends, rewards = r.turn_ends or (len(r.response),), r.turn_rewards or (r.grade.reward or 0.0,)
        seen, begin = r.prompt, 0
        for number, (end, reward) in enumerate(zip(ends, rewards, strict=True)):
            # The reply comes first in the turn's tokens, and the policy's answer after it.
            first = next((t for t in range(begin, end) if r.mask[t]), end)
            seen = r.response[begin:first] if number else seen
            found["turn"][row, begin:end] = before + number
            found["state"][row, begin:end] = states.setdefault(seen, len(states))
            if r.grade.error is None:
                steps[row, end - 1] += reward
            begin = end
        answered[owners[row]] = before + len(ends)
    return {**found, "step_rewards": steps}


def _component_rewards(rollouts: Sequence[Rollout], names: Sequence[str]) -> Tensor:
    """Return Float64[B C]: each part of the rewards, NaN where it did not apply."""
    rows = [[r.grade.parts.get(name, math.nan) for name in names] for r in rollouts]
    return torch.tensor(rows, dtype=torch.float64)


def _by_row(group: Group, hints: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the hint of each row; a further segment begins with another prompt, which no hint stands for."""
    for rollout, hint in zip(group.rollouts, hints, strict=True):
        yield from (hint, *[()] * len(rollout.segments))


def _top(rollouts: Sequence[Rollout], width: int) -> tuple[Tensor | None, Tensor | None]:
    """Return Int32[B T N] and Float32[B T N], 0 for padding; None when no rollout has any."""
    known = [(row, r.top) for row, r in enumerate(rollouts) if r.top is not None]
    if not known:
        return None, None
    lacking = sum(r.top is None and any(_trained(r)) for r in rollouts)
    if lacking:
        raise EngineError(
            f"{lacking} of {len(rollouts)} answers came without the likeliest tokens that were asked for "
            "(Sampling.top_logprobs, Completion.top)"
        )
    # (rows, tokens, N).
    padded = [part.new_zeros((len(rollouts), width, part.shape[1])) for part in known[0][1]]
    for row, top in known:
        for merged, part in zip(padded, top, strict=True):
            merged[row, : len(part)] = part
    return padded[0], padded[1]


def _routing(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Return Int16[B S L K], -1 for padding and for rollouts without routing; None when none has any."""
    known = [(row, r.routing) for row, r in enumerate(rollouts) if r.routing is not None]
    if not known:
        return None
    width = max(len(r.prompt) + len(r.response) for r in rollouts)
    padded = torch.full((len(rollouts), width, *known[0][1].shape[1:]), -1, dtype=torch.int16)
    for row, routing in known:
        padded[row, : len(routing)] = routing
    return padded


def _trained(rollout: Rollout) -> tuple[bool, ...]:
    return rollout.mask if rollout.grade.error is None else (False,) * len(rollout.mask)


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, width: int | None = None) -> Tensor:
    wide = max(len(row) for row in rows) if width is None else width
    padded = torch.zeros(len(rows), wide, dtype=dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
