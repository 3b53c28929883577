"""From an experiment to the objects of a run: the only place where implementations are chosen."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote

from gnomon.algorithms import Algorithm, Distillation, Prioritized, ReverseKl
from gnomon.algorithms.protocols import Composed, parts_of
from gnomon.algorithms.sections import Greso, NoPositiveResampling, OptimalValue, ReferencePolicy, RoleAverage
from gnomon.algorithms.validate import uses_tracker
from gnomon.config.experiment import Experiment, Loaded
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, ModelError, unknown
from gnomon.core.processes.client import Limits
from gnomon.core.progress import show_progress, track
from gnomon.core.types import Group, role_of
from gnomon.engines.base import Sampling
from gnomon.engines.grammar import Grammar, barred
from gnomon.engines.stop_strings import check_stop_strings, until_stop
from gnomon.models.checkpoint_check import SavedForm
from gnomon.models.load import adapter_tokenizer, check_weights, load_tokenizer
from gnomon.models.tokenizer import Tokenizer
from gnomon.rewards.base import EnvironmentReward
from gnomon.rewards.code.reward import Code
from gnomon.rewards.exact import LengthPenalty
from gnomon.rewards.grading import Grading, WeightedReward, allowed
from gnomon.rewards.judge_client import JudgeCache
from gnomon.rewards.model import RewardModel
from gnomon.rewards.sandbox.selftest import enforced_by
from gnomon.rollouts.agent import PolicyTemplates
from gnomon.rollouts.curriculum.base import PromptKeys, TaskIndex, TaskValues, is_informative
from gnomon.rollouts.curriculum.drift import AccumulatedDrift, Drift, NoDrift, RescoredDrift
from gnomon.rollouts.curriculum.samplers import (
    GresoCurriculum,
    NoPositiveCurriculum,
    PrioritizedCurriculum,
    UniformCurriculum,
)
from gnomon.rollouts.curriculum.tracker import DecayRule, FixedValues, RoleValues, ValueTracker
from gnomon.rollouts.env_workers import describe
from gnomon.rollouts.self_imitation_buffer import SelfImitationReplay
from gnomon.tasks.base import TaskSet
from gnomon.tasks.benchmarks import BenchmarkTask
from gnomon.tasks.build import (
    EvalTask,
    MixtureTask,
    Split,
    TaskConfig,
    build_eval_tasks,
    build_held_out,
    build_split,
    check_context,
    judged_itself,
    marked,
    own_rewards,
    own_system,
    repetitions,
    untold,
)
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.environment import PYTHON
from gnomon.tasks.gold_answers import Bounds, check_answers
from gnomon.tasks.mixture import labels_of
from gnomon.tasks.prompt_start import Beginning, beginning_of
from gnomon.tasks.rendered import Looks
from gnomon.tasks.row_inputs import reserved_flaw
from gnomon.tasks.split import Subset
from gnomon.tasks.tables import TableTask
from gnomon.tasks.tools import describe_tools
from gnomon.tasks.turn_tokens import TurnTokenizer, tells_tools
from gnomon.training.eval_spec import checkpoint_of
from gnomon.training.evaluate import EvalSet
from gnomon.training.logged_rollouts import read_logged

_ENDLESS = (
    "neither tokenizer, generation_config.json nor chat template names an end token: every answer goes on to "
    "sampling.max_completion_length (sampling.stop_ids ends them)"
)


@dataclass(frozen=True)
class TrainingData:
    """What is asked and what may be answered, before any weight is read.

    Attributes:
        beginning: How the chat template begins answers, with what is to be said of it.
        form: What a checkpoint has besides weights.
        untried: Which answers the data check did not try, in words; "" where it tried all.
        eval_sets: The held-out sets as they are asked; none where nothing is held out.
        judged: What judges said before; in a file of the run where there is one.
    """

    tokenizer: Tokenizer
    split: Split
    sampling: Sampling
    grading: Grading | None
    beginning: Beginning
    form: SavedForm = SavedForm()
    untried: str = ""
    eval_sets: tuple[EvalSet, ...] = ()
    judged: JudgeCache = field(default_factory=JudgeCache)

    @property
    def gradings(self) -> tuple[Grading, ...]:
        """What judges answers in training and of the held-out sets."""
        return (*(() if self.grading is None else (self.grading,)), *(eval_set.grading for eval_set in self.eval_sets))

    @property
    def judging(self) -> Grading:
        """What judges answers wherever a held-out set has nothing of its own; there is one where answers are made."""
        return self.gradings[0]

    @property
    def templates(self) -> PolicyTemplates:
        """What makes tokens of an agent's messages."""
        return PolicyTemplates(self.tokenizer, TurnTokenizer.over(self.tokenizer), self.beginning.opening)

    @property
    def mean_prompt_tokens(self) -> float:
        """The mean length of the first prompts."""
        count = min(64, len(self.split.train))
        return sum(len(self.split.train[i].prompt) for i in range(count)) / count

    @property
    def mean_answer_tokens(self) -> float:
        """The mean length of the dataset's first answers; 0 where they are not trained on."""
        count = min(64, len(self.split.train))
        return sum(len(self.split.train[i].response) for i in range(count)) / count

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is said of them at start and in a plan."""
        return tuple(said for said in (*self.split.overlap.said, *self.said, *self.form.said) if said)

    @property
    def said(self) -> tuple[str, ...]:
        """What is said of them by an evaluation too."""
        model = (*self.beginning.notes, *self.tokenizer.notes)
        endless = () if self.sampling.stop_ids else (_ENDLESS,)
        ends = " or ".join(map(repr, self.sampling.stop_strings))
        seen = "with that" if self.sampling.include_stop else "before that (sampling.include_stop = true shows it too)"
        stops = f"an answer ends at {ends}, and rewards see the text {seen}" if ends else ""
        obeys = f"answers are {self.sampling.grammar.words}" if self.sampling.grammar.is_set else ""
        return tuple(said for said in (self.split.repeated, self.untried, stops, obeys, *model, *endless) if said)


def questions(experiment: Experiment) -> TrainingData:
    """Return tokenizer, tasks, sampling and grading, with everything checked that can be without the model's weights.

    Raises:
        UserError: If the data, the template or the rewards do not fit together.
    """
    grading, tokenizer, split = _split(experiment)
    if len(split.train) < experiment.prompts_per_step:
        if experiment.algorithm.is_supervised:
            most = len(split.train) * experiment.algorithm.num_generations
            raise ConfigError(
                f"a step trains on {experiment.prompts_per_step} different rows, and there are {len(split.train)} to "
                f"train on; set rollouts_per_step = {most} or less"
            )
        raise ConfigError(
            f"a step asks {experiment.prompts_per_step} different prompts and the task has {len(split.train)} to train "
            "on; lower rollouts_per_step, raise algorithm.num_generations, or make the task larger"
        )
    return _fitting(experiment, tokenizer, split, grading)


def _split(experiment: Experiment) -> tuple[Grading | None, Tokenizer, Split]:
    """Return the rewards, the tokenizer, and the split of the task; logged rollouts take the place of training tasks.

    Raises:
        UserError: As `questions`.
    """
    grading, tokenizer, renderer = _reading(experiment)
    evaluation, algorithm = experiment.evaluation, experiment.algorithm
    asked, hint = evaluation.tasks or evaluation.task, algorithm.reference.prompt
    split = build_split(experiment.task, experiment.held_out, renderer, asked, algorithm.dataset_answers, hint)
    if experiment.max_length is not None:
        split = _within(split, experiment.max_length)
    if experiment.rollouts_from is not None:
        logged = read_logged(experiment, tokenizer, split.held_out)
        split = replace(split, train=logged, repeated=logged.said)
    return grading, tokenizer, split


def completed(loaded: Loaded) -> Loaded:
    """Return the experiment with a run as its model replaced by the run's newest checkpoint, and epochs by steps.

    Each is said in a note.

    Raises:
        UserError: If the run has no checkpoint that can be read.
    """
    experiment, notes = loaded.experiment, [*loaded.notes]

    def found(name: str, what: str) -> str:
        if not os.path.isfile(Path(name) / "experiment.toml"):
            return name
        notes.append(f"{what} = '{name}' is a run, and its newest checkpoint is taken: {checkpoint_of(Path(name))}")
        return str(checkpoint_of(Path(name)))

    plan = experiment.algorithm.reference
    tasks = tuple(replace(t, model=found(t.model, f"the teacher of {t.task}")) for t in plan.tasks)
    plan = replace(plan, model=found(plan.model, "algorithm.reference.model"), tasks=tasks)
    algorithm = replace(experiment.algorithm, reference=plan)
    rewards = tuple(
        replace(r, verifier=replace(r.verifier, model=found(r.verifier.model, f"the reward {r.part}")))
        if isinstance(r.verifier, RewardModel)
        else r
        for r in experiment.rewards
    )
    experiment = replace(experiment, model=found(experiment.model, "model"), algorithm=algorithm, rewards=rewards)
    if experiment.epochs is None:
        return Loaded(experiment, tuple(notes))
    _, _, split = _split(experiment)
    rows, each = len(split.train), experiment.prompts_per_step
    # The small number keeps 3 epochs of 100 rows, 100 a step, from being 4 steps through rounding.
    steps = max(1, math.ceil(experiment.epochs * rows / each - 1e-9))
    said = f"epochs = {experiment.epochs:g} of {rows:,} rows, {each} a step, is steps = {steps}"
    said = "; ".join((said, *_unequal(experiment.algorithm)))
    return Loaded(replace(experiment, steps=steps, epochs=None), (*notes, said))


def _unequal(algorithm: Algorithm) -> Iterator[str]:
    """Yield why rows are not asked equally often in an epoch."""
    if isinstance(algorithm.sampler, Prioritized):
        yield "rows are drawn by their uncertainty: as many as the epochs have, some more often than others"
    if isinstance(algorithm.sampler, Greso):
        yield "rows that taught nothing are passed over, so the steps reach further than the epochs"
    if isinstance(algorithm.sampler, NoPositiveResampling):
        yield "rows that are mastered are asked no more, so the steps reach further than the epochs"
    if algorithm.keep is not None:
        yield "other rows are asked for groups that are refused, so the steps reach further than the epochs"


def _one_label(tasks: TaskSet) -> str:
    """Return what is to be said of rows whose labels are all one; "" where they differ."""
    labels = (tasks[n].given_rewards[0] for n in range(len(tasks)))
    # Stops at the first label that differs, so a large dataset is not rendered whole.
    first = next(labels)
    if any(label != first for label in labels):
        return ""
    kind, other = ("good", "bad") if first == 1 else ("bad", "good")
    return f"every label says {kind}, so the run learns no difference; add rows of {other} answers"


def _within(split: Split, most: int) -> Split:
    """Return the split without rows of more than ``most`` tokens, on both sides."""
    kept, said = [], []
    for tasks in (split.train, split.held_out):
        places = track(range(len(tasks)), "measuring rows", len(tasks))
        rows = (tasks[index] for index in places)
        fitting = [n for n, row in enumerate(rows) if row.longest <= most]
        if not fitting and len(tasks):
            raise ConfigError(f"no row of '{tasks.name}' has at most max_length = {most} tokens; raise it")
        kept.append(Subset(tasks, tuple(fitting)))
        said.append(len(tasks) - len(fitting))
    train, held_out = kept
    repeated = split.repeated
    if any(said):
        long = f"{said[0]:,} training and {said[1]:,} held-out rows are longer than max_length = {most} and left out"
        repeated = "; ".join(filter(None, (repeated, long)))
    return replace(split, train=train, held_out=held_out, repeated=repeated)


def held_out_questions(experiment: Experiment) -> TrainingData:
    """Return the same of a task that is only evaluated on: a table is asked whole, a generator from the held-out seed.

    Raises:
        UserError: As `questions`.
    """
    grading, tokenizer, renderer = _reading(experiment)
    if experiment.evaluation.tasks:
        return _fitting(experiment, tokenizer, build_eval_tasks(experiment.evaluation.tasks, renderer), grading)
    is_answered = experiment.algorithm.is_supervised and not isinstance(experiment.task, BenchmarkTask)
    answers = experiment.algorithm.dataset_answers if is_answered else ""
    asked = build_held_out(experiment.task, experiment.held_out, renderer, answers)
    again = repetitions(experiment.task, asked.questions)
    return _fitting(experiment, tokenizer, Split(asked, asked, 0, repeated=again, is_answered=is_answered), grading)


def _reading(experiment: Experiment) -> tuple[Grading | None, Tokenizer, ChatRenderer]:
    grading = grading_of(experiment)
    plan = experiment.environment
    schemas = () if plan is None or plan.server else describe(plan)
    check_weights(experiment.model, experiment.trust_remote_code)
    with show_progress(f"reading the tokenizer of {experiment.model}"):
        tokenizer = _switched(load_tokenizer(experiment.model, experiment.trust_remote_code), experiment)
    lora = experiment.lora
    if lora is not None and lora.adapter and adapter_tokenizer(Path(lora.adapter), tokenizer) is not None:
        raise ModelError(
            f"the adapter '{lora.adapter}' was saved with another chat template than '{experiment.model}' has, whose "
            f"prompts it would not know; type gnomon export {quote(lora.adapter)} FOLDER and set model = FOLDER, or "
            "remove the tokenizer's files beside the adapter"
        )
    is_first = experiment.continue_from is None and (lora is None or (lora.base, lora.adapter) == ("unquantized", None))
    _check_teachers(experiment.algorithm, experiment.model, experiment.task, tokenizer, is_first)
    # Raises where the chat template cannot render a reply between two answers.
    if experiment.environment is not None:
        TurnTokenizer.over(tokenizer)
    told, tools = (None, schemas) if tells_tools(tokenizer, schemas) else (describe_tools(schemas), ())
    return grading, tokenizer, ChatRenderer(tokenizer, experiment.system or None, tools, told if schemas else None)


def _check_teachers(algorithm: Algorithm, model: str, task: TaskConfig, tokenizer: Tokenizer, is_first: bool) -> None:
    """Refuse a reference that cannot be compared with the model, or that has nothing to teach.

    Args:
        is_first: Whether the policy begins with the model's own weights.

    Raises:
        ConfigError: A teacher has other tokens, a mixture no such part, or the only teacher is the model itself.
        ModelError: A teacher cannot be loaded.
    """
    plan = algorithm.reference
    for name in plan.teachers:
        check_weights(name, plan.trust_remote_code)
        flaw = tokenizer.difference(load_tokenizer(name, plan.trust_remote_code))
        if flaw is not None:
            raise ConfigError(
                f"algorithm.reference: '{name}' has other tokens than '{model}': {flaw}; log-probabilities "
                "can be compared where tokens are the same texts, so name a teacher of the model's family"
            )
    parts = labels_of([part.task.name for part in task.parts]) if isinstance(task, MixtureTask) else []
    taught = dict.fromkeys(teacher.task for teacher in plan.tasks)
    strange = [name for name in taught if name not in parts]
    if strange:
        raise ConfigError(
            f"algorithm.reference.tasks names '{strange[0]}', which is no part of a mixture here (parts: "
            f"{', '.join(parts) or 'none, the task is a single one'}); set algorithm.reference.model for all questions"
        )
    inner = [(own, other) for own in taught for other in parts if other.startswith(f"{own}:") and other not in taught]
    if inner:
        raise ConfigError(
            f"algorithm.reference.tasks: ids of the part '{inner[0][1]}' begin as those of '{inner[0][0]}', whose "
            f"teacher would score both; give '{inner[0][1]}' a teacher too, or save one as a file of another name"
        )
    # At the start such a teacher has the policy's own log-probabilities, and its advantage or loss is 0 everywhere.
    learns = isinstance(algorithm.advantage, ReverseKl) or isinstance(algorithm.surrogate, Distillation)
    if learns and not plan.prompt and (not plan.teachers or (is_first and set(plan.teachers) == {model})):
        own = "an average of the model's own weights" if plan.model == "average" else "the model's own first weights"
        raise ConfigError(
            f"algorithm '{algorithm.name}' learns from a teacher, and algorithm.reference is {own}, which teach "
            "nothing; set algorithm.reference.model to another folder, run or model, or algorithm.reference.prompt to "
            "what the model itself shall know"
        )


def _shorter(plan: ReferencePolicy, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Return the teacher that reads every answer, and its context, where that is shorter than the model's own.

    One with a prompt of its own is looked at where that prompt is made.
    """
    is_one = len(plan.teachers) == 1 and not plan.tasks and not plan.prompt
    read = [(n, load_tokenizer(n, plan.trust_remote_code).context_length) for n in plan.teachers if is_one]
    return [(name, n) for name, n in read if n is not None and n < (tokenizer.context_length or math.inf)]


