"""Where an answer stands: after a thought, on its line, in the last box; what is not there earns nothing."""

from dataclasses import replace
from typing import Any

import pytest

from gnomon.config.experiment import from_table
from gnomon.core.errors import ConfigError
from gnomon.core.types import Grade, Rollout
from gnomon.rewards.answers import answer_in
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Boxed, Exact, Format, Numeric, Parsable
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import Grading, WeightedReward, from_json, to_json
from gnomon.rewards.math import Mathematics
from gnomon.rollouts.metrics import measure_thoughts

THOUGHT = r"<think>maybe \boxed{7}</think> Answer: 34"
TEXTS = {
    THOUGHT: (" Answer: 34", "34", None),
    r"<think>it is \boxed{34}. Answer: 34": (None, None, None),
    r"so \boxed{7}</think>It is \boxed{34}.": (r"It is \boxed{34}.", None, "34"),
    "<think>a</think><think>Answer: 7": (None, None, None),
    "**Final answer:** $34$": ("**Final answer:** $34$", "$34$", None),
    "Answer: 7\nNo.\n### The answer is: **34**": ("Answer: 7\nNo.\n### The answer is: **34**", "34", None),
    "[THINK]7[/THINK]\\fbox{34}": ("\\fbox{34}", None, "34"),
    "The question has an answer: 34": ("The question has an answer: 34", None, None),
    "": ("", None, None),
}


@pytest.mark.parametrize("text", TEXTS)
def test_each_part_of_a_text(text: str) -> None:
    """After the thought, on the last line of an answer, in the last box; None where there is no such part."""
    assert (
        answer_in(text, "after_thinking"), answer_in(text, "answer_line"), answer_in(text, "last_box")
    ) == TEXTS[text]  # fmt: skip
    assert answer_in(text, "anywhere") == text


@pytest.mark.parametrize("verifier", [Numeric(), Boxed(), Mathematics(), Exact()], ids=lambda v: v.kind)
def test_every_verifier_sees_the_part_alone(verifier: Any) -> None:
    """34 on its line and in the last box earns 1, 7 in a thought nothing, and votes are of the part too."""
    for within, right in (("answer_line", THOUGHT), ("last_box", r"<think>7</think>\boxed{34}")):
        grading = Grading((WeightedReward(verifier, within=within),))
        cut = right.partition("</think>")[0]
        found = [grading(Sample("?", text, columns={"answer": "34"})) for text in (right, cut + " Answer: 34", "34")]

        assert [v.reward for v in found] == [1.0, 0.0, 0.0]
        assert [v.answer for v in found] == ["34", None, None]
        assert from_json(to_json(grading)) == grading


@pytest.mark.parametrize("within", ["answer_line", "last_box"])
def test_a_box_is_an_answer_where_its_content_is_judged(within: Any) -> None:
    """The content of a box has no box around it; a reward that looks for one would find none in any answer."""
    grading = Grading((WeightedReward(Parsable(extract="boxed"), within=within),))
    text = THOUGHT if within == "answer_line" else r"<think>7</think>\boxed{34}"

    verdict = grading(Sample("?", text))

    assert (verdict.reward, verdict.answer) == (1.0, "34")
    assert grading(Sample("?", "<think>7</think> 34")).reward == 0.0


@pytest.mark.parametrize("verifier", [Numeric(), Boxed(), Mathematics(), Exact(), Parsable()], ids=lambda v: v.kind)
def test_what_was_cut_off_earns_nothing_where_an_end_is_asked_for(verifier: Any) -> None:
    """With must_end no kind of reward pays an answer that the budget ended, and it has no vote; otherwise both."""
    text = "34" if isinstance(verifier, Exact | Parsable) else r"so \boxed{34}"
    sample = Sample("?", text, is_truncated=True, columns={"answer": "34"})
    ended, cut = (Grading((WeightedReward(verifier, must_end=end),))(sample) for end in (False, True))

    assert ended.reward == float(not isinstance(verifier, Parsable))
    assert ended.answer == "34"
    assert (cut.reward, cut.answer) == (0.0, None)
    assert Grading((WeightedReward(verifier, must_end=True),))(replace(sample, is_truncated=False)).reward == 1.0


