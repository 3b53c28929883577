from typing import Any

import pytest

from gnomon.core.processes import codec
from gnomon.rewards import grading_worker
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.reasoning import Reasoning

reasoning_gym = pytest.importorskip("reasoning_gym")

QUICK = ["chain_sum", "basic_arithmetic", "leg_counting", "gsm_symbolic", "prime_factorization", "rearc", "mini_sudoku",
         "word_sorting", "simple_equations", "maze"]  # fmt: skip
# Without a stored answer that scores 1: three store none, and two store one that their own scorer does not accept.
NO_ORACLE = {"composite", "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def item(generator: str, index: int = 0) -> dict[str, Any]:
    entry: dict[str, Any] = reasoning_gym.create_dataset(generator, seed=7, size=index + 1)[index]
    return entry


def sent(entry: dict[str, Any], completion: str, **columns: Any) -> Sample:
    """The sample as it arrives in a grading process."""
    sample = Sample(entry["question"], completion, columns={"entry": entry, **columns})
    return grading_worker.to_sample(codec.decode(codec.encode(grading_worker.from_sample(sample))))


@pytest.mark.parametrize("generator", QUICK)
def test_the_stored_answer_scores_one_and_junk_does_not(generator: str):
    """After the journey to a grading process; rearc compares tuples, which JSON does not have."""
    entry = item(generator)

    assert Reasoning("whole")(sent(entry, entry["answer"])) == 1.0
    assert Reasoning("whole")(sent(entry, "banana")) <= 0.5
    assert Reasoning("whole")(sent(entry, "")) == 0.0


@pytest.mark.slow
# Some generators leave files of theirs open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_generator_scores_its_stored_answer():
    """98 of reasoning-gym 0.1.25's generators store an answer that its own scorer accepts."""
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - NO_ORACLE)
    entries = [item(name) for name in names]

    wrong = [n for n, e in zip(names, entries, strict=True) if Reasoning("whole")(sent(e, e["answer"])) != 1.0]

    assert wrong == []
    assert len(names) >= 98


def test_the_answer_is_taken_from_where_it_should_stand():
    """In its tags as reasoning-gym has it, or the last number; elsewhere it is not seen."""
    entry = item("chain_sum")
    answer = entry["answer"]

    assert Reasoning()(sent(entry, f"Adding up.\n<answer> {answer} </answer>")) == 1.0
    assert Reasoning()(sent(entry, f"Adding up gives {answer}")) == 0.0
    assert Reasoning("last_number")(sent(entry, f"1 + 2 gives {int(answer):,}.")) == 1.0
    assert Reasoning("last_number")(sent(entry, f"not {answer} but 0.5")) < 1.0


def test_an_answer_that_the_scorer_cannot_read_is_wrong():
    """prime_factorization raises on words; the stored answer shows that it is the answer's fault."""
    entry = item("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.get_score_answer_fn("prime_factorization")("two x three", entry)

    assert Reasoning("whole")(sent(entry, "two x three")) == 0.0


def test_a_scorer_that_cannot_read_its_own_answer_cannot_judge():
    """An item that lost its metadata is an error, not a wrong answer."""
    entry = item("prime_factorization")
    broken = {**entry, "answer": "lost", "metadata": {"source_dataset": "prime_factorization"}}

    with pytest.raises(VerifierError, match="the scorer raised"):
        Reasoning("whole")(sent(broken, "two"))


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (None, "no column 'entry'"),
        ("text", "no reasoning-gym item"),
        ({"answer": "1", "metadata": {"source_dataset": "chain_sun"}}, "no generator 'chain_sun'"),
    ],
)
def test_a_sample_that_is_no_item_cannot_be_judged(entry: Any, cause: str):
    """A table's row has no entry."""
    with pytest.raises(VerifierError, match=cause):
        Reasoning()(Sample("", "<answer>1</answer>", columns={"entry": entry}))


def test_settings_reach_the_scorers_that_look_at_them():
    """puzzle24 accepts numbers up to its max_value: a 6 by default (10), but not when it is 5."""
    entry = {"question": "", "answer": "6+6+6+6", "metadata": {"source_dataset": "puzzle24"}}
    verifier = Reasoning("whole")

    assert verifier(sent(entry, entry["answer"])) == 1.0
    assert verifier(sent(entry, entry["answer"], parameters={"max_value": 5})) < 1.0