def _switched(tokenizer: Tokenizer, experiment: Experiment) -> Tokenizer:
    """Return the tokenizer whose chat template is given the experiment's variables and day.

    Raises:
        ConfigError: If the template does not read a variable.
    """
    tokenizer = replace(tokenizer, date=experiment.template_date)
    switches = experiment.chat_template_kwargs
    if not switches:
        return tokenizer
    flaw = reserved_flaw(switches)
    if flaw is not None:
        raise ConfigError(f"chat_template_kwargs: {flaw}; remove it")
    # A misspelt variable would silently be ignored by the template, so each must change the rendered text.
    idle = Looks(tokenizer).idle([{"role": "user", "content": "2+2="}], (), switches)
    if idle is not None:
        raise ConfigError(
            f"chat_template_kwargs.{idle} = {switches[idle]!r} changes nothing: the chat template of "
            f"{experiment.model} does not read it so; remove it"
        )
    return replace(tokenizer, switches=switches)


def _fitting(experiment: Experiment, tokenizer: Tokenizer, split: Split, grading: Grading | None) -> TrainingData:
    sampling, eval_sets = sampling_of(experiment, tokenizer), _eval_sets(experiment, tokenizer, split, grading)
    most = sampling.max_completion_length
    is_supervised = experiment.algorithm.is_supervised
    is_asked = not is_supervised and experiment.rollouts_from is None
    # An evaluation has one set for both sides of the split.
    trained = () if split.train is split.held_out else ((split.train, most if is_asked else 0),)
    measured = ((split.held_out, 0),) if is_supervised and not eval_sets else ()
    for tasks, longest in (*trained, *measured, *((e.tasks, e.sampling.max_completion_length) for e in eval_sets)):
        check_context(tasks, tokenizer.context_length, longest, tokenizer.context_note)
    for name, context in _shorter(experiment.algorithm.reference, tokenizer):
        for tasks, longest in trained:
            check_context(tasks, context, longest, f" of the teacher '{name}'")
    untried = [*experiment.idle]
    turn = experiment.environment.max_turn_tokens if experiment.environment else 0
    untried += dict.fromkeys(
        _cut(each, turn) for each in (*([sampling] if is_asked else []), *(e.sampling for e in eval_sets))
    )
    judged = [(eval_set.tasks, eval_set.grading, eval_set.sampling) for eval_set in eval_sets]
    if trained and grading is not None and is_asked:
        judged.insert(0, (split.train, grading, sampling))
    beginning = beginning_of(tokenizer, experiment.grading.opening)
    for tasks, by, drawn in judged:
        # What the prompt opens, such as a box, a completion need not say.
        opened = beginning.opening(tasks[0].prompt) if len(tasks) else ""
        bars = partial(barred, sampling=drawn, tokenizer=tokenizer, opened=opened)
        # A budget alone is said: held-out answers that are cut are a measure, and a budget is often tried.
        bounds = Bounds(partial(until_stop, sampling=drawn), bars, bool(drawn.grammar.regex))
        untried.append(check_answers([tasks], by, grading_limits(experiment), bounds))
    halves = (split.train, *((split.held_out,) if split.train is not split.held_out else ()))
    untried += [own_system(halves) if experiment.system else "", marked(halves, tokenizer)]
    untried.append(_untold(experiment.task, halves, [by for _, by, _ in judged]))
    parts_count = "component_rewards" in experiment.algorithm.advantage.needs
    if trained and is_asked and grading is not None and not parts_count:
        untried.append(_unrewarded(grading))
    if is_supervised and not eval_sets and experiment.evaluation.samples > 1:
        untried.append(f"evaluation.samples = {experiment.evaluation.samples} changes nothing: no answer is drawn")
    untried.append(_one_label(split.train) if experiment.algorithm.samples == "labels" else "")
    untried.append(_idle_packages(experiment, [by for by in (grading, *(each.grading for each in eval_sets)) if by]))
    said = "; ".join(dict.fromkeys(filter(None, untried)))
    return TrainingData(tokenizer, split, sampling, grading, beginning, untried=said, eval_sets=eval_sets)


