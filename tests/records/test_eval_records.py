"""How prompts were answered: what is kept of a group, what it amounts to, and the file of it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.atomic_files import drop_step_files
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.records.eval_records import AnswerLog, EvalRecord, read_answered, write_answered

ROW = EvalRecord("p/1", "a1b2", (1.0, 0.0, 1.0, 1.0), ("7", "8", "7", "7"), (3, 4, 5, 4), truncated=1)


def rollout(grade: Grade, tokens: int, is_truncated: bool = False) -> Rollout:
    logprobs = (-0.5,) * tokens
    stop = "length" if is_truncated else "stop"
    return Rollout("p/1", (1,), (2,) * tokens, (True,) * tokens, logprobs, logprobs, "7", grade, 0, 0, stop)


def test_a_group_is_kept_as_scores_answers_and_lengths():
    """Of three samples one could not be graded: it has a length, no score and no answer."""
    grades = [Grade(1.0, {"answer": 1.0}, answer="7"), Grade(None, error="slow"), Grade(0.0, {"answer": 0.0})]
    group = Group(
        Task("p/1", (1,), "3 + 4 ="),
        tuple(rollout(grade, n + 1, is_truncated=n == 2) for n, grade in enumerate(grades)),
    )
    row = EvalRecord.of(group, "answer")

    assert (row.prompt_id, row.scores, row.answers, row.lengths) == ("p/1", (1.0, 0.0), ("7", None), (1, 2, 3))
    assert (row.samples, row.right, row.truncated, row.errors) == (3, 1, 1, 1)
    assert row.question == EvalRecord.of(Group(Task("other", (), "3 + 4 ="), group.rollouts), "answer").question


@pytest.mark.parametrize(
    ("name", "value"),
    [("avg", 3 / 4), ("pass@1", 3 / 4), ("pass@2", 1.0), ("maj@2", 3 / 4), ("maj@4", 1.0), ("pass@5", None),
     ("tokens", 4.0), ("truncated", 1 / 4)],
)  # fmt: skip
def test_what_four_samples_amount_to(name: str, value: float | None):
    """Three of four are right, all with one answer: each pair has a right one, and every second pair ties."""
    assert ROW.measure(name) == (value if value is None else pytest.approx(value))


def test_what_has_no_meaning_is_none():
    """Without a graded sample there is no mean; scores between 0 and 1 have no pass@k."""
    assert EvalRecord("p", "q", (), (), (3,), errors=1).measure("avg") is None
    assert EvalRecord("p", "q", (0.5, 1.0), ("a", "b"), (1, 1)).measure("pass@1") is None


@pytest.mark.parametrize("name", ["accuracy", "pass@", "pass@x", "maj@-1"])
def test_an_unknown_measure_is_refused(name: str):
    """The message says which there are."""
    with pytest.raises(ConfigError, match=r"avg, pass@K, maj@K, tokens or truncated"):
        ROW.measure(name)


texts = st.none() | st.text(st.characters(codec="utf-8"), max_size=8)
rows = st.builds(
    lambda name, pairs, lengths, truncated: EvalRecord(
        name, "q", tuple(s for s, _ in pairs), tuple(a for _, a in pairs), (3,) * len(pairs) + lengths, truncated,
        len(lengths),
    ),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.lists(st.tuples(st.floats(-2, 2), texts), max_size=4),
    st.lists(st.integers(0, 99), max_size=2).map(tuple),
    st.integers(0, 4),
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=4))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, written: list[EvalRecord]):
    """Every row comes back equal, whatever text its names and answers hold."""
    path = tmp_path_factory.mktemp("answers") / "rows.jsonl"
    write_answered(path, written)

    assert list(read_answered(path)) == written


@pytest.mark.parametrize(
    "damage",
    [{"scores": [1.0]}, {"scores": ["1", 0, 1, 1]}, {"lengths": [1]}, {"truncated": -1}, {"prompt_id": 3}, {"more": 1},
     {"answers": [1, 2, 3, 4]}, {"scores": None}],
)  # fmt: skip
def test_damaged_lines_are_passed_over(tmp_path: Path, damage: dict[str, object]):
    """A line that is torn or has another form is left out; the sound one beside it is read."""
    path = tmp_path / "rows.jsonl"
    write_answered(path, [ROW])
    sound = path.read_text()
    path.write_text(json.dumps({**json.loads(sound), **damage}) + "\n" + sound + sound[:30])

    said: list[str] = []
    assert read_answered(path, said.append) == (ROW,)
    assert said == [f"{path}: 2 of 3 lines are damaged and left out"]


def test_a_file_without_answers_is_refused(tmp_path: Path):
    """None there, none in it, or no text: each is said as what it is, with where such files come from."""
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DatasetError, match=r"there is no file .*; a run writes them to evaluations/step-N\.jsonl"):
        read_answered(path)
    path.write_text("{}\n")
    with pytest.raises(
        DatasetError, match=r"holds no answered prompts; a run writes them to evaluations/step-N\.jsonl"
    ):
        read_answered(path)
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(DatasetError, match=r"is no text in UTF-8"):
        read_answered(path)


def test_the_best_of_none_is_refused():
    """pass@0 is no number of samples too few, but no measure."""
    with pytest.raises(ConfigError, match="k must be at least 1, got 'pass@0'"):
        ROW.measure("pass@0")


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path):
    """A file stands where the folder should be: warned of once, counted twice."""
    (tmp_path / "evaluations").write_text("")
    said: list[str] = []
    log = AnswerLog(tmp_path / "evaluations", said.append)
    log.write(1, [ROW])
    log.write(2, [ROW])

    assert log.lost == 2
    assert len(said) == 1
    assert "goes on without its answers" in said[0]


def test_later_evaluations_are_dropped(tmp_path: Path):
    """A run that resumes at step 4 makes the evaluation of step 8 again."""
    log = AnswerLog(tmp_path)
    for step in (0, 4, 8):
        log.write(step, [ROW])
    drop_step_files(tmp_path, "jsonl", 4)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000.jsonl", "step-000004.jsonl"]
