"""The whole configuration of a run as one frozen value: TOML in, TOML out."""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from gnomon.algorithms import Algorithm, Uniform, resolve_with_notes
from gnomon.algorithms.aliases import ALIASES as ALGORITHM_ALIASES
from gnomon.algorithms.build import override
from gnomon.algorithms.build import to_table as algorithm_table
from gnomon.algorithms.protocols import parts_of
from gnomon.config.foreign_names import (
    COMPOSED,
    FOREIGN,
    leave_older,
    refuse_contradicted,
    refuse_twice,
    taken_out,
    translated,
)
from gnomon.config.name_checks import other_verb
from gnomon.config.reading import NO_ALGORITHM, as_json, parse_override, read, settle_length
from gnomon.core.combinations import SettingsByKey, check_meaning, of_table
from gnomon.core.errors import ConfigError, bounded, unknown
from gnomon.core.sections import (
    DATE,
    STARTED,
    BudgetConfig,
    CheckpointConfig,
    ClusterConfig,
    DoctorConfig,
    EngineConfig,
    EvalSampling,
    GradingConfig,
    RecordConfig,
    SamplingConfig,
    StalenessConfig,
    check_date,
    check_texts,
    check_values,
)
from gnomon.core.tables import build, check_types, drop_other_kind, flat, set_path, settled, to_table, value_at
from gnomon.diagnosis.catalog import check_stops, chosen
from gnomon.learner.sections import LearnerConfig
from gnomon.models.adapter_config import LoraConfig, is_adapter, read_adapter_config
from gnomon.models.place import check_device
from gnomon.records.directory import RunDirectory, refuse_unchanged
from gnomon.records.ownership import check_own
from gnomon.rewards.answers import Where
from gnomon.rewards.code.reward import Code
from gnomon.rewards.grading import WeightedReward, allowed
from gnomon.rewards.sandbox.packages import check_names
from gnomon.tasks.build import EvalTask, TaskConfig, named_for_training, named_held_out, task_table
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.split import HeldOut

_KINDS = ("task.kind", "evaluation.task.kind")
_FROM = ("continue_from", "rollouts_from")
_MEASURED = 'max_staleness = "measured"'


@dataclass(frozen=True)
@bounded("evaluation", every="at least 0", samples="at least 0")
class EvaluationConfig:
    """When and on what a run is evaluated.

    Attributes:
        every: Steps between two evaluations; 0 evaluates before the first and after the last step only.
        samples: Answers per question, the k of avg@k and pass@k; at least 1. With supervised fine-tuning 0 generates
            none: held-out rows have a loss then, and no score.
        before: Whether the model is also evaluated before the first step.
        task: Where the held-out questions come from; without it, they are held out of the training task.
        tasks: Several sets of held-out questions in place of one, each a name or a table with sampling, samples and
            size of its own. The score of an evaluation is their macro average: every set counts the same.
        sampling: How held-out answers are drawn, where that is not as in training.

    Raises:
        ConfigError: A number is out of range, two sets have one name, or both ``task`` and ``tasks`` are given.
    """

    every: int = 0
    samples: int = 1
    before: bool = True
    task: TaskConfig | None = None
    tasks: tuple[EvalTask, ...] = ()
    sampling: EvalSampling = EvalSampling()

    def __post_init__(self) -> None:
        if self.task is not None and self.tasks:
            raise ConfigError(
                f"evaluation.task = '{self.task.name}' and evaluation.tasks are both given; name it among the tasks"
            )
        labels = [task.label for task in self.tasks]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(
                f"evaluation.tasks has two sets of the name '{twice[0]}'; give one a name of its own, "
                f'such as {{task = "{twice[0]}", name = "{twice[0]}-long"}}'
            )


