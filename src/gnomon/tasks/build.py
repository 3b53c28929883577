"""From settings to tasks: names, building, the held-out split, and the check that prompts fit."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from gnomon.core.errors import ConfigError, DatasetError, bounded, check_bounds, unknown
from gnomon.core.progress import track
from gnomon.core.sections import EvalSampling
from gnomon.core.tables import to_table
from gnomon.core.types import Message
from gnomon.rewards.exact import Numeric
from gnomon.rewards.grading import WeightedReward
from gnomon.rewards.reasoning import Reasoning
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.base import Renderer, TaskSet
from gnomon.tasks.benchmarks import BENCHMARKS, BenchmarkTask, benchmark_named
from gnomon.tasks.chat import ChatTokenizer
from gnomon.tasks.contamination import Overlap, overlap
from gnomon.tasks.mixture import Mixture, schedule
from gnomon.tasks.published import PUBLISHED, PublishedTask, published_named
from gnomon.tasks.question import Answers, ListDataset, Question, QuestionSet, TokenizedDataset, one_answer_each
from gnomon.tasks.readers import is_file_name
from gnomon.tasks.reasoning import ReasoningGymTask, generators
from gnomon.tasks.row_inputs import untold_inputs
from gnomon.tasks.split import RESERVED, HeldOut, Subset, by_content, check_disjoint, disjoint, first, repeated, unique
from gnomon.tasks.tables import TableTask

_Sides = tuple[QuestionSet, Subset[Question]]
SingleTask = ArithmeticTask | ReasoningGymTask | TableTask | PublishedTask
_Generated = ArithmeticTask | ReasoningGymTask
_Read = TableTask | PublishedTask | BenchmarkTask


@dataclass(frozen=True)
@bounded("mixture", weight="> 0 and finite")
class WeightedTask:
    """One part of a mixture.

    Attributes:
        task: The task that the part asks.
        weight: Share of the part relative to the others, above 0.
    """

    task: SingleTask
    weight: float = 1.0


@dataclass(frozen=True)
@bounded("mixture", size="at least 1")
class MixtureTask:
    """Several tasks as one, in proportion to their weights.

    A part that generates questions makes as many as its share needs, whatever its own ``size``; a table must hold
    enough.

    Attributes:
        parts: The tasks, each with a weight.
        kind: "mixture".
        size: Number of questions of the whole.
        seed: Seed of the order within each part.
    """

    parts: tuple[WeightedTask, ...]
    kind: Literal["mixture"] = "mixture"
    size: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds("mixture", self, parts=(bool(self.parts), "at least one task"))

    @property
    def name(self) -> str:
        """The parts' names, joined by +."""
        return "+".join(dict.fromkeys(part.task.name for part in self.parts))

    def questions(self) -> Mixture:
        """Return the questions.

        Raises:
            ConfigError: A table is smaller than its share, or a part is wrong.
            DatasetError: A part cannot be read.
        """
        shares = self.shares(self.size)
        sets: list[QuestionSet] = [
            _sized(p.task, share).questions() for p, share in zip(self.parts, shares, strict=True)
        ]
        return self.mixed(sets, self.size)

    def shares(self, size: int) -> tuple[int, ...]:
        """Return how many of ``size`` tasks come from each part."""
        places = schedule([part.weight for part in self.parts], size)
        return tuple(places.count(number) for number in range(len(self.parts)))

    def mixed(self, sets: Sequence[QuestionSet], size: int) -> Mixture:
        """Return the mixture of ``sets``, one for each part, at this mixture's weights."""
        return Mixture([(p.weight, s) for p, s in zip(self.parts, sets, strict=True)], size, self.seed)


TaskConfig = ArithmeticTask | ReasoningGymTask | TableTask | PublishedTask | MixtureTask | BenchmarkTask

_SOME = 200