def _untold(task: TaskConfig, sets: Sequence[TaskSet], gradings: Sequence[Grading]) -> str:
    """Return in words that a column of a table which usually means input reaches no prompt; "" for none."""
    if not isinstance(task, TableTask):
        return ""
    judged = {getattr(reward.verifier, "column", "") for by in gradings for reward in by.rewards}
    return untold(sets, {*task.reward_columns, *judged})


def _unrewarded(grading: Grading) -> str:
    """Return in words that no weight is above 0; "" where one is."""
    if any(weight > 0 for weight in grading.weights.values()):
        return ""
    if not any(grading.weights.values()):
        return "every reward has weight 0, so all answers earn 0 and nothing is learned from rewards"
    below = ", ".join(f"'{reward.part}' ({reward.weight:g})" for reward in grading.rewards if reward.weight)
    return f"no reward has a weight above 0, so the answer that does best at {below} earns the least"


def _cut(sampling: Sampling, turn: int) -> str:
    """Return in words that answers under a grammar are longer than they may be; "" where some are not."""
    grammar = None if sampling.stop else Grammar.of(sampling)
    most = min(sampling.max_completion_length, turn or sampling.max_completion_length)
    if grammar is None or not (found := grammar.cut(most)):
        return ""
    named = "environment.max_turn_tokens" if most < sampling.max_completion_length else "sampling.max_completion_length"
    return f"sampling.grammar: {found}, so all may be cut off; raise {named}"