@dataclass(frozen=True)
@bounded(
    None,
    epochs="above 0 and finite",
    max_length="at least 2 tokens",
    steps="at least 0",
    rollouts_per_step="at least 1",
    max_staleness="0 (synchronous) or more steps",
)
class Experiment:
    """Everything that a run depends on, beside the machine.

    Attributes:
        model: "smollm2-135m-instruct", "tiny", "tiny-sums", a folder, or the name of a model on the hub.
        task: What the model is trained on. ``held_out`` of it, or of ``evaluation.task``, is kept for evaluation.
        algorithm: A preset such as "grpo", a file of your own as path.py:NAME, or a table with a preset and changes.
        name: Name of the run; its directory is runs/NAME-DATE-TIME.
        rewards: Weighted rewards, which are added; none stands for the reward of the task itself.
        packages: Packages that programs in the sandbox may import beside the standard library: those of code rewards
            and of the Python tool. Any of "numpy", "pandas", "scipy", "sympy" that are installed.
        steps: Training steps; 0 evaluates only.
        epochs: Passes over the training questions, in place of ``steps``, which are counted before the run begins.
        max_length: Most tokens of a row of supervised fine-tuning, question and answer: longer rows are left out, and
            a line says how many. None refuses rows that are longer than the model's context.
        budget: Tokens or seconds after which the run ends, if that comes before the last step.
        rollouts_per_step: Answers that are generated and trained on in a step. The number of prompts is
            ``rollouts_per_step / algorithm.num_generations``.
        seed: Seed of every random draw of the run, from 0 to 2**63 - 1.
        max_staleness: Steps that a rollout may be older than the weights that it trains. 0 is synchronous training.
            "measured" lets the effective sample size decide; see ``staleness``.
        staleness: How generation and training overlap, where ``max_staleness`` allows that.
        system: Text of a system message before every question that brings none of its own.
        chat_template_kwargs: Variables of the model's chat template, such as {enable_thinking = false}.
        template_date: The day that a chat template which reads the clock writes, YYYY-MM-DD: one for all runs, so that
            resumed, evaluated and compared prompts are the same.
        trust_remote_code: Whether the code in a model's own folder may run. Set it only for code that you have read.
        device: Where the model computes: "cpu", "cuda" or "cuda:N" (one NVIDIA GPU), or "auto", the first GPU if there
            is one. A record keeps the word, so that another machine can resume the run; the run card says which device
            it was.
        held_out: How many questions are kept for evaluation.
        sampling: How answers are drawn.
        engine: What generates the answers.
        learner: How the model is trained.
        lora: Train a low-rank adapter instead of all weights; none trains all weights.
        rollouts_from: A folder of rollouts that another run logged (RUN/rollouts), which are trained on in place of new
            ones (``gnomon train EXPERIMENT --from RUN/rollouts``): with their rewards, and weighed by their
            log-probabilities where the algorithm does that. Held-out questions are asked as ever.
        continue_from: The folder of a run, or of one of its checkpoints, whose weights, moments and values of prompts
            this run goes on with; ``steps`` count from the beginning of that one. None begins with the model.
        evaluation: When and on what the model is evaluated.
        checkpoints: When a checkpoint is written, and how many are kept.
        grading: Processes and limits of the rewards.
        records: What is written down beside metrics.
        environment: What replies to answers in conversations of several turns; none asks for one answer.
        doctor: Which diagnosis rules look at the run while it trains.
        cluster: Whether the run computes on a Ray cluster.

    Raises:
        ConfigError: Two settings contradict each other, or a number is out of range.
    """

    model: str
    task: TaskConfig
    algorithm: Algorithm
    name: str = "run"
    rewards: tuple[WeightedReward, ...] = ()
    packages: tuple[str, ...] = ()
    steps: int = 100
    epochs: float | None = None
    max_length: int | None = None
    budget: BudgetConfig = BudgetConfig()
    rollouts_per_step: int = 64
    seed: int = 0
    max_staleness: int | Literal["measured"] = 0
    staleness: StalenessConfig = StalenessConfig()
    system: str = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    template_date: str = DATE
    trust_remote_code: bool = False
    device: str = "auto"
    held_out: HeldOut = HeldOut()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig | None = None
    continue_from: str | None = None
    rollouts_from: str | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    grading: GradingConfig = GradingConfig()
    records: RecordConfig = RecordConfig()
    environment: EnvironmentConfig | None = None
    doctor: DoctorConfig = DoctorConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        # Python callers may give names and tables, as a file does; they become sections before anything is checked.
        _made(self)
        check_device(self.device)
        check_date(self.template_date)
        _allow_packages(self)
        chosen(self.doctor.rules)
        check_stops(self.doctor.stops)
        # The checks below see the experiment as a file would have it, so both ways in are refused alike.
        written = to_table(self)
        check_texts(written)
        check_values(written)
        check_meaning(settings_of(self, written))
        if self.algorithm.ranks_pairs and (self.rewards or self.evaluation.tasks):
            raise ConfigError(
                "a reward model writes no answers that could be judged; set rewards = [] and evaluation.tasks = [] "
                "(evaluation.task names a table of held-out pairs)"
            )

    @property
    def staleness_bound(self) -> int:
        """Steps that no rollout is older than."""
        return self.staleness.limit if self.max_staleness == "measured" else self.max_staleness

    @property
    def scoring_temperature(self) -> float:
        """Temperature at which the learner scores every policy: the sampler's, unless the learner has its own.

        The dataset's answers are drawn by no sampler, and scored at 1.
        """
        own = self.learner.temperature
        drawn = 1.0 if self.algorithm.is_supervised else self.sampling.temperature
        return drawn if own is None else own

    @property
    def first_step(self) -> int:
        """Steps that were made by the run that this one continues; 0 for a run that continues none."""
        return 0 if self.continue_from is None else steps_of(self.continue_from)

    @property
    def prompts_per_step(self) -> int:
        """Prompts asked a step."""
        return self.rollouts_per_step // self.algorithm.num_generations

    @property
    def idle(self) -> tuple[str, ...]:
        """What is set and changes nothing in this run, in words."""
        # Section, its settings by name, whether something reads them, and what would.
        waiting: tuple[tuple[str, Any, str, bool, str], ...] = (
            ("cluster", self.cluster, "graders placement start_seconds", self.cluster.kind != "none", "a cluster"),
            ("staleness", self.staleness, "stragglers", self.staleness_bound > 0, "max_staleness above 0"),
            ("staleness", self.staleness, "ess_floor limit", self.max_staleness == "measured", _MEASURED),
            ("engine", self.engine, "kept_gib", self.environment is not None, "an [environment]"),
        )
        return tuple(
            f"{place}.{name} = {getattr(section, name)!r} changes nothing without {needed}"
            for place, section, names, is_read, needed in waiting
            for name in names.split()
            # A default that nothing reads is no mistake; a value that somebody set may be one.
            if not is_read and getattr(section, name) != getattr(type(section), name)
        )

    @property
    def local_processes(self) -> dict[str, tuple[int, int, bool]]:
        """What begins processes on this machine: of each setting its value, their number, and whether they are forks.

        Forks share the libraries of one process. Those of a cluster that is joined are elsewhere.
        """
        plan, own, world = self.engine, not self.cluster.address, self.environment
        is_ray, workers, learners = self.cluster.kind != "none", self.grading.workers, self.learner.processes
        graders, parts = self.cluster.graders if is_ray else 1, plan.tensor_parallel
        engines = plan.count * parts if is_ray or parts > 1 or plan.server == STARTED else 0
        most = 0 if world is None or world.server else world.max_concurrent
        # An evaluation may have more rollouts in flight than a training step.
        evaluated = (self.held_out.size or 0) * self.evaluation.samples
        in_flight = self.rollouts_per_step * self.staleness_bound + max(self.rollouts_per_step, evaluated)
        # The setting that a message names is the one that begins more processes.
        larger = "count" if plan.count >= parts else "tensor_parallel"
        return {
            "learner.processes": (learners, learners * own * (is_ray or learners > 1), False),
            f"engine.{larger}": (max(plan.count, parts), engines * own, False),
            "cluster.graders": (graders, graders * own * is_ray, False),
            "grading.workers": (workers, workers * graders * own, True),
            "environment.max_concurrent": (most, min(most, in_flight), True),
        }