@dataclass(frozen=True)
@bounded("evaluation.tasks", samples="at least 1", size="at least 1")
class EvalTask:
    """One of several sets of held-out questions, and how it is asked. Its name alone stands for all defaults.

    Attributes:
        task: Where the questions come from: a name such as "aime-24", or a task's table.
        name: What it is called in tables and records; none takes the task's name.
        samples: Answers per question; none takes ``evaluation.samples``.
        size: Number of different questions, the first ones; none asks the whole of a published set, and 200 of any
            other.
        sampling: How answers are drawn; what is not set is as in ``evaluation.sampling``, and then as in training.
        rewards: What judges answers; none takes the set's own, and for a table the rewards of the run.

    Raises:
        ConfigError: A number is out of range.
    """

    task: TaskConfig
    name: str = ""
    samples: int | None = None
    size: int | None = None
    sampling: EvalSampling = EvalSampling()
    rewards: tuple[WeightedReward, ...] = ()

    @property
    def label(self) -> str:
        """What it is called."""
        return self.name or self.task.name

    def questions(self) -> ListDataset:
        """Return its different questions, the first ``size`` of them.

        Raises:
            ConfigError, DatasetError: As those of the task.
        """
        default = None if isinstance(self.task, BenchmarkTask) else _SOME
        asked = unique(self.task.questions())
        kept = first(asked, len(asked) if (most := self.size or default) is None else most)
        again = repetitions(self.task, asked)
        return ListDataset(self.label, tuple(kept[index] for index in range(len(kept))), again)


NAMED: Mapping[str, TaskConfig] = MappingProxyType({"arithmetic": ArithmeticTask()})


@dataclass(frozen=True)
class Split:
    """What is trained on and what is only evaluated on; no question is in both.

    Attributes:
        dropped: Number of training tasks that were removed because their question is held out.
        overlap: What training and held-out questions still have in common.
        repeated: One sentence about rows of a table that ask the same question, on either side; "" for none.
        sets: The sets that ``held_out`` is made of, in their order, where there are several.
        is_answered: Whether held-out tasks have the dataset's answers.
    """

    train: TaskSet
    held_out: TaskSet
    dropped: int
    overlap: Overlap = Overlap()
    repeated: str = ""
    sets: tuple[TaskSet, ...] = ()
    is_answered: bool = False


def named(name: str) -> TaskConfig:
    """Return the task that a command line means by ``name``.

    A name in `NAMED`; a test set or a training set by its name; a file of a format in `TABLE_SUFFIXES`; a reasoning-gym
    generator, with or without ``reasoning_gym/`` in front; else, with a slash, a folder or a dataset on the hub.

    Raises:
        ConfigError: The message names the nearest known name.

    >>> named("held_out.jsonl").kind
    'table'
    """
    if name in NAMED:
        return NAMED[name]
    # Test sets come first: `gnomon evaluate --task gsm8k` must not ask training questions.
    known_set = benchmark_named(name) or published_named(name)
    if known_set is not None:
        return known_set
    if is_file_name(name):
        return TableTask(name)
    generator = name.removeprefix("reasoning_gym/")
    if "/" in generator:
        return TableTask(name)
    known = generators()
    if generator in known:
        return ReasoningGymTask(generator)
    names = [*NAMED, *BENCHMARKS, *PUBLISHED, *known]
    raise ConfigError(
        unknown("task", name, names) + "; or a file ending in .jsonl, .json, .csv, .tsv, .parquet or .arrow"
    )


def named_for_training(name: str) -> TaskConfig:
    """Return the task that ``name`` means as something to train on: of GSM8K the training questions.

    >>> named_for_training("gsm8k").kind, named("gsm8k").kind
    ('published', 'benchmark')
    """
    # A hub name or a path means what it says; only a bare name is read as the training questions.
    return (published_named(name) if "/" not in name.partition("=")[0] else None) or named(name)


def task_table(given: Any, named: Callable[[str], TaskConfig]) -> Any:
    """Return the table of a task that is a name, or has parts that are names; ``named`` tells what a name means."""
    if isinstance(given, str):
        return to_table(named(given))
    if not isinstance(given, dict) or not isinstance(given.get("parts"), list):
        return given
    parts = [{"task": part} if isinstance(part, str) else part for part in given["parts"]]
    return {
        "kind": "mixture",
        **given,
        "parts": [{**p, "task": task_table(p.get("task"), named)} if isinstance(p, dict) else p for p in parts],
    }


