"""What a run remembers of its prompts and responses survives a crash: streaks, fixed values, responses to imitate."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.random_model import RANDOM
from tests.training.runs import broken_off, measured, same, trace

from gnomon.config.experiment import load
from gnomon.records.manifest import write_manifest
from gnomon.records.reading import RunRecord
from gnomon.training.api import resume, train_experiment

STEPS, BROKEN = 4, 2
# A reward that an untrained model earns now and then, so that each step has something to learn and to keep.
COMMON = ("rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=8", "evaluation.before=false")
GROUPS = ("rollouts_per_step=8", "algorithm.num_generations=2")
RUNS = {
    # a step asks half of the prompts, so the second epoch begins with the third step
    "curriculum": (*GROUPS, "algorithm.sampler={piece='Greso', initial=0.2}"),
    "replay": (*GROUPS, "algorithm.replay={every=1, rows=3, per_prompt=2}"),
    "tracker": ("rollouts_per_step=4", "algorithm=a-star-po", "algorithm.tracker.n0=2"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function from the part that remembers, and steps, to an uninterrupted run with all its checkpoints.

    Another number of steps comes with another seed, for initial values are sampled before the first step.
    """
    made: dict[tuple[str, int], Path] = {}

    def run(part: str, steps: int = STEPS) -> Path:
        if (part, steps) not in made:
            made[part, steps] = tmp_path_factory.mktemp(f"{part}-{steps}") / "run"
            options = [
                f"steps={steps}",
                f"seed={int(steps != STEPS)}",
                "checkpoints.every=1",
                "checkpoints.keep_last=9",
                *COMMON,
                *RUNS[part],
            ]
            train_experiment(load(RANDOM, options), made[part, steps])
        return made[part, steps]

    return run


@pytest.mark.parametrize("part", RUNS)
def test_a_crash_changes_nothing(tmp_path: Path, whole: Callable[..., Path], part: str):
    """Prompts, metrics, weights and the rest of the state are those of the run that was not broken off."""
    run = broken_off(whole(part), tmp_path / "run", BROKEN)
    resume(run)

    same(trace(run, STEPS), trace(whole(part), STEPS))


@pytest.mark.parametrize("part", RUNS)
def test_what_was_remembered_is_needed(tmp_path: Path, whole: Callable[..., Path], part: str):
    """With that part as it is in another run without a step, and all else restored, the rest of the run is another."""
    run = broken_off(whole(part), tmp_path / "run", BROKEN)
    checkpoint, fresh = (path / "checkpoints" for path in (run, whole(part, 0)))
    for ending in ("safetensors", "json"):
        name = f"{part}.{ending}"
        shutil.copy2(fresh / "step-0" / "state" / name, checkpoint / f"step-{BROKEN}" / "state" / name)
    write_manifest(checkpoint / f"step-{BROKEN}", BROKEN)
    resume(run)

    assert trace(run, STEPS)["metrics"][BROKEN:] != trace(whole(part), STEPS)["metrics"][BROKEN:]


# What a filter refuses is learned by whoever remembers prompts, and by nobody else.

ONE_STEP = (
    "steps=1", "task.size=40", "held_out.size=5", "rollouts_per_step=8", "evaluation.before=false", "grading.workers=1",
    "sampling.max_completion_length=3", "algorithm=grpo",
)  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        "algorithm.keep={piece='Informative', part='always', max_attempts=2}",
        "algorithm={preset='reinforce', num_generations=4, keep={piece='Informative', part='always', max_attempts=1}}",
        "algorithm={preset='grpo', num_generations=4, regularizers=[{piece='PositiveNll'}], "
        "keep={piece='Informative', part='always', max_attempts=1}}",
    ],
)
def test_nothing_is_learned_of_a_step_whose_every_group_was_refused(more: str, tmp_path: Path):
    """Their rewards differ in another part, meet no baseline, or are imitated: all the same no weight moves, and
    metrics and records call them refused.
    """
    parts = "[{kind='format', name='always', pattern='(?s).*'}, {kind='format', name='other', pattern='[!-P].*'}]"
    settings = [*ONE_STEP, "algorithm.num_generations=4", more, f"rewards={parts}", "evaluation.before=true"]
    run = tmp_path / "run"
    train_experiment(load(RANDOM, settings), run)
    (row,) = measured(run / "metrics.jsonl")
    recorded = list(RunRecord(run).rollouts(1))

    assert (row["learner/updates"], row["tokens/trained"]) == (0, 0)
    assert row["tokens/refused"] == row["tokens/generated"] > 0
    assert row["stream/refused_rollouts"] == len(recorded)
    assert not any(each.is_kept for each in recorded)


def test_a_tracker_is_told_of_groups_that_a_filter_refuses(tmp_path: Path):
    """Otherwise a prompt that is always solved would keep its first value, and be drawn again and again."""
    settings = (
        "algorithm.num_generations=2", "algorithm.keep={piece='Informative', max_attempts=3}",
        "algorithm.sampler=Prioritized", "algorithm.tracker={piece='TrackerConfig', initial='prior'}",
        "rewards=[{kind='format', pattern='[!-P].*'}]",
    )  # fmt: skip
    train_experiment(load(RANDOM, [*ONE_STEP, *settings]), tmp_path / "run")
    recorded = list(RunRecord(tmp_path / "run").rollouts(1))
    visits = load_file(tmp_path / "run" / "checkpoints" / "step-1" / "state" / "tracker.safetensors")["visits"]

    assert {each.is_kept for each in recorded} == {True, False}
    assert int(visits.sum()) == len(recorded)
