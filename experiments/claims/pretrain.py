"""What a tiny model is taught before it is trained: questions, and how often each is answered rightly."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from experiments.claims.exact_rates import answer_of

from gnomon.core.types import Task
from gnomon.models.tokenizer import Tokenizer
from gnomon.tasks.base import TaskSet


@dataclass(frozen=True)
class PretrainingTask:
    """Questions, the chance with which each is answered rightly, and letters to be wrong with.

    A question may bring its own wrong answers, a list of texts in its column ``wrong``; else its answer is spoiled.
    malformed: as in `spoil`.
    """

    tasks: Sequence[Task]
    chances: Sequence[float]
    letters: str
    tokenizer: Tokenizer
    malformed: float

    @classmethod
    def on(
        cls, questions: TaskSet, tokenizer: Tokenizer, rate: float, spread: float, malformed: float
    ) -> "PretrainingTask":
        """Return a lesson whose mean chance is ``rate``, ``spread`` more for the easiest and less for the hardest.

        Raises: ConfigError for a question without a text in its column ``answer``.
        """
        tasks = [questions[index] for index in range(len(questions))]
        letters = "".join(sorted({letter for task in tasks for letter in answer_of(task)}))
        ranks = _ranks([_difficulty(task) for task in tasks])
        most = max(0.0, min(spread, rate - 0.02, 0.98 - rate))
        return cls(tasks, [rate + most * (1 - 2 * rank) for rank in ranks], letters, tokenizer, malformed)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer, right or spoiled, with its end."""
        said = (text for task in self.tasks for text in (answer_of(task), *_wrong(task)))
        return max(len(self.tokenizer.encode_plain(text)) for text in said) + 2

    def draw(self, count: int, random: Random) -> tuple[list[Task], list[list[int]]]:
        """Return ``count`` questions, and to each an answer as tokens, with its end."""
        chosen = random.choices(range(len(self.tasks)), k=count)
        tasks = [self.tasks[index] for index in chosen]
        said = [self._said(self.tasks[index], self.chances[index], random) for index in chosen]
        return tasks, [[*self.tokenizer.encode_plain(text), self.tokenizer.stop_ids[0]] for text in said]

    def _said(self, task: Task, chance: float, random: Random) -> str:
        if random.random() < chance:
            return answer_of(task)
        wrong = _wrong(task)
        return random.choice(wrong) if wrong else spoil(answer_of(task), self.letters, self.malformed, random)


def spoil(answer: str, letters: str, malformed: float, random: Random) -> str:
    """Return a wrong answer: one character of ``answer`` replaced by another of ``letters``.

    malformed: the chance that a character is doubled or left out instead, so that the length is wrong as well. That is
    also done where ``letters`` has nothing to replace a character by.

    >>> spoil("77", "7", 0.0, Random(1)) in ("7", "777")
    True
    """
    place = random.randrange(len(answer))
    before, letter, after = answer[:place], answer[place], answer[place + 1 :]
    others = [other for other in letters if other != letter]
    if not others or random.random() < malformed:
        return before + letter * random.choice((0, 2)) + after
    return before + random.choice(others) + after


def _wrong(task: Task) -> list[str]:
    listed = task.columns.get("wrong")
    return [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []


def _difficulty(task: Task) -> float:
    stated = task.columns.get("difficulty")
    if isinstance(stated, int | float) and math.isfinite(stated):
        return float(stated)
    return float(len(task.text) + len(answer_of(task)))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the share of ``values`` that is below each, those equal to it counted half: within (0, 1), mean 1/2.

    >>> _ranks([5.0, 7.0, 7.0, 9.0])
    [0.125, 0.5, 0.5, 0.875]
    """
    places: dict[float, float] = {}
    passed = 0
    for value, count in sorted(Counter(values).items()):
        places[value] = (passed + count / 2) / len(values)
        passed += count
    return [places[value] for value in values]
