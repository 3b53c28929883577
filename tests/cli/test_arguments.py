"""Settings on a command line, as key=value and as options."""

import pytest

from gnomon.cli.arguments import SettingsParser
from gnomon.cli.main import main


def parser() -> SettingsParser:
    """A parser with one option of each kind."""
    made = SettingsParser("verb", None)
    made.add_argument("experiment")
    made.add_argument("overrides", nargs="*")
    made.add_argument("--run-dir")
    made.add_argument("--seeds", type=int)
    made.add_argument("--json", action="store_true")
    return made


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["tiny", "--steps", "10"], ["steps=10"]),
        (["tiny", "--steps=10", "seed=2"], ["steps=10", "seed=2"]),
        (["--learner.optimizer.learning_rate", "1e-5", "tiny"], ["learner.optimizer.learning_rate=1e-5"]),
        (["tiny", "--learning-rate", "1e-5", "--json"], ["learning-rate=1e-5"]),
        (["tiny", "--use_vllm", "--bf16", "seed=2"], ["use_vllm=true", "bf16=true", "seed=2"]),
        (["tiny", "--top_k", "-1", "--run-dir", "--odd"], ["top_k=-1"]),
        (["tiny", "--rewards", '["f.py:g"]', "--system", "a b"], ['rewards=["f.py:g"]', "system=a b"]),
    ],
)
def test_options_are_settings(arguments: list[str], overrides: list[str]):
    """In any order, with or without a value, and beside the verb's own options."""
    if "--odd" in arguments:  # the value of an option of the verb's own is its value, whatever it looks like
        arguments = [each.removeprefix("--odd") or "dir" for each in arguments]
    given = parser().parse_intermixed_args(arguments)

    assert (given.experiment, given.overrides) == ("tiny", overrides)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "--seed", "3"], "did you mean --seeds? A setting of that name is seed=VALUE"),
        (["tiny", "--rundir", "x"], "did you mean --run-dir?"),
        (["tiny", "--jsn"], "did you mean --json?"),
    ],
)
def test_what_is_nearly_an_option_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    """Neither an abbreviation nor a setting by accident; the message has both spellings."""
    with pytest.raises(SystemExit):
        parser().parse_intermixed_args(arguments)

    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "more"), [("plan", []), ("train", []), ("compare", ["--algorithms", "grpo,spo", "--budget", "100"])]
)
def test_verbs_take_settings_as_options(verb: str, more: list[str], capsys: pytest.CaptureFixture[str]):
    """What is wrong with a setting is said of the setting, however it was written."""
    assert main([verb, "tiny", *more, "--learner.optimizer.learning_rate", "-1.0"]) == 2
    assert "learning_rate must be > 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["save_stepz", "use_pefts", "list", "orchestrator"])
def test_a_hint_has_a_cutoff(name: str, capsys: pytest.CaptureFixture[str]):
    """No key and no verb is proposed for a word that only shares letters with it."""
    assert main([name]) == 2
    assert "did you mean" not in capsys.readouterr().err
    assert main(["plan", "tiny", f"{name}=1"]) == 2
    said = capsys.readouterr().err
    assert not any(f"'{wrong}'" in said for wrong in ("steps", "seed", "lora", "grading"))
