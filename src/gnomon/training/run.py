"""What the walk needs, built and connected; and what happens between its steps."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gnomon.algorithms.algorithm import Algorithm
from gnomon.core.errors import DiagnosedError, Stopped
from gnomon.engines.base import Engine
from gnomon.learner.base import Learner
from gnomon.rollouts.curriculum.base import Curriculum
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.baseline_tracking import BaselineTracking
from gnomon.training.budget import BudgetTracker
from gnomon.training.critic_pretraining import ValuePretraining
from gnomon.training.critic_updates import CriticUpdates, NoCritic, shuffle_seed
from gnomon.training.evaluate import Evaluator
from gnomon.training.mismatch import MismatchProbe, NoMismatchProbe
from gnomon.training.nonfinite_guard import NoGuard, Watch
from gnomon.training.run_logger import RunLogger
from gnomon.training.self_imitation import ImitationUpdates, NoImitation
from gnomon.training.staleness_filter import NoFilter, StalenessFilter
from gnomon.training.token_stats import NoTokenProbe, TokenProbe
from gnomon.training.weight_sync import PlainWeightSync, WeightSync


@dataclass
class StopRequest:
    """The number of the signal that asked the run to stop, 0 for none; read between steps.

    after: steps, or batches of value pre-training, that a session makes first, whenever it was asked: with
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
class Run:
    """The built objects of one run.

    steps: of training in all; `learner.version` of them are done. meter: of a budget that may end it sooner.
    checkpoint_every, evaluate_every: steps, 0 for the end alone. save: publishes a checkpoint after so many steps, at
    once or while the run goes on. check: raises what a save met that has failed meanwhile. initialize: what comes
    before the first step; returns whether it changed anything. is_initialized, is_evaluated: whether that, and the
    first evaluation, were done before.
    pretraining: the critic's own phase before the first step, None without one. made: steps, and batches of that
    phase, since this session began.
    """

    algorithm: Algorithm
    learner: Learner
    engine: Engine
    stream: RolloutScheduler
    curriculum: Curriculum
    tracking: BaselineTracking
    journal: RunLogger
    steps: int
    temperature: float
    seed: int
    save: Callable[[int, bool], None]
    meter: BudgetTracker = field(default_factory=BudgetTracker)
    check: Callable[[], None] = _unchecked
    admission: StalenessFilter = field(default=NoFilter())
    weight_sync: WeightSync = field(default=PlainWeightSync())
    guard: Watch = field(default=NoGuard())
    mismatch: MismatchProbe = field(default=NoMismatchProbe())
    token_probe: TokenProbe = field(default=NoTokenProbe())
    critic_updates: CriticUpdates = field(default=NoCritic())
    imitation: ImitationUpdates = field(default=NoImitation())
    pretraining: ValuePretraining | None = None
    checkpoint_every: int = 0
    evaluator: Evaluator | None = None
    evaluate_every: int = 0
    evaluate_before: bool = True
    initialize: Callable[[], Awaitable[bool]] = _nothing
    is_initialized: bool = False
    is_evaluated: bool = False
    stop: StopRequest = field(default_factory=StopRequest)
    best: float = float("-inf")
    made: int = field(default=0, init=False)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop, and has made in this session what it was to make first."""
        return self.stop.is_due(self.made)

    def steps_left(self) -> Iterator[int]:
        """Yield the steps that are to be made, from 0, each when the one before is done, until the budget is spent."""
        while self.learner.version < self.steps and not self.meter.is_spent:
            yield self.learner.version

    def shuffle_seed(self, step: int) -> int:
        """Return the seed of the step's minibatches; it depends on the run's seed and the step alone."""
        return shuffle_seed(self.seed, step, "minibatches")

    async def begin(self) -> None:
        """Do what comes before the first step: initial values, the evaluation that others compare with, the critic.

        Before each of these, and before whatever step comes next, the run stops when it was asked to. Raises: Stopped.
        """
        if self.is_stopping:
            # A checkpoint without initial values would be resumed without them.
            is_saved = self.learner.version > 0 or self.is_initialized
            self._stop_early(", and saved" if is_saved else "; nothing was made yet that could be saved")
        if self.learner.version == 0 and await self._prepare():
            self._stop_early(", and saved")

    async def _prepare(self) -> bool:
        """Return whether it was asked to stop in time to be saved; what comes later is seen after the first step."""
        phase = None if self.pretraining is None or self.pretraining.is_done else self.pretraining
        save = partial(self.save, 0, False) if phase is None else partial(phase.save, 0)
        is_changed = not self.is_initialized and await self.initialize()
        if is_changed:
            save()
        if self.evaluate_before and not self.is_evaluated and not (self.is_stopping and self.steps):
            await self.evaluate(0)
        stops = self.is_stopping
        if (stops or (self.steps == 0 and phase is None)) and not is_changed and not self.is_initialized:
            save()
        return await self._pretrain(phase, stops) if phase is not None else stops

    def _stop_early(self, saved: str) -> None:
        if self.learner.version < self.steps and not self.meter.is_spent:
            raise Stopped(f"stopped before step {self.learner.version + 1} of {self.steps}{saved}", self.stop.signal)

    async def _pretrain(self, phase: ValuePretraining, stops: bool) -> bool:
        """Teach the critic until its phase is over, and publish step 0; save when due, and stop here when asked to.

        stops: before its first batch, which is saved. Returns: whether it was asked to stop when all was taught.
        Raises: Stopped.
        """
        if stops:
            raise Stopped("stopped before value pre-training went on, and saved", self.stop.signal)
        with self.journal.pretraining(phase.plan.steps, phase.batches) as write:
            while not phase.is_done:
                batch, metrics = phase.batches + 1, await phase.step()
                self.made += 1
                write(batch, metrics + self.meter.count(metrics))
                self.check()
                stops = self.is_stopping
                if not phase.is_done and (stops or _is_due(phase.batches, self.checkpoint_every)):
                    phase.save(phase.batches)
                if not phase.is_done and stops:
                    number = f"{phase.batches} of {phase.plan.steps}"
                    raise Stopped(f"stopped after batch {number} of value pre-training, and saved", self.stop.signal)
        self.save(0, False)
        phase.discard()
        return stops

    async def evaluate(self, step: int) -> bool:
        """Evaluate the weights after ``step`` steps, write it down, and return whether they are the best so far."""
        if self.evaluator is None:
            return False
        with self.journal.evaluating(step, len(self.evaluator.tasks)) as progress:
            evaluation = await self.evaluator(step, progress)
        self.journal.write_evaluation(evaluation)
        is_best = evaluation.headline.mean > self.best
        self.best = max(self.best, evaluation.headline.mean)
        return is_best

    async def maintain(self, done: int) -> None:
        """Evaluate and save when due after ``done`` steps, at the end in any case; stop here when asked to.

        Raises: Stopped; DiagnosedError when a finding is one to stop for.
        """
        self.made += 1
        self.check()
        is_end = done == self.steps or self.meter.is_spent
        is_best = False
        if is_end or self.meter.is_at_mark or _is_due(done, self.evaluate_every):
            is_best = await self.evaluate(done)
        reason, stops = self.journal.reason_to_stop, self.is_stopping
        if is_end or is_best or stops or reason or _is_due(done, self.checkpoint_every):
            self.save(done, is_best)
        if stops and not is_end:
            raise Stopped(f"stopped after step {done} of {self.steps}, and saved", self.stop.signal)
        if reason and not is_end:
            raise DiagnosedError(f"stopped after step {done} of {self.steps}, and saved: {reason}")


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