def test_a_function_is_not_asked_about_a_thought_that_was_cut_off(tmp_path: Any) -> None:
    """A reward that pays everything would pay an empty text too; it earns 0 and is not called."""
    path = tmp_path / "mine.py"
    path.write_text("def pays(completion, answer):\n    return 1.0\n")
    function = UserFunction(f"{path}:pays")
    grading = Grading((WeightedReward(function, within="after_thinking"),))

    assert grading(Sample("?", "<think>34", columns={"answer": "34"})).reward == 0.0
    assert grading(Sample("?", "<think>34</think>", columns={"answer": "34"})).reward == 1.0


def test_in_toml_it_is_called_extract() -> None:
    """Of the kinds that have an ``extract`` of their own that one is meant; another word names those that there are."""
    table = {"model": "tiny", "task": "arithmetic", "algorithm": "grpo"}
    rewards = [
        {"kind": "numeric", "extract": "answer_line", "must_end": True}, {"kind": "parsable", "extract": "boxed"}
    ]  # fmt: skip
    made = from_table({**table, "rewards": rewards}).experiment.rewards

    assert [reward.within for reward in made] == ["answer_line", "anywhere"]
    assert [reward.must_end for reward in made] == [True, False]
    assert made[1].verifier.extract == "boxed"
    with pytest.raises(ConfigError, match="answer_line"):
        from_table({**table, "rewards": [{"kind": "numeric", "extract": "somewhere"}]})


ALL = ["after_thinking", "answer_line", "last_box"]
TAGS = r"(?s)^<think>.*</think>\s*<answer>.*</answer>$"


@pytest.mark.parametrize(
    ("table", "withins"),
    [
        ({"kind": "code"}, ["answer_line", "last_box"]),
        ({"kind": "instructions"}, ["answer_line", "last_box"]),
        ({"kind": "environment"}, ALL),
        ({"kind": "parsable", "extract": "tags"}, ["last_box"]),
        ({"kind": "reasoning"}, ["last_box"]),
        ({"kind": "format", "pattern": TAGS}, ALL),
        (
            {"kind": "format", "pattern": r"^<think>[\s\S]*?</think>[\s\S]+$"},
            ["after_thinking", "answer_line", "last_box"],
        ),
        ({"kind": "format", "pattern": r"\[THINK\].*\[/THINK\].+"}, ["after_thinking", "answer_line", "last_box"]),
        ({"kind": "format", "pattern": r"\\boxed\{.*\}", "match": "partial"}, ["last_box"]),
        ({"kind": "format", "pattern": r"<answer>\d+</answer>"}, ["last_box"]),
    ],
    ids=str,
)
def test_a_part_that_can_earn_nothing_is_refused(table: dict[str, Any], withins: list[str]) -> None:
    """No program stands in a box and no thought behind the thought; each kind's other parts are taken."""
    for within in ("anywhere", "after_thinking", "answer_line", "last_box"):
        whole = {"model": "tiny", "task": "arithmetic", "algorithm": "grpo", "rewards": [{**table, "within": within}]}
        if within in withins:
            with pytest.raises(ConfigError, match=rf"reward '{table['kind']}'.*{within}.*(write extract|leave )"):
                from_table(whole)
        else:
            assert from_table(whole).experiment.rewards[0].within == within


@pytest.mark.parametrize(
    "pattern",
    [
        r"(<think>.*</think>)?.*34",
        r"(?!.*<think>).*",
        r"<think>.*|\d+",
        r"[^<think>]+",
        r"(?:\[THINK\].*){0,1}34",
        r"\d+",
    ],
)
def test_a_pattern_that_may_do_without_a_thought_is_taken(pattern: str) -> None:
    """What is optional, forbidden, another way, or a set of characters is no part that must be there."""
    reward = WeightedReward(Format(pattern, match="partial"), within="after_thinking")

    assert reward.judge(Sample("?", "<think>7</think>34")) == 1.0


def test_thoughts_are_counted_apart() -> None:
    """Of 40 characters 25 are thought, and one of two thoughts has no end; without thoughts there is no metric."""

    def said(text: str) -> Rollout:
        return Rollout("a", (1,), (2,), (True,), (0.0,), (0.0,), text, Grade(0.0), 0, 0, "stop")

    found = measure_thoughts([said("<think>7</think>" + "x" * 15), said("<think>it")])
    values = {name: found[name] for name in found}

    assert values == {"rollout/thought_fraction": 25 / 40, "rollout/unfinished_thought_fraction": 0.5}
    assert set(measure_thoughts([said("8"), said("")])) == set()
