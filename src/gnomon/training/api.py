"""Experiments to runs, and runs to results: what the commands and the Python interface call."""

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gnomon.algorithms.piece_trial import try_pieces
from gnomon.config.experiment import Experiment, Loaded, load, settings_of, steps_of, to_toml
from gnomon.config.name_checks import needed_packages
from gnomon.config.reading import read
from gnomon.core.atomic_files import read_plain, real_path, write_durably
from gnomon.core.errors import (
    CheckpointError,
    ConfigError,
    DatasetError,
    RunDirectoryError,
    RunError,
    Stopped,
    UserError,
    shortened,
    unknown,
)
from gnomon.core.failpoints import failpoint
from gnomon.core.optional import check_installed, import_optional
from gnomon.core.threads import run_alone
from gnomon.learner.allocator import tune_machine
from gnomon.models.adapter_config import is_adapter, read_adapter_config
from gnomon.models.checkpoint_check import try_checkpoint
from gnomon.models.critic import HEAD_FILE, check_critic, write_reward_model
from gnomon.models.folder import belongings_of
from gnomon.models.gguf import PRECISIONS, GgufModel
from gnomon.models.load import local_folder, write_merged
from gnomon.models.place import TINY_SUMS
from gnomon.models.slow import notify_slow
from gnomon.models.tiny import TAUGHT
from gnomon.records.checkpoints import CheckpointRef, Checkpoints
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.manifest import copy_files
from gnomon.records.ownership import seal
from gnomon.records.run_card import Card, questions_of, run_card, write_card, write_end, write_slow
from gnomon.records.sinks import check_sinks
from gnomon.rewards.base import Sample
from gnomon.rewards.function import UserFunction
from gnomon.rewards.judge_client import JudgeCache
from gnomon.rewards.reward_trial import made_answers, try_rewards
from gnomon.rollouts.agent_trial import try_agent
from gnomon.rollouts.env_workers import try_environment
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.base import TaskSet
from gnomon.tasks.contamination import overlap
from gnomon.tasks.gold_answers import sparse_rows
from gnomon.tasks.question import dataset_fingerprint
from gnomon.tasks.reasoning import ReasoningGymTask
from gnomon.training.budget import BudgetTracker
from gnomon.training.build import TrainingContext, grade_once, run_training
from gnomon.training.build_data import (
    PromptChoice,
    TrainingData,
    build_curriculum,
    completed,
    grading_limits,
    held_out_questions,
    isolation_of,
    questions,
)
from gnomon.training.build_workers import describe_engines, open_cluster
from gnomon.training.checks import check_serving, check_settings
from gnomon.training.continuation import (
    Continuation,
    Inheritance,
    ParentRun,
    announce_user_code,
    changed_code,
    changes,
    find_resume_point,
    foreign_code,
    is_begun,
    latest_session,
    other_experiment,
    own_code_of,
    refuse_other_code,
    settled,
    sources_of,
    truncate_logs,
    write_keys,
)
from gnomon.training.eval_spec import EvalSpec, EvalTarget, checkpoint_of, reading_weights
from gnomon.training.evaluate import Evaluation
from gnomon.training.notes import starting_notes
from gnomon.training.resolve import Resolved, resolve
from gnomon.training.result import Result
from gnomon.training.result import load as load_run
from gnomon.training.reward_models import PolicyJudge, check_judging_policy, check_reward_models
from gnomon.training.run import StopRequest
from gnomon.training.run_logger import FinishedStep
from gnomon.training.signals import stop_on_signals


