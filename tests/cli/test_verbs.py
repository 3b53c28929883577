"""The verbs: what each takes, prints and returns; and the same from Python."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked import Forked, ended
from tests.random_model import RANDOM
from transformers import AutoModelForCausalLM, AutoTokenizer

import gnomon
from gnomon.algorithms import NAMED
from gnomon.cli.main import VERBS, main
from gnomon.core.errors import ConfigError
from gnomon.models.load import load_model
from gnomon.models.tiny import save_tiny
from gnomon.training.api import copy_model

Capture = pytest.CaptureFixture[str]

# Changing a name here is a change for whoever types it or scripts it: it needs an entry in CHANGELOG.md.
OPTIONS = {
    "config": {"key", "--json", "--markdown", "--migration"},
    "rewards": {"kind", "--json"},
    "tasks": {"name", "--json"},
    "train": {"experiment", "key=value", "--run-dir", "--from", "--cluster", "--json", "--restarts"},
    "resume": {"run", "--json", "--restarts"},
    "continue": {"run", "key=value", "--run-dir", "--json", "--restarts"},
    "watch": {"run", "--plain", "--once", "--wait", "--interval", "--json"},
    "report": {"run", "--out", "--json"},
    "evaluate": {
        "model",
        "second",
        "key=value",
        "--task",
        "--samples",
        "--prompts",
        "--checkpoint",
        "--out",
        "--json",
    },
    "sft": {"experiment", "key=value", "--run-dir", "--cluster", "--restarts", "--json"},
    "reward-model": {"experiment", "key=value", "--run-dir", "--cluster", "--restarts", "--json"},
    "plan": {"--cluster", "experiment", "key=value", "--resolved", "--json"}
    | {"--hardware", "--gpus", "--prompt-tokens", "--answer-tokens"},
    "algorithms": {"name", "key=value", "--latex", "--json"},
    "compare": {"experiment", "key=value", "--algorithms", "--seeds", "--json", "--logs", "--score"}
    | {"--budget", "--seconds", "--steps", "--workers", "--out"},
    "dissect": {"batch", "key=value", "--algorithms", "--rows", "--verify", "--json"},
    "reproduce": {"claim", "--list", "--write", "--finished", "--experiments", "--work", "--workers", "--json"},
    "doctor": {"run", "--fail-on", "--json"},
    "bench": {"case", "--repeats", "--quick", "--peer-python", "--profile", "--json"},
    "export": {"run", "folder", "--to", "--public", "--dry-run", "--json"},
    "completion": {"shell"},
}
QUICK = ("task.size=60", "rollouts_per_step=16", "algorithm.num_generations=4")


def spoken(capsys: Capture, *arguments: str) -> str:
    """Return what a command that succeeds prints on standard output."""
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def parsed(capsys: Capture, *arguments: str) -> dict[str, Any]:
    """Return the one JSON object that a command prints."""
    (value,) = [json.loads(spoken(capsys, *arguments, "--json"))]
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("verbs") / "run"
    gnomon.train(RANDOM, folder, steps=2, rollouts_per_step=64)
    return folder


def test_the_verbs_are_these():
    """These verbs, each a module that is loaded when it is called."""
    assert set(VERBS) == set(OPTIONS)


@pytest.mark.parametrize("verb", OPTIONS)
def test_the_options_are_these(verb: str, capsys: Capture):
    """`--help` works, says what the verb does, and names exactly the arguments that people rely on."""
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    said = capsys.readouterr().out
    usage = said.split("\n\n")[0]
    named = set(re.findall(r"--[a-z-]+", usage)) | set(re.findall(r"(?<![\w-])[a-z]+(?:=[a-z]+)?(?![\w-])", usage))

    assert ended.value.code == 0
    assert re.search(rf"(examples:\s+|^ +)gnomon {verb}", said, re.MULTILINE)
    assert "``" not in said
    assert named - {"usage", "gnomon", verb} == OPTIONS[verb]


def test_help_and_version(capsys: Capture):
    """Without a verb, help lists all verbs; the version is the package's."""
    for arguments in ((), ("--help",), ("-h",), ("help",)):
        said = spoken(capsys, *arguments)
        assert all(f"  {verb} " in said for verb in VERBS)
    for arguments in (("--version",), ("-V",), ("version",)):
        assert re.fullmatch(r"gnomon \d+\.\d+\.\d+\n", spoken(capsys, *arguments))
    with pytest.raises(SystemExit, match="0"):
        main(["help", "train"])
    said = capsys.readouterr().out
    assert said.startswith("usage: gnomon train")
    assert "\n  gnomon train my.toml algorithm=spo --run-dir runs/spo\n" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train",), "the following arguments are required: experiment\n"),
        (("continue",), "the following arguments are required: run\n"),
        (("train", RANDOM, "--rundir", "x"), "unrecognized arguments: --rundir"),
        (("evaluate", "tiny", "--samples", "four"), "argument --samples: invalid int value: 'four'"),
        (("export", "run"), "the following arguments are required: folder"),
        (("resume", "run", "--step", "5"), "unrecognized arguments: --step"),
        (("plan", RANDOM, "--resolved", "--json"), "--json prints one object and --resolved an experiment"),
        (("bench", "--profile", "--repeats", "3"), "--profile measures one step of gnomon once: leave --repeats out"),
        (("reproduce", "toy", "--write", "--finished"), "--write runs nothing: leave --finished out"),
    ],
)
def test_wrong_arguments_show_the_usage(arguments: tuple[str, ...], said: str, capsys: Capture):
    """Exit code 2, the usage and what is wrong, on standard error."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()

    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith(f"usage: gnomon {arguments[0]}")
    assert said in printed.err


def test_plan_says_what_a_step_does(capsys: Capture):
    """GRPO on the tiny model: prompts, rollouts, updates, policy, memory and time in plain words."""
    said = spoken(capsys, "plan", RANDOM)

    for words in (
        "60 steps of grpo on 'arithmetic' with tiny",
        "A step asks 16 prompts, 8 answers each: 128 rollouts of at most 3 tokens",
        "It makes 1 optimizer update of 128 rollouts; it is on-policy",
        "5 held-out prompts",
        "a checkpoint is 1 MiB",
        "a step if every answer uses its whole budget",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"prompts_per_step": 16, "updates_per_step": 1, "rollouts_per_update": 128, "is_on_policy": True}),
        (
            ("algorithm=spo",),
            {"prompts_per_step": 128, "updates_per_step": 8, "rollouts_per_update": 16, "is_on_policy": False},
        ),
        (("max_staleness=1",), {"updates_per_step": 1, "is_on_policy": False}),
        (("algorithm.updates.epochs=2",), {"updates_per_step": 2, "rollouts_per_update": 128, "is_on_policy": False}),
    ],
    ids=["grpo", "spo", "stale", "epochs"],
)
def test_plan_in_numbers(overrides: tuple[str, ...], expected: dict[str, Any], capsys: Capture):
    """The JSON object has the same facts."""
    plan = parsed(capsys, "plan", RANDOM, *overrides)

    assert {name: plan[name] for name in expected} == expected
    assert (plan["steps"], plan["rollouts_per_step"], plan["held_out_prompts"]) == (60, 128, 5)
    assert plan["training_prompts"] > 700


def test_plan_counts_what_lora_saves(capsys: Capture):
    """Adapters need moments for themselves alone: less memory and smaller checkpoints."""
    whole, adapted = parsed(capsys, "plan", RANDOM), parsed(capsys, "plan", RANDOM, "lora.rank=2")

    assert adapted["checkpoint_bytes"] < whole["checkpoint_bytes"] / 2
    assert adapted["memory_bytes"] < whole["memory_bytes"]
    assert "LoRA of rank 2" in spoken(capsys, "plan", RANDOM, "lora.rank=2")


def test_plan_repeats_other_libraries_spellings(capsys: Capture):
    """What was understood in other words is said back, and the resolved experiment has ours."""
    overrides = ("learning_rate=1e-4", "prompts_per_step=4")
    said = spoken(capsys, "plan", RANDOM, *overrides)
    resolved = spoken(capsys, "plan", RANDOM, *overrides, "--resolved")

    assert "Understood: learning_rate = 0.0001 is learner.optimizer.learning_rate = 0.0001." in said
    assert "Understood: prompts_per_step = 4 is rollouts_per_step = 32." in said
    assert tomllib.loads(resolved)["rollouts_per_step"] == 32


def test_algorithms_are_listed_and_described(capsys: Capture):
    """The list names every preset; one of them shows its paper; JSON has the same keys."""
    said = spoken(capsys, "algorithms")

    assert all(name in said for name in NAMED)
    assert "2509.13232" in spoken(capsys, "algorithms", "spo")
    assert set(parsed(capsys, "algorithms")) == set(NAMED)
    assert parsed(capsys, "algorithms", "grpo")["grpo"]["num_generations"] == 8


def test_train_resume_and_their_json(tmp_path: Path, capsys: Capture):
    """A run's JSON has its place, its model and its evaluations; resuming the finished run prints the same object."""
    folder = str(tmp_path / "run")
    trained = parsed(capsys, "train", RANDOM, "steps=2", *QUICK, "--run-dir", folder)

    assert (trained["run"], trained["steps"]) == (folder, 2)
    assert [evaluation["step"] for evaluation in trained["evaluations"]] == [0, 2]
    assert parsed(capsys, "resume", folder) == trained
    assert f"gnomon resume {folder}" not in spoken(capsys, "resume", folder)


