"""What finished runs say together: curves, scores, pairs, cost, and the words for it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gnomon.analysis.compare.page import caveats, cost_rows, page, pair_in_words, pair_rows, score_rows, text, verdict
from gnomon.analysis.compare.records import Cost, Point, Trained
from gnomon.analysis.compare.statistics import ComparedSetting, Comparison, summarize
from gnomon.core.errors import DatasetError
from gnomon.core.statistics import holm

SETTING = ComparedSetting(
    "sums", "tiny", "arithmetic", "1,000 generated tokens", "tokens", 1000.0, 40, ("grpo", "p3o"), 2, 1
)
ROW = tuple(f"q{n}" for n in range(12))


def trained(
    algorithm: str,
    seed: int,
    scores: Sequence[float],
    asked: Sequence[Sequence[str]] = (ROW[:6], ROW[6:]),
    before: int = 0,
) -> Trained:
    """Return a run of two steps of about 500 tokens each that scored so on its held-out prompts."""
    points = (
        Point(before, 0.0, 0.0, 0.1),
        Point(505.0, 2.0, 1.0, 0.3),
        Point(1010.0, 4.0, 2.0, sum(scores) / len(scores)),
    )
    cost = Cost(2.0, 1010.0, float(before), 600.0, {"degenerate": 400.0, "stale": 0.0}, {"step": 4.0, "generate": 3.0})
    return Trained(
        algorithm=algorithm,
        seed=seed,
        path=Path("runs") / algorithm,
        points=points,
        scores={f"p{n}": score for n, score in enumerate(scores)},
        rewards=((505.0, 0.2), (1010.0, 0.6)),
        cost=replace(
            cost, seconds={"grade": 0.0, "score": 0.0, "update": 1.0, "publish": 0.0, "track": 0.0} | dict(cost.seconds)
        ),
        asked=tuple(map(tuple, asked)),
        is_filtered=False,
    )


def compared(scores: Mapping[str, Sequence[Sequence[float]]], **settings: object) -> Comparison:
    """Return the comparison of runs with these scores: algorithm to seed to prompt."""
    runs = [trained(name, seed, row) for name, rows in scores.items() for seed, row in enumerate(rows)]
    return summarize(replace(SETTING, **settings), runs)  # type: ignore[arg-type]


BETTER = [[1.0] * 18 + [0.0] * 2, [1.0] * 17 + [0.0] * 3, [1.0] * 18 + [0.0] * 2]
WORSE = [[1.0] * 4 + [0.0] * 16, [1.0] * 5 + [0.0] * 15, [1.0] * 4 + [0.0] * 16]


def test_scores_curves_and_costs_are_means_over_seeds():
    """Two seeds of 0.5 and 1.0: 0.75; the curve goes from the common 0.1 to 0.75 with a band from 0.5 to 1.0."""
    found = compared({"grpo": [[1.0, 0.0], [1.0, 1.0]], "p3o": [[0.0, 0.0], [0.0, 0.0]]})
    standing = found.standings[0]

    assert (standing.score, standing.by_seed, standing.seeds) == (0.75, (0.5, 1.0), (0, 1))
    assert [(b.tokens, b.mean, b.low, b.high) for b in standing.curve] == [
        (0.0, 0.1, 0.1, 0.1), (505.0, 0.3, 0.3, 0.3), (1010.0, 0.75, 0.5, 1.0),
    ]  # fmt: skip
    assert [(round(b.tokens), b.mean) for b in standing.rewards] == [(484, 0.2), (989, 0.6)]
    assert standing.cost.tokens == 1010.0
    assert found.prompts == 2


def test_pairs_are_corrected_for_their_number():
    """Three algorithms are three pairs, each with Holm's p-value; the clear difference stays, the others do not."""
    found = compared({"grpo": WORSE, "p3o": BETTER, "spo": WORSE})
    by_pair = {(p.first, p.second): p for p in found.pairings}

    assert list(by_pair) == [("grpo", "p3o"), ("grpo", "spo"), ("p3o", "spo")]
    assert [p.corrected for p in found.pairings] == holm([p.contrast.p_value for p in found.pairings])
    assert not by_pair["grpo", "p3o"].is_noise
    assert by_pair["grpo", "spo"].is_noise
    assert by_pair["grpo", "p3o"].contrast.mean == pytest.approx(40 / 60)


