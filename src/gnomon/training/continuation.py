"""A run goes on: what changed since its last session, from which checkpoint, and what may change after its end."""

import hashlib
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes

from gnomon.algorithms.build import to_table as algorithm_table
from gnomon.algorithms.sections import OptimalValue
from gnomon.config.experiment import (
    Experiment,
    Loaded,
    changed,
    from_table,
    steps_of,
    to_toml,
    with_absolute_paths,
)
from gnomon.core.atomic_files import drop_step_files, read_plain, read_plain_text, real_path, write_durably
from gnomon.core.errors import CheckpointError, ConfigError, ModelError, RunDirectoryError
from gnomon.core.redaction import shortened
from gnomon.core.tables import parse_toml, reach_table, to_table, value_at
from gnomon.core.types import State, Stateful
from gnomon.learner.sections import OptimizerConfig
from gnomon.models.remote_code import revision
from gnomon.records.checkpoints import CheckpointRef, Checkpoints, load
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import drop_after, step_rows
from gnomon.records.ownership import check_own
from gnomon.records.reading import RunRecord
from gnomon.records.run_card import Card, end_of, file_digests, newest_session, questions_of, write_extension
from gnomon.rewards.function import UserFunction
from gnomon.rewards.judge import RubricJudge
from gnomon.rollouts.curriculum.base import KeptPrompts, PromptKeys
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.tasks.base import TaskSet
from gnomon.tasks.environment import PYTHON, SHELL
from gnomon.tasks.question import dataset_fingerprint
from gnomon.training.budget import BudgetTracker
from gnomon.training.build_data import PromptChoice, keys_of, questions
from gnomon.training.checkpointing import restored
from gnomon.training.eval_spec import checkpoint_of

# Detect changes since the last session of a run: experiment, versions, hardware, the user's code.

_MOST_DIFFERENCES, _LONGEST_VALUE = 5, 80
_COMMIT = 12
_MACHINE = {"device": "the device", "cpu": "the processor", "threads": "the number of threads"}


def is_begun(run_dir: Path, asked: str) -> bool:
    """Whether a run of this very experiment, as its file has it, is there: the same command goes on with it."""
    try:
        return read_plain(RunDirectory(run_dir).experiment) == asked.encode()
    except OSError:
        return False


def other_experiment(run_dir: Path, asked: str) -> str:
    """Return what differs between the experiment of the run that is there and this file; "" where none can be read."""
    try:
        there = parse_toml(read_plain_text(RunDirectory(run_dir).experiment))
    except (OSError, ValueError, RecursionError):
        return ""
    return listed(differences(there, tomllib.loads(asked))) if there else ""


