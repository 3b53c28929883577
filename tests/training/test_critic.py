"""Runs with a critic and with imitation: value pre-training, and going on bit for bit from wherever they stopped."""

import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.random_model import RANDOM
from tests.training.runs import broken_off, measured, same, signaled, trace

from gnomon.config.experiment import load
from gnomon.core.errors import ModelError, Stopped
from gnomon.models.load import load_model
from gnomon.records.manifest import write_manifest
from gnomon.training.api import export, resume, train_experiment
from gnomon.training.run import StopRequest

STEPS, BATCHES = 3, 2
# A reward that an untrained model earns now and then, so that each step has something to learn.
REWARD = "rewards=[{kind='format', pattern='[!-P].*'}]"
SMALL = ("task.size=40", "rollouts_per_step=16", "evaluation.every=2", "algorithm.num_generations=2")
SAVED = ("checkpoints.every=1", "checkpoints.keep_last=100", "grading.workers=1")
PRETRAINED = f"algorithm.critic.pretraining={{steps={BATCHES}, frozen_trunk=false}}"
FROZEN = f"algorithm.critic.pretraining={{steps={BATCHES}, frozen_trunk=true}}"
TWICE = "algorithm.critic.updates={epochs=1, minibatches=2}"
REPLAY = "algorithm.replay={every=1, rows=4, updates=2}"
ALGORITHMS = {
    "separate-after": ("algorithm=vapo", PRETRAINED, TWICE, "algorithm.updates.minibatches=2"),
    "separate-before": ("algorithm=ppo", "algorithm.critic.order=before", PRETRAINED, TWICE),
    "shared-after": ("algorithm=ppo", "algorithm.critic.trunk=shared", FROZEN, TWICE),
    "shared-before-replay": ("algorithm=vapo-review", FROZEN, REPLAY),
    "surplus-replay": ("algorithm=ppo", REPLAY, "algorithm.replay.weigh=surplus"),
}
PRETRAINING = [name for name in ALGORITHMS if name != "surplus-replay"]
# Each algorithm in one of two ways here, and in the other in the slower checks.
STOPPED = ["separate-after"]
BROKEN = [name for name in ALGORITHMS if name not in STOPPED]


def overrides(algorithm: str, *more: str) -> list[str]:
    """Return what the tests change about the `tiny` experiment."""
    return [f"steps={STEPS}", *SAVED, REWARD, *SMALL, *ALGORITHMS[algorithm], *more]


def quicker(names: list[str]) -> list[object]:
    """Return every algorithm, those that are not named marked as slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of an algorithm to an uninterrupted run with a checkpoint of every step."""
    made: dict[str, Path] = {}

    def run(algorithm: str) -> Path:
        if algorithm not in made:
            made[algorithm] = tmp_path_factory.mktemp(algorithm) / "run"
            train_experiment(load(RANDOM, overrides(algorithm)), made[algorithm])
        return made[algorithm]

    return run


@pytest.mark.parametrize("algorithm", quicker(STOPPED))
def test_a_run_that_is_stopped_wherever_it_can_be_is_the_uninterrupted_run(
    tmp_path: Path, whole: Callable[[str], Path], algorithm: str
):
    """One session for each batch of pre-training and each step: the same metrics, rollouts, critic and policy."""
    run = tmp_path / "run"
    phases = ["after batch 1 of 2 of value pre-training", "before step 1 of 3"]
    stops = [*(phases if algorithm in PRETRAINING else []), "after step 1 of 3", "after step 2 of 3"]
    with pytest.raises(Stopped, match=f"stopped {stops[0]}, and saved; go on with: gnomon resume"):
        train_experiment(load(RANDOM, overrides(algorithm)), run, StopRequest(signal.SIGTERM, after=1))
    for stop in stops[1:]:
        with pytest.raises(Stopped, match=f"stopped {stop}, and saved"):
            resume(run, StopRequest(signal.SIGTERM, after=1))
    resume(run)

    same(trace(run, STEPS), trace(whole(algorithm), STEPS))


@pytest.mark.parametrize("algorithm", quicker(BROKEN))
def test_a_crash_after_any_step_changes_nothing(tmp_path: Path, whole: Callable[[str], Path], algorithm: str):
    """From step 0, where pre-training has just ended, or from a later one, the rest is made again as it was."""
    run = broken_off(whole(algorithm), tmp_path / "run", 0 if algorithm in PRETRAINING else 2)
    # As a crash between publishing step 0 and removing this leaves it.
    (run / "pretraining").mkdir()
    resume(run)

    same(trace(run, STEPS), trace(whole(algorithm), STEPS))
    assert not (run / "pretraining").exists()