def _eval_sets(
    experiment: Experiment, tokenizer: Tokenizer, split: Split, grading: Grading | None
) -> tuple[EvalSet, ...]:
    """Return the held-out sets as they are asked.

    Raises:
        ConfigError: For a set that nothing judges.
    """
    plan = experiment.evaluation
    if experiment.algorithm.is_supervised and (plan.samples == 0 or not (grading or split.sets)):
        return ()
    sets = [*zip(split.sets, plan.tasks, strict=True)] if split.sets else []
    if not split.sets and len(split.held_out):
        sets = [(split.held_out, EvalTask(experiment.task))]
    found = []
    for tasks, asked in sets:
        how = asked.sampling.over(plan.sampling)
        sampling = replace(sampling_of(experiment, tokenizer), **how.given, record_routing=False, top_logprobs=None)
        check_stop_strings(sampling, tokenizer)
        Grammar.of(sampling)
        judged = grading if not split.sets else judged_by(experiment, asked, grading)
        if judged is None:
            raise ConfigError(
                f"nothing judges the answers to '{asked.label}'; name a reward, such as [[rewards]] kind = "
                '"numeric", or leave the set out'
            )
        # In a conversation answers differ all the same where the environment's replies do.
        samples = asked.samples or plan.samples
        one = ("temperature 0", "a temperature above 0") if sampling.is_greedy else ("top_k 1", "another top_k")
        if (sampling.is_greedy or sampling.top_k == 1) and samples > 1 and experiment.environment is None:
            raise ConfigError(
                f"at {one[0]} all {samples} answers to a held-out question are the same; ask for one sample "
                f"(evaluation.samples = 1, --samples 1), or set {one[1]}"
            )
        found.append(EvalSet(tasks, sampling, samples, judged, how.words(experiment.sampling)))
    return tuple(found)


