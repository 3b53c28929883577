"""The rollouts of a run on a page: one pass over them, how each prompt went, and what is said of each token."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from gnomon.algorithms import Algorithm, resolve
from gnomon.algorithms.protocols import LossInputs
from gnomon.algorithms.ratios import masked
from gnomon.core.errors import ConfigError
from gnomon.core.redaction import shortened, without_secrets
from gnomon.core.svg import number_of
from gnomon.core.tables import packaged_toml
from gnomon.core.types import Group, Rollout, Task
from gnomon.core.user_code import without_code
from gnomon.insight.report.plots import Z
from gnomon.models.token_strings import Vocabulary, read_vocabulary
from gnomon.records.corruption import BUDGET, chosen_rollouts, lines_of, rollout_row
from gnomon.records.jsonl import is_number
from gnomon.records.reading import RunRecord, column
from gnomon.records.rollouts import RecordedRollout
from gnomon.rollouts.collate import collate
from gnomon.tasks.tools import find_calls

# One pass over the rollouts of a run: which there are, how they were rewarded, and how each prompt went over time.

_ERROR_STEPS = 10


@dataclass(frozen=True)
class ScannedRollout:
    """A rollout by its place.

    Attributes:
        reward: None for an error, and for the dataset's own answer.
        surprise: Reward less what was expected, without its sign.
        is_looked_at: Whether the entropy of its tokens was recorded.
        is_error: Whether it could not be judged.
    """

    step: int
    place: int
    task_id: str
    reward: float | None
    surprise: float = 0.0
    is_looked_at: bool = False
    is_error: bool = False


@dataclass(frozen=True)
class Visit:
    """One visit to one prompt.

    Attributes:
        reward: Mean over the answers.
        value: Tracked before it, None without a tracker.
    """

    step: int
    reward: float
    value: float | None = None


@dataclass
class Scan:
    """What was found.

    Attributes:
        means: Mean rewards of the groups, by step that was read.
        steps: Steps that were read.
        of_steps: Steps that the run has recorded.
        damaged: Lines that are no rollout, as `records.corruption` counts them.
    """

    seen: list[ScannedRollout] = field(default_factory=list)
    means: dict[int, list[float]] = field(default_factory=dict)
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    of_steps: int = 0
    damaged: int = 0


def scan(record: RunRecord, metrics: Sequence[Mapping[str, Any]], budget: int = BUDGET) -> Scan:
    """Return what the rollouts of the run say.

    Args:
        metrics: Rows which tell in what steps there were errors.
    """
    # Steps with errors are read in any case: of a long run the budget alone might miss all of them.
    failed = [step for step, share in column(metrics, "rollout/error_fraction") if share > 0]
    there = record.rollout_steps()
    read = chosen_rollouts(record.files, budget, sorted(set(failed) & set(there))[-_ERROR_STEPS:])
    # Damaged lines are counted in the steps that every view reads, so that report, doctor and watch name one number.
    counted = chosen_rollouts(record.files, budget)
    found = Scan(steps=len(read), of_steps=len(there))
    for step, path in read.items():
        lines = list(lines_of(path))
        rows = [(place, row) for place, line in enumerate(lines) if (row := rollout_row(line)) is not None]
        found.damaged += (len(lines) - len(rows)) * (step in counted)
        _add(found, step, rows)
    return found


def reward_intervals(found: Scan) -> dict[int, tuple[float, float]]:
    """Return the 95% interval of each step's mean reward, for a run of which every step was read; else nothing.

    Mean over groups ± 1.96 standard errors, groups being what was drawn independently; within the rewards that were
    ever given, since no mean is beyond them.
    """
    rewards = [seen.reward for seen in found.seen if seen.reward is not None]
    # Steps that were read for their errors are no sample of the run.
    if found.steps < found.of_steps or not rewards:
        return {}
    least, most = min(rewards), max(rewards)
    found_here = {}
    for step, means in found.means.items():
        if len(means) > 1:
            # Population deviation over sqrt(n - 1) is the sample deviation over sqrt(n): the standard error.
            center, half = statistics.fmean(means), Z * statistics.pstdev(means) / math.sqrt(len(means) - 1)
            found_here[step] = (max(least, center - half), min(most, center + half))
    return found_here


def _add(found: Scan, step: int, lines: Sequence[tuple[int, dict[str, Any]]]) -> None:
    groups: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
    for place, row in lines:
        groups.setdefault(row.get("group"), []).append((place, row))
    for members in groups.values():
        rewards = [float(row["reward"]) for _, row in members if row["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        # Read from a file, so it may be anything; all answers of a group have the same one.
        baseline: Any = members[0][1].get("baseline")
        value = float(baseline) if is_number(baseline) else None
        expected = mean if value is None else value
        for place, row in members:
            reward = None if row["reward"] is None else float(row["reward"])
            # With a tracker what it expected, otherwise the group's mean.
            surprise = 0.0 if reward is None else abs(reward - expected)
            is_error = reward is None and row.get("error") is not None
            found.seen.append(ScannedRollout(step, place, row["task_id"], reward, surprise, "entropy" in row, is_error))
        if rewards:
            found.means.setdefault(step, []).append(mean)
            name = members[0][1]["task_id"]
            found.visits.setdefault(name, []).append(Visit(step, mean, value))
            # A run may ask thousands of prompts, so memory holds the beginnings of their questions.
            found.questions.setdefault(name, members[0][1]["question"][:400])


# How single prompts went over the run: learned, forgotten, never solved; and many of them at once as a map.

MOST_ROWS, MOST_COLUMNS = 36, 60
_CELL, _HIGH = 10, 9
_SHADES = 5
_EACH = 4
_SPARK = (180, 34)


@dataclass(frozen=True)
class PromptHistory:
    """One prompt over the run.

    Attributes:
        picture: Tracked value as a line, rewards as dots.
    """

    task_id: str
    question: str
    visits: int
    first: float
    last: float
    picture: Markup


@dataclass(frozen=True)
class PromptList:
    """Prompts that went alike."""

    title: str
    prompts: Sequence[PromptHistory]


@dataclass(frozen=True)
class PromptTable:
    """What there is to say of prompts.

    Attributes:
        asked: Prompts that were asked in the steps that were read.
        again: Those of them that were asked more than once.
        is_tracked: Whether there are tracked values.
        overview: The map, None where no prompt was asked twice.
    """

    asked: int
    again: int
    is_tracked: bool
    overview: Markup | None
    rows: int
    lists: Sequence[PromptList]


def prompts_of(scan: Scan) -> PromptTable:
    """Return the histories of the prompts that were asked more than once."""
    again = {name: visits for name, visits in scan.visits.items() if len(visits) > 1}
    is_tracked = any(visit.value is not None for visits in again.values() for visit in visits)
    span = _span(scan.visits)
    rises = {name: _level(visits, -1) - _level(visits, 0) for name, visits in again.items()}
    most = sorted(again, key=lambda name: (-len(again[name]), name))
    # Never above the lowest reward that the run gave, where it gave different ones.
    stuck = [name for name in most if max(v.reward for v in again[name]) <= span[0] and span[1] > span[0]]
    named = {
        "Learned": sorted((name for name in most if rises[name] > 0), key=lambda name: -rises[name]),
        "Forgotten": sorted((name for name in most if rises[name] < 0), key=lambda name: rises[name]),
        "Never solved": stuck,
        "Asked most often": most,
    }
    listed = [
        PromptList(title, [_history(scan, name, span) for name in names[:_EACH]])
        for title, names in named.items()
        if names
    ]
    rows = min(len(again), MOST_ROWS)
    return PromptTable(len(scan.visits), len(again), is_tracked, overview(again, span), rows, listed)


def overview(visits: Mapping[str, Sequence[Visit]], span: tuple[float, float]) -> Markup | None:
    """Return a map: a row a prompt, a column a stretch of steps, stronger where its answers earned more.

    The prompts are those that were visited most, from those that ended lowest to those that ended highest.
    """
    if not visits:
        return None
    most = sorted(visits, key=lambda name: (-len(visits[name]), name))[:MOST_ROWS]
    names = sorted(most, key=lambda name: (_level(visits[name], -1), _level(visits[name], 0), name))
    steps = [visit.step for name in names for visit in visits[name]]
    first, last = min(steps), max(steps)
    columns = min(MOST_COLUMNS, last - first + 1)
    shades: dict[int, list[str]] = {}
    for row, name in enumerate(names):
        cells: dict[int, list[float]] = {}
        for visit in visits[name]:
            # More steps than columns: a cell is the mean over a stretch.
            cells.setdefault((visit.step - first) * columns // (last - first + 1), []).append(visit.reward)
        for at, rewards in cells.items():
            shade = _shade(sum(rewards) / len(rewards), span)
            place = f"M{at * _CELL} {row * _CELL}h{_HIGH}v{_HIGH}h-{_HIGH}z"
            # One path a shade instead of a rectangle a cell keeps the page small.
            shades.setdefault(shade, []).append(place)
    paths = "".join(f'<path class="shade-{shade}" d="{"".join(parts)}"/>' for shade, parts in sorted(shades.items()))
    size = (columns * _CELL, len(names) * _CELL)
    said = f"Mean reward of {len(names)} prompts from step {first} to step {last}"
    return Markup(
        f'<svg class="map" role="img" aria-label="{said}" viewBox="0 0 {size[0]} {size[1]}" '
        f'style="max-width:{size[0] * 1.4:.0f}px"><title>{said}</title>{paths}</svg>'
    )


def _history(scan: Scan, name: str, span: tuple[float, float]) -> PromptHistory:
    visits = scan.visits[name]
    picture = _picture(visits, span)
    question = scan.questions.get(name, "")
    return PromptHistory(name, question, len(visits), visits[0].reward, visits[-1].reward, picture)


def _picture(visits: Sequence[Visit], span: tuple[float, float]) -> Markup:
    low, high = _wider(span, [v.value for v in visits if v.value is not None])
    # Evenly chosen, with the first and the last.
    kept = visits if len(visits) <= 60 else [visits[n * (len(visits) - 1) // 59] for n in range(60)]
    first, last = visits[0].step, visits[-1].step

    def place(step: int, value: float) -> tuple[str, str]:
        across = 4 + (step - first) / max(1, last - first) * (_SPARK[0] - 8)
        up = _SPARK[1] - 4 - (value - low) / (high - low) * (_SPARK[1] - 8)
        return number_of(across), number_of(up)

    places = [place(v.step, v.reward) for v in kept]
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in places)
    values = [place(v.step, v.value) for v in kept if v.value is not None]
    line = f'<path d="M{"L".join(" ".join(p) for p in values)}"/>' if values else ""
    frame = f'class="history" viewBox="0 0 {_SPARK[0]} {_SPARK[1]}" aria-hidden="true"'
    return Markup(f"<svg {frame}>{line}{dots}</svg>")


def _level(visits: Sequence[Visit], end: int) -> float:
    """Return the mean reward of the first or the last third of the visits."""
    count = max(1, len(visits) // 3)
    chosen = visits[:count] if end == 0 else visits[-count:]
    return sum(v.reward for v in chosen) / count


def _span(visits: Mapping[str, Sequence[Visit]]) -> tuple[float, float]:
    rewards = [v.reward for listed in visits.values() for v in listed]
    return (min(rewards), max(rewards)) if rewards else (0.0, 1.0)


def _wider(span: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    low, high = min([span[0], *values]), max([span[1], *values])
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _shade(value: float, span: tuple[float, float]) -> int:
    if span[1] <= span[0] or not math.isfinite(value):
        return _SHADES // 2
    return min(_SHADES, max(0, round((value - span[0]) / (span[1] - span[0]) * _SHADES)))


# What an algorithm does with each recorded token: whether it trusts it, holds it back, or stops it.

_ROUNDING = 1e-4


def algorithm_of(record: RunRecord) -> Algorithm | None:
    """Return the run's algorithm; None where it cannot be read, or where that would run code that is not gnomon's."""
    table = record.experiment().get("algorithm")
    if not isinstance(table, Mapping):
        return None
    try:
        # A recorded algorithm may name a file of the user's; a page is drawn without running it.
        with without_code():
            return resolve(table)
    except (ConfigError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def trust_letters(algorithm: Algorithm, step: Sequence[RecordedRollout]) -> dict[int, str]:
    """Return what the algorithm's bound makes of each token of a step: place of the rollout to a letter a token.

    ``.`` pushed as its ratio says, ``x`` not at all, ``-`` less, ``+`` more, ``0`` of advantage 0, blank not trained.
    The ratio is proximal over behavior: how far the learner was from the sampler when the step began. Where the loss
    anchors on proximal it begins each step at 1 instead, and this is what its bound would say of the whole distance.

    Args:
        step: All rollouts of it. Those whose proximal log-probabilities are not known are left out; all of an algorithm
            that anchors on the reference, and of one whose bound follows from the ratios of a whole step that is known
            in part.
    """
    trained = [place for place, one in enumerate(step) if one.taught.advantages]
    known = [place for place in trained if step[place].taught.proximal]
    # A bound that is computed over a step, as an effective size, is wrong from a part of it.
    is_told = len(known) == len(trained) or algorithm.ratio.anchor != "behavior"
    # Distributions, entropies and the reference's log-probabilities are not recorded.
    reads_more = algorithm.reads_entropy or getattr(algorithm.surrogate, "reference_top", None) is not None
    if not known or not is_told or algorithm.ratio.anchor == "reference" or reads_more:
        return {}
    chosen = [step[place] for place in known]
    # Each rollout as a group of its own: advantages are recorded, so groups are not needed again.
    batch = collate([Group(Task(one.rollout.task_id, (), ""), (one.rollout,)) for one in chosen], 1.0)
    proximal = _matrix([one.taught.proximal for one in chosen], batch.width)
    advantages = masked(_matrix([one.taught.advantages for one in chosen], batch.width), batch.mask)
    behavior = batch.behavior.double()
    batch = batch.with_fields(behavior=behavior, proximal=proximal, advantages=advantages)
    # As in `dissect`: the slope of the loss in the log-probability, over what it would be without a bound, is the push.
    leaf = proximal.clone().requires_grad_()
    ratio = algorithm.ratio(proximal, behavior, batch.mask)
    # A correction bounds proximal over behavior itself, beside a ratio that begins at 1.
    anchored = algorithm.ratio(leaf, behavior if algorithm.correction is None else proximal, batch.mask)
    view = LossInputs(batch, leaf, torch.zeros_like(leaf), proximal, anchored, algorithm.statistics(proximal, batch))
    per_token, _ = algorithm.surrogate(view)
    if algorithm.correction is not None:
        per_token = algorithm.correction(view)[0] * per_token
    (slope,) = torch.autograd.grad(masked(per_token, batch.mask).sum(), leaf)
    # (rows, positions); without an advantage there is no push to compare.
    push = masked(-slope / advantages, advantages != 0)
    # There one ratio stands for all tokens of a row, so each token's slope is that of the whole row.
    if algorithm.ratio.level == "sequence_product":
        push = push / batch.mask.sum(1, keepdim=True).clamp(min=1)
    letters = _letters(batch.mask, advantages, push, masked(ratio.exp(), batch.mask))
    return {p: text[: len(one.rollout.response)] for p, text, one in zip(known, letters, chosen, strict=True)}


def _matrix(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    padded = torch.zeros(len(rows), width, dtype=torch.float64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
    # A token that was not scored is recorded as null.
    return padded.nan_to_num(0.0)


def _letters(mask: Tensor, advantages: Tensor, push: Tensor, ratio: Tensor) -> list[str]:
    # Recorded numbers are rounded, so only what differs clearly was bounded.
    marks = {
        "-": push < ratio * (1 - _ROUNDING),
        "+": push > ratio * (1 + _ROUNDING),
        "x": push == 0,
        "0": advantages == 0,
        " ": ~mask,
    }
    codes = torch.full_like(push, ord("."), dtype=torch.long)
    for letter, where in marks.items():
        codes[where] = ord(letter)
    return ["".join(map(chr, row)) for row in codes.tolist()]


EACH = 5
"""Rollouts of one list."""
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


_LISTS: Mapping[str, Sequence[str]] = packaged_toml("gnomon.insight", "words.toml")["rollout_lists"]


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

    def rollout_lists(self, scan: Scan) -> list[RolloutList]:
        """Return the lists that hold something."""
        # Chosen by the few numbers of the scan; then only their steps are parsed with all tokens.
        wanted = {key: listed[: self.each] for key, listed in chosen(scan).items()}
        shown = self._read({seen for listed in wanted.values() for seen in listed})
        filled = {key: [shown[seen] for seen in listed if seen in shown] for key, listed in wanted.items()}
        return [RolloutList(key, _LISTS[key][0], _LISTS[key][1], listed) for key, listed in filled.items() if listed]

    def _read(self, wanted: set[ScannedRollout]) -> dict[ScannedRollout, Shown]:
        found: dict[ScannedRollout, Shown] = {}
        for step in sorted({seen.step for seen in wanted}):
            rollouts = self.record.rollouts(step)
            # Of the whole step, because some bounds depend on all of its rollouts.
            letters = {} if self.algorithm is None else trust_letters(self.algorithm, rollouts)
            for seen in wanted:
                if seen.step == step and seen.place < len(rollouts):
                    found[seen] = self._shown(rollouts[seen.place], letters.get(seen.place, ""))
        return found

    def _shown(self, one: RecordedRollout, letters: str) -> Shown:
        rollout = one.rollout
        # Of a long prompt the end, which the answer followed.
        prompt = rollout.prompt[-2 * self.most :]
        seen = "" if self.vocabulary is None else without_secrets(self.vocabulary.text(prompt))
        # Names and texts are from files or models, so each has a limit.
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
        # A turn is the answer's tokens and behind them, masked, the reply of the environment.
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
    # A checkpoint has the tokenizer that was trained with; before the first one it is the base model's.
    places = [*folders[:1], *([Path(named)] if isinstance(named, str) else [])]
    return next((found for place in places if (found := read_vocabulary(place)) is not None), None)


def chosen(scan: Scan) -> dict[str, list[ScannedRollout]]:
    """Return which rollouts are on which list, the first the likeliest to be shown.

    One of each prompt comes before a second of any; of equals those of which most is known, then the latest.
    """
    # All orders below are stable, so this one decides between equals.
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


def _varied(seen: Sequence[ScannedRollout]) -> list[ScannedRollout]:
    firsts: dict[str, ScannedRollout] = {}
    for one in seen:
        firsts.setdefault(one.task_id, one)
    # The first of each prompt, then the others in their order.
    among = set(firsts.values())
    return [*firsts.values(), *(one for one in seen if one not in among)]


def _course(known: Sequence[ScannedRollout]) -> list[ScannedRollout]:
    first = {seen.step: seen for seen in reversed(known)}  # of each step, for the last one in this order counts
    steps = sorted(first)
    if len(steps) < 2:
        return []
    # Evenly over the run, its first and last step included.
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
    # One advantage for the whole answer; otherwise it is shown token by token.
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
    # The bound of the losses, which also keeps exp from overflowing.
    return math.exp(max(-20.0, min(20.0, shift))) if math.isfinite(shift) else math.nan


def _listed(values: Sequence[float], mask: Sequence[bool], form: str) -> str:
    known = [
        format(value, form) if chosen and math.isfinite(value) else ""
        for value, chosen in zip(values, mask, strict=True)
    ]
    # Most answers have one advantage for all tokens: one number instead of hundreds keeps the page small.
    return known[0] if len(set(known)) == 1 else " ".join(known)