def train_experiment(
    loaded: Loaded,
    run_dir: Path | None = None,
    stop: StopRequest | None = None,
    callbacks: tuple[Callable[[FinishedStep], None], ...] = (),
) -> Result:
    """Train a loaded experiment in a new run directory, or go on with the run of it that is there.

    Args:
        stop: A program's own way to end it after the current step, as SIGTERM does on the command line.

    Raises:
        UserError: Before any weight is read.
        RunError: Afterwards.
    """
    tune_machine()
    # Runs and epochs are replaced by a checkpoint and a number of steps, so that the record says what was trained.
    loaded = completed(loaded)
    resolved = resolve(settled(loaded.experiment))
    experiment = resolved.experiment
    # The record has absolute paths, so that `gnomon resume` works from any folder.
    movable = resolved.with_absolute_paths()
    written = to_toml(movable.experiment)
    # The same command again goes on with its run, as a job that a scheduler restarts does.
    if run_dir is not None and is_begun(run_dir, written):
        return resume(run_dir, stop, callbacks)
    with ExitStack() as stack:
        console = stack.enter_context(Console(experiment.steps))
        if run_dir is not None:
            # Before the tasks are prepared, which may take minutes.
            RunDirectory.check_free(run_dir, other_experiment(run_dir, written))
        data, chosen, inherited = checked(resolved, console)
        for note in loaded.notes:  # not before: an error would make them moot
            console.say(f"understood: {note}")
        for note in (*data.remarks, *starting_notes(experiment)):
            console.warn(note)
        # From here on as recorded: the checks above show paths as the user typed them.
        resolved, experiment = movable, movable.experiment
        directory = _new_directory(experiment, run_dir, inherited)
        stack.callback(directory.close)
        write_durably(directory.experiment, written.encode())
        if experiment.model == TINY_SUMS:
            console.say(TAUGHT)
        if data.split.dropped:
            console.say(f"{data.split.dropped:,} training prompts were removed, because they are also held out")
        try:
            if data.eval_sets:
                drawn = dict.fromkeys(each.drawn for each in data.eval_sets)
                console.say(f"held-out answers are drawn at {'; '.join(drawn)}")
            data = replace(data, judged=JudgeCache(directory.judged))
            session = TrainingContext(resolved, data, chosen, directory, console, callbacks, inherited)
            return _run(session, None, stop)
        except UserError:
            # An experiment that cannot be trained leaves no directory behind.
            directory.discard()
            raise


def _new_directory(experiment: Experiment, run_dir: Path | None, inherited: Inheritance | None) -> RunDirectory:
    """Make the directory of a new run: the one that was named, one beside its parent, or one in ``runs``."""
    if run_dir is not None:
        return RunDirectory.create(run_dir)
    return RunDirectory.named(experiment.name) if inherited is None else RunDirectory.after(inherited.parent.run)


def _inherited(
    parent: ParentRun | None, experiment: Experiment, data: TrainingData, chosen: PromptChoice, console: Console
) -> Inheritance | None:
    """Return what a run takes over from its parent, and say it; None without a parent."""
    if parent is None:
        return None
    inherited = Inheritance.of(parent, experiment, data.split.train, chosen)
    for said in inherited.said(experiment):
        console.say(said)
    if not inherited.is_same:
        for said in _trained_on(parent.run, data):
            console.warn(f"{parent.run}: {said}")
    return inherited


def resume(
    run: str | Path,
    stop: StopRequest | None = None,
    callbacks: tuple[Callable[[FinishedStep], None], ...] = (),
) -> Result:
    """Go on with the run from its newest valid checkpoint; a CPU run goes on bit for bit.

    Args:
        stop: As in `train_experiment`.

    Raises:
        RunDirectoryError: If there is no run or another process has it.
        CheckpointError: If all are damaged.
    """
    with RunDirectory.reopen(RunDirectory.named_by(run)) as directory:
        return _go_on(directory, load(directory.experiment).experiment, stop, callbacks)


def continue_run(
    run: str | Path,
    settings: Sequence[tuple[str, Any]],
    run_dir: Path | None = None,
    stop: StopRequest | None = None,
    callbacks: tuple[Callable[[FinishedStep], None], ...] = (),
) -> Result:
    """Go on with a run that may have ended: with more steps in the same run, with other settings as another run.

    Args:
        run: Its directory.
        settings: Keys of its experiment, such as ``steps``, with their new values.
        run_dir: Where another run is written, also where only the steps change; by default RUN-2 beside the run, where
            something else changes.
        stop, callbacks: As in `train_experiment`.

    Raises:
        UserError: The settings cannot be changed in a run that has begun; nothing was changed.
    """
    asked = Continuation.of(Path(run), settings)
    if run_dir is not None or not asked.is_extension:
        return train_experiment(asked.as_own_run, run_dir, stop, callbacks)
    with RunDirectory.reopen(Path(run)) as directory:
        return _go_on(directory, asked.asked.experiment, stop, callbacks, asked)


