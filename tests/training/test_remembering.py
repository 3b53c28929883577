"""What a run remembers of its prompts and responses survives a crash: streaks, fixed values, responses to imitate."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.runs import broken_off, same, trace

from gnomon.config.experiment import load
from gnomon.records.manifest import write_manifest
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