def test_only_prompts_that_all_answered_and_seeds_that_both_have_count():
    """A prompt that one run could not grade leaves the table; a pair takes the seeds of both."""
    runs = [trained("grpo", 0, [1.0, 0.0, 1.0]), trained("grpo", 1, [1.0, 1.0, 1.0]), trained("p3o", 0, [0.0, 0.0])]
    found = summarize(SETTING, runs)

    assert found.prompts == 2
    assert found.standings[0].score == 0.75
    assert found.pairings[0].contrast.seeds == 1


def test_runs_without_a_common_prompt_cannot_be_compared():
    """Nothing to pair is an error that says so."""
    with pytest.raises(DatasetError, match="share no held-out prompt"):
        summarize(SETTING, [trained("grpo", 0, [1.0]), replace(trained("p3o", 0, [1.0]), scores={"other": 1.0})])


def test_a_difference_beyond_noise_is_said_with_the_better_one_first():
    """The sentence has the gain, its interval, the corrected p-value and no word for what nobody knows."""
    found = compared({"p3o": BETTER, "grpo": WORSE})
    said = verdict(found)

    assert said[0] == "This is 3 seeds and 20 held-out prompts, after 1,010 generated tokens (budget: 1,000) a run."
    assert said[1].startswith("p3o scored 0.667 more than grpo [0.")
    assert said[1].endswith("): beyond noise.")
    assert len(said) == 2


def test_the_dataset_s_answers_are_not_said_to_be_generated():
    """Beside an algorithm that samples they are answer tokens; alone they are the dataset's."""
    found = compared({"grpo": WORSE, "p3o": BETTER})
    mixed = replace(found, setting=replace(SETTING, limit="1,000 answer tokens", supervised=("p3o",)))
    alone = replace(mixed, standings=mixed.standings[1:], setting=replace(SETTING, supervised=("grpo",)))

    assert "1,010 answer tokens" in verdict(mixed)[0]
    assert "1,010 tokens of the dataset's answers" in verdict(alone)[0]
    assert any(said.startswith("p3o trained on the dataset's answers") for said in caveats(mixed))
    assert "generated tokens" not in page(mixed) + text(mixed)
    assert "tokens generated" not in page(mixed) + text(mixed)


def test_what_cannot_be_told_apart_is_said_with_what_would_tell():
    """Alike algorithms: no winner, the smallest difference that would have been found, and the price of 0.05."""
    mixed = [[1.0, 0.0] * 10, [0.0, 1.0] * 10, [1.0, 1.0, 0.0, 0.0] * 5]
    said = " ".join(verdict(compared({"grpo": WORSE, "p3o": [*mixed[:2], WORSE[2]], "spo": mixed})))

    assert "No two of the 3 can be told apart." in said
    assert "Minimum detectable difference at 80% power" in said
    assert "0.05 takes about " in said
    assert "beyond noise" not in said


def test_one_seed_never_makes_a_claim_about_algorithms():
    """Even where two models differ beyond noise, the words are about models, and the first sentence says why."""
    found = compared({"p3o": BETTER[:1], "grpo": WORSE[:1]})
    said = verdict(found)

    assert "One seed says nothing about algorithms" in said[1]
    assert said[2].startswith("The model that p3o trained scored 0.700 more than the one of grpo")
    assert "One seed says nothing about algorithms" in text(found)
    assert "One seed says nothing about algorithms" in page(found)


def test_the_order_of_questions_is_looked_up():
    """Equal rows are said to be equal, in what was recorded; an algorithm with its own choice is named."""
    said = " ".join(caveats(compared({"grpo": WORSE, "p3o": WORSE, "spo": WORSE})))

    assert "spo chooses the next questions by what was learned so far" in said
    assert "3 pairs of runs agree question by question over the first 12 or more" in said
    assert "the shorter row is the beginning of the longer one" in said


def test_another_order_is_a_warning():
    """Runs that were asked other questions are not passed over in silence."""
    runs = [trained("grpo", 0, [1.0, 0.0]), trained("p3o", 0, [1.0, 0.0], asked=[ROW[6:], ROW[:6]])]
    said = " ".join(caveats(summarize(replace(SETTING, epoch=10**6), runs)))

    assert "Warning: 1 pair of runs did not ask the same questions in the same order" in said


def test_tokens_before_the_first_step_are_said():
    """Initial values and critics are paid from the same budget."""
    found = summarize(SETTING, [trained("grpo", 0, [1.0, 0.0]), trained("spo", 0, [1.0, 0.0], before=300)])

    assert "spo spent 300 of its 1,010 tokens before its first step" in " ".join(caveats(found))
    assert "the experiment's one learning rate" in " ".join(caveats(found))