def _go_on(
    directory: RunDirectory,
    asked_for: Experiment,
    stop: StopRequest | None,
    callbacks: tuple[Callable[[FinishedStep], None], ...],
    extension: Continuation | None = None,
) -> Result:
    """Go on with a run that is locked; an ``extension`` is written down when everything else was checked."""
    tune_machine()
    with ExitStack() as stack:
        resolved = resolve(asked_for)  # a missing GPU is refused before anything is removed
        experiment = resolved.experiment
        console = stack.enter_context(Console(experiment.steps))
        # Nothing is removed before everything has been checked; `truncate_logs` comes last.
        at = find_resume_point(directory, experiment)
        found, step = at.found, at.step
        for said in at.warnings(directory):
            console.warn(said)
        for said in changed_code(latest_session(directory.path), sources_of(experiment)):
            console.warn(said)
        refuse_other_code(latest_session(directory.path), own_code_of(experiment))
        if extension is not None:
            extension.check_extension(found)
        # A finished run is read without preparing its tasks or loading its model.
        if found is not None and at.batches is None and _is_last(found, experiment):
            spent = "" if step >= experiment.steps else ", and its budget is spent"
            console.say(f"{directory.path} is finished: {step} of {experiment.steps} steps{spent}")
            Checkpoints(directory.checkpoints).remove_unfinished()
            return load_run(directory.path)
        # With a checkpoint of its own a run no longer needs its parent.
        parent = ParentRun.of(experiment) if found is None else None
        data, chosen = _prepared(resolved, console)
        _refuse_other_questions(directory, experiment, data, "start a new run")
        _try_rewards(experiment, data, console)
        data = replace(data, judged=JudgeCache(directory.judged))
        inherited = _inherited(parent, experiment, data, chosen, console)
        if extension is not None:
            extension.write(directory)
        truncate_logs(directory, at)
        console.say(f"resuming {directory.path} at step {step} of {experiment.steps}{at.said}")
        session = TrainingContext(resolved, data, chosen, directory, console, callbacks, inherited)
        return _run(session, found, stop)


def export(run: str | Path, folder: str | Path) -> Path:
    """Copy the newest valid checkpoint's Hugging Face files of a run into ``folder``, which must be new or empty.

    Args:
        run: A run's directory; or the folder of a LoRA adapter in peft's form, which is merged into its base.

    Raises:
        RunDirectoryError: If there is no run, no checkpoint, or ``folder`` holds something.
        ModelError: If an adapter is no plain one, or its base is not found.
    """
    check_new(folder)
    place = RunDirectory.named_by(run)
    if is_adapter(place):
        with new_folder(folder) as target:
            write_merged(place, target)
        return target
    source = checkpoint_of(place)
    with new_folder(folder) as target:
        copy_model(place, source, target)
    return target


