"""The few numbers at the head of a report: each held-out set, and how much of the answers is thought."""

from dataclasses import replace

from gnomon.insight.report.run import figures
from gnomon.training.evaluate import EvalScore, Evaluation

ONE = Evaluation(4, "gsm8k", 2, 1, {"answer": EvalScore(0.5, 0.1, 0.9)}, {}, {}, 1.0, 0.0, 0, 0.0)


def test_each_set_has_a_figure():
    """Beside the macro average, with its own interval; an evaluation of one set has one figure."""
    other = replace(ONE, task="aime-24", scores={"answer": EvalScore(0.25, 0.0, 0.5)})
    both = replace(ONE, task="gsm8k+aime-24", scores={"answer": EvalScore(0.375, 0.2, 0.6)}, parts=(ONE, other))
    found = {figure.label: figure.value for figure in figures([], [both])}

    assert found == {"held out after step 4": "0.375", "gsm8k after step 4": "0.500", "aime-24 after step 4": "0.250"}
    assert len(figures([], [ONE])) == 1


def test_thoughts_have_a_figure_where_there_are_any():
    """Their share of the answers, and how many have no end."""
    row = {"step": 1, "rollout/thought_fraction": 0.625, "rollout/unfinished_thought_fraction": 0.5}

    assert [f.value for f in figures([row], []) if f.label == "in thoughts"] == ["62% of the text"]
    assert figures([{"step": 1}], []) == []
