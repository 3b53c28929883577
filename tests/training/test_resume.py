"""A run that was stopped, killed or broken off goes on as if nothing had happened, bit for bit."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.random_model import RANDOM
from tests.training.runs import broken_off, same, signaled, trace

from gnomon.config.experiment import load
from gnomon.core.errors import CheckpointError, RunDirectoryError, Stopped
from gnomon.records.manifest import write_manifest
from gnomon.records.reading import RunRecord
from gnomon.training.api import resume, train_experiment
from gnomon.training.run import StopRequest

STEPS = 6
SIGNALED = 8
# A reward that an untrained model earns now and then, so that each step has something to learn.
REWARD = "rewards=[{kind='format', pattern='[!-P].*'}]"
COMMON = (REWARD, "task.size=40", "rollouts_per_step=16", "evaluation.every=4", "evaluation.samples=2")
# Bounds so wide that every drift is felt: between the usual ones a large learning rate always forgets fastest.
FELT = ("algorithm.tracker.rho_min=0.05", "algorithm.tracker.rho_max=0.9999", "algorithm.tracker.d_half=0.5")
SPO = ("algorithm=spo", "algorithm.updates.minibatches=2", "algorithm.tracker.n0=2", *FELT)
ALGORITHMS = {
    "grpo": ("algorithm.num_generations=4", "algorithm.updates.minibatches=2"),
    "spo-replayed": (*SPO, "algorithm.tracker.drift=replayed"),
    "spo-accumulated": (*SPO, "algorithm.tracker.drift=accumulated"),
}
# Whose state takes other ways: adapters alone, also on a quantized base, masters in another precision, prompts asked
# again within a step, a second copy of the weights.
OTHERS = {
    "lora": (*ALGORITHMS["grpo"], "lora.rank=4", "algorithm.regularizers=[{piece='Kl', coefficient=0.1}]"),
    "nf4": (*ALGORITHMS["grpo"], "lora.rank=4", "lora.base=nf4"),
    "8bit": (*ALGORITHMS["grpo"], "learner.optimizer.moments=8bit"),
    "bf16": (*ALGORITHMS["grpo"], "learner.precision=bf16", "records.batches=true"),
    "dapo": ("algorithm=dapo", *ALGORITHMS["grpo"], "algorithm.overlong=none"),
    "ewma": ("algorithm=decoupled-ppo", *ALGORITHMS["grpo"], "algorithm.proximal={decay=0.5}"),
}
EVERY_STEP = ("checkpoints.every=1", "checkpoints.keep_last=100")
PARTS = [
    *(("grpo", part) for part in ("learner", "curriculum", "stream")),
    *(("spo-replayed", part) for part in ("learner", "curriculum", "stream", "tracker", "drift")),
    *(("spo-accumulated", part) for part in ("tracker", "drift")),
]

# What is slow has parts of the state of what is quick, in other forms.
LATER = ("spo-accumulated", "dapo", "bf16", "nf4", "8bit")


def tried(*algorithms: str, later: tuple[str, ...] = LATER) -> list[Any]:
    """Return names of algorithms as parameters of a test, some of them marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in later else ()) for name in algorithms]