def settings_of(experiment: Experiment, written: Mapping[str, Any] | None = None) -> SettingsByKey:
    """Return every setting by its key, and the facts of the algorithm.

    Args:
        written: The experiment as a table, where that is there already.
    """
    table = flat(to_table(experiment) if written is None else written)
    world = experiment.environment
    is_agent = {} if world is None else {"environment.is_agent": world.is_agent}
    return of_table({**table, **is_agent, **facts(experiment.algorithm)})


def facts(algorithm: Algorithm) -> dict[str, Any]:
    """Return what `gnomon.core.combinations` asks of an algorithm, by key."""
    critic = algorithm.critic
    found = {
        "name": algorithm.name,
        "num_generations": algorithm.num_generations,
        "scope": algorithm.scope,
        "routing": algorithm.routing,
        "demonstrated": algorithm.demonstrated,
        "is_supervised": algorithm.is_supervised,
        "dataset_answers": algorithm.dataset_answers,
        "ranks_pairs": algorithm.ranks_pairs,
        "fewest": algorithm.advantage.minimum_generations,
        "baseline": type(algorithm.advantage).__name__,
        "updates.minibatches": algorithm.updates.minibatches,
        "critic.updates.minibatches": 1 if critic is None else critic.updates.minibatches,
        "pretraining": critic is not None and critic.pretraining is not None,
        "distributions": algorithm.top_logprobs is not None,
        "parts": "component_rewards" in algorithm.advantage.needs,
        "hints": bool(algorithm.reference.prompt),
        "roles": "role" in algorithm.needs,
        "batch_baseline": any(getattr(part, "baseline", "") == "batch" for _, part in parts_of(algorithm.advantage)),
        "sampler": not isinstance(algorithm.sampler, Uniform),
        **{name: getattr(algorithm, name) is not None for name in ("keep", "overlong", "replay", "tracker")},
    }
    return {f"algorithm.{name}": value for name, value in found.items()}


