"""The papers' experiments: their numbers, the hardware that they are planned for, and their twins for two cores."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.config.reading import built_in

RECIPES = {
    "spo-qwen3-8b-dapo": ("spo", 2048, 1, 8, 16_384),
    "gspo-qwen3-30b-a3b": ("gspo", 8192, 16, 4, 8192),
    "p3o-qwen3-4b-deepscaler": ("p3o", 8192, 16, 16, 16_384),
    "vapo-qwen2.5-32b": ("vapo", 8192, 16, 16, 20_480),
    "grpo-qwen3-0.6b-gsm8k": ("grpo", 256, 8, 1, 512),
    "spo-qwen3-4b-gsm8k": ("spo", 512, 1, 8, 512),
}
"""Algorithm, answers a step, answers a prompt, updates of a step, most tokens."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_papers_numbers(name: str):
    """Batch, group, updates and length of each recipe, and the same algorithm in its twin."""
    experiment, twin = load(name).experiment, load(f"{name}-smol").experiment
    algorithm = experiment.algorithm

    assert RECIPES[name] == (
        algorithm.name, experiment.rollouts_per_step, algorithm.num_generations, algorithm.updates.total,
        experiment.sampling.max_completion_length,
    )  # fmt: skip
    assert twin.algorithm.name == algorithm.name
    assert type(twin.algorithm.surrogate) is type(algorithm.surrogate)
    assert (twin.algorithm.critic is None) == (algorithm.critic is None)
    assert twin.engine.rounding == experiment.engine.rounding
    own, papers = (None if e.environment is None else e.environment.tools for e in (twin, experiment))
    assert own == papers


@pytest.mark.parametrize("name", list(RECIPES)[:4])
def test_a_recipe_of_a_paper_names_it_and_marks_what_is_ours(name: str):
    """The head names the paper, and lines that are ours carry the mark."""
    text = built_in()[name]

    assert re.search(r"arXiv \d{4}\.\d{5}", text.splitlines()[0] + text.splitlines()[1])
    assert "# ours" in text


@pytest.mark.parametrize(
    "asked",
    [
        *(
            pytest.param((name, "--hardware", "h100", "--gpus", "8"), marks=[pytest.mark.slow] if number else [])
            for number, name in enumerate(list(RECIPES)[:4])
        ),
        ("grpo-qwen3-0.6b-gsm8k", "--hardware", "rtx4090", "--gpus", "1"),
        ("grpo-qwen3-0.6b-gsm8k", "--hardware", "a10", "--gpus", "1"),
        ("spo-qwen3-4b-gsm8k", "--hardware", "h100", "--gpus", "1"),
    ],
    ids=lambda asked: " ".join(asked),
)
def test_each_recipe_is_planned_for_its_hardware(asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    """Without a network or a GPU, from the shape of its model."""
    assert main(["plan", *asked]) == 0
    assert "a step" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_first_two_steps_of_a_twin(name: str, tmp_path: Path):
    """Each twin trains two steps on this machine and writes its metrics."""
    small = [
        "steps=2",
        "held_out.size=4",
        "task.size=60",  # SPO asks each question eight times before its first step
        "rollouts_per_step=16",
        "checkpoints.every=0",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    critic = ["algorithm.critic.pretraining.steps=1"] if name.startswith("vapo") else []

    assert main(["train", f"{name}-smol", *small, *critic]) == 0

    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


def test_every_recipe_is_on_the_page():
    """docs/recipes.md names each one."""
    page = (Path(str(files("gnomon"))).parents[1] / "docs" / "recipes.md").read_text()

    assert all(f"`{name}`" in page for name in RECIPES)
