"""The data check of answers: each is read whole by its reward, and earns 1 when it is given as the answer; odd rows."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from gnomon.core.errors import DatasetError
from gnomon.core.processes.client import Limits
from gnomon.core.progress import show_progress, track
from gnomon.core.types import Grade, Message, Task
from gnomon.rewards.answers import final_answer
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.code.reward import Code
from gnomon.rewards.exact import Boxed, Exact, Numeric
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.instructions import Instructions
from gnomon.rewards.math import Mathematics
from gnomon.rewards.numbers import parse_number
from gnomon.rewards.reward_trial import made_answers
from gnomon.tasks.base import TaskSet
from gnomon.tasks.question import HasText, Question, QuestionSet, TokenizedDataset, digest

MOST_HEAVY = 500
"""Different answers that math-verify is tried on: all of MATH-500's, some seconds; a sample of a larger table's."""
MOST_BARRED = 50
"""Different answers of which it is asked whether a completion can hold them."""
_LARGEST = 10**15
"""Larger numbers have too many spellings to be looked for."""
SHOWN = 3
_ROW = re.compile(r"[0-9a-f]{12}-([0-9]+)")


@dataclass(frozen=True)
class _Flaw:
    """One answer that earns nothing.

    Attributes:
        where: Its row.
        value: What the answer is.
        why: The reason, in words.
    """

    where: str
    value: str
    why: str


@dataclass(frozen=True)
class Bounds:
    """What a completion may say, however well the model is trained.

    Attributes:
        cut: Returns what rewards see of a text: what stands before a stop string.
        bars: Of lists of texts, returns why no completion can hold one of each, in words; "" where one may.
        is_proof: Whether ``bars`` is sure and by a grammar; what a budget bars, or was only not found, is said.
    """

    cut: Callable[[str], str] = str
    bars: Callable[[Sequence[Sequence[str]]], str] = lambda held: ""
    is_proof: bool = True


_FREE = Bounds()


def check_answers(sets: Sequence[TaskSet], grading: Grading, limits: Limits, bounds: Bounds = _FREE) -> str:
    """Give every answer to the reward that judges it, in the form that it asks for, before anything is trained.

    Rewards that have such a form are tried: `Verifier.stated`. What needs math-verify is tried in a grading process, as
    it is in training.

    Args:
        sets: Their answers are tried.
        grading: Its rewards judge them.
        limits: Of the processes that grade.
        bounds: What a completion may say.

    Returns:
        In words that not all answers were tried, or that no completion can say some of those tried; else "".

    Raises:
        DatasetError: An answer earns less than 1, or no completion can say any of those tried. The message names the
            reward, how many rows, the first three with their answers, and what to do.
    """
    said = list[str]()
    for tasks in sets:
        # A reward is tried alone: an answer must earn 1 from each, whatever their weights.
        for reward in grading.rewards:
            light, heavy = _sorted(tasks, reward, bounds.cut)
            if heavy:
                # Evenly spaced over the table: the first rows of many sets are the easy ones.
                some = heavy[:: -(-len(heavy) // MOST_HEAVY)]
                if len(some) < len(heavy):
                    said.append(
                        f"of {len(heavy):,} different answers of '{tasks.name}' that are no numbers, {len(some)} were "
                        f"tried with the reward '{reward.part}'"
                    )
                light += _tried(some, reward, limits)
            if light:
                raise DatasetError(_report(light, len(tasks), tasks.name, reward))
            said.append(_barred(tasks, reward, bounds))
    return "; ".join(filter(None, said))


def _barred(tasks: TaskSet, reward: WeightedReward, bounds: Bounds) -> str:
    """Return in words which answers no completion can hold; "" for none, and where a reward takes other texts too.

    Raises:
        DatasetError: It can hold none of them, and that is sure.
    """
    if not isinstance(reward.verifier, Boxed | Exact | Mathematics | Numeric):
        return ""
    column = reward.verifier.column
    golds = list(dict.fromkeys(str(asked.columns[column]) for asked in _asked(tasks) if column in asked.columns))
    golds = golds[:: -(-len(golds) // MOST_BARRED)] if golds else []
    found = {gold: why for gold in golds if (why := bounds.bars(_held(reward, gold)))}
    if not found:
        return ""
    gold, why = next(iter(found.items()))
    text = (
        f"{len(found):,} of {len(golds):,} different answers of '{tasks.name}' that were tried cannot be said to the "
        f"reward '{reward.part}', such as {_short(gold)!r}: {why}"
    )
    if len(found) == len(golds) and bounds.is_proof:
        raise DatasetError(f"{text}\nno rollout could earn anything; correct that setting, or the answers")
    return text


def _held(reward: WeightedReward, gold: str) -> list[list[str]]:
    r"""Return lists of texts: a completion that earns the answer holds one of each. What has endless forms is left out.

    >>> _held(WeightedReward(Boxed()), "#### 1,080")[0]
    ['box']
    """
    verifier = reward.verifier
    # Of \\boxed and \\fbox.
    is_boxed = isinstance(verifier, Boxed) and reward.within in ("anywhere", "after_thinking")
    held = [["box"]] if is_boxed or reward.within == "last_box" else []
    if isinstance(verifier, Exact):
        text = gold.strip()
        return [*held, [text, *((text.casefold(), text.upper(), text.title()) if verifier.casefold else ())]]
    marked = final_answer(gold)
    number = parse_number(gold if marked is None else marked)
    is_near = isinstance(verifier, Boxed | Numeric) and verifier.tolerance > 0
    if number is None or number.value is None or is_near or abs(number.value) > _LARGEST:
        return held
    # A percentage is its hundredth too.
    scales = (1, Fraction(1, 100)) if number.unit == "%" else (1, 100)
    return [*held, [form for scale in scales for form in _forms(abs(number.value) * scale)]]


def _forms(value: Fraction) -> list[str]:
    """Return what the spellings of a number hold: its numerator, its decimals or the digits before an exponent."""
    digits = f"{float(value):e}".partition("e")[0].rstrip("0").removesuffix(".")
    decimal = f"{float(value):f}".strip("0").removesuffix(".")
    return [
        str(value.numerator),
        f"{value.numerator:,}",
        *filter(None, (decimal,)),
        digits if "." in digits else f"{digits}e",
    ]


def _sorted(
    tasks: TaskSet, reward: WeightedReward, cut: Callable[[str], str]
) -> tuple[list[_Flaw], list[tuple[Question | Task, Sample]]]:
    """Return the answers that earn nothing, and the samples that only a grading process should judge."""
    flaws: list[_Flaw] = []
    heavy: list[tuple[Question | Task, Sample]] = []
    judged: dict[str, str | None] = {}
    for asked in track(_asked(tasks), f"checking the answers of {tasks.name}", len(tasks)):
        value = str(asked.columns.get(getattr(reward.verifier, "column", "answer")))
        # Each different value is judged once: tables repeat answers many times. Tests and instructions are judged with
        # question and columns, which name functions and arguments.
        is_alone = not isinstance(reward.verifier, Code | Instructions)
        key = value if is_alone else digest(asked.text, dict(asked.columns))
        if key not in judged:
            judged[key] = None
            sample = Sample(asked.text, "", columns=asked.columns)
            try:
                said = reward.verifier.stated(sample)
                if said is None:
                    continue
                said = reward.placed(said, value)
                sample = replace(sample, completion=cut(said))
                seen = reward.seen(sample)
                if seen is not None and reward.verifier.is_heavy(seen):
                    heavy.append((asked, sample))
                    continue
                earned, why = _earned(reward, seen), f"earns {{:g}} when it is given as the answer{_where(reward)}"
                # The form of the answer may have ended at a stop string. The bare
                # value, or its last word, shows whether any form of it survives.
                if earned != 1.0 and sample.completion != said:
                    short = [reward.placed(text, text) for text in (value, *said.split()[-1:])]
                    given = [replace(sample, completion=cut(text)) for text in short]
                    earned = max(_earned(reward, reward.seen(each)) for each in given)
                    why = f"{why}: a stop string (sampling.stop) cuts it"
                judged[key] = None if earned == 1.0 else why.format(earned)
            except VerifierError as error:
                judged[key] = str(error)
        flaw = judged[key]
        if flaw is not None:
            flaws.append(_Flaw(_row(asked), value, flaw))
    return flaws, heavy


def _earned(reward: WeightedReward, seen: Sample | None) -> float:
    return 0.0 if seen is None else reward.verifier(seen)


def _where(reward: WeightedReward) -> str:
    return "" if reward.within == "anywhere" else f' where extract = "{reward.within}" looks for it'


def _asked(tasks: TaskSet) -> Iterator[Question | Task]:
    """Yield the questions without rendering them, where that can be."""
    questions: QuestionSet | TaskSet = tasks.questions if isinstance(tasks, TokenizedDataset) else tasks
    return (questions[index] for index in range(len(questions)))


def sparse_rows(sets: Sequence[TaskSet], most: int = 6) -> dict[str, list[Sample]]:
    """Return made answers to the first row of each set of columns, by where that row is; of one set alone, none.

    A column that holds nothing is none. Of ``most`` sets: those that have the fewest, and the one that has the most.
    """
    found: dict[frozenset[str], tuple[Question | Task, int]] = {}
    for tasks in sets:
        for asked in track(_asked(tasks), f"looking at the columns of {tasks.name}", len(tasks)):
            columns = frozenset(name for name, value in asked.columns.items() if value is not None)
            first, count = found.get(columns, (asked, 0))
            found[columns] = first, count + 1
    # Rows with the fewest columns are the ones that a reward may
    # find something missing in; the fullest one is the usual row.
    ordered = sorted(found, key=len)
    sparse = [found[columns] for columns in [*ordered[: most - 1], *ordered[most - 1 :][-1:]] if len(found) > 1]
    return {
        f"{_row(one)} (of {count:,} with its columns)": made_answers(one.text, one.columns, _messages(one))
        for one, count in sparse
    }


def _messages(asked: Question | Task) -> tuple[Message, ...]:
    said = asked.messages if isinstance(asked, Task) else asked.content
    return said if isinstance(said, tuple) else ()


def _tried(heavy: Sequence[tuple[Question | Task, Sample]], reward: WeightedReward, limits: Limits) -> list[_Flaw]:
    """Return which of the answers earn nothing, judged as in training: in processes that end at the deadline."""
    with show_progress(f"trying {len(heavy)} answers with the reward {reward.part}"):
        grades = asyncio.run(_graded([sample for _, sample in heavy], reward, limits))
    return [
        _Flaw(
            _row(asked),
            str(asked.columns.get(getattr(reward.verifier, "column", "answer"))),
            grade.error or f"earns {grade.reward:g} when it is given as the answer{_where(reward)}",
        )
        for (asked, _), grade in zip(heavy, grades, strict=True)
        if grade.reward != 1.0
    ]


async def _graded(samples: Sequence[Sample], reward: WeightedReward, limits: Limits) -> list[Grade]:
    async with GradingPool(Grading((replace(reward, weight=1.0),)), limits) as pool:
        return list(await asyncio.gather(*(pool.grade(sample) for sample in samples)))


def _row(asked: HasText) -> str:
    """Return the row's number where its id was made of that, else its id."""
    made = _ROW.fullmatch(asked.id)
    return f"row {made[1]}" if made else f"row with id '{asked.id[:60]}'"


def _report(flaws: Sequence[_Flaw], rows: int, name: str, reward: WeightedReward) -> str:
    shown = "\n".join(f"  {flaw.where}: {_short(flaw.value)!r}: {_short(flaw.why, 140)}" for flaw in flaws[:SHOWN])
    more = "" if len(flaws) <= SHOWN else f" (the first {SHOWN})"
    if isinstance(reward.verifier, Code):
        return (
            f"the tests of {len(flaws):,} of {rows:,} rows of '{name}' cannot be used by '{reward.part}' (kind "
            f'= "code"){more}:\n{shown}\ncorrect these rows, leave them out, or name the column of the tests: '
            "rewards.column (docs/inputs.md lists what tests may be)"
        )
    return (
        f"{len(flaws):,} of {rows:,} answers of '{name}' cannot be earned: the reward '{reward.part}' (kind = "
        f'"{reward.verifier.kind}") does not take them as their own answer{more}:\n{shown}\n'
        'correct these rows, set task.answer_column, or take a reward that reads them: kind = "boxed" for more than '
        'numbers, "mathematics" for algebra, "exact" for texts'
    )


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2 - 2]}...{text[-(most // 2 - 2) :]}"
