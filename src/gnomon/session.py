"""One session of one run: the objects built, connected, walked, and closed again."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gnomon.algorithms import Algorithm
from gnomon.assemble import Choosing, Questions, keeping
from gnomon.cluster.graders import Graders
from gnomon.cluster.ray import Cluster
from gnomon.configuration import to_table
from gnomon.engines.base import Engine
from gnomon.engines.pool import EnginePool
from gnomon.experiment import Experiment
from gnomon.learner.base import Writing
from gnomon.learner.precision import dtype_of
from gnomon.loop.admission import Trusted, Unlimited
from gnomon.loop.arrival import Arrival, Fixed, Measured, Proved, Sending
from gnomon.loop.beside import beside
from gnomon.loop.budget import PART, Meter
from gnomon.loop.caution import Caution, caution_of
from gnomon.loop.diagnosing import diagnosing
from gnomon.loop.evaluate import Evaluation, Evaluator, read_evaluations
from gnomon.loop.glimpse import Glimpse, Looking, Unseen
from gnomon.loop.imitation import Imitation, Practiced, Unpracticed
from gnomon.loop.journal import Journal
from gnomon.loop.mismatch import TakenApart
from gnomon.loop.pretraining import ValuePretraining, monte_carlo
from gnomon.loop.run import Run, StopRequest
from gnomon.loop.tracking import Tracked, Tracking, Untracked
from gnomon.loop.train import train
from gnomon.loop.valuing import Unvalued, Valued, Valuing
from gnomon.metrics import Metrics
from gnomon.models.rehearsal import check_written
from gnomon.records.answers import AnswerLog
from gnomon.records.background import Background
from gnomon.records.batches import BatchLog
from gnomon.records.checkpoints import Checkpoints, Found
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import JsonLines, JsonlSink
from gnomon.records.rollouts import RolloutLog
from gnomon.records.sinks import build_sinks
from gnomon.rollouts.hosts import Hosts
from gnomon.rollouts.rollout import Asker, Stopwatch
from gnomon.rollouts.stream import RolloutStream
from gnomon.rollouts.turns import Conversation
from gnomon.saving import Saver, check_counted, parts_of, restore
from gnomon.serving import precision_of, serve_alone
from gnomon.staging import judging, staged
from gnomon.tasks.bridge import Bridge
from gnomon.threads import elsewhere
from gnomon.types import Grade, Group, Stateful
from gnomon.verifiers.base import Sample
from gnomon.verifiers.budget import ErrorBudget, FaultBudget
from gnomon.verifiers.workers import GradingPool

INITIAL_ROUND = -2

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """What a session works on: an experiment whose questions were checked, in a directory that it has locked.

    chosen: is changed by the walk, so a session is walked once. cluster: that it is on, besides this machine.
    """

    experiment: Experiment
    asked: Questions
    chosen: Choosing
    directory: RunDirectory
    console: Console
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Judge:
    """Grades in the pool, and stops the run when too many samples cannot be graded."""

    pool: GradingPool | Graders
    budget: ErrorBudget
    faults: FaultBudget = field(default_factory=FaultBudget)

    async def grade(self, sample: Sample) -> Grade:
        """Return the pool's grade. Raises: GradingError past the error budget."""
        grade = await self.pool.grade(sample)
        self.budget.observe(grade, sample, sample.prompt)
        return grade

    async def grade_together(self, samples: Sequence[Sample]) -> Sequence[Grade]:
        """Return the pool's grades of all answers to a question. Raises: as `grade`."""
        grades = await self.pool.grade_together(samples)
        for grade, sample in zip(grades, samples, strict=True):
            self.budget.observe(grade, sample, sample.prompt)
        return grades

    def refuse(self, sample: Sample, error: str) -> Grade:
        """Return the grade of a sample that failed before it could be judged. Raises: as `grade`."""
        grade = Grade(None, error=error)
        self.budget.observe(grade, sample, sample.prompt)
        return grade


