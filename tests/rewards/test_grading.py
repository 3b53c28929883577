import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.rewards.base import Sample, VerifierError, real
from gnomon.rewards.exact import Boxed, Exact, Format, LengthPenalty, Numeric, Parsable
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import Grading, WeightedReward, from_json, to_json
from gnomon.rewards.math import Mathematics
from gnomon.rewards.reasoning import Reasoning

numbers = itertools.count()


def returning(tmp_path: Any, body: str, parameters: str = "completion, **columns") -> UserFunction:
    """A user's function with this body, in a file of its own (functions are imported once)."""
    path = tmp_path / f"graded_{next(numbers)}.py"
    path.write_text(f"def score({parameters}):\n    {body}\n")
    return UserFunction(f"{path}:score")


def test_the_reward_is_the_weighted_sum():
    """1 * 1 + 0.5 * 1 - 2 * 0 = 1.5; every part is kept before weighting."""
    grading = Grading(
        (
            WeightedReward(Numeric()),
            WeightedReward(Parsable(), weight=0.5),
            WeightedReward(Exact(), weight=-2.0, name="bare"),
        )
    )

    verdict = grading(Sample("", "It is 4.", columns={"answer": "4"}))

    assert verdict.reward == pytest.approx(1.5)
    assert verdict.parts == {"numeric": 1.0, "parsable": 1.0, "bare": 0.0}


@pytest.mark.parametrize("read", ['os.environ["GNOMON_NO_SUCH_KEY"]', 'os.environ[str(completion) * 0 + "GNOMON_X"]'])
def test_a_variable_that_a_reward_may_not_see_is_said(tmp_path: Any, read: str):
    """Graders have few of a run's variables, and a KeyError alone does not say which setting gives more."""
    reads = WeightedReward(returning(tmp_path, f"import os; return len({read})"))
    other = WeightedReward(returning(tmp_path, 'return {}["GNOMON_X"]'))

    assert "that grading.environment names" in str(Grading((reads,))(Sample("", "4")).error)
    assert "grading.environment" not in str(Grading((other,))(Sample("", "4")).error)


def test_the_overlong_penalty_is_added_to_the_sum():
    """A right answer in the middle of the buffer gets 1 - 0.5."""
    grading = Grading((WeightedReward(Numeric()),), LengthPenalty(buffer=4))

    verdict = grading(Sample("", "4", completion_tokens=8, max_completion_length=10, columns={"answer": "4"}))

    assert verdict.reward == pytest.approx(0.5)
    assert verdict.parts == {"numeric": 1.0, "overlong": -0.5}


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return None", "score: returned None"),
        ("return float('nan')", "score: returned nan"),
        ("return float('inf')", "score: returned inf"),
        ("return 10**400", "score: returned inf"),
        ("return '1.0'", r"score: returned '1.0' \(str\)"),
        ("return b'1'", r"score: returned b'1' \(bytes\)"),
        ("return [1.0]", r"score: returned \[1.0\] \(list\)"),
        ("return object()", r"score: returned <object .*\(object\)"),
        ("raise ValueError('bad\\nvalue')", r"score: ValueError: bad value \(graded_\d+.py:2 in score\)"),
        ("import sys; sys.exit(1)", r"score: SystemExit: 1"),
        ("return score(completion)", "score: RecursionError"),
        ("assert False", r"score: AssertionError \(graded"),
    ],
)
def test_what_is_no_reward_is_an_error_of_one_line(tmp_path: Any, body: str, cause: str):
    """It names the part and says what came instead of a number; it is never a zero."""
    grading = Grading((WeightedReward(Parsable()), WeightedReward(returning(tmp_path, body))))

    verdict = grading(Sample("", "1"))

    assert verdict.reward is None
    assert verdict.error is not None
    assert "\n" not in verdict.error
    with pytest.raises(VerifierError, match=cause):
        raise VerifierError(verdict.error)


def test_none_in_a_list_leaves_its_part_out(tmp_path: Any):
    """TRL's None means "not applicable": the other part counts alone; with no other part it is an error."""
    absent = WeightedReward(returning(tmp_path, "return [None]", "completions, **columns"))

    beside = Grading((WeightedReward(Parsable()), absent))(Sample("", "1"))
    alone = Grading((absent,))(Sample("", "1"))

    assert (beside.reward, beside.parts) == (1.0, {"parsable": 1.0})
    assert alone.error == "no reward applies to this sample"


@given(
    st.one_of(
        st.floats(), st.integers(), st.none(), st.booleans(), st.text(), st.lists(st.floats()), st.complex_numbers()
    )
)
def test_only_finite_numbers_pass(value: Any):
    """Over all types: a finite float comes out that float32 holds, True as 1 and False as 0, or a VerifierError."""
    is_number = isinstance(value, int | float)
    if is_number and math.isfinite(float(value)) and abs(value) <= 3.4028234663852886e38:
        assert real(value) == float(value)
        return
    with pytest.raises(VerifierError, match="returned"):
        real(value)


ALL = Grading(
    (
        WeightedReward(Exact(casefold=True), name="same"),
        WeightedReward(Numeric(which="only", tolerance=0.5), weight=2.0),
        WeightedReward(Boxed()),
        WeightedReward(Format(r"<a>\d+</a>", match="partial")),
        WeightedReward(Parsable("tags"), weight=0.0),
        WeightedReward(Reasoning(extract="last_line")),
        WeightedReward(Mathematics()),
        WeightedReward(UserFunction("rewards.py:score", messages=True)),
    ),
    LengthPenalty(100, 0.5),
)


def test_a_grading_survives_json():
    """Every kind of verifier with its settings comes back equal."""
    assert from_json(to_json(ALL)) == ALL


def test_a_misspelt_kind_is_refused_with_the_nearest():
    """As it would stand in an experiment's file."""
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        from_json('{"rewards": [{"verifier": {"kind": "numerik"}}]}')


def test_rewards_need_names_of_their_own():
    """Two of one name, none at all, or the penalty's name are refused."""
    with pytest.raises(ConfigError, match="name of its own, not exact"):
        Grading((WeightedReward(Exact()), WeightedReward(Exact(casefold=True))))
    with pytest.raises(ConfigError, match="name of its own, not overlong"):
        Grading((WeightedReward(Exact(), name="overlong"),))
    with pytest.raises(ConfigError, match="at least one reward"):
        Grading(())
    with pytest.raises(ConfigError, match="must be finite, got nan"):
        WeightedReward(Exact(), weight=float("nan"))