def _idle_packages(experiment: Experiment, gradings: Sequence[Grading]) -> str:
    """Return that no program is run which could import the packages; "" where one is, or none is named."""
    runs = any(isinstance(reward.verifier, Code) for grading in gradings for reward in grading.rewards)
    tools = () if experiment.environment is None else experiment.environment.tools
    if runs or PYTHON in tools or not experiment.packages:
        return ""
    return f'packages = {list(experiment.packages)} changes nothing: no reward runs programs, and "python" is no tool'


def judged_by(experiment: Experiment, asked: EvalTask, grading: Grading | None) -> Grading | None:
    """Return what judges one of several held-out sets: its own rewards, those of a published set, or the run's."""
    gives = experiment.environment is not None and experiment.environment.is_rewarding
    own = asked.rewards or (asked.task.rewards if isinstance(asked.task, BenchmarkTask) and not gives else ())
    if not own:
        return grading
    _check_seconds(experiment, own)
    return Grading(tuple(allowed(reward, experiment.packages) for reward in own))


def sampling_of(experiment: Experiment, tokenizer: Tokenizer) -> Sampling:
    """Return the sampling plan with the model's own stop tokens."""
    plan = experiment.sampling
    beyond = [i for i in plan.stop_ids if not 0 <= i < tokenizer.vocab_size]
    if beyond:
        raise ConfigError(f"sampling.stop_ids {beyond} are outside the vocabulary of {tokenizer.vocab_size}")
    check_stop_strings(plan, tokenizer)
    folder = Path(experiment.model)
    sampling = Sampling(
        **{**vars(plan), "stop_ids": tuple(dict.fromkeys((*tokenizer.stop_ids, *plan.stop_ids)))},
        record_routing=experiment.algorithm.routing == "behavior",
        tokenizer=str(real_path(folder)) if folder.is_dir() else experiment.model,
        trust_remote_code=experiment.trust_remote_code,
        top_logprobs=experiment.algorithm.top_logprobs,
    )
    Grammar.of(sampling)
    return sampling


