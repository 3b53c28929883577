"""One session of a run: build and connect its objects, train, and close them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from gnomon.algorithms import Algorithm, RoleAverage
from gnomon.config.experiment import Experiment
from gnomon.core.errors import ConfigError, WeightSyncError
from gnomon.core.metrics import Metrics
from gnomon.core.tables import to_table
from gnomon.core.threads import run_alone, run_in_thread
from gnomon.core.types import Grade, Group, Stateful
from gnomon.engines.base import Engine
from gnomon.engines.own import TRIAL_NATS, try_own
from gnomon.engines.pool import EnginePool
from gnomon.learner.base import Learner, SavableLearner
from gnomon.models.checkpoint_check import check_written
from gnomon.records.background import Background
from gnomon.records.batches import BatchLog
from gnomon.records.checkpoints import CheckpointRef, Checkpoints
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.eval_records import AnswerLog
from gnomon.records.jsonl import JsonLines, JsonlSink
from gnomon.records.rollouts import RolloutLog
from gnomon.records.sinks import build_sinks
from gnomon.rewards.base import Sample
from gnomon.rewards.budget import ErrorBudget, FaultBudget
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rollouts.agent import AgentEndpoint, AgentRollout
from gnomon.rollouts.collate import Collate, HintedPrompts, collate
from gnomon.rollouts.dataset_rollouter import DatasetRollouter, DemonstratedRollouter
from gnomon.rollouts.env_workers import EnvWorkers
from gnomon.rollouts.multi_turn import MultiTurnRollout
from gnomon.rollouts.rollout import Rollouter, RolloutSource, RolloutTimer
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.tasks.turn_tokens import TurnTokenizer
from gnomon.training.baseline_tracking import BaselineTracking, NoTracker, PromptBaseline
from gnomon.training.budget import PART, BudgetTracker
from gnomon.training.build_data import PromptChoice, TrainingData, keeping
from gnomon.training.build_workers import (
    RunCluster,
    build_graders,
    load_network,
    serve_alone,
    start_workers,
)
from gnomon.training.checkpointing import STATELESS, Saver, check_counted, parts_of, restore
from gnomon.training.continuation import Inheritance
from gnomon.training.critic_updates import CriticTraining, CriticUpdates, NoCritic, ValuePretraining, monte_carlo
from gnomon.training.evaluate import EvalSet, Evaluation, Evaluator, LikelihoodEvaluator, read_evaluations
from gnomon.training.logged_rollouts import LoggedRollouts, describe_worth
from gnomon.training.nonfinite_guard import NonFiniteGuard, guard_of
from gnomon.training.resolve import Resolved
from gnomon.training.reward_models import PolicyJudge
from gnomon.training.run import Components, Progress, Run, Schedule, StopRequest
from gnomon.training.run_logger import (
    FinishedStep,
    NoTokenProbe,
    RunLogger,
    SampledTokenProbe,
    SupervisedMetrics,
    TokenProbe,
    live_diagnosis,
)
from gnomon.training.self_imitation import ImitationUpdates, NoImitation, SelfImitationUpdates
from gnomon.training.staleness_filter import EssFilter, NoFilter, StalenessFilter
from gnomon.training.train_loop import train
from gnomon.training.watchdog import run_with_watchdog
from gnomon.training.weight_sync import (
    CalibratedTolerance,
    DecomposedMismatch,
    FixedTolerance,
    MismatchProbe,
    NoMismatchProbe,
    NoWeightSync,
    SnapshotTransform,
    VerifiedWeightSync,
    WeightSync,
    canary,
    publish_halved,
)

# Rounds of training count from 0 and evaluations are -1, so these samples share no random numbers with either.
INITIAL_ROUND = -2

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingContext:
    """What a session works on: an experiment whose questions were checked, in a directory that it has locked.

    Attributes:
        chosen: The curriculum, which training changes: a context serves one session.
        cluster: That it is on, besides this machine.
        inherited: What a run that continues another one, and has no checkpoint yet, begins with.
    """

    resolved: Resolved
    data: TrainingData
    chosen: PromptChoice
    directory: RunDirectory
    console: Console
    callbacks: tuple[Callable[[FinishedStep], None], ...] = ()
    inherited: Inheritance | None = None
    cluster: RunCluster | None = None

    @property
    def experiment(self) -> Experiment:
        """The settings."""
        return self.resolved.experiment

    @property
    def stateless(self) -> Mapping[type, str]:
        """Kinds of objects that are in no checkpoint, each with the reason."""
        return STATELESS if self.cluster is None else {**STATELESS, **self.cluster.stateless}


@dataclass(frozen=True)
class BudgetedGrader:
    """Grades in the pool, and stops the run when too many samples cannot be graded."""

    pool: GradingPool
    budget: ErrorBudget
    faults: FaultBudget = field(default_factory=FaultBudget)

    async def grade(self, sample: Sample) -> Grade:
        """Return the pool's grade.

        Raises:
            GradingError: Past the error budget.
        """
        grade = await self.pool.grade(sample)
        self.budget.observe(grade, sample, sample.prompt)
        return grade

    async def grade_together(self, samples: Sequence[Sample]) -> Sequence[Grade]:
        """Return the pool's grades of all answers to a question.

        Raises:
            GradingError: As `grade`.
        """
        grades = await self.pool.grade_together(samples)
        for grade, sample in zip(grades, samples, strict=True):
            self.budget.observe(grade, sample, sample.prompt)
        return grades

    def refuse(self, sample: Sample, error: str) -> Grade:
        """Return the grade of a sample that failed before it could be judged.

        Raises:
            GradingError: As `grade`.
        """
        grade = Grade(None, error=error)
        self.budget.observe(grade, sample, sample.prompt)
        return grade


async def run_training(session: TrainingContext, found: CheckpointRef | None, stop: StopRequest) -> None:
    """Build the run, go on from ``found`` or begin, and train to the end.

    Raises:
        RunError: If training cannot go on, or was asked to stop (Stopped).
        RewardError: Before any weight is read.
    """
    experiment, console, chosen, data = session.experiment, session.console, session.chosen, session.data
    async with AsyncExitStack() as stack:
        # Graders first: a reward that cannot be used is reported before the model is loaded.
        grader = await _grader(session.resolved, data, console, stack, session.cluster)
        with console.phase(f"loading {experiment.model}"):
            where = session.directory.learner_logs, session.directory.waiting_models
            start = partial(start_workers, session.resolved, session.cluster, console.warn, *where)
            workers = await run_in_thread(start)
        learner, engine = workers.learner, workers.engine
        stack.callback(learner.close)
        stack.push_async_callback(engine.close)
        rollouter = await _rollouter(experiment, data, engine, grader, stack)
        stream, budget = _stream(experiment, data, chosen, rollouter, engine), BudgetTracker(experiment.budget)
        # Parts are collected before anything is restored; `_pretraining` and `_weight_sync` add theirs below.
        parts = parts_of(learner, chosen, stream, experiment.seed) | {PART: budget}
        background = stack.enter_context(Background(experiment.checkpoints.asynchronous))
        saver = await _saver(session, parts, learner, background)

        # Read once a step, when the logger writes it: what engines, the weight transfer and the saver measured since.
        def serving() -> Metrics:
            return engine.metrics() + workers.measured() + saver.metrics()

        logger = _logger(session, 0 if found is None else found.step, serving)
        stack.callback(logger.close)
        stack.enter_context(logger.recorder)
        # The guard counts refused steps from the metrics file, which was cut back to the checkpoint already.
        guard = guard_of(learner, experiment.algorithm, session.directory, console.warn)
        pretraining = _pretraining(session, saver, stream, parts, guard)
        weight_sync = _weight_sync(session, engine, workers.transform, parts)
        _begin_with(session, parts, found, stream)
        # After the restore, with the weights of the first step, and before the first prompt is sent.
        await _try_engines(session, engine, learner, workers.transform)
        components = Components(
            algorithm=experiment.algorithm,
            learner=learner,
            engine=engine,
            stream=stream,
            curriculum=chosen.curriculum,
            tracking=_tracking(experiment, chosen, learner),
            weight_sync=NoWeightSync() if experiment.algorithm.is_supervised else weight_sync,
            guard=guard,
            staleness_filter=_staleness_filter(experiment, stream),
            critic_updates=_critic_updates(experiment, learner),
            imitation=_imitation(experiment, chosen, learner),
            collate=_collate(experiment.algorithm, data),
        )
        progress = Progress(
            logger=logger,
            budget=budget,
            mismatch=_mismatch(experiment, engine, learner, workers.transform),
            token_probe=_token_probe(experiment, learner),
            check_saves=background.check,
            stop=stop,
            is_initialized=found is not None,
            is_evaluated=bool(read_evaluations(session.directory.evaluations)),
            best=_best_so_far(session.directory),
        )
        publish = partial(weight_sync.publish, engine, learner)
        evaluator = _evaluator(session.resolved, data, console, rollouter, learner, publish)
        schedule = _schedule(session, saver, evaluator, pretraining)
        if rollouter is not None:
            schedule.initialize = _initializing(session, rollouter, budget, learner)
        run = Run(components, schedule, progress)
        # Last, when every object of the run exists: nothing that changes may be missing from the checkpoint.
        check_counted(run, parts, [data.split.train, data.split.held_out, *data.split.sets], session.stateless)
        console.start(experiment.steps, learner.version)
        await run_with_watchdog(workers.watch(), train(run))


def _begin_with(
    session: TrainingContext, parts: Mapping[str, Stateful], found: CheckpointRef | None, stream: RolloutScheduler
) -> None:
    """Let the parts become what they were in the run's own checkpoint, or in that of the run that it continues."""
    if found is not None:
        restore(parts, found)
    elif session.inherited is not None:
        parent = session.inherited.parent
        with session.console.phase(f"reading {parent.checkpoint.name} of {parent.run}"):
            for said in session.inherited.restore(parts, session.chosen, stream):
                session.console.warn(said)


