"""What a run says of itself before it begins."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.random_model import RANDOM

from gnomon.algorithms import NAMED
from gnomon.algorithms.protocols import LossInputs, PieceResult
from gnomon.analysis.plan import RunEstimate, ShownPrompt, make_plan, passes, scoring_passes
from gnomon.config.experiment import load
from gnomon.core.metrics import Metrics
from gnomon.models.size import model_size
from gnomon.records.console import Console
from gnomon.training.api import checked, train_experiment
from gnomon.training.notes import Costs, lambda_note, paragraphs, starting_notes
from gnomon.training.resolve import Resolved

TINY = ("task.size=60", "rollouts_per_step=16", "algorithm.num_generations=4", "grading.workers=1")


@dataclass(frozen=True)
class Halved:
    """A correction that somebody else wrote."""

    by: int = 2

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token."""
        return view.current.detach() * 0 + 1 / self.by, Metrics()


def planned(*overrides: str) -> RunEstimate:
    """Return the plan of the `tiny` experiment with these changes."""
    resolved = Resolved(load(RANDOM, [*TINY, *overrides]).experiment)
    with Console() as console:
        asked, *_ = checked(resolved, console)
    return make_plan(resolved, asked, model_size(resolved.experiment.model))


def test_a_critic_of_its_own_is_counted_and_said():
    """In fp32 weights and two moments are 12 bytes a weight; a checkpoint has masters too, and is copied to memory."""
    alone, taught = planned("steps=10"), planned("algorithm=vc-ppo", "steps=10")
    said = " ".join(taught.sentences)
    network = alone.parameters * 12
    written = alone.parameters * 16

    assert taught.checkpoint_bytes - alone.checkpoint_bytes == written
    # The state of both networks, which is put back when a step is refused.
    assert taught.undo_bytes == 2 * network
    assert taught.memory_bytes - alone.memory_bytes == network + written + taught.undo_bytes
    assert "Critic: It is a network of its own, 1 MiB with its moments; it makes 4 updates a step of its own" in said
    assert "Before step 1 it alone learns from 100 batches of 16 answers of the unchanged policy" in said
    assert taught.steps == 10
    assert taught.total_seconds == pytest.approx(110 * taught.step_seconds)
    assert taught.disk_bytes - alone.disk_bytes == 3 * written + taught.checkpoint_bytes


def test_a_shared_trunk_and_imitation_are_said():
    """A shared trunk costs no second network, and says whom its loss moves; imitation says how often and of what."""
    alone, shared = planned(), planned("algorithm=vapo-review")
    said = " ".join(shared.sentences)

    assert shared.checkpoint_bytes == alone.checkpoint_bytes
    assert "a head on the policy's own hidden states, so that its loss moves the policy's weights too" in said
    assert "before the policy, which then sees its fresh values" in said
    assert "off-policy: the critic's updates move the shared weights before the policy's first." in said
    assert not shared.is_on_policy
    assert "Imitation: After every 4 steps it makes 1 update of 64 answers drawn from the best 256 so far" in said