def export_gguf(run: str | Path, file: str | Path, precision: str | None = None) -> Path:
    """Write the model of a run's newest valid checkpoint as one GGUF file, for llama.cpp and what is built on it.

    Args:
        run: A run's directory, or the folder of a LoRA adapter.
        file: A new file.
        precision: Of the matrices: "f32", "f16", "bf16" or "q8_0"; None is that of the weights.

    Returns:
        The file.

    Raises:
        ConfigError: The precision is unknown, or the gguf package is not installed.
        ModelError: The architecture or tokenizer is not written as GGUF here; the message names what converts it.
        RunDirectoryError: There is no run, no checkpoint, or ``file`` exists or cannot be written.
    """
    place, source = _named(file, "file"), RunDirectory.named_by(run)
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(unknown("precision", precision, PRECISIONS))
    if os.path.exists(place) or not os.path.isdir(place.parent):
        raise RunDirectoryError(f"{place} exists, or its folder does not; name a new file, as {place.stem}.gguf")
    import_optional("gguf", "default-model", "a GGUF file")
    # Written beside the target under a hidden name, and renamed when whole.
    partial_copy = place.with_name(f".{place.name}.part")
    try:
        # GGUF has whole matrices, so an adapter is merged into a copy of its base first, if that can be written.
        name = read_adapter_config(source)[0] if is_adapter(source) else ""
        base = local_folder(name) if name else None
        if base is not None and (base / "tokenizer.json").is_file():
            GgufModel.of(base)
        with TemporaryDirectory() if is_adapter(source) else nullcontext("") as spare:
            if spare:
                write_merged(source, Path(spare))
            source = Path(spare) if spare else checkpoint_of(source)
            model = GgufModel.of(source)
            model.write(partial_copy, precision or model.own_precision)
        partial_copy.rename(place)
    except UserError:  # some are errors of the operating system too
        raise
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{source} lost files while it was read; try again") from error
    except OSError as error:
        raise RunDirectoryError(f"{place} cannot be written: {error.strerror or error}; name another file") from error
    finally:
        with suppress(OSError):
            partial_copy.unlink(missing_ok=True)
    return place


def _named(place: Any, what: str) -> Path:
    if not isinstance(place, str | os.PathLike) or not os.fspath(place) or "\0" in os.fspath(place):
        raise RunDirectoryError(f"{what} is {shortened(repr(place))}; name a new {what}")
    return Path(place)


def check_new(folder: str | Path) -> None:
    """Refuse a folder that holds something, also through a link.

    Raises:
        RunDirectoryError: If it holds something.
    """
    target = _named(folder, "folder")
    if os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
        raise RunDirectoryError(f"{target} exists and is not empty; name a new folder")


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Make a folder that is filled within the block, and is as it was, or not there, where that fails.

    Raises:
        RunDirectoryError: It holds something, or cannot be made.
    """
    check_new(folder)
    target = Path(folder)
    was_there = os.path.exists(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{target} cannot be made: {error.strerror}; name another folder") from error
    try:
        yield target
    except BaseException:
        _empty(target)
        if not was_there:
            target.rmdir()
        raise


def copy_model(run: Path, source: Path, target: Path) -> int:
    """Copy the model of a run's newest valid checkpoint into an empty folder, and return the checkpoint's step.

    Args:
        source: What `checkpoint_of` said; a run that goes on may have removed it since.

    Raises:
        RunDirectoryError: If no checkpoint is whole.
    """
    experiment = load(run / "experiment.toml").experiment
    while not _exported(source, target, experiment):
        # A run that goes on removes the checkpoints before its newest.
        source, before = checkpoint_of(run), source
        if source == before:
            raise RunDirectoryError(f"{source} lost files while it was copied; try again, or name another run")
    return steps_of(str(source))


def _exported(source: Path, target: Path, experiment: Experiment) -> bool:
    """Copy a checkpoint's model; return whether all of it was there to the end. Nothing is left of a part."""
    # A value head is no part of the model, and some engines read every weight file that they find.
    passed_over = ("manifest.json", HEAD_FILE)
    try:
        if experiment.algorithm.ranks_pairs:
            write_reward_model(source, target, experiment.trust_remote_code)
        else:
            copy_files([path for path in source.iterdir() if path.is_file() and path.name not in passed_over], target)
        # Folders that belong to the model; a critic and a run's state are no part of it.
        belongings_of(source, with_code=True).write(target)
        is_whole = source.is_dir()
    except FileNotFoundError:
        is_whole = False
    if not is_whole:
        _empty(target)
    return is_whole


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def evaluate_each(candidates: Sequence[EvalTarget], spec: EvalSpec) -> tuple[Evaluation, ...]:
    """Score each candidate on the same prompts with the same draws; say which of them each run was trained on.

    Raises:
        UserError: If nothing there can be asked.
    """
    found: list[Evaluation] = []
    # Runs whose training data was compared with the questions, and notes that were printed: each is said once.
    said, told = set[Path](), set[str]()
    reference_run = spec.reference_run(candidates)
    asked_of = spec.experiments(candidates)
    with reading_weights([weights for _, weights in asked_of]):
        # All candidates are resolved before the first is asked, so that a missing device is found at once.
        for resolved, weights in [(resolve(e), w) for e, w in asked_of]:
            experiment = resolved.experiment
            if experiment.lora is not None and experiment.engine.kind != "local":
                raise ConfigError(
                    f"engine.kind = '{experiment.engine.kind}' loads whole models, and '{experiment.lora.adapter}' is "
                    "an adapter; set engine.kind = 'local', or merge it into its base model and give that folder"
                )
            check_serving(resolved)
            with Console() as console:
                announce_user_code(experiment, console)
                if reference_run is not None and not found:
                    used = f"{reference_run.model} last used it"
                    effect = "these scores are by the code as it is now, and those that the run recorded by the former"
                    before, sources = latest_session(Path(reference_run.model)), sources_of(experiment)
                    for note in changed_code(before, sources, used, effect):
                        console.warn(note)
                with console.phase("preparing tasks"):
                    # The questions that a run itself held out exist only as the other side of its training split.
                    is_named = bool(spec.tasks) or reference_run is None
                    data = held_out_questions(experiment) if is_named else questions(experiment)
                    if spec.asks_as_begun and reference_run is not None and not found:
                        # Its training has given up its own held-out questions, while they are the same.
                        said |= _held_out_by(reference_run, experiment, data)
                _try_rewards(experiment, data, console)
                slow = resolved.slow_ways(data.mean_prompt_tokens)
                for note in (*data.said, *slow):
                    if note not in told:
                        told.add(note)
                        console.warn(f"{experiment.model}: {note}" if found else note)
                if weights.run is not None and weights.step > 0 and real_path(weights.run) not in said:
                    said.add(real_path(weights.run))
                    for note in _trained_on(weights.run, data):
                        console.warn(f"{weights.run}: {note}" if len(candidates) > 1 else note)
                falls = list(slow)
                with notify_slow(falls.append):
                    graded = grade_once(resolved, data, console, weights.step)
                found.append(replace(graded, slow=tuple(dict.fromkeys(falls))))
    return tuple(found)


