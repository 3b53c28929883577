"""What a run with a critic says of itself before it begins."""

from pathlib import Path

import pytest

from gnomon.experiment import load
from gnomon.launch import checked, train_experiment
from gnomon.models.size import model_size
from gnomon.planning import Plan, lambda_note, make_plan
from gnomon.records.console import Console

TINY = ("task.size=60", "rollouts_per_step=16", "algorithm.num_generations=4", "grading.workers=1")


def planned(*overrides: str) -> Plan:
    """Return the plan of the `tiny` experiment with these changes."""
    experiment = load("tiny", [*TINY, *overrides]).experiment
    with Console() as console:
        asked, _ = checked(experiment, console)
    return make_plan(experiment, asked, model_size(experiment.model))


def test_a_critic_of_its_own_is_counted_and_said():
    """Its weights and two moments, 12 bytes a weight in fp32, are in memory and checkpoints; the phase is in words."""
    alone, taught = planned("steps=10"), planned("algorithm=vc-ppo", "steps=10")
    said = " ".join(taught.sentences)
    network = alone.parameters * 12

    assert taught.checkpoint_bytes - alone.checkpoint_bytes == network
    assert taught.memory_bytes - alone.memory_bytes == network
    assert "The critic is a network of its own, 1 MiB with its moments; it makes 4 updates a step of its own" in said
    assert "Before step 1 the critic alone learns from 100 batches of 16 answers of the unchanged policy" in said
    assert taught.steps == 10
    assert taught.total_seconds == pytest.approx(110 * taught.step_seconds)
    assert taught.disk_bytes - alone.disk_bytes == 3 * network + taught.checkpoint_bytes


def test_a_shared_trunk_and_imitation_are_said():
    """A shared trunk costs no second network, and says whom its loss moves; imitation says how often and of what."""
    alone, shared = planned(), planned("algorithm=vapo-review")
    said = " ".join(shared.sentences)

    assert shared.checkpoint_bytes == alone.checkpoint_bytes
    assert "a head on the policy's own hidden states, so that its loss moves the policy's weights too" in said
    assert "before the policy, which then sees its fresh values" in said
    assert "After every 4 steps imitation makes 1 update of 64 answers drawn from the best 256 so far" in said


def test_a_lambda_of_zero_for_every_answer_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """VAPO's alpha of 0.05 needs 21 tokens; with a budget of 3 the plan and the run say so, and what to set."""
    told = "gives lambda 0 to answers of fewer than 21 tokens, and none may have more than 3"
    cure = "set algorithm.advantage.policy_lambda.alpha = 6.7, which gives an answer of the whole budget lambda 0.95"
    vapo = [*TINY, "algorithm=vapo", "algorithm.critic.pretraining=none", "steps=0", "evaluation.before=false"]
    train_experiment(load("tiny", vapo), tmp_path / "run")
    said = capsys.readouterr().err

    for sentence in (told, cure):
        assert sentence in said
        assert any(sentence in line for line in planned("algorithm=vapo").sentences)


@pytest.mark.parametrize(("length", "is_short"), [(20, True), (21, False)])
def test_the_note_ends_where_an_answer_can_be_long_enough(length: int, is_short: bool):
    """1 - 1 / (0.05 l) is above 0 from 21 tokens on; whitened advantages are looked into, and named by their path."""
    longest = f"sampling.max_completion_length={length}"
    whitened = "algorithm.advantage={piece='Whitened', of={piece='Gae', policy_lambda={piece='LengthAdaptive'}}}"
    plain = lambda_note(load("tiny", [*TINY, "algorithm=vapo", longest]).experiment)
    inside = lambda_note(load("tiny", [*TINY, "algorithm=vapo", longest, whitened]).experiment)

    assert (plain is not None, inside is not None) == (is_short, is_short)
    assert inside is None or "set algorithm.advantage.of.policy_lambda.alpha = 1," in inside
    assert lambda_note(load("tiny", [*TINY, longest]).experiment) is None
