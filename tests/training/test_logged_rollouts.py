"""Learning from the rollouts that a run logged: the same update, what is said first, and what is refused."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.random_model import RANDOM

import gnomon
from gnomon.algorithms import resolve
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, UserError
from gnomon.core.types import GIVEN
from gnomon.models.load import load_tokenizer
from gnomon.models.tiny import save_tiny
from gnomon.tasks.question import ListDataset
from gnomon.training.api import train_experiment
from gnomon.training.build_data import questions
from gnomon.training.logged_rollouts import LoggedRollouts, read_logged, reads_behavior

QUICK = ("algorithm=p3o", "algorithm.num_generations=4", "rollouts_per_step=16", "sampling.max_completion_length=3")
MORE = ("learner.precision=fp32", "grading.workers=1", "evaluation.before=false", "held_out.size=5", "steps=1")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one step that logged its rollouts."""
    run = tmp_path_factory.mktemp("logged") / "run"
    train_experiment(load(RANDOM, [*QUICK, *MORE]), run)
    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    (path,) = (run / "checkpoints" / "step-1").glob("*.safetensors")
    return load_file(path)


def test_a_logged_step_teaches_what_it_taught(logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """From the same weights P3O makes the same weights of it, to 1e-6; the effective size is said first, and is 1."""
    settings = (*QUICK, *MORE, "--from", str(logged / "rollouts"), "--run-dir", str(tmp_path / "run"))
    assert main(["train", RANDOM, *settings]) == 0

    said = "".join(capsys.readouterr())
    assert "logged rollouts: 4 groups of 4; effective sample size under the policy 1.000" in said
    rows = gnomon.load(tmp_path / "run").rollouts(1)
    lines = [json.loads(line) for line in (logged / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    assert sorted((row.rollout.response, row.rollout.grade.reward) for row in rows) == sorted(
        (tuple(line["response"]), line["reward"]) for line in lines
    )
    expected, found = weights(logged), weights(tmp_path / "run")
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in expected.items())


def altered(logged: Path, folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Return a copy of a run's rollouts with each line changed."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "experiment.toml").write_text((logged / "experiment.toml").read_text())
    lines = (logged / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    changed = "".join(json.dumps(change(json.loads(line))) + "\n" for line in lines)
    (folder / "rollouts" / "step-000001.jsonl").write_text(changed)
    return folder / "rollouts"


def unknown(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "logprobs": [None] * len(line["logprobs"])}


def without(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "logprobs"}


def less_likely(nats: float, share: int = 1) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a change: about one in ``share`` answers was that much less likely when it was sampled."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return {
            **line,
            "reward": sum(line["response"]) % 2,
            "logprobs": [p - nats * (sum(line["response"]) % share == 0) for p in line["logprobs"]],
        }

    return change


def with_field(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a change: each number of a field is another one, or the field itself where it is none of a list."""
    return lambda line: {**line, name: [value] * len(line[name]) if isinstance(line[name], list) else value}


def unjudged(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "reward": None, "error": None}


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (unknown, (), r"16 of 16 rollouts of .* have no log-probabilities, and the ratio of 'p3o'"),
        (without, (), r"16 of 16 rollouts of .* have no log-probabilities, and the ratio of 'p3o'"),
        (unknown, ("algorithm=decoupled-ppo",), r"have no log-probabilities, and the ratio of 'decoupled-ppo'"),
        (unjudged, (), r"16 of 16 rollouts of .* have no reward, as those of gnomon sft"),
        (
            with_field("response", 10**6),
            (),
            r"has the token 1000000, and the model has \d+; name the rollouts of a run",
        ),
        (with_field("logprobs", 5.0), (), r"a log-probability of 5, which is above 0; log natural"),
        (with_field("reward", math.nan), (), r"line 1: no rollout record: the reward is nan"),
        (with_field("reward", math.inf), (), r"line 1: no rollout record: the reward is inf"),
        (dict, ("algorithm.num_generations=8",), r"have 4 rollouts, .*set algorithm.num_generations = 4"),
        (dict, ("sampling.temperature=0.5",), r"of temperature 1, .* scores at 0.5; set sampling.temperature = 1"),
    ],
)
def test_logs_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], more: tuple[str, ...], said: str, logged: Path, tmp_path: Path
):
    """Before a model is loaded, with what to set."""
    place = altered(logged, tmp_path / "log", change)
    settings = [*(s for s in QUICK if not more or s.partition("=")[0] != more[0].partition("=")[0]), *MORE, *more]

    with pytest.raises(UserError, match=said):
        questions(load(RANDOM, [*settings, "algorithm.num_generations=4", f"rollouts_from={place}", *more]).experiment)


def rewritten(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], logged: Path, folder: Path) -> Path:
    """Return a copy of a run's rollouts of which all lines were changed together."""
    place = altered(logged, folder, dict)
    path = place / "step-000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return place


@pytest.mark.parametrize("name", ["p3o", "dr-grpo", "rloo"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        # By numbers of the groups alone, by ids alone, and by prompts alone.
        (lambda lines: [{**x, "group": n // 4} for n, x in enumerate(lines[2:] + lines[:2])], "line 3: answers"),
        (lambda lines: [{**lines[0], "task_id": "other"}, *lines[1:]], r"line 2: answers another prompt \("),
        (lambda lines: [*lines[:3], {**lines[3], "prompt": lines[4]["prompt"]}, *lines[4:]], "line 4: answers another"),
        (lambda lines: [{**x, "group": min(n // 4, 2)} for n, x in enumerate(lines)], "line 13: answers"),
        (lambda lines: lines[:-1], "have 3 or 4 rollouts, .* groups are whole"),
        # The same group twice: one of them would be trained on twice, and the other never.
        (lambda lines: lines + lines[:4], r"line 17: group \d+ of step 1 began before, in .*line 1; write its lines"),
    ],
)  # fmt: skip
def test_a_logged_group_answers_one_prompt(
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], said: str, name: str, logged: Path, tmp_path: Path
):
    """Rollouts of several prompts are not compared with each other: file, line and field are named."""
    place = rewritten(change, logged, tmp_path / "log")
    experiment = load(RANDOM, [f"algorithm={name}", *QUICK[1:], *MORE, f"rollouts_from={place}"]).experiment

    with pytest.raises(UserError, match=said):
        read_logged(experiment, load_tokenizer(experiment.model), ListDataset("none", ()))


def test_a_conversation_may_begin_with_several_prompts(logged: Path, tmp_path: Path):
    """An environment's first words differ between rollouts of one task; they are still a group."""

    def played(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        said = [{**line, "turns": 1, "ended_by": "done", "cause": None} for line in lines]
        return [{**said[0], "prompt": said[4]["prompt"]}, *said[1:]]

    place = rewritten(played, logged, tmp_path / "log")
    experiment = load(RANDOM, [*QUICK, *MORE, f"rollouts_from={place}"]).experiment
    assert len(read_logged(experiment, load_tokenizer(experiment.model), ListDataset("none", ()))) == 4


@pytest.mark.parametrize(
    ("name", "ratio", "factor"),
    [("decoupled-ppo", 2.0, 2.0), ("decoupled-ppo", 10.0, 5.0), ("icepop", 2.0, 2.0), ("icepop", 10.0, 0.0)],
)
def test_a_correction_weighs_logs_of_another_policy(
    name: str, ratio: float, factor: float, logged: Path, tmp_path: Path
):
    """Twice as likely by now: twice the gradient; ten times: truncated at 5, or masked, which trains nothing."""
    settings = (*QUICK, *MORE, f"algorithm={name}", "algorithm.num_generations=4", "algorithm.updates=Updates")
    places = [
        altered(logged, tmp_path / name, less_likely(nats)) for name, nats in (("log", 0), ("old", math.log(ratio)))
    ]
    runs = {
        source: train_experiment(load(RANDOM, [*settings, f"rollouts_from={source}"]), tmp_path / f"run-{number}")
        for number, source in enumerate(places)
    }
    first, moved = (run.metrics["learner/gradient_norm"][0] for run in runs.values())

    assert first > 0.01
    assert moved == pytest.approx(factor * first, rel=1e-4)


def test_the_effective_size_is_said(logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Some answers are three times as likely by now: (sum r)^2 / (n sum r^2) over the tokens."""
    place = altered(logged, tmp_path / "log", less_likely(math.log(3), share=3))
    settings = (*QUICK, *MORE, "algorithm=decoupled-ppo", "algorithm.num_generations=4", "algorithm.updates=Updates")
    assert main(["train", RANDOM, *settings, "--from", str(place), "--run-dir", str(tmp_path / "run")]) == 0

    lines = [json.loads(line) for line in (place / "step-000001.jsonl").read_text().splitlines()]
    ratios = [1.0 if sum(line["response"]) % 3 else 3.0 for line in lines for _ in line["logprobs"]]
    expected = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
    assert expected < 0.9
    assert f"effective sample size under the policy {expected:.3f} of the tokens" in "".join(capsys.readouterr())


def test_answers_that_were_given_to_the_logging_run_are_given_here(logged: Path, tmp_path: Path):
    """A log of luffy has the dataset's answers, with zeros for log-probabilities that nobody had: P3O would weigh them
    as if the sampler had been sure of them, and refuses; GRPO takes them as given, in every segment.
    """

    def given(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "logprobs": [0.0] * len(line["logprobs"]), "oldest_version": GIVEN, "newest_version": GIVEN}

    place = altered(logged, tmp_path / "log", given)
    lines = [json.loads(line) for line in (place / "step-000001.jsonl").read_text().splitlines()]
    parted = [part for line in lines for part in (line, {**unknown(line), "segment": 1, "oldest_version": 3})]
    (place / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in parted))

    def read(algorithm: str) -> Any:
        settings = [*QUICK, *MORE, f"algorithm={algorithm}", f"rollouts_from={place}"]
        return questions(load(RANDOM, settings).experiment).split.train

    with pytest.raises(UserError, match=r"16 of 16 rollouts of .* have no log-probabilities"):
        read("p3o")
    rows = [row for group in read("grpo").groups for rollout in group.rollouts for row in rollout.rows]
    assert {(row.oldest_version, row.newest_version, len(set(row.logprobs))) for row in rows} == {(GIVEN, GIVEN, 1)}
    assert all("@" in row.task_id for row in rows)


def test_logs_without_probabilities_serve_where_none_are_read(logged: Path, tmp_path: Path):
    """GRPO on them: each is a given answer, which no measure of the sampler counts."""
    place = altered(logged, tmp_path / "log", unknown)

    train = questions(load(RANDOM, [*QUICK, *MORE, "algorithm=grpo", f"rollouts_from={place}"]).experiment).split.train

    assert isinstance(train, LoggedRollouts)
    assert {rollout.oldest_version for group in train.groups for rollout in group.rollouts} == {GIVEN}


@pytest.mark.parametrize(
    ("changes", "is_read"),
    [
        ({"preset": "high-entropy"}, False),
        ({"preset": "fipo"}, False),
        ({"preset": "icepop"}, True),
        ({"preset": "p3o"}, True),
        ({"preset": "grpo", "regularizers": [{"piece": "Kl", "estimator": "k3"}]}, False),
        ({"preset": "grpo", "regularizers": [{"piece": "Kl", "estimator": "unbiased"}]}, True),
    ],
    ids=str,
)
def test_the_samplers_probabilities_are_asked_for_where_they_are_read(changes: dict[str, Any], is_read: bool):
    """A choice of tokens by entropy reads none; an unbiased KL does, though its anchor is the reference."""
    assert reads_behavior(resolve(changes)) is is_read


def test_logs_of_other_tokens_are_refused(logged: Path, tmp_path: Path):
    """The run's own model says which text each id is."""
    folder = save_tiny(tmp_path / "other", 1)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary).replace('"A": ', '"\u0100A": '))

    with pytest.raises(ConfigError, match=r"has the tokens of 'tiny', and .* has others: token \d+ is"):
        questions(load(RANDOM, [*QUICK, *MORE, f"model={folder}", f"rollouts_from={logged}"]).experiment)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("rollouts_from=nowhere", r"rollouts_from = '.*nowhere' has no logged rollouts of a run; name RUN/rollouts"),
        ("algorithm=dapo", "set algorithm.keep = none and algorithm.overlong = none"),
        (
            "algorithm.advantage={piece='Where', condition={piece='InRole', role='white'}, then={piece='Returns'}, "
            "otherwise={piece='Returns', gamma=0.5}}",
            r"set an algorithm that asks for no roles \(InRole\)",
        ),
        ("algorithm=spo", "algorithm.sampler = Uniform and algorithm.tracker = none"),
        ("max_staleness=2", "set max_staleness = 0"),
    ],
)
def test_what_would_have_to_ask_is_refused(more: str, said: str, logged: Path):
    """Nothing is generated from logs, so what decides about that has no place."""
    preset = () if more.startswith("algorithm=") else QUICK
    with pytest.raises(ConfigError, match=said):
        questions(load(RANDOM, [*preset, *MORE, f"rollouts_from={logged}", more]).experiment)


def test_a_held_out_prompt_of_a_log_is_left_out(logged: Path):
    """Of four groups one has the prompt of a held-out row: three are trained on, and it is said."""
    source = questions(load(RANDOM, [*QUICK, *MORE]).experiment)
    experiment = load(RANDOM, [*QUICK, *MORE, f"rollouts_from={logged}"]).experiment
    whole = read_logged(experiment, source.tokenizer, source.split.held_out)

    kept = read_logged(experiment, source.tokenizer, replace(whole, groups=whole.groups[:1]))

    assert [group.task.id for group in kept.groups] == [
        group.task.id for group in whole.groups if group.task.prompt != whole.groups[0].task.prompt
    ]
    assert "logged groups have a held-out prompt and are left out" in kept.said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("system=Be brief.", 'set system = "", as there'),
        ("template_date=2020-01-01", 'set template_date = "'),
        ("task.phrase=What is {}?", 'set task.phrase = "{}="'),
        ("chat_template_kwargs.enable_thinking=false", "set no chat_template_kwargs.enable_thinking, as there"),
    ],
)
def test_settings_of_prompts_that_a_log_has_otherwise_are_refused(more: str, said: str, logged: Path):
    """Logged prompts are not written anew, so a system message would reach held-out questions alone."""
    experiment = load(RANDOM, [*QUICK, *MORE, f"rollouts_from={logged}", more]).experiment
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_logged(experiment, load_tokenizer(experiment.model), ListDataset("none", ()))


def test_other_questions_than_the_logs_are_said(logged: Path):
    """Another seed asks other held-out questions; the same settings say nothing."""
    first, second = (
        questions(load(RANDOM, [*QUICK, *MORE, f"rollouts_from={logged}", *more]).experiment)
        for more in ([], ["task.seed=1"])
    )

    assert "of the run that logged" not in "".join(first.said)
    assert any(said.startswith("task.seed of the run that logged") for said in second.said)


def test_a_system_message_of_the_log_must_be_set_again(logged: Path, tmp_path: Path):
    """The run that logged had one: it is named, and with it the log is read."""
    place = altered(logged, tmp_path / "log", dict)
    written = (logged / "experiment.toml").read_text()
    assert 'system = ""' in written
    (place.parent / "experiment.toml").write_text(written.replace('system = ""', 'system = "Be brief."'))
    settings = [*QUICK, *MORE, f"rollouts_from={place}"]

    with pytest.raises(ConfigError, match=re.escape('set system = "Be brief."')):
        questions(load(RANDOM, settings).experiment)
    assert isinstance(questions(load(RANDOM, [*settings, "system=Be brief."]).experiment).split.train, LoggedRollouts)


def test_a_log_is_trained_on_with_rewards_that_read_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A log has no columns, and needs none: rewards judge held-out answers alone. The run's own rewards and task, also
    named by other words for the same file, are no difference; other rewards, or another code of theirs, are named.
    """
    rows = "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(24))
    (tmp_path / "rows.jsonl").write_text(rows)
    code = "def good(prompt, completion, answer):\n    return float(completion == answer)\n"
    code += "def short(completion, answer):\n    return float(len(completion) < 2)\n"
    (tmp_path / "own.py").write_text(code)

    def trained(name: str, *settings: str) -> str:
        own = (*QUICK, *MORE, f"task={tmp_path}/rows.jsonl", f"rewards=['{tmp_path}/own.py:good']", "held_out.size=4")
        assert main(["train", RANDOM, *own, *settings, "--run-dir", str(tmp_path / name)]) == 0
        return "".join(capsys.readouterr())

    trained("run")
    log = ("--from", str(tmp_path / "run" / "rollouts"))
    assert "differ" not in (said := trained("same", *log))
    assert "was judged by" not in said
    elsewhere = os.path.relpath(tmp_path)
    settings = (f"task.path={elsewhere}/rows.jsonl", f"rewards=['{elsewhere}/own.py:good']")
    assert "differ" not in (said := trained("same place", *log, *settings))
    assert "was judged by" not in said
    said = trained("other", *log, f"rewards=['{tmp_path}/own.py:short']")
    assert re.search(
        r"was judged by good \(\w{6}\), and its rewards are trained on as they are; this run's, short", said
    )
    assert "differ" not in said
    (tmp_path / "own.py").write_text(code.replace("==", "!="))
    assert re.search(r"was judged by good \((\w{6})\).*; this run's, good \((?!\1)", trained("changed", *log))