def _held_out_by(run: EvalTarget, asked: Experiment, data: TrainingData) -> set[Path]:
    """Return the run if these are the questions that it held out itself; nothing where they are of other files.

    Raises:
        DatasetError: The task is not as the run began with it, so that what it holds out now may be trained on.
    """
    begun = questions_of(RunDirectory(Path(run.model)).card)
    if begun and begun != dataset_fingerprint(data.split.train):
        if asked.evaluation.task or asked.evaluation.tasks:
            return set()
        # Another model, or a setting of this evaluation, may word the same questions otherwise.
        own, _ = EvalSpec().experiments([run])[0]
        fix = f"ask what it was not trained on: gnomon evaluate {quote(str(run.model))} --task FILE"
        _refuse_other_questions(RunDirectory(Path(run.model)), own, questions(own), fix)
    return {real_path(run.model)}


def _trained_on(run: Path, data: TrainingData) -> tuple[str, ...]:
    try:
        experiment = load(run / "experiment.toml").experiment
        trained = questions(experiment)
        _refuse_other_questions(RunDirectory(run), experiment, trained, "ask what it cannot have seen")
        said = overlap(trained.split.train, data.split.held_out).said
    except UserError as error:
        return (f"whether {run} was trained on these questions cannot be told: {error}",)
    if experiment.continue_from is None:
        return said
    # Its weights were trained by the run that it continues, too.
    return tuple(dict.fromkeys((*said, *_trained_on(Path(experiment.continue_from).parent.parent, data))))


