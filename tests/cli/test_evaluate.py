"""`gnomon evaluate`: one or two models, checkpoints of a run, what is written, and what is said of it."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.random_model import RANDOM

import gnomon
from gnomon.analysis.paired import compare, read_answered
from gnomon.cli.main import main
from gnomon.models.tiny import save_tiny
from gnomon.tasks.benchmarks import BENCHMARKS

Capture = pytest.CaptureFixture[str]
REWARDS = [{"verifier": {"kind": "numeric"}}]


def said(capsys: Capture, *arguments: str) -> str:
    code = main(["evaluate", *arguments])
    spoken = capsys.readouterr()
    assert code == 0, spoken.err
    return spoken.out


def parsed(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found = json.loads(said(capsys, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def refused(capsys: Capture, *arguments: str) -> str:
    assert main(["evaluate", *arguments]) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    result = gnomon.train(RANDOM, folder, steps=6, rollouts_per_step=64)
    gnomon.export(result.directory, folder.parent / "exported")
    return folder


def test_two_checkpoints_are_paired(run: Path, capsys: Capture):
    """Before and after on the same prompts: the difference of the two means, with interval, test and verdict."""
    found = parsed(capsys, str(run), "--checkpoint", "0", "--checkpoint", "newest", "--samples", "8")
    before, after = found["evaluations"]
    difference = found["differences"]["avg"]

    assert [(e["name"], e["step"]) for e in (before, after)] == [("run, step 0", 0), ("run, step 6", 6)]
    assert difference["mean"] == pytest.approx(after["scores"]["answer"]["mean"] - before["scores"]["answer"]["mean"])
    assert difference["interval"]["low"] <= difference["mean"] <= difference["interval"]["high"]
    assert (difference["prompts"], difference["test"]) == (5, "exact sign-flip test")
    assert difference["is_noise"]  # five prompts never settle anything
    assert set(found["differences"]) >= {"avg", "pass@8", "maj@8", "tokens", "truncated"}
    assert "within noise" in difference["words"]


def test_the_same_weights_answer_alike(run: Path, capsys: Capture):
    """A run beside what was exported of it: the same draws, so every prompt is answered alike."""
    spoken = said(capsys, str(run), str(run.parent / "exported"), "--samples", "4")

    assert spoken.splitlines()[1].endswith(" exported")
    assert "run, step 6" in spoken
    assert "maj@4" in spoken
    assert "a difference of +0.000" in spoken
    assert "(p = 1.000, " in spoken
    assert "The two did equally well on every prompt" in spoken


def test_a_model_is_no_step(run: Path, capsys: Capture):
    """An exported model is headed as what it is; a run says after which step."""
    exported = said(capsys, str(run.parent / "exported"), "--task", "arithmetic", "--prompts", "3")

    assert "the model\n" in exported
    assert "after step" not in exported
    assert "after step 6\n" in said(capsys, str(run))


def test_answers_are_written_and_paired_later(run: Path, tmp_path: Path, capsys: Capture):
    """One file a model; compared later they say what was said at once."""
    out = tmp_path / "answers"
    found = parsed(
        capsys, str(run), "tiny", "--task", "arithmetic", "--prompts", "9", "--samples", "2", "--out", str(out),
        "sampling.max_completion_length=3",
    )  # fmt: skip
    first, second = sorted(out.iterdir())

    assert (first.name, second.name) == ("1-run--step-6.jsonl", "2-tiny.jsonl")
    assert compare(read_answered(first), read_answered(second)).words == found["differences"]["avg"]["words"]
    assert "exists and is not empty; name a new folder with --out" in refused(capsys, str(run), "--out", str(out))


def test_what_a_run_was_trained_on_is_said(run: Path, capsys: Capture):
    """The run learned all sums of 0 to 4 but five; asked for sums of 0 to 4 again, most were trained on."""
    main(["evaluate", str(run), "--task", "arithmetic", "--prompts", "12", "task.highest=4", "--json"])
    spoken = capsys.readouterr()

    assert "held-out questions are trained on as well" in spoken.err
    assert json.loads(spoken.out)["prompts"] == 12


def test_each_run_is_asked_whether_it_was_trained_on_the_others_questions(run: Path, tmp_path: Path, capsys: Capture):
    """Two runs that hold out other sums: what one holds out the other was trained on, in either direction."""
    other = tmp_path / "other"
    begun = ["train", RANDOM, "steps=1", "rollouts_per_step=64", "held_out.seed=20260102", "--run-dir", str(other)]
    assert main(begun) == 0
    capsys.readouterr()
    for first, second in ((run, other), (other, run)):
        main(["evaluate", str(first), str(second)])
        spoken = capsys.readouterr()
        assert f"warning: {second}: contamination: " in spoken.err
        assert f"{first}: contamination" not in spoken.err


def test_a_run_asked_other_questions_than_its_own_is_checked_too(run: Path, capsys: Capture):
    """Another seed of held-out sums, without --task: some were trained on."""
    main(["evaluate", str(run), "held_out.seed=20260102"])

    assert "warning: contamination: " in capsys.readouterr().err


def test_what_cannot_be_told_is_said(run: Path, tmp_path: Path, capsys: Capture):
    """The file that a run was trained on is gone: it is evaluated all the same, and the gap is named."""
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    table = tomllib.loads((moved / "experiment.toml").read_text())
    gone = table | {"task": {"kind": "table", "path": str(tmp_path / "gone.jsonl")}, "rewards": REWARDS}
    (moved / "experiment.toml").write_text(tomli_w.dumps(gone))
    main(["evaluate", str(moved), "--task", "arithmetic", "--prompts", "2"])
    spoken = capsys.readouterr()

    assert "was trained on these questions cannot be told" in spoken.err
    assert "gone.jsonl does not exist" in spoken.err
    assert "2 held-out prompts" in spoken.out


def test_answers_that_are_cut_off_are_said(capsys: Capture):
    """With one token nothing ends by itself: the scores say little, and the setting that helps is named."""
    spoken = said(capsys, "tiny", "--task", "arithmetic", "--prompts", "4", "sampling.max_completion_length=1")

    assert "of answers were cut off at their budget; sampling.max_completion_length=N gives them more" in spoken


def test_a_benchmark_copy_is_asked_whole(tmp_path: Path, capsys: Capture):
    """All 205 rows, although 200 are asked of other tasks; graded by its own verifier."""
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(205)]
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = parsed(capsys, "tiny", "sampling.max_completion_length=1", "--task", f"gsm8k={copy}")

    assert (found["task"], found["prompts"]) == ("gsm8k", 205)
    assert {"answer", "format"} <= set(found["scores"])


def test_a_model_is_asked_published_sets_each_in_its_own_way(tmp_path: Path, capsys: Capture):
    """Samples and lengths of `evaluation.tasks`, for a model without any run."""
    copy = tmp_path / "aime.jsonl"
    copy.write_text("".join(json.dumps({"problem": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(2)))
    sets = f'["arithmetic", {{task = "aime-24={copy}", samples = 2, sampling = {{max_completion_length = 2}}}}]'

    assert main(["evaluate", "tiny", f"evaluation.tasks={sets}", "sampling.max_completion_length=3", "--json"]) == 0
    parts = {part["task"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert [(part["prompts"], part["samples"]) for part in parts.values()] == [(200, 1), (2, 2)]
    assert parts["aime-24"]["length_tokens_mean"] <= 2


def test_a_file_is_judged_by_what_judges_the_run(run: Path, tmp_path: Path, capsys: Capture):
    """The run names no reward, so its task's own judges: the last number. Means of two samples are no 0-or-1 pairs."""
    rows = [{"prompt": f"{a} + {a} = ", "answer": str(2 * a)} for a in range(5)]
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = ["--task", str(tmp_path / "b.jsonl")]

    found = parsed(capsys, str(run), *task)
    assert (found["task"], found["prompts"], list(found["scores"])) == ("b", 5, ["answer", "reward"])
    both = parsed(capsys, str(run), "--checkpoint", "0", "--checkpoint", "newest", "--samples", "2")
    assert both["differences"]["avg"]["test"] == "exact sign-flip test"
    refusal = refused(capsys, "tiny", *task)
    assert "the task 'b' has no reward of its own" in refusal
    assert "'rewards=[{kind=\"numeric\"}]'" in refusal


