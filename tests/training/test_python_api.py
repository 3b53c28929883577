"""Training from Python: objects in, a run out."""

import asyncio
import functools
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked import Forked, ended
from transformers import AutoModelForCausalLM, AutoTokenizer

import gnomon
import gnomon.testing
from gnomon.algorithms import GRPO
from gnomon.algorithms.protocols import Advantage
from gnomon.cli.main import main
from gnomon.config.experiment import Experiment, load
from gnomon.config.foreign_names import ALIASES
from gnomon.core.errors import ConfigError, RunError, UserError
from gnomon.tasks.environment import Reply
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask
from gnomon.training.objects import write_callables, write_model, write_rows
from gnomon.training.python_api import Settings, _flat, _task
from gnomon.training.result import Result
from gnomon.training.run_logger import FinishedStep

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(8)]
WANTED = "3"


def ours(prompt: str, completion: str, **columns: Any) -> float:
    return float(WANTED in completion)


def trl(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    return [float(answer in completion) for completion, answer in zip(completions, columns["answer"], strict=True)]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": float(ground_truth in solution_str)}


class Judge:
    def __init__(self, wanted: str) -> None:
        self.wanted = wanted

    def __call__(self, completion: str) -> float:
        return float(self.wanted in completion)

    def method(self, completion: str) -> float:
        return self(completion)


class Echo:
    """An environment that says every answer back once."""

    def reset(self, **columns: Any) -> None:
        self.columns = columns

    def step(self, text: str) -> Reply:
        return Reply(text=text or "?", reward=1.0, is_done=True)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(**keywords: Any) -> Any:
    """Return a run of one step on ten rows."""
    given = {
        "model": "tiny", "dataset": ROWS, "steps": 1, "rollouts_per_step": 16, "held_out": {"size": 2, "fraction": 0.3},
        "max_completion_length": 3, "precision": "fp32",
    }  # fmt: skip
    return gnomon.train(**{**given, **keywords})


async def later(step: FinishedStep) -> None:
    """Do what nobody waits for."""


def drawn(step: FinishedStep) -> Any:
    """Do what nobody asks for."""
    yield step


class Waits:
    """A callable whose call is a coroutine."""

    async def __call__(self, step: FinishedStep) -> None:
        """Do what nobody waits for."""


@pytest.mark.parametrize(
    "callbacks", [[later], [drawn], [Waits()], [3], 3, [lambda: 1], [lambda a, b: 1], "print", [None]]
)
def test_a_callback_that_would_not_run_is_refused(callbacks: Any):
    """Before anything is written: a coroutine or a generator would do nothing, without a word."""
    with pytest.raises(ConfigError, match="is no plain function of one argument; one is called after each step"):
        trained(callbacks=callbacks)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_callback_that_changes_what_all_code_shares_ends_the_run():
    """The next step would be computed in another type, and the next checkpoint written to another place."""
    before = torch.get_default_dtype(), Path.cwd()

    with pytest.raises(RunError, match=r"callback.* changed torch's default type from torch.float32 to torch.float64"):
        trained(rewards=ours, callbacks=lambda step: torch.set_default_dtype(torch.float64))

    assert (torch.get_default_dtype(), Path.cwd()) == before


def test_objects_in_a_model_out():
    """Rows, a function and a name in memory; metrics, rollouts, answers and a transformers model out."""
    seen: list[FinishedStep] = []
    run = trained(rewards=[ours, "numeric"], algorithm="rloo", steps=2, callbacks=seen.append, seed=3)

    assert len(run.metrics["rollout/reward_mean"]) == run.steps == 2
    assert [step.number for step in seen] == [1, 2]
    assert seen[1].metrics["rollout/reward_mean"] == run.metrics["rollout/reward_mean"][1]
    assert len(seen[0].rollouts) == len(run.rollouts(1)) == 16
    assert set(run.evaluations[-1].scores) == {"ours", "numeric", "reward"}
    assert str(run.evaluations[-1]).endswith("on 2 prompts of 'dataset' after step 2")
    assert run.model().config.model_type == "llama"
    said = run.generate(["1+2=", "3+4="], seed=1)
    assert said == run.generate(["1+2=", "3+4="], seed=1)
    [stop] = [letter for letter in "".join(said)[:1] if letter.isascii()] or ["x"]
    assert [text.partition(stop)[0] for text in said] == run.generate(["1+2=", "3+4="], seed=1, stop=[stop])
    assert run.plot("rollout/reward_mean").save("curve.svg").read_text().startswith("<svg")
    assert gnomon.load(run.directory) == run
    for prompts, flaw in (
        (None, "prompts is NoneType"), (3, "prompts is int"), ({"prompt": ["1+2="]}, "prompts is dict"),
        (b"1+2=", "prompts is bytes"), (["1+2=", 3], "prompt 2 is int"), ([{"prompt": "1+2="}], "prompt 1 is dict"),
        (["a\ud800"], "prompt 1 has half of a surrogate pair"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=flaw):
            run.generate(prompts)
    for step in ("a", 1.0, True, range(2)):
        with pytest.raises(ConfigError, match="should be a whole number, or None for all steps"):
            run.rollouts(step)


@pytest.mark.parametrize(
    "reward",
    [
        ours, trl, verl, Judge("3"), Judge("3").method, functools.partial(ours, ""), lambda completion: 0.0,
        "numeric", {"kind": "exact"}, {"function": trl, "over": "sample"}, (ours, 0.5), ("numeric", 2),
    ],
    ids=[
        "ours", "TRL's", "verl's", "an object", "a method", "partial", "lambda", "a kind", "a table",
        "a table with a function", "weighted", "a weighted kind",
    ],
)  # fmt: skip
def test_a_reward_may_have_any_form(reward: Any, request: pytest.FixtureRequest):
    """Each form trains and is recorded in files that go on without this program."""
    if "partial" in request.node.callspec.id:
        reward = functools.partial(Judge.method, Judge("3"))
    run = trained(rewards=reward)
    written = load(run.directory / "experiment.toml").experiment

    assert len(written.rewards) == 1
    assert written.rewards[0].weight == (reward[1] if isinstance(reward, tuple) else 1.0)


def test_functions_of_one_name_are_told_apart():
    """Two lambdas are two rewards; one function twice is refused."""
    run = trained(rewards=[lambda completion: 1.0, lambda completion: 0.5, ours], steps=0)
    written = load(run.directory / "experiment.toml").experiment

    assert [part.name for part in written.rewards] == ["reward_0", "reward_1", "ours"]
    with pytest.raises(ConfigError, match="each reward needs a name of its own, not ours; set name"):
        trained(rewards=[ours, ours])


def test_weights_beside_the_rewards_are_trls():
    """`reward_funcs` and `reward_weights` are understood as TRL has them."""
    run = trained(reward_funcs=[ours, trl], reward_weights=[1.0, 0.25], steps=0)
    written = load(run.directory / "experiment.toml").experiment

    assert [(part.name, part.weight) for part in written.rewards] == [("ours", 1.0), ("trl", 0.25)]


@dataclass(frozen=True)
class Above(Advantage):
    """Rewards less a threshold."""

    least: float = 0.5

    def center(self, batch: Any) -> Any:
        return (batch.rewards.double() - self.least)[:, None] * batch.mask


def push(view: Any) -> Any:
    """Return a loss that makes what was said likelier where it earned."""
    return -view.advantages * view.log_ratio.exp()


@pytest.mark.parametrize(
    ("algorithm", "pieces"),
    [
        (push, ["push"]),
        (lambda view: -view.advantages * view.log_ratio.exp(), ["lambda"]),
        ({"preset": "rloo", "advantage": lambda batch: batch.rewards - 0.5}, ["lambda"]),
        (replace(GRPO, surrogate=push, advantage=Above(0.25)), ["push", "Above"]),
    ],
    ids=["a loss", "a lambda", "a table", "an Algorithm"],
)  # fmt: skip
def test_pieces_of_the_program_are_written_down(algorithm: Any, pieces: list[str]):
    """A run's record names a file that holds them, which a program that never saw this one reads."""
    run = trained(rewards=ours, algorithm=algorithm)
    read = ended(Forked(["plan", str(run.directory / "experiment.toml"), "--resolved"]))

    assert run.steps == 1
    assert read.returncode == 0, read.stderr
    assert [piece for piece in pieces if f"/algorithm.py:{piece}" not in read.stdout] == []


@pytest.mark.parametrize("form", ["list", "generator", "datasets", "path", "name", "table"])
def test_a_dataset_may_have_any_form(form: str):
    """A list, a generator, a datasets.Dataset, a path, a name and a table train."""
    import datasets

    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    forms: dict[str, Any] = {
        "list": ROWS,
        "generator": (row for row in ROWS),
        "datasets": datasets.Dataset.from_list(ROWS),
        "path": Path("rows.jsonl"),
        "name": "arithmetic",
        "table": {"kind": "table", "path": "rows.jsonl"},
    }
    run = trained(dataset=forms[form], rewards="numeric", steps=0)

    assert run.evaluations[-1].prompts == 2


def test_tables_and_columns_are_rows():
    """A table of pandas, polars (whose form this has) or Arrow, and a dict of columns, are the same rows as a list."""
    import pandas
    import pyarrow

    class Polars:
        columns = tuple(ROWS[0])

        def to_dicts(self) -> list[dict[str, Any]]:
            return ROWS

    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    for table in (pandas.DataFrame(ROWS), pyarrow.Table.from_pylist(ROWS), Polars(), columns):
        assert _task(table, "dataset").written()["path"] == write_rows(ROWS)


def test_rows_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Of what does not say how many it has; a list may be as long as it is."""
    monkeypatch.setattr("gnomon.training.objects._MOST_ROWS", 3)
    write_rows(ROWS)
    with pytest.raises(ConfigError, match=r"dataset gave 3 rows and may have no end; .* dataset=itertools.islice"):
        write_rows(ROWS[0] for _ in itertools.count())


def test_numbers_and_kinds_of_torch_are_those_of_a_file():
    """Scalars, arrays, devices and types are what they say; another object is refused with its name."""
    given = {"steps": torch.tensor(3), "device": torch.device("cpu"), "dtype": torch.float32, "b": {"c": torch.ones(2)}}
    found = dict(_flat(given))

    assert found == {"steps": 3, "device": "cpu", "dtype": "float32", "b.c": [1.0, 1.0]}
    with pytest.raises(ConfigError, match="sampling is object; give text, a number, a list or a dict"):
        dict(_flat({"sampling": object()}))


def test_a_run_is_named_by_its_folder_or_itself(tmp_path: Path):
    """What `train` returned stands for its folder; anything else is refused, not a TypeError."""
    run = Result(tmp_path, tmp_path, 1, ())
    for verb in (gnomon.resume, gnomon.load, gnomon.evaluate, lambda run: gnomon.continue_(run, steps=3)):
        with pytest.raises(UserError, match=r"has no experiment.toml|is no run, so the task must be named"):
            verb(run)
        with pytest.raises(UserError, match=r"named by its folder.* got list|is a run, a model's folder .* not list"):
            verb([])


NO_ARGUMENTS = [
    None, 3, 3.5, True, "", " ", "nope", "a\0b", [], {}, (), b"x", object(), Path("nope"), lambda: 0, int,
    float("nan"), iter(()), {1}, [None], re, torch.zeros(2), GRPO,
]  # fmt: skip
FIRST: dict[str, Callable[[Any], Any]] = {
    "dissect": lambda given: gnomon.dissect(given, "grpo"),
    "load": gnomon.load,
    "resume": gnomon.resume,
    "continue_": lambda given: gnomon.continue_(given, steps=3),
    "evaluate": gnomon.evaluate,
    "evaluate, task": lambda given: gnomon.evaluate("tiny-sums", task=given),
    "export": lambda given: gnomon.export(given, "my-model"),
    "export, folder": lambda given: gnomon.export("nope", given),
    "push_to_hub": lambda given: gnomon.push_to_hub(given, "a/b"),
    "push_to_hub, repository": lambda given: gnomon.push_to_hub("nope", given),
    "train": gnomon.train,
    "sft": gnomon.sft,
}


@pytest.mark.parametrize("function", FIRST)
@pytest.mark.parametrize("given", NO_ARGUMENTS, ids=lambda given: type(given).__name__)
def test_every_public_function_refuses_what_it_cannot_take(
    function: str, given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """None, numbers, empty values and objects of other kinds in the first places: one message of at most five lines."""
    monkeypatch.chdir(tmp_path)
    if function == "evaluate, task" and given is None:
        return  # the questions that the model's run held out
    with pytest.raises(UserError) as refused:
        FIRST[function](given)
    assert len(str(refused.value).splitlines()) <= 5


WITHOUT_TORCH = [
    ('train(model="tiny", dataset="arithmetik")', "did you mean 'arithmetic'"),
    ('train(model="tiny", dataset=ROWS, rewards="numerik")', "did you mean 'numeric'"),
    ('train(model="tiny", dataset=ROWS, rewards=["numeric", {"kind": "numerik"}])', "did you mean 'numeric'"),
    ('train(model="tiny", dataset=ROWS, rewards=[(own, 0.5), "numerik"])', "did you mean 'numeric'"),
    ('train(model="tiny", dataset=ROWS, algorithm="grop")', "did you mean 'grpo'"),
    ('train(model="tiny", dataset=ROWS, algorithm={"preset": "grpo", "aggregate": "TokenMeen"})', "'TokenMean'"),
    ('train(model="tiny", dataset=ROWS, algorithm=loss, stepz=3)', "did you mean 'steps'"),
    ('train(model="tini", dataset=ROWS)', "unknown model 'tini'"),
    ('train("tini")', "did you mean 'tiny'"),
    ('train("tiny", learning_rate="fast")', "should be a number"),
    ('train("tiny", lora={"targets": ("foo",)})', "unknown module 'foo'"),
    ('train("tiny", rollouts_per_step=30)', "is not a multiple of the 8 rollouts"),
    ('train("tiny", run_dir=__file__)', "is a file, so no run"),
    ('train("tiny", environment="gone.py:Own")', "gone.py does not exist"),
    ('train(model="tiny", dataset=[{"prompt": "a"}], rewards="numeric")', "answer: missing; the row has prompt"),
    ('train(model="tiny", dataset=ROWS, eval_dataset=[{"prompt": "a"}], rewards="numeric")', "answer: missing"),
    ('sft(model="tiny", dataset=[{"prompt": "a"}])', "answer: missing"),
    ('sft(model="tiny", dataset=ROWS, algorithm="grpo")', "trains on the dataset's answers, and algorithm = 'grpo'"),
    ('continue_("gone", steps=3)', "there is no run gone"),
    ('resume("gone")', "there is no run gone"),
    ('load("gone")', "there is no run gone"),
    ('evaluate("tiny", task="arithmetik")', "did you mean 'arithmetic'"),
    ('evaluate("tiny")', "tiny is no run, so"),
    ('evaluate("runs/gone")', "there is no folder runs/gone"),
    ('evaluate("tini", task="arithmetic")', "unknown model 'tini'"),
    ('train(model="tiny", dataset=ROWS, algorithm={"preset": "grpo", "critic": {"clip": 3.0}})', "has no reader"),
    ('train("tiny", **{"algorithm.surrogate.of.trust": 3})', "algorithm.surrogate: unknown key 'of'"),
    ('train("tiny", rewards={"kind": "model", "mean": 3.0})', "rewards[0].verifier: missing model"),
    ('sft("tiny", **{"algorithm.advantage": "Gae"})', "algorithm 'sft'"),
    ('Experiment(model="tiny", task="arithmetic", algorithm="grop")', "did you mean 'grpo'"),
    ('Experiment(model="tiny", task="arithmetic", algorithm="grpo", steps="many")', "steps = 'many'"),
    ('Experiment(model="tiny", task="arithmetic", algorithm="grpo", rewards="numerik")', "did you mean 'numeric'"),
    ('Experiment(model="tiny", task="arithmetic", algorithm="grpo", lora={"rank": -1})', "rank must be at least 1"),
    ('Experiment(model="tiny", task="arithmetic", algorithm="grpo", engine="vlm")', "engine.kind = 'vlm'"),
]
PROGRAM = """
import sys
import gnomon
ROWS = [{"prompt": "1+1=", "answer": "2"}]
def own(completion): return 1.0
def loss(view): return view.current
for call in sys.stdin.read().splitlines():
    try:
        eval("gnomon." + call)
    except gnomon.UserError as error:
        print(*str(error).splitlines(), *sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_what_is_wrong_is_refused_without_torch(tmp_path: Path):
    """A wrong name or value from Python costs no import of torch or transformers, which takes seconds."""
    (tmp_path / "own.py").write_text(PROGRAM)
    calls = "\n".join(call for call, _ in WITHOUT_TORCH)
    done = subprocess.run([sys.executable, "own.py"], input=calls, capture_output=True, text=True, cwd=tmp_path)

    assert done.stderr == ""
    for (call, said), line in zip(WITHOUT_TORCH, done.stdout.splitlines(), strict=True):
        assert said in line, call
        assert not line.endswith(("torch", "transformers")), call


def test_an_iterator_is_not_used_up_by_what_is_refused():
    """A generator of rows serves the call after the one that had a wrong name."""
    rows = iter(ROWS)
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        trained(dataset=rows, rewards="numerik")
    assert trained(dataset=rows, rewards="numeric", steps=0).steps == 0


def test_a_dissection_says_which_argument_it_cannot_take():
    """A batch, an algorithm and log-probabilities, each by its name and what to give."""
    batch = gnomon.testing.make_batch([1.0, 0.0], [[1, 1], [1]])
    with pytest.raises(ConfigError, match="batch is NoneType; give a file that a run recorded"):
        gnomon.dissect(None, "grpo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="algorithm = None: should be the name of a preset"):
        gnomon.dissect(batch, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="current is int; give a tensor"):
        gnomon.dissect(batch, "grpo", 3)  # type: ignore[arg-type]


def test_the_same_rows_are_written_once():
    """The file's name is a digest of its content, so a second run and a resumed one find it."""
    assert write_rows(ROWS) == write_rows(row for row in ROWS)
    assert write_rows(ROWS) != write_rows(ROWS[1:])


@pytest.mark.parametrize("form", ["dataset", "numpy", "iterable", "arrow", "batch"])
def test_classes_of_a_dataset_in_memory_keep_their_names(form: str):
    """A `datasets.Dataset` of whatever format, one that streams and a table of Arrow are read as their file is."""
    import datasets

    features = datasets.Features(
        {"prompt": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    made = datasets.Dataset.from_list([{"prompt": "a", "label": 1}, {"prompt": "b", "label": 0}], features=features)
    forms: dict[str, Any] = {
        "dataset": lambda: made.select([1, 0]).select([1, 0]),
        "numpy": lambda: made.with_format("numpy"),
        "iterable": lambda: made.to_iterable_dataset(),
        "arrow": lambda: made.with_format("arrow")[:],
        "batch": lambda: made.with_format("arrow")[:].to_batches()[0],
    }
    task = _task(forms[form](), "dataset").written()

    assert [q.columns["answer"] for q in TableTask(task["path"]).questions().questions] == ["yes", "no"]


def test_a_stream_of_classes_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As other rows without one are; and rows that the user's function makes are taken as it makes them."""
    import datasets

    features = datasets.Features(
        {"prompt": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    made = datasets.Dataset.from_list([{"prompt": "a", "label": 1}], features=features)
    monkeypatch.setattr("gnomon.training.objects._MOST_ROWS", 3)

    for stream in (made.to_iterable_dataset(), made.remove_columns("label").to_iterable_dataset()):
        with pytest.raises(ConfigError, match=r"gave 3 rows and may have no end; .* dataset=rows\.take\(10000\)"):
            write_rows(stream.repeat(None))
    some = TableTask(write_rows(made.to_iterable_dataset().repeat(None).take(2))).questions().questions
    assert {question.columns["answer"] for question in some} == {"yes"}
    own = made.with_transform(lambda rows: {"prompt": rows["prompt"], "label": ["mine"]})
    assert TableTask(write_rows(own)).questions().questions[0].columns["answer"] == "mine"


def test_a_loaded_model_trains_and_is_found_again():
    """A transformers model with its tokenizer is written as a folder, with the weights that it had."""
    source = trained(rewards="numeric", steps=0).model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    run = trained(model=(model, tokenizer), rewards="numeric", steps=0)

    assert torch.equal(run.model().lm_head.weight, model.lm_head.weight)
    assert trained(model=model, rewards="numeric", steps=0).steps == 0, "the tokenizer is that of the model's folder"


@pytest.fixture(scope="module")
def loaded() -> Callable[[], tuple[Any, Any]]:
    """What loads a model and its tokenizer anew."""
    source = gnomon.testing.trial_model()
    return lambda: (AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source))


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "chat template": lambda model, tokenizer: setattr(tokenizer, "chat_template", "{{ messages }}"),
    "generation config": lambda model, tokenizer: setattr(model.generation_config, "temperature", 0.3),
    "config": lambda model, tokenizer: setattr(model.config, "rms_norm_eps", 1e-3),
    "weight": lambda model, tokenizer: model.lm_head.weight.data.add_(1),
    "added token": lambda model, tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["<|go|>"]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_written_anew(change: str, loaded: Callable[[], tuple[Any, Any]]):
    """Whatever changed of model or tokenizer since the last call is in the files that are trained on."""
    model, tokenizer = loaded()
    before = write_model(model, tokenizer)
    CHANGES[change](model, tokenizer)
    after = write_model(model, tokenizer)

    assert after != before
    assert write_model(model, tokenizer) == after
    assert AutoTokenizer.from_pretrained(after).chat_template == tokenizer.chat_template
    assert model.generation_config.temperature == json.loads(Path(after, "generation_config.json").read_text()).get(
        "temperature"
    )
    assert not [each.name for each in Path("runs/inputs").iterdir() if each.name.startswith("tmp")]


class Halved(torch.nn.Linear):
    """A layer with the weights of another and numbers of its own."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) / 2


def half(*given: Any) -> Any:
    return given[-1]


def halved(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.up_proj = Halved(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.lm_head.requires_grad_(False), "requires_grad is False for 1 weights"),
        (lambda model: model.requires_grad_(False), "model.requires_grad_(True)"),
        (lambda model: model.model.norm.requires_grad_(False), "(model.norm.weight)"),
        (lambda model: model.register_forward_hook(half), "model: the model computes with half"),
        (
            lambda model: model.model.layers[0].register_forward_pre_hook(half),
            "model: model.layers.0 computes with half",
        ),
        (
            lambda model: model.model.norm.register_forward_hook(functools.partial(half, 1)),
            "model: model.norm computes",
        ),
        (lambda model: setattr(model, "forward", functools.partial(half, 1)), "model: the model computes with"),
        (lambda model: setattr(model.model.layers[0].mlp, "forward", half), "model.layers.0.mlp computes with half"),
        (lambda model: setattr(model.model.norm, "forward", lambda rows: rows), "<lambda>"),
        (halved, "model.layers.0.mlp.up_proj computes with Halved of this program"),
    ],
)
def test_a_model_that_no_file_holds_is_refused(
    change: Callable[[Any], Any], said: str, loaded: Callable[[], tuple[Any, Any]]
):
    """Hooks, layers and functions of the program and frozen weights would be lost, and another model be trained."""
    model, tokenizer = loaded()
    change(model)

    with pytest.raises(ConfigError, match=re.escape(said)):
        write_model(model, tokenizer)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_what_libraries_hook_into_a_model_is_no_code_of_the_program(loaded: Callable[[], tuple[Any, Any]]):
    """A compiled model, and the hook with which transformers lets gradients reach a checkpointed layer."""
    model, tokenizer = loaded()
    model.enable_input_require_grads()

    assert Path(write_model(torch.compile(model), tokenizer), "model.safetensors").is_file()


def test_a_run_of_objects_is_resumed_without_them():
    """What lived in memory was written; `gnomon.resume` reads it from there."""
    run = trained(rewards=[ours], steps=1)

    assert gnomon.resume(run.directory) == run
    assert gnomon.evaluate(run.directory).prompts == 2


def test_training_on_everything_has_no_evaluation():
    """held_out.size = 0 trains on all rows; the run, its record and its report do without evaluations."""
    run = trained(rewards="numeric", held_out={"size": 0})

    assert run.evaluations == ()
    assert run.metrics["rollout/reward_mean"]
    assert (run.directory / "report.html").is_file()
    assert main(["train", str(run.directory / "experiment.toml"), "steps=0"]) == 0


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_what_the_pages_show_runs(page: str):
    """The block of Python in README and in docs/python.md, on a model and with steps that take seconds."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    quick = block.replace("smollm2-135m-instruct", "tiny").replace("steps=50", "steps=1, rollouts_per_step=16")
    exec(compile(quick, page, "exec"), {"__name__": "__main__"})

    assert list(Path("runs").glob("*/experiment.toml"))


@pytest.mark.parametrize("environment", [Echo, {"use": Echo}], ids=["a class", "a table"])
def test_an_environment_may_be_a_class(environment: Any):
    """A class of the program answers back, alone or with settings beside it."""
    table = environment if isinstance(environment, dict) else {"use": environment}
    run = trained(environment={**table, "max_turn_tokens": 2}, rewards=None, max_completion_length=8)

    assert run.metrics["rollout/reward_mean"] == [1.0]
    assert trained(environment=environment, rewards=None, steps=0).steps == 0


def test_settings_have_every_form():
    """Nested dicts, dotted keys, dataclasses and other libraries' names say the same."""
    run = trained(
        rewards="numeric", steps=0, learning_rate=2e-3, num_generations=4, learner={"optimizer": {"warmup_steps": 2}},
        held_out=HeldOut(size=3, fraction=0.5), algorithm={"preset": "dapo", "surrogate": {"trust": {"high": 0.3}}},
        **{"checkpoints.every": 7},
    )  # fmt: skip
    written = load(run.directory / "experiment.toml").experiment

    assert written.learner.optimizer.learning_rate == 2e-3
    assert written.learner.optimizer.warmup_steps == 2
    assert written.algorithm.num_generations == 4
    assert written.held_out == HeldOut(size=3, fraction=0.5)
    assert written.checkpoints.every == 7


def test_an_editor_knows_every_key():
    """The typed keywords are the keys of an experiment and the names that are understood at its top."""
    named = {"model", "algorithm", "rewards"}
    special = {
        "prompts_per_step",
        "num_generations",
        "eval_dataset",
        "train_dataset",
        "reward_funcs",
        "reward_weights",
        "callbacks",
    }
    known = {f.name for f in fields(Experiment)} - named | special

    assert known <= set(Settings.__annotations__) <= known | set(ALIASES)


def test_training_within_a_notebook_and_a_thread():
    """An event loop that runs, and a thread that is not the main one, train alike."""

    async def notebook() -> int:
        return int(trained(rewards=[ours], steps=1).steps)

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(trained(rewards=[ours], steps=1).steps))
    thread.start()
    thread.join()

    assert [asyncio.run(notebook()), *found] == [1, 1]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"model": None}, "train needs a model and a dataset"),
        ({"dataset": []}, "dataset holds no rows"),
        ({"dataset": [1, 2]}, "dataset: row 1 is int, and should be a dict"),
        ({"dataset": {"train": [{"prompt": "a"}]}}, "dataset is dict with train; give one split"),
        ({"dataset": [{"prompt": "a", "x": object()}]}, "dataset: row 1, column 'x' cannot be written as JSON: object"),
        ({"dataset": 7}, "dataset is int; give a list of dicts"),
        ({"rewards": 7}, "a reward is int; give a function"),
        ({"rewards": ["numerical"]}, "did you mean 'numeric'"),
        ({"rewards": [ours], "reward_funcs": [ours]}, "reward_funcs is TRL's name for rewards, which is given too"),
        ({"rewards": [ours], "reward_weights": [1.0, 2.0]}, "reward_weights has 2 numbers for 1 rewards"),
        ({"model": 7}, "model is int; give a name, a folder, a transformers model"),
        ({"model": ("tiny", "tiny", "tiny")}, "model is tuple of 3, str, str; give a name or a folder alone"),
        ({"model": ROWS}, "rows are dataset=rows"),
        ({"model": ("tiny", None)}, "model is tuple of 2, str, NoneType; give a name or a folder alone"),
        ({"model": ""}, "model = '' is neither a folder"),
        ({"experiment": ROWS}, "the first argument is list, and an experiment is a TOML file or a built-in name"),
        ({"run_dir": ROWS}, "run_dir is list; give the folder of a new run, and rows as dataset=rows"),
        ({"run_dir": ""}, "run_dir = '' names no folder"),
        ({"run_dir": "a\0b"}, r"run_dir = 'a\\x00b' names no folder"),
        ({"eval_dataset": []}, "eval_dataset holds no rows"),
        ({"dataset": {}}, "dataset is dict with nothing; give one split"),
        ({"dataset": {"prompt": ["a", "b"], "answer": ["c"]}}, "columns as lists of one length"),
        ({"processing_class": object()}, r"here a tokenizer is given with its model: model=\(model, tokenizer\)"),
        ({"peft_config": object()}, "peft_config is an argument of other trainers; here an adapter is lora="),
        ({"rewards": Judge}, r"a reward is the class Judge; give an object of it: rewards=\[Judge\(\)\]"),
        ({"rewards": Judge.__call__}, "is a method of a class; give that of an object"),
        ({"rewards": lambda text: 1.0}, "reward '<lambda>' .text.: unknown parameter 'text'"),
        ({"rewards": {"mine": ours}}, "a reward is a dict with mine; give a function, or a dict with a kind"),
        ({"rewards": (ours, "2"), "dataset": ROWS}, "unknown kind '2'"),
        ({"rewards": [(ours, "2")]}, "a reward's weight is '2'; give a number"),
        ({"rewards": [ours], "reward_weights": ["a"]}, "a reward's weight is 'a'; give a number"),
        ({"algorithm": torch}, "algorithm is module; give a preset such as 'spo'"),
        ({"algorithm": type(GRPO)}, "algorithm is the class Algorithm; give a preset"),
        ({"sampling": 3, "temperature": 0.5}, "sampling = 3: a section has settings of its own"),
        ({"environment": 7}, "environment is int; give a class"),
        ({"algorithm": "grop"}, "did you mean 'grpo'"),
        ({"lerning_rate": 1}, "did you mean 'learning_rate'"),
        ({"learner": {"optimiser": {}}}, "did you mean 'optimizer'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(keywords: dict[str, Any], message: str):
    """Before a model is loaded or a run directory is made."""
    with pytest.raises(UserError, match=message):
        trained(**{"rewards": "numeric", **keywords})
    assert not list(Path().glob("runs/run-*"))


def test_what_no_other_process_can_have_is_refused():
    """A lock in a closure is named before training, with what to do."""
    lock = threading.Lock()

    def guarded(completion: str) -> float:
        with lock:
            return 0.0

    with pytest.raises(ConfigError, match=r"reward_0 cannot be handed to the processes .*lock.*inside the function"):
        trained(rewards=guarded)


def test_a_file_of_objects_that_was_changed_is_not_run():
    """The pickle is read only as it was written."""
    named = write_callables({"score": ours}, "rewards")["score"]
    pickled = Path(named.rpartition(":")[0]).with_suffix(".pkl")
    pickled.write_bytes(pickled.read_bytes() + b" ")

    with pytest.raises(gnomon.UserError, match=r"rewards\.pkl is not the file that was written"):
        trained(rewards=named)