def checked(resolved: Resolved, console: Console) -> tuple[TrainingData, PromptChoice, Inheritance | None]:
    """Return what a run asks, what chooses among it, and what it takes over from the run that it continues, if any.

    Every check is made that needs no weight of the model.

    Raises:
        UserError: If something does not fit; it names what to type.
    """
    parent = ParentRun.of(resolved.experiment)
    data, chosen = _prepared(resolved, console)
    _try_rewards(resolved.experiment, data, console)
    return data, chosen, _inherited(parent, resolved.experiment, data, chosen, console)


def _try_rewards(experiment: Experiment, data: TrainingData, console: Console) -> None:
    """Try environment and rewards on made answers to the first questions, and to rows that have fewer columns.

    Raises:
        ConfigError, RewardError: If an environment or a reward fails, or returns what it may not.
        ModelError: If a reward model cannot be used.
    """
    check_reward_models(data.gradings, experiment.cluster.kind != "none")
    check_judging_policy(data.gradings, experiment.engine, PolicyJudge.over(data, experiment.seed))
    if not experiment.rewards and experiment.environment is None:
        return
    is_logged = experiment.rollouts_from is not None
    if (experiment.algorithm.is_supervised or is_logged) and not data.eval_sets:
        return
    # Logged rollouts keep the rewards that they have: only held-out answers are judged.
    tasks = data.split.held_out if is_logged else data.split.train
    questions = [made_answers(t.text, t.columns, t.messages) for t in (tasks[n] for n in range(min(2, len(tasks))))]
    if experiment.environment is not None:
        if experiment.environment.is_agent:
            notes = run_alone(try_agent(experiment.environment, questions, data.templates, data.sampling))
        else:
            notes = try_environment(experiment.environment, questions)
        for note in notes:
            console.warn(note)
    if not experiment.rewards:
        return
    sparse = _sparse(isinstance(experiment.task, ArithmeticTask | ReasoningGymTask), data, tasks)
    questions += sparse.values()
    if experiment.environment is not None:
        # Columns that the rollout of a conversation adds, which a user's reward may read.
        played = {"environment_reward": 0.0, "turns": 1, "ended_by": "done"}
        questions = [[_in_conversation(sample, played) for sample in answers] for answers in questions]
    with console.phase("trying rewards"):
        notes = try_rewards(data.judging, grading_limits(experiment), questions, [*sparse])
    for note in notes:
        console.warn(note)


def _sparse(is_made: bool, data: TrainingData, tasks: TaskSet) -> dict[str, list[Sample]]:
    """Return what a function of the user's is tried on beside the first questions; generators have one form of rows."""
    own = any(isinstance(reward.verifier, UserFunction) for reward in data.judging.rewards)
    if is_made or not own:
        return {}
    held_out = data.split.held_out
    return sparse_rows([tasks] if tasks is held_out else [tasks, held_out])


def _in_conversation(sample: Sample, played: dict[str, Any]) -> Sample:
    said = {"conversation": [{"role": "assistant", "content": sample.completion}]}
    return replace(sample, columns={**sample.columns, **said, **played})


def _refuse_other_questions(directory: RunDirectory, experiment: Experiment, data: TrainingData, fix: str) -> None:
    begun = questions_of(directory.card)
    # Cards of earlier versions have no fingerprint.
    if begun and begun != dataset_fingerprint(data.split.train):
        path = getattr(experiment.task, "path", "")
        raise DatasetError(
            f"the questions of {directory.path} are not those that it began with: a row{f' of {path}' if path else ''},"
            " its order, the tokenizer, its chat template or a generator's version is another; bring the former back, "
            f"or {fix}"
        )


def _prepared(resolved: Resolved, console: Console) -> tuple[TrainingData, PromptChoice]:
    experiment = resolved.experiment
    announce_user_code(experiment, console)
    # Cheapest checks first; tasks are prepared last, since that may read large files.
    check_sinks(experiment.records.sinks)
    check_installed(needed_packages(settings_of(experiment)))
    try_pieces(experiment.algorithm)
    check_settings(resolved)
    critic = experiment.algorithm.critic
    if critic is not None:
        check_critic(experiment.model, critic.initial, experiment.trust_remote_code, critic.trust_remote_code)
    with console.phase("preparing tasks"):
        data = questions(experiment)
        form = try_checkpoint(experiment.model, data.tokenizer, experiment.trust_remote_code, experiment.lora)
        data = replace(data, form=form)
        has_agent = experiment.environment is not None and experiment.environment.is_agent
        return data, build_curriculum(experiment.algorithm, data.split.train, experiment.seed, has_agent)


