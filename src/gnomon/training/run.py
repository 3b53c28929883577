"""What the training loop needs, built and connected; and what happens between its steps."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.protocols import Need
from gnomon.core.errors import DiagnosedError, Stopped
from gnomon.core.types import Batch
from gnomon.engines.base import Engine
from gnomon.learner.base import Learner
from gnomon.rollouts.collate import Collate, collate
from gnomon.rollouts.curriculum.base import Curriculum
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.baseline_tracking import BaselineTracking, NoTracker
from gnomon.training.budget import BudgetTracker
from gnomon.training.critic_updates import CriticUpdates, NoCritic, ValuePretraining, shuffle_seed
from gnomon.training.evaluate import Evaluator, LikelihoodEvaluator
from gnomon.training.nonfinite_guard import Guard, NoGuard
from gnomon.training.run_logger import NoTokenProbe, RunLogger, TokenProbe
from gnomon.training.self_imitation import ImitationUpdates, NoImitation
from gnomon.training.staleness_filter import NoFilter, StalenessFilter
from gnomon.training.weight_sync import MismatchProbe, NoMismatchProbe, PlainWeightSync, WeightSync


@dataclass
class StopRequest:
    """The number of the signal that asked the run to stop, 0 for none; read between steps.

    Attributes:
        after: Steps, or batches of value pre-training, that a session makes first, whenever it was asked: with
            ``StopRequest(signal.SIGTERM, after=1)`` a program takes a run one step further.

    >>> StopRequest(15, after=1).is_due(made=0), StopRequest(15, after=1).is_due(made=1), StopRequest().is_due(made=9)
    (False, True, False)
    """

    signal: int = 0
    after: int = 0

    def is_due(self, made: int) -> bool:
        """Whether to stop, when this session has made so many steps and batches."""
        return self.signal != 0 and made >= self.after


async def _nothing() -> bool:
    return False


def _unchecked() -> None:
    return


@dataclass
class Components:
    """What works in a run: who generates, trains and keeps account of prompts.

    Attributes:
        algorithm: The algorithm.
        learner: Owns the weights and the optimizer.
        engine: Generates answers.
        stream: Schedules rollouts.
        curriculum: Chooses prompts.
        tracking: Per-prompt baselines.
        weight_sync: Brings new weights to the engine.
        guard: Takes a step back that is not finite.
        staleness_filter: Leaves out groups that are too far from the policy.
        critic_updates: Trains the critic before and after the policy.
        imitation: Updates on the best answers so far.
        collate: Makes a batch of groups; it knows the weights of the rewards and the hints of the reference policy.
    """

    algorithm: Algorithm
    learner: Learner
    engine: Engine
    stream: RolloutScheduler
    curriculum: Curriculum
    tracking: BaselineTracking = field(default=NoTracker())
    weight_sync: WeightSync = field(default=PlainWeightSync())
    guard: Guard = field(default=NoGuard())
    staleness_filter: StalenessFilter = field(default=NoFilter())
    critic_updates: CriticUpdates = field(default=NoCritic())
    imitation: ImitationUpdates = field(default=NoImitation())
    collate: Collate = collate


@dataclass
class Schedule:
    """When a run does what.

    Attributes:
        steps: Training steps in all; ``learner.version`` of them are done.
        first: Steps that the run which this one continues had made; 0 for a run that continues none.
        temperature: Of the sampler; every policy is scored at it.
        seed: The run's seed.
        save: Publishes a checkpoint after so many steps, at once or while the run goes on; whether it is the best.
        checkpoint_every: Steps between checkpoints, 0 for the end alone.
        evaluator: Evaluates the weights; None where no question is held out.
        evaluate_every: Steps between evaluations, 0 for before and after alone.
        evaluate_before: Whether the weights are evaluated before the first step.
        initialize: What comes before the first step; returns whether it changed anything.
        pretraining: The critic's own phase before the first step, None without one.
    """

    steps: int
    temperature: float
    seed: int
    save: Callable[[int, bool], None]
    first: int = 0
    checkpoint_every: int = 0
    evaluator: Evaluator | LikelihoodEvaluator | None = None
    evaluate_every: int = 0
    evaluate_before: bool = True
    initialize: Callable[[], Awaitable[bool]] = _nothing
    pretraining: ValuePretraining | None = None


@dataclass
class Progress:
    """How far a run has come, and who is told.

    Attributes:
        logger: Writes steps and evaluations down.
        budget: What was spent of tokens or seconds, which may end the run.
        mismatch: Measures the mismatch between engine and learner.
        token_probe: Measures log-probabilities and entropies of some tokens.
        check_saves: Raises the error of a save that has failed meanwhile.
        stop: Whether the run was asked to stop.
        is_initialized: Whether ``initialize`` was done in an earlier session.
        is_evaluated: Whether the first evaluation was done in an earlier session.
        best: Best score of the evaluations.
        steps_this_session: Steps, and batches of value pre-training, since this session began.
    """

    logger: RunLogger
    budget: BudgetTracker = field(default_factory=BudgetTracker)
    mismatch: MismatchProbe = field(default=NoMismatchProbe())
    token_probe: TokenProbe = field(default=NoTokenProbe())
    check_saves: Callable[[], None] = _unchecked
    stop: StopRequest = field(default_factory=StopRequest)
    is_initialized: bool = False
    is_evaluated: bool = False
    best: float = float("-inf")
    steps_this_session: int = field(default=0, init=False)


@dataclass
class Run:
    """The built objects of one run, in three parts."""

    components: Components
    schedule: Schedule
    progress: Progress

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop, and has made in this session what it was to make first."""
        return self.progress.stop.is_due(self.progress.steps_this_session)

    def steps_left(self) -> Iterator[int]:
        """Yield the steps that are to be made, from 0, each when the one before is done, until the budget is spent."""
        while self.components.learner.version < self.schedule.steps and not self.progress.budget.is_spent:
            yield self.components.learner.version

    def shuffle_seed(self, step: int) -> int:
        """Return the seed of the step's minibatches; it depends on the run's seed and the step alone."""
        return shuffle_seed(self.schedule.seed, step, "minibatches")

    def first_rows(self, batch: Batch, step: int) -> Mapping[Need, Tensor]:
        """Return the rows of the step's first minibatches; see `Algorithm.first_rows`."""
        value_seed = shuffle_seed(self.schedule.seed, step, "values")
        return self.components.algorithm.first_rows(batch, self.shuffle_seed(step), value_seed)

    async def begin(self) -> None:
        """Do what comes before the first step: initial values, the evaluation that others compare with, the critic.

        Before each of these, and before whatever step comes next, the run stops when it was asked to.

        Raises:
            Stopped: If it was asked to.
        """
        if self.is_stopping:
            # A checkpoint without initial values would be resumed without them.
            is_saved = self.components.learner.version > self.schedule.first or self.progress.is_initialized
            self._stop_early(", and saved" if is_saved else "; nothing was made yet that could be saved")
        if self.components.learner.version == self.schedule.first and await self._prepare():
            self._stop_early(", and saved")

    async def _prepare(self) -> bool:
        """Return whether it was asked to stop in time to be saved; what comes later is seen after the first step."""
        # A resumed run may be past value pre-training, or in the middle of it; ``phase.save`` writes its own
        # checkpoints.
        phase, first = self.schedule.pretraining, self.schedule.first
        if phase is not None and phase.is_done:
            phase = None
        save = partial(self.schedule.save, first, False) if phase is None else partial(phase.save, 0)
        # Initial values cost samples of every prompt, so they are saved at once and never drawn twice.
        is_changed = not self.progress.is_initialized and await self.schedule.initialize()
        if is_changed:
            save()
        # A session that is to stop before its first step leaves the evaluation to the next one, unless no step follows.
        is_postponed = self.is_stopping and self.schedule.steps > 0
        if self.schedule.evaluate_before and not self.progress.is_evaluated and not is_postponed:
            await self.evaluate(first)
        stops = self.is_stopping
        is_end = stops or (self.schedule.steps == 0 and phase is None)
        # A run that stops here, or has no steps at all, would otherwise leave nothing to resume or load.
        if is_end and not is_changed and not self.progress.is_initialized:
            save()
        return await self._pretrain(phase, stops) if phase is not None else stops

    def _stop_early(self, saved: str) -> None:
        if self.components.learner.version < self.schedule.steps and not self.progress.budget.is_spent:
            raise Stopped(
                f"stopped before step {self.components.learner.version + 1} of {self.schedule.steps}{saved}",
                self.progress.stop.signal,
            )

    async def _pretrain(self, phase: ValuePretraining, stops: bool) -> bool:
        """Teach the critic until its phase is over, and publish step 0; save when due, and stop here when asked to.

        Args:
            stops: Before its first batch, which is saved.

        Returns:
            Whether it was asked to stop when all was taught.

        Raises:
            Stopped: If it was asked to.
        """
        if stops:
            raise Stopped("stopped before value pre-training went on, and saved", self.progress.stop.signal)
        with self.progress.logger.pretraining(phase.plan.steps, phase.batches) as write:
            while not phase.is_done:
                batch, metrics = phase.batches + 1, await phase.step()
                self.progress.steps_this_session += 1
                write(batch, metrics + self.progress.budget.count(metrics))
                self.progress.check_saves()
                stops = self.is_stopping
                if not phase.is_done and (stops or _is_due(phase.batches, self.schedule.checkpoint_every)):
                    phase.save(phase.batches)
                if not phase.is_done and stops:
                    number = f"{phase.batches} of {phase.plan.steps}"
                    raise Stopped(
                        f"stopped after batch {number} of value pre-training, and saved", self.progress.stop.signal
                    )
        self.schedule.save(0, False)
        phase.discard()
        return stops

    async def evaluate(self, step: int) -> bool:
        """Evaluate the weights after ``step`` steps, write it down, and return whether they are the best so far."""
        if self.schedule.evaluator is None:
            return False
        with self.progress.logger.evaluating(step, self.schedule.evaluator.prompts) as progress:
            evaluation = await self.schedule.evaluator(step, progress)
        self.progress.logger.write_evaluation(evaluation)
        is_best = evaluation.headline.mean > self.progress.best
        self.progress.best = max(self.progress.best, evaluation.headline.mean)
        return is_best

    async def finish_step(self, done: int) -> None:
        """Evaluate and save when due after ``done`` steps, at the end in any case; stop here when asked to.

        Raises:
            Stopped: If it was asked to.
            DiagnosedError: If a finding is one to stop for.
        """
        self.progress.steps_this_session += 1
        self.progress.check_saves()
        is_end = done == self.schedule.steps or self.progress.budget.is_spent
        is_best = False
        if is_end or self.progress.budget.is_at_mark or _is_due(done, self.schedule.evaluate_every):
            is_best = await self.evaluate(done)
        reason, stops = self.progress.logger.reason_to_stop, self.is_stopping
        if is_end or is_best or stops or reason or _is_due(done, self.schedule.checkpoint_every):
            self.progress.logger.recorder.settle()
            self.schedule.save(done, is_best)
        if stops and not is_end:
            raise Stopped(f"stopped after step {done} of {self.schedule.steps}, and saved", self.progress.stop.signal)
        if reason and not is_end:
            raise DiagnosedError(f"stopped after step {done} of {self.schedule.steps}, and saved: {reason}")


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
