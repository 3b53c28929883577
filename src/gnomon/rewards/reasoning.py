"""The scorers of reasoning-gym, one for each of its generators."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gnomon.core.optional import import_optional
from gnomon.rewards.answers import Extract, extract
from gnomon.rewards.base import Sample, Verifier, VerifierError, column
from gnomon.rewards.numbers import parse_number

Score = Callable[[str, Mapping[str, Any]], object]


@dataclass(frozen=True)
class Reasoning(Verifier):
    """The score that the task's own generator gives the extracted answer: 1.0 if right, less if not.

    A completion without an answer is 0.0. So is one whose answer makes the scorer raise although the scorer reads the
    stored answer (prime_factorization on words): the fault is the answer's. A scorer that raises on its own stored
    answer cannot judge. Some scorers (puzzle24, countdown) hand the answer to sympy's parser, which runs it as Python:
    grading processes have no keys in their environment and end at the deadline, but they are no sandbox.

    Attributes:
        kind: "reasoning".
        extract: Where the answer stands; "tags", <answer>...</answer>, is reasoning-gym's own form.

    Columns: ``entry``, the generator's item. ``parameters``, when there, are the generator's settings: six scorers look
    at them (decimal_arithmetic, polynomial_equations, puzzle24, time_intervals, arc_agi, rearc).
    Source: reasoning-gym 0.1.25, ``ProceduralDataset.score_answer``.
    """

    kind: Literal["reasoning"] = field(default="reasoning", kw_only=True)
    extract: Extract = "tags"

    def prepare(self) -> None:
        """Import reasoning-gym (one to two seconds).

        Raises:
            ConfigError: That names the extra to install.
        """
        import_optional("reasoning_gym", "tasks", "the reasoning reward")

    def __call__(self, sample: Sample) -> float:
        """Score the answer."""
        entry = column(sample, "entry")
        # The settings travel as JSON text, since a dict cannot be the key of a cache.
        score = _scorer(_generator(sample, entry), json.dumps(sample.columns.get("parameters") or {}))
        answer = extract(sample.completion, self.extract)
        if answer is None:
            return 0.0
        try:
            return score(answer, entry)  # type: ignore[return-value] # checked where all rewards are
        except Exception as error:
            # Scorers of reasoning-gym parse the answer by split, int and sympy, which raise whatever they raise.
            _blame(score, entry, error)
            return 0.0

    def answer(self, sample: Sample) -> str | None:
        """Return the extracted answer, a number as a fraction in lowest terms."""
        found = extract(sample.completion, self.extract)
        return None if found is None else _plain(found)


def _plain(text: str) -> str:
    """Return a number as a fraction in lowest terms, other text with single spaces: 5.0 and 5 are one answer."""
    number = parse_number(text)
    return number.canonical if number else " ".join(text.split())


def _blame(score: Score, entry: Mapping[str, Any], error: Exception) -> None:
    """Raise a VerifierError unless the scorer can read the stored answer."""
    # Out of memory says nothing about the answer.
    if isinstance(error, MemoryError):
        raise error
    stored = entry.get("answer")
    try:
        judged = score(stored, entry) if stored is not None else None
    except Exception:
        judged = None
    if judged is None:
        raise VerifierError(f"the scorer raised {type(error).__name__}: {error}") from error


def _generator(sample: Sample, entry: Any) -> str:
    """Return the generator's name: the entry knows it, else ``data_source`` = "reasoning_gym/NAME"."""
    if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
        raise VerifierError("column 'entry' is no reasoning-gym item: it needs a metadata object")
    source = entry["metadata"].get("source_dataset") or str(sample.columns.get("data_source", ""))
    return str(source).removeprefix("reasoning_gym/")


@functools.cache
def _scorer(generator: str, parameters: str) -> Score:
    from reasoning_gym.factory import DATASETS

    if generator not in DATASETS:
        raise VerifierError(f"reasoning-gym has no generator '{generator}'")
    make, settings = DATASETS[generator]
    score: Score = make(settings(**json.loads(parameters))).score_answer
    return score
