"""Which weights are asked which held-out questions: from what a person names to the experiments that answer."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from gnomon.config.experiment import Experiment, from_table
from gnomon.config.reading import check_evaluation, no_task, parse_override, read
from gnomon.core.errors import CheckpointError, ConfigError, RunDirectoryError
from gnomon.core.tables import check_types, to_table
from gnomon.records.checkpoints import Checkpoints
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import warn_on_stderr
from gnomon.records.manifest import verify
from gnomon.records.ownership import check_own
from gnomon.rewards.reasoning import Reasoning
from gnomon.tasks.benchmarks import BenchmarkTask
from gnomon.tasks.build import named, own_rewards
from gnomon.tasks.tables import TableTask

PROMPTS = 200
"""Questions of a named task, unless something else is said."""
WHOLE = 10_000_000
"""More questions than any test set has."""
BEST, NEWEST = "best", "newest"


@dataclass(frozen=True)
class EvalTarget:
    """What is evaluated.

    Attributes:
        model: A run, a model's folder, or its name.
        checkpoint: Which checkpoint of a run: "newest", "best", or the number of steps after which it was saved; 0 is
            the model that the run began with.
    """

    model: str | Path
    checkpoint: int | str = NEWEST

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike):
            raise ConfigError(
                f"what is evaluated is a run, a model's folder or its name, not {type(self.model).__name__}"
            )
        object.__setattr__(self, "model", os.fspath(self.model))
        if isinstance(self.checkpoint, str) and self.checkpoint not in (BEST, NEWEST):
            raise ConfigError(
                f"a checkpoint is {BEST}, {NEWEST} or a number of steps such as 24, got '{self.checkpoint}'"
            )
        if self.checkpoint != NEWEST and not self.is_run:
            raise ConfigError(
                f"{self.model} has no checkpoint {self.checkpoint}: no run directory was found there (experiment.toml)"
            )

    @property
    def is_run(self) -> bool:
        """Whether it is a run's directory."""
        return os.path.isfile(Path(self.model) / "experiment.toml")


@dataclass(frozen=True)
class Weights:
    """A candidate, found.

    Attributes:
        model: A folder or a name.
        step: Step of its run, 0 for the model that it began with.
    """

    model: str
    step: int = 0
    run: Path | None = None