def test_the_buffer_is_needed(tmp_path: Path, whole: Callable[[str], Path]):
    """With another buffer of best answers, and all else restored, the next imitation is another."""
    run = broken_off(whole("surplus-replay"), tmp_path / "run", 1)
    saved = run / "checkpoints" / "step-1"
    for ending in ("safetensors", "json"):
        shutil.copy2(whole("surplus-replay") / f"checkpoints/step-3/state/replay.{ending}", saved / "state")
    write_manifest(saved, 1)
    resume(run)
    ablated, uninterrupted = trace(run, STEPS)["metrics"], trace(whole("surplus-replay"), STEPS)["metrics"]

    assert ablated[0] == uninterrupted[0]
    assert ablated[1:] != uninterrupted[1:]


def test_the_critic_is_needed(tmp_path: Path, whole: Callable[[str], Path]):
    """With the critic as it was after pre-training, and all else restored, the rest of the run is another."""
    run = broken_off(whole("separate-after"), tmp_path / "run", 2)
    earlier, later = (run / "checkpoints" / f"step-{step}" / "state" / "learner.safetensors" for step in (0, 2))
    save_file({**load_file(later), **{n: t for n, t in load_file(earlier).items() if n.startswith("critic/")}}, later)
    write_manifest(run / "checkpoints" / "step-2", 2)
    resume(run)
    ablated, uninterrupted = trace(run, STEPS)["metrics"], trace(whole("separate-after"), STEPS)["metrics"]

    assert ablated[:2] == uninterrupted[:2]
    assert ablated[2]["critic/value_mean"] != uninterrupted[2]["critic/value_mean"]


@pytest.mark.slow
def test_a_run_killed_in_value_pretraining_goes_on(tmp_path: Path):
    """SIGKILL after two batches, then resume: the uninterrupted run, whichever batch was saved last."""
    options = overrides("separate-after", "algorithm.critic.pretraining.steps=8", "steps=1")
    ran = signaled(tmp_path / "killed", signal.SIGKILL, options, rows="pretraining")
    assert ran.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "metrics.jsonl").read_text()
    resume(tmp_path / "killed")
    train_experiment(load(RANDOM, options), tmp_path / "whole")

    same(trace(tmp_path / "killed", 1), trace(tmp_path / "whole", 1))