async def _try_engines(
    session: TrainingContext, engines: EnginePool, learner: Learner, transform: SnapshotTransform | None
) -> None:
    """Hold engines of the user's own to what they say of weights and draws, before anything is learned from these.

    Raises:
        ConfigError: They do not do what the protocol says.
    """
    experiment, size = session.experiment, session.data.tokenizer.vocab_size
    if not experiment.engine.is_own or experiment.algorithm.is_supervised:
        return
    with session.console.phase("trying engines"):
        try:
            nats = await publish_halved(engines, learner, size, transform)
        except WeightSyncError as error:
            raise ConfigError(f"engine.kind = '{experiment.engine.kind}', tried before training: {error}") from error
        await _try_draws(session.data, experiment.engine.kind, engines, session.console, nats)


async def _try_draws(
    data: TrainingData, kind: str, engines: EnginePool, console: Console, nats: float = TRIAL_NATS
) -> None:
    note = await try_own(kind, engines, canary(data.tokenizer.vocab_size)[:4], data.sampling, nats)
    if note is not None:
        console.warn(note)


async def _saver(
    session: TrainingContext, parts: dict[str, Stateful], learner: SavableLearner, background: Background
) -> Saver:
    """Return what saves checkpoints, tried once where this process alone holds the model."""
    experiment, data, console = session.experiment, session.data, session.console
    saver = Saver(_checkpoints(session), parts, learner, data.tokenizer, console, background, data.form.belongings)
    # Elsewhere the whole model is in no single process, and gathering it for a trial would cost as much as a
    # checkpoint.
    if session.cluster is None and not experiment.learner.is_sharded:
        await run_in_thread(partial(saver.rehearse, _rehearsing(session.resolved)))
    return saver