def overrides(algorithm: str, *more: str, steps: int = STEPS) -> list[str]:
    """Return what the tests change about the `tiny` experiment."""
    return [f"steps={steps}", "checkpoints.every=2", *COMMON, *(ALGORITHMS | OTHERS)[algorithm], *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of an algorithm to an uninterrupted run with a checkpoint of every step."""
    made: dict[str, Path] = {}

    def run(algorithm: str) -> Path:
        if algorithm not in made:
            made[algorithm] = tmp_path_factory.mktemp(algorithm) / "run"
            train_experiment(load(RANDOM, overrides(algorithm, *EVERY_STEP)), made[algorithm])
        return made[algorithm]

    return run


@pytest.mark.parametrize("algorithm", tried(*ALGORITHMS, later=(*LATER, "grpo")))
def test_a_run_that_is_stopped_after_every_step_is_the_uninterrupted_run(
    tmp_path: Path, whole: Callable[[str], Path], algorithm: str
):
    """One session for each step gives the same metrics, tokens, log-probabilities, evaluations and weights."""
    run = tmp_path / "run"
    with pytest.raises(Stopped, match=rf"stopped after step 1 of {STEPS}, and saved; go on with: gnomon resume"):
        train_experiment(load(RANDOM, overrides(algorithm)), run, StopRequest(signal.SIGTERM, after=1))
    for step in range(2, STEPS):
        with pytest.raises(Stopped, match=f"stopped after step {step} of"):
            resume(run, StopRequest(signal.SIGTERM, after=1))
    resume(run)

    same(trace(run, STEPS), trace(whole(algorithm), STEPS))


@pytest.mark.parametrize("algorithm", tried(*ALGORITHMS, later=(*LATER, "grpo")))
def test_a_crash_after_any_checkpoint_changes_nothing(tmp_path: Path, whole: Callable[[str], Path], algorithm: str):
    """From each checkpoint the rest of the run is made again, and what a crash left of later steps is replaced."""
    for step in (1, STEPS // 2, STEPS - 1):
        run = broken_off(whole(algorithm), tmp_path / f"from-{step}", step)
        resume(run)

        same(trace(run, STEPS), trace(whole(algorithm), STEPS))


@pytest.mark.parametrize("algorithm", tried(*OTHERS))
def test_a_crash_changes_nothing_for_others(tmp_path: Path, whole: Callable[[str], Path], algorithm: str):
    """LoRA with a reference, or in 4 bits, bfloat16 with recorded batches, dynamic sampling, an average: the same."""
    run = broken_off(whole(algorithm), tmp_path / "run", 2)
    resume(run)

    same(trace(run, STEPS), trace(whole(algorithm), STEPS))


@pytest.mark.parametrize("algorithm", tried("grpo", "spo-replayed", later=("grpo",)))
def test_a_run_killed_before_its_first_checkpoint_begins_again_and_says_so(
    tmp_path: Path, whole: Callable[[str], Path], algorithm: str, capsys: pytest.CaptureFixture[str]
):
    """Without any checkpoint, initial samples included, everything is made again, with a warning."""
    run = broken_off(whole(algorithm), tmp_path / "run", -1)
    # As far as a run comes before its first checkpoint must be on the disk.
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:2]))
    for path in (run / "rollouts").glob("step-00000[3-6].jsonl"):
        path.unlink()
    former = {path.name: path.read_bytes() for path in (run / "rollouts").iterdir()}
    resume(run)

    assert "has no checkpoint yet, so it begins again at step 0; what it recorded is kept" in capsys.readouterr().err
    same(trace(run, STEPS), trace(whole(algorithm), STEPS))
    assert {path.name: path.read_bytes() for path in (run / "former-1" / "rollouts").iterdir()} == former
    assert len((run / "former-1" / "metrics.jsonl").read_text().splitlines()) == 2


def test_initial_samples_are_not_drawn_twice(tmp_path: Path, whole: Callable[[str], Path]):
    """Initial success rates are saved at once; a crash before the first step does not cost them again."""
    run = broken_off(whole("spo-replayed"), tmp_path / "run", 0)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-0"]
    resume(run)

    same(trace(run, STEPS), trace(whole("spo-replayed"), STEPS))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of an algorithm to the checkpoint of a run that made no step."""
    made: dict[str, Path] = {}

    def checkpoint(algorithm: str) -> Path:
        if algorithm not in made:
            run = tmp_path_factory.mktemp(f"{algorithm}-fresh") / "run"
            made[algorithm] = train_experiment(load(RANDOM, overrides(algorithm, steps=0)), run).model
        return made[algorithm]

    return checkpoint


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [pytest.param(a, p, id=f"{a}-{p}", marks=pytest.mark.slow if a in LATER else ()) for a, p in PARTS],
)
def test_each_part_of_the_state_is_needed(
    tmp_path: Path, whole: Callable[[str], Path], fresh: Callable[[str], Path], algorithm: str, part: str
):
    """With one part as it was before the first step, and all others restored, the rest of the run is another."""
    step = STEPS // 2
    run = broken_off(whole(algorithm), tmp_path / "run", step)
    checkpoint = run / "checkpoints" / f"step-{step}"
    # The learner keeps its number of steps, so that only its weights and moments are another's.
    for ending in ("safetensors",) if part == "learner" else ("safetensors", "json"):
        shutil.copy2(fresh(algorithm) / "state" / f"{part}.{ending}", checkpoint / "state" / f"{part}.{ending}")
    write_manifest(checkpoint, step)
    resume(run)
    ablated, uninterrupted = trace(run, STEPS), trace(whole(algorithm), STEPS)

    assert len(ablated["metrics"]) == STEPS
    assert ablated["metrics"][:step] == uninterrupted["metrics"][:step]
    assert ablated["metrics"][step:] != uninterrupted["metrics"][step:]
    assert ablated["checkpoints/step-6/model.safetensors"] != uninterrupted["checkpoints/step-6/model.safetensors"]


def test_a_finished_run_says_so(tmp_path: Path, whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    """Resuming a finished run changes no file but the lock, and returns its result."""
    run = broken_off(whole("grpo"), tmp_path / "run", STEPS)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name[0] != "."}
    result = resume(run)

    assert f"is finished: {STEPS} of {STEPS} steps" in capsys.readouterr().err
    assert [evaluation.step for evaluation in result.evaluations] == [0, 4, STEPS]
    assert {path: path.read_bytes() for path in before} == before