def test_a_crash_in_value_pretraining_changes_nothing(
    tmp_path: Path, whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    """It goes on after the batch saved last, removes rows of later ones, and evaluates nothing twice."""
    run = tmp_path / "run"
    with pytest.raises(Stopped, match="after batch 1"):
        train_experiment(load(RANDOM, overrides("separate-after")), run, StopRequest(signal.SIGTERM, after=1))
    with open(run / "pretraining.jsonl", "a") as file:
        file.write('{"step": 2, "seconds": 1.0, "critic/explained_variance": 0.5}\n')
    resume(run)

    assert f"resuming {run} at step 0 of {STEPS}, after batch 1 of value pre-training" in capsys.readouterr().err
    assert [row["step"] for row in measured(run / "evaluations.jsonl")] == [0, 2, STEPS]
    same(trace(run, STEPS), trace(whole("separate-after"), STEPS))


@pytest.mark.parametrize("algorithm", PRETRAINING)
def test_value_pretraining_leaves_the_policy_alone(whole: Callable[[str], Path], algorithm: str):
    """After the phase the policy is byte for byte the initial model, and the critic's head is no longer zero."""
    saved = whole(algorithm) / "checkpoints" / "step-0"
    policy = load_model("tiny", torch.float32).state_dict()
    after = load_model(str(saved), torch.float32).state_dict()
    rows = measured(whole(algorithm) / "pretraining.jsonl")
    is_shared = algorithm.startswith("shared")
    head = load_file(saved / "critic" / ("value_head.safetensors" if is_shared else "model.safetensors"))

    assert all(torch.equal(policy[name], after[name]) for name in policy)
    assert head["score.weight"].abs().max() > 0
    assert [row["step"] for row in rows] == list(range(1, BATCHES + 1))
    assert {row["stream/staleness_steps_max"] for row in rows} == {0}
    assert all(row["tokens/generated"] > 0 and row["critic/loss"] > 0 for row in rows)


def test_the_push_of_a_critic_is_in_the_ratios_and_no_gap_of_the_engine(whole: Callable[[str], Path]):
    """Taught first on a shared trunk, the critic moves the policy: drift, not a mismatch for equal weights."""
    for row in measured(whole("shared-before-replay") / "metrics.jsonl"):
        assert row["mismatch/logprob_abs_max_nats"] < 1e-4
        assert row["loss/drift_abs_nats"] > 1e-3
        assert row["loss/kl_proximal_nats"] == pytest.approx(row["loss/kl_behavior_nats"], abs=1e-4)


def test_what_the_critic_moves_is_scored_before():
    """With one update the proximal policy needs a pass of its own only if the critic moves the weights before it."""
    shared = ("algorithm=vapo-review", "algorithm.routing=proximal")
    first, last = (
        load(RANDOM, [*shared, f"algorithm.critic.order={order}"]).experiment.algorithm for order in ("before", "after")
    )

    assert first.needs == {"values", "proximal", "routing"}
    assert last.needs == {"values"}


def test_the_model_is_exported_without_its_critic(tmp_path: Path, whole: Callable[[str], Path]):
    """What `export` copies is a model alone: neither a critic's folder nor a head that an engine would stumble over."""
    for algorithm in ("separate-after", "shared-after"):
        names = {path.name for path in export(whole(algorithm), tmp_path / algorithm).iterdir()}

        assert "model.safetensors" in names
        assert not names & {"critic", "value_head.safetensors"}


def test_no_prompt_is_drawn_twice_because_of_pretraining(whole: Callable[[str], Path]):
    """Rounds of the phase keep counting: the state of the stream at step 0 stands at the round after them."""
    stream = (whole("separate-after") / "checkpoints" / "step-0" / "state" / "stream.json").read_text()
    assert f'"next": {BATCHES}' in stream


def test_pretraining_ends_as_soon_as_enough_is_explained(tmp_path: Path):
    """It ends with the first two batches in a row that reach the bound, and steps = 0 trains the critic alone."""
    run = tmp_path / "run"
    phase = "algorithm.critic.pretraining={steps=20, explained_variance=1e-9, patience=2}"
    train_experiment(load(RANDOM, overrides("separate-after", phase, "steps=0")), run)
    good = [row["critic/explained_variance"] >= 1e-9 for row in measured(run / "pretraining.jsonl")]

    assert len(good) < 20
    assert good[-2:] == [True, True]
    assert (True, True) not in pairwise(good[:-1])
    assert (run / "checkpoints" / "step-0" / "critic").is_dir()


@pytest.mark.parametrize("algorithm", ["separate-after", "shared-after"])
def test_refused_groups_teach_no_critic(tmp_path: Path, algorithm: str):
    """No answer earns anything, and ``keep`` refuses every group: neither the phase nor a step makes an update."""
    run = tmp_path / "run"
    never = "rewards=[{kind='format', pattern='Z{50}'}]"
    train_experiment(load(RANDOM, overrides(algorithm, never, "algorithm.keep=Informative", "steps=1")), run)
    rows = [*measured(run / "pretraining.jsonl"), *measured(run / "metrics.jsonl")]
    saved = run / "checkpoints" / "step-1" / "critic"
    (head,) = (load_file(path)["score.weight"] for path in saved.glob("*.safetensors"))

    assert [row["critic/updates"] for row in rows] == [0] * (BATCHES + 1)
    assert not any("critic/explained_variance" in row for row in rows)
    assert not bool(head.any())


def test_another_run_can_begin_with_a_pretrained_critic(tmp_path: Path, whole: Callable[[str], Path]):
    """`critic.initial` names the critic saved with step 0; without a phase of its own the run has no such files."""
    saved = whole("separate-after") / "checkpoints" / "step-0" / "critic"
    more = ("algorithm.critic.pretraining=none", f"algorithm.critic.initial={saved}", "steps=1")
    run = train_experiment(load(RANDOM, overrides("separate-after", *more)), tmp_path / "run").directory

    assert measured(run / "metrics.jsonl")[0]["critic/value_mean"] != 0
    assert not (run / "pretraining.jsonl").exists()
    assert not (run / "checkpoints" / "step-0").exists()


def test_a_critic_that_is_not_there_is_refused_before_a_run_is_made(tmp_path: Path):
    """The folder is named, and no run directory is left behind."""
    with pytest.raises(ModelError, match=r"critic\.initial: the folder 'nowhere' does not exist"):
        train_experiment(
            load(RANDOM, overrides("separate-after", "algorithm.critic.initial=nowhere")), tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_the_pretrained_critic_is_kept(tmp_path: Path):
    """Step 0 stays when later checkpoints retire others, for it is what the phase has paid for."""
    run = tmp_path / "run"
    train_experiment(load(RANDOM, overrides("separate-after", "checkpoints.keep_last=1")), run)

    assert {path.name for path in (run / "checkpoints").glob("step-*")} >= {"step-0", f"step-{STEPS}"}
    assert not (run / "checkpoints" / "step-1").exists()