def _rehearsing(resolved: Resolved) -> Callable[[Path], None]:
    """Return what checks a checkpoint that was written before any step."""
    dtype, trusts = resolved.dtype, resolved.experiment.trust_remote_code
    experiment = resolved.experiment
    return partial(check_written, name=experiment.model, dtype=dtype, trust_remote_code=trusts, lora=experiment.lora)


def grade_once(resolved: Resolved, data: TrainingData, console: Console, step: int = 0) -> Evaluation:
    """Return one evaluation of the experiment's model, which ``step`` steps have trained, on its held-out tasks."""
    experiment = resolved.experiment

    async def once() -> Evaluation:
        async with AsyncExitStack() as stack:
            rollouter, learner = None, None
            # A likelihood needs a learner alone; graders and an engine only where answers are generated.
            if data.eval_sets:
                grader = await _grader(resolved, data, console, stack)
                with console.phase(f"loading {experiment.model}"):
                    engine = await run_in_thread(partial(serve_alone, resolved, console.warn))
                stack.push_async_callback(engine.close)
                if experiment.engine.is_own:
                    await _try_draws(data, experiment.engine.kind, engine, console)
                rollouter = await _rollouter(experiment, data, engine, grader, stack)
            if experiment.algorithm.is_supervised:
                with console.phase(f"loading {experiment.model}"):
                    learner = await run_in_thread(partial(_learner_alone, resolved))
                stack.callback(learner.close)
            evaluator = _evaluator(resolved, data, console, rollouter, learner)
            if evaluator is None:
                raise ConfigError("no question is held out, and nothing is asked; name a task, or set held_out.size")
            with console.phase("evaluating", evaluator.prompts) as phase:
                return await evaluator(step, lambda group: phase.advance())

    return run_alone(once())