def steps_of(checkpoint: str) -> int:
    """Return the steps after which a checkpoint was saved; 0 of another folder.

    >>> steps_of("runs/first/checkpoints/step-24"), steps_of("runs/first")
    (24, 0)
    """
    made = Path(checkpoint).name.removeprefix("step-")
    return int(made) if made.isdecimal() and Path(checkpoint).parent.name == "checkpoints" else 0


def _allow_packages(experiment: Experiment) -> None:
    """Let code rewards and the Python tool import the experiment's packages: one setting for both."""
    packages = experiment.packages
    check_names(packages)
    verifiers = [reward.verifier for reward in experiment.rewards if isinstance(reward.verifier, Code)]
    plans = [plan for plan in (experiment.environment, *verifiers) if plan is not None and plan.packages]
    for plan in plans:
        if plan.packages != packages:
            raise ConfigError(
                f"packages are named once, for all programs of a run, and here are {list(packages)} and "
                f"{list(plan.packages)}; set packages = {list(dict.fromkeys((*packages, *plan.packages)))} at the top, "
                "and remove those of rewards and environment"
            )
    # Programs of rewards, and of the Python tool, run in sandboxes that import only what is allowed.
    if packages:
        object.__setattr__(experiment, "rewards", tuple(allowed(reward, packages) for reward in experiment.rewards))
        if experiment.environment is not None and "python" in experiment.environment.tools:
            object.__setattr__(experiment, "environment", replace(experiment.environment, packages=packages))


@dataclass(frozen=True)
class Loaded:
    """An experiment, and what was understood in other words than it was written: one sentence each."""

    experiment: Experiment
    notes: tuple[str, ...]


