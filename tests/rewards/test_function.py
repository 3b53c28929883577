import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import RewardError
from gnomon.rewards.base import NotApplicable, Sample, VerifierError
from gnomon.rewards.function import UserFunction

SAMPLE = Sample(
    "What is 6 * 7?",
    "It is 42.",
    columns={"answer": "42", "data_source": "sums", "level": 3, "extra_info": {"index": 5}},
)

numbers = itertools.count()
Write = Callable[[str], UserFunction]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Put source into a file of its own (functions are imported once) and name its function ``score``."""

    def written(source: str) -> UserFunction:
        path = tmp_path / f"rewards_{next(numbers)}.py"
        path.write_text(source)
        return UserFunction(f"{path}:score")

    return written


@pytest.mark.parametrize(
    "source",
    [
        "def score(prompt, completion, answer): return float(answer in completion and '6' in prompt)",
        "def score(completion, **columns):\n"
        "    return float(sorted(columns) == ['answer', 'data_source', 'extra_info', 'level', 'prompt'])",
        "def score(completion, level, missing=1): return level - 2 * missing",
        "async def score(completion): return 1.0",
        "import asyncio\nasync def score(completion):\n    await asyncio.sleep(0)\n    return 1",
        "class Score:\n    def __call__(self, completion): return 1.0\nscore = Score()",
        "import functools\ndef f(weight, completion): return weight\nscore = functools.partial(f, 1.0)",
    ],
)
def test_our_signature_gets_the_columns_it_asks_for(write: Write, source: str):
    """By name: those that it names, or all with **columns; sync, async, or an object that is called."""
    assert write(source)(SAMPLE) == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "def score(completions, **kwargs): return [float(c == 'It is 42.') for c in completions]",
        "def score(prompts, completions, answer): return [float(a in c) for a, c in zip(answer, completions)]",
        "def score(completions, level, **kwargs): return (level[0] - 2,)",
        "async def score(completions, **kwargs): return [1.0]",
        "def score(completions, log_extra=None, log_metric=None, trainer_state=None, **k):\n"
        "    log_metric('a', 1.0); log_extra('b', ['c'])\n    return [1.0]",
    ],
)
def test_the_signature_of_trl_gets_lists_of_one(write: Write, source: str):
    """Prompts, completions and columns are lists; its logging callbacks do nothing."""
    assert write(source)(SAMPLE) == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float((data_source, solution_str, ground_truth) == ('sums', 'It is 42.', '42'))",
        "def score(data_source, solution_str, ground_truth, extra_info): return extra_info['index'] - 4",
        "def score(solution_str, ground_truth, **settings): return {'score': 1.0 - len(settings), 'acc': True}",
        "async def score(data_source, solution_str, ground_truth, extra_info): return {'score': 1}",
    ],
)
def test_the_signature_of_verl_gets_its_four_arguments(write: Write, source: str):
    """The answer is its ground_truth; a dict's "score" is the reward; columns do not go into its settings."""
    assert write(source)(SAMPLE) == 1.0


def test_the_ground_truth_of_a_verl_dataset_keeps_its_type(write: Write):
    """reward_model.ground_truth comes before ground_truth, and that before the answer as text."""
    function = write("def score(data_source, solution_str, ground_truth): return ground_truth[0]")
    columns = {"answer": "x", "ground_truth": [2.0], "reward_model": {"ground_truth": [3.0]}}

    assert function(Sample("", "", columns=columns)) == 3.0
    assert function(Sample("", "", columns={**columns, "reward_model": {}})) == 2.0