ADDED = "algorithm.regularizers=[{piece='%s', coefficient=0.25}]"
SAID = [
    (("algorithm.correction=Truncated",), "multiplied by proximal / behavior of each token, at most 2."),
    (("algorithm.correction=Masked",), "multiplied by proximal / behavior of each token, by 0 outside [0.5, 5]."),
    (("algorithm.correction=Rejected",), "geometric mean outside [0.5, 2] is left out. Behavior is the policy that"),
    (("algorithm.correction=OffPolicyMask",), "moved away from them by more than 0.5 nats a token."),
    (("algorithm.correction=ProbabilityMask",), "probability changed by more than 0.3 since they were sampled"),
    (("algorithm.correction=Capped",), "so that current / behavior counts at most 100."),
    (("max_staleness=1",), "Nothing corrects for answers of older weights"),
    (("algorithm.sampler=Greso",), "Prompts: Those whose last groups were all right or all wrong are often skipped"),
    (("algorithm=spo",), "Prompts: Those whose tracked success rate is least certain are asked most often."),
    (
        ("algorithm=spo",),
        "each is answered 8 times for its initial success rate: 392 answers, as many as in 24.5 steps",
    ),
    (("algorithm=spo", "algorithm.tracker.initial=prior"), "success rate of each is tracked, and begins at 1/2."),
    (("algorithm=spo", "algorithm.tracker.n0=1"), "answered 1 time for its initial success rate: 49 answers"),
    (("algorithm=a-star-po",), "answered 8 times for its initial value (fixed from then on): 392 answers"),
    (("algorithm.keep.max_attempts=3",), "at most 12 prompts and 48 answers a step; after that it is smaller."),
    (("algorithm.keep.part=answer",), "Groups of equal 'answer' components are dropped"),
    (("algorithm.overlong.factor=0.5",), "Answers of more than 2 tokens are rewarded less, by up to 0.5 at the budget"),
    (("algorithm.mask_truncated=true",), "Rewards: Answers cut off at the budget are left out of the loss;"),
    (("algorithm=rloo",), "Rewards: Each token lowers them by 0.05 times log(proximal / reference)."),
    (
        ("algorithm=rloo",),
        "Policies: The reference is a frozen copy of the first weights, 1 MiB; it costs one more pass",
    ),
    (("algorithm=rloo", "lora.rank=2"), "The reference is the model without its adapters, which takes no memory;"),
    ((ADDED % "Kl",), "Loss: 0.25 times KL(current, reference) is added, estimated by k2_grad_k3."),
    ((ADDED % "Entropy",), "Loss: 0.25 times the entropy is subtracted."),
    ((ADDED % "PositiveNll",), "0.25 times the mean negative log-likelihood of answers rewarded above 0 is added."),
    (("algorithm=ppo", ADDED % "SelfImitation"), "weighed by how far they exceed the critic's value."),
    (("algorithm=p3o",), "KL(current, behavior) is added, times 1 - e, e the effective sample size"),
    (("algorithm=p3o",), "of a whole update: all its micro-batches but one are computed twice for it."),
    (("algorithm=p3o", "algorithm.scope=lagged"), "Effective sample sizes are those of the update before, 1 at first."),
    (("algorithm.surrogate.dual=3",), "stop counting where their ratio is above 3 (dual clip)."),
    (
        ("algorithm.proximal.decay=0.9", "algorithm.updates.minibatches=2"),
        "a moving average of the weights, about 9 up",
    ),
    (
        ("algorithm=opo", "algorithm.updates.minibatches=4"),
        "Unusual: PolicyGradient(Unbounded) believes every ratio, and 4 upd",
    ),
    (("model=tiny-moe", "algorithm.routing=behavior"), "sends tokens to the experts that the engine chose (R3)."),
    (("model=tiny-moe", "algorithm.routing=proximal"), "experts that the policy chose when the step began (R2)."),
    (
        ("algorithm.routing=proximal",),
        "tiny has no experts, so there is no routing to replay: algorithm.routing = 'pro",
    ),
]


@pytest.mark.parametrize(("overrides", "sentence"), SAID)
def test_every_piece_that_is_there_has_a_sentence(overrides: tuple[str, ...], sentence: str):
    """With the piece the plan says so, with its numbers; `tiny` as it is has none of these sentences."""
    assert sentence in " ".join(planned(*overrides).sentences)
    assert sentence not in " ".join(planned().sentences)


@pytest.mark.parametrize(
    ("name", "generated", "scored"),
    [("grpo", 1, 0), ("gdpo", 1, 0), ("rae", 1, 0), ("rloo", 1, 2), ("otb", 1, 2), ("sft", 0, 0), ("dpo", 0, 2)],
)
def test_only_policies_are_scored(name: str, generated: int, scored: int):
    """Rewards by themselves, turns and roles come with the rollouts; given answers are not generated."""
    assert scoring_passes(NAMED[name]) == scored
    assert passes(NAMED[name]) == generated + scored + 3


def test_a_plain_algorithm_is_said_in_seven_lines():
    """Nothing is said of parts that are not there."""
    assert len(planned().sentences) == 7


def test_a_piece_of_ones_own_is_shown_as_it_was_written():
    """What the plan has no words for is not left out."""
    experiment = load(RANDOM, TINY).experiment
    own = replace(experiment, algorithm=replace(experiment.algorithm, correction=Halved()))

    assert "Policies: Halved(by=2) is applied." in paragraphs(own, Costs(1, 0, 0, 0, False))