def is_finished(run_dir: Path, experiment: Experiment) -> bool:
    """Whether a run of this experiment is there and has made its last step; nothing is locked or changed."""
    try:
        found = Checkpoints(RunDirectory(run_dir).checkpoints).newest()
    except CheckpointError:
        return False
    return found is not None and _is_last(found, experiment)


def _is_last(found: CheckpointRef, experiment: Experiment) -> bool:
    """Whether no step comes after this checkpoint, which was verified: all were made, or the budget is spent."""
    # The budget is a part of the checkpoint and is read only where the experiment has one.
    if found.step >= experiment.steps or not experiment.budget.is_set:
        return found.step >= experiment.steps
    return BudgetTracker.of(experiment.budget, found.path).is_spent


def _run(session: TrainingContext, found: CheckpointRef | None, stop: StopRequest | None) -> Result:
    experiment, directory, console = session.experiment, session.directory, session.console
    stop, typed = stop or StopRequest(), quote(str(directory.path))
    with ExitStack() as stack:
        # Other jobs may hold the cluster, so this can take long and is shown.
        with console.phase("waiting for room on the cluster") if experiment.cluster.kind != "none" else nullcontext():
            cluster = open_cluster(session.resolved, console.warn)
        if cluster is not None:
            stack.callback(cluster.close)
        card = replace(_card(session), cluster="" if cluster is None else cluster.said)
        # Before the card is written, since that makes this session the latest one.
        for said in changes(latest_session(directory.path), card):
            console.warn(said)
        write_card(directory.card, card)
        if session.chosen.keys is not None:
            write_keys(directory.prompts, session.chosen.keys)
        for said in card.slow:
            console.warn(said)
        console.say(f"run {directory.path}: {card.reproducibility}")
        stack.enter_context(notify_slow(partial(write_slow, directory.card)))
        failpoint("start")
        stack.enter_context(stop_on_signals(stop, console.say, "this step", f"gnomon resume {typed}"))
        try:
            run_alone(run_training(replace(session, cluster=cluster), found, stop))
        except Stopped as stopped:
            said, number = stopped.args
            raise Stopped(f"{said}; go on with: gnomon resume {typed}", number) from stopped
        except Exception as error:
            # The card then says that the run failed, and how; a run that was killed has no such end.
            with suppress(OSError):
                write_end(directory.card, error)
            if isinstance(error, RunError):
                place = directory.path
                console.say(
                    f"what the run wrote is in {place}: gnomon doctor {typed}; go on with: gnomon resume {typed}"
                )
            raise
        finally:
            # The report is a room that training knows by name only.
            importlib.import_module("gnomon.insight.report.write").leave_page(directory, console)
    return load_run(directory.path)


def _card(session: TrainingContext) -> Card:
    experiment, resolved = session.experiment, session.resolved
    card = run_card(
        resolved.device_name,
        torch.get_num_threads(),
        {"run": experiment.seed},
        str(experiment.learner.precision),
        isolation_of(experiment, session.data.gradings),
        resolved.determinism_limit,
    )
    return replace(
        card,
        native=resolved.native,
        engines="" if experiment.algorithm.is_supervised else describe_engines(resolved),
        slow=resolved.slow_ways(session.data.mean_prompt_tokens),
        foreign_code=foreign_code(experiment),
        seal=seal(read(session.directory.experiment)),
        sources=sources_of(experiment),
        trusted_models=own_code_of(experiment),
        questions=dataset_fingerprint(session.data.split.train),
        settings=hashlib.sha256(read_plain(session.directory.experiment)).hexdigest(),
        parent=experiment.continue_from or "",
    )
