"""`gnomon config`, `gnomon rewards`, `gnomon tasks` and `gnomon algorithms`: what exists, by name."""

import json

import pytest

from gnomon.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config", "learning_rate"], "learner.optimizer.learning_rate\n    float; default 1e-06"),
        (["config"], "cluster.transfer"),
        (["rewards"], "mathematics"),
        (["rewards", "code"], "rewards.N.case_seconds"),
        (["tasks"], "chain_sum"),
        (["tasks", "table"], "task.answer_column"),
        (["tasks", "gsm8k"], "openai/gsm8k"),
        (["algorithms", "gspo", "aggregate=SequenceSum"], "SequenceSum"),
        (["algorithms", "grpo", 'advantage={piece="Scaled",of="Returns",factor=3}', "--latex"], r"A_t &= 3"),
        (["tasks", "chain_sum"], "parameters.max_terms = 6"),
    ],
)
def test_what_exists_is_printed(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    """Each verb lists everything, and describes one thing by its name."""
    assert main(arguments) == 0
    assert said in capsys.readouterr().out


def test_a_set_that_cannot_be_asked_says_why(capsys: pytest.CaptureFixture[str]):
    """CodeForces is scored by a rating, for which nobody has the cases or the standings."""
    assert main(["tasks", "CodeForces"]) == 2
    assert "a rating needs the standings of its contests" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["config", "steps"], ["rewards"], ["rewards", "exact"], ["tasks"], ["tasks", "gcd"]]
)
def test_json_is_one_value(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    """A program reads the same with --json."""
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["config", "learner.optimizer.learning_rat"], "learner.optimizer.learning_rate"),
        (["rewards", "numerical"], "numeric"),
        (["tasks", "gsm8"], "gsm8k"),
        (["tasks", "chainsum"], "chain_sum"),
    ],
)
def test_a_slip_is_answered_with_the_nearest_name(arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]):
    """Exit code 2, one line, and the name that was meant."""
    assert main(arguments) == 2
    said = capsys.readouterr().err

    assert f"did you mean '{near}'" in said
    assert said.count("\n") == 1