@pytest.mark.parametrize(("setting", "level"), [("seed=0", "R0 exact"), ("max_staleness=1", "R2 lossless")])
def test_what_is_promised_is_printed_at_the_start(setting: str, level: str, tmp_path: Path, capsys: Capture):
    """The level and what it means, word for word as the run's card has them."""
    assert main(["train", RANDOM, "steps=0", setting, *QUICK, "--run-dir", str(tmp_path / "run")]) == 0

    promised = json.loads((tmp_path / "run" / "run.json").read_text())["reproducibility"]
    assert promised.startswith(f"{level}: ")
    assert f"run {tmp_path / 'run'}: {promised}" in capsys.readouterr().err


def test_a_run_that_goes_on_cannot_be_given_other_settings(run: Path, tmp_path: Path, capsys: Capture):
    """Exit code 2 with the commands that change them in another run, and these commands work."""
    assert main(["resume", str(run), "steps=3"]) == 2
    said = capsys.readouterr().err

    assert "steps=3: a run goes on with the settings that it began with" in said
    for command in (f"gnomon continue {run} steps=3", f"gnomon train {run}/experiment.toml steps=3"):
        assert command in said
        words = [*command.split()[1:], "--run-dir", str(tmp_path / command.split()[1]), "--json"]
        assert parsed(capsys, *words)["steps"] == 3


