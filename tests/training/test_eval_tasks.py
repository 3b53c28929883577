"""Several held-out sets in one evaluation: how each is asked, their macro average, and what is paired."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gnomon
from gnomon.analysis.paired import compare, read_answered
from gnomon.cli.main import main
from gnomon.config.experiment import from_table, load, to_toml
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.statistics import macro_interval
from gnomon.records.eval_records import AnswerLog
from gnomon.training.api import train_experiment
from gnomon.training.build_data import held_out_questions, questions
from gnomon.training.evaluate import read_evaluations

SUMS = [{"question": f"{a} + {b}?", "answer": f"So #### {a + b}"} for a in range(2) for b in range(2)]
BOXES = [{"problem": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(3) for b in range(2)]


def copies(folder: Path) -> list[Any]:
    """Write copies of two published sets and return them as sets of an evaluation, unlike in everything."""
    for name, rows in (("gsm8k", SUMS), ("aime-24", BOXES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = {"temperature": 0.5, "max_completion_length": 5}
    return [f"gsm8k={folder / 'gsm8k.jsonl'}", {"task": f"aime-24={folder / 'aime-24.jsonl'}", "samples": 4, "size": 5,
                                                 "sampling": sampling}]  # fmt: skip


def experiment(folder: Path, **more: Any) -> Any:
    evaluation = {"tasks": copies(folder), "samples": 2, "sampling": {"top_p": 0.9}}
    return from_table({**load_table(), "evaluation": evaluation, **more})


def load_table() -> dict[str, Any]:
    return tomllib.loads(to_toml(load("tiny", ["steps=2", "rollouts_per_step=16"]).experiment))


def test_each_set_is_asked_in_its_own_way(tmp_path: Path):
    """Sampling over the evaluation's over training's, samples, size and judges; what is training's is said."""
    asked = questions(experiment(tmp_path).experiment)
    sums, boxes = asked.eval_sets

    assert [(e.tasks.name, len(e.tasks), e.samples) for e in asked.eval_sets] == [("gsm8k", 4, 2), ("aime-24", 5, 4)]
    assert [(e.sampling.temperature, e.sampling.top_p) for e in asked.eval_sets] == [(1.0, 0.9), (0.5, 0.9)]
    assert [e.sampling.max_completion_length for e in asked.eval_sets] == [asked.sampling.max_completion_length, 5]
    assert sums.drawn.startswith("temperature 1 (training's), top_p 0.9, ")
    assert boxes.drawn == "temperature 0.5, top_p 0.9, at most 5 tokens"
    assert [e.grading.rewards[0].verifier.kind for e in asked.eval_sets] == ["numeric", "boxed"]
    assert len(asked.split.held_out) == 9


def test_the_run_reads_back_as_it_was_written(tmp_path: Path):
    """TOML of an experiment with several sets is the same experiment."""
    made = experiment(tmp_path).experiment

    assert from_table(tomllib.loads(to_toml(made))).experiment == made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    train_experiment(experiment(folder), folder / "run")
    return folder / "run"


def test_a_run_writes_one_record_of_all_sets(run: Path):
    """A row an evaluation with the sets below it; a line a prompt, paired over everything by set and prompt."""
    first, last = read_evaluations(run / "evaluations.jsonl")
    before, after = (read_answered(AnswerLog(run / "evaluations").path(step)) for step in (0, 2))

    assert (first.task, [part.task for part in first.parts]) == ("gsm8k+aime-24", ["gsm8k", "aime-24"])
    assert first.headline.mean == pytest.approx(sum(part.headline.mean for part in first.parts) / 2)
    assert (first.prompts, len(before), len({row.prompt_id for row in before})) == (9, 9, 9)
    assert compare(before, after).prompts == 9
    assert json.loads(json.dumps(last.as_row())) == json.loads((run / "evaluations.jsonl").read_text().splitlines()[1])
    assert set(first.pass_at) == {"1", "2"}, "four samples of the second set alone are no pass@4 of both"


def test_evaluating_the_run_asks_what_it_asked(run: Path):
    """The same weights give the same answers; samples that are said are those of every set."""
    last = read_evaluations(run / "evaluations.jsonl")[-1]
    again, more = gnomon.evaluate(run), gnomon.evaluate(run, samples=1)
    stripped = [
        {**row, "seconds": 0, "parts": [{**part, "seconds": 0} for part in row["parts"]]}
        for row in (last.as_row(), gnomon.evaluate(run, samples=2).as_row())
    ]

    assert again.prompts == 9
    assert [part.samples for part in more.parts] == [1, 1]
    assert [part["samples"] for part in stripped[1]["parts"]] == [2, 2]
    assert stripped[0]["parts"][0]["scores"] == stripped[1]["parts"][0]["scores"]


def test_the_command_asks_several_sets(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One table with a line a set and their macro average; two checkpoints differ over everything and by set."""
    folder = run.parent
    names = ["--task", f"gsm8k={folder / 'gsm8k.jsonl'}", "--task", f"aime-24={folder / 'aime-24.jsonl'}"]
    assert main(["evaluate", str(run), "--checkpoint", "0", "--checkpoint", "newest", *names, "--samples", "2"]) == 0
    said = capsys.readouterr().out

    assert "10 held-out prompts of 2 sets and their macro average, 95% intervals, drawn at temperature 1" in said
    assert "gsm8k (avg@2, 4 prompts)" in said
    assert "aime-24 (avg@2, 6 prompts)" in said
    assert "macro average, answer" in said
    assert "over 10 shared prompts" in said
    assert said.splitlines()[-1].startswith("aime-24: ")


def test_two_sets_of_one_name_are_refused(tmp_path: Path):
    """So are one set and several at once, sampling out of range, and a set that is not there."""
    one, two = copies(tmp_path)
    with pytest.raises(ConfigError, match="two sets of the name 'gsm8k'; give one a name of its own"):
        from_table({**load_table(), "evaluation": {"tasks": [one, one]}})
    with pytest.raises(ConfigError, match=r"evaluation\.task = 'gsm8k' and evaluation\.tasks are both given"):
        from_table({**load_table(), "evaluation": {"task": one, "tasks": [two]}})
    with pytest.raises(ConfigError, match=r"temperature must be 0 \(greedy\) or more, and finite, got -1"):
        from_table({**load_table(), "evaluation": {"sampling": {"temperature": -1}}})
    with pytest.raises(DatasetError, match=r"none\.jsonl does not exist"):
        held_out_questions(from_table({**load_table(), "evaluation": {"tasks": ["gsm8k=none.jsonl"]}}).experiment)


def test_the_macro_average_holds_the_truth():
    """Over 400 drawn pairs of sets of 10 and of 60 prompts, the interval holds the mean of their rates 92 to 99%."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        small = random.binomial(4, random.beta(2, 5, 10)) / 4
        large = random.binomial(1, random.beta(3, 2, 60)) / 1
        held += (2 / 7 + 3 / 5) / 2 in macro_interval([small.tolist(), large.tolist()])

    assert 0.92 <= held / 400 <= 0.99