def own_rewards(task: TaskConfig) -> tuple[WeightedReward, ...]:
    """Return what judges a task where the experiment names no reward.

    Raises:
        ConfigError: No reward is known for the task.

    >>> [reward.part for reward in own_rewards(named("arithmetic"))]
    ['answer']
    """
    if isinstance(task, BenchmarkTask | PublishedTask):
        return task.rewards
    singles = [part.task for part in task.parts] if isinstance(task, MixtureTask) else [task]
    if all(isinstance(single, ArithmeticTask) for single in singles):
        return (WeightedReward(Numeric(), name="answer"),)
    if all(isinstance(single, ReasoningGymTask) for single in singles):
        return (WeightedReward(Reasoning(extract="last_line"), name="answer"),)
    raise ConfigError(
        f"the task '{task.name}' has no reward of its own; name at least one, such as "
        '[[rewards]] kind = "numeric", or kind = "function" with your own; on the command line '
        "'rewards=[{kind=\"numeric\"}]'"
    )


def judged_itself(task: TaskConfig) -> tuple[WeightedReward, ...]:
    """Return `own_rewards` of the task, or none where no reward is known for it."""
    try:
        return own_rewards(task)
    except ConfigError:
        return ()


def named_held_out(name: str) -> TaskConfig:
    """Return the task that ``name`` means as something to evaluate on: a generator with a reserved seed.

    >>> named_held_out("chain_sum").seed == HeldOut().seed
    True
    """
    config = named(name)
    return replace(config, seed=HeldOut().seed) if isinstance(config, _Generated) else config


def build(config: TaskConfig, renderer: Renderer) -> TaskSet:
    """Return the tasks that ``config`` describes; what is wrong is found before any rendering."""
    return TokenizedDataset(config.questions(), renderer)


_Kind = TypeVar("_Kind", bound=TaskConfig)
_SMALL = 2**22
"""Bytes of a file that is read twice: for the check of its rows, and for the run."""
_COLUMNS = {"pairs": "chosen and rejected", "labels": "completion and label"}


def with_dataset_answers(config: _Kind, answers: Answers = "data") -> _Kind:
    """Return the task with the answers of its rows, where these are tables that say them in columns of their own.

    Raises:
        ConfigError: Preferences or labels are asked for, and a task is no table.
    """
    if isinstance(config, MixtureTask):
        parts = (replace(part, task=with_dataset_answers(part.task, answers)) for part in config.parts)
        return replace(config, parts=tuple(parts))
    if isinstance(config, TableTask) and answers == "pairs":
        chosen, rejected = config.completion_column or "chosen", config.rejected_column or "rejected"
        return replace(config, completion_column=chosen, rejected_column=rejected)
    if isinstance(config, TableTask) and answers == "labels":
        completion, label = config.completion_column or "completion", config.label_column or "label"
        return replace(config, completion_column=completion, label_column=label)
    if isinstance(config, TableTask):
        return replace(config, completion_column=config.completion_column or "auto")
    if answers in _COLUMNS:
        raise ConfigError(
            f"'{config.name}' has no {_COLUMNS[answers]}; set task to a table with columns prompt, {_COLUMNS[answers]}"
        )
    return config


def check_small(config: TaskConfig, answers: Answers = "") -> None:
    """Read the files of a task that are small, so that rows which cannot be used are told before a library is loaded.

    Raises:
        DatasetError: As `TableTask.questions`.
    """
    for part in [each.task for each in config.parts] if isinstance(config, MixtureTask) else [config]:
        if isinstance(part, TableTask) and os.path.isfile(part.path) and os.path.getsize(part.path) <= _SMALL:
            (with_dataset_answers(part, answers) if answers else part).questions()


