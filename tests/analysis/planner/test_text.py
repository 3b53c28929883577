"""What `gnomon plan --hardware` says, and that what it says can be used."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.analysis.planner.deployment import Deployment, Lengths, job_of
from gnomon.analysis.planner.hardware import SOURCES
from gnomon.analysis.planner.layout import stages
from gnomon.analysis.planner.search import best_layout, engine_parts, estimated, layouts, timing
from gnomon.analysis.planner.text import forecast, limits
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.training.resolve import Resolved

Capture = pytest.CaptureFixture[str]
ASKED = ("plan", RANDOM, "model=qwen3-8b", "sampling.max_completion_length=512", "--hardware", "h100", "--gpus", "8")


def refused(capsys: Capture, *arguments: str) -> str:
    """Return what a command says that ends with 2 and prints nothing else."""
    code = main(arguments)
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    return said.err


def test_a_cluster_is_planned_in_words(capsys: Capture):
    """Who computes where, memory of both kinds of device, seconds, bottleneck, settings, and what is assumed."""
    assert main(ASKED) == 0
    said = capsys.readouterr().out

    for words in (
        "qwen3-8b (8.2 billion parameters) on 8 h100 in 1 node: ",
        "A step: 16 prompts of 512 tokens, 8 answers each of 256 on average and 512 at most",
        "Learner: ",
        "Engine: ",
        "Each stage by itself: answering",
        "Together, simulated: ",
        "Bottleneck: ",
        "Set: cluster=auto learner.processes=",
        "With max_staleness = 1 neither side waits",
        "computed, not measured",
        "assumed: mixture 0.5",
    ):
        assert words in said


def test_a_tiny_model_is_planned_in_units_that_fit_it(capsys: Capture):
    """Kilobytes and milliseconds rather than zeros, one of a thing in the singular, and what is slowest: grading."""
    assert main(["plan", RANDOM, "--hardware", "h100", "--gpus", "2"]) == 0
    said = capsys.readouterr().out

    for words in (
        "tiny (90,624 parameters) on 2 h100 in 1 node: 1 learns, 1 answers as 1 engine of 1; 2 processes grade",
        "8 answers each of 1.5 on average and 3 at most; 192 tokens.",
        "in 1 pass of ",
        "publishes 362 kB, and brings 3.07 kB of answers",
        "Bottleneck: grading.",
        "Grading keeps 2.0 of 2 processes busy all the time if an answer takes 10 ms",
    ):
        assert words in said
    numbers = said.partition("These numbers are computed")[0]
    assert not re.search(r"(?<![0-9.])0(\.0+)? (GB|s|billion|million)\b|e-0", numbers)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_settings_that_the_plan_chooses_itself_are_named(form: list[str], capsys: Capture):
    """Whether they come from the experiment or the command line, and also where they are what is usual."""
    settings = ["engine.count=2", "learner.processes=1"]
    assert main([*ASKED, *settings, *form]) == 0
    said = capsys.readouterr().out

    words = "ignores learner.processes = 1 and engine.count = 2; the line Set shows its choice."
    assert words in (json.loads(said)["notes"][-1] if form else said.splitlines()[0])
    assert main([*ASKED, *form]) == 0
    assert "ignores" not in capsys.readouterr().out


def test_a_cluster_is_planned_in_numbers(capsys: Capture):
    """One JSON object: the layout and memory fit, tokens and seconds agree, every efficiency has its source."""
    assert main([*ASKED, "--json", "--prompt-tokens", "100", "--answer-tokens", "200"]) == 0
    plan = json.loads(capsys.readouterr().out)
    layout, flow = plan["layout"], plan["simulated"]

    assert layout["learners"] + layout["engines"] * layout["parts"] <= 8
    assert sum(plan["learner_bytes"].values()) <= 0.9 * plan["hardware"]["memory"]
    assert flow["tokens_per_second"] == pytest.approx(flow["trained"] / flow["seconds"])
    assert flow["answer_mean"] == pytest.approx(200, rel=0.1)
    assert set(plan["efficiencies"]) == set(SOURCES)


def test_the_settings_are_overrides_that_an_experiment_takes(make_place: Callable[..., Deployment]):
    """What it says to set can be given to `gnomon train` as it stands."""
    found = forecast(make_place(devices=8, prompts=8, staleness=1))
    experiment = load(RANDOM, found.settings).experiment

    assert experiment.learner.processes == found.found.layout.learners
    assert experiment.engine.count == found.found.layout.engines
    assert experiment.cluster.address == "auto"


def test_a_job_is_what_the_experiment_says():
    """Prompts, answers, staleness, passes over answers, adapters, critic: from the experiment's own fields."""
    plain = job_of(Resolved(load(RANDOM).experiment), 100)
    assert (plain.prompts, plain.generations, plain.scored, plain.epochs) == (16, 8, 0, 1)
    assert plain.answers == Lengths(1.5, 3)

    late = job_of(Resolved(load(RANDOM, ["max_staleness=2", "staleness.slack=1", "lora.rank=4"]).experiment), 100, 2.0)
    assert (late.staleness, late.slack, late.rank, late.answers.mean) == (2, 1, 4, 2.0)
    assert late.scored >= plain.scored

    taught = job_of(Resolved(load(RANDOM, ["algorithm=vc-ppo"]).experiment), 100)
    assert taught.has_critic
    assert taught.is_undone


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--hardware", "h10"), "unknown hardware 'h10'"),
        (("--gpus", "0"), "--gpus 0: give from 1 to 100,000"),
        (("--gpus", "1", "max_staleness=1"), "one GPU answers and learns in turn, and max_staleness = 1 lets one"),
        (("--gpus", "12"), "a node has 8; give a multiple of 8 for more nodes"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0 must be above 0"),
        (("--prompt-tokens", "inf"), "--prompt-tokens inf must be above 0"),
        (("--answer-tokens", "600"), "--answer-tokens 600 must be from 1 to 512, the longest response"),
        (("--answer-tokens", "0"), "--answer-tokens 0 must be from 1 to 512"),
        (("--answer-tokens", "-3"), "--answer-tokens -3 must be from 1 to 512"),
        (("model=qwen3-9b",), "unknown model 'qwen3-9b'"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: tuple[str, ...], said: str, capsys: Capture):
    """Exit code 2, one sentence that names what was given and what is known."""
    assert said in refused(capsys, *ASKED, *change)


@pytest.mark.parametrize("hardware", ["rtx3090", "rtx4090", "rtx5090", "a10", "l4", "l40s", "a100-40", "a100-80"])
def test_one_gpu_learns_and_answers_in_turn(hardware: str, capsys: Capture):
    """No cluster, no weights that travel, and both sides of its memory fit: on any card, from 24 GB."""
    asked = ("plan", RANDOM, "model=Qwen/Qwen3-0.6B", "sampling.max_completion_length=512", "--gpus", "1", "--json")
    assert main([*asked, "--hardware", hardware]) == 0
    plan = json.loads(capsys.readouterr().out)

    assert plan["stage_seconds"]["publishing"] == 0
    assert "cluster=auto" not in plan["settings"]
    for side in ("learner_bytes", "engine_bytes"):
        assert sum(plan[side].values()) <= 0.9 * plan["hardware"]["memory"]


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [
        (("model=Qwen/Qwen3-4B", "--hardware", "rtx4090", "--gpus", "1"), ("lora.rank=32", "--gpus 8")),
        (
            ("model=Qwen/Qwen3-8B", "--hardware", "rtx4090", "--gpus", "1", "sampling.max_completion_length=4096"),
            ("lora.rank=32 lora.base=int8", "lora.rank=32 lora.base=nf4"),
        ),
        (
            ("model=Qwen/Qwen3-4B", "--hardware", "h100", "--gpus", "1"),
            ("learner.optimizer.moments=8bit", "--hardware h200"),
        ),
        (("model=Qwen/Qwen2.5-32B", "--hardware", "h100", "--gpus", "8"), ("lora.rank=32", "learner.offload=true")),
    ],
)
def test_what_does_not_fit_says_what_to_set(arguments: tuple[str, ...], ways: tuple[str, ...], capsys: Capture):
    """Each way that the message names is one with which the same command passes; the first setting is planned too."""
    assert main(["plan", "quickstart", *arguments, "--json"]) == 2
    out, said = capsys.readouterr()
    plan = json.loads(out)

    assert said.count("\n") < 5
    assert " ".join(plan["changed"]) in said
    assert main(["plan", "quickstart", *arguments, *plan["changed"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**plan, "changed": []}
    for way in ways:
        assert way in said
        assert main(["plan", "quickstart", *arguments, *way.split()]) == 0


@pytest.mark.parametrize("model", ["{}", "{}/config.json"])
def test_a_folder_with_nothing_but_a_config_is_planned(model: str, tmp_path: Path, capsys: Capture):
    """Other hardware needs a shape and no weights; without --hardware the weights are asked for."""
    config = {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("plan", "quickstart", f"model={model.format(tmp_path)}")

    assert main([*asked, "--hardware", "rtx4090", "--gpus", "1"]) == 0
    assert "494.0 million parameters" in capsys.readouterr().out
    assert main(asked) == 2
    assert ("has no weights" in (said := capsys.readouterr().err)) or "give the folder" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", RANDOM, "--gpus", "8"), "are for --hardware"),
        (("plan", "spo-qwen3-8b-dapo", "--gpus", "8"), "are for --hardware"),  # whose model is not here
        (("plan", RANDOM, "--resolved", "--json"), "leave one out"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], said: str, capsys: Capture):
    """The usage is shown, with exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_model_that_one_device_cannot_serve_gets_engines_of_several(make_place: Callable[..., Deployment]):
    """235 billion in bfloat16 are 470 GB: engines of eight, set by name."""
    plan = forecast(make_place("qwen3-235b-a22b", devices=256, prompts=32, staleness=1, rank=16))

    assert plan.found.layout.parts == 8
    assert {"engine.kind=vllm", "engine.tensor_parallel=8"} <= set(plan.settings)


def test_a_device_with_room_for_few_answers_gets_a_second(make_place: Callable[..., Deployment]):
    """66 GB of weights leave 4 of 72 for keys and values: engines of more than one are estimated to be faster."""
    place = make_place("qwen3-32b", devices=32, prompts=16, staleness=1, answers=Lengths(2000, 8000), generations=16)
    alone = [layout for layout in layouts(place) if layout.parts == 1]

    best = best_layout(place)

    assert engine_parts(place) == 1
    assert best.layout.parts > 1
    assert estimated(place, best.stages) < min(estimated(place, stages(place, layout)) for layout in alone)


def test_parts_that_break_say_at_which_number(make_place: Callable[..., Deployment]):
    """A mixture of 235 billion on 256 devices: experts; with less memory saving and undoing, each with its number."""
    place = make_place("qwen3-235b-a22b", devices=256, prompts=32, staleness=1, is_undone=True)
    said = " ".join(limits(place, best_layout(place)))

    for words in ("no expert parallelism: for 22 billion parameters that a token meets, 235 billion are gathered",):
        assert words in said
    # 2.8 TB of masters and moments are copied, each share where it is: a node's is no limit here, and is one with less.
    assert "can be undone" not in said
    small = replace(place, hardware=replace(place.hardware, host_memory=1e11))
    less = " ".join(limits(small, best_layout(small)))
    assert "copies its share of the state, so that the step can be undone" in less
    assert "Saving copies a node's shares of the state in its memory: " in less
    assert "Saving" not in said


def test_a_broadcast_is_planned_as_one(make_place: Callable[..., Deployment]):
    """Its seconds are those of NCCL, engines stand still for all of it, no node holds what is published, and it needs
    vLLM; through the store the same plan names it.
    """
    told = {is_broadcast: forecast(make_place(devices=64, is_broadcast=is_broadcast)) for is_broadcast in (False, True)}
    store, sent = (told[is_broadcast].found.stages for is_broadcast in (False, True))

    assert sent.publishing == sent.by_nccl < store.publishing
    assert any("(cluster.transfer = 'nccl', not yet tried on GPUs)" in said for said in told[False].limits)
    assert not any("cluster.transfer" in said for said in told[True].limits)
    assert "engine.kind=vllm" in told[True].settings
    assert told[True].as_row()["host_bytes"]["published weights"] == 0
    pauses = [timing(one.place, one.found.layout, one.found.stages).pause for one in told.values()]
    assert pauses[0] < store.publishing
    assert pauses[1] == sent.publishing


@pytest.mark.parametrize(
    ("overrides", "said"), [(["lora.rank=8"], "adapters"), (["model=qwen3-235b-a22b"], "a mixture of experts")]
)
def test_a_broadcast_that_a_run_would_refuse_is_not_planned(overrides: list[str], said: str, capsys: Capture):
    """The message says what it cannot be had with."""
    told = refused(capsys, *ASKED, "cluster=auto", "cluster.transfer=nccl", *overrides)

    assert f"cluster.transfer = 'nccl' cannot be had with {said}; set cluster.transfer = 'store'" in told


def test_prompts_that_no_node_holds_are_named_as_what_does_not_fit(capsys: Capture):
    """Not the weights, which are next to nothing beside them."""
    told = refused(capsys, "plan", RANDOM, "--hardware", "h100", "--gpus", "8", "--prompt-tokens", "1e9")

    assert re.search(r"weights of tiny are 362 kB, keys and values of 8 answers of 1,000,000,00. tokens", told)
    assert "shorter prompts and answers" in told