def test_the_headline_says_what_was_generated():
    """From the least to the most of the algorithms; the budget only where it is not that; steps are what was asked."""
    found = compared({"grpo": WORSE, "p3o": BETTER})
    first = found.standings[0]
    less = replace(found, standings=(replace(first, cost=replace(first.cost, tokens=1000.0)), *found.standings[1:]))
    stepped = replace(found, setting=replace(found.setting, unit="steps", limit="2 steps"))

    assert verdict(less)[0].endswith("after 1,000 to 1,010 generated tokens (budget: 1,000) a run.")
    assert verdict(replace(less, standings=less.standings[:1]))[0].endswith("after 1,000 generated tokens a run.")
    assert verdict(stepped)[0].endswith("after 2 steps a run.")


def test_a_budget_of_one_step_is_said():
    """Two steps are nothing to remark, one is; where one step was asked for, it is not."""
    found = compared({"grpo": WORSE, "p3o": BETTER})
    first = found.standings[0]
    once = replace(found, standings=(replace(first, cost=replace(first.cost, steps=1.0)), *found.standings[1:]))

    assert not any("single step" in sentence for sentence in caveats(found))
    assert [s.startswith("grpo made a single step") for s in caveats(once) if "single step" in s] == [True]
    assert not any("single step" in s for s in caveats(replace(once, setting=replace(once.setting, unit="steps"))))


def test_rewards_on_different_scales_are_said():
    """Beside the picture of training rewards, for the algorithm that takes a penalty off them; else nothing."""
    said = "the line of p3o is less a penalty on length"

    assert said in page(compared({"grpo": WORSE, "p3o": BETTER}, penalized=("p3o",)))
    assert "less a penalty" not in page(compared({"grpo": WORSE, "p3o": BETTER}))


def test_failed_runs_are_said():
    """Leaving them out favors whoever fails, and the page says so."""
    found = replace(compared({"grpo": WORSE, "p3o": BETTER}), failures="1 of 6 runs failed:\n  p3o, seed 2")

    assert "which favors an algorithm that fails often: 1 of 6 runs failed" in text(found)


def test_tables_have_every_algorithm_every_pair_and_every_cause():
    """Scores best first; a row a pair; shares of the tokens, causes without any left out."""
    found = compared({"grpo": WORSE, "p3o": BETTER})
    scores, pairs, costs = score_rows(found), pair_rows(found), {row[0]: list(row[1:]) for row in cost_rows(found)}

    assert [row[0] for row in scores] == ["algorithm", "p3o", "grpo"]
    assert scores[1][1:3] == ["0.100", "0.883"]
    assert scores[1][4] == "0.900 0.850 0.900"
    assert pairs[1][:3] == ["grpo", "p3o", "+0.667"]
    assert pairs[1][6] == "p3o is better"
    assert costs["of these with a gradient"] == ["59.4%", "59.4%"]
    assert costs["no gradient: degenerate"] == ["39.6%", "39.6%"]
    assert "no gradient: stale" not in costs
    assert costs["to generate"] == ["75.0%", "75.0%"]


class Elements(HTMLParser):
    """Collects tags, and what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [name for name, _ in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_escapes_names():
    """Two pictures, each in two sizes, three tables, nothing that is loaded; a name that looks like markup is text."""
    hostile = "<script>alert(1)</script>"
    runs = [trained(name, seed, row) for name in ("grpo", hostile) for seed, row in enumerate(WORSE)]
    written = page(summarize(SETTING, runs))
    elements = Elements()
    elements.feed(written)

    assert written.count('class="chart"') == 4
    assert elements.tags.count("table") == 3
    assert "script" not in elements.tags
    assert elements.loaded == []
    assert "&lt;script&gt;" in written


def test_the_row_is_json_with_every_number():
    """Strict JSON, with what a program asks first."""
    row = json.loads(json.dumps(compared({"grpo": WORSE, "p3o": BETTER}).as_row(), allow_nan=False))

    assert row["format"] == "gnomon-comparison/1"
    assert row["pairings"][0]["is_noise"] is False
    assert row["standings"][1]["score"] == pytest.approx(53 / 60)
    assert row["orders"][0]["verdict"] == "same"


def test_a_pair_reads_the_same_from_both_sides():
    """Whichever stands first in the table, the better one comes first in the words, with a positive gain."""
    one, other = compared({"grpo": WORSE, "p3o": BETTER}), compared({"p3o": BETTER, "grpo": WORSE})

    assert pair_in_words(one.pairings[0], 1) == pair_in_words(other.pairings[0], 1)
