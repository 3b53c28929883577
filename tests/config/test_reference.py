"""The reference of the configuration: every setting, with a meaning, and a page that is up to date."""

from dataclasses import fields
from pathlib import Path

import pytest

from gnomon.config.experiment import load, to_toml
from gnomon.config.foreign_names import ALIASES
from gnomon.config.reference import as_markdown, describe_kind, kinds, list_kinds, named, of_kind, settings
from gnomon.core.errors import ConfigError
from gnomon.core.tables import parse_toml

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_setting_has_a_meaning_and_a_type():
    """A setting without a line in its class's docstring is named here."""
    lacking = [setting.key for setting in settings() if not setting.meaning or not setting.type]

    assert lacking == []


@pytest.mark.parametrize("experiment", ["tiny", "quickstart"])
def test_every_key_of_a_resolved_experiment_is_in_the_reference(experiment: str):
    """The reference is walked over the same classes that an experiment is built from, and misses none of its keys."""
    table = parse_toml(to_toml(load(experiment).experiment))
    known = {setting.key for setting in settings()}
    pieces = ("algorithm.", "rewards", "task.parameters.")
    missing = [key for key in _keys(table) if key not in known and not key.startswith(pieces)]

    assert missing == []


def test_the_page_is_what_the_command_prints():
    """docs/configuration.md is up to date: `gnomon config --markdown > docs/configuration.md` writes it."""
    assert PAGE.read_text() == as_markdown()


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_another_librarys_name_finds_the_setting(alias: str):
    """What is understood at the top of an experiment is found by that name, too."""
    assert named(alias)[0].key == ALIASES[alias]


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("temperature", "sampling.temperature"),
        ("--learning-rate", "learner.optimizer.learning_rate"),
        ("learner.optimizer", "learner.optimizer"),
        ("rewards.0.weight", "rewards.N.weight"),
        ("group_size", "algorithm.num_generations"),
        ("warmup_steps", "learner.optimizer.warmup_steps"),
        ("algorithm.critic.pretraining.patience", "algorithm.critic.pretraining.patience"),
    ],
)
def test_a_setting_is_found_by_path_by_name_and_as_typed(key: str, first: str):
    """A path, its last name, a number in a list, and the form of a command line option name one setting."""
    assert named(key)[0].key == first


def test_a_part_of_an_algorithm_lists_its_settings_where_one_class_fits():
    """`gnomon config algorithm.reference` has the reference's fields; of a surrogate, the pieces are named alone."""
    algorithm = load("tiny", ["algorithm=vapo"]).experiment.algorithm
    for part in ("ratio", "updates", "reference", "critic"):
        found = [setting.key for setting in named(f"algorithm.{part}")]
        assert found[0] == f"algorithm.{part}"
        assert {f"algorithm.{part}.{f.name}" for f in fields(getattr(algorithm, part))} <= {*found}

    assert len(named("algorithm.surrogate")) == 1
    assert not [s.key for s in settings() if s.key.startswith("algorithm.") and s.key.endswith(".kind")]


def test_an_unknown_setting_has_the_nearest_name_and_no_list_of_all():
    """A slip is answered with the right name; 190 others are counted, not listed."""
    with pytest.raises(ConfigError, match=r"did you mean 'sampling\.temperature'") as error:
        named("sampling.temprature")

    assert len(str(error.value)) < 300


@pytest.mark.parametrize("path", ["task", "rewards"])
def test_every_kind_is_listed_and_described(path: str):
    """The list has a line for each kind, and its description has every setting of it."""
    listed = list_kinds(path)
    for kind in kinds(path):
        text = describe_kind(path, kind)

        assert f"{kind} " in listed
        assert all(setting.key in text for setting in of_kind(path, kind))


def _keys(table: object, path: str = "") -> list[str]:
    if not isinstance(table, dict):
        return [path]
    return [key for name, below in table.items() for key in _keys(below, f"{path}.{name}" if path else name)]