def build_split(
    config: TaskConfig,
    held_out: HeldOut,
    renderer: Renderer,
    evaluation: TaskConfig | tuple[EvalTask, ...] | None = None,
    answers: Answers = "",
    hint: str = "",
) -> Split:
    """Return training and held-out tasks that share no question; all held-out questions are different.

    Args:
        evaluation: Where the held-out questions come from (its first ``held_out.size`` different ones, or all when it
            has fewer), or several sets, each with a size of its own; None takes them from ``config`` itself: a
            generator makes others from another seed, a table is split by content, a mixture splits each part.
        answers: Which of the dataset's answers tasks have; those of test sets, and of several sets for evaluation,
            have none.
        hint: What the reference policy is asked of training tasks, as `TokenizedDataset` has it.

    Raises:
        ConfigError: There are too few different questions to hold out, or none left to train on; or the training task
            is a benchmark, or a generator with a seed that is reserved for held-out questions.
    """
    # Refused before anything is read: a table of millions of rows takes minutes.
    check_trainable(config)
    if answers:
        config = with_dataset_answers(config, answers)
        if evaluation is not None and not isinstance(evaluation, tuple | BenchmarkTask):
            evaluation = with_dataset_answers(evaluation, answers)
    parts = [part.questions() for part in evaluation] if isinstance(evaluation, tuple) else []
    if isinstance(evaluation, tuple):
        sides: _Sides = (config.questions(), joined(parts))
    elif evaluation is not None:
        asked: QuestionSet = evaluation.questions()
        sides = (config.questions(), first(unique(asked), held_out.most))
    else:
        sides = _split(config, held_out)
    train, kept_back = sides
    # Held-out questions win. `check_disjoint` then proves the result by a second look.
    remaining = disjoint(train, kept_back)
    check_disjoint(remaining, kept_back)
    common = overlap(remaining, kept_back)
    repeated = [part.repeated for part in parts]
    if evaluation is not None and not isinstance(evaluation, tuple):
        repeated.append(repetitions(evaluation, kept_back))
    is_answered = answers != "" and not isinstance(evaluation, tuple | BenchmarkTask)
    if answers == "labels" and len(remaining) < 2:
        raise ConfigError(
            f"each row is read with another row's answer, and '{config.name}' has one to train on; add rows, or lower "
            "held_out.size"
        )
    # Preferences and labels have one answer a row; only data of `gnomon sft` may have several in a conversation.
    own = answers == "data"
    trained, said = one_answer_each(remaining, renderer) if own else (remaining, "")
    measured, also_said = one_answer_each(kept_back, renderer) if own and is_answered else (kept_back, "")
    return Split(
        TokenizedDataset(trained, renderer, answers, hint),
        TokenizedDataset(measured, renderer, answers if is_answered else ""),
        remaining.dropped,
        common,
        "; ".join(filter(None, (trained_again(train), *repeated, said, also_said.replace("rows", "held-out rows", 1)))),
        tuple(TokenizedDataset(part, renderer) for part in parts),
        is_answered,
    )


def joined(parts: Sequence[ListDataset]) -> Subset[Question]:
    """Return the questions of several sets as one; what two of them ask is in it twice."""
    whole = ListDataset("+".join(part.name for part in parts), tuple(q for part in parts for q in part.questions))
    return Subset(whole, tuple(range(len(whole))))


def build_eval_tasks(tasks: Sequence[EvalTask], renderer: Renderer) -> Split:
    """Return several sets for evaluation alone, with nothing to train on beside them.

    Raises:
        ConfigError, DatasetError: As those of the tasks.
    """
    parts = [task.questions() for task in tasks]
    whole = TokenizedDataset(joined(parts), renderer)
    again = "; ".join(filter(None, (part.repeated for part in parts)))
    return Split(whole, whole, 0, repeated=again, sets=tuple(TokenizedDataset(part, renderer) for part in parts))


def repetitions(config: TaskConfig, asked: QuestionSet) -> str:
    """Return what `split.repeated` says of a table's rows; a generator may repeat itself."""
    return "; ".join(filter(None, (trained_again(asked), repeated(asked)))) if isinstance(config, _Read) else ""


def own_system(sets: Iterable[TaskSet]) -> str:
    """Return, in words, how many questions of tables bring a system message that replaces `system`; "" for none."""
    own, asked = _count(
        sets, lambda q: not isinstance(q.content, str) and any(m["role"] == "system" for m in q.content)
    )
    return f"`system` is not before {own:,} of {asked:,} questions, which bring a system message" if own else ""


def marked(sets: Iterable[TaskSet], tokenizer: ChatTokenizer) -> str:
    """Return, in words, how many questions of tables hold control tokens that the model's chat writes; "" for none.

    Such questions were put into a chat's form before, and would be within a turn, their marks as plain text.
    """
    # What the template writes around an empty message are the marks of this model's
    # chat; other control tokens are no sign of a chat that was rendered before.
    probe: Message = {"role": "user", "content": ""}
    written: str | None = ""
    with suppress(ConfigError):
        written = tokenizer.template([probe])
    marks = [text for text in tokenizer.control_strings if text.strip() and (written is None or text in written)]
    mark = re.compile("|".join(map(re.escape, marks)) or "(?!)")
    found, asked = _count(sets, lambda q: mark.search(str(q.content)) is not None)
    if not found:
        return ""
    return (
        f"{found:,} of {asked:,} questions hold control tokens of the model ({', '.join(marks[:3])}), which stay plain "
        "text in the prompt: give messages where those are turns"
    )