@pytest.mark.parametrize(
    ("overrides", "bytes_each", "written"),
    [
        (("algorithm.advantage.kl=0.1",), 4, 0),
        (("algorithm.proximal=Ewma", "algorithm.updates.minibatches=2"), 4, 4),
        (("algorithm=ppo",), 12, 16),
        (("max_staleness=1",), 4, 0),
    ],
    ids=["reference", "average", "critic", "engine"],
)
def test_every_other_network_is_in_memory(overrides: tuple[str, ...], bytes_each: int, written: int):
    """In fp32 a copy takes 4 bytes a weight, and 8 more where it has moments; what is not frozen is in checkpoints.

    A checkpoint that is written while steps go on is in memory as well.
    """
    fp32 = "learner.precision=fp32"
    alone, more = planned(fp32), planned(fp32, *overrides)
    waiting = planned(fp32, *overrides, "checkpoints.asynchronous=false")

    expected = (bytes_each + written) * alone.parameters
    assert more.memory_bytes - more.undo_bytes - alone.memory_bytes == pytest.approx(expected, abs=1)
    assert more.memory_bytes - waiting.memory_bytes == pytest.approx(more.checkpoint_bytes, abs=1)
    assert more.checkpoint_bytes - alone.checkpoint_bytes == written * alone.parameters


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), 0),
        (("algorithm.updates.minibatches=2",), 12),
        (("algorithm.updates.minibatches=2", "algorithm.proximal=Ewma"), 16),
        (("algorithm.replay=Replay",), 12),
        (("algorithm=ppo",), 24),
    ],
    ids=["one update", "minibatches", "average", "imitation", "critic"],
)
def test_the_copy_that_a_step_is_undone_with_is_counted(overrides: tuple[str, ...], bytes_each: int):
    """Masters and moments, an average's masters, a critic's as well, in float32; one update a step keeps no copy."""
    plan, said = planned("learner.precision=fp32", *overrides), "is a copy that undoes a step of several updates"

    assert plan.undo_bytes == bytes_each * plan.parameters
    assert any(said in sentence for sentence in plan.sentences) == bool(bytes_each)
    shared = planned("learner.precision=fp32", *overrides, "learner.processes=3", "device=cpu")
    assert shared.undo_bytes == plan.undo_bytes
    assert any(f"{said}, a share of it in each of 3" in each for each in shared.sentences) == bool(bytes_each)


def test_the_copy_that_is_counted_is_the_one_that_is_kept(tmp_path: Path):
    """What a learner's state holds after a step has as many bytes as the plan says, but for counts of steps."""
    # A first letter in half of the alphabet is rewarded, so that there is something to learn, and moments of it.
    learnable = "rewards=[{kind='format', pattern='[!-P].*'}]"
    several = (*TINY, learnable, "algorithm.updates.minibatches=2", "steps=1", "evaluation.before=false")
    run = train_experiment(load(RANDOM, several), tmp_path / "run")
    kept = load_file(run.model / "state" / "learner.safetensors")

    assert sum(tensor.nbytes for tensor in kept.values()) == pytest.approx(planned(*several).undo_bytes, rel=0.01)


def test_a_time_that_nobody_waits_for_is_said_as_such():
    """More than a year is not counted in hours."""
    endless = planned("algorithm=vc-ppo", "algorithm.critic.pretraining.steps=999999999999")
    assert "more than a year in all" in endless.sentences[-1]


def test_routing_without_experts_is_said_when_a_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A dense model is trained with routing replay as it is without, and that is said once."""
    train_experiment(
        load(RANDOM, [*TINY, "algorithm.routing=behavior", "steps=0", "evaluation.before=false"]), tmp_path
    )
    said = capsys.readouterr().err

    assert said.count("tiny has no experts, so there is no routing to replay") == 1
    assert not starting_notes(load(RANDOM, [*TINY, "model=tiny-moe", "algorithm.routing=behavior"]).experiment)


def test_a_lambda_of_zero_for_every_answer_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """VAPO's alpha of 0.05 needs 21 tokens; with a budget of 3 the plan and the run say so, and what to set."""
    told = "gives lambda 0 to answers of fewer than 21 tokens, and none may have more than 3"
    cure = "set algorithm.advantage.policy_lambda.alpha = 6.7, which gives an answer of the whole budget lambda 0.95"
    vapo = [*TINY, "algorithm=vapo", "algorithm.critic.pretraining=none", "steps=0", "evaluation.before=false"]
    train_experiment(load(RANDOM, vapo), tmp_path / "run")
    said = capsys.readouterr().err

    for sentence in (told, cure):
        assert sentence in said
        assert any(sentence in line for line in planned("algorithm=vapo").sentences)


@pytest.mark.parametrize(("length", "is_short"), [(20, True), (21, False)])
def test_the_note_ends_where_an_answer_can_be_long_enough(length: int, is_short: bool):
    """1 - 1 / (0.05 l) is above 0 from 21 tokens on; whitened advantages are looked into, and named by their path."""
    longest = f"sampling.max_completion_length={length}"
    whitened = "algorithm.advantage={piece='Whitened', of={piece='Gae', policy_lambda={piece='LengthAdaptive'}}}"
    plain = lambda_note(load(RANDOM, [*TINY, "algorithm=vapo", longest]).experiment)
    inside = lambda_note(load(RANDOM, [*TINY, "algorithm=vapo", longest, whitened]).experiment)

    assert (plain is not None, inside is not None) == (is_short, is_short)
    assert inside is None or "set algorithm.advantage.of.policy_lambda.alpha = 1," in inside
    assert lambda_note(load(RANDOM, [*TINY, longest]).experiment) is None


