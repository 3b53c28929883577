"""What the evidence of a comparison allows one to say, in plain sentences, and what it does not."""

from collections.abc import Iterator, Sequence

from gnomon.sentences import many
from gnomon.statistics import in_words
from gnomon.studies.compare import Comparison, Pairing, Standing

DIFFERENCE = 0.05
"""The difference whose cost in seeds and prompts is told."""
_SAME_COST = 0.05


def verdict(found: Comparison) -> list[str]:
    """Return the conclusion: what differs beyond noise, what cannot be told apart, and what would settle it."""
    return [*_scope(found), *_differing(found), *_alike(found), *_power(found)]


def caveats(found: Comparison) -> list[str]:
    """Return what has to be known before any of it is believed."""
    return [*_order(found), *_spending(found), *_settings(found), *_failures(found)]


def scales(found: Comparison) -> list[str]:
    """Return what has to be known of the training rewards of algorithms that do not count alike; often nothing."""
    penalized = found.setting.penalized
    if not penalized:
        return []
    whose = "is" if len(penalized) == 1 else "are"
    return [
        f"Not all of them count rewards alike: the line of {_listed(penalized)} {whose} less a penalty on length, so "
        "its height says nothing beside the others; held-out scores are of one scale for all."
    ]


def pair_in_words(pairing: Pairing, pairs: int) -> str:
    """Return one pair: who scored more, by how much, with which p-value.

    The better one comes first, so that the sentence reads as what it says.
    """
    gain, interval = pairing.contrast.mean, pairing.contrast.interval
    better, other = (pairing.second, pairing.first) if gain >= 0 else (pairing.first, pairing.second)
    low, high = (interval.low, interval.high) if gain >= 0 else (-interval.high, -interval.low)
    corrected = f", corrected for {pairs} pairs" if pairs > 1 else ""
    who = f"the model that {better} trained" if pairing.contrast.is_about_models else better
    than = f"the one of {other}" if pairing.contrast.is_about_models else other
    numbers = f"{abs(gain):.3f} more than {than} [{low:.3f}, {high:.3f}] ({in_words(pairing.corrected)}{corrected})"
    return f"{who} scored {numbers}"


def _scope(found: Comparison) -> Iterator[str]:
    each = sorted({len(standing.seeds) for standing in found.standings})
    seeds = many(each[0], "seed") if len(each) == 1 else f"{each[0]} to {many(each[-1], 'seed')}"
    samples = "" if found.setting.samples == 1 else f", {found.setting.samples} answers each"
    yield f"This is {seeds} and {many(found.prompts, 'held-out prompt')}{samples}, after {_spent(found)} a run."
    if found.seeds == 1:
        yield (
            "One seed says nothing about algorithms: what is compared is one model that each has trained, and with "
            "another seed the order may be another."
        )


def _spent(found: Comparison) -> str:
    """Return what a run really spent: of tokens, from the least to the most, as the last step passes the budget."""
    if found.setting.unit != "tokens":
        return found.setting.limit
    ends = dict.fromkeys(f"{f(s.cost.tokens for s in found.standings):,.0f}" for f in (min, max))
    asked = f"{found.setting.amount:,.0f}"
    beside = "" if list(ends) == [asked] else f" (budget: {asked})"
    return f"{' to '.join(ends)} generated tokens{beside}"


def _differing(found: Comparison) -> Iterator[str]:
    for pairing in (p for p in found.pairings if not p.is_noise):
        said = pair_in_words(pairing, len(found.pairings))
        yield f"{said[0].upper() + said[1:] if pairing.contrast.is_about_models else said}: beyond noise."


def _alike(found: Comparison) -> Iterator[str]:
    alike = [p for p in found.pairings if p.is_noise]
    if not alike:
        return
    if len(alike) == len(found.pairings) > 1:
        yield f"No two of the {len(found.standings)} can be told apart."
    else:
        yield f"{_listed([f'{p.first} and {p.second}' for p in alike], '; ')} cannot be told apart."


