"""An algorithm is a composition of pieces.

    per_token = correction * surrogate(ratio, advantages)
    loss      = sum(weights * per_token) + sum over regularizers of sum(own_weights * regularizer)

``weights`` are computed once on each optimizer step's whole minibatch, before it is cut. The loss on any cut is then a
plain sum, and micro-batching, accumulation and data parallelism are exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.loss_aggregation import SequenceMean, TokenMean
from gnomon.algorithms.piece_calls import ask
from gnomon.algorithms.protocols import (
    Advantage,
    Aggregate,
    Correction,
    Loss,
    LossInputs,
    Need,
    Regularizer,
    SummedTerms,
    Surrogate,
)
from gnomon.algorithms.ratios import Ratio, Statistics, average, masked
from gnomon.algorithms.sections import (
    EmaProximal,
    Greso,
    Informative,
    NoPositiveResampling,
    OptimalValue,
    OverlongPenalty,
    Prioritized,
    ReferencePolicy,
    RoleAverage,
    SelfImitationBuffer,
    TrackerConfig,
    Uniform,
    Updates,
)
from gnomon.algorithms.segments import Segments
from gnomon.core.errors import ConfigError, NotFiniteError
from gnomon.core.metrics import EffectiveSize, Max, Mean, Metrics
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch

LARGEST_REWARD = (2 - 2**-23) * 2.0**127  # float32's largest number


@dataclass(frozen=True)
class Composition:
    """Pieces put together, not yet checked; `Algorithm` checks them. The pieces' own types describe each piece.

    Attributes:
        name: Name of the algorithm in records and reports.
        paper: Where the algorithm comes from.
        advantage: How rewards become advantages.
        ratio: Which probability ratio the surrogate reads.
        surrogate: The loss of one token, given its ratio and its advantage.
        aggregate: Weights with which the losses of tokens are added up.
        correction: Factor for the mismatch between the policy that sampled and the one that trains.
        regularizers: Terms beside the surrogate, such as a KL penalty or an entropy bonus.
        updates: Optimizer updates in a step: passes over the batch, and minibatches in each.
        num_generations: Rollouts of one prompt at one visit (G).
        sampler: Which prompt is asked next.
        tracker: A persistent success rate of each prompt, or average of each role, for `TrackedBaseline`; the former
            for `Prioritized` too.
        keep: Which finished groups are trained on; another prompt replaces a group that is not.
        overlong: Penalty on the reward of long answers, before any statistic.
        mask_truncated: Whether truncated answers are left out of the loss.
        critic: The value model, for advantages that read values.
        proximal: The policy that ratios are relative to: the learner's weights when the step began, or a moving average
            of them.
        reference: The policy that a KL or a regression is to: the first weights, their moving average, or a teacher.
        replay: Imitation of the best answers so far.
        scope: Tokens over which an effective sample size is computed: the whole optimizer "step"; each "micro_batch",
            as in P3O's reference code (the loss then depends on how a step is cut); or "lagged", the previous step's,
            which needs no pass of its own.
        routing: For mixtures of experts, whose experts the learner uses: its own ("free"), those of the policy when the
            step began ("proximal", R2), or those that the engine chose ("behavior", R3).
        demonstrated: Whether one of a prompt's ``num_generations`` responses is the dataset's own answer, judged as the
            others are. No policy sampled it: its behavior has probability 1, measures of mismatch leave it out, and a
            critic learns nothing from it.
        samples: Whose responses are trained on: those that the "policy" samples, or the dataset's own answers ("data"),
            which is supervised fine-tuning: no engine, no reward, and the loss is their negative log-likelihood;
            or the chosen and the rejected answer of each row ("pairs"), with rewards 1 and 0; or an answer with its
            label, reward 1 or -1, and another row's beside it without a reward ("labels").
    """

    name: str
    paper: str
    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    aggregate: Aggregate
    correction: Correction | None = None
    regularizers: tuple[Regularizer, ...] = ()
    updates: Updates = field(default=Updates())
    num_generations: int = 8
    sampler: Uniform | Prioritized | Greso | NoPositiveResampling = field(default=Uniform())
    tracker: TrackerConfig | OptimalValue | RoleAverage | None = None
    keep: Informative | None = None
    overlong: OverlongPenalty | None = None
    mask_truncated: bool = False
    critic: CriticConfig | None = None
    proximal: EmaProximal | None = None
    reference: ReferencePolicy = field(default=ReferencePolicy())
    replay: SelfImitationBuffer | None = None
    scope: Literal["step", "micro_batch", "lagged"] = "step"
    routing: Literal["free", "proximal", "behavior"] = "free"
    demonstrated: bool = False
    samples: Literal["policy", "data", "pairs", "labels"] = "policy"

    @property
    def is_supervised(self) -> bool:
        """Whether the dataset's own answers are trained on, and none is sampled."""
        return self.samples != "policy"

    @property
    def ranks_pairs(self) -> bool:
        """Whether it trains a reward model: a critic alone, on pairs of the dataset's answers."""
        return self.critic is not None and self.critic.ranks_pairs

    @property
    def dataset_answers(self) -> Literal["", "data", "pairs", "labels"]:
        """Which answers a row of the dataset has to give."""
        if self.samples == "policy":
            return "data" if self.demonstrated else ""
        return self.samples

    @property
    def needs(self) -> frozenset[Need]:
        """What the learner must score before the first update.

        With a single update the proximal policy is the current one, so its forward serves both; unless the proximal
        policy is an average, or a critic on the same trunk is taught in between.
        """
        needs = self.advantage.needs.union(*(r.needs for r in self.regularizers))
        # Accumulated drift is the distance to the proximal policy, which each update measures anyway.
        adds_drift = isinstance(self.tracker, TrackerConfig) and self.tracker.drift == "accumulated"
        # Who reads the proximal policy: the ratio, a piece with two anchors, a correction, or the tracker's drift.
        anchors = self.ratio.anchor == "proximal" or self.reads_both
        corrects = self.correction is not None and getattr(self.correction, "reads_proximal", True)
        reads_proximal = anchors or corrects or adds_drift
        is_moved_first = self.critic is not None and self.critic.moves_policy_first
        # From the second update on the current policy is no longer the proximal one; nor is it where that is an
        # average, or where the critic moved the weights first.
        has_several_updates = self.updates.total > 1 or self.proximal is not None or is_moved_first
        # The critic has moved the weights by then, so the current policy is not the one that the step began with.
        if is_moved_first or (reads_proximal and has_several_updates):
            needs |= {"proximal"}
        if self.ratio.anchor == "reference" or self.reference_top is not None:
            needs |= {"reference"}
        if self.ranks_pairs:
            needs |= {"values"}
        if self.routing == "proximal" and has_several_updates:
            needs |= {"routing"}
        return needs

    @property
    def updates_repeatedly(self) -> bool:
        """Whether a step may change weights more than once, so that undoing it takes a copy of what was before it."""
        # A reward model makes one update, which the learner refuses by itself when it is not finite.
        teaches = self.critic is not None and not self.ranks_pairs
        return self.updates.total > 1 or teaches or self.replay is not None

    def prepare(self, batch: Batch) -> Batch:
        """Return the scored rollout batch with advantages and returns; only here are groups whole.

        Raises:
            NotFiniteError: A reward is beyond what float32 holds. Its square may overflow, and an infinite deviation
                would make every advantage 0 without a message.
        """
        # (rows, 1) or (rows, components), in rewards.
        each = batch.rewards[:, None] if batch.component_rewards is None else batch.component_rewards
        # NaN of a component: it did not apply.
        rewards = torch.cat([batch.rewards[:, None], each.nan_to_num(0.0, math.inf, -math.inf)], 1)[batch.is_graded]
        if not bool((rewards.abs() <= LARGEST_REWARD).all()):
            raise NotFiniteError(f"a reward is not finite, or beyond {LARGEST_REWARD:.3g}, which float32 does not hold")
        batch = self.trained(batch)
        # An agent's rollout of several segments is one response to the pieces, and is cut again afterwards.
        segments = Segments.of(batch)
        whole = segments.whole(batch)
        advantages, returns = ask("Advantage", self.advantage, whole.behavior, whole)
        return batch.with_fields(
            advantages=masked(segments.cut(advantages), batch.mask).detach(),
            returns=None if returns is None else segments.cut(returns),
        )

    def trained(self, batch: Batch) -> Batch:
        """Return the batch with the mask that is trained on: without truncated answers, where these are left out."""
        return batch.with_fields(mask=batch.mask & ~batch.is_truncated[:, None]) if self.mask_truncated else batch

    def minibatches(self, batch: Batch, seed: int) -> list[Batch]:
        """Return the optimizer steps' minibatches in order, each with its weights.

        Rows are shuffled by ``seed`` and epoch when there is more than one minibatch; sizes differ by one at
        most.
        """
        return [self.weigh(cut) for cut in minibatches(batch, self.updates, seed)]

    def value_minibatches(self, batch: Batch, seed: int) -> list[Batch]:
        """Return the same of the critic's own updates; every trained token of a minibatch counts the same.

        Of pairs every answer does, and ``returns`` are the scores of the others.
        """
        if self.critic is None:
            return []
        if self.ranks_pairs:
            assert batch.bootstrap is not None, "score comes first"
            # Each row of a pair needs the other's score as a constant, since the pair may be cut apart.
            other = torch.tensor(_partners(batch.group.tolist()))
            returns = batch.bootstrap[other, None].expand(batch.mask.shape)
            weights = SequenceMean()(batch.mask, batch.group).to(batch.behavior.dtype)
            return [batch.with_fields(returns=returns, weights=weights)]
        cuts = minibatches(self.valued(batch), self.critic.updates, seed)
        return [c.with_fields(weights=TokenMean()(c.mask, c.group).to(c.behavior.dtype)) for c in cuts]

    def valued(self, batch: Batch) -> Batch:
        """Return the batch in which the tokens are trained that the critic learns from: those that were sampled.

        A value is what the policy will earn, and a demonstration's reward is what another earned. On its targets the
        critic would foretell success at prefixes that the policy rarely finishes, and the demonstration's own
        advantage, reward minus value, would go to zero though the policy has learned nothing. Logged rollouts whose
        policy nobody knows stay where there are no others: all that a critic can learn there is what they earned.
        """
        sampled = batch.mask & ~batch.is_given[:, None]
        return batch.with_fields(mask=sampled) if self.demonstrated or bool(sampled.any()) else batch

    def first_rows(self, batch: Batch, seed: int, value_seed: int) -> dict[Need, Tensor]:
        """Return the rows Int[N] of the first of `minibatches` and of `value_minibatches`: what scores them can keep
        the graph of the pass, as long as the weights are the same.
        """
        # Only the first minibatch: from the second on the weights have moved, and its graph would be of other weights.
        found: dict[Need, Tensor] = {"proximal": minibatch_rows(batch, self.updates, seed)[0]}
        if self.critic is not None:
            found["values"] = minibatch_rows(batch, self.critic.updates, value_seed)[0]
        return found

    def weigh(self, minibatch: Batch) -> Batch:
        """Return one optimizer step's whole minibatch with its weights; call before any cut."""
        segments = Segments.of(minibatch)
        whole = segments.whole(minibatch)
        weights = ask("Aggregate", self.aggregate, whole.behavior, whole.mask, whole.group).to(minibatch.behavior.dtype)
        # A regularizer may count other tokens than the policy loss, so each has weights of its own.
        own = {r.name: segments.cut(r.weights(whole, weights)) for r in self.regularizers}
        return minibatch.with_fields(weights=segments.cut(weights), own_weights=own)

    def live_rows(self, minibatch: Batch) -> Tensor:
        """Return Bool[B]: rows that can have a gradient, and the other segments of their rollouts.

        Others need no forward. Denominators count all.
        """
        assert minibatch.weights is not None, "weigh comes first"
        assert minibatch.advantages is not None, "prepare comes first"
        # A row whose every token has weight or advantage 0 has the gradient 0, whatever its ratio is.
        pushes = minibatch.weights
        if self.ratio.anchor != "reference":  # the distance to a reference has a slope where the advantage is 0
            pushes = pushes * minibatch.advantages
        live = (pushes != 0).any(1)
        for weights in minibatch.own_weights.values():
            live |= (weights != 0).any(1)
        return Segments.of(minibatch).any(live & minibatch.mask.any(1))

    @property
    def reads_statistics(self) -> bool:
        """Whether a piece needs statistics of the whole step before the first cut.

        A user's own piece may read effective sizes wherever the ratio is to behavior; gnomon's own say so.
        """
        bounds = getattr(self.surrogate, "bounds", ())
        # Without a reader the learner saves a forward pass over the whole step.
        pieces = (self.surrogate, *bounds, self.correction, *self.regularizers)
        reads_sizes = self.ratio.anchor == "behavior" and any(
            getattr(piece, "reads_sizes", not type(piece).__module__.startswith("gnomon."))
            for piece in pieces
            if piece is not None
        )
        return self.scope == "step" and (reads_sizes or bool(self.asking))

    @property
    def asking(self) -> tuple[SummedTerms, ...]:
        """Pieces that ask for terms of their own over the tokens of the scope."""
        pieces: tuple[object, ...] = (self.surrogate, self.correction, *self.regularizers)
        return tuple(piece for piece in pieces if isinstance(piece, SummedTerms))

    @property
    def reads_both(self) -> bool:
        """Whether a piece looks at the proximal policy beside behavior, as P3O's form with two anchors does."""
        return any(getattr(piece, "reads_both", False) for piece in (self.surrogate, *self.regularizers))

    @property
    def top_logprobs(self) -> int | None:
        """Likeliest tokens of behavior that a piece reads at each position, 0 for all; None where none reads any."""
        return self._asked("top_logprobs")

    @property
    def reference_top(self) -> int | None:
        """The same of the reference policy."""
        return self._asked("reference_top")

    def _asked(self, name: str) -> int | None:
        counts = [getattr(piece, name, None) for piece in (self.surrogate, *self.regularizers)]
        return next((count for count in counts if count is not None), None)

    @property
    def reads_entropy(self) -> bool:
        """Whether a piece needs every token's entropy before the first cut."""
        return any(getattr(piece, "reads_entropy", False) for piece in self.asking)

    def statistics(self, current: Tensor, batch: Batch, entropy: Tensor | None = None) -> Statistics:
        """Return effective sizes of the ratios over trained tokens, and the terms that pieces ask for.

        Those of cuts and ranks add up.

        Args:
            current: Log-probabilities of the current policy, Float[B T].
            batch: A weighed minibatch, or rows of one.
            entropy: Entropies Float[B T], in nats, for algorithms with `reads_entropy`.

        Raises:
            ConfigError: Two pieces ask for terms of one name, a term has not the shape of the tokens, or a piece needs
                entropies and there are none.
        """
        if entropy is None and self.reads_entropy:
            raise ConfigError(f"algorithm '{self.name}' selects tokens by their entropy; give statistics the entropies")
        # In float64: a weight is exp of a difference of logs, and squares of a long batch add up.
        now, mask = current.detach().double(), batch.mask & ~batch.is_given[:, None]
        # Not scored means that it is the current policy, whose ratio is 1.
        proximal = now if batch.proximal is None else batch.proximal.detach().double()
        return Statistics(
            effective_size(now - batch.behavior.detach().double(), mask),
            effective_size(now - proximal, mask),
            tuple(self._terms(current.detach(), batch, entropy).items()),
        )

    def _terms(self, current: Tensor, batch: Batch, entropy: Tensor | None) -> dict[str, Tensor]:
        if not self.asking:
            return {}
        segments = Segments.of(batch)
        # NaN, so that a piece which reads an entropy it did not ask for gives NaN and not a plausible number.
        known = torch.full_like(current, float("nan")) if entropy is None else entropy.detach()
        current, known, batch = segments.join(current), segments.join(known), segments.whole(batch)
        view = self.view(current, known, batch, Statistics())
        found: dict[str, Tensor] = {}
        for piece in self.asking:
            terms: object = piece.terms(view)
            if not isinstance(terms, Mapping) or not all(isinstance(name, str) for name in terms):
                what = f"a {type(terms).__name__} and not names with Float[B T] each"
                raise ConfigError(
                    f"{type(piece).__name__}.terms returned {what}: return {{name: a number for each token}}"
                )
            for name, term in terms.items():
                where = f"{type(piece).__name__}.terms: '{name}'"
                if name in found:
                    raise ConfigError(f"{where} is asked for by two pieces; give one another name")
                if not isinstance(term, Tensor) or term.shape != batch.mask.shape:
                    shape = tuple(term.shape) if isinstance(term, Tensor) else f"of a {type(term).__name__}"
                    right = tuple(batch.mask.shape)
                    raise ConfigError(f"{where} has the shape {shape} and not {right}: return a number for each token")
                # (trained tokens,) in row order: the same order for all names.
                found[name] = term.detach().double()[batch.mask]
        return found

    def loss(
        self, current: Tensor, entropy: Tensor, cut: Batch, statistics: Statistics, anchor_kl: Tensor | None = None
    ) -> Loss:
        """Return the loss of one cut of a weighed minibatch; cuts' losses and gradients add to the whole's.

        Args:
            current: Log-probabilities of the current policy, Float[B T], with a gradient.
            entropy: Entropy of each token's distribution, Float[B T], in nats, with a gradient.
            cut: Rows of a weighed minibatch; all segments of a rollout, or none.
            statistics: Of the whole optimizer step, or of the one before it, as `scope` says; not read when that is
                "micro_batch".
            anchor_kl: KL to behavior or reference over whole distributions, Float[B T], in nats, with a gradient; for
                algorithms with `top_logprobs` or `reference_top`.
        """
        assert cut.weights is not None, "weigh the minibatch before cutting it"
        # The statistics of the step are not read then, as in the paper's own code.
        if self.scope == "micro_batch":
            statistics = self.statistics(current, cut)
        segments = Segments.of(cut)
        current, entropy, cut = segments.join(current), segments.join(entropy), segments.whole(cut)
        anchor_kl = None if anchor_kl is None else segments.join(anchor_kl)
        assert cut.weights is not None, "whole keeps them"
        view = replace(self.view(current, entropy, cut, statistics), anchor_kl=anchor_kl)
        per_token, metrics = ask("Surrogate", self.surrogate, current, view)
        if self.correction is not None:
            factor, measured = ask("Correction", self.correction, current, view)
            per_token, metrics = factor * per_token, metrics + measured
        # Masked before the product: 0 * inf of a padded position would be NaN.
        total = (cut.weights * masked(per_token, cut.mask)).sum()
        parts = {"policy": float(total.detach())}
        for regularizer in self.regularizers:
            term, measured = ask("Regularizer", regularizer, current, view)
            term = (cut.own_weights[regularizer.name] * masked(term, cut.mask)).sum()
            parts[regularizer.name] = float(term.detach())
            total, metrics = total + term, metrics + measured
        return Loss(total, parts, metrics + self.measure(view))

    def view(self, current: Tensor, entropy: Tensor, cut: Batch, statistics: Statistics) -> LossInputs:
        """Return what the pieces see of one cut."""
        # In a step's only update the current policy stands for the proximal one, without its gradient: the ratio is 1
        # in value and has the policy's slope.
        proximal = (current if cut.proximal is None else cut.proximal).detach()
        anchors = {"proximal": proximal, "behavior": cut.behavior, "reference": cut.reference}
        anchor = anchors[self.ratio.anchor]
        if anchor is None:
            raise ConfigError(
                f"a ratio to the {self.ratio.anchor} policy needs its log-probabilities; score them first"
            )
        log_ratio = self.ratio(current, anchor.detach(), cut.mask)
        return LossInputs(cut, current, entropy, proximal, log_ratio, statistics)

    def measure(self, view: LossInputs) -> Metrics:
        """Return what every algorithm reports of every cut."""
        batch, mask = view.batch, view.batch.mask
        count = int(mask.sum())
        if count == 0:
            return Metrics()
        # Given responses were sampled by nobody, so they are in no measure of mismatch or KL.
        current, sampled = view.current.detach(), mask & ~batch.is_given[:, None]
        # Supervised batches have given responses alone, and are measured on these.
        if not bool(sampled.any()):
            sampled = mask

        def mean(tensor: Tensor) -> Mean:
            return Mean(float(masked(tensor.detach(), sampled).sum()), int(sampled.sum()))

        engine = (view.proximal - batch.full_behavior.detach()).abs()
        mismatch = masked(view.proximal.double() - batch.behavior.detach().double(), sampled)
        return Metrics.of(
            {
                "loss/entropy_nats": average(view.entropy, mask),
                "loss/ratio_clamped_fraction": mean((view.log_ratio.abs() >= self.ratio.clamp).double()),
                "loss/kl_behavior_nats": mean(batch.behavior - current),
                "loss/kl_proximal_nats": mean(view.proximal - current),
                "loss/drift_abs_nats": mean((view.proximal - current).abs()),
                "loss/ess_fraction": effective_size(current.double() - batch.behavior.detach().double(), sampled),
                "mismatch/logprob_abs_mean_nats": mean(engine),
                "mismatch/logprob_abs_max_nats": Max(float(masked(engine, sampled).max())),
                "mismatch/truncation_mean_nats": mean(batch.behavior - batch.full_behavior),
                "mismatch/k3_nats": mean(mismatch.exp() - 1 - mismatch),
                "mismatch/ess_fraction": effective_size(mismatch, sampled),
            }
        )


