"""Decompose the mismatch between the policy that sampled and the policy that is trained."""

import asyncio
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.core.metrics import Mean, Measure, Metrics
from gnomon.core.types import Batch
from gnomon.engines.base import Engine
from gnomon.learner.base import Learner
from gnomon.training.weight_sync import Sending

ROWS, ONE_IN = 4, 16


@dataclass(frozen=True)
class NoMismatchProbe:
    """No measurement: for engines without weights, such as scripted ones."""

    async def measure(self, batch: Batch, step: int) -> Metrics:
        """Measure nothing."""
        return Metrics()


@dataclass(frozen=True)
class DecomposedMismatch:
    """Scores the same tokens in every way between the one that sampled them and the model itself.

    Log-probabilities of a token, each differing from the next in one thing, and what the difference is called:

        behavior         of the engine that sampled, as it sampled
                           truncation: top-p, top-k, min-p, a grammar
        full_behavior    without truncation
                           staleness: weights moved since
        engine           with the weights that it holds now
                           engine: another program, other kernels, another order of sums, another precision
        learner, sent    the learner with the weights as they were sent
                           precision: rounding, and adapters merged into weights
        learner          the learner with its own: the proximal policy
                           temperature: logits divided by it
        model            the learner at temperature 1

    Each part is the upper line less the lower one, so that they add up to ``total`` on the same tokens. A line that
    cannot differ from the one below is not computed: no staleness where a rollout's oldest token is of the current
    version, no precision without rounding, no temperature at 1. Then every token is measured, for nothing. Otherwise
    rows are chosen in turn: a sixteenth of the batch, one at least and four at most. What the engine's two ways of
    computing differ by (token by token, or all at once) counts as staleness in a rollout that is stale, and as the
    engine's in one that is not.

    Source: the gaps are those of algorithms for training and inference that differ; taking them apart is ours.

    Attributes:
        sending: As in `Proved`; None when engines get the learner's own numbers.
        is_averaged: The proximal policy is an average of weights, and not the learner as it is.
        sampled_at: Temperature of the sampler where the learner scores at another one (`LearnerConfig.temperature`);
            all lines above are then at it, and ``learner_temperature`` is what the learner's own log-probabilities
            differ by between the two, beside the parts of ``total``.
        is_asleep: The engine sleeps while this is measured. Of a batch with a stale rollout, staleness and engine are
            one part then, which is called staleness.
    """

    engine: Engine
    learner: Learner
    sending: Sending | None = None
    is_averaged: bool = False
    sampled_at: float | None = None
    is_asleep: bool = False

    async def measure(self, batch: Batch, step: int) -> Metrics:
        """Return ``mismatch/PART_nats``, the mean, and ``mismatch/PART_abs_nats``, the mean absolute value; of total
        too. Nothing without a trained token.
        """
        began = time.perf_counter()
        rows = self._rows(batch, step)
        if len(rows) == 0:
            return Metrics()
        probe = batch.rows(rows)
        parts = await self._parts(probe) if self._is_shared(batch) else await self._parts_at_two(probe)
        measures: dict[str, Measure] = {"time/probe_seconds": Mean(time.perf_counter() - began, 1)}
        for name, part in parts.items():
            tokens = part[probe.mask].double()
            measures[f"mismatch/{name}_nats"] = Mean(float(tokens.sum()), len(tokens))
            measures[f"mismatch/{name}_abs_nats"] = Mean(float(tokens.abs().sum()), len(tokens))
        return Metrics.of(measures)

    def _rows(self, batch: Batch, step: int) -> Tensor:
        rows = batch.mask.any(1).nonzero()[:, 0]
        is_fresh = bool((batch.version[rows] == self.learner.version).all())
        if is_fresh and self.sending is None and self._is_cheap(batch):
            return rows
        count = max(1, min(ROWS, len(rows) // ONE_IN))
        return rows.roll(-step * count)[:count]

    def _is_cheap(self, batch: Batch) -> bool:
        return self._is_known(batch) and batch.temperature == 1 and self._is_shared(batch)

    def _is_shared(self, batch: Batch) -> bool:
        """Whether sampler and learner have one temperature."""
        return self.sampled_at is None or self.sampled_at == batch.temperature

    async def _parts_at_two(self, probe: Batch) -> dict[str, Tensor]:
        """Return the parts at the sampler's temperature, and what the learner's own differs by from them."""
        drawn = probe.with_fields(temperature=self.sampled_at, proximal=None)
        own = probe.proximal if self._is_known(probe) else await self.learner.logprobs(probe)
        assert own is not None, "a known proximal policy was scored"
        at_sampler = await self.learner.logprobs(drawn)
        return {**await self._parts(drawn), "learner_temperature": at_sampler - own}

    def _is_known(self, batch: Batch) -> bool:
        return batch.proximal is not None and not self.is_averaged

    async def _parts(self, probe: Batch) -> dict[str, Tensor]:
        own = probe.proximal if self._is_known(probe) else await self.learner.logprobs(probe)
        assert own is not None, "a known proximal policy was scored"
        sent, plain, engine = own, own, probe.full_behavior
        if self.sending is not None:
            sent = await self.learner.logprobs(probe, self.sending(self.learner.snapshot()))
        if probe.temperature != 1:
            plain = await self.learner.logprobs(probe.with_fields(temperature=1.0))
        stale = (probe.version != self.learner.version).nonzero()[:, 0].tolist()
        is_one_part = bool(stale) and self.is_asleep
        if is_one_part:
            engine = sent
        elif stale:
            scores = await asyncio.gather(*(self._ask(probe, row) for row in stale))
            engine = engine.clone()
            for row, score in zip(stale, scores, strict=True):
                engine[row, : len(score)] = torch.tensor(score)
        return {
            "truncation": probe.behavior - probe.full_behavior,
            "staleness": probe.full_behavior - engine,
            **({} if is_one_part else {"engine": engine - sent}),
            "precision": sent - own,
            "temperature": own - plain,
            "total": probe.behavior - plain,
        }

    async def _ask(self, probe: Batch, row: int) -> list[float]:
        start, end = int(probe.prompt_lengths[row]), int(probe.lengths[row])
        tokens = probe.tokens[row].tolist()
        return await self.engine.score(tokens[:start], tokens[start:end], probe.temperature)


MismatchProbe = DecomposedMismatch | NoMismatchProbe
"""What the training loop calls to measure the mismatch between engine and learner."""
