import json
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.tasks.isolated import generate_in_subprocess, json_safe
from gnomon.tasks.reasoning import ReasoningGym, ReasoningGymTask, generators

QUICK = (
    "chain_sum",
    "letter_counting",
    "leg_counting",
    "calendar_arithmetic",
    "knights_knaves",
    "gsm_symbolic",
)


@pytest.mark.parametrize("name", QUICK)
def test_entries_are_json_and_still_score_one(name: str) -> None:
    """The stored entry can be written as JSON, and the generator's scorer gives its own answer 1."""
    task = ReasoningGymTask(name, size=5).questions()
    score = reasoning_gym.get_score_answer_fn(name)

    for index in range(5):
        columns = task[index].columns
        assert json.loads(json.dumps(columns))["data_source"] == f"reasoning_gym/{name}"
        assert score(columns["answer"], columns["entry"]) == pytest.approx(1.0)


def test_an_entry_keeps_what_its_scorer_compares_with() -> None:
    """graph_color's scorer looks its puzzle up by integer keys, which survive."""
    entry = ReasoningGymTask("graph_color", size=1).questions()[0].columns["entry"]

    colors = entry["metadata"]["possible_answer"]
    assert {type(vertex) for vertex in colors} == {int}
    assert reasoning_gym.get_score_answer_fn("graph_color")(json.dumps(colors), entry) == 1.0


def test_a_generator_without_stored_answer_has_no_answer_column() -> None:
    """graph_color has many right answers and stores none."""
    assert "answer" not in ReasoningGymTask("graph_color", size=1).questions()[0].columns


def test_neighboring_seeds_share_no_question() -> None:
    """Reasoning-gym's own seeds 0 and 1 share all items but one; ours share none."""
    parameters: dict[str, Any] = {"min_digits": 4, "max_digits": 4}
    sets = [ReasoningGymTask("chain_sum", parameters=parameters, size=50, seed=s).questions() for s in (0, 1)]

    first, second = ({items[i].text for i in range(50)} for items in sets)
    assert not first & second


def test_the_suffix_is_asked_and_not_compared() -> None:
    """The content ends in the suffix; the text does not."""
    question = ReasoningGymTask("chain_sum", suffix=" Say only the number.", size=1).questions()[0]

    assert question.content == question.text + " Say only the number."


def test_ids_name_generator_seed_index_and_parameters() -> None:
    """NAME/SEED/INDEX and a hash that other parameters change."""
    plain = ReasoningGymTask("chain_sum", size=3, seed=7).questions()
    other = ReasoningGymTask("chain_sum", parameters={"max_terms": 3}, size=3, seed=7).questions()

    assert plain[2].id.startswith("chain_sum/7/2/")
    assert other[2].id.startswith("chain_sum/7/2/")
    assert plain[2].id != other[2].id
    assert other[2].columns["parameters"] == {"max_terms": 3}
    assert plain[2] is plain[2]


def test_hash_dependent_generators_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under two different string hashes of the training process word_ladder asks the same questions."""
    made = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        items = ReasoningGymTask("word_ladder", size=8).questions()
        made.append([items[i].text for i in range(8)])

    assert made[0] == made[1]


def test_items_made_apart_keep_tuples_and_numbers() -> None:
    """An item of rearc, whose scorer compares tuples, comes from the child as it would from this process."""
    (item,) = generate_in_subprocess("rearc", {}, seed=3, size=1)

    assert repr(item) == repr(json_safe(reasoning_gym.create_dataset("rearc", seed=3, size=1)[0]))
    assert isinstance(item["metadata"]["input"][0], tuple)


def test_what_a_snippet_writes_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This item's snippet writes a file, and the folder that the run was started in stays empty."""
    monkeypatch.chdir(tmp_path)

    generate_in_subprocess("codeio", {}, seed=1226, size=1)

    assert list(tmp_path.iterdir()) == []


def test_a_child_that_fails_is_reported_in_one_line() -> None:
    """A generator that refuses its parameters in the child names itself and the child's last line."""
    with pytest.raises(DatasetError, match=r"'word_ladder' failed with .*TypeError"):
        generate_in_subprocess("word_ladder", {"min_word_length": "x"}, seed=0, size=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"generator": "chain_sun"}, "unknown reasoning-gym generator 'chain_sun'; did you mean 'chain_sum'"),
        ({"generator": "composite"}, "mixture"),
        ({"generator": "chain_sum", "parameters": {"max_term": 3}}, "'max_term'; did you mean 'max_terms'"),
        ({"generator": "chain_sum", "parameters": {"seed": 3}}, "'seed' belongs beside parameters"),
        ({"generator": "chain_sum", "parameters": {"min_terms": 9}}, "refuses .* max_terms = 6"),
        ({"generator": "chain_sum", "parameters": {"min_terms": "2"}}, "refuses .* its defaults"),
        ({"generator": "word_ladder", "parameters": {"min_word_length": 9}}, "refuses"),
        ({"generator": "chain_sum", "size": 0}, "size must be at least 1"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_refused(settings: dict[str, Any], reason: str) -> None:
    """Unknown names say the nearest one; refused values say the defaults."""
    with pytest.raises(ConfigError, match=reason):
        ReasoningGymTask(**settings).questions()


def test_an_item_that_cannot_be_made_is_named() -> None:
    """A generator that raises while making an item gives its name, index, seed and parameters."""
    task = ReasoningGym(ReasoningGymTask("number_format", size=3), source=[])

    with pytest.raises(DatasetError, match=r"'number_format' could not make item 1 .*IndexError"):
        task[1]


def test_every_generator_but_composite_can_be_named() -> None:
    """The names are sorted, many, and without composite."""
    names = generators()

    assert len(names) > 100
    assert list(names) == sorted(names)
    assert "composite" not in names
