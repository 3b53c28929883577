"""The rollouts that a page shows: which ones, and what is said of each token."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.algorithms import Algorithm
from gnomon.core.redaction import shortened, without_secrets
from gnomon.core.types import Rollout
from gnomon.insight.report.scan import Scan, ScannedRun
from gnomon.insight.report.trust import trust_letters
from gnomon.models.token_strings import Vocabulary, read_vocabulary
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RecordedRollout
from gnomon.tasks.tools import find_calls

EACH = 5
"""Rollouts on a shelf."""
_HEAD = 0.7
_MOST_TURNS = 40
_LETTERS = 8
"""Characters that stand for a token where tokens are not known."""


@dataclass(frozen=True)
class TokenView:
    """A response in pieces: its beginning, its end, and how much is left out between them, in words.

    Attributes:
        numbers: What is known of each piece, by the way of coloring: numbers with blanks between them, one alone where
            all are the same, none where it is not known; of ``trust`` a letter a piece. Empty where the pieces are no
            tokens.
    """

    head: Sequence[str]
    tail: Sequence[str] = ()
    left_out: str = ""
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownTurn:
    """One answer of a conversation.

    Attributes:
        tokens: Tokens of the answer.
        reply: Tokens that the environment or the agent put behind it.
        calls: Tool calls in it; None where tokens cannot be read.
        reward: What it earned.
        seconds: Wall time from the question for it to its reply; None where it was not measured.
    """

    tokens: int
    reply: int
    calls: int | None
    reward: float
    seconds: float | None = None


@dataclass(frozen=True)
class Shown:
    """One rollout on the page.

    Attributes:
        prompt: As the model saw it, with control tokens.
        facts: A few words each.
        turns: Its answers; none where it is a single one.
    """

    step: int
    task_id: str
    question: str
    prompt: str
    reward: float | None
    error: str
    parts: Sequence[tuple[str, float]]
    facts: Sequence[str]
    turns: Sequence[ShownTurn]
    response: TokenView


@dataclass(frozen=True)
class RolloutList:
    """Rollouts of one kind.

    Attributes:
        key: Its name in the page.
    """

    key: str
    title: str
    meaning: str
    rollouts: Sequence[Shown]


_SHELVES = {
    "best": ("Best", "The highest rewards, the latest first."),
    "worst": ("Worst", "The lowest rewards, the latest first."),
    "surprising": (
        "Most surprising",
        "The reward was furthest from what was expected: the tracked value where there is one, else the group's mean.",
    ),
    "errors": ("Errors", "Could not be judged: neither a zero nor trained on."),
    "course": ("Through the run", "One answer from each of several steps, from the first to the last."),
}


@dataclass(frozen=True)
class Reader:
    """Reads rollouts for a page.

    Attributes:
        most: Tokens of one response that are shown.
        each: Rollouts of one kind that are shown.
    """

    record: RunRecord
    vocabulary: Vocabulary | None
    algorithm: Algorithm | None
    most: int = 700
    each: int = EACH

    def shelves(self, scan: Scan) -> list[RolloutList]:
        """Return the shelves that hold something."""
        wanted = {key: listed[: self.each] for key, listed in chosen(scan).items()}
        shown = self._read({seen for listed in wanted.values() for seen in listed})
        filled = {key: [shown[seen] for seen in listed if seen in shown] for key, listed in wanted.items()}
        return [RolloutList(key, *_SHELVES[key], rollouts) for key, rollouts in filled.items() if rollouts]

    def _read(self, wanted: set[ScannedRun]) -> dict[ScannedRun, Shown]:
        found: dict[ScannedRun, Shown] = {}
        for step in sorted({seen.step for seen in wanted}):
            rollouts = self.record.rollouts(step)
            letters = {} if self.algorithm is None else trust_letters(self.algorithm, rollouts)
            for seen in wanted:
                if seen.step == step and seen.place < len(rollouts):
                    found[seen] = self._shown(rollouts[seen.place], letters.get(seen.place, ""))
        return found

    def _shown(self, one: RecordedRollout, letters: str) -> Shown:
        rollout = one.rollout
        prompt = rollout.prompt[-2 * self.most :]
        seen = "" if self.vocabulary is None else without_secrets(self.vocabulary.text(prompt))
        parts = rollout.grade.parts.items()
        return Shown(
            step=one.step,
            task_id=shortened(rollout.task_id, 80),
            question=shortened(one.question, _LETTERS * self.most),
            prompt=shortened(seen, _LETTERS * self.most),
            reward=rollout.grade.reward,
            error=shortened(rollout.grade.error or "", 2000),
            parts=[(shortened(name, 60), v) for name, v in list(parts)[:12] if type(v) in (int, float)],
            facts=list(_facts(one)),
            turns=turns_of(rollout, self.vocabulary)[:_MOST_TURNS],
            response=self._excerpt(one, letters),
        )

    def _excerpt(self, one: RecordedRollout, letters: str) -> TokenView:
        tokens, text = one.rollout.response, one.rollout.text
        if self.vocabulary is None:
            return _plain(text, _LETTERS * self.most)
        first, last = _ends(len(tokens), self.most)
        head, tail = self.vocabulary.pieces(tokens[:first]), self.vocabulary.pieces(tokens[last:])
        pieces = [piece for piece, _ in [*head, *tail]]
        spelled = "".join(pieces)
        if without_secrets(spelled) != spelled:
            # The text was written without secrets, and its tokens spell them still.
            return _plain(text, _LETTERS * self.most)
        places = [*_places(head, 0), *_places(tail, last)]
        numbers = _numbers(one, letters, places)
        left_out = f"{last - first:,} tokens" if last > first else ""
        return TokenView(pieces[: len(head)], pieces[len(head) :], left_out, numbers)


def turns_of(rollout: Rollout, vocabulary: Vocabulary | None) -> list[ShownTurn]:
    """Return the answers of a conversation, segment by segment; none where there is only one."""
    turns = []
    for row in rollout.rows:
        begins = [0, *row.turn_ends]
        for number, (end, earned) in enumerate(zip(row.turn_ends, row.turn_rewards, strict=True)):
            span = range(len(row.response))[begins[number] : end]
            answer = [row.response[place] for place in span if row.mask[place]]
            behind = row.mask[end : row.turn_ends[number + 1] if number + 1 < len(row.turn_ends) else None]
            calls = None if vocabulary is None else len(find_calls(vocabulary.text(answer)))
            seconds = row.turn_seconds[number] if number < len(row.turn_seconds) else None
            turns.append(ShownTurn(len(answer), sum(not chosen for chosen in behind), calls, earned, seconds))
    return turns if len(turns) > 1 else []


def vocabulary_of(record: RunRecord) -> Vocabulary | None:
    """Return the tokens of the run's own tokenizer, as its newest checkpoint has it; None where there is none yet."""
    folders = [record.files.checkpoints / f"step-{step}" for step in reversed(record.checkpoint_steps())]
    named = record.experiment().get("model")
    places = [*folders[:1], *([Path(named)] if isinstance(named, str) else [])]
    return next((found for place in places if (found := read_vocabulary(place)) is not None), None)