def test_what_cannot_be_meant_is_refused(run: Path, capsys: Capture):
    """Before anything is loaded, with what to do instead."""
    assert "two are compared at most, got a, b, c" in refused(capsys, "a", "b", "c")
    assert "two are compared at most, got 1, 2, 3" in refused(
        capsys, str(run), *(word for n in "123" for word in ("--checkpoint", n))
    )
    assert "neither tiny nor tiny-sums is a run, so there is no checkpoint 3" in refused(
        capsys, "tiny", "tiny-sums", "--checkpoint", "3", "--task", "arithmetic"
    )
    assert "has no checkpoint 5; it has those after steps: 6" in refused(capsys, str(run), "--checkpoint", "5")
    assert "a checkpoint is best, newest or a number of steps" in refused(capsys, str(run), "--checkpoint", "last")
    assert "did you mean 'gsm8k'" in refused(capsys, "tiny", "--task", "gsm8")
    assert "--prompts 5 is of a task that is named with --task" in refused(capsys, str(run), "--prompts", "5")


def test_truth_values_are_rewards(tmp_path: Path, capsys: Capture):
    """A reward that returns True or False says 1 or 0: with the first character of the answer half are right."""
    (tmp_path / "mine.py").write_text("def mine(prompt, completion, answer):\n    return int(answer) % 2 == 0\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+0=", "answer": str(n)}) + "\n" for n in range(6)))
    reward = f'rewards=[{{kind="function", function="{tmp_path / "mine.py"}:mine"}}]'
    found = parsed(capsys, "tiny", reward, "sampling.max_completion_length=2", "--task", str(rows))

    assert (found["scores"]["mine"]["mean"], found["errors"]) == (0.5, 0)


