"""Reward functions with something wrong with them, each in the way that people meet."""

import time
import zlib

ANSWERS = 24  # of the budget of an answer, in characters
_calls = 0


def right(completion: str, answer: str, **columns: object) -> float:
    """1 for the answer: the reward that nothing is wrong with."""
    return float(completion.strip() == answer)


def longer(completion: str, **columns: object) -> float:
    """Pays for every character."""
    return min(1.0, len(completion) / ANSWERS)


def repeats(completion: str, **columns: object) -> float:
    """Counts how often "one" is said: a verifier that looks for a word and does not mind how often."""
    return min(4, completion.count("one")) / 4


def flaky(completion: str, answer: str, **columns: object) -> float:
    """Raises on one answer in sixteen, always the same ones."""
    if zlib.crc32(completion.encode()) % 16 == 0:
        raise ValueError("cannot parse this answer")
    return right(completion, answer)


def slower(completion: str, answer: str, **columns: object) -> float:
    """Takes longer with each call, as a function that keeps a list does."""
    global _calls
    _calls += 1
    time.sleep(_calls * 1.5e-5)
    return right(completion, answer)


def of_the_prompt(prompt: str, completion: str, **columns: object) -> float:
    """Judges the question and not the answer."""
    return float(zlib.crc32(prompt.encode()) % 2)


def tidy(completion: str, **columns: object) -> float:
    """A side reward: short and without an "e"."""
    return float("e" not in completion) * 0.5 + 0.5 * float(len(completion) <= 8)


def shouts(completion: str, **columns: object) -> float:
    """A side reward that no answer ever earns."""
    return float(completion.isupper())
