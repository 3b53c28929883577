"""Small generated questions on which a tiny model can be right now and then, and sooner where they are short.

Six families of text puzzles over bytes, each with a difficulty: the number of things to look at. They are written as
JSONL tables, so that a run's record names a file that anyone can read, and held-out questions are split off by content.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from experiments.claims.arms import Arm
from experiments.claims.warm_start import Warming, warm_model

from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.tables import to_table
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

MATCHED = (
    "algorithm.updates.minibatches=4",
    "algorithm.aggregate=TokenMean",
    "algorithm.surrogate.trust.high=0.28",
)
"""What GRPO and SPO are both given, so that they differ in baseline, normalization and choice of prompts alone."""

SLOWLY = (
    *MATCHED,
    "learner.optimizer.learning_rate=3e-4",
    "checkpoints.every=15",
    "checkpoints.keep_every=15",
    "steps=60",
)
"""The same, with a policy that moves slowly enough for a tracker to follow, on 256 questions (``prompts=320``): each is
asked every other step, and a window of eight visits is 16 steps."""

_LETTERS = "abcdef"


@dataclass(frozen=True)
class Puzzle:
    """One question. difficulty: how many things have to be looked at."""

    question: str
    answer: str
    difficulty: int


def sums(random: Random) -> Puzzle:
    """Return a sum of two or three digits.

    >>> sums(Random(1)).question.endswith("=")
    True
    """
    digits = _digits(random, random.randint(2, 3))
    return Puzzle("+".join(map(str, digits)) + "=", str(sum(digits)), len(digits))


def modular(random: Random) -> Puzzle:
    """Return a sum of two or three digits, of which the last digit is asked."""
    digits = _digits(random, random.randint(2, 3))
    return Puzzle("+".join(map(str, digits)) + "%10=", str(sum(digits) % 10), len(digits))


def counting(random: Random) -> Puzzle:
    """Return a word of three to nine letters, in which one is to be counted."""
    word = _word(random, random.randint(3, 9), "abc")
    return Puzzle(f"{word}#a=", str(word.count("a")), len(word))


def reversing(random: Random) -> Puzzle:
    """Return a word of two to five letters that is to be read from its end."""
    word = _word(random, random.randint(2, 5), _LETTERS)
    return Puzzle(f"{word}<", word[::-1], len(word))


def sorting(random: Random) -> Puzzle:
    """Return a word of two to five letters that are to be put in order."""
    word = _word(random, random.randint(2, 5), _LETTERS)
    return Puzzle(f"{word}>", "".join(sorted(word)), len(word))


def comparing(random: Random) -> Puzzle:
    """Return two to four numbers of two digits, of which the largest is asked."""
    numbers = [random.randint(10, 99) for _ in range(random.randint(2, 4))]
    return Puzzle(",".join(map(str, numbers)) + "^", str(max(numbers)), len(numbers))


FAMILIES: Mapping[str, Callable[[Random], Puzzle]] = MappingProxyType(
    {family.__name__: family for family in (sums, modular, counting, reversing, sorting, comparing)}
)


def write_family(name: str, folder: Path, size: int = 2000, seed: int = 0) -> TableTask:
    """Write ``size`` different questions of a family into ``folder`` and return them as a task.

    Columns: question, answer, difficulty. The same name, size and seed always give the same file; one that is there is
    left alone. A family may have fewer different questions: then it has them all but for luck.
    Raises: ConfigError for an unknown name.
    """
    if name not in FAMILIES:
        raise ConfigError(unknown("family", name, FAMILIES))
    path = folder / f"{name}-{size}-{seed}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        random, found = Random(f"{name}/{seed}"), dict[str, Puzzle]()
        for _ in range(20 * size):
            puzzle = FAMILIES[name](random)
            found.setdefault(puzzle.question, puzzle)
            if len(found) == size:
                break
        lines = [json.dumps(asdict(puzzle)) + "\n" for puzzle in found.values()]
        write_durably(path, "".join(lines).encode(), is_synced=False)
    return TableTask(str(path))


@cache
def warm_family(name: str, folder: Path, rate: float, held_out: HeldOut) -> Path:
    """Return a tiny model that was taught the family until it is right at about ``rate``, made once a process."""
    return warm_model(write_family(name, folder, 4000), folder, rate, plan=Warming(steps=800), held_out=held_out)


def family_experiment(name: str, folder: Path, rate: float = 0.4, prompts: int = 640) -> dict[str, Any]:
    """Return the table of an experiment: a tiny model that half knows the family is trained on ``prompts`` questions.

    A fifth of the questions are held out, for training and for teaching alike: their text alone decides. The model is
    taught on up to 4000 of the others until it is right at about ``rate``; right is what is equal to the answer. In the
    end 15 held-out questions for each hundred prompts are answered 16 times each. Algorithm, steps and seed are to be
    said over it.
    """
    held_out = HeldOut(size=prompts * 3 // 20, fraction=0.2)
    return {
        "model": str(warm_family(name, folder, rate, held_out)),
        "task": to_table(write_family(name, folder, prompts)),
        "held_out": to_table(held_out),
        "rewards": [{"kind": "exact"}],
        "rollouts_per_step": 128,
        "sampling": {"max_completion_length": 8},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": 5e-4}},
        "evaluation": {"samples": 16, "before": False},
        "checkpoints": {"every": 0},
        "grading": {"workers": 1},
    }


def silence_arms(folder: Path, seed: int) -> list[Arm]:
    """Return GRPO and SPO on sums from one model, 40 steps fast on many questions, and slowly on fewer.

    What both leave without a gradient, and of the variance, is measured on the same runs; every seed has the same arms.
    """
    fast, slow = family_experiment("sums", folder), family_experiment("sums", folder, prompts=320)
    names = ("grpo", "spo")
    return [
        *(Arm(f"sums: {name}", fast, (f"algorithm={name}", *MATCHED, "steps=40")) for name in names),
        *(Arm(name, slow, (f"algorithm={name}", *SLOWLY)) for name in names),
    ]


def _digits(random: Random, count: int) -> list[int]:
    return [random.randint(0, 9) for _ in range(count)]


def _word(random: Random, length: int, letters: str) -> str:
    return "".join(random.choice(letters) for _ in range(length))
