"""The data check of answers: each is read whole by its reward, and earns 1 when it is given as the answer; odd rows."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.core.errors import DatasetError
from gnomon.core.processes.client import Limits
from gnomon.core.progress import show_progress, track
from gnomon.core.types import Grade, Message, Task
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.code.reward import Code
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.instructions import Instructions
from gnomon.rewards.reward_trial import made_answers
from gnomon.tasks.base import TaskSet
from gnomon.tasks.question import HasText, Question, QuestionSet, TokenizedDataset, digest

MOST_HEAVY = 500
"""Different answers that math-verify is tried on: all of MATH-500's, some seconds; a sample of a larger table's."""
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


def check_answers(sets: Sequence[TaskSet], grading: Grading, limits: Limits, cut: Callable[[str], str] = str) -> str:
    """Give every answer to the reward that judges it, in the form that it asks for, before anything is trained.

    Rewards that have such a form are tried: `Verifier.stated`. What needs math-verify is tried in a grading process, as
    it is in training.

    Args:
        sets: Their answers are tried.
        grading: Its rewards judge them.
        limits: Of the processes that grade.
        cut: Returns what rewards see of an answer: what stands before a stop string.

    Returns:
        One sentence where not all answers were tried, else "".

    Raises:
        DatasetError: An answer earns less than 1. The message names the reward, how many rows, the first three with
            their answers, and what to do.
    """
    said = ""
    for tasks in sets:
        # A reward is tried alone: an answer must earn 1 from each, whatever their weights.
        for reward in grading.rewards:
            light, heavy = _sorted(tasks, reward, cut)
            if heavy:
                # Evenly spaced over the table: the first rows of many sets are the easy ones.
                some = heavy[:: -(-len(heavy) // MOST_HEAVY)]
                if len(some) < len(heavy):
                    said = (
                        f"of {len(heavy):,} different answers of '{tasks.name}' that are no numbers, {len(some)} were "
                        f"tried with the reward '{reward.part}'"
                    )
                light += _tried(some, reward, limits)
            if light:
                raise DatasetError(_report(light, len(tasks), tasks.name, reward))
    return said


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