def untold(sets: Iterable[TaskSet], read: Collection[str]) -> str:
    """Return, in words, which column that usually means input stands in no question of its row; "" for none.

    Args:
        read: Columns that rewards read, of which nothing is said.
    """
    found = Counter[str]()

    def count(question: Question) -> bool:
        names = untold_inputs(question.columns, question.content)
        found.update(name for name in names if name not in read)
        return bool(names)

    _, asked = _count(sets, count)
    if not found:
        return ""
    name, rows = found.most_common(1)[0]
    more = f" (nor do {', '.join([n for n in found if n != name][:4])})" if len(found) > 1 else ""
    return (
        f"the column {name} reaches no prompt in {rows:,} of {asked:,} questions{more}: where it belongs to "
        f'the question, set task.template = "{{{name}}} {{question}}", else task.reward_columns = ["{name}"]'
    )


def _count(sets: Iterable[TaskSet], is_so: Callable[[Question], bool]) -> tuple[int, int]:
    """Return how many questions of tables are so, and how many there are in all."""
    found = [_count_in(tasks.questions, is_so) for tasks in sets if isinstance(tasks, TokenizedDataset)]
    return sum(count for count, _ in found), sum(asked for _, asked in found)


def _count_in(asked: QuestionSet, is_so: Callable[[Question], bool]) -> tuple[int, int]:
    source = asked
    # Views are taken off until the set itself shows whether it is a table.
    while isinstance(source, Subset):
        source = source.source
    if isinstance(source, Mixture):
        parts = [_count_in(part, is_so) for part in source.parts]
        return sum(count for count, _ in parts), sum(count for _, count in parts)
    if not isinstance(source, ListDataset):
        return 0, len(asked)
    return sum(is_so(asked[index]) for index in range(len(asked))), len(asked)


def trained_again(train: QuestionSet) -> str:
    """Return which rows of the tables among ``train`` ask what an earlier row asks, in words; "" for none."""
    if isinstance(train, Subset):
        return trained_again(train.source)
    if isinstance(train, Mixture):
        return "; ".join(filter(None, map(trained_again, train.parts)))
    return train.repeated if isinstance(train, ListDataset) else ""


def build_held_out(
    config: TaskConfig, held_out: HeldOut, renderer: Renderer, answers: Answers = ""
) -> TokenizedDataset:
    """Return up to ``held_out.size`` different tasks for evaluation alone.

    The first ones of a table or a benchmark; a generator's from ``held_out.seed``. All that there are when those are
    fewer.

    Raises:
        ConfigError: As `build_split`.
    """
    config = with_dataset_answers(config, answers) if answers else config
    if isinstance(config, MixtureTask):
        asked = _split_mixture(config, held_out)[1]
    elif isinstance(config, _Generated):
        asked = _other_seed(config, held_out, is_short_refused=False)
    else:
        asked = first(unique(config.questions()), held_out.most)
    return TokenizedDataset(one_answer_each(asked, renderer)[0] if answers == "data" else asked, renderer, answers)


def check_trainable(config: TaskConfig) -> None:
    """Refuse test sets, and seeds of held-out questions.

    Raises:
        ConfigError: The message names what to train on instead.
    """
    for part in [p.task for p in config.parts] if isinstance(config, MixtureTask) else [config]:
        if isinstance(part, BenchmarkTask):
            own = part.benchmark if part.benchmark in PUBLISHED else None
            other = f'its questions for training, task = "{own}"' if own else 'another task, such as task = "math"'
            raise ConfigError(
                f"'{part.name}' is a test set: it is evaluated on and never trained on; name it as evaluation.task, "
                f"and train on {other}"
            )
        if isinstance(part, _Generated) and part.seed in RESERVED:
            raise ConfigError(
                f"'{part.name}' has the seed {part.seed}, and those from {RESERVED.start} to {RESERVED[-1]} are kept "
                "for held-out questions, so that no run is evaluated on what another was trained on; choose another"
            )