def _learner_alone(resolved: Resolved) -> SavableLearner:
    """Return a learner that measures the experiment's model in this process."""
    return resolved.learner_spec.learner(load_network(resolved), resolved.device)


async def _unsent() -> None:
    return


def _evaluator(
    resolved: Resolved,
    data: TrainingData,
    console: Console,
    rollouter: Rollouter | None,
    learner: Learner | None,
    publish: Callable[[], Awaitable[object]] = _unsent,
) -> Evaluator | LikelihoodEvaluator | None:
    """Return what evaluates, None where nothing is held out.

    Args:
        publish: Brings the weights to the engine, where not every step does.
    """
    judged = None
    if rollouter is not None and data.eval_sets:
        judged = Evaluator(EvalRollouters(resolved, data, rollouter, console.warn).ask, data.eval_sets)
    rows, experiment = data.split.held_out if data.split.is_answered else None, resolved.experiment
    if learner is None or not experiment.algorithm.is_supervised or not (rows or judged):
        return judged
    dataset = DatasetRollouter(data.tokenizer.decode, 1 + experiment.algorithm.ranks_pairs)
    return LikelihoodEvaluator(learner, rows or None, dataset, experiment.scoring_temperature, judged, publish)


def _mismatch(
    experiment: Experiment, engine: EnginePool, learner: Learner, transform: SnapshotTransform | None
) -> MismatchProbe:
    if experiment.algorithm.is_supervised or experiment.rollouts_from is not None:
        return NoMismatchProbe()
    # A greedy answer has the log-probabilities of temperature 1.
    drawn = experiment.sampling.temperature or 1.0
    is_averaged, sleeps = experiment.algorithm.proximal is not None, experiment.engine.sleeps
    return DecomposedMismatch(engine, learner, transform, is_averaged, drawn, sleeps)


def _pretrains(algorithm: Algorithm) -> bool:
    return algorithm.critic is not None and algorithm.critic.pretraining is not None


