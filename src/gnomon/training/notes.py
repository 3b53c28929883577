"""What an algorithm does beside its loss, one plain sentence for each piece that is there, grouped."""

from dataclasses import dataclass

from gnomon.algorithms.protocols import parts_of
from gnomon.algorithms.returns import Gae, LengthAdaptive
from gnomon.algorithms.sections import Prioritized, RoleAverage
from gnomon.algorithms.validate import remarks, uses_tracker
from gnomon.config.experiment import Experiment
from gnomon.core.sentences import sentences
from gnomon.models.size import model_size

_SHARE = 20
"""alpha times the longest answer that `lambda_note` proposes: lambda 0.95, the one that PPO uses for every answer."""
_PARTS = ("Prompts", "Turns", "Staleness", "Rewards", "Critic", "Policies", "Loss", "Imitation", "Unusual")


@dataclass(frozen=True)
class Costs:
    """What the sentences count with.

    Attributes:
        training_prompts: Prompts of the task that are trained on.
        reference_bytes: Bytes of the reference model, 0 where there is none.
        average_bytes: Bytes of the averaged policy, 0 where there is none.
        critic_bytes: Bytes of the critic, 0 where there is none.
        is_mixture: Whether the model has experts to choose from.
        distribution_bytes: Bytes of the distributions that a step's answers of full length were drawn from, where they
            are kept.
    """

    training_prompts: int
    reference_bytes: int
    average_bytes: int
    critic_bytes: int
    is_mixture: bool
    distribution_bytes: int = 0


def paragraphs(experiment: Experiment, costs: Costs) -> list[str]:
    """Return what is to be said of each part of the algorithm, a line each; nothing of parts that are not there."""
    known = {
        "experiment": experiment,
        "costs": costs,
        "parts": [part for _, part in parts_of(experiment.algorithm.advantage)],
        "reads_tracker": _reads_tracker(experiment),
        "answers": initial_answers(experiment, costs.training_prompts),
        "of_lambda": lambda_note(experiment),
        "of_routing": routing_note(experiment, costs.is_mixture),
        "unusual": remarks(experiment.algorithm),
    }
    said = {part: sentences("training/notes.j2", part, **known) for part in _PARTS}
    return [f"{part}: {' '.join(lines)}" for part, lines in said.items() if lines]


def starting_notes(experiment: Experiment) -> list[str]:
    """Return what a run says once before it begins: settings that mean nothing at these lengths, or for this model."""
    notes = [lambda_note(experiment)]
    if experiment.algorithm.routing != "free":
        size = model_size(experiment.model, experiment.trust_remote_code)
        notes.append(routing_note(experiment, is_mixture=size.experts > 1))
    notes.append(temperature_note(experiment))
    return [note for note in notes if note is not None]


def temperature_note(experiment: Experiment) -> str | None:
    """Return that answers are off-policy on purpose; None where learner and sampler have one temperature."""
    drawn, scored = experiment.sampling.temperature, experiment.scoring_temperature
    if drawn == scored:
        return None
    return (
        f"answers are drawn at temperature {drawn:g} and scored at {scored:g} (learner.temperature): off-policy on "
        "purpose; held-out answers are drawn at that of sampling unless evaluation.sampling.temperature is set"
    )


def lambda_note(experiment: Experiment) -> str | None:
    """Return what a length-adaptive lambda means when no answer can be long enough for it; None when one can."""
    found = ((place, part) for place, part in parts_of(experiment.algorithm.advantage) if isinstance(part, Gae))
    place, inside = next(found, ("", None))
    rule = None if inside is None else inside.policy_lambda
    longest = experiment.sampling.max_completion_length
    if not isinstance(rule, LengthAdaptive) or longest >= rule.shortest:
        return None
    return (
        f"LengthAdaptive(alpha = {rule.alpha:g}) gives lambda 0 to answers of fewer than {rule.shortest} tokens, and "
        f"none may have more than {longest}: every advantage is then a one-step difference of values, and the reward "
        "reaches the last token alone, the others through the critic only; set "
        f"algorithm.{place}.policy_lambda.alpha = {_SHARE / longest:.2g}, "
        f"which gives an answer of the whole budget lambda {1 - 1 / _SHARE:g}"
    )


def routing_note(experiment: Experiment, is_mixture: bool) -> str | None:
    """Return that routing replay changes nothing for a dense model; None for a mixture, or where none is asked for."""
    if experiment.algorithm.routing == "free" or is_mixture:
        return None
    return (
        f"{experiment.model} has no experts, so there is no routing to replay: algorithm.routing = "
        f"'{experiment.algorithm.routing}' changes nothing"
    )


def initial_answers(experiment: Experiment, training_prompts: int) -> int:
    """Return how many answers are asked before step 1 for the prompts' initial values."""
    plan = experiment.algorithm.tracker
    if plan is None or isinstance(plan, RoleAverage) or plan.initial != "samples" or not _reads_tracker(experiment):
        return 0
    return plan.n0 * training_prompts


def _reads_tracker(experiment: Experiment) -> bool:
    return uses_tracker(experiment.algorithm) or isinstance(experiment.algorithm.sampler, Prioritized)