def test_without_a_run_directory_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """runs/NAME-DATE-TIME below the working directory, with a name of its own each time."""
    monkeypatch.chdir(tmp_path)
    places = [parsed(capsys, "train", RANDOM, "steps=0", "name=mine", *QUICK)["run"] for _ in range(2)]

    assert len(set(places)) == 2
    assert all(re.fullmatch(r"runs/mine-\d{8}-\d{6}(-2)?", place) for place in places)


def test_evaluate_a_run_on_its_own_questions(run: Path, capsys: Capture):
    """The run's held-out questions, four answers each: pass@1, 2, 4 grow, maj@4 is there."""
    found = parsed(capsys, "evaluate", str(run), "--samples", "4")

    assert (found["task"], found["prompts"], found["samples"], found["errors"]) == ("arithmetic", 5, 4, 0)
    assert list(found["pass_at"]) == ["1", "2", "4"]
    assert found["pass_at"]["1"] <= found["pass_at"]["2"] <= found["pass_at"]["4"]
    assert list(found["maj_at"]) == ["2", "4"]
    assert found["pass_at"]["1"] == pytest.approx(found["scores"]["answer"]["mean"])
    said = spoken(capsys, "evaluate", str(run), "--samples", "2")
    assert "pass@2" in said
    assert "maj@2" in said


