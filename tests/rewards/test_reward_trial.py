"""Reward functions as people write them for TRL and verl, tried on made answers before a model loads."""
# ruff: noqa: E501

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import RewardError
from gnomon.core.processes.client import Limits
from gnomon.rewards.base import Sample
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.reward_trial import made_answers, try_rewards

CHAT = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "6 * 7?"})
Grade = Callable[..., Grading]


@pytest.fixture
def by(tmp_path: Path) -> Grade:
    """Return a function that writes a reward to a file and returns the grading by it."""

    def written(source: str, **settings: Any) -> Grading:
        path = tmp_path / "mine.py"
        path.write_text(f"import asyncio\nimport numpy as np\n{source}\n")
        return Grading((WeightedReward(UserFunction(f"{path}:score", **settings)),))

    return written


def questions(is_chat: bool = False) -> list[list[Sample]]:
    """Return made answers to two questions."""
    return [made_answers("6 * 7?", {"answer": a, "level": 3}, CHAT if is_chat else ()) for a in ("42", "7")]


def samples(*texts: str, is_chat: bool = False) -> list[Sample]:
    """Return answers to one question."""
    columns = {"answer": "42"}
    return [
        Sample("6 * 7?", text, columns=columns, seed=n, messages=CHAT if is_chat else ())
        for n, text in enumerate(texts)
    ]


def graded(grading: Grading, answers: list[Sample]) -> list[Any]:
    """Return rewards, or errors, of all answers to a question."""

    async def run() -> list[Any]:
        async with GradingPool(grading, Limits(workers=1)) as pool:
            return [g.error or g.reward for g in await pool.grade_together(answers)]

    return asyncio.run(run())


WRONG = [
    ("def score(completions, **k): return [float('7' in c[0]['content']) for c in completions]", "set messages = true"),
    ("def score(completion): return float('7' in completion[-1]['content'])", "set messages = true"),
    ("def score(prompts, completions, **k): return [len(p[-1]['content']) for p in prompts]", "set messages = true"),
    ("def score(completions, **k):\n    try: return [float(len(c[0]['content'])) for c in completions]\n    except (TypeError, IndexError): return [0.0] * len(completions)", "given text.*tells no answer.*set messages = true"),
    ("def score(completions, **k): return 1.0", "returned float, expected a list of 3 numbers"),
    ("def score(completions, **k): return [1.0]", "returned 1 rewards for 3 completions"),
    ("def score(completions, **k): return [c for c in completions]", "returned '.*; a reward is a finite number"),
    ("def score(completions, **k): return [(1.0, 2.0) for c in completions]", "returned .*tuple.*finite number"),
    ("def score(completions, **k): return [{'score': 1.0} for c in completions]", "returned .*dict.*finite number"),
    ("def score(completions, gold, **k): return [0.0] * len(gold)", "needs gold, which is no column.*answer, level"),
    ("def score(completions, **k): return [float(s == c) for s, c in zip(k['solution'], completions)]", "KeyError"),
    ("def score(completions, trainer_state, **k): return [float(trainer_state.global_step)] * 3", "reads trainer_state.glo"),
    ("def score(completions, **k): return [float('nan')] * len(completions)", "returned nan, expected a finite number"),
    ("def score(completions, **k): return [np.inf] * len(completions)", "returned inf, expected a finite"),
    ("def score(completions, **k): return [None] * len(completions)", "returned None for each of the 6 answers"),
    ("def score(completion): return None", "returned None"),
    ("def score(completion): return 'good'", "returned 'good' \\(str\\)"),
    ("def score(completion): return (1.0, 'why')", "\\(tuple\\); a reward is a finite number"),
    ("def score(completion): return {'score': 1.0}", "\\(dict\\); a reward is a finite number"),
    ("def score(completion, level): return 1.0 / (level - 3)", "ZeroDivisionError"),
    ("async def score(completions, **k): raise RuntimeError('no judge')", "RuntimeError: no judge"),
    ("def score(data_source, solution_str, ground_truth, extra_info, gold): return 1.0", "needs gold, which is no"),
    ("def score(data_source, solution_str, ground_truth): return {'acc': 1.0}", "a dict without 'score': acc"),
    ("def score(completion):\n    import os\n    os._exit(3)", "its process exited with status 3"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "said"), WRONG)
def test_a_reward_that_can_judge_nothing_is_refused_before_a_model_loads(by: Grade, source: str, said: str):
    """By the cause, the answer, the columns that were there, and what to type; at most five lines."""
    with pytest.raises(RewardError, match=f"(?s:reward 'score' .*mine.py:score.*{said})") as caught:
        try_rewards(by(source), Limits(), questions())

    assert len(str(caught.value).splitlines()) <= 5