def test_the_newest_undamaged_checkpoint_is_used(
    tmp_path: Path, whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    """A flipped byte in the newest checkpoint is named; the one before it serves, and the end is the same."""
    run = broken_off(whole("grpo"), tmp_path / "run", 4)
    weights = run / "checkpoints" / "step-4" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    resume(run)

    said = capsys.readouterr().err
    assert "step-4 is damaged and is not used" in said
    assert f"at step 3 of {STEPS}" in said
    same(trace(run, STEPS), trace(whole("grpo"), STEPS))


def test_a_run_that_is_killed_goes_on(tmp_path: Path, whole: Callable[[str], Path]):
    """SIGKILL in the middle of things, then resume: the uninterrupted run, and nothing half-written is left."""
    ran = signaled(tmp_path / "killed", signal.SIGKILL, overrides("spo-replayed", "checkpoints.every=1"))
    assert ran.returncode == -signal.SIGKILL
    resume(tmp_path / "killed")

    same(trace(tmp_path / "killed", STEPS), trace(whole("spo-replayed"), STEPS))
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.fixture(scope="module")
def unsaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run that saved nothing before its end."""
    run = tmp_path_factory.mktemp("unsaved") / "run"
    train_experiment(load(RANDOM, overrides("grpo", "checkpoints.every=0", steps=SIGNALED)), run)
    return run


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_exits_with_its_number(tmp_path: Path, unsaved: Path, number: signal.Signals, code: int):
    """The current step is finished and saved, the exit code is 128 + signal, and the message says how to go on."""
    run = tmp_path / "stopped"
    ran = signaled(run, number, overrides("grpo", "checkpoints.every=0", steps=SIGNALED))
    saved = [path.name for path in (run / "checkpoints").glob("step-*")]

    assert ran.returncode == code
    assert ran.stderr.splitlines()[-1].endswith(f"and saved; go on with: gnomon resume {run}")
    assert "Traceback" not in ran.stderr
    assert len(saved) == 1
    assert saved[0] in {f"step-{step}" for step in range(2, SIGNALED)}

    resume(run)
    same(trace(run, SIGNALED), trace(unsaved, SIGNALED))


def test_lost_checkpoints_are_not_begun_again_without_a_word(tmp_path: Path, whole: Callable[[str], Path]):
    """A folder that is gone, or a disk that is not mounted, costs no record: the run is refused and not changed."""
    run = tmp_path / "run"
    shutil.copytree(whole("grpo"), run)
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name[0] != "."}

    for marked in (True, False):
        if not marked:
            (run / ".saved").unlink()
        with pytest.raises(RunDirectoryError, match=r"no checkpoint, though 6 steps were made and some were saved"):
            resume(run)
    (run / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints is no folder"):
        resume(run)
    (run / "checkpoints").unlink()
    assert {path: path.read_bytes() for path in before} == before


def test_what_was_changed_between_two_sessions_is_told(
    tmp_path: Path, whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    """An edited experiment, and rows of metrics that are gone: the run goes on, and says so."""
    run = broken_off(whole("grpo"), tmp_path / "run", 4)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([rows[0], *rows[2:]]))
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text + "# mine\n")
    resume(run)
    said = " ".join(capsys.readouterr().err.split())

    assert "lacks 1 of the 4 steps before this checkpoint" in said
    assert "experiment.toml was edited since the last session" in said


def test_a_run_whose_answers_end_at_strings_goes_on_bit_for_bit(tmp_path: Path):
    """Stopped after each step, with strings of their own for held-out answers: the same records, states, texts."""
    own = ("sampling.stop=['a', 'é', 'tz']", "evaluation.sampling.stop='e'", "sampling.max_completion_length=12")
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_experiment(load(RANDOM, overrides("grpo", *own, steps=3)), whole)
    with pytest.raises(Stopped):
        train_experiment(load(RANDOM, overrides("grpo", *own, steps=3)), run, StopRequest(signal.SIGTERM, after=1))
    with pytest.raises(Stopped):
        resume(run, StopRequest(signal.SIGTERM, after=1))
    resume(run)

    same(trace(run, 3), trace(whole, 3))
    answers = [each.rollout for step in (1, 2, 3) for each in RunRecord(whole).rollouts(step)]
    ended = [each for each in answers if each.response[-1] == ord("a")]
    assert ended
    for each in answers:
        assert ord("a") not in each.response[:-1]
        assert "a" not in each.text
    assert "until 'e'" in (whole / "evaluations.jsonl").read_text()