def _power(found: Comparison) -> Iterator[str]:
    """Say how large a difference had to be to be found, and what a difference of 0.05 takes."""
    alike = [p for p in found.pairings if p.is_noise]
    if not alike:
        return
    pair = max(alike, key=lambda pairing: pairing.contrast.detectable)
    widest = pair.contrast
    if widest.detectable == 0:
        yield "On every prompt they did the same, which more prompts, samples or seeds may still change."
        return
    beside = " between two such models" if widest.is_about_models else ""
    if len(found.pairings) > 1:
        beside = f" between {pair.first} and {pair.second}, which vary most, were they the only pair,"
    yield f"So many find a true difference of {widest.detectable:.3f} or more{beside} 4 times in 5."
    if widest.detectable <= DIFFERENCE or widest.is_about_models:
        return
    seeds = widest.seeds_needed(DIFFERENCE)
    if seeds is None:
        prompts = widest.prompts_needed(DIFFERENCE)
        yield f"One of {DIFFERENCE:.2f} takes about {prompts:,} prompts, or more answers each; seeds alone hardly do."
        return
    yield f"One of {DIFFERENCE:.2f} takes about {many(max(seeds, widest.seeds + 1), 'seed')} on these prompts."


def _order(found: Comparison) -> Iterator[str]:
    """Say what was looked up about the questions and their order."""
    own = [s.name for s in found.standings if s.name not in found.setting.uniform]
    if own:
        yield (
            f"{_listed(own)} {'chooses' if len(own) == 1 else 'choose'} the next questions by what was learned so far, "
            "which is part of the algorithm; the set of questions is the same."
        )
    by_verdict: dict[str, list[int]] = {}
    for order in found.orders:
        by_verdict.setdefault(order.verdict, []).append(order.questions)
    for said, counts in by_verdict.items():
        yield _SAID[said].format(runs=many(len(counts), "pair", "pairs") + " of runs", questions=f"{min(counts):,}")
    if any(order.is_same for order in found.orders):
        yield (
            "An algorithm that asks more answers a question walks the same row of questions more slowly: the same "
            "order means that the shorter row is the beginning of the longer one."
        )


_SAID = {
    "same": "The same questions in the same order, looked up in what was recorded: {runs} agree question by question "
    "over the first {questions} or more.",
    "same but for the ends of epochs": "The same questions in the same order but where an epoch ends within a step, "
    "looked up in what was recorded: {runs}, over {questions} questions or more.",
    "same, step by step": "The same questions up to the end of each step, looked up in what was recorded: {runs}, over "
    "{questions} questions or more; the order within a step is not recorded where groups are refused.",
    "other": "Warning: {runs} did not ask the same questions in the same order, over {questions} questions or more.",
    "unknown": "Whether {runs} asked the same questions in the same order cannot be looked up in what was recorded.",
}


def _spending(found: Comparison) -> Iterator[str]:
    for standing in found.standings:
        cost = standing.cost
        if cost.before:
            yield (
                f"{standing.name} spent {cost.before:,.0f} of its {cost.tokens:,.0f} tokens before its first step, for "
                "initial values or its critic."
            )
        if cost.steps == 1 and found.setting.unit != "steps":
            yield f"{standing.name} made a single step, which spent its budget: that says next to nothing of learning."
        if cost.steps == 0:
            yield f"{standing.name} made no step: its budget was spent before the first."
    least, most = (f([s.cost.tokens for s in found.standings]) for f in (min, max))
    if found.setting.unit == "tokens" and most > least * (1 + _SAME_COST):
        yield (
            f"A run ends with the step that reaches its budget, so the runs generated between {least:,.0f} and "
            f"{most:,.0f} tokens; a larger budget, or smaller steps, makes them more alike."
        )
    if found.setting.unit != "tokens" and most > least * (1 + _SAME_COST):
        yield f"At {found.setting.limit} the algorithms generated between {least:,.0f} and {most:,.0f} tokens."
    if found.setting.unit == "seconds":
        yield "Seconds are of this machine while runs worked beside each other; elsewhere the order may be another."


def _settings(found: Comparison) -> Iterator[str]:
    yield (
        "Each algorithm had its preset's own settings and the experiment's one learning rate; with settings tuned for "
        "each the order may be another."
    )


def _failures(found: Comparison) -> Iterator[str]:
    if found.failures:
        yield f"Runs that failed are left out, which favors an algorithm that fails often: {found.failures}"


def _listed(names: Sequence[str], between: str = ", ") -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{between.join(names[:-1])} and {names[-1]}" if between == ", " else between.join(names)


def best_first(found: Comparison) -> list[Standing]:
    """Return the standings by score; where they cannot be told apart that order means nothing."""
    return sorted(found.standings, key=lambda standing: -standing.score)
