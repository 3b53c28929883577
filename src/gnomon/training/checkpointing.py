"""What a run saves: its parts, each of them, while the run goes on."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gnomon.config.experiment import Experiment
from gnomon.core.errors import CheckpointError, ConfigError, GnomonError
from gnomon.core.metrics import Metrics, Sum
from gnomon.core.progress import show_progress
from gnomon.core.types import State, Stateful
from gnomon.engines.pool import EnginePool
from gnomon.learner.base import SavableLearner
from gnomon.models.folder import Belongings
from gnomon.models.tokenizer import Tokenizer
from gnomon.records.background import Background
from gnomon.records.checkpoints import CheckpointRef, Checkpoints, check_form, load
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.memory import free_memory_bytes
from gnomon.records.rng_state import Generators
from gnomon.records.state_audit import unsaved_generators, unsaved_state
from gnomon.rewards.budget import ErrorBudget, FaultBudget
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rollouts.agent import AgentEndpoint, PolicyTemplates
from gnomon.rollouts.curriculum.base import KeptPrompts, PromptKeys
from gnomon.rollouts.curriculum.drift import NoDrift
from gnomon.rollouts.env_workers import EnvWorkers
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.training.build_data import PromptChoice, TrainingData
from gnomon.training.nonfinite_guard import NonFiniteGuard
from gnomon.training.resolve import Resolved
from gnomon.training.run import Run, StopRequest
from gnomon.training.run_logger import RunLogger
from gnomon.training.weight_sync import VerifiedWeightSync

GIB = 1 << 30
# 64 MiB: to write and read a larger model again would delay the start.
_REHEARSED_BYTES = 64 << 20


@dataclass
class Saver:
    """Publishes checkpoints of a run's parts.

    The learner lends its masters and moments, everything else is copied, and the run goes on; what is written, synced,
    hashed and named in the background is as it was then, for whatever is still lent is copied before it changes
    (`Loan`). So memory may hold everything a second time; where so much is not free, the run waits for the disk
    instead, and says so once. One checkpoint is written at a time: a second one waits for the first.

    Attributes:
        parts: The parts, by the names that they have in a checkpoint.
        learner: One of them, which writes the model.
        background: Raises what writing raised, see there.
        belongings: Files of the model's folder that go along into each of them.
    """

    checkpoints: Checkpoints
    parts: Mapping[str, Stateful]
    learner: SavableLearner
    tokenizer: Tokenizer
    console: Console
    background: Background
    belongings: Belongings = Belongings()
    _copied: float = 0.0
    _is_told: bool = False

    def save(self, step: int, is_best: bool = False) -> None:
        """Publish the checkpoint of ``step``, sooner or later.

        Args:
            is_best: Keep it until a better one comes.

        Raises:
            CheckpointError: As `Checkpoints.save`, or what the one before met.
        """
        with self.console.phase(f"saving {self.checkpoints.directory.name}/step-{step}"):
            self.background.settle()
            free, began = free_memory_bytes(), time.perf_counter()
            states = {n: self.learner.lend() if p is self.learner else p.state() for n, p in self.parts.items()}
            # Lending copies a tensor when it is about to change; where memory cannot hold that, the run waits instead.
            is_short = self.background.is_asynchronous and self._is_short(free, states)
            is_waited_for = is_short or not self.background.is_asynchronous
            model = self.learner.write_model if is_waited_for else self.learner.model_writer()
            self._copied += time.perf_counter() - began
            files = partial(_write, [model, self.tokenizer.save, self.belongings.write])
            size = self.learner.model_bytes
            self.background.begin(lambda: self.checkpoints.save(step, states, files, is_best, size), is_waited_for)

    def rehearse(self, check: Callable[[Path], None]) -> None:
        """Write the model with all that belongs to it into a folder for a moment, and ``check`` that, before any step.

        Of a large model nothing is written: its names and shapes were compared before it was loaded.
        """
        if self.learner.model_bytes > _REHEARSED_BYTES:
            return
        with self.console.phase("writing a checkpoint and loading it again"), TemporaryDirectory() as folder:
            _write([self.learner.write_model, self.tokenizer.save, self.belongings.write], Path(folder))
            check(Path(folder))

    def discard(self) -> None:
        """Remove all of these checkpoints, once nothing is being written."""
        self.background.settle()
        shutil.rmtree(self.checkpoints.directory, ignore_errors=True)

    def metrics(self) -> Metrics:
        """Return the seconds since the last call that were spent on checkpoints: copying, waiting, writing."""
        copied, self._copied = self._copied, 0.0
        return self.background.metrics() + Metrics.of({"time/checkpoint_copy_seconds": Sum(copied)})

    def _is_short(self, free: int | None, states: Mapping[str, State]) -> bool:
        needed = sum(state.nbytes for state in states.values()) + self.learner.model_bytes
        if free is None or free >= needed:
            return False
        if not self._is_told:
            self._is_told = True
            self.console.warn(
                f"a copy of the run takes {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are free, so steps "
                "wait while checkpoints are written; checkpoints.asynchronous = false says that this is meant"
            )
        return True


def _write(writers: Iterable[Callable[[Path], Mapping[Path, str] | None]], folder: Path) -> Mapping[Path, str]:
    return {path: digest for write in writers for path, digest in (write(folder) or {}).items()}


def parts_of(learner: SavableLearner, chosen: PromptChoice, stream: RolloutScheduler, seed: int) -> dict[str, Stateful]:
    """Return everything that changes from step to step, by the name it has in a checkpoint."""
    parts: dict[str, Stateful] = {"learner": learner, "curriculum": chosen.curriculum, "stream": stream}
    if chosen.tracker is not None:
        parts["tracker"] = chosen.tracker
        if not isinstance(chosen.drift, NoDrift):
            parts["drift"] = chosen.drift
    if chosen.replay is not None:
        parts["replay"] = chosen.replay
    parts["generators"] = Generators(seed)
    return parts


def restore(parts: Mapping[str, Stateful], found: CheckpointRef) -> None:
    """Let every part become what it was in a checkpoint that was just verified.

    Raises:
        CheckpointError: If it has other parts, or a part does not fit.
    """
    with show_progress(f"reading the states of {found.path.name}"):
        # Tensors of the learner are read when they are needed: all at once would hold the state twice.
        saved = load(found.path, is_verified=True, lazily=("learner",))
    if saved.keys() != parts.keys():
        missing, unknown = sorted(parts.keys() - saved.keys()), sorted(saved.keys() - parts.keys())
        raise CheckpointError(
            f"{found.path} is of another kind of run: it lacks {missing or 'nothing'} and has {unknown or 'nothing'} "
            "beside; resume with the experiment, and the version of gnomon, that the run began with"
        )
    for name, part in parts.items():
        with restored(name, found.path):
            # The learner's own state is large, and it looks at its tensors itself.
            check_form(saved[name], None if part is parts.get("learner") else part.state())
            part.restore(saved[name])


@contextmanager
def restored(name: str, checkpoint: Path) -> Iterator[None]:
    """Say which part of which checkpoint a part could not become.

    Raises:
        CheckpointError: If the part refuses its saved state.
    """
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, GnomonError):
            raise
        raise CheckpointError(
            f"the part {name} in {checkpoint} is not what this version of gnomon writes "
            f"({type(error).__name__}: {error}); resume with the one that wrote it, or from an older checkpoint"
        ) from error


STATELESS: Mapping[type, str] = {
    Experiment: "is read, and never written to",
    Resolved: "is worked out from its experiment, and the same whenever it is",
    EnvironmentConfig: "is read, and never written to",
    TrainingData: "are read, and never written to",
    Tokenizer: "is read, and never written to",
    PromptKeys: "are read, and never written to",
    KeptPrompts: "are read, and never written to",
    EnginePool: "answers with the learner's weights; draws depend on seed, round, task and place alone",
    AgentEndpoint: "answers agents' calls, and no rollout outlives its step unanswered",
    PolicyTemplates: "keep how tools are shown, which follows from the tools",
    EnvWorkers: "hold a conversation's environment, and no conversation outlives its step unanswered",
    GradingPool: "judges each answer by itself",
    ErrorBudget: "counts the latest failures in order to end a run; no reward depends on it",
    FaultBudget: "counts the latest ends of conversations in order to end a run; no reward depends on it",
    VerifiedWeightSync: "asks; what it measures is a part, or never changes",
    NonFiniteGuard: "counts refused steps in a row again from the metrics",
    RunLogger: "writes; its files are cut back to the checkpoint",
    Console: "shows",
    RunDirectory: "names files",
    Checkpoints: "names files",
    Saver: "writes what the parts are",
    Background: "writes what the parts are",
    StopRequest: "is about this process",
}
"""What can change in a run and is in no checkpoint, and why a resumed run is the same run without."""


def check_counted(
    run: Run,
    parts: Mapping[str, Stateful],
    constants: Iterable[object] = (),
    stateless: Mapping[type, str] = STATELESS,
) -> None:
    """Refuse to start a run in which something could change that no checkpoint holds.

    Args:
        constants: Large objects that are read and never written to, such as task sets.
        stateless: Kinds of objects that need not be saved.

    Raises:
        ConfigError: Naming the places: an object that can change, is no part and is not in `STATELESS`; a generator of
            random numbers in a part that does not save it.
    """
    counted = [*parts.values(), *constants]
    # Walks everything that the run can reach, and expects each mutable object to be a part, a constant or stateless.
    held = [(f"run.{f.name}", getattr(run, f.name)) for f in fields(run)]
    places = [each for place, part in held for each in unsaved_state(part, counted, stateless, place)]
    said = [f"{place} can change from step to step and is no part of a checkpoint" for place in places]
    said += [
        f"{place} draws random numbers, and its place in them is in no checkpoint"
        for place in unsaved_generators(parts)
    ]
    if said:
        raise ConfigError(
            "an interrupted run could not be resumed exactly:\n  " + "\n  ".join(said) + "\n"
            "Give the piece state() and restore() that hold all of it and let it be one of the run's parts, compute "
            "draws from seed and step, or make it a frozen dataclass without lists and dictionaries"
        )