def test_training_says_what_both_sides_share(tmp_path: Path, capsys: Capture):
    """Held-out rows that are trained on but for a comma are warned of at the start and in the plan."""
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text(
        "".join(json.dumps({"prompt": f"What, is {n}+1?", "answer": str(n + 1)}) + "\n" for n in range(20))
    )
    test.write_text("".join(json.dumps({"prompt": f"What is {n}+1?", "answer": str(n + 1)}) + "\n" for n in range(3)))
    settings = [
        f'task={{kind="table", path="{train}"}}', f'evaluation.task={{kind="table", path="{test}"}}',
        'rewards=[{kind="numeric"}]', "steps=0", "rollouts_per_step=16", "sampling.max_completion_length=2",
    ]  # fmt: skip
    shared = "3 of 3 held-out questions are trained on as well, case and punctuation aside"

    assert main(["plan", RANDOM, *settings]) == 0
    assert f"Contamination: {shared}" in capsys.readouterr().out
    assert main(["train", RANDOM, *settings, "--run-dir", str(tmp_path / "run")]) == 0
    assert f"warning: contamination: {shared}" in capsys.readouterr().err


def test_before_and_after_are_paired_at_the_end_of_a_run(tmp_path: Path, capsys: Capture):
    """What `train` prints last is the paired difference on the run's own held-out prompts."""
    main(["train", RANDOM, "steps=2", "rollouts_per_step=64", "--run-dir", str(tmp_path / "run")])

    assert "over 5 shared prompts (p = " in capsys.readouterr().out
    for file in (tmp_path / "run" / "evaluations").iterdir():
        file.unlink()
    main(["resume", str(tmp_path / "run")])
    assert "the intervals overlap, so this could be noise" in capsys.readouterr().out


def test_help_names_the_benchmarks(capsys: Capture):
    """`--help` shows what can be typed."""
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])

    shown = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert all(name in shown for name in (*BENCHMARKS, "NAME=FILE"))


def test_a_tiny_folder_is_a_model(tmp_path: Path, capsys: Capture):
    """A folder whose name has an equals sign is a model, not a setting."""
    folder = save_tiny(tmp_path / "a=b")
    found = parsed(
        capsys, "tiny", str(folder), "--task", "arithmetic", "--prompts", "2", "sampling.max_completion_length=2"
    )

    assert [e["name"] for e in found["evaluations"]] == ["tiny", "a=b"]


def test_rows_that_are_left_out_are_said(run: Path, tmp_path: Path, capsys: Capture):
    """Three rows of which two ask the same with other answers are two prompts: a warning says which and why."""
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "1+1=", "answer": "3"}, {"question": "2+1=", "answer": 3}]
    for name, ending in (("gsm8k=", "a"), ("", "b")):
        copy = tmp_path / f"{ending}.jsonl"
        copy.write_text("\n".join(json.dumps(row) for row in rows))
        assert main(["evaluate", str(run), "--task", f"{name}{copy}", "--json"]) == 0
        spoken = capsys.readouterr()

        assert json.loads(spoken.out)["prompts"] == 2
        assert "1 of 3 rows of" in spoken.err
        assert "1 of them with another answer" in spoken.err
