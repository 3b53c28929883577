"""Several weighted rewards as one verdict: a reward, or an error that is neither a zero nor trained on."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.processes.exceptions import exception_text, shorten
from gnomon.core.processes.seeding import seed_all
from gnomon.core.tables import build, to_table
from gnomon.rewards.base import LARGEST, NotApplicable, Sample, Verdict, VerifierError, real
from gnomon.rewards.code.reward import Code
from gnomon.rewards.environment import EnvironmentReward
from gnomon.rewards.exact import Boxed, Exact, Format, LengthPenalty, Numeric, Parsable
from gnomon.rewards.function import UserFunction
from gnomon.rewards.instructions import Instructions
from gnomon.rewards.math import Mathematics
from gnomon.rewards.reasoning import Reasoning

AnyVerifier = (
    Exact
    | Numeric
    | Boxed
    | Format
    | Parsable
    | Reasoning
    | Mathematics
    | Code
    | Instructions
    | EnvironmentReward
    | UserFunction
)
OVERLONG = "overlong"
NOTHING = "no reward applies to this sample"
LONGEST_ANSWER = 200
"""Characters of an answer that are kept; a longer one is told apart by a digest."""


@dataclass(frozen=True)
class WeightedReward:
    """One part of a reward: ``weight * verifier(sample)``.

    Attributes:
        verifier: What judges an answer.
        weight: Any finite number. A negative weight penalizes; 0 measures without rewarding.
        name: Name of the part in metrics and records; none takes the verifier's own.
    """

    verifier: AnyVerifier
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"a reward's weight is a finite number, got {self.weight}")

    @property
    def part(self) -> str:
        """What the part is called."""
        return self.name or self.verifier.name


@dataclass(frozen=True)
class Grading:
    """reward = sum of weight * part, plus the overlong penalty; or an error, if any part is one.

    A part that is no finite real number, or that raises, makes the whole sample an error that names the part:
    a reward without one of its parts would be another reward. Only TRL's ``None`` leaves its part out; when
    none is left, that is an error as well.

    >>> grading = Grading((WeightedReward(Numeric()), WeightedReward(Parsable(), weight=0.5)))
    >>> grading(Sample("1 + 1 =", "It is 3.", columns={"answer": 2})).reward
    0.5
    """

    rewards: tuple[WeightedReward, ...] = field(default_factory=tuple)
    overlong: LengthPenalty | None = None

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ConfigError("a grading needs at least one reward")
        names = [r.part for r in self.rewards]
        twice = sorted({n for n in names if names.count(n) > 1 or n == OVERLONG})
        if twice:
            raise ConfigError(f"each reward needs a name of its own, not {', '.join(twice)}; set name")

    def prepare(self) -> None:
        """Import what every reward needs. Raises: UserError when one cannot be used."""
        for reward in self.rewards:
            reward.verifier.prepare()

    @property
    def may_be_joint(self) -> bool:
        """Whether a reward may be one that sees all answers to a question at once; nothing is imported to say so."""
        return any(isinstance(r.verifier, UserFunction) and r.verifier.over != "sample" for r in self.rewards)

    @property
    def is_joint(self) -> bool:
        """Whether a reward sees all answers to a question at once."""
        return any(_is_joint(reward.verifier) for reward in self.rewards)

    def only(self, number: int, messages: bool | None) -> "Grading":
        """Return the grading by one of the rewards without its weight; ``messages`` in place of the function's own."""
        verifier = self.rewards[number].verifier
        if isinstance(verifier, UserFunction) and messages is not None:
            verifier = replace(verifier, messages=messages)
        return Grading((WeightedReward(verifier, name=self.rewards[number].part),))

    def together(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Judge all answers to a question. Never raises for bad ones."""
        parts: list[dict[str, float]] = [{} for _ in samples]
        errors: list[str | None] = [None for _ in samples]
        for reward in self.rewards:
            for number, found in enumerate(_found(reward, samples)):
                if isinstance(found, str):
                    errors[number] = errors[number] or found
                elif found is not None:
                    parts[number][reward.part] = found
        return [self._verdict(*each) for each in zip(samples, parts, errors, strict=True)]

    def _verdict(self, sample: Sample, parts: dict[str, float], error: str | None) -> Verdict:
        if error is not None:
            return Verdict(None, error=error)
        return self._sum(sample, parts) if parts else Verdict(None, error=NOTHING)

    def __call__(self, sample: Sample) -> Verdict:
        """Judge a sample. Never raises for a bad one."""
        parts: dict[str, float] = {}
        for reward in self.rewards:
            try:
                parts[reward.part] = real(reward.verifier(sample))
            except NotApplicable:
                continue
            except VerifierError as error:
                return Verdict(None, error=shorten(f"{reward.part}: {error}"))
            except (Exception, SystemExit) as error:
                return Verdict(None, error=f"{reward.part}: {exception_text(error)}")
        if not parts:
            return Verdict(None, error=NOTHING)
        return self._sum(sample, parts)

    def _sum(self, sample: Sample, parts: dict[str, float]) -> Verdict:
        total = sum(r.weight * parts[r.part] for r in self.rewards if r.part in parts)
        if self.overlong is not None:
            try:
                parts[OVERLONG] = self.overlong(sample)
            except VerifierError as error:
                return Verdict(None, error=f"{OVERLONG}: {error}")
            total += parts[OVERLONG]
        if not abs(total) <= LARGEST:
            return Verdict(None, error=f"the weighted sum of {parts} is {total}, beyond the {LARGEST:.3g} of float32")
        return Verdict(total, parts, answer=_answer(self.rewards[0].verifier, sample))


def _is_joint(verifier: AnyVerifier) -> bool:
    return isinstance(verifier, UserFunction) and verifier.is_joint


def _found(reward: WeightedReward, samples: Sequence[Sample]) -> list[float | str | None]:
    """Return a part of each sample's reward: a number, None where it does not apply, or the error in words."""
    verifier = reward.verifier
    if not (isinstance(verifier, UserFunction) and verifier.is_joint):
        return [_part(reward.part, partial(_drawn, verifier, sample)) for sample in samples]
    seed_all(samples[0].seed, "reward")
    try:
        found = verifier.together(samples)
    except VerifierError as error:
        return [shorten(f"{reward.part}: {error}")] * len(samples)
    except (Exception, SystemExit) as error:
        return [f"{reward.part}: {exception_text(error)}"] * len(samples)
    return [None if one is None else _part(reward.part, partial(_given, one)) for one in found]


def _drawn(verifier: AnyVerifier, sample: Sample) -> float:
    seed_all(sample.seed, "reward")
    return verifier(sample)


def _given(value: Any) -> Any:
    return value


def _part(name: str, judge: Callable[[], Any]) -> float | str | None:
    try:
        return real(judge())
    except NotApplicable:
        return None
    except VerifierError as error:
        return shorten(f"{name}: {error}")
    except (Exception, SystemExit) as error:
        return f"{name}: {exception_text(error)}"


def _answer(verifier: AnyVerifier, sample: Sample) -> str | None:
    """Return what the sample answers, at most so long that votes stay small on disk; what cannot be read is none."""
    try:
        found = verifier.answer(sample)
    except Exception:  # the sample was judged; without an answer it has no vote
        return None
    if found is None or len(found) <= LONGEST_ANSWER:
        return found
    mark = hashlib.blake2b(found.encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return f"{found[:LONGEST_ANSWER]}... ({mark})"


def to_json(grading: Grading) -> str:
    """Return the JSON text that `from_json` turns into an equal grading."""
    return json.dumps(to_table(grading))


def from_json(text: str) -> Grading:
    """Return the grading that `to_json` wrote. Raises: ConfigError naming the path of what is wrong."""
    return build(Grading, json.loads(text))
