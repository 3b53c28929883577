"""Claims of papers, each with a protocol that could refute it and a rule for the verdict that is written beforehand.

A claim is a folder ``experiments/NAME`` with a ``claim.py`` that says ``CLAIM = Claim(...)``:

    from experiments.claims.arms import Arm, ArmLine, Lines, Runs, last, trace
    from experiments.claims.definition import Claim, Gain, Level

    def arms(folder, seed):
        base = {"model": str(warm_model(TASK, folder, rate=0.4)), "task": to_table(TASK), "steps": 60, ...}
        return [Arm("grpo", base), Arm("spo", base, ("algorithm=spo",))]

    CLAIM = Claim(
        title="...", claim="...", source="...", protocol="...",
        measure=Runs(arms, numbers={"wasted": last("tokens/wasted_fraction", 10)}, curves={"wasted": trace(...)}),
        checks=(Level("GRPO learns, so that its groups can fall silent", "grpo", "reward, rise", above=0.1),),
        expectations=(Level("GRPO wastes most of it", "grpo", "wasted", above=0.6),
                      Gain("SPO wastes less", "grpo", "spo", "wasted", below=0.0)),
        headline=(1,), scale="two layers, 60 steps",
        figure=Lines("Tokens without gradient", "share", (Line("grpo", "wasted"), Line("spo", "wasted"))),
    )

``gnomon reproduce NAME`` runs it and writes ``results.json``, ``figure.svg`` and ``README.md`` beside it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from experiments.claims.estimates import Estimate, MeasuredValues, NotMeasured
from experiments.claims.seeds_needed import rates_to_settle, seeds_to_settle

from gnomon.core.errors import ConfigError
from gnomon.records.console import Console

Word = Literal["supported", "contradicted", "undecided", "cause absent", "not run"]
Holds = Literal["holds", "fails", "undecided", "not run"]


@dataclass(frozen=True)
class Workplace:
    """Where and how a claim is measured.

    folder: for runs, models and tables of all claims; what is there is used again, also what another claim left.
    home: the claim's own folder. workers: runs at once. is_training: whether what is missing is trained; else only
    what is finished is measured.
    """

    folder: Path
    home: Path
    console: Console
    workers: int = 1
    is_training: bool = True


class ClaimMeasure(Protocol):
    """What measures a claim: `Runs`, or a claim's own function."""

    def __call__(self, place: Workplace) -> MeasuredValues:
        """Return the numbers and curves; what could not be measured is left out, and said in ``failures``."""
        ...


@dataclass(frozen=True)
class ClaimOutcome:
    """What became of an expectation.

    word: "holds" or "fails" when the interval over seeds lies wholly inside or wholly outside of what was expected;
    "undecided" when it does not, so that more seeds are needed; "not run". measured: the numbers, in words.
    settled_by: how many seeds would decide what is undecided, in words; "" for the rest, and where nobody can say.
    """

    word: Holds
    measured: str
    settled_by: str = ""


class Expectation(Protocol):
    """Something that the claim foretells, written down before it is measured."""

    @property
    def says(self) -> str:
        """What is expected, one sentence, with the numbers of the source where it has any."""
        ...

    def __call__(self, measured: MeasuredValues) -> ClaimOutcome:
        """Return whether it came true."""
        ...


@dataclass(frozen=True)
class Level:
    """A number of one arm is expected between ``above`` and ``below``; ``is_rate``: each seed says 0 or 1 (`rate`).

    >>> found = MeasuredValues({"grpo": {"wasted": {0: 0.7, 1: 0.72, 2: 0.71}}})
    >>> Level("most is wasted", "grpo", "wasted", above=0.6)(found)
    ClaimOutcome(word='holds', measured='grpo 0.710 [0.685, 0.735]', settled_by='')
    """

    says: str
    arm: str
    number: str
    above: float = -math.inf
    below: float = math.inf
    is_rate: bool = False

    def __call__(self, measured: MeasuredValues) -> ClaimOutcome:
        """Compare the interval with the bounds."""
        try:
            found = (measured.rate if self.is_rate else measured.estimate)(self.arm, self.number)
        except NotMeasured:
            return ClaimOutcome("not run", "")
        settle = rates_to_settle if self.is_rate else seeds_to_settle
        return _judged(found, self.arm, self.above, self.below, settle)


@dataclass(frozen=True)
class Gain:
    """``second`` minus ``first``, seed by seed, is expected between ``above`` and ``below``.

    Two bounds on both sides of 0 say that the arms are as good as equal, as far as that margin.

    >>> found = MeasuredValues({"a": {"score": {0: 0.1, 1: 0.2}}, "b": {"score": {0: 0.5, 1: 0.6}}})
    >>> Gain("b is better", "a", "b", "score", above=0.0)(found).word
    'holds'
    """

    says: str
    first: str
    second: str
    number: str
    above: float = -math.inf
    below: float = math.inf

    def __call__(self, measured: MeasuredValues) -> ClaimOutcome:
        """Compare the interval of the difference with the bounds."""
        name = f"{self.second} minus {self.first}"
        return _compared(lambda: measured.gain(self.first, self.second, self.number), name, self.above, self.below)