@dataclass(frozen=True)
class EvalSpec:
    """What is asked.

    Attributes:
        tasks: Names as in TOML; none asks the held-out questions of the first run among the candidates.
        samples: Answers a question; None is 1, or as many as each of a run's held-out sets asks for.
        prompts: Prompts of each named task; None asks 200, or the whole of a benchmark.
        overrides: ``key=value``.
    """

    tasks: tuple[str, ...] = ()
    samples: int | None = None
    prompts: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "evaluate")
        if self.prompts is not None and self.prompts < 1:
            raise ConfigError(f"--prompts must be at least 1, got {self.prompts}")
        check_evaluation(self.overrides)

    def experiments(self, candidates: Sequence[EvalTarget]) -> list[tuple[Experiment, Weights]]:
        """Return for each candidate the experiment that asks its weights: alike in everything else.

        All are asked as the first run among them asks: its questions unless others are named, its system message, its
        sampling, its seed. So the same sample of the same prompt is drawn with the same random numbers.

        Raises:
            ConfigError: If an override is no setting.
            RunDirectoryError, CheckpointError: If a run or its checkpoint is not there, or is damaged.
        """
        reference_run = self.reference_run(candidates)
        if not self.tasks and reference_run is None and not self._sets:
            raise no_task(str(candidates[0].model))
        if not self.tasks and self.prompts is not None:
            source = reference_run.model if reference_run else "evaluation.tasks"
            raise ConfigError(
                f"--prompts {self.prompts} is of a task that is named with --task; without one all questions that "
                f"{source} held out are asked: leave --prompts out, or name it"
            )
        # Without a run any preset serves: an evaluation trains nothing.
        begun: Mapping[str, Any] = {"algorithm": "grpo"} if reference_run is None else read(_experiment(reference_run))
        # A run of another user may name code, which must not run just because its weights are evaluated.
        for run in (Path(candidate.model) for candidate in candidates if candidate.is_run):
            check_own(run, read(run / "experiment.toml"))
        return [(self._experiment(begun, weights), weights) for weights in map(find_weights, candidates)]

    @property
    def _sets(self) -> list[Any]:
        """What an override names as ``evaluation.tasks``: names, and tables with samples and sampling of their own."""
        found = dict(map(parse_override, self.overrides)).get("evaluation.tasks")
        return found if isinstance(found, list) else []

    @property
    def asks_as_begun(self) -> bool:
        """Whether the questions are those that the first run itself held out: no task and no part of one is named."""
        parts = ("task", "held_out", "evaluation.task", "evaluation.tasks", "environment")
        changed = (text.partition("=")[0] for text in self.overrides)
        return not self.tasks and not any(key == p or key.startswith(f"{p}.") for key in changed for p in parts)

    def reference_run(self, candidates: Sequence[EvalTarget]) -> EvalTarget | None:
        """Return the first run, as which all are asked; None where there is none."""
        return next((c for c in candidates if c.is_run), None)

    def _experiment(self, begun: Mapping[str, Any], weights: Weights) -> Experiment:
        table = {**begun, "model": weights.model}
        table.pop("lora", None)  # it is merged into the checkpoint
        # A model that is no checkpoint still needs the adapter that the run began with.
        if weights.run is not None and Path(weights.model).parent.name != "checkpoints":
            lora = read(weights.run / "experiment.toml").get("lora", {})
            table |= {"lora": lora} if "adapter" in lora else {}
        if self.tasks:
            table |= self._asked(table)
            asked = [named(task) for task in self.tasks]
            if not any(isinstance(task, TableTask) for task in asked):
                table.pop("rewards", None)
            elif not table.get("rewards"):
                table["rewards"] = _judges(begun)
        elif "task" not in table and self._sets:
            # An experiment needs a task, though only its evaluation sets are asked.
            asked_first = self._sets[0].get("task") if isinstance(self._sets[0], Mapping) else self._sets[0]
            table["task"] = (
                to_table(named(asked_first)) if isinstance(asked_first, str) else asked_first or "arithmetic"
            )
        # One sample a prompt unless more are asked for; sets with a number of their own keep it.
        samples = [f"evaluation.samples={1 if self.samples is None else self.samples}"]
        experiment = from_table(table, [*samples, *self.overrides]).experiment
        # An explicit number of samples is for all sets, over what each of them asks for.
        if self.samples is None or not experiment.evaluation.tasks:
            return experiment
        tasks = tuple(replace(task, samples=None) for task in experiment.evaluation.tasks)
        return replace(experiment, evaluation=replace(experiment.evaluation, tasks=tasks))

    def _asked(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of an experiment that ask the named tasks, drawn as the run's own held-out ones."""
        evaluation = {key: value for key, value in table.get("evaluation", {}).items() if key == "sampling"}
        sizes = [
            WHOLE if self.prompts is None and isinstance(named(task), BenchmarkTask) else self.prompts or PROMPTS
            for task in self.tasks
        ]
        if len(self.tasks) == 1:
            own = {"task": to_table(named(self.tasks[0])), "held_out": {**table.get("held_out", {}), "size": sizes[0]}}
            return {**own, "evaluation": evaluation}
        tasks = [{"task": task, "size": size} for task, size in zip(self.tasks, sizes, strict=True)]
        return {"task": to_table(named(self.tasks[0])), "evaluation": {**evaluation, "tasks": tasks}}


def _judges(begun: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what judges a file of questions when a run names no reward: what judges the run's own task, if it can.

    Nothing where it cannot, where an environment gives the reward, or where there is no run: whoever evaluates is then
    asked to name one.
    """
    if "task" not in begun or "environment" in begun:
        return []
    try:
        rewards = own_rewards(from_table(begun).experiment.task)
    except ConfigError:
        return []
    # A generator's scorer knows that generator's questions alone.
    return [to_table(reward) for reward in rewards if not isinstance(reward.verifier, Reasoning)]


def find_weights(candidate: EvalTarget) -> Weights:
    """Return where a candidate's weights are.

    Raises:
        RunDirectoryError: If a run has no such checkpoint, naming those that it has.
        CheckpointError: If it is damaged.
    """
    if not candidate.is_run:
        return Weights(str(candidate.model))
    run = Path(candidate.model)
    if candidate.checkpoint == NEWEST:
        path = checkpoint_of(run)
    elif candidate.checkpoint == BEST:
        path = _best(run)
    else:
        path = RunDirectory(run).checkpoints / f"step-{candidate.checkpoint}"
        # A run with value pre-training keeps a checkpoint 0, with the model's first weights and its critic.
        if candidate.checkpoint == 0 and not path.is_dir():
            return Weights(str(read(_experiment(candidate))["model"]), 0, run)
        _require(path, run)
    return Weights(str(path), int(path.name.removeprefix("step-")), run)


@contextmanager
def reading_weights(all_weights: Sequence[Weights]) -> Iterator[None]:
    """Say during the block that a run which goes on removed the checkpoint that is read, where that is why it failed.

    Raises:
        RunDirectoryError: A checkpoint went while it was read.
    """
    try:
        yield
    except Exception as error:
        for weights in all_weights:
            # Whatever the error was, a folder that is gone explains it.
            if weights.run is not None and weights.step > 0 and not Path(weights.model).is_dir():
                run = quote(str(weights.run))
                raise RunDirectoryError(
                    f"{weights.run} goes on and removed {Path(weights.model).name} while it was read; try again, "
                    f"or take a copy first: gnomon export {run} my-model, then gnomon evaluate my-model\n"
                    "checkpoints.keep_last and checkpoints.keep_every keep more of them"
                ) from error
        raise


def checkpoint_of(run: Path) -> Path:
    """Return the newest valid checkpoint of a run, with a warning where a newer one is damaged.

    Raises:
        RunDirectoryError: If there is none.
    """
    RunDirectory.check(run)
    found = Checkpoints(RunDirectory(run).checkpoints).newest()
    if found is None:
        raise RunDirectoryError(f"{run} has no checkpoint yet; `gnomon resume {quote(str(run))}` goes on with it")
    for said in found.warnings:
        warn_on_stderr(f"{said}; the one after step {found.step} is")
    return found.path


def _best(run: Path) -> Path:
    path = Checkpoints(RunDirectory(run).checkpoints).best()
    if path is None:
        raise RunDirectoryError(
            f"{run} has no best checkpoint: no evaluation after a step was better than the one before training; "
            f"evaluate that model with --checkpoint 0, the last one with --checkpoint {NEWEST}"
        )
    _require(path, run)
    return path


def _require(path: Path, run: Path) -> None:
    if not path.is_dir():
        steps = sorted(p.name for p in RunDirectory(run).checkpoints.glob("step-*"))
        kept = ", ".join(name.removeprefix("step-") for name in steps) or "none"
        raise RunDirectoryError(
            f"{run} has no checkpoint {path.name.removeprefix('step-')}; it has those after steps: {kept} "
            f"(checkpoints.keep_every keeps more); {BEST}, {NEWEST} and 0, the model before training, have names"
        )
    try:
        verify(path)
    except CheckpointError as error:
        raise RunDirectoryError(f"{error}; evaluate another checkpoint of {run}") from error


def _experiment(candidate: EvalTarget) -> Path:
    return Path(candidate.model) / "experiment.toml"
