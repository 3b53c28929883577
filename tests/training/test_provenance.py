"""What is not as it was when a run began is found and said, leaf by leaf."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from transformers import MambaConfig, MambaForCausalLM

from gnomon.config.experiment import load, to_toml
from gnomon.core.errors import RunDirectoryError
from gnomon.models.tiny import save_tiny
from gnomon.records.run_card import Card, run_card, write_card
from gnomon.training.api import train_experiment
from gnomon.training.continuation import (
    changed_code,
    changes,
    differences,
    latest_session,
    listed,
    other_experiment,
    sources_of,
)
from gnomon.training.python_api import evaluate

_FEW = ("task.size=8", "held_out.size=2", "sampling.max_completion_length=4", "evaluation.before=false")
REWARD = "rewards=[{{kind='function', function='{}:pay'}}]"


def card(**other: object) -> Card:
    """Return a card of two threads on a processor of that name."""
    made = run_card("cpu", 2, {"run": 0}, "fp32")
    made = replace(made, cpu="A", versions={"torch": "2.0", "gnomon": "1"}, code={}, source="c" * 64)
    return replace(made, **other)  # type: ignore[arg-type]


def test_differences_name_every_leaf():
    """Nested keys by their path, what is on one side alone as nothing on the other; equal tables have none."""
    there, asked = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": "x"}

    assert differences(there, there) == []
    assert differences(there, asked) == [
        "a.c is 2 there and 5 here",
        "d is 3 there and nothing here",
        "e is nothing there and 'x' here",
    ]
    assert listed([str(n) for n in range(9)]) == "0; 1; 2; 3; 4; and 4 more"


def test_versions_machine_and_source_that_changed_are_one_line(tmp_path: Path):
    """Each with what it was and is; of the newest session alone; a package that came or went changes nothing."""
    path = tmp_path / "run.json"
    assert changes(latest_session(tmp_path), card()) == []
    write_card(path, card(versions={"torch": "1.0"}))
    write_card(path, card(code={"gnomon": {"commit": "a" * 40, "dirty": False}}))
    before = latest_session(tmp_path)

    assert changes(before, card(code={"gnomon": {"commit": "a" * 40, "dirty": True}})) == []
    assert changes(before, card(versions={"gnomon": "1", "ray": "3"})) == []
    assert changes(before, card(source="d" * 64)) == [
        "since the last session gnomon's source went from cccccccccccc to dddddddddddd: numbers can come out otherwise "
        "than without"
    ]
    now = card(versions={"torch": "2.1", "gnomon": "1"}, threads=1, code={"gnomon": {"commit": "b" * 40}})
    assert changes(before, now) == [
        "since the last session torch went from 2.0 to 2.1, the number of threads went from 2 to 1, gnomon's source "
        "went from aaaaaaaaaaaa to bbbbbbbbbbbb: numbers can come out otherwise than without"
    ]


@pytest.mark.parametrize("said", ["[]", "{}", '{"versions": 3, "code": []}', '{"resumed": [3]}', "{"])
def test_a_damaged_card_says_nothing_of_what_changed(tmp_path: Path, said: str):
    """Whatever stands in it, a run goes on."""
    (tmp_path / "run.json").write_text(said)

    assert changes(latest_session(tmp_path), card()) == []
    assert changed_code(latest_session(tmp_path), {"a.py": "1"}) == []


def test_a_file_of_the_user_s_that_changed_is_named(tmp_path: Path):
    """By the SHA-256 that the session before wrote down; what it did not run says nothing."""
    reward = tmp_path / "mine.py"
    reward.write_text("def pay(completion, **columns):\n    return 1.0\n")
    experiment = load(RANDOM, [REWARD.format(reward)]).experiment
    before = {"sources": sources_of(experiment)}

    assert changed_code(before, sources_of(experiment)) == []
    reward.write_text("def pay(completion, **columns):\n    return 0.5\n")
    assert changed_code(before, sources_of(experiment))[0].startswith(f"{reward} has changed since this run last used")
    assert changed_code({}, sources_of(experiment)) == []


def test_a_directory_with_a_run_of_another_experiment_says_what_differs(tmp_path: Path):
    """A corrected experiment is not trained under the old one's name: refused, with each setting as it is on both
    sides.
    """
    run = tmp_path / "run"
    run.mkdir()
    (run / "experiment.toml").write_text(to_toml(load(RANDOM, ["steps=4"]).experiment))

    said = (
        rf"{run} holds a run already of another experiment \(.*steps is 4 there and 5 here; task\.terms is 2 there and "
        rf"3 here\), and nothing is overwritten; go on with it: gnomon resume {run}; or start another with --run-dir"
    )
    with pytest.raises(RunDirectoryError, match=said):
        train_experiment(load(RANDOM, ["steps=5", "task.terms=3"]), run)


@pytest.mark.parametrize("text", ["", "steps = [", "\xff"])
def test_an_experiment_that_cannot_be_read_differs_in_nothing_that_is_known(tmp_path: Path, text: str):
    """Neither an empty file nor one that is no TOML is compared."""
    (tmp_path / "experiment.toml").write_text(text, encoding="latin-1")

    assert other_experiment(tmp_path, to_toml(load(RANDOM).experiment)) == ""
    assert other_experiment(tmp_path / "nowhere", to_toml(load(RANDOM).experiment)) == ""


@pytest.mark.slow
def test_a_slower_way_that_a_trial_finds_is_in_card_and_evaluation(tmp_path: Path):
    """A model without attention is drawn in waves: the engine's trial says so once weights are there."""
    config = MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1, state_size=4, eos_token_id=257)
    base = save_tiny(tmp_path / "base", seed=0)
    for file in (base / "config.json", base / "model.safetensors"):
        file.unlink()
    MambaForCausalLM(config).save_pretrained(base)
    loaded = load(RANDOM, [f"model={base}", "steps=1", "rollouts_per_step=4", "algorithm.num_generations=2", *_FEW])
    with pytest.warns(RuntimeWarning, match="in waves|one length"):
        run = train_experiment(loaded, tmp_path / "run").directory
    found = [said for said in latest_session(run)["slow"] if said.startswith("no cache that rows can join")]
    assert len(found) == 1
    with pytest.warns(RuntimeWarning, match="in waves|one length"):
        measured = evaluate(run)
    assert measured.slow[-1:] == tuple(found)