def _weight_sync(
    session: TrainingContext, engine: EnginePool, transform: SnapshotTransform | None, parts: dict[str, Stateful]
) -> WeightSync:
    """Return what proves that the engines answer with the weights that they are sent.

    It becomes one of the ``parts`` where it measures what engines may differ by.
    """
    experiment = session.experiment
    precision = session.resolved.precision
    # With one precision and one implementation of the model only the order of sums differs.
    is_exact = precision == "fp32" and experiment.engine.kind == "local"
    vocabulary_size = session.data.tokenizer.vocab_size
    if is_exact:
        return VerifiedWeightSync(engine, vocabulary_size, transform, FixedTolerance())
    parts["arrival"] = measured = CalibratedTolerance()
    return VerifiedWeightSync(engine, vocabulary_size, transform, measured)


async def _grader(
    resolved: Resolved, data: TrainingData, console: Console, stack: AsyncExitStack, cluster: RunCluster | None = None
) -> BudgetedGrader | None:
    """Return what judges answers; None where no answer is generated."""
    if resolved.experiment.algorithm.is_supervised and not data.eval_sets:
        return None
    with console.phase("starting graders"):
        pool = await stack.enter_async_context(
            build_graders(resolved, data.judging, cluster, console.warn, data.judged)
        )
    return BudgetedGrader(pool, ErrorBudget(resolved.experiment.grading.max_error_fraction))


async def _rollouter(
    experiment: Experiment, data: TrainingData, engine: Engine, grader: BudgetedGrader | None, stack: AsyncExitStack
) -> Rollouter | None:
    """Return what asks the engine and has answers judged; None where no answer is generated."""
    if grader is None:
        return None
    # Scorers hold this cache, and find through it the engine of a judge that is the policy.
    data.judged.policy = PolicyJudge.over(data, experiment.seed, engine)
    plan = experiment.environment
    conversation: AgentRollout | MultiTurnRollout | None = None
    if plan is not None and plan.is_agent:
        conversation = AgentRollout(
            engine,
            await stack.enter_async_context(AgentEndpoint()),
            None if plan.server else await stack.enter_async_context(EnvWorkers(plan)),
            data.templates,
            plan,
            grader.refuse,
            count=grader.faults.observe,
        )
    elif plan is not None:
        env_workers = await stack.enter_async_context(EnvWorkers(plan))
        turn_tokenizer = TurnTokenizer.over(data.tokenizer)
        conversation = MultiTurnRollout(
            engine,
            env_workers,
            turn_tokenizer,
            plan,
            data.tokenizer.decode,
            grader.refuse,
            data.beginning.opening,
            grader.faults.observe,
            0.0 if data.grading is None else data.grading.environment_weight,
        )
    return Rollouter(
        engine=engine,
        grader=grader,
        decode=data.tokenizer.decode,
        sampling=data.sampling,
        generations=experiment.algorithm.num_generations - experiment.algorithm.demonstrated,
        seed=experiment.seed,
        conversation=conversation,
        opening=data.beginning.opening,
        together=grader.grade_together if data.judging.may_be_joint else None,
    )


def _stream(
    experiment: Experiment, data: TrainingData, chosen: PromptChoice, rollouter: Rollouter | None, engine: EnginePool
) -> RolloutScheduler:
    is_kept, attempts = keeping(experiment.algorithm)
    source: RolloutSource = DatasetRollouter(data.tokenizer.decode, experiment.algorithm.num_generations)
    if rollouter is not None and not experiment.algorithm.is_supervised:
        source = DemonstratedRollouter(rollouter) if experiment.algorithm.demonstrated else rollouter
    if isinstance(data.split.train, LoggedRollouts):
        source = data.split.train
    return RolloutScheduler(
        curriculum=chosen.curriculum,
        tasks=data.split.train,
        rollouter=source,
        prompts_per_step=experiment.prompts_per_step,
        max_staleness=experiment.staleness_bound,
        is_kept=is_kept,
        max_attempts=attempts,
        stragglers=experiment.staleness.stragglers,
        # Measured, it begins one step ahead.
        slack=experiment.staleness_bound - 1 if _is_measured(experiment) else experiment.staleness.slack,
        rest=engine.sleep if experiment.engine.sleeps else None,
    )