def changed_settings(there: Any, asked: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the leaves in which two tables differ: path to both values, None where a table has none.

    >>> changed_settings({"a": {"b": 1}}, {"a": {"b": 2}, "c": "x"})
    {'a.b': (1, 2), 'c': (None, 'x')}
    """
    if isinstance(there, dict) and isinstance(asked, dict):
        keys = sorted(there.keys() | asked.keys())
        below = [changed_settings(there.get(key), asked.get(key), f"{path}.{key}".lstrip(".")) for key in keys]
        return {place: values for found in below for place, values in found.items()}
    return {} if there == asked else {path: (there, asked)}


def differences(there: Any, asked: Any) -> list[str]:
    """Return what differs between two tables, one sentence a leaf.

    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": "x"})
    ['a.b is 1 there and 2 here', "c is nothing there and 'x' here"]
    """

    def said(value: Any) -> str:
        return "nothing" if value is None else shortened(repr(value), _LONGEST_VALUE)

    return [f"{path} is {said(a)} there and {said(b)} here" for path, (a, b) in changed_settings(there, asked).items()]


def listed(found: Sequence[str]) -> str:
    """Return the first few differences as one text, and how many more there are.

    >>> listed(["a", "b"])
    'a; b'
    """
    more = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def latest_session(run: Path) -> Mapping[str, Any]:
    """Return what the card says of the run's newest session; nothing where it is new, or its card is damaged."""
    return newest_session(RunRecord(run).card())


def changes(before: Mapping[str, Any], now: Card) -> list[str]:
    """Return what a session is told that does not run on what the one before it ran on; nothing where it does.

    Both are sound runs, but the bits that `Card.reproducibility` promises are of equal versions, processor and threads.
    """
    there = reach_table(before, "versions")
    found = [_went(name, there[name], now.versions[name]) for name in now.versions if name in there]
    found += [_went(called, before[key], getattr(now, key)) for key, called in _MACHINE.items() if key in before]
    # Files that were changed, or an installed copy, have no commit of their own.
    source = _went("gnomon's source", _short(before.get("source")), _short(now.source))
    commits = (_short(value_at(code, "gnomon.commit")) for code in (before.get("code"), now.code))
    found.append(_went("gnomon's source", *commits) or source)
    said = [change for change in found if change]
    told = [f"since the last session {', '.join(said)}: numbers can come out otherwise than without"] if said else []
    if before.get("settings", now.settings) != now.settings:
        told.append("the run's experiment.toml was edited since the last session: steps from here on are another's")
    return told


def announce_user_code(experiment: Experiment, console: Console) -> None:
    """Say what code that is not gnomon's is about to run. What an algorithm names was said when that was loaded."""
    for code in foreign_code(experiment):
        console.say(f"runs your code: {code}")
    tasks = (reward for task in experiment.evaluation.tasks for reward in task.rewards)
    for judge in (r.verifier for r in (*experiment.rewards, *tasks) if isinstance(r.verifier, RubricJudge)):
        console.say(f"asks a judge: {judge.url}, {f'with the key in {judge.variable}' if judge.variable else 'no key'}")
    for model, own in own_code_of(experiment).items():
        console.warn(f"the own code of the model {model} may run (trust_remote_code): {own or 'it brings none'}")


def foreign_code(experiment: Experiment) -> tuple[str, ...]:
    """Return the user's own functions and classes that a run executes, each with what it is.

    They are as the experiment names them, and no name is looked for anywhere else, so nothing else of the user's runs.
    """
    judges = (*experiment.rewards, *(reward for task in experiment.evaluation.tasks for reward in task.rewards))
    named = [f"reward {r.verifier.function}" for r in judges if isinstance(r.verifier, UserFunction)]
    named += [f"engine {experiment.engine.kind}"] if experiment.engine.is_own else []
    plan = experiment.environment
    if plan is not None:
        named += [f"environment {plan.use}"] if plan.use else []
        named += [f"agent {plan.names}"] if plan.command else []
        named += [f"tool {tool}" for tool in plan.tools if tool not in (PYTHON, SHELL)]
    return (*dict.fromkeys(named), *(f"piece {piece}" for piece in _own_pieces(algorithm_table(experiment.algorithm))))


def sources_of(experiment: Experiment) -> dict[str, str]:
    """Return the user's files that a run executes, as the experiment names them, each with its SHA-256."""
    return file_digests(code.partition(" ")[2].rpartition(":")[0] for code in foreign_code(experiment))


def own_code_of(experiment: Experiment) -> dict[str, str]:
    """Return the models whose own code may run, policy and critic, each with what tells that code from any other."""
    critic = experiment.algorithm.critic
    trusted = [experiment.model] if experiment.trust_remote_code else []
    trusted += [critic.initial] if critic is not None and critic.trust_remote_code else []
    return {model: revision(model) for model in trusted}


def refuse_other_code(before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Refuse a model's own code that is not what ran in the session before: nobody has said that it is trusted.

    Raises:
        ModelError: If it is another; none of it has run.
    """
    there = reach_table(before, "trusted_models")
    for model, own in now.items():
        if there.get(model, own) != own:
            raise ModelError(
                f"the own code of the model {model} is not what this run trusted so far: that was "
                f"{there[model] or 'none'}, and it is {own or 'none'} now; bring the former back, or read the new one "
                "and start another run with --run-dir DIR"
            )


def changed_code(
    before: Mapping[str, Any],
    sources: Mapping[str, str],
    used: str = "this run last used it",
    effect: str = "earlier steps were made with the former code; to make all of them with the new one, start another "
    "run with --run-dir DIR",
) -> list[str]:
    """Return a sentence for each of the user's files that is not as it was in the session before."""
    there = reach_table(before, "sources")
    return [
        f"{name} has changed since {used}: {effect}"
        for name, digest in sources.items()
        if there.get(name, digest) != digest
    ]


def _own_pieces(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(piece := node.get("piece"), str) and ":" in piece:
            yield piece
        node = list(node.values())
    for below in node if isinstance(node, list) else ():
        yield from _own_pieces(below)


def _went(what: str, there: Any, here: Any) -> str:
    is_change = there is not None and here is not None and there != here
    return f"{what} went from {shortened(str(there), _LONGEST_VALUE)} to {here}" if is_change else ""


def _short(said: Any) -> str | None:
    return said[:_COMMIT] if isinstance(said, str) and said else None


# Find the checkpoint to resume from, and truncate the logs to the checkpoint's step.


@dataclass(frozen=True)
class ResumePoint:
    """The place from which a run goes on.

    Attributes:
        found: The newest sound checkpoint; None at the beginning.
        batches: How many batches of value pretraining the run has made; None when that phase is over, or the run has no
            such phase.
        first: Steps that were made by the run that this one continues.
    """

    found: CheckpointRef | None
    batches: int | None = None
    first: int = 0

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.first if self.found is None else self.found.step

    @property
    def said(self) -> str:
        """What a person is told beside the step."""
        return "" if self.batches is None else f", after batch {self.batches} of value pre-training"

    def warnings(self, directory: RunDirectory) -> Iterator[str]:
        """Yield what is not as a run leaves it."""
        yield from () if self.found is None else self.found.warnings
        if self.found is None:
            kept = "; what it recorded is kept in a folder former-N" if _recorded(directory) else ""
            yield f"{directory.path} has no checkpoint yet, so it begins again at step {self.first}{kept}"
        missing = self.step - self.first - sum(step <= self.step for step in _recorded(directory))
        if missing > 0:
            yield (
                f"{directory.metrics} lacks {missing} of the {self.step} steps before this checkpoint: they were made, "
                "and will not be made again, so curves and totals go without them"
            )


def find_resume_point(directory: RunDirectory, experiment: Experiment) -> ResumePoint:
    """Return where the run stands; nothing is changed.

    Raises:
        CheckpointError: If all checkpoints are damaged.
        RunDirectoryError: If they are gone though the run had some: it would be begun again over its own records.
    """
    plan = experiment.checkpoints
    # A file or a broken link there would read as "no checkpoint", and the run would begin again over its records.
    for folder in (directory.checkpoints, directory.pretraining_checkpoints):
        if os.path.lexists(folder) and not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder; bring back the checkpoints, or move away what is there")
    found = Checkpoints(directory.checkpoints, plan.keep_last, plan.keep_every or None).newest()
    # Checkpoints of value pre-training count batches; the training step is 0 in all of them.
    if found is None and (found := Checkpoints(directory.pretraining_checkpoints).newest()) is not None:
        return ResumePoint(replace(found, step=0), found.step)
    if found is None:
        _refuse_lost(directory, plan.every, experiment.first_step)
    return ResumePoint(found, first=experiment.first_step)


def truncate_logs(directory: RunDirectory, at: ResumePoint) -> None:
    """Remove what was written after the checkpoint; it will be written again. Without one everything is set aside."""
    kept = -1 if at.found is None else at.step
    if at.found is None:
        directory.set_aside()
    if at.batches is None:
        # Over, or never saved: a crash may have left its folder behind.
        shutil.rmtree(directory.pretraining_checkpoints, ignore_errors=True)
    # The pre-training log is cut by batches, the others by steps.
    if at.batches is not None:
        drop_after(directory.pretraining, at.batches)
    Checkpoints(directory.checkpoints).remove_unfinished()
    for left in directory.path.glob(".*.tmp"):
        left.unlink(missing_ok=True)
    # -1 without a checkpoint: nothing is kept.
    for path in (directory.metrics, directory.evaluations, directory.findings):
        drop_after(path, kept)
    for folder, suffix in ((directory.answers, "jsonl"), (directory.rollouts, "jsonl"), (directory.batches, "json")):
        drop_step_files(folder, suffix, kept)


def _refuse_lost(directory: RunDirectory, every: int, first: int) -> None:
    # Metrics may be damaged, and rollouts show how far the run came.
    made = max([*_recorded(directory), *RunRecord(directory.path).rollout_steps()], default=first) - first
    if directory.saved.exists() or _must_have_saved(directory, every, made):
        raise RunDirectoryError(
            f"{directory.checkpoints} has no checkpoint, though {made} steps were made and some were saved: they are "
            "gone, or on a disk that is not mounted; nothing was changed. Bring them back; or begin again as another "
            f"run: gnomon train {quote(str(directory.experiment))} --run-dir DIR"
        )


def _must_have_saved(directory: RunDirectory, every: int, made: int) -> bool:
    """Whether a run without a mark of having saved, for example an older version's, saved all the same."""
    if directory.checkpoints.is_dir() and any(directory.checkpoints.glob(".tmp-*")):
        return every > 0 and made > 2 * every
    # A checkpoint is on the disk before the next one is begun, and that comes after its step's metrics.
    due = every * (2 if directory.checkpoints.is_dir() else 1)
    record = RunRecord(directory.path)
    return (every > 0 and made > due) or (record.made_its_last() and not end_of(record.card()))


def _recorded(directory: RunDirectory) -> set[int]:
    """Return the steps that have metrics."""
    return {row["step"] for row in step_rows(directory.metrics)}


LENGTH = ("steps", "budget.tokens", "budget.seconds")
"""Settings that say how long a run is, and that may change within it."""
_REMEMBERING = ("tracker", "drift", "replay")


@dataclass(frozen=True)
class Continuation:
    """A run, and the experiment that it is to go on with.

    Attributes:
        run: The run's directory.
        begun: The experiment of the run as it is recorded.
        asked: The experiment that is asked for now, and what was understood in other words.
    """

    run: Path
    begun: Experiment
    asked: Loaded

    @classmethod
    def of(cls, run: Path, settings: Sequence[tuple[str, Any]]) -> Self:
        """Return the continuation of a run with some settings changed.

        Args:
            run: The run's directory. Nothing that it names is executed unless this user began the run.
            settings: Paths such as "steps" with their new values.

        Raises:
            UserError: There is no run, another user began it and it names code, or a setting is not what it may be.
        """
        begun, asked = changed(run, settings)
        return cls(run, begun, replace(asked, experiment=with_absolute_paths(asked.experiment)))

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ: path to the value at the beginning and the value now."""
        there, now = (tomllib.loads(to_toml(each)) for each in (self.begun, self.asked.experiment))
        return changed_settings(there, now)

    @property
    def is_extension(self) -> bool:
        """Whether only the run's length changes; a budget that it did not have was not counted either."""
        return all(key in LENGTH and (key == "steps" or was) for key, (was, _) in self.changed.items())

    @property
    def as_own_run(self) -> Loaded:
        """The experiment of another run, which begins with the newest checkpoint of this one."""
        return replace(self.asked, experiment=replace(self.asked.experiment, continue_from=str(self.run)))

    def check_extension(self, found: CheckpointRef | None) -> None:
        """Refuse what would not give the numbers of a run that had asked for as many steps from the beginning.

        Args:
            found: The checkpoint from which the run goes on.

        Raises:
            ConfigError: The message says what to type instead.
        """
        typed = quote(str(self.run))
        if found is None:
            raise ConfigError(
                f"{self.run} has no checkpoint, so there is nothing to continue; gnomon resume {typed} begins it again"
            )
        made, asked, before = found.step, self.asked.experiment.steps, self.begun.steps
        if asked < made:
            raise ConfigError(
                f"steps = {asked} counts from the beginning of the run, of which {made} are made; type "
                f"steps={made + 1} or more"
            )
        plan = self.begun.learner.optimizer
        # A schedule that reads the number of steps would have given the steps already made other rates.
        rates = ((plan.learning_rate_at(step, before), plan.learning_rate_at(step, asked)) for step in range(made))
        if any(was != now for was, now in rates):
            raise ConfigError(
                f'learner.optimizer.schedule = "{plan.schedule}" made the learning rates of the {made} steps that are '
                f"made depend on steps = {before}, so a run of {asked} steps would have had others; to go on with its "
                f"weights and moments as another run: gnomon continue {typed} steps={asked} --run-dir DIR"
            )

    def write(self, directory: RunDirectory) -> None:
        """Write the experiment into a run that is locked, and note that in the card; nothing where it is there."""
        if not self.changed:
            return
        written = to_toml(self.asked.experiment).encode()
        write_durably(directory.experiment, written)
        digest = hashlib.sha256(written).hexdigest()
        write_extension(directory.card, digest, self.changed)


@dataclass(frozen=True)
class ParentRun:
    """The run whose checkpoint another one begins with.

    Attributes:
        checkpoint: The folder of the checkpoint.
        begun: The experiment of the run.
    """

    checkpoint: Path
    begun: Experiment

    @classmethod
    def of(cls, experiment: Experiment) -> "ParentRun | None":
        """Return the parent of an experiment whose ``continue_from`` is a checkpoint; None where it continues none.

        Raises:
            UserError: There is no such checkpoint; another user began the run and it names code; or the experiment
                changes what a continued run cannot change.
        """
        if experiment.continue_from is None:
            return None
        checkpoint = Path(experiment.continue_from)
        run = checkpoint.parent.parent
        if not (checkpoint / "manifest.json").is_file():
            raise RunDirectoryError(
                f"continue_from = '{checkpoint}' is no checkpoint of a run any more; bring it back, or begin another "
                f"run from what {run} has: gnomon continue {quote(str(run))}"
            )
        table = RunDirectory(run).table()
        check_own(run, table)
        parent = cls(checkpoint, from_table(table).experiment)
        parent._check(experiment)
        return parent

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.checkpoint.parent.parent

    @property
    def step(self) -> int:
        """Steps that were made."""
        return steps_of(str(self.checkpoint))

    @property
    def remembers(self) -> bool:
        """Whether its checkpoint holds something of each prompt."""
        return any((self.checkpoint / "state" / f"{name}.json").is_file() for name in _REMEMBERING)

    def keys(self) -> PromptKeys:
        """Return the keys of its training prompts, which it wrote down; an older version's are listed again.

        Raises:
            ConfigError: Nothing is written, and its questions are not those that it began with any more.
        """
        directory = RunDirectory(self.run)
        try:
            found = read_tensors(read_plain(directory.prompts))
            # safetensors has no unsigned 64-bit integers, so keys are stored as signed ones with the same bits.
            ids, contents, prompts = (found[name].numpy().view(np.uint64) for name in ("ids", "contents", "prompts"))
            if ids.ndim == 1 and ids.shape == contents.shape == prompts.shape:
                return PromptKeys(ids, contents, prompts)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError):
            # Unreadable or of an earlier version: the keys are computed again, if the questions are still the same.
            pass
        tasks = questions(self.begun).split.train
        if dataset_fingerprint(tasks) != questions_of(directory.card):
            raise ConfigError(
                f"what {self.run} knows of its prompts cannot be kept: {directory.prompts.name} is not there (earlier "
                "versions wrote none), and the questions that it began with have changed since; bring those back, or "
                f"begin with its weights alone: gnomon train {quote(f'{self.run}/experiment.toml')} "
                f"model={quote(str(self.checkpoint))} --run-dir DIR"
            )
        return keys_of(tasks)

    def _check(self, asked: Experiment) -> None:
        """Refuse what weights, moments and draws of the checkpoint do not allow.

        Raises:
            ConfigError: If such a setting changed; it names what to type.
        """
        there, now = _unchangeable(self.begun), _unchangeable(asked)
        for key, value in now.items():
            if value != there.get(key, "none"):
                raise ConfigError(
                    f"{key} is {there.get(key, 'none')} in {self.run}, whose weights, moments and draws go on, and "
                    f"cannot become {value}; leave it as it was, or begin with the weights alone: gnomon train "
                    f"{quote(f'{self.run}/experiment.toml')} model={quote(str(self.checkpoint))} --run-dir DIR"
                )
        if asked.steps <= self.step:
            raise ConfigError(
                f"steps = {asked.steps} counts from the beginning of {self.run}, of which {self.step} are made; type "
                f"steps={2 * self.step or 1}, or another number above {self.step}"
            )
        # Read now, from the parent's checkpoint: the child counts on from there.
        meter = BudgetTracker.of(asked.budget, self.checkpoint)
        if meter.is_spent:
            raise ConfigError(
                f"the budget counts from the beginning of {self.run}, which has generated {meter.tokens:,} tokens: it "
                "is spent; raise budget.tokens or budget.seconds"
            )


def _unchangeable(experiment: Experiment) -> dict[str, str]:
    """Return what a continued run cannot change, in words, by key."""
    critic, lora = experiment.algorithm.critic, experiment.lora
    pretraining = None if critic is None else critic.pretraining
    return {
        "model": f"'{with_absolute_paths(experiment).model}'",
        "lora": "none" if experiment.lora is None else "an adapter",
        **{f"lora.{key}": repr(value) for key, value in ({} if lora is None else to_table(lora)).items()},
        "seed": f"{experiment.seed}",
        "algorithm.critic": "none" if critic is None else f"one with a {critic.trunk} trunk",
        "algorithm.critic.pretraining": "none" if pretraining is None else f"{pretraining}",
        "algorithm.proximal": "an average of past weights" if experiment.algorithm.proximal else "none",
    }


def settled(experiment: Experiment) -> Experiment:
    """Return the experiment with an absolute ``continue_from``, the newest sound checkpoint where that is a run.

    Newer checkpoints that are damaged are warned of.

    Raises:
        RunDirectoryError: There is no run, or it has no checkpoint.
        CheckpointError: All its checkpoints are damaged.
    """
    if experiment.continue_from is None:
        return experiment
    place = real_path(Path(experiment.continue_from))
    # Either a checkpoint itself or the directory of a run.
    if place.parent.name != "checkpoints" or not (place / "manifest.json").is_file():
        place = checkpoint_of(place)
    return replace(experiment, continue_from=str(place))


@dataclass(frozen=True)
class Inheritance:
    """What a run takes over from the checkpoint of another one.

    Attributes:
        parent: The other run.
        tasks: The training prompts of this run.
        is_same: Whether the prompts are the other run's, in its order.
        has_same_rewards: Whether values of prompts are means of the same reward.
        kept: Which prompts were there; None where that is not known, or nothing is remembered of prompts.
    """

    parent: ParentRun
    tasks: TaskSet
    is_same: bool
    has_same_rewards: bool
    kept: KeptPrompts | None

    @classmethod
    def of(cls, parent: ParentRun, experiment: Experiment, tasks: TaskSet, chosen: PromptChoice) -> Self:
        """Return what a run of ``experiment`` takes over.

        Raises:
            ConfigError: What is known of prompts cannot be kept.
        """
        begun = parent.begun
        # Same questions in the same order: then indices mean the same prompts, and no keys need to be compared.
        is_same = questions_of(RunDirectory(parent.run).card) == dataset_fingerprint(tasks)
        judged = (begun.rewards, begun.environment) == (experiment.rewards, experiment.environment)
        reads = chosen.keys is not None and parent.remembers and judged and not is_same
        kept = chosen.keys.kept_of(parent.keys()) if reads and chosen.keys is not None else None
        plan = experiment.algorithm.tracker
        is_sampled = isinstance(plan, OptimalValue) and plan.initial == "samples" and chosen.tracker is not None
        if is_sampled and kept is not None and kept.new:
            raise ConfigError(
                f"{len(kept.new):,} prompts are new, and algorithm.tracker.initial = 'samples' estimates values of the "
                "policy that a run began with, which is trained by now; name a file of values, or leave the new "
                "prompts out"
            )
        return cls(parent, tasks, is_same, judged, kept)

    @property
    def unknown(self) -> Sequence[int]:
        """The prompts of which nothing is known."""
        if self.kept is not None:
            return self.kept.new
        return range(0 if self.is_same and self.has_same_rewards and self.parent.remembers else len(self.tasks))

    def said(self, experiment: Experiment) -> Iterator[str]:
        """Yield what is kept and what is not, in words."""
        before, now, step = self.parent.begun, experiment, self.parent.step
        yield f"continues {self.parent.run} from step {step}: its weights and moments are kept"
        if self.parent.remembers and not self.has_same_rewards:
            yield "values of prompts are not kept: the rewards are others"
        elif self.kept is not None:
            yield f"kept the values of {self.kept.said}"
        elif self.is_same:
            yield f"the {len(self.tasks):,} prompts are the same, and what is known of them is kept"
        last = _rate(before.learner.optimizer, max(step - 1, 0), before.steps)
        first = _rate(now.learner.optimizer, step, now.steps)
        if first != last:
            yield f"the learning rate was {last} in step {step} and is {first} in step {step + 1}"

    def restore(self, parts: Mapping[str, Stateful], chosen: PromptChoice, stream: RolloutScheduler) -> list[str]:
        """Let the parts of a run become what they were in the checkpoint, each prompt's where it stands now.

        Returns:
            The parts that begin anew, in words.

        Raises:
            CheckpointError: The checkpoint is damaged, or a part does not fit.
        """
        saved = load(self.parent.checkpoint, lazily=("learner",))
        moves = self._moves(chosen, stream)
        anew: list[str] = []
        for name, part in parts.items():
            state = saved.get(name)
            # Other parts must fit, and raise where they do not; what is remembered of prompts may be of another kind.
            own = part.state() if name in ("curriculum", *_REMEMBERING) else None
            is_alike = state is not None and (own is None or _form(own) == _form(state))
            # "arrival" calibrates the engines of this session and begins anew without a remark.
            if state is None or not is_alike or name == "arrival" or name in self._forgotten():
                anew += [] if name == "arrival" else [name]
                continue
            with restored(name, self.parent.checkpoint):
                part.restore(moves.get(name, _as_it_is)(state))
        return [f"nothing of {self.parent.run} fits what this run has as {name}, which begins anew" for name in anew]

    def _forgotten(self) -> tuple[str, ...]:
        """Return the parts of which nothing can be kept: of other rewards, or of prompts that cannot be compared."""
        is_known = self.has_same_rewards and (self.is_same or self.kept is not None)
        return () if is_known else _REMEMBERING

    def _moves(self, chosen: PromptChoice, stream: RolloutScheduler) -> dict[str, Callable[[State], State]]:
        kept = self.kept
        # None leaves indices as they are; an empty mapping drops every prompt in flight.
        places = None if self.is_same else {} if kept is None else kept.successors
        moves: dict[str, Callable[[State], State]] = {"stream": lambda state: stream.moved(state, places)}
        if self.is_same:
            return moves
        moves["curriculum"] = lambda state: chosen.curriculum.moved(state, kept)
        if kept is not None and chosen.tracker is not None:
            tracker = chosen.tracker
            moves["tracker"] = lambda state: tracker.moved(state, kept)
            moves["drift"] = lambda state: chosen.drift.moved(state, kept)
        if kept is not None and chosen.replay is not None:
            replay = chosen.replay
            moves["replay"] = lambda state: replay.moved(state, kept, self.tasks)
        return moves


def write_keys(path: Path, keys: PromptKeys) -> None:
    """Write the keys of a run's prompts, once: a run keeps its prompts."""
    if not path.exists():
        tensors = {name: torch.from_numpy(value.view(np.int64)) for name, value in vars(keys).items()}
        write_durably(path, tensor_bytes(tensors))


def _as_it_is(state: State) -> State:
    return state


def _form(state: State) -> tuple[set[str], set[str]]:
    return set(state.values), set(state.tensors)


def _rate(plan: OptimizerConfig, step: int, steps: int) -> str:
    return f"{plan.learning_rate_at(step, steps):.3g}"