def load(source: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Return the experiment of a TOML file or a built-in name, with ``key=value`` overrides applied.

    Raises:
        ConfigError: Naming file, path, value and the nearest known name.
    """
    return from_table(read(source), overrides)


def from_table(table: Mapping[str, Any], overrides: Sequence[str] = ()) -> Loaded:
    """Return the experiment that ``table`` describes after the overrides.

    Other libraries' names (`gnomon.config.foreign_names`) are understood and said back. Of a key that is overridden
    twice the last counts, which is said as well.
    """
    return with_settings(table, [parse_override(override) for override in overrides])


def with_settings(table: Mapping[str, Any], parsed: Sequence[tuple[str, Any]]) -> Loaded:
    """Return the experiment that ``table`` describes with settings that replace its own.

    Args:
        table: An experiment as TOML has it.
        parsed: Paths such as "learner.optimizer.learning_rate" with their values.

    Raises:
        ConfigError: A key is unknown, or a value is not what it may be.
    """
    settings, notes = translated(parsed)
    repeated = _repeated(settings)
    try:
        loaded = _load(table, settings)
    except ConfigError as error:
        raise ConfigError("; ".join([str(error), *repeated])) from error
    # What the command line says of a section counts more than what a file's foreign names say of it.
    newer = {key.partition(".")[0] for key, _ in settings}
    whole = _as_table(loaded.experiment)
    whole["learner"]["optimizer"]["betas"] = dict(enumerate(whole["learner"]["optimizer"]["betas"]))
    older = {key: value for key, value in flat(whole).items() if key.partition(".")[0] not in newer}
    refuse_contradicted(taken_out(as_json(table)), older)
    refuse_contradicted(parsed, flat(whole))
    return Loaded(loaded.experiment, (*repeated, *notes, *loaded.notes))


def _repeated(parsed: Sequence[tuple[str, Any]]) -> list[str]:
    given: dict[str, list[Any]] = {}
    for key, value in parsed:
        given.setdefault(key, []).append(value)
    several = {key: values for key, values in given.items() if any(value != values[0] for value in values[1:])}
    return [
        f"{key} is given {len(v)} times, and the last counts: {', then '.join(map(repr, v))}"
        for key, v in several.items()
    ]


def changed(run: Path, settings: Sequence[tuple[str, Any]]) -> tuple[Experiment, Loaded]:
    """Return the experiment of a run as it was begun, and with settings that replace its own.

    Nothing that it names is executed unless this user began the run.

    Raises:
        UserError: There is no run, another user began it and it names code, or a setting is not what it may be.
    """
    RunDirectory.check(run)
    table = RunDirectory(run).table()
    check_own(run, table)
    refuse_unchanged(run, settings)
    return from_table(table).experiment, with_settings(table, settings)


_SUPERVISED: Mapping[str, Any] = {
    "learner.optimizer.learning_rate": 2e-5,
    "learner.optimizer.schedule": "linear",
    "learner.optimizer.warmup_steps": 0.03,
    "epochs": 3,
}
"""What `gnomon sft` sets where nothing else is said; with adapters the rate is ten times that."""


def supervised(table: Mapping[str, Any], parsed: Sequence[tuple[str, Any]] = (), verb: str = "sft") -> Loaded:
    """Return the experiment of `with_settings` with supervised fine-tuning as its algorithm, or a reward model.

    An algorithm of reinforcement learning that the table names is not used, so its file may serve as it is. What the
    table and the settings leave open has defaults of its own, which are said.

    Args:
        table, parsed: As of `with_settings`.
        verb: "sft" or "reward-model", which is the preset too.

    Raises:
        ConfigError: As `with_settings`; or the settings name an algorithm that the verb is not about.
    """
    settings, notes = translated(parsed)
    # What the user said, in the table or in settings, under our names or another library's.
    said = {key for key, _ in settings} | {key for key, _ in translated(taken_out(as_json(table)))[0]}
    own: dict[str, Any] = {**table}
    if not {"algorithm", "algorithm.preset"} & said and not _is_of(verb, own.get("algorithm")):
        named = own.pop("algorithm", None)
        own["algorithm"] = verb
        if named is not None:
            notes.append(f"the algorithm of the experiment is not used, for {verb} is; the rest of it is")
    has_adapters = "lora" in own or any(key.partition(".")[0] in ("lora", "use_peft") for key in said)
    for key, value in _SUPERVISED.items():
        if key in said or value_at(own, key) is not None:
            continue
        # Steps and epochs both say how long the run is.
        if key == "epochs" and ("steps" in said or own.get("steps") is not None):
            continue
        # Low-rank adapters are trained at about ten times the rate of full weights.
        if key.endswith("learning_rate") and has_adapters:
            value *= 10
        settings = [*settings, (key, value)]
        notes.append(f"{key} = {value} where nothing is said (gnomon {verb})")
    loaded = with_settings(own, settings)
    if not _is_of(verb, loaded.experiment.algorithm):
        raise other_verb(verb, loaded.experiment.algorithm.name)
    return Loaded(loaded.experiment, (*notes, *loaded.notes))


def _is_of(verb: str, spec: Any) -> bool:
    if spec is None:
        return False
    algorithm = spec if isinstance(spec, Algorithm) else resolve_with_notes(spec).algorithm
    return algorithm.is_supervised if verb == "sft" else algorithm.ranks_pairs


def _load(table: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]) -> Loaded:
    # A copy: the caller's table must not change below.
    whole: dict[str, Any] = as_json(table)
    foreign, notes = translated(taken_out(whole))
    # A foreign name of an algorithm, beside a table of changes, is that table's preset.
    if isinstance(whole.get("algorithm"), dict):
        foreign = [("algorithm.preset" if key == "algorithm" else key, value) for key, value in foreign]
    refuse_twice(whole, foreign)
    leave_older(whole, dict(foreign), dict(overrides))
    _name_sections(whole)
    notes += [*_set_all(whole, foreign), *_set_all(whole, overrides)]
    _name_sections(whole)
    settle_length(whole, {key for key, _ in overrides})
    check_texts(whole)
    notes += _name_adapter(whole)
    # Other libraries write the algorithm's settings at the top of a file.
    _move_to_algorithm(whole)
    if "algorithm" not in whole:
        raise ConfigError(NO_ALGORITHM)
    # The algorithm first: what remains to be worked out depends on its number of generations.
    spec = whole.pop("algorithm")
    resolution = resolve_with_notes(spec)
    preset = spec.get("preset", "") if isinstance(spec, dict) else spec
    notes += [f"the algorithm is your code, which was run: {preset}"] if ":" in str(preset) else []
    whole["algorithm"] = resolution.algorithm
    notes += [*resolution.notes, *_work_out(whole)]
    own = [f.name for f in fields(Experiment)]
    for key in whole:
        if key not in own:
            raise ConfigError(unknown("key", key, [*own, *(n for n in FOREIGN if "." not in n), *COMPOSED]))
    rewards = whole.get("rewards", [])
    rewards = [rewards] if isinstance(rewards, str) and rewards else rewards
    if not isinstance(rewards, list):
        raise ConfigError(f"rewards = {rewards!r}: should be a list of tables, each [[rewards]] with a kind")
    whole["rewards"] = [_reward(table) for table in rewards]
    return Loaded(build(Experiment, whole), tuple(notes))


def to_toml(experiment: Experiment) -> str:
    """Return the fully resolved experiment as TOML; `load` of it is the same experiment."""
    try:
        return tomli_w.dumps(_as_table(experiment))
    except TypeError as error:
        raise ConfigError(
            f"the experiment cannot be written down: {error}; fields of a piece of your own are numbers, texts, truth "
            "values, pieces or lists of these"
        ) from error


def _as_table(experiment: Experiment) -> dict[str, Any]:
    # In front: the part that a reader of the file looks for.
    table = {"algorithm": algorithm_table(experiment.algorithm)}
    return table | {k: v for k, v in to_table(experiment).items() if k != "algorithm"}


def _name_adapter(whole: dict[str, Any]) -> list[str]:
    """Take an adapter's folder in place of a model as its base with that adapter, and its settings from its config.

    Raises:
        ModelError: For an adapter that cannot be read.
        ConfigError: For settings that are not the adapter's.
    """
    named, lora = whole.get("model"), whole.get("lora")
    folder = Path(named).expanduser() if isinstance(named, str) else None
    is_model = folder is not None and is_adapter(folder)
    # A folder of an adapter as the model means its base with that adapter.
    if is_model and (lora is None or (isinstance(lora, dict) and "adapter" not in lora)):
        lora = {"adapter": str(folder), **(lora or {})}
    if (
        not isinstance(lora, dict)
        or not isinstance(lora.get("adapter"), str)
        # Everything that the adapter's config would give is said already, as in a record.
        or {"rank", "alpha", "targets"} <= {*lora}
    ):
        return []
    base, own = read_adapter_config(Path(lora["adapter"]).expanduser())
    wrong = [key for key, value in lora.items() if key not in ("adapter", "base") and own.get(key, value) != value]
    if wrong:
        raise ConfigError(
            f"lora.{wrong[0]} = {lora[wrong[0]]!r}, and the adapter '{lora['adapter']}' has {own[wrong[0]]!r}; leave "
            "it out"
        )
    whole["lora"] = {**own, **lora, "adapter": own["adapter"]}
    taken = own.get("base", "unquantized") if "base" not in lora else "unquantized"
    notes = [] if taken == "unquantized" else [f"lora.base = '{taken}', which the adapter was trained on"]
    if not is_model:
        return notes
    if not base:
        raise ConfigError(f"the adapter '{folder}' does not name its base model; type model=BASE lora.adapter={folder}")
    whole["model"] = base
    return [f"model = '{folder}' is an adapter: model = '{base}' with lora.adapter", *notes]


def _move_to_algorithm(whole: dict[str, Any]) -> None:
    """Give what other libraries write at the top, and what is the algorithm's here, to the algorithm."""
    its_own = {"num_generations", *ALGORITHM_ALIASES}
    given = {key: whole.pop(key) for key in list(whole) if key in its_own}
    if given:
        spec = whole.get("algorithm", {})
        whole["algorithm"] = {**(spec if isinstance(spec, dict) else {"preset": spec}), **given}


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """Return the experiment with the files that it names as absolute paths, so that it is the same from any folder."""
    table = tomllib.loads(to_toml(experiment))
    for section, key in ((table, "model"), (table.get("lora", {}), "adapter"), *((table, k) for k in _FROM)):
        if key in section:
            section[key] = _absolute(section[key])
    # A user's engine is named as path.py:NAME.
    table["engine"]["kind"] = _absolute_member(table["engine"]["kind"])
    _anchor(table)
    return from_table(table).experiment


def _anchor(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("kind") in ("table", "benchmark", "published") and "path" in node:
            node["path"] = _absolute(node["path"])
        if node.get("kind") == "model":
            node["model"] = _absolute(node["model"])
        if node.get("kind") == "function":
            node["function"] = _absolute_member(node["function"])
        if node.get("kind") in ("class", "tools", "trl", "agent") and "tools" in node:
            node["use"] = _absolute_member(node["use"])
            node["command"] = [_absolute(part) for part in node["command"]]
            node["tools"] = [_absolute_member(tool) for tool in node["tools"]]
        if node.get("kind") == "textarena" and "opponent" in node.get("settings", {}):
            node["settings"]["opponent"] = _absolute_member(node["settings"]["opponent"])
        if node.get("piece") in ("ReferencePolicy", "TaskTeacher"):
            node["model"] = _absolute(node["model"])
        is_critic = node.get("piece") == "CriticConfig" and node["initial"] != "policy"
        if node.get("piece") in ("TrackerConfig", "OptimalValue") or is_critic:
            node["initial"] = _absolute(node["initial"])
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _anchor(below)


def _absolute_member(named: str) -> str:
    file, colon, name = named.rpartition(":")
    return f"{_absolute(file)}{colon}{name}" if file else named


def _absolute(name: str) -> str:
    try:
        return os.path.realpath(name, strict=True)
    except (OSError, ValueError):  # not there, or no name that a file can have
        return name


def _name_sections(whole: dict[str, Any]) -> None:
    """Replace sections that are given by one word by what it stands for."""
    _name_task(whole)
    if isinstance(whole.get("engine"), str):
        whole["engine"] = {"kind": whole["engine"]}
    if isinstance(whole.get("cluster"), str):
        whole["cluster"] = ClusterConfig.named(whole["cluster"])
    if isinstance(own := whole.get("environment"), str) and ":" in own:
        whole["environment"] = {"kind": "class", "use": own}


def _made(experiment: Experiment) -> None:
    """Make the parts of an experiment that were given as words or tables, as in a file.

    Raises:
        ConfigError: A value is not what its setting takes.
    """
    # Tables are changed here, and stay the caller's as they are.
    values = ((f.name, getattr(experiment, f.name)) for f in fields(experiment))
    given: dict[str, Any] = {
        name: deepcopy(value) if isinstance(value, dict | list) else value for name, value in values
    }
    if not isinstance(given["algorithm"], Algorithm):
        given["algorithm"] = resolve_with_notes(given["algorithm"]).algorithm
    if not isinstance(given["rewards"], tuple) or not all(isinstance(r, WeightedReward) for r in given["rewards"]):
        listed = given["rewards"] if isinstance(given["rewards"], list | tuple) else [given["rewards"]]
        given["rewards"] = [_reward(each) for each in listed]
    _name_sections(given)
    for name, value in settled(Experiment, given).items():
        if is_dataclass(value) and name != "algorithm":  # pieces are judged by their composition
            check_types(value, name)
        object.__setattr__(experiment, name, value)


def _name_task(whole: dict[str, Any]) -> None:
    if "task" in whole:
        whole["task"] = task_table(whole["task"], named_for_training)
    evaluation = whole.get("evaluation")
    if not isinstance(evaluation, dict):
        return
    if "task" in evaluation:
        evaluation["task"] = task_table(evaluation["task"], named_held_out)
    if isinstance(evaluation.get("tasks"), list):
        evaluation["tasks"] = [_eval_task(each) for each in evaluation["tasks"]]


def _eval_task(given: Any) -> Any:
    """Return the table of one of several sets; a text alone is its task's name."""
    table = {"task": given} if isinstance(given, str) else given
    if not isinstance(table, dict):
        return table
    own = {"task": task_table(table["task"], named_held_out)} if "task" in table else {}
    if isinstance(table.get("rewards"), list):
        own["rewards"] = [_reward(each) for each in table["rewards"]]
    return {**table, **own}


def _set_all(whole: dict[str, Any], settings: Sequence[tuple[str, Any]]) -> list[str]:
    """Set paths of ``whole``, and return what is left out by that."""
    notes: list[str] = []
    # A whole algorithm or task, or its kind, does not undo what is said of its parts.
    # The shortest paths first, and kinds before their other settings.
    for key, value in sorted(settings, key=lambda parsed: (parsed[0].count("."), parsed[0] not in _KINDS)):
        notes += drop_other_kind(whole, key, value) if key in _KINDS else []
        if key == "task":
            whole.pop("task", None)
        # A word such as "auto" stands for several settings of the section; what else is said of it stays.
        if key == "cluster" and isinstance(value, str):
            for name, said in ClusterConfig.named(value).items():
                set_path(whole, f"cluster.{name}", said)
        elif value == {} and isinstance(whole.get(key), dict):
            pass  # lora = {} asks for an adapter, and leaves what is said of it
        else:
            # An engine by its name alone: what else is said of it stays.
            set_path(whole, "engine.kind" if key == "engine" and isinstance(value, str) else key, value)
        _name_task(whole)
    return notes


def _work_out(whole: dict[str, Any]) -> list[str]:
    """Replace `foreign_names.DEFERRED` by our settings, now that the algorithm is known.

    Raises:
        ConfigError: If a value cannot be worked out.
    """
    notes: list[str] = []
    algorithm: Algorithm = whole["algorithm"]
    if "prompts_per_step" in whole:
        prompts = _count(whole, "prompts_per_step")
        whole["rollouts_per_step"] = prompts * algorithm.num_generations
        notes.append(f"prompts_per_step = {prompts} is rollouts_per_step = {whole['rollouts_per_step']}")
    # verl counts prompts in an update, gnomon minibatches in a pass.
    if "ppo_mini_batch_size" in whole:
        prompts = _count(whole, "ppo_mini_batch_size")
        rollouts = whole.get("rollouts_per_step", Experiment.rollouts_per_step)
        minibatches, rest = divmod(rollouts, prompts * algorithm.num_generations)
        if rest or not minibatches:
            raise ConfigError(
                f"ppo_mini_batch_size = {prompts} is {prompts * algorithm.num_generations} rollouts an update, "
                f"of which rollouts_per_step = {rollouts} is no multiple; set algorithm.updates.minibatches"
            )
        whole["algorithm"] = override(algorithm, "updates.minibatches", minibatches)
        notes.append(f"ppo_mini_batch_size = {prompts} is algorithm.updates.minibatches = {minibatches}")
    if "warmup_ratio" in whole:
        ratio, steps = whole.pop("warmup_ratio"), whole.get("steps", Experiment.steps)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
            raise ConfigError(f"warmup_ratio = {ratio!r}: should be a share of the steps, from 0 to below 1")
        # The optimizer takes a number below 1 as a share of the steps.
        rise = ratio if "epochs" in whole else math.ceil(ratio * steps)  # steps of epochs are counted later
        set_path(whole, "learner.optimizer.warmup_steps", rise)
        notes.append(f"warmup_ratio = {ratio} is learner.optimizer.warmup_steps = {rise}")
    return notes


def _count(whole: dict[str, Any], key: str) -> int:
    value = whole.pop(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} = {value!r}: should be a positive integer")
    return value


def _reward(table: Any) -> Any:
    """Return the reward's table with the verifier's settings in a table of their own, as `WeightedReward` has them.

    A text alone names a function of the user's, "path.py:function", or a kind of reward, "numeric".
    """
    if isinstance(table, str) and ":" not in table:
        return {"verifier": {"kind": table}}
    if isinstance(table, str):
        return {"verifier": {"kind": "function", "function": table}}
    if not isinstance(table, dict) or "verifier" in table:
        return table
    # These belong to the reward; everything else is its verifier's.
    own = {key: table[key] for key in ("weight", "name", "within", "must_end") if key in table}
    if "extract" in table and table.get("kind") not in ("parsable", "reasoning"):
        if table["extract"] not in get_args(Where):
            raise ConfigError(f"rewards: {unknown('extract', str(table['extract']), get_args(Where))}")
        own["within"] = table["extract"]
        table = {key: value for key, value in table.items() if key != "extract"}
    return {"verifier": {key: value for key, value in table.items() if key not in own}, **own}