@dataclass(frozen=True)
class Derived:
    """An estimate that a function of all that was measured gives is expected between ``above`` and ``below``.

    of: raises `NotMeasured` where what it needs was not run. named: what it is called beside its value.
    """

    says: str
    of: Callable[[MeasuredValues], Estimate]
    named: str = ""
    above: float = -math.inf
    below: float = math.inf

    def __call__(self, measured: MeasuredValues) -> ClaimOutcome:
        """Compare the interval with the bounds."""
        return _compared(lambda: self.of(measured), self.named, self.above, self.below)


def ratio(
    says: str, first: str, second: str, number: str, above: float = -math.inf, below: float = math.inf
) -> Derived:
    """Return the expectation that ``second`` divided by ``first``, seed by seed, lies between ``above`` and ``below``.

    >>> found = MeasuredValues({"a": {"cost": {0: 10.0, 1: 10.0}}, "b": {"cost": {0: 40.0, 1: 42.0}}})
    >>> ratio("b costs more", "a", "b", "cost", above=0.0)(found).measured
    'b over a 4.100 [2.829, 5.371]'
    """
    return Derived(says, lambda measured: measured.ratio(first, second, number), f"{second} over {first}", above, below)


def _compared(find: Callable[[], Estimate], name: str, above: float, below: float) -> ClaimOutcome:
    try:
        found = find()
    except NotMeasured:
        return ClaimOutcome("not run", "")
    return _judged(found, name, above, below, seeds_to_settle)


def _judged(
    found: Estimate, name: str, above: float, below: float, settle: Callable[[Estimate, float, float], str]
) -> ClaimOutcome:
    text = f"{name} {found}".strip()
    if above < found.low and found.high < below:
        return ClaimOutcome("holds", text)
    if found.high <= above or found.low >= below:
        return ClaimOutcome("fails", text)
    return ClaimOutcome("undecided", text, settle(found, above, below))


@dataclass(frozen=True)
class ClaimVerdict:
    """What may be said of a claim, of each expectation in order, and of each check of its setting.

    headline: the outcomes of the headline, which decide alone; the other expectations are counted beside it.
    """

    word: Word
    outcomes: tuple[ClaimOutcome, ...]
    checks: tuple[ClaimOutcome, ...] = ()
    headline: tuple[int, ...] = (0,)

    @property
    def deciding(self) -> int:
        """Which expectation made the word: the first part of the headline that is not as it should be, or the first."""
        words = [self.outcomes[part].word for part in self.headline]
        decided = next((word for word in ("fails", "undecided", "not run") if word in words), words[0])
        return self.headline[words.index(decided)]

    def count(self, word: Holds) -> int:
        """Return how many of the other expectations have this word."""
        return sum(o.word == word for place, o in enumerate(self.outcomes) if place not in self.headline)


def judge(
    expectations: Sequence[Expectation],
    measured: MeasuredValues,
    checks: Sequence[Expectation] = (),
    headline: Sequence[int] = (0,),
) -> ClaimVerdict:
    """Return the verdict: the same rule for every claim.

    "cause absent" when a check fails: what should bring the effect about is not there. Else by the headline alone:
    "supported" when all of its parts hold (mostly it is one), "contradicted" when one fails, "undecided" otherwise, and
    "not run" when none of them was run. While a check is undecided or not run, a headline that fails is undecided too,
    since where the cause may be missing nobody should expect the effect; one that holds shows that it was there.
    """
    outcomes = tuple(expectation(measured) for expectation in expectations)
    checked = tuple(check(measured) for check in checks)
    words = [outcomes[part].word for part in headline]
    word: Word = "undecided"
    if any(outcome.word == "fails" for outcome in checked):
        word = "cause absent"
    elif set(words) == {"not run"}:
        word = "not run"
    elif set(words) == {"holds"}:
        word = "supported"
    elif "fails" in words and all(outcome.word == "holds" for outcome in checked):
        word = "contradicted"
    return ClaimVerdict(word, outcomes, checked, tuple(headline))


@dataclass(frozen=True)
class Claim:
    """A claim, how it is tested, and what would bear it out.

    title: a few words. claim: in our own words. source: paper, section, numbers. protocol: what is run, and why an
    effect can be told from its opposite there. measure: does it. expectations: written before any number is seen.
    checks: what must hold for the setting to show the effect's cause at all (manipulation checks, controls); written
    beforehand too, and may be looked at in short pilots, as the difference that the claim is about may not.
    headline: the expectation that the verdict is about, by its place, written beforehand as well; two or three where
    the title has so many parts, which then all have to hold. scale: models and steps, in words.
    figure: the picture. remarks: what we make of the numbers, written afterwards; a verdict never depends on it.
    is_own_page: the appendix is written by hand and left alone.
    """

    title: str
    claim: str
    source: str
    protocol: str
    measure: ClaimMeasure
    expectations: tuple[Expectation, ...]
    figure: Callable[[MeasuredValues], str] | None = None
    remarks: str = ""
    is_own_page: bool = False
    checks: tuple[Expectation, ...] = ()
    headline: tuple[int, ...] = (0,)
    scale: str = ""

    def __post_init__(self) -> None:
        if not self.headline or any(not 0 <= part < len(self.expectations) for part in self.headline):
            raise ConfigError(
                f"headline = {self.headline} names no expectation of {len(self.expectations)}: the verdict needs one"
            )

    def judge(self, measured: MeasuredValues) -> ClaimVerdict:
        """Return what may be said of it."""
        return judge(self.expectations, measured, self.checks, self.headline)
