"""The policy as a judge: it grades by its own weights, reproducibly, and is refused where it cannot be asked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gnomon
from gnomon.core.errors import ConfigError
from gnomon.core.sections import EngineConfig
from gnomon.engines.base import Sampling
from gnomon.models.load import load_tokenizer
from gnomon.models.tiny import TinyConfig, save_tiny
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.judge import RubricJudge
from gnomon.tasks.chat import ChatRenderer
from gnomon.training.reward_models import PolicyJudge, check_judging_policy

JUDGE = {"kind": "judge", "url": "policy", "criteria": ["It is right.", "It is short."], "max_tokens": 160}
SMALL = {"steps": 2, "rollouts_per_step": 8, "algorithm": {"preset": "grpo", "num_generations": 4}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that can read a judge's prompt."""
    return str(save_tiny(tmp_path_factory.mktemp("model"), 1, TinyConfig(context_length=4096)))


def judged(run: Any) -> list[dict]:
    return [json.loads(line) for line in (Path(run.directory) / "judged.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("over", ["answer", "group"])
def test_the_policy_grades_its_own_answers_by_the_weights_of_each_step(model, tmp_path, over):
    """Every reply has the form and its weights' version, an equal run has equal replies, and rewards come from them."""
    several: dict[str, Any] = {"votes": 2, "max_disagreement": 1.0} if over == "group" else {}
    rewards = [{**JUDGE, "over": over, **several}]

    def run(name: str) -> Any:
        return gnomon.train(
            model=model, dataset="arithmetic", rewards=rewards, run_dir=str(tmp_path / name),
            evaluation={"before": False}, held_out={"size": 1}, engine={"max_concurrent": 16}, **SMALL,
        )  # fmt: skip

    first, second = run("a"), run("b")
    said = judged(first)

    assert {one["version"] for one in said} >= {0, 1}
    rows = [row for one in said for row in (one["grades"] if over == "group" else [one["grades"]])]
    assert all(len(row) == 2 and all(0 <= grade <= 10 for grade in row) for row in rows)
    assert len({tuple(row) for row in rows}) > 1
    assert sorted(said, key=str) == sorted(judged(second), key=str)
    means = [step["rollout/reward_mean"] for step in first.metrics.rows]
    assert all(0 <= mean <= 1 for mean in means)
    assert sum(means) > 0


@pytest.mark.parametrize(
    ("engine", "most", "words"),
    [
        ("vllm", 40, "set engine.kind = 'local', or give the url of an endpoint"),
        ("local", 4000, r"beyond its context of 4096; lower max_tokens"),
        ("local", 5, r"max_tokens = 5, too few for its grades: .* has 15; raise it"),
    ],
)
def test_a_policy_that_cannot_judge_is_refused_before_it_is_loaded(model, engine, most, words):
    """By another engine, and where the judge's prompt is longer than the context; else it passes."""
    tokenizer = load_tokenizer(model)
    sampling = Sampling(stop_ids=tokenizer.stop_ids, tokenizer=model)
    policy = PolicyJudge(None, None, ChatRenderer(tokenizer), tokenizer, sampling, 0)
    gradings = [Grading((WeightedReward(RubricJudge("policy", criteria=("a",), max_tokens=n)),)) for n in (40, most)]

    check_judging_policy(gradings[:1], EngineConfig(), policy)
    with pytest.raises(ConfigError, match=words):
        check_judging_policy(gradings[1:], EngineConfig(kind=engine), policy)


def test_the_schema_of_a_reply_has_a_grade_for_each_criterion():
    """Of each answer where several are compared."""
    judge = RubricJudge("policy", criteria=("a", "b", "c"))
    rows = judge.schema(1)["properties"]["grades"]

    assert (rows["minItems"], rows["maxItems"], rows["items"]["maximum"]) == (3, 3, 10)
    assert replace(judge, over="group", votes=2).schema(5)["properties"]["grades"]["minItems"] == 5
    with pytest.raises(ConfigError, match="read only with an endpoint"):
        replace(judge, variable="KEY")
    with pytest.raises(ConfigError, match="the name of the judging model"):
        RubricJudge("http://localhost/v1", criteria=("a",))