async def walk(session: Session, found: Found | None, stop: StopRequest) -> None:
    """Build the run, go on from ``found`` or begin, and train to the end.

    Raises: RunError, among them Stopped; RewardError before any weight is read.
    """
    experiment, console, chosen = session.experiment, session.console, session.chosen
    async with AsyncExitStack() as stack:
        judge = await _judge(experiment, session.asked, console, stack, session.cluster)
        with console.phase(f"loading {experiment.model}"):
            logs, waiting = session.directory.learner_logs, session.directory.waiting_models
            stage = await elsewhere(partial(staged, experiment, session.cluster, console.warn, logs, waiting))
        learner, engine = stage.learner, stage.engine
        stack.callback(learner.close)
        stack.push_async_callback(engine.close)
        asker = await _asker(experiment, session.asked, engine, judge, stack)
        stream = _stream(experiment, session.asked, chosen, asker)
        meter = Meter(experiment.budget)
        parts = parts_of(learner, chosen, stream, experiment.seed) | {PART: meter}
        background = stack.enter_context(Background(experiment.checkpoints.asynchronous))
        saver = await _saver(session, parts, learner, background)

        def serving() -> Metrics:
            return engine.metrics() + stage.measured() + saver.metrics()

        journal = _journal(session, 0 if found is None else found.step, serving)
        stack.callback(journal.close)
        caution = caution_of(learner, experiment.algorithm, session.directory, console.warn)
        pretraining = _pretraining(session, saver, stream, parts, caution)
        arrival = _arrival(session, engine, stage.sent, parts)
        if found is not None:
            restore(parts, found)
        run = Run(
            algorithm=experiment.algorithm,
            learner=learner,
            engine=engine,
            stream=stream,
            curriculum=chosen.curriculum,
            tracking=_tracking(experiment, chosen, learner),
            journal=journal,
            steps=experiment.steps,
            temperature=experiment.sampling.temperature,
            seed=experiment.seed,
            meter=meter,
            save=saver.save,
            check=background.check,
            arrival=arrival,
            caution=caution,
            mismatch=TakenApart(engine, learner, stage.sent, experiment.algorithm.proximal is not None),
            glimpse=_glimpse(experiment, learner),
            admission=Trusted(experiment.staleness.ess_floor, stream) if _is_measured(experiment) else Unlimited(),
            valuing=_valuing(experiment, learner),
            imitation=_imitation(experiment, chosen, learner),
            pretraining=pretraining,
            checkpoint_every=experiment.checkpoints.every,
            evaluator=_evaluator(experiment, session.asked, asker),
            evaluate_every=experiment.evaluation.every,
            evaluate_before=experiment.evaluation.before,
            initialize=_initializing(session, asker, meter),
            is_initialized=found is not None,
            is_evaluated=bool(read_evaluations(session.directory.evaluations)),
            stop=stop,
            best=_best_so_far(session.directory),
        )
        check_counted(run, parts, [session.asked.split.train, session.asked.split.held_out])
        console.start(experiment.steps, learner.version)
        await beside(stage.watch(), train(run))


async def _saver(session: Session, parts: dict[str, Stateful], learner: Writing, background: Background) -> Saver:
    """Return what saves checkpoints, tried once where this process alone holds the model."""
    experiment, asked, console = session.experiment, session.asked, session.console
    saver = Saver(_checkpoints(session), parts, learner, asked.tokenizer, console, background, asked.form.belongings)
    if session.cluster is None and not experiment.learner.is_sharded:
        await elsewhere(partial(saver.rehearse, _rehearsing(experiment)))
    return saver


def _rehearsing(experiment: Experiment) -> Callable[[Path], None]:
    """Return what checks a checkpoint that was written before any step."""
    dtype, trusts = dtype_of(precision_of(experiment)), experiment.trust_remote_code
    return partial(check_written, name=experiment.model, dtype=dtype, trust_remote_code=trusts)


