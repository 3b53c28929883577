"""What is judged, what judges, and what comes back. No torch: the processes that judge load none."""

import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gnomon.core.errors import GnomonError
from gnomon.core.redaction import without_secrets

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32: what a reward is trained on as."""


class _Shown(reprlib.Repr):
    """Values in a few characters, from which secrets are taken before they are cut."""

    # reprlib cuts the middle out of a long text. A secret that is cut in
    # two would no longer be recognized, so secrets are replaced first.
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_secrets(x), level)

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            said = without_secrets(repr(x))
        except Exception:
            # The object is a user's: its repr may raise anything.
            # reprlib's own fallback shows the class and the address.
            return super().repr_instance(x, level)
        half = max(0, (self.maxother - 3) // 2)
        return said if len(said) <= self.maxother else f"{said[:half]}...{said[len(said) - self.maxother + 3 + half :]}"


_SHOWN = _Shown()


class VerifierError(GnomonError, ValueError):
    """This sample cannot be judged: its grade is an error, which is neither a zero nor trained on."""


class NotApplicable(GnomonError):
    """This reward does not apply to this sample (TRL's ``None``); the other rewards still count."""


@dataclass(frozen=True)
class Sample:
    """One answer to one question, as a verifier sees it.

    Attributes:
        prompt: The question's text.
        completion: The answer's text without its end of turn.
        completion_tokens: How many tokens were sampled.
        is_truncated: Whether the budget ended the answer.
        max_completion_length: That budget, in tokens.
        columns: The dataset's other columns by name; JSON values, tuples and keys that are no text included.
        seed: Seed of whatever a reward draws (`core.processes.seeding`); no two samples of a run have the same.
        messages: The question as the dataset holds it, where that is chat messages.
        scores: What reward models gave the answer, by part of the reward; a text is the cause why there is none.
    """

    prompt: str
    completion: str
    completion_tokens: int = 0
    is_truncated: bool = False
    max_completion_length: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    scores: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A `gnomon.core.types.Grade` on its way between processes: a reward and its parts, or an error."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    answer: str | None = None


class Verifier(Protocol):
    """Judges one sample. A frozen dataclass whose fields are its settings, so that it travels as JSON."""

    @property
    def kind(self) -> str:
        """What it is called in a table of settings."""

    @property
    def name(self) -> str:
        """What its part of the reward is called when no other name is given: its kind, unless it says otherwise."""
        return self.kind

    def prepare(self) -> None:
        """Import what judging needs, once, in a process that can be killed; nothing unless said otherwise.

        Raises:
            UserError: If that is not there.
        """
        return

    def __call__(self, sample: Sample) -> float:
        """Return the reward before weighting.

        Raises:
            VerifierError: If it cannot judge.
            NotApplicable: If there is nothing for it to judge.
        """

    def stated(self, sample: Sample) -> str | None:
        """Return a completion that gives the sample's own answer in the form that is asked for; it must earn 1.

        None where no such form is known. The sample's completion is not looked at.

        Raises:
            VerifierError: If there is no answer to give.
        """
        return None

    def is_heavy(self, sample: Sample) -> bool:
        """Whether judging this sample takes a library that may not return, so that a grading process should."""
        return False

    def answer(self, sample: Sample) -> str | None:
        """Return what the sample answers, so that samples can vote: equal answers as equal texts, None for no answer.

        The whole completion without surrounding whitespace, unless a verifier knows where in it the answer stands.
        """
        return sample.completion.strip() or None


def column(sample: Sample, name: str) -> Any:
    """Return the sample's column; VerifierError naming those it has when that one is missing or null."""
    value = sample.columns.get(name)
    if value is None:
        raise VerifierError(f"there is no column '{name}'; the sample has {_listed(sample.columns)}")
    return value


def text_column(sample: Sample, name: str) -> str:
    """Return the column as text; numbers become their shortest text, anything else is a VerifierError."""
    value = column(sample, name)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    remedy = "; write the one right text in place of the list" if isinstance(value, list | tuple) else ""
    raise VerifierError(f"column '{name}' should be text or a number, got {_SHOWN.repr(value)}{remedy}")


def real(value: object) -> float:
    """Return ``value`` as a float.

    True is 1.0 and False is 0.0: ``return answer in completion`` says right or wrong as clearly as a number.

    Raises:
        VerifierError: For anything but a truth value or a finite real number that float32 holds. In float32 a larger
            number is infinite, and its square is so in float64.

    >>> real(1), real(True)
    (1.0, 1.0)
    """
    # Arrays without dimensions are told by their shape, since neither NumPy nor torch may be imported here.
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()  # a number of NumPy's or torch's, a truth value too
    if not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise VerifierError(f"returned {_SHOWN.repr(value)} ({kind}); a reward is a finite number: return a float")
    try:
        number = float(value)
    except OverflowError:
        # Python's integers have no bound: float(10**400) raises instead of giving infinity.
        number = math.inf
    if not math.isfinite(number):
        raise VerifierError(f"returned {number}, expected a finite number")
    if abs(number) > LARGEST:
        raise VerifierError(f"returned {number:g}; a reward is at most {LARGEST:.3g} either way, what float32 holds")
    return number


def _listed(columns: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, columns))) or "none"


@dataclass(frozen=True)
class EnvironmentReward(Verifier):
    """The sum of the rewards of the environment's replies; 0 when it gave none.

    Attributes:
        kind: "environment".

    Raises:
        VerifierError: A sample was no conversation.

    >>> EnvironmentReward()(Sample("", "", columns={"environment_reward": 0.5}))
    0.5
    """

    kind: Literal["environment"] = field(default="environment", kw_only=True)

    def __call__(self, sample: Sample) -> float:
        """Look it up."""
        if "environment_reward" not in sample.columns:
            raise VerifierError("there was no environment; give the experiment an [environment]")
        return real(sample.columns["environment_reward"])
