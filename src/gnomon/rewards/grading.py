"""Several weighted rewards as one verdict: a reward, or an error that is neither a zero nor trained on."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gnomon.core.errors import ConfigError, bounded
from gnomon.core.processes.exceptions import exception_text, shorten
from gnomon.core.processes.seeding import seed_all
from gnomon.core.tables import build, to_table
from gnomon.core.types import OVERLONG
from gnomon.rewards.answers import Where, answer_in, final_answer, last_boxed
from gnomon.rewards.base import (
    LARGEST,
    EnvironmentReward,
    NotApplicable,
    Sample,
    Verdict,
    Verifier,
    VerifierError,
    real,
)
from gnomon.rewards.code.reward import Code
from gnomon.rewards.exact import Boxed, Exact, Format, LengthPenalty, Numeric, Parsable
from gnomon.rewards.function import UserFunction
from gnomon.rewards.instructions import Instructions
from gnomon.rewards.judge import MEASURES, RubricJudge
from gnomon.rewards.math import Mathematics
from gnomon.rewards.model import RewardModel
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
    | RewardModel
    | RubricJudge
    | UserFunction
)
NOTHING = "no reward applies to this sample"
# What a pattern asks for and no part of an answer holds, and what makes of such a pattern one that may do without it.
_THOUGHT = re.compile(r"</?think(?:ing)?>|</?thought>|\\\[/?THINK\\?\]")
_MARKED = re.compile(rf"{_THOUGHT.pattern}|</?answer>|\\\\boxed|\\\\fbox")
_OPTIONAL = re.compile(r"\||\(\?<?!|(?:[)>]|\\\])[?*{]|\[[^]]*</?(?:think|thought|answer)")
LONGEST_ANSWER = 200
"""Characters of an answer that are kept; a longer one is told apart by a digest."""


@dataclass(frozen=True)
@bounded("reward", weight="finite")
class WeightedReward:
    """One part of a reward: ``weight * verifier(sample)``.

    Attributes:
        verifier: What judges an answer.
        weight: Any finite number. A negative weight penalizes; 0 measures without rewarding.
        name: Name of the part in metrics and records; none takes the verifier's own.
        within: Part of an answer that the verifier sees. "after_thinking" is what follows the thought; "answer_line"
            is what the last line there says behind "Answer:"; "last_box" is the content of the last box there. An
            answer without that part, such as a thought that was cut off, earns 0 and has no vote. In TOML
            ``extract`` means the same, except for the kinds that have a setting of that name.
        must_end: Whether an answer that its budget cut off earns 0 and has no vote. Otherwise what it says so far is
            judged: whatever number came last, a box within a thought.
    """

    verifier: AnyVerifier
    weight: float = 1.0
    name: str | None = None
    within: Where = "anywhere"
    must_end: bool = False

    def __post_init__(self) -> None:
        if (why := self._never_pays()) is not None:
            key = "within" if hasattr(self.verifier, "extract") else "extract"
            kind = f"reward '{self.part}' (kind = \"{self.verifier.kind}\")"
            raise ConfigError(f'{kind}: {key} = "{self.within}" {why}')

    def _never_pays(self) -> str | None:
        """Return why no answer can earn anything, and what to type; None where one can."""
        verifier, within = self.verifier, self.within
        if within == "anywhere":
            return None
        if isinstance(verifier, EnvironmentReward):
            return "looks for a part of an answer, and this reward is what the environment gave: leave it out"
        if isinstance(verifier, Code | Instructions) and within != "after_thinking":
            what = "no program stands" if isinstance(verifier, Code) else "instructions are not about what stands"
            return f'takes a piece of the answer, and {what} there; write extract = "after_thinking"'
        if getattr(verifier, "extract", None) == "tags" and within == "last_box":
            return 'takes the content of a box, in which no <answer> stands; write extract = "boxed" alone'
        if not isinstance(verifier, Format) or _OPTIONAL.search(verifier.pattern):
            return None
        asked = (_MARKED if within == "last_box" else _THOUGHT).search(verifier.pattern)
        return None if asked is None else f"takes away {asked[0]}, which the pattern asks for; leave extract out"

    @property
    def part(self) -> str:
        """What the part is called."""
        return self.name or self.verifier.name

    def seen(self, sample: Sample) -> Sample | None:
        """Return the sample as the verifier sees it; None where the answer has no part that is judged."""
        if self.must_end and sample.is_truncated:
            return None
        if self.within == "anywhere":
            return sample
        found = answer_in(sample.completion, self.within)
        if found is None:
            return None
        # These verifiers look for a box, and the extracted text has lost its own.
        takes_box = isinstance(self.verifier, Boxed | Mathematics) or getattr(self.verifier, "extract", None) == "boxed"
        is_bare = takes_box and self.within in ("answer_line", "last_box")
        return replace(sample, completion=f"\\boxed{{{found}}}" if is_bare and last_boxed(found) is None else found)

    def placed(self, said: str, value: str) -> str:
        """Return a completion in which an answer stands where it is looked for.

        Args:
            said: The answer in the verifier's own form.
            value: The answer as the row has it.
        """
        if self.within in ("anywhere", "after_thinking"):
            return said
        marked = None if isinstance(self.verifier, Exact) else final_answer(value)
        bare = value if marked is None else marked
        # TeX and numbers take a line end as a space; a text is what it is.
        bare = bare if isinstance(self.verifier, Exact) else " ".join(bare.split())
        return f"Answer: {bare}" if self.within == "answer_line" else f"\\boxed{{{bare}}}"

    def judge(self, sample: Sample) -> float:
        """Return the part before weighting: 0 where the answer has no part that is judged."""
        seen = self.seen(sample)
        if seen is None:
            return 0.0
        found = sample.scores.get(self.part)
        if isinstance(found, str):
            raise VerifierError(found)
        return self.verifier(seen) if found is None else found


def allowed(reward: WeightedReward, packages: tuple[str, ...]) -> WeightedReward:
    """Return the reward whose programs, if it runs any, may import these packages."""
    if not packages or not isinstance(reward.verifier, Code):
        return reward
    return replace(reward, verifier=replace(reward.verifier, packages=packages))


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
        # Parts are keys of one table in metrics and records: two of one name would overwrite each other silently.
        names = [r.part for r in self.rewards] + list(self.measured)
        twice = sorted({n for n in names if names.count(n) > 1 or n == OVERLONG})
        if twice:
            raise ConfigError(
                f"each reward needs a name of its own, not {', '.join(twice)}; set name, in Python "
                "{'function': score, 'name': 'mine'}"
            )

    def prepare(self) -> None:
        """Import what every reward needs.

        Raises:
            UserError: If one cannot be used.
        """
        for reward in self.rewards:
            reward.verifier.prepare()

    @property
    def imports(self) -> bool:
        """Whether a reward prepares something that can fail or hang, such as an import or a sandbox."""
        return any(type(reward.verifier).prepare is not Verifier.prepare for reward in self.rewards)

    @property
    def may_be_joint(self) -> bool:
        """Whether a reward may be one that sees all answers to a question at once; nothing is imported to say so."""
        return bool(self.models) or any(
            isinstance(r.verifier, UserFunction) and r.verifier.over != "sample" for r in self.rewards
        )

    @property
    def models(self) -> dict[str, RewardModel | RubricJudge]:
        """The reward models and judges by the name of their part."""
        return {r.part: r.verifier for r in self.rewards if isinstance(r.verifier, RewardModel | RubricJudge)}

    @property
    def measured(self) -> tuple[str, ...]:
        """What is recorded of judges beside their grade, as parts without a weight."""
        judges = (part for part, verifier in self.models.items() if isinstance(verifier, RubricJudge))
        return tuple(part + measure for part in judges for measure in MEASURES)

    @property
    def weights(self) -> dict[str, float]:
        """The factor of each part by its name, as parts add up to the reward."""
        overlong = {} if self.overlong is None else {OVERLONG: 1.0}
        return {reward.part: reward.weight for reward in self.rewards} | overlong

    @property
    def environment_weight(self) -> float:
        """The factor with which an environment's own reward enters the sum; 0 where it does not."""
        return sum(r.weight for r in self.rewards if isinstance(r.verifier, EnvironmentReward))

    @property
    def is_joint(self) -> bool:
        """Whether a reward sees all answers to a question at once."""
        return any(_is_joint(reward.verifier) for reward in self.rewards)

    def only(self, number: int, messages: bool | None) -> "Grading":
        """Return the grading by one of the rewards without its weight; ``messages`` in place of the function's own."""
        verifier = self.rewards[number].verifier
        if isinstance(verifier, UserFunction) and messages is not None:
            verifier = replace(verifier, messages=messages)
        reward = self.rewards[number]
        return Grading((replace(reward, verifier=verifier, weight=1.0, name=reward.part),))

    def together(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Judge all answers to a question. Never raises for bad ones."""
        parts: list[dict[str, float]] = [{} for _ in samples]
        errors: list[str | None] = [None for _ in samples]
        # Reward by reward and not sample by sample: a joint reward is called once for all samples.
        for reward in self.rewards:
            for number, found in enumerate(_scores(reward, samples)):
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
            found = _score(reward.part, partial(reward.judge, sample))
            if isinstance(found, str):
                return Verdict(None, error=found)
            if found is not None:
                parts[reward.part] = found
        return self._verdict(sample, parts, None)

    def _sum(self, sample: Sample, parts: dict[str, float]) -> Verdict:
        total = sum(r.weight * parts[r.part] for r in self.rewards if r.part in parts)
        # Agreement, tokens and cost of a judge are recorded beside the parts and enter no sum.
        parts |= {name: float(sample.scores[name]) for name in self.measured if name in sample.scores}
        if self.overlong is not None:
            try:
                parts[OVERLONG] = self.overlong(sample)
            except VerifierError as error:
                return Verdict(None, error=f"{OVERLONG}: {error}")
            total += parts[OVERLONG]
        # Written so that NaN, which is in no order with anything, is refused as well.
        if not abs(total) <= LARGEST:
            return Verdict(None, error=f"the weighted sum of {parts} is {total}, beyond the {LARGEST:.3g} of float32")
        return Verdict(total, parts, answer=_answer(self.rewards[0], sample))


def _is_joint(verifier: AnyVerifier) -> bool:
    return isinstance(verifier, UserFunction) and verifier.is_joint


def _scores(reward: WeightedReward, samples: Sequence[Sample]) -> list[float | str | None]:
    """Return a part of each sample's reward: a number, None where it does not apply, or the error in words."""
    verifier = reward.verifier
    if not (isinstance(verifier, UserFunction) and verifier.is_joint):
        return [_score(reward.part, partial(_seeded_score, reward, sample)) for sample in samples]
    if reward.within != "anywhere" or reward.must_end:
        said = "must_end" if reward.must_end else f"extract = '{reward.within}'"
        why = f"{said} is for rewards that see one answer, and this one compares all to a question"
        return [f"{reward.part}: {why}"] * len(samples)
    # One call draws for the whole group, so the first sample's seed is that of the call.
    seed_all(samples[0].seed, "reward")
    try:
        found = verifier.together(samples)
    except VerifierError as error:
        return [shorten(f"{reward.part}: {error}")] * len(samples)
    except (Exception, SystemExit) as error:
        # SystemExit too: a reward that calls sys.exit() makes this sample an error, as any other exception does.
        return [f"{reward.part}: {exception_text(error)}"] * len(samples)
    return [None if one is None else _score(reward.part, partial(_given, one)) for one in found]


def _seeded_score(reward: WeightedReward, sample: Sample) -> float:
    seed_all(sample.seed, "reward")
    return reward.judge(sample)


def _given(value: Any) -> Any:
    return value


def _score(name: str, judge: Callable[[], Any]) -> float | str | None:
    try:
        return real(judge())
    except NotApplicable:
        return None
    except VerifierError as error:
        return shorten(f"{name}: {error}")
    except (Exception, SystemExit) as error:
        return f"{name}: {exception_text(error)}"


def _answer(reward: WeightedReward, sample: Sample) -> str | None:
    """Return what the sample answers, at most so long that votes stay small on disk; what cannot be read is none."""
    try:
        seen = reward.seen(sample)
        found = None if seen is None else reward.verifier.answer(seen)
    except Exception:  # the sample was judged; without an answer it has no vote
        return None
    if found is None or len(found) <= LONGEST_ANSWER:
        return found
    # Two long answers with a common beginning stay two answers in a vote.
    mark = hashlib.blake2b(found.encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return f"{found[:LONGEST_ANSWER]}... ({mark})"


def to_json(grading: Grading) -> str:
    """Return the JSON text that `from_json` turns into an equal grading."""
    return json.dumps(to_table(grading))


def from_json(text: str) -> Grading:
    """Return the grading that `to_json` wrote.

    Raises:
        ConfigError: Naming the path of what is wrong.
    """
    return build(Grading, json.loads(text))