def chosen(scan: Scan) -> dict[str, list[ScannedRun]]:
    """Return which rollouts stand on which shelf, the first the likeliest to be shown.

    One of each prompt comes before a second of any; of equals those of which most is known, then the latest.
    """
    known = sorted((s for s in scan.seen if not s.is_error), key=lambda seen: (not seen.is_looked_at, -seen.step))
    graded = [seen for seen in known if seen.reward is not None]
    failed = sorted((seen for seen in scan.seen if seen.is_error), key=lambda seen: -seen.step)
    return {
        "best": _varied(sorted(graded, key=lambda seen: -(seen.reward or 0.0))),
        "worst": _varied(sorted(graded, key=lambda seen: seen.reward or 0.0)),
        "surprising": _varied(sorted((s for s in graded if s.surprise > 0), key=lambda seen: -seen.surprise)),
        "errors": _varied(failed),
        "course": _course(known),
    }


def _varied(seen: Sequence[ScannedRun]) -> list[ScannedRun]:
    firsts: dict[str, ScannedRun] = {}
    for one in seen:
        firsts.setdefault(one.task_id, one)
    among = set(firsts.values())
    return [*firsts.values(), *(one for one in seen if one not in among)]


def _course(known: Sequence[ScannedRun]) -> list[ScannedRun]:
    first = {seen.step: seen for seen in reversed(known)}  # of each step, for the last one in this order counts
    steps = sorted(first)
    if len(steps) < 2:
        return []
    at = {round(n * (len(steps) - 1) / (EACH - 1)) for n in range(EACH)}
    return [first[steps[place]] for place in sorted(at)]


