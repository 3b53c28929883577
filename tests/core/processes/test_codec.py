from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.processes import codec
from gnomon.rewards import grading_worker
from gnomon.rewards.base import Sample, Verdict

keys = st.text() | st.integers() | st.none() | st.booleans() | st.sampled_from(["()", "{}"])
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types: a list is no tuple and 1 is not True."""
    return repr(a) == repr(b)


@given(values)
def test_columns_come_back_as_they_went(value: Any):
    """Tuples stay tuples, keys that are no text stay what they are, and no value can pass for a mark."""
    sample = Sample("p", "c", columns={"value": value})

    line = codec.encode({"sample": grading_worker.from_sample(sample)})

    assert line.count(b"\n") == 1
    assert same(grading_worker.to_sample(codec.decode(line)["sample"]).columns["value"], value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rewards_keep_every_bit(reward: float):
    """A reward is the same float on both sides."""
    verdict = Verdict(reward, {"score": reward})

    assert grading_worker.to_verdict(codec.decode(codec.encode(grading_worker.from_verdict(verdict)))) == verdict


def test_what_is_no_json_value_is_refused():
    """An object of a class has no form on the wire."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        codec.encode({"value": object()})


def test_half_a_message_is_no_message():
    """A torn line or another JSON value is refused."""
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        codec.decode(b'{"id')
    with pytest.raises(ValueError, match="expected a message"):
        codec.decode(b"3\n")