def grading_of(experiment: Experiment) -> Grading | None:
    """Return the rewards, the task's own when none is named, with the algorithm's penalty on length.

    None where supervised fine-tuning has none: nothing judges answers then.
    """
    penalty = experiment.algorithm.overlong
    budget = experiment.sampling.max_completion_length
    overlong = None
    if penalty is not None:
        # The penalty's buffer is a fraction of the budget in an experiment, and tokens in the reward.
        overlong = LengthPenalty(max(1, round(penalty.buffer * budget)), penalty.factor, budget)
    gives = experiment.environment is not None and experiment.environment.is_rewarding
    own = judged_itself if experiment.algorithm.is_supervised else own_rewards
    rewards = experiment.rewards or ((WeightedReward(EnvironmentReward()),) if gives else own(experiment.task))
    rewards = tuple(allowed(reward, experiment.packages) for reward in rewards)
    if not rewards:
        return None
    keep, parts = experiment.algorithm.keep, [reward.part for reward in rewards]
    if keep is not None and keep.part and keep.part not in parts:
        raise ConfigError(f"algorithm.keep.part: {unknown('component of the reward', keep.part, parts)}")
    _check_seconds(experiment, rewards)
    grading = Grading(rewards, overlong)
    for place, part in parts_of(experiment.algorithm.advantage):
        for name in sorted(part.components - grading.weights.keys()) if isinstance(part, Composed) else ():
            raise ConfigError(f"algorithm.{place}: {unknown('component of the reward', name, grading.weights)}")
    return grading