def check_context(tasks: TaskSet, context_length: int | None, max_completion_length: int, note: str = "") -> None:
    """Raise DatasetError naming the tasks whose prompt and completion together may exceed the context.

    Every prompt is rendered once, so that what a template refuses or leaves out is found before anything is trained.

    Args:
        context_length: Tokens; None (the model does not say) passes every length.
        max_completion_length: Most tokens of an answer that is generated; 0 where none is. The dataset's own answers
            have to fit too.
        note: Why it is so short.
    """
    places = track(range(len(tasks)), "measuring prompts", len(tasks))
    each = [(task.id, len(task.prompt), task.longest) for task in (tasks[index] for index in places)]
    if context_length is None:
        return
    # The dataset's own answers: they are longer than their prompt, and do not fit.
    whole = [(name, length) for name, prompt, length in each if length > max(prompt, context_length)]
    if whole:
        raise DatasetError(
            f"{len(whole)} of {len(tasks)} rows of '{tasks.name}' are longer, prompt and answer, than the context of "
            f"{context_length} tokens{note}: {_longest(whole)}; shorten them, leave them out, or set max_length = "
            f"{context_length} to leave them out here"
        )
    if max_completion_length == 0:
        return
    lengths = [(name, prompt) for name, prompt, _ in each]
    room = context_length - max_completion_length
    if room < 1:
        raise DatasetError(
            f"max_completion_length = {max_completion_length} leaves no room for a prompt in the context of "
            f"{context_length} tokens{note}; set sampling.max_completion_length = {max(1, context_length // 2)} or less"
        )
    long = [(name, length) for name, length in lengths if length > room]
    if long:
        raise DatasetError(
            f"{len(long)} of {len(tasks)} prompts of '{tasks.name}' are longer than {room} tokens, the "
            f"context of {context_length}{note} less max_completion_length {max_completion_length}: "
            f"{_longest(long)}; shorten them or lower max_completion_length"
        )


def _longest(long: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} ({length})" for name, length in long[:3]) + (", ..." if len(long) > 3 else "")


def _sized(task: SingleTask, size: int) -> SingleTask:
    return replace(task, size=size) if isinstance(task, _Generated) and size >= 1 else task


def _split(config: TaskConfig, held_out: HeldOut) -> _Sides:
    if isinstance(config, _Read):
        return by_content(config.questions(), held_out)
    if isinstance(config, MixtureTask):
        return _split_mixture(config, held_out)
    return config.questions(), _other_seed(config, held_out)


_FEW = 1000
"""Questions that are drawn first where more are held out; if twice as many hold none that is new, these are all."""


def _other_seed(config: _Generated, held_out: HeldOut, is_short_refused: bool = True) -> Subset[Question]:
    """Return ``held_out.size`` different questions that the generator makes from the held-out seed.

    Args:
        is_short_refused: Whether fewer questions raise ConfigError; otherwise all there are is returned.
    """
    if config.seed == held_out.seed:
        raise ConfigError(f"'{config.name}' and held_out have the same seed {config.seed}; give them different ones")
    # A generator with few different questions repeats itself. The number drawn is doubled
    # until enough are different, no new ones come, or sixteen times as many were drawn.
    size, before, most = min(max(held_out.most, 1), _FEW), 0, 16 * held_out.most
    while True:
        drawn: QuestionSet = replace(config, seed=held_out.seed, size=size).questions()
        different = unique(drawn)
        if len(different) >= held_out.most:
            return first(different, held_out.most)
        if size >= most or (size > _FEW and len(different) == before):
            break
        size, before = min(2 * size, most), len(different)
    if not is_short_refused:
        return different
    raise ConfigError(
        f"'{config.name}' makes only {len(different)} different questions in {size}, and "
        f"held_out.size is {held_out.most}; lower it, or widen the task's range"
    )


def _split_mixture(config: MixtureTask, held_out: HeldOut) -> _Sides:
    train_shares, held_out_shares = config.shares(config.size), config.shares(held_out.most)
    trained: list[QuestionSet] = []
    kept_back: list[QuestionSet] = []
    for part, trained_share, kept_share in zip(config.parts, train_shares, held_out_shares, strict=True):
        # At least one of each part, or a part with a small share would never be evaluated.
        own = replace(held_out, size=max(kept_share, min(held_out.most, 1)))
        train, kept = _split(_sized(part.task, trained_share), own)
        trained.append(train)
        kept_back.append(kept)
    return config.mixed(trained, config.size), unique(config.mixed(kept_back, held_out.most))