FINE = [
    "def score(completions, answer, **k): return [a in c for a, c in zip(answer, completions)]",
    "def score(completions, *, answer, level): return np.array([float(len(c)) for c in completions], np.float32)",
    "def score(completions, **k): return [np.float32(1.0) if c else np.bool_(False) for c in completions]",
    "def score(completions, **k): return [1.0 if c else None for c in completions]",
    "def score(completion, answer): return np.bool_(answer in completion)",
    "async def score(completions, **k):\n    await asyncio.sleep(0)\n    return [len(c) for c in completions]",
    "def score(completions, log_extra=None, log_metric=None, trainer_state=None, **k):\n"
    "    log_metric('a', 1.0)\n    return [1.0] * len(completions)",
    "def score(data_source, solution_str, ground_truth, extra_info=None): return solution_str == ground_truth",
]  # fmt: skip


@pytest.mark.parametrize("source", FINE)
def test_a_reward_that_is_right_is_passed_in_silence(by: Grade, source: str):
    """Truth values, numbers of NumPy's, None by rows, coroutines, callbacks for logs, keyword-only columns."""
    assert try_rewards(by(source), Limits(), questions()) == ()


def test_a_reward_that_fails_on_some_answers_is_said(by: Grade):
    """An odd answer may be an error: it costs itself alone, and the run begins."""
    (said,) = try_rewards(by("def score(completion): return 1 / len(completion)"), Limits(), questions())

    assert "fails on 2 of 6 answers that were tried, such as '': score: ZeroDivisionError" in said


def test_a_reward_that_gives_nothing_for_the_rows_own_answers_is_said(by: Grade):
    """A column read by a name that no row has: `k.get("solution")` fails nowhere, and every answer would earn 0."""
    source = "def score(completions, **k): return [float(c in k.get('solution', ())) for c in completions]"
    (said,) = try_rewards(by(source), Limits(), questions())

    assert "gives 0 to each of the 6 answers that were tried, the rows' own among them" in said


def test_a_reward_that_compares_answers_is_said_and_gets_all_of_a_question(by: Grade):
    """Its list is the group; alone, every answer would be the best."""
    grading = by(
        "def score(completions, **k): return [float(len(c) == max(map(len, completions))) for c in completions]"
    )
    (said,) = try_rewards(grading, Limits(), questions())

    assert "scores an answer by those beside it" in said
    assert graded(grading, samples("a", "abc", "ab", "abc")) == [0.0, 1.0, 0.0, 1.0]
    alone = by("def score(completions, **k): return [float(len(c) == max(map(len, completions))) for c in completions]",
               over="sample")  # fmt: skip
    assert graded(alone, samples("a", "abc")) == [1.0, 1.0]


def test_rows_columns_and_none_go_with_their_answers(by: Grade):
    """Columns are lists as long as completions; None leaves this reward out of a row, and alone that is an error."""
    source = "def score(prompts, completions, answer, **k): return [None if c == 'x' else float(c == a) for c, a in zip(completions, answer)]"

    assert graded(by(source), samples("42", "x", "7")) == [1.0, "no reward applies to this sample", 0.0]


def test_a_list_of_another_length_is_an_error_of_all(by: Grade):
    """No reward can be told to be whose."""
    said = graded(by("def score(completions, **k): return [1.0]"), samples("1", "2"))

    assert said == ["score: returned 1 rewards for 2 completions"] * 2


def test_other_rewards_beside_one_of_a_group_judge_each_answer(by: Grade):
    """One answer that another reward cannot judge is an error alone, and the group is still whole."""
    joint = by("def score(completions, **k): return [float(len(completions))] * len(completions)").rewards[0]
    own = Path(joint.verifier.function.rpartition(":")[0]).with_name("own.py")  # type: ignore[union-attr]
    own.write_text("def each(completion): return float(completion)")
    grading = Grading((joint, WeightedReward(UserFunction(f"{own}:each"))))

    one, bad, three = graded(grading, samples("1", "bad", "3"))

    assert (one, three) == (4.0, 6.0)
    assert "could not convert string to float" in bad


def test_a_dataset_of_messages_gives_messages_as_trl_does(by: Grade):
    """The prompt with all its messages, the completion as the assistant's; it is said, and text can be asked for."""
    source = "def score(prompts, completions, **k): return [len(p) + len(c[0]['content']) for p, c in zip(prompts, completions)]"
    (said,) = try_rewards(by(source), Limits(), questions(is_chat=True))

    assert "is given messages, as TRL gives them, because the dataset's prompts are messages" in said
    assert graded(by(source), samples("abc", is_chat=True)) == [5.0]
    assert graded(by(source, messages=True), samples("abc")) == [4.0]
    as_text = by("def score(completions, **k): return [len(c) for c in completions]", messages=False)
    assert graded(as_text, samples("abc", is_chat=True)) == [3.0]