def _is_measured(experiment: Experiment) -> bool:
    return experiment.max_staleness == "measured"


@dataclass(frozen=True)
class EvalRollouters:
    """Where held-out sets are asked: through the run's own rollouter, judged by the run's graders or by a set's own."""

    resolved: Resolved
    data: TrainingData
    rollouter: Rollouter
    warn: Callable[[str], None]

    @asynccontextmanager
    async def ask(self, eval_set: EvalSet) -> AsyncIterator[Rollouter]:
        """Give what asks and grades the set; graders of its own end with it."""
        own = replace(self.rollouter, generations=eval_set.samples, sampling=eval_set.sampling)
        # A pool of graders is costly to start: a held-out set that is graded as training is uses the running one.
        if eval_set.grading == self.data.judging:
            yield own
            return
        async with build_graders(self.resolved, eval_set.grading, None, self.warn, self.data.judged) as pool:
            grader = BudgetedGrader(pool, ErrorBudget(self.resolved.experiment.grading.max_error_fraction))
            yield replace(own, grader=grader, together=grader.grade_together if eval_set.grading.may_be_joint else None)


def _tracking(experiment: Experiment, chosen: PromptChoice, learner: SavableLearner) -> BaselineTracking:
    if chosen.tracker is None:
        return NoTracker()
    return PromptBaseline(chosen.tracker, chosen.drift, learner, experiment.scoring_temperature)


def _critic_updates(experiment: Experiment, learner: SavableLearner) -> CriticUpdates:
    if experiment.algorithm.critic is None:
        return NoCritic()
    return CriticTraining(experiment.algorithm, learner, experiment.seed)


def _token_probe(experiment: Experiment, learner: SavableLearner) -> TokenProbe:
    plan = experiment.records
    return SampledTokenProbe(learner, plan.tokens) if plan.rollouts and plan.tokens else NoTokenProbe()


def _imitation(experiment: Experiment, chosen: PromptChoice, learner: SavableLearner) -> ImitationUpdates:
    algorithm = experiment.algorithm
    if algorithm.replay is None or chosen.replay is None:
        return NoImitation()
    return SelfImitationUpdates(
        algorithm.replay, chosen.replay, learner, experiment.scoring_temperature, algorithm.critic
    )


def _collate(algorithm: Algorithm, data: TrainingData) -> Collate:
    plan, tokenizer = algorithm.reference, data.tokenizer
    hinted = HintedPrompts(tokenizer.encode_plain, plan.success, tokenizer.context_length) if plan.prompt else None
    weights = () if data.grading is None else tuple(data.grading.weights.items())
    return partial(collate, weights=weights, hinted=hinted)


def _pretraining(
    session: TrainingContext, saver: Saver, stream: RolloutScheduler, parts: dict[str, Stateful], guard: NonFiniteGuard
) -> ValuePretraining | None:
    """Return the critic's own phase, which becomes one of the ``parts``, where the algorithm asks for it."""
    experiment = session.experiment
    critic = experiment.algorithm.critic
    if critic is None or critic.pretraining is None:
        return None
    folder = session.directory.pretraining_checkpoints
    early = replace(saver, checkpoints=Checkpoints(folder, 1, warn=session.console.warn))
    phase = ValuePretraining(
        plan=critic.pretraining,
        algorithm=monte_carlo(experiment.algorithm),
        learner=saver.learner,
        stream=stream,
        curriculum=session.chosen.curriculum,
        temperature=experiment.scoring_temperature,
        seed=experiment.seed,
        save=early.save,
        discard=early.discard,
        guard=guard,
    )
    parts["pretraining"] = phase
    return phase


def _checkpoints(session: TrainingContext) -> Checkpoints:
    plan = session.experiment.checkpoints
    # What value pre-training cost is worth keeping: other runs can begin with its critic.
    kept = frozenset({0} if _pretrains(session.experiment.algorithm) else ())
    every = plan.keep_every or None
    directory = session.directory
    return Checkpoints(directory.checkpoints, plan.keep_last, every, session.console.warn, kept, directory.saved)