def _check_seconds(experiment: Experiment, rewards: Sequence[WeightedReward]) -> None:
    for reward in rewards:
        # Otherwise the grader's deadline kills the worker first, and a wrong answer counts as an error.
        if isinstance(reward.verifier, Code) and reward.verifier.total_seconds >= experiment.grading.deadline_seconds:
            raise ConfigError(
                f"the reward '{reward.part}' gives programs total_seconds = {reward.verifier.total_seconds:g}, which "
                "must be less than grading.deadline_seconds (a program that is only slow would be an error), "
                f"got {experiment.grading.deadline_seconds:g}; raise that or lower total_seconds"
            )


def isolation_of(experiment: Experiment, gradings: Sequence[Grading]) -> str:
    """Return what isolates model-written code in this run, tried out now, in words for the run card.

    Raises:
        ConfigError: If nothing does.
    """
    programs = (reward.verifier for grading in gradings for reward in grading.rewards)
    asked = [(program.sandbox, program.packages) for program in programs if isinstance(program, Code)]
    plan = experiment.environment
    if plan is None or not (plan.container or PYTHON in plan.tools):
        return enforced_by(asked)
    if plan.sandbox != "docker" and plan.sandbox != "podman":
        return enforced_by([*asked, (plan.sandbox, plan.packages)])
    assert plan.container is not None
    plan.container.check(PYTHON in plan.tools)
    of_rewards = [enforced_by(asked)] if asked else []
    return "; ".join([*of_rewards, f"{plan.sandbox}, image {plan.image}: a container for each rollout"])


def grading_limits(experiment: Experiment) -> Limits:
    """Return what the processes that grade may use."""
    plan = experiment.grading
    return Limits(
        workers=plan.workers,
        deadline_seconds=plan.deadline_seconds,
        memory_gib=plan.memory_gib or None,
        environment=plan.environment,
    )


@dataclass(frozen=True)
class PromptChoice:
    """What decides which prompt is asked next, and what remembers how it went.

    Attributes:
        keys: Keys of the prompts, where something is remembered of each.
    """

    curriculum: UniformCurriculum | PrioritizedCurriculum | GresoCurriculum | NoPositiveCurriculum
    tracker: TaskValues | None
    drift: Drift
    replay: SelfImitationReplay | None = None
    keys: PromptKeys | None = None