def _partners(groups: Sequence[int]) -> list[int]:
    """Return for each row the other one of its pair.

    >>> _partners([0, 1, 1, 0])
    [3, 2, 1, 0]
    """
    rows: dict[int, int] = {}
    for row, group in enumerate(groups):
        # The sum of a pair's row numbers, minus one of them, is the other.
        rows[group] = rows.get(group, 0) + row
    return [rows[group] - row for row, group in enumerate(groups)]


def minibatches(batch: Batch, updates: Updates, seed: int) -> list[Batch]:
    """Return a rollout batch's optimizer steps, in order."""
    return [batch.rows(rows) for rows in minibatch_rows(batch, updates, seed)]


def minibatch_rows(batch: Batch, updates: Updates, seed: int) -> list[Tensor]:
    """Return the rows of each of a rollout batch's optimizer steps, in order; the segments of a rollout together."""
    cuts: list[Tensor] = []
    segments = Segments.of(batch)
    # Shuffled and split by rollout, so that the segments of one stay in one minibatch.
    rollout = torch.arange(len(batch)) if segments.rollout is None else segments.rollout
    count = int(rollout.max()) + 1
    for epoch in range(updates.epochs):
        order = torch.arange(count)
        if updates.minibatches > 1:
            # A large prime apart, so that the epochs of neighboring seeds do not share an order.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator)
        parts = torch.tensor_split(order, min(updates.minibatches, count))
        # Rows in the order of the batch: the shuffle decides who is in a minibatch, not the order inside.
        cuts += [torch.isin(rollout, part).nonzero()[:, 0] for part in parts]
    return cuts


def effective_size(log_ratio: Tensor, mask: Tensor) -> EffectiveSize:
    """Return the effective size of exp(``log_ratio``) over trained tokens; exponents are bounded nowhere."""
    # Masked before exp, since padding may hold any number.
    ratio = masked(log_ratio, mask).exp()[mask]
    return EffectiveSize(int(ratio.numel()), float(ratio.sum()), float(ratio.square().sum()))