def test_evaluate_repeats_what_the_run_measured(run: Path, capsys: Capture):
    """Same weights, same questions, same draws: the last evaluation of the run, to the digit."""
    (last,) = [r for r in map(json.loads, (run / "evaluations.jsonl").read_text().splitlines()) if r["step"] == 2]
    found = parsed(capsys, "evaluate", str(run))

    ignored = ("step", "seconds")
    assert {k: v for k, v in found.items() if k not in ignored} == {k: v for k, v in last.items() if k not in ignored}


def test_evaluate_says_what_is_computed_by_a_slower_way(run: Path, capsys: Capture):
    """Without functions in C the sentence of plan and train is a warning, once, and in the row; else in neither."""
    assert "slow" not in parsed(capsys, "evaluate", str(run))
    asked = ["evaluate", str(run), "--checkpoint", "0", "--checkpoint", "newest", "--json"]
    done = ended(Forked(asked, environment={"GNOMON_NATIVE": "0"}))

    assert done.stderr.count("take up to twice as long") == 1
    slow = [found["slow"] for found in json.loads(done.stdout)["evaluations"]]
    assert [len(said) for said in slow] == [1, 1]
    assert "no functions in C" in slow[0][0]


def test_evaluate_a_model_on_a_named_task(tmp_path: Path, capsys: Capture):
    """A folder on a built-in task; sampling can be set; `--prompts` says how many questions."""
    folder = str(save_tiny(tmp_path / "model"))
    found = parsed(
        capsys, "evaluate", folder, "sampling.max_completion_length=3", "--task", "arithmetic",
        "--samples", "4", "--prompts", "7",
    )  # fmt: skip

    assert (found["prompts"], found["samples"], found["length_tokens_mean"] <= 3) == (7, 4, True)


def test_evaluate_asks_every_row_of_a_file(tmp_path: Path, run: Path, capsys: Capture):
    """A file that is only evaluated on is not split: all its questions are asked, few as they are."""
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(6)))
    reward = 'rewards=[{kind="numeric"}]'

    assert parsed(capsys, "evaluate", "tiny", reward, "--task", str(path))["prompts"] == 6
    assert parsed(capsys, "evaluate", str(run), reward, "--task", str(path), "--prompts", "4")["prompts"] == 4


def test_evaluate_a_run_with_adapters(tmp_path: Path, capsys: Capture):
    """Its checkpoint is merged, so no adapter is put on top again."""
    folder = str(tmp_path / "run")
    parsed(capsys, "train", RANDOM, "steps=1", "lora.rank=2", *QUICK, "--run-dir", folder)

    assert parsed(capsys, "evaluate", folder)["prompts"] == 5


def test_an_exported_model_is_a_model_for_everyone(run: Path, tmp_path: Path, capsys: Capture):
    """transformers alone loads it, with the same logits as the run's checkpoint; the tokenizer comes along."""
    folder = tmp_path / "exported"
    assert f"from_pretrained('{folder}')" in spoken(capsys, "export", str(run), str(folder))
    tokens = torch.tensor([[50, 43, 51, 61]])
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours: Any = load_model(str(run / "checkpoints" / "step-2"), torch.float32)
    base: Any = load_model("tiny", torch.float32)

    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
        assert not torch.equal(theirs(tokens).logits, base(tokens).logits)
    assert AutoTokenizer.from_pretrained(folder).decode([50, 43, 51]) == "2+3"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
    assert main(["export", str(run), str(folder)]) == 2
    assert "exists and is not empty; name a new folder" in capsys.readouterr().err
    assert parsed(capsys, "export", str(run), str(tmp_path / "again")) == {"folder": str(tmp_path / "again")}


def test_an_export_goes_on_with_the_newest_where_the_run_removes_its_checkpoint(run: Path, tmp_path: Path):
    """A run renames a checkpoint before it removes it: what was chosen is there as a whole, or gone."""
    target = tmp_path / "exported"
    target.mkdir()

    assert copy_model(run, run / "checkpoints" / "step-0", target) == 2
    assert (target / "tokenizer.json").exists()