@pytest.mark.parametrize(
    "source",
    [
        "def score(completions, answer, **k): return [float(a in c) for a, c in zip(answer, completions)]",
        "def score(completions, answer, **k): return [float(c.strip() == a) for a, c in zip(answer, completions)]",
    ],
)
def test_a_reward_on_text_is_not_given_messages_in_silence(by: Grade, source: str):
    """`answer in completion` is false for every list of messages: all answers would earn 0."""
    with pytest.raises(RewardError, match="set messages = false"):
        try_rewards(by(source), Limits(), questions(is_chat=True))

    assert try_rewards(by(source, messages=False), Limits(), questions(is_chat=True)) == ()


def test_one_call_a_sample_cannot_be_asked_for_a_group(by: Grade):
    """Only the list form has a group."""
    with pytest.raises(RewardError, match='over = "group" is for the list form'):
        try_rewards(by("def score(completion): return 1.0", over="group"), Limits(), questions())


def test_a_reward_that_hangs_is_refused_in_time(by: Grade):
    """Three deadlines, not one for each answer."""
    source = "import time\ndef score(completion): time.sleep(60)"

    with pytest.raises(RewardError, match=r"timed out after 0\.2 s \(grading\.deadline_seconds\)"):
        try_rewards(by(source), Limits(deadline_seconds=0.2), questions())


@pytest.mark.parametrize("hangs", ["", "I do not know.", "42", "7"])
def test_a_reward_that_hangs_on_one_answer_is_said(by: Grade, hangs: str):
    """That answer is asked once; a reward that judges the others is no reason to end a run."""
    source = f"import time\ndef score(completion):\n    if completion == {hangs!r}: time.sleep(60)\n    return len(completion)"

    said = try_rewards(by(source), Limits(deadline_seconds=0.5), questions())

    count = 2 if hangs in ("", "I do not know.") else 1
    assert [f"fails on {count} of 6 answers" in line and repr(hangs) in line for line in said] == [True]


def test_a_reward_that_hangs_on_made_answers_alone_is_said(by: Grade):
    """Empty answers and those of words alone do not tell what it does with the rows' own."""
    source = "import time\ndef score(completion):\n    if not completion.isdigit(): time.sleep(60)\n    return len(completion)"

    said = try_rewards(by(source), Limits(deadline_seconds=0.5), questions())

    assert ["fails on 4 of 6 answers" in line for line in said] == [True]


def test_a_column_that_no_row_has_is_answered_with_what_to_type(by: Grade):
    """The function is right and its parameter's name is not."""
    with pytest.raises(RewardError, match=r"needs anwser, which is no column(?s:.*)name a column that the rows have"):
        try_rewards(by("def score(prompt, completion, anwser): return 1.0"), Limits(), questions())


@pytest.mark.parametrize(
    ("source", "is_said"),
    [
        ("n = [0]\ndef score(completion, **k):\n    n[0] += 1\n    return n[0]", True),
        ("import time\ndef score(completion, **k): return time.perf_counter()", True),
        ("import random\ndef score(completion, **k): return random.random()", False),
        ("def score(completion, **k): return len(completion)", False),
    ],
)
def test_a_reward_that_changes_its_mind_is_said(by: Grade, source: str, is_said: bool):
    """The same answer judged twice: what is counted or timed differs, what is drawn is drawn again."""
    notes = try_rewards(by(source), Limits(), questions())

    assert any("gives one answer two rewards when asked twice" in note for note in notes) == is_said


@pytest.mark.parametrize("parameters", ["completion", "completions"])
def test_what_a_reward_changes_in_its_columns_no_other_sees(tmp_path: Path, parameters: str):
    """Lists and objects of a row are each reward's own."""
    path = tmp_path / "mine.py"
    lists = parameters == "completions"
    path.write_text(
        f"def first({parameters}, gold, **k):\n    {'[g.clear() for g in gold]' if lists else 'gold.clear()'}\n"
        f"    return {'[0.0] * len(completions)' if lists else '0.0'}\n"
        f"def score({parameters}, gold, **k):\n    return {'[len(g) for g in gold]' if lists else 'len(gold)'}\n"
    )
    both = Grading(tuple(WeightedReward(UserFunction(f"{path}:{name}")) for name in ("first", "score")))
    columns = {"answer": "42", "gold": ["a", "b"]}

    found = graded(both, [Sample("6 * 7?", text, columns=columns, seed=n) for n, text in enumerate("ab")])

    assert found == [2.0, 2.0]