def _facts(one: RecordedRollout) -> Iterator[str]:
    rollout = one.rollout
    yield f"{len(rollout.response):,} tokens"
    if rollout.is_truncated:
        yield "cut off at the budget"
    if not one.is_kept:
        yield "not trained on"
    surprises = [-p for p, chosen in zip(rollout.logprobs, rollout.mask, strict=True) if chosen and math.isfinite(p)]
    if surprises:
        yield f"{sum(surprises) / len(surprises):.2f} nats a token"
    advantages = set(one.taught.advantages)
    if len(advantages) == 1 and math.isfinite(min(advantages)):
        yield f"advantage {min(advantages):+.3g}"
    if one.taught.baseline is not None:
        yield f"expected {one.taught.baseline:.3g}"
    if rollout.ending is not None:
        yield f"{rollout.ending.turns} turns, ended by {rollout.ending.by}"


def _ends(count: int, most: int) -> tuple[int, int]:
    """Return where the beginning ends and the end begins."""
    if count <= most:
        return count, count
    first = int(most * _HEAD)
    return first, count - (most - first)


def _plain(text: str, most: int) -> TokenView:
    first, last = _ends(len(text), most)
    left_out = f"{last - first:,} characters" if last > first else ""
    return TokenView([text[:first]] if text else [], [text[last:]] if left_out else [], left_out)


def _places(pieces: Sequence[tuple[str, int]], start: int) -> Iterator[int]:
    for _, count in pieces:
        yield start
        start += count


def _numbers(one: RecordedRollout, letters: str, places: Sequence[int]) -> dict[str, str]:
    """Return what is known of the tokens at ``places``; what a tool wrote has no number."""
    rollout, taught = one.rollout, one.taught
    known = {
        "advantage": ([taught.advantages[place] for place in places] if taught.advantages else [], ".3g"),
        "surprise": ([-rollout.logprobs[place] for place in places], ".2f"),
        "ratio": ([_ratio(taught.proximal[p], rollout.logprobs[p]) for p in places] if taught.proximal else [], ".4g"),
        "entropy": ([taught.entropy[place] for place in places] if taught.entropy else [], ".3g"),
        "value": ([taught.values[place] for place in places] if taught.values else [], ".3g"),
    }
    chosen = [rollout.mask[place] for place in places]
    found = {name: _listed(values, chosen, form) for name, (values, form) in known.items() if values}
    if letters:
        found["trust"] = "".join(letters[place] for place in places)
    return found


def _ratio(proximal: float, behavior: float) -> float:
    shift = proximal - behavior
    return math.exp(max(-20.0, min(20.0, shift))) if math.isfinite(shift) else math.nan


def _listed(values: Sequence[float], mask: Sequence[bool], form: str) -> str:
    known = [
        format(value, form) if chosen and math.isfinite(value) else ""
        for value, chosen in zip(values, mask, strict=True)
    ]
    return known[0] if len(set(known)) == 1 else " ".join(known)