def test_printed_commands_can_be_typed(capsys: Capture, tmp_path: Path):
    """The commands that a run prints name a directory with spaces and quotes as a shell reads it."""
    run = tmp_path / "it's a run; $HOME"
    spoken(capsys, "train", RANDOM, "steps=0", "--run-dir", str(run))
    assert main(["resume", str(run)]) == 0
    said = capsys.readouterr().out
    typed = [shlex.split(line.removeprefix("next").strip()) for line in said.splitlines() if " evaluate " in line]

    assert [words[1:3] for words in typed] == [["evaluate", str(run)]]


def test_training_from_python(tmp_path: Path):
    """Keywords replace fields; an algorithm is a value, a name or a table's worth of pieces."""
    spo = replace(gnomon.SPO, tracker=replace(gnomon.SPO.tracker, initial="prior"))
    result = gnomon.train(RANDOM, str(tmp_path / "run"), steps=1, rollouts_per_step=32, algorithm=spo)

    assert result.steps == 1
    assert result.model == tmp_path / "run" / "checkpoints" / "step-1"
    assert 'name = "spo"' in (tmp_path / "run" / "experiment.toml").read_text()
    assert gnomon.resume(tmp_path / "run") == result
    assert gnomon.evaluate(result.model, task="arithmetic", samples=2, prompts=3).prompts == 3
    assert (gnomon.export(tmp_path / "run", tmp_path / "out") / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"step": 5}, "unknown key 'step'; did you mean 'steps'"),
        ({"steps": "5"}, "steps = '5': should be a whole number; write 5"),
        ({"algorithm": "grop"}, "did you mean 'grpo'"),
        ({"task": "arithmetik"}, "did you mean 'arithmetic'"),
        ({"rollouts_per_step": 3}, "rollouts_per_step = 3 is not a multiple of the 8"),
    ],
)
def test_wrong_keywords_from_python(tmp_path: Path, keywords: dict[str, Any], message: str):
    """The same checks as for a file, before anything is written."""
    with pytest.raises(ConfigError, match=message):
        gnomon.train(RANDOM, tmp_path / "run", **keywords)
    assert not (tmp_path / "run").exists()


def test_training_where_an_event_loop_runs(tmp_path: Path):
    """A notebook has a loop of its own; training and evaluating there work like everywhere."""

    async def notebook() -> int:
        result = gnomon.train(RANDOM, tmp_path / "run", steps=1, rollouts_per_step=16)
        return gnomon.evaluate(result.directory).prompts

    assert asyncio.run(notebook()) == 5


def test_a_runs_evaluation_says_how_far_it_was_trained(capsys: Capture, tmp_path: Path):
    """The newest checkpoint's step stands over the scores, and its weights, not the initial ones, gave them."""
    run = tmp_path / "run"
    shared = ("steps=4", "rollouts_per_step=32", "learner.optimizer.learning_rate=3e-2", "evaluation.samples=64")
    spoken(capsys, "train", RANDOM, *shared, "--run-dir", str(run))
    lines = (run / "evaluations.jsonl").read_text().splitlines()
    before, after = (json.loads(line) for line in lines)
    told = ("scores", "pass_at", "maj_at", "length_tokens_mean", "truncated_fraction")

    found = parsed(capsys, "evaluate", str(run), "--samples", "64")

    assert found["step"] == 4
    assert [found[key] for key in told] == [after[key] for key in told]
    assert [before[key] for key in told] != [after[key] for key in told]


@pytest.mark.parametrize(
    ("line", "name"),
    [("sys.stderr.close()", "stderr"), ("sys.stdout.close()", "stdout"), ("\nwith sys.stderr: pass", "stderr")],
)
def test_standard_output_stays_open_for_everybody(line: str, name: str):
    """Code of the user's that closes it gets an error with its line; at the end of the process nothing is said."""
    code = "import sys\nfrom gnomon.cli.main import _open_standard_files\n_open_standard_files()\n"
    code += f"try:\n    exec({line!r})\nexcept ValueError as error:\n    print(error)\n"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == f"sys.{name}.close() in <string>, line {2 if line[0] == chr(10) else 1}: others print there\n"
    assert done.stderr == ""
