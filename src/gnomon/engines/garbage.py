"""What no engine that works can return: found before any of it is graded or trained on."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gnomon.engines.base import Sampling
from gnomon.types import Completion

ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0: what is left of a normalization in low precision."""


@dataclass(frozen=True)
class Expected:
    """What was asked for, that answers are held against.

    answers: one for each key. vocabulary_size: token ids are below it; None when it is not known.
    versions: of all weights that the engine was ever given, -1 for those that it began with.
    """

    answers: int
    sampling: Sampling
    vocabulary_size: int | None
    versions: Collection[int]

    def fault(self, completions: Sequence[Completion]) -> str | None:
        """Return what is wrong with the first bad answer, in one line; None when nothing is.

        >>> done = Completion((1, 2), (-0.1, float("nan")), (-0.1, -0.2), 0, 0, "stop")
        >>> Expected(1, Sampling(), 10, {0}).fault([done])
        'answer 1 of 1 has log-probabilities that are not finite'
        """
        if len(completions) != self.answers:
            return f"{len(completions)} answers to {self.answers} keys"
        for number, completion in enumerate(completions, start=1):
            said = self._of_one(completion)
            if said is not None:
                return f"answer {number} of {self.answers} has {said}"
        return None

    def _of_one(self, completion: Completion) -> str | None:
        tokens, oldest, newest = completion.tokens, completion.oldest_version, completion.newest_version
        if len(tokens) > self.sampling.max_completion_length:
            return f"{len(tokens)} tokens, more than the {self.sampling.max_completion_length} asked for"
        beyond = math.inf if self.vocabulary_size is None else self.vocabulary_size
        if tokens and (min(tokens) < 0 or max(tokens) >= beyond):
            return f"token ids from {min(tokens)} to {max(tokens)}, outside the vocabulary of {self.vocabulary_size}"
        for logprobs in (completion.logprobs, completion.full_logprobs):
            said = fault_of_logprobs(logprobs, len(tokens))
            if said is not None:
                return said
        unknown = [version for version in (oldest, newest) if version not in self.versions]
        if unknown:
            return f"weights of version {unknown[0]}, which this engine was never given"
        return f"weights from version {oldest} back to {newest}" if oldest > newest else None


def fault_of_logprobs(logprobs: Sequence[float], tokens: int) -> str | None:
    """Return why these cannot be the log-probabilities of that many tokens; None when they can."""
    if len(logprobs) != tokens:
        return f"{len(logprobs)} log-probabilities for {tokens} tokens"
    # A sum is not finite as soon as one term is not; a maximum would pass over NaN.
    if not math.isfinite(sum(logprobs)):
        return "log-probabilities that are not finite"
    if logprobs and max(logprobs) > ROUNDING:
        return f"a log-probability of {max(logprobs):.3g}, which is above 0"
    return None