def test_every_engine_is_in_memory():
    """Each is one more copy of the weights and one more cache; one that shares the learner's has no copy."""
    fp32 = ("learner.precision=fp32", "device=cpu")
    shared, one, two, three = (
        planned(*fp32, own) for own in ("max_staleness=0", "max_staleness=1", "engine.count=2", "engine.count=3")
    )
    each = two.memory_bytes - one.memory_bytes

    assert one.memory_bytes - shared.memory_bytes == pytest.approx(4 * shared.parameters, abs=1)
    assert three.memory_bytes - two.memory_bytes == pytest.approx(each, abs=1)
    assert each > 4 * shared.parameters
    assert "by 3 local engines in this process, each with weights of its own" in " ".join(three.sentences)


def test_what_is_kept_between_turns_is_in_memory():
    """Up to the bound, and no more than all conversations of a step fill; said where nothing is kept."""
    talking = ("environment.kind=tools", "environment.tools=['python']", "rollouts_per_step=8")
    none, little, plenty = (planned(*talking, f"engine.kept_gib={gib}") for gib in (0, 2**-12, 64))

    assert little.memory_bytes - none.memory_bytes == pytest.approx(2**18, abs=1)
    assert 2**18 < plenty.memory_bytes - none.memory_bytes < 2**30
    said = [line for line in none.sentences if line.startswith("With engine.kept_gib = 0 nothing is kept")]
    assert "4.5 times as many tokens at 8 turns" in said[0]
    assert not any("nothing is kept" in line for line in plenty.sentences)


def test_every_process_of_a_learner_is_in_memory():
    """Parts are as much as the whole, but libraries and activations come once a process, and the engine has a copy."""
    fp32 = ("learner.precision=fp32", "device=cpu")
    one, two, three = (planned(*fp32, f"learner.processes={number}") for number in (1, 2, 3))

    each = three.memory_bytes - two.memory_bytes
    assert each > 0.6 * 2**30
    assert two.memory_bytes - one.memory_bytes == pytest.approx(2 * 0.6 * 2**30 + each - 0.6 * 2**30, rel=0.01)
    assert "3 processes of the learner hold a part each" in " ".join(three.sentences)
    assert "processes of the learner" not in " ".join(one.sentences)


def test_rounded_weights_are_not_the_weights_that_are_trained():
    """With rounding the first update is off-policy too, and the plan says so."""
    plan = planned("engine.rounding=fp8")

    assert not plan.is_on_policy
    assert "it is off-policy: answers are drawn from weights rounded to fp8." in " ".join(plan.sentences)


def test_another_temperature_of_the_learner_is_off_policy():
    """What sampled the answers is then not what the ratio takes for it, though the weights are one."""
    plan = planned("learner.temperature=0.8", "sampling.temperature=1.0")

    assert not plan.is_on_policy
    assert "off-policy: answers are drawn at temperature 1 and scored at 0.8" in " ".join(plan.sentences)
    assert planned("learner.temperature=1.0").is_on_policy


def test_a_plan_shows_the_first_prompt_with_its_tokens():
    """Text with control tokens spelled out, how many tokens, and the ids at both ends, in words and in the row."""
    plan = planned()
    shown = plan.as_row()["prompt"]

    assert plan.prompt.text.startswith("<|bos|>")
    assert plan.prompt.text.endswith("=")
    assert plan.prompt.first_ids[0] == 256
    assert plan.prompt.last_ids[-1] == ord("=")
    assert plan.prompt.tokens == 1 + len(plan.prompt.text) - len("<|bos|>")
    assert isinstance(shown, dict)
    assert shown["text"] == plan.prompt.text
    assert plan.prompt.said in plan.sentences
    assert f'reads "{plan.prompt.text}"' in plan.prompt.said


def test_the_middle_of_a_long_prompt_is_left_out():
    """Four hundred characters at both ends are enough to read, and its row has all of it."""
    shown = ShownPrompt("a", 5000, "x" * 5000, (1, 2), (3, 4))

    assert len(shown.said) < 1000
    assert "1, 2, ..., 3, 4" in shown.said


def test_an_engine_that_sleeps_and_the_learner_are_the_larger_and_not_the_sum():
    """Its weights, keys and values are counted, or the learner's activations and logits, whichever are more."""
    awake, asleep = planned("learner.processes=2"), planned("learner.processes=2", "engine.sleeps=true")
    crowded = [
        planned("learner.processes=2", "engine.max_concurrent=8000", *more) for more in ([], ["engine.sleeps=true"])
    ]

    # What learning takes hides the engine's weights and cache; then a cache that is larger hides what learning takes.
    hidden = awake.memory_bytes - asleep.memory_bytes
    assert hidden > 4 * awake.parameters
    assert crowded[0].memory_bytes - crowded[1].memory_bytes > hidden
    assert "with weights of its own, which it releases while the learner works" in " ".join(asleep.sentences)