def build_curriculum(algorithm: Algorithm, tasks: TaskSet, seed: int, has_agent: bool = False) -> PromptChoice:
    """Return curriculum, tracker, drift and replay buffer as the algorithm asks for them.

    Args:
        has_agent: Whether an agent plays the tasks, which may name roles.

    Raises:
        UserError: For a combination that cannot be meant, or a file of initial values that cannot be used.
    """
    sampler, plan = algorithm.sampler, algorithm.tracker
    if "role" in algorithm.needs and not has_agent and not any(role_of(tasks[index]) for index in range(len(tasks))):
        raise ConfigError(
            f"algorithm '{algorithm.name}' asks for roles (InRole), and no task has one: give the rows a column `role` "
            "of texts, or choose another condition"
        )
    reads_values = plan is not None and (uses_tracker(algorithm) or isinstance(sampler, Prioritized))
    replay = None
    if algorithm.replay is not None:
        replay = SelfImitationReplay(algorithm.replay, seed, algorithm.mask_truncated)
    remembers = reads_values or isinstance(sampler, Greso | NoPositiveResampling)
    keys = keys_of(tasks) if remembers or replay is not None else None
    task_index = TaskIndex(keys.ids) if keys is not None and remembers else None
    tracker: TaskValues | None = None
    drift: Drift = NoDrift()
    if reads_values and task_index is not None:
        tracker, drift = _build_tracker(algorithm, task_index)
    chosen: UniformCurriculum | PrioritizedCurriculum | GresoCurriculum | NoPositiveCurriculum
    if isinstance(sampler, Prioritized):
        assert isinstance(tracker, ValueTracker), "validate refuses Prioritized without a TrackerConfig"
        chosen = PrioritizedCurriculum(tracker, sampler.epsilon, sampler.gamma, seed)
    elif isinstance(sampler, Greso) and task_index is not None:
        chosen = GresoCurriculum(task_index, sampler, seed)
    elif isinstance(sampler, NoPositiveResampling) and task_index is not None:
        chosen = NoPositiveCurriculum(task_index, sampler, seed)
    else:
        chosen = UniformCurriculum(len(tasks), seed)
    return PromptChoice(chosen, tracker, drift, replay, keys)


def keys_of(tasks: TaskSet) -> PromptKeys:
    """Return the keys of all prompts; each is rendered once."""
    return PromptKeys.of(tasks[index] for index in track(range(len(tasks)), "listing prompts", len(tasks)))


def _build_tracker(algorithm: Algorithm, task_index: TaskIndex) -> tuple[TaskValues, Drift]:
    """Return what keeps a value for each prompt, and what it forgets by."""
    plan = algorithm.tracker
    assert plan is not None, "validate refuses Tracked and Prioritized without a tracker"
    if isinstance(plan, RoleAverage):
        return RoleValues(task_index, plan.decay), NoDrift()
    if isinstance(plan, OptimalValue):
        fixed = FixedValues(task_index, plan.beta)
        if plan.initial != "samples":
            fixed.load(Path(plan.initial))
        return fixed, NoDrift()
    drift: Drift = NoDrift()
    rule = DecayRule.constant(plan.rho_min)
    if plan.drift != "constant":
        # Without drift the tracker forgets at one constant rate.
        drift = RescoredDrift(task_index) if plan.drift == "replayed" else AccumulatedDrift(task_index)
        rule = DecayRule(plan.rho_min, plan.rho_max, plan.d_half)
    tracker = ValueTracker(task_index, rule, plan.rewards, plan.prior)
    if plan.initial not in ("prior", "samples"):
        tracker.load(Path(plan.initial))
    if algorithm.updates.total < drift.needs_updates:
        raise ConfigError(
            f'tracker.drift = "{plan.drift}" needs {drift.needs_updates} updates a step to measure anything and there '
            f'is {algorithm.updates.total}; set algorithm.updates.minibatches, or algorithm.tracker.drift = "replayed"'
        )
    return tracker, drift


def keeping(algorithm: Algorithm) -> tuple[Callable[[Group], bool], int]:
    """Return which groups are kept, and how often others are asked instead."""
    if algorithm.keep is None:
        return (lambda group: True), 1
    return partial(is_informative, part=algorithm.keep.part), algorithm.keep.max_attempts