def _schedule(
    session: TrainingContext,
    saver: Saver,
    evaluator: Evaluator | LikelihoodEvaluator | None,
    pretraining: ValuePretraining | None,
) -> Schedule:
    experiment = session.experiment
    return Schedule(
        steps=experiment.steps,
        first=experiment.first_step,
        temperature=experiment.scoring_temperature,
        seed=experiment.seed,
        save=saver.save,
        checkpoint_every=experiment.checkpoints.every,
        evaluator=evaluator,
        evaluate_every=experiment.evaluation.every,
        evaluate_before=experiment.evaluation.before,
        pretraining=pretraining,
    )


def _staleness_filter(experiment: Experiment, stream: RolloutScheduler) -> StalenessFilter:
    if not _is_measured(experiment):
        return NoFilter()
    return EssFilter(experiment.staleness.ess_floor, stream, experiment.algorithm)


def _logger(session: TrainingContext, step: int, serving: Callable[[], Metrics]) -> RunLogger:
    experiment, directory = session.experiment, session.directory
    plan = experiment.records
    trackers = build_sinks(
        plan.sinks, directory.path, directory.path.name, to_table(experiment), step, is_aliased=plan.aliases
    )
    return RunLogger(
        console=session.console,
        sinks=[JsonlSink(directory.metrics), *trackers],
        evaluations=JsonLines(directory.evaluations),
        answers=AnswerLog(directory.answers),
        rollouts=RolloutLog(directory.rollouts) if plan.rollouts else None,
        batches=BatchLog(directory.batches) if plan.batches else None,
        critic=JsonlSink(directory.pretraining) if _pretrains(experiment.algorithm) else None,
        serving=serving,
        diagnosis=live_diagnosis(session.directory, experiment.doctor, session.console.warn),
        callbacks=session.callbacks,
        supervised=_supervised(session),
        recorder=Background(what="the record of the step"),
    )


def _supervised(session: TrainingContext) -> SupervisedMetrics | None:
    experiment = session.experiment
    if not experiment.algorithm.is_supervised:
        return None
    rows, is_likelihood = len(session.data.split.train), experiment.algorithm.samples == "data"
    return SupervisedMetrics(rows, experiment.prompts_per_step, is_likelihood)


def _best_so_far(directory: RunDirectory) -> float:
    return max((e.headline.mean for e in read_evaluations(directory.evaluations)), default=float("-inf"))


def _initializing(
    session: TrainingContext, rollouter: Rollouter, meter: BudgetTracker, learner: Learner
) -> Callable[[], Awaitable[bool]]:
    """Return what samples each prompt's initial success rate, where the algorithm asks for that.

    Of logged rollouts it says what they are worth.
    """
    experiment, chosen = session.experiment, session.chosen

    async def initialize() -> bool:
        plan, inherited = experiment.algorithm.tracker, session.inherited
        tasks = session.data.split.train
        if isinstance(tasks, LoggedRollouts):
            session.console.say(await describe_worth(learner, tasks, experiment))
        unknown = range(len(tasks)) if inherited is None else inherited.unknown
        if (
            chosen.tracker is None
            or plan is None
            or isinstance(plan, RoleAverage)
            or plan.initial != "samples"
            or not unknown
        ):
            return inherited is not None  # which is saved at once
        sampler, watch = replace(rollouter, generations=plan.n0), RolloutTimer()
        with session.console.phase(f"sampling {plan.n0} answers a prompt for initial values", len(unknown)) as phase:

            async def ask(index: int) -> Group:
                group = await sampler.run_group(tasks[index], INITIAL_ROUND, watch)
                phase.advance()
                return group

            # All prompts at once: the engine batches them, and its own limit bounds how many run.
            groups = await asyncio.gather(*(ask(index) for index in unknown))
        chosen.tracker.initialize(groups)
        meter.add(watch.generated_tokens, watch.generate_seconds + watch.grade_seconds)
        return True

    return initialize