def test_messages_are_passed_when_asked_for(tmp_path: Path):
    """A function written for TRL's conversational format reads completion[0]["content"]."""
    path = tmp_path / "conversational.py"
    path.write_text("def score(completions, **kwargs): return [len(c[0]['content']) for c in completions]")

    assert UserFunction(f"{path}:score", messages=True)(SAMPLE) == 9


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def score(completion): return None", "returned None"),
        (
            "def score(completion, gold): return 1.0",
            "needs gold, .*; it has answer, .*, and the question as prompt",
        ),
        ("def score(completions, problem): return [1.0]", "needs problem, .* and the question as prompts"),
        ("def score(completions): return []", "returned 0 rewards for 1 completion"),
        ("def score(completions): return [1.0, 0.0]", "returned 2 rewards for 1 completion"),
        ("def score(completions): return 1.0", "returned float, expected a list"),
        ("def score(solution_str): return {'acc': 1.0}", "returned a dict without 'score': acc"),
    ],
)
def test_another_shape_of_result_cannot_be_used(write: Write, source: str, cause: str):
    """It is an error that says what came."""
    with pytest.raises(VerifierError, match=cause):
        write(source)(SAMPLE)


def test_none_in_the_list_form_does_not_apply(write: Write):
    """As in TRL."""
    with pytest.raises(NotApplicable, match="None"):
        write("def score(completions): return [None]")(SAMPLE)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def score(promt, completon): return 1.0", r"score' \(promt, completon\): unknown parameter 'promt'; did you"),
        ("def score(completion, completions): return 1.0", "has both completion and completions"),
        ("def score(**kwargs): return 1.0", "has no named parameter"),
        ("def score(prompt): return 1.0", "has none of completion, completions, solution_str"),
        ("def score(completion, /): return 1.0", "completion cannot be passed by name"),
        (
            "def score(completion_ids, **columns): return 1.0",
            "completion_ids is not passed; use the text in completions",
        ),
        ("def score(completions, completion_ids): return 1.0", "completion_ids is not passed"),
        ("score = 3", "is no function but int"),
        ("def scorer(completion): return 1.0", "unknown function 'score'; did you mean 'scorer'"),
        ("import not_there_at_all", r"raised ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("def score(completion) return 1", "raised SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_used_is_found_out_before_it_is_called(write: Write, source: str, cause: str):
    """Preparing says what was tried and, where a name is close, which was meant."""
    with pytest.raises(RewardError, match=cause):
        write(source).prepare()


def test_a_missing_file_is_named_with_the_nearest(tmp_path: Path):
    """As an absolute path, so that it is clear where a relative one started."""
    (tmp_path / "rewards.py").write_text("")

    with pytest.raises(RewardError, match=r"there is no file .*/reward.py; did you mean 'rewards.py'"):
        UserFunction(f"{tmp_path}/reward.py:score").prepare()


def test_modules_are_found_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `python -m` would find them; a missing one is named with the nearest beside it."""
    package = tmp_path / "my_rewards_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lengths.py").write_text("def score(completion): return float(len(completion))")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert UserFunction("my_rewards_package.lengths:score")(SAMPLE) == 9.0
    with pytest.raises(RewardError, match=r"no module my_rewards_pakage; did you mean 'my_rewards_package'"):
        UserFunction("my_rewards_pakage.lengths:score").prepare()
    with pytest.raises(RewardError, match=r"no module my_rewards_package.length; did you mean 'lengths'"):
        UserFunction("my_rewards_package.length:score").prepare()


def test_a_file_does_not_replace_a_module_of_its_name(tmp_path: Path):
    """A user's json.py is theirs alone."""
    import json

    (tmp_path / "json.py").write_text("def score(completion): return 1.0")

    assert UserFunction(f"{tmp_path}/json.py:score")(SAMPLE) == 1.0
    assert json.loads("1") == 1


@pytest.mark.parametrize("name", ["score", "rewards.py", ":score", "rewards:", "rewards.py:a b", "rewards:a.b"])
def test_a_name_of_another_form_is_refused_at_once(name: str):
    """Nothing is imported to see that it has no module or no function."""
    with pytest.raises(RewardError, match=r"module:function or path\.py:function"):
        UserFunction(name)


def test_all_samples_share_one_event_loop(write: Write):
    """A session or a lock that a module keeps goes on working."""
    source = (
        "import asyncio\nloops = set()\n"
        "async def score(completion):\n    loops.add(id(asyncio.get_running_loop()))\n    return len(loops)"
    )
    function = write(source)

    rewards: list[Any] = [function(SAMPLE) for _ in range(3)]

    assert rewards == [1, 1, 1]