def grade_once(experiment: Experiment, asked: Questions, console: Console, step: int = 0) -> Evaluation:
    """Return one evaluation of the experiment's model, which ``step`` steps have trained, on its held-out tasks."""

    async def once() -> Evaluation:
        async with AsyncExitStack() as stack:
            judge = await _judge(experiment, asked, console, stack)
            with console.phase(f"loading {experiment.model}"):
                engine = await elsewhere(partial(serve_alone, experiment, console.warn))
            stack.push_async_callback(engine.close)
            asker = await _asker(experiment, asked, engine, judge, stack)
            evaluator = _evaluator(experiment, asked, asker)
            with console.phase("evaluating", len(asked.split.held_out)) as phase:
                return await evaluator(step, lambda group: phase.advance())

    return run_alone(once())


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, also where an event loop runs already, as in a notebook."""
    if not _is_in_loop():
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="run") as thread:
        return thread.submit(asyncio.run, work).result()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _pretrains(algorithm: Algorithm) -> bool:
    return algorithm.critic is not None and algorithm.critic.pretraining is not None


def _arrival(session: Session, engine: EnginePool, sent: Sending | None, parts: dict[str, Stateful]) -> Arrival:
    """Return what proves that the engines answer with the weights that they are sent.

    It becomes one of the ``parts`` where it measures what engines may differ by.
    """
    experiment = session.experiment
    precision = precision_of(experiment)
    is_exact = precision == "fp32" and experiment.engine.kind == "local"
    vocabulary_size = session.asked.tokenizer.vocab_size
    if is_exact:
        return Proved(engine, vocabulary_size, sent, Fixed())
    parts["arrival"] = measured = Measured()
    return Proved(engine, vocabulary_size, sent, measured)


async def _judge(
    experiment: Experiment, asked: Questions, console: Console, stack: AsyncExitStack, cluster: Cluster | None = None
) -> Judge:
    with console.phase("starting graders"):
        pool: GradingPool | Graders = await stack.enter_async_context(
            judging(experiment, asked.grading, cluster, console.warn)
        )
    return Judge(pool, ErrorBudget(experiment.grading.max_error_fraction))


async def _asker(
    experiment: Experiment, asked: Questions, engine: Engine, judge: Judge, stack: AsyncExitStack
) -> Asker:
    conversation, plan = None, experiment.environment
    if plan is not None:
        hosts = await stack.enter_async_context(Hosts(plan))
        bridge = Bridge.over(asked.tokenizer)
        conversation = Conversation(
            engine,
            hosts,
            bridge,
            plan,
            asked.tokenizer.decode,
            judge.refuse,
            asked.beginning.opening,
            judge.faults.observe,
        )
    return Asker(
        engine=engine,
        grader=judge,
        decode=asked.tokenizer.decode,
        sampling=asked.sampling,
        generations=experiment.algorithm.num_generations,
        seed=experiment.seed,
        conversation=conversation,
        opening=asked.beginning.opening,
        together=judge.grade_together if asked.grading.may_be_joint else None,
    )


def _stream(experiment: Experiment, asked: Questions, chosen: Choosing, asker: Asker) -> RolloutStream:
    is_kept, attempts = keeping(experiment.algorithm)
    return RolloutStream(
        curriculum=chosen.curriculum,
        tasks=asked.split.train,
        asker=asker,
        prompts_per_step=experiment.prompts_per_step,
        max_staleness=experiment.staleness_bound,
        is_kept=is_kept,
        max_attempts=attempts,
        stragglers=experiment.staleness.stragglers,
        # Measured, it begins one step ahead.
        slack=experiment.staleness_bound - 1 if _is_measured(experiment) else experiment.staleness.slack,
    )


def _is_measured(experiment: Experiment) -> bool:
    return experiment.max_staleness == "measured"


def _evaluator(experiment: Experiment, asked: Questions, asker: Asker) -> Evaluator:
    sampling = replace(asker.sampling, record_routing=False)
    asker = replace(asker, generations=experiment.evaluation.samples, sampling=sampling)
    return Evaluator(asker, asked.split.held_out)


def _tracking(experiment: Experiment, chosen: Choosing, learner: Writing) -> Tracking:
    if chosen.tracker is None:
        return Untracked()
    return Tracked(chosen.tracker, chosen.drift, learner, experiment.sampling.temperature)


def _valuing(experiment: Experiment, learner: Writing) -> Valuing:
    if experiment.algorithm.critic is None:
        return Unvalued()
    return Valued(experiment.algorithm, learner, experiment.seed)


def _glimpse(experiment: Experiment, learner: Writing) -> Glimpse:
    plan = experiment.records
    return Looking(learner, plan.tokens) if plan.rollouts and plan.tokens else Unseen()


def _imitation(experiment: Experiment, chosen: Choosing, learner: Writing) -> Imitation:
    algorithm = experiment.algorithm
    if algorithm.replay is None or chosen.replay is None:
        return Unpracticed()
    return Practiced(algorithm.replay, chosen.replay, learner, experiment.sampling.temperature, algorithm.critic)


def _pretraining(
    session: Session, saver: Saver, stream: RolloutStream, parts: dict[str, Stateful], caution: Caution
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
        temperature=experiment.sampling.temperature,
        seed=experiment.seed,
        save=early.save,
        discard=early.discard,
        caution=caution,
    )
    parts["pretraining"] = phase
    return phase


def _checkpoints(session: Session) -> Checkpoints:
    plan = session.experiment.checkpoints
    # What value pre-training cost is worth keeping: other runs can begin with its critic.
    kept = frozenset({0} if _pretrains(session.experiment.algorithm) else ())
    every = plan.keep_every or None
    directory = session.directory
    return Checkpoints(directory.checkpoints, plan.keep_last, every, session.console.warn, kept, directory.saved)


def _journal(session: Session, step: int, serving: Callable[[], Metrics]) -> Journal:
    experiment, directory = session.experiment, session.directory
    plan = experiment.records
    trackers = build_sinks(
        plan.sinks, directory.path, directory.path.name, to_table(experiment), step, is_aliased=plan.aliases
    )
    return Journal(
        console=session.console,
        sinks=[JsonlSink(directory.metrics), *trackers],
        evaluations=JsonLines(directory.evaluations),
        answers=AnswerLog(directory.answers),
        rollouts=RolloutLog(directory.rollouts) if plan.rollouts else None,
        batches=BatchLog(directory.batches) if plan.batches else None,
        critic=JsonlSink(directory.pretraining) if _pretrains(experiment.algorithm) else None,
        serving=serving,
        diagnosis=diagnosing(session.directory, experiment.doctor, session.console.warn),
    )


def _best_so_far(directory: RunDirectory) -> float:
    return max((e.headline.mean for e in read_evaluations(directory.evaluations)), default=float("-inf"))


def _initializing(session: Session, asker: Asker, meter: Meter) -> Callable[[], Awaitable[bool]]:
    """Return what samples each prompt's initial success rate, where the algorithm asks for that."""
    experiment, chosen = session.experiment, session.chosen

    async def initialize() -> bool:
        plan = experiment.algorithm.tracker
        if chosen.tracker is None or plan is None or plan.initial != "samples":
            return False
        tasks = session.asked.split.train
        sampler, watch = replace(asker, generations=plan.n0), Stopwatch()
        with session.console.phase(f"sampling {plan.n0} answers a prompt for initial values", len(tasks)) as phase:

            async def ask(index: int) -> Group:
                group = await sampler.ask(tasks[index], INITIAL_ROUND, watch)
                phase.advance()
                return group

            groups = await asyncio.gather(*(ask(index) for index in range(len(tasks))))
        chosen.tracker.initialize(groups)
        meter.add(watch.generated_tokens, watch.generate_seconds + watch.grade_seconds)
        return True

    return initialize
