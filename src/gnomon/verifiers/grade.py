"""Several weighted rewards as one verdict: a reward, or an error that is neither a zero nor trained on."""

import hashlib
import json
import math
from dataclasses import dataclass, field

from gnomon.configuration import build, to_table
from gnomon.errors import ConfigError
from gnomon.verifiers.base import LARGEST, NotApplicable, Sample, Verdict, VerifierError, real
from gnomon.verifiers.cause import cause, shorten
from gnomon.verifiers.code import Code
from gnomon.verifiers.environment import EnvironmentReward
from gnomon.verifiers.exact import Boxed, Exact, Format, Numeric, OverlongPenalty, Parsable
from gnomon.verifiers.function import UserFunction
from gnomon.verifiers.mathematics import Mathematics
from gnomon.verifiers.reasoning import Reasoning

AnyVerifier = (
    Exact | Numeric | Boxed | Format | Parsable | Reasoning | Mathematics | Code | EnvironmentReward | UserFunction
)
OVERLONG = "overlong"
LONGEST_ANSWER = 200
"""Characters of an answer that are kept; a longer one is told apart by a digest."""


@dataclass(frozen=True)
class WeightedReward:
    """One part of a reward: ``weight * verifier(sample)``.

    weight: any finite number; a negative one penalizes; 0 measures without rewarding.
    name: of the part in metrics and records; None takes the verifier's own.
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
    overlong: OverlongPenalty | None = None

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
                return Verdict(None, error=f"{reward.part}: {cause(error)}")
        if not parts:
            return Verdict(None, error="no reward applies to this sample")
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
