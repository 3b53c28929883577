"""What an algorithm does beside its loss, one plain sentence for each piece that is there, grouped."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.algorithms import corrections, regularizers, sections
from gnomon.algorithms.advantages import GroupRelative, LeaveOneOut
from gnomon.algorithms.protocols import parts_of
from gnomon.algorithms.returns import Gae, LengthAdaptive, Returns
from gnomon.algorithms.surrogates import ClippedSurrogate
from gnomon.algorithms.validate import remarks, uses_tracker
from gnomon.config.experiment import Experiment
from gnomon.models.size import model_size

GIB = 2**30
_SHARE = 20
"""alpha times the longest answer that `lambda_note` proposes: lambda 0.95, the one that PPO uses for every answer."""
_LEVELS: Mapping[str, str] = {
    "token": "of each token",
    "sequence": "of the whole answer",
    "geometric": "of the answer, its tokens' geometric mean",
}


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
    said = {name: [*about(experiment, costs)] for name, about in _GROUPS.items()}
    return [f"{name}: {' '.join(sentences)}" for name, sentences in said.items() if sentences]


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
    if (
        plan is None
        or isinstance(plan, sections.RoleAverage)
        or plan.initial != "samples"
        or not _reads_tracker(experiment)
    ):
        return 0
    return plan.n0 * training_prompts


def many(count: int, what: str, several: str = "") -> str:
    """Return a count and its noun.

    >>> many(1, "step"), many(2000, "batch", "batches")
    ('1 step', '2,000 batches')
    """
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def size_in_words(count: int) -> str:
    """Return bytes as a person says them.

    >>> size_in_words(3 * 2**30), size_in_words(1)
    ('3.0 GiB', '1 MiB')
    """
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{max(1, round(count / 2**20))} MiB"


def _prompts(experiment: Experiment, costs: Costs) -> Iterator[str]:
    algorithm, asked = experiment.algorithm, experiment.prompts_per_step
    if isinstance(algorithm.sampler, sections.Prioritized):
        yield "Those whose tracked success rate is least certain are asked most often."
    elif isinstance(algorithm.sampler, sections.Greso):
        yield "Those whose last groups were all right or all wrong are often skipped unasked, after one pass over all."
    elif isinstance(algorithm.sampler, sections.NoPositiveResampling):
        yield (
            f"Those of whose answers at one visit {algorithm.sampler.pass_rate:.0%} earned "
            f"{algorithm.sampler.success:g} or more are asked no more."
        )
    if _reads_tracker(experiment):
        yield from _tracker(experiment, costs)
    keep = algorithm.keep
    if keep is not None:
        rewards = f"'{keep.part}' components" if keep.part else "rewards"
        yield (
            f"Groups of equal {rewards} are dropped and other prompts asked instead, at most "
            f"{many(keep.max_attempts * asked, 'prompt')} and "
            f"{many(keep.max_attempts * experiment.rollouts_per_step, 'answer')} a step; after that it is smaller."
        )


def _tracker(experiment: Experiment, costs: Costs) -> Iterator[str]:
    plan = experiment.algorithm.tracker
    assert plan is not None, "validate refuses a piece that reads no tracker"
    if isinstance(plan, sections.RoleAverage):
        yield "The average reward of each role (a task's column `role`, or one that an agent pays) begins at 0."
        return
    rate = "success rate" if isinstance(plan, sections.TrackerConfig) else "value (fixed from then on)"
    if plan.initial == "samples":
        answers = initial_answers(experiment, costs.training_prompts)
        yield (
            f"Before step 1 each is answered {many(plan.n0, 'time')} for its initial {rate}: "
            f"{many(answers, 'answer')}, as many as in {answers / experiment.rollouts_per_step:,.3g} steps."
        )
    elif isinstance(plan, sections.OptimalValue) or plan.initial != "prior":
        yield f"The initial {rate} of each is read from {plan.initial}."
    else:
        yield f"The {rate} of each is tracked, and begins at 1/2."
    if isinstance(plan, sections.TrackerConfig) and plan.drift == "replayed":
        yield "After a step the answers that its prompts had before are scored again, to see how fast to forget."


def _staleness(experiment: Experiment, costs: Costs) -> Iterator[str]:
    plan, bound = experiment.staleness, experiment.staleness_bound
    if bound == 0:
        return
    if experiment.max_staleness == "measured":
        yield (
            "As many prompts are on their way as the answers' effective sample size bears: groups are left out of a "
            f"step until the rest has {plan.ess_floor:g} of its tokens, and {many(bound, 'step')} is the most in any "
            "case."
        )
        if "proximal" not in experiment.algorithm.needs:
            yield "To measure it the proximal policy is scored, which costs one more pass a step."
    else:
        ahead = bound + 1 - plan.slack
        yield f"The prompts of {many(ahead, 'step')} are on their way at once."
    if plan.slack:
        yield f"Answers are usually {many(plan.slack, 'step')} fresher; slow ones may be overtaken and come later."
    if plan.stragglers == "drop":
        yield (
            "Answers that are not finished when their time is over are dropped, which favors short ones; no step "
            "waits for them."
        )
    else:
        yield "A step waits for answers that would be too old for the next."


def _turns(experiment: Experiment, costs: Costs) -> Iterator[str]:
    plan = experiment.environment
    if plan is None:
        return
    if plan.is_agent:
        yield (
            f"The agent {plan.names} calls the policy, at most {many(plan.max_turns, 'time')} in a rollout, and has "
            f"{plan.timeout_seconds:g} s between two answers; what it says is not trained on."
        )
        return
    each = f" of at most {many(plan.max_turn_tokens, 'token')}" if plan.max_turn_tokens else ""
    yield (
        f"{plan.names} replies to answers, to {plan.max_turns}{each} in a rollout, with at most "
        f"{many(plan.max_reply_tokens, 'token')} and within {plan.timeout_seconds:g} s each; replies count in a "
        "rollout's tokens and are not trained on."
    )
    if experiment.algorithm.mask_truncated:
        yield "A rollout that ran out of turns counts as cut off."


def _rewards(experiment: Experiment, costs: Costs) -> Iterator[str]:
    algorithm, budget = experiment.algorithm, experiment.sampling.max_completion_length
    penalty = algorithm.overlong
    if penalty is not None:
        free = budget - max(1, round(penalty.buffer * budget))
        yield (
            f"Answers of more than {many(free, 'token')} are rewarded less, by up to {penalty.factor:g} at the budget "
            f"of {budget}."
        )
    if algorithm.mask_truncated:
        yield "Answers cut off at the budget are left out of the loss; their rewards still count in statistics."
    for _, inside in parts_of(algorithm.advantage):
        if isinstance(inside, GroupRelative | LeaveOneOut | Returns | Gae) and inside.kl > 0:
            yield f"Each token lowers them by {inside.kl:g} times log(proximal / reference)."


def _critic(experiment: Experiment, costs: Costs) -> Iterator[str]:
    plan = experiment.algorithm.critic
    if plan is None:
        return
    what = f"It is a network of its own, {size_in_words(costs.critic_bytes)} with its moments"
    if plan.trunk == "shared":
        what = "It is a head on the policy's own hidden states, so that its loss moves the policy's weights too"
    order = "before the policy, which then sees its fresh values" if plan.order == "before" else "after the policy"
    made = plan.updates.total
    yield (
        f"{what}; it makes {many(made, 'update')} a step of its own, {order}, at {plan.learning_rate_ratio:g} times "
        "the policy's learning rate."
    )
    if plan.pretraining is not None:
        wanted = plan.pretraining.explained_variance
        early = f", fewer once it explains {wanted:.0%} of the variance" if wanted is not None else ""
        yield (
            f"Before step 1 it alone learns from {many(plan.pretraining.steps, 'batch', 'batches')} of "
            f"{experiment.rollouts_per_step} answers of the unchanged policy{early}; `steps` counts the training steps "
            "after that."
        )
    note = lambda_note(experiment)
    if note is not None:
        yield f"{note}."


def _policies(experiment: Experiment, costs: Costs) -> Iterator[str]:
    algorithm = experiment.algorithm
    if "reference" in algorithm.needs:
        plan, size = algorithm.reference, size_in_words(costs.reference_bytes)
        held = f"'{plan.model}', a model of its own, {size}"
        if plan.model == "average":
            held = f"a moving average of the weights, about {plan.decay / (1 - plan.decay):.3g} updates old, {size}"
        elif plan.model == "start":
            own = "the model without its adapters, which takes no memory"
            held = own if experiment.lora is not None else f"a frozen copy of the first weights, {size}"
        if plan.tasks:
            held += f" and, for questions of {', '.join(f'{t.task} {t.model!r}' for t in plan.tasks)}"
        yield f"The reference is {held}; it costs one more pass a step."
    if algorithm.proximal is not None:
        decay = algorithm.proximal.decay
        yield (
            f"The proximal policy is a moving average of the weights, about {decay / (1 - decay):.3g} updates old: a "
            f"copy of {size_in_words(costs.average_bytes)}, and one more pass a step."
        )
    correction = algorithm.correction
    if correction is not None:
        said = _said_of(correction)
        yield said
        if "proximal / behavior" in said:
            began = "" if algorithm.proximal is not None else ", proximal that of the step's beginning"
            yield f"Behavior is the policy that answered{began}."
    elif experiment.staleness_bound and algorithm.ratio.anchor == "proximal":
        yield "Nothing corrects for answers of older weights (algorithm.correction, or algorithm.ratio.anchor)."
    note = routing_note(experiment, costs.is_mixture)
    if note is not None:
        yield f"{note}."
    elif algorithm.routing != "free":
        who = "engine chose (R3)" if algorithm.routing == "behavior" else "policy chose when the step began (R2)"
        yield f"Training sends tokens to the experts that the {who}."


def _loss(experiment: Experiment, costs: Costs) -> Iterator[str]:
    algorithm = experiment.algorithm
    surrogate = algorithm.surrogate
    if isinstance(surrogate, ClippedSurrogate) and surrogate.dual is not None:
        yield f"Tokens of negative advantage stop counting where their ratio is above {surrogate.dual:g} (dual clip)."
    for regularizer in algorithm.regularizers:
        if not _is_off(regularizer):
            yield _said_of(regularizer)
    if costs.distribution_bytes:
        kept = algorithm.top_logprobs
        what = f"the {many(kept, 'likeliest token')}" if kept else "the whole distribution"
        yield (
            f"The engine returns {what} at each position of the answers, up to "
            f"{size_in_words(costs.distribution_bytes)} a step in the run's memory"
            f"{'' if kept else '; top_k = 64 of EssKl needs less, and lumps the others'}."
        )
    if algorithm.scope == "lagged":
        yield "Effective sample sizes are those of the update before, 1 at first."
    elif algorithm.reads_statistics:
        yield "Effective sample sizes are of a whole update: all its micro-batches but one are computed twice for it."


def _imitation(experiment: Experiment, costs: Costs) -> Iterator[str]:
    plan = experiment.algorithm.replay
    if plan is None:
        return
    weighed = ", by how far these exceed the critic's value" if plan.weigh == "surplus" else ""
    yield (
        f"After every {many(plan.every, 'step')} it makes {many(plan.updates, 'update')} of "
        f"{many(min(plan.rows, plan.capacity), 'answer')} drawn from the best {plan.capacity:,} so far, of rewards "
        f"above {plan.above:g}{weighed}."
    )


_GROUPS: Mapping[str, Callable[[Experiment, Costs], Iterator[str]]] = {
    "Prompts": _prompts,
    "Turns": _turns,
    "Staleness": _staleness,
    "Rewards": _rewards,
    "Critic": _critic,
    "Policies": _policies,
    "Loss": _loss,
    "Imitation": _imitation,
    "Unusual": lambda experiment, costs: iter(remarks(experiment.algorithm)),
}

_DIVERGENCES = {"tv": "probability changed by", "kl": "KL of two outcomes, token or not, grew by"}
_SENTENCES: Mapping[type, str | Callable[[Any], str]] = {
    corrections.TruncatedIS: "Losses are multiplied by proximal / behavior {level}, at most {0.cap:g}.",
    corrections.MaskedIS: "Losses are multiplied by proximal / behavior {level}, by 0 outside [{0.low:g}, {0.high:g}].",
    corrections.RejectionSampling: "What has proximal / behavior {level} outside [{0.low:g}, {0.high:g}] is left out.",
    corrections.OffPolicyMask: "Answers of negative advantage are left out once the policy has moved away from them by "
    "more than {0.threshold:g} nats a token.",
    corrections.DivergenceMask: lambda c: (
        f"{'Tokens' if c.level == 'token' else 'Answers'} whose {_DIVERGENCES[c.divergence]} more than {c.threshold:g} "
        f"since they were sampled are left out{', if pushed further' if c.side == 'outward' else ''}."
    ),
    corrections.SecondMomentMask: "Tokens that moved furthest outward are left out until the others' mean squared "
    "log-ratio is at most {0.budget:g}.",
    corrections.EntropyMask: "Only the {0.share:.0%} of an update's tokens of highest entropy are trained.",
    corrections.CovarianceMask: "{0.share:.2%} of an update's tokens, drawn among those whose covariance of "
    "log-probability and advantage is between {0.low:g} and {0.high:g}, are left out.",
    corrections.FutureInfluence: "Losses are multiplied by how far the policy moved along with what follows, within "
    "[{0.low:g}, {0.high:g}].",
    corrections.Capped: "Losses are multiplied by proximal / behavior of each token, or less, so that "
    "current / behavior counts at most {0.cap:g}.",
    regularizers.Kl: "{0.coefficient:g} times KL(current, {0.anchor}) is added, estimated by {0.estimator}.",
    regularizers.EssKl: lambda r: (
        f"KL(current, {r.anchor}) is added, times 1 - e, e the effective sample size: nothing on-policy; "
        + ("exact." if r.estimator == "exact" else f"estimated by {r.estimator}.")
    ),
    regularizers.CovarianceKl: "{0.coefficient:g} times |log-ratio| is added for the {0.share:.2%} of an update's "
    "tokens whose covariance of log-probability and advantage is highest.",
    regularizers.Entropy: lambda r: (
        f"{abs(r.coefficient):g} times the entropy is {'subtracted' if r.coefficient > 0 else 'added, which sharpens'}."
    ),
    regularizers.PositiveNll: "{0.coefficient:g} times the mean negative log-likelihood of answers rewarded above "
    "{0.above:g} is added.",
    regularizers.SelfImitation: "{0.coefficient:g} times the negative log-likelihood of answers is added, weighed by "
    "how far they exceed the critic's value.",
}


def _said_of(piece: object) -> str:
    """Return the sentence of a correction or regularizer; one that is not ours is shown as it was written."""
    sentence = _SENTENCES.get(type(piece), "{0!r} is applied.")
    level = _LEVELS.get(getattr(piece, "level", ""), "")
    return sentence.format(piece, level=level) if isinstance(sentence, str) else sentence(piece)


def _is_off(regularizer: object) -> bool:
    terms = regularizers.Kl | regularizers.Entropy | regularizers.PositiveNll | regularizers.SelfImitation
    return isinstance(regularizer, terms) and regularizer.coefficient == 0


def _reads_tracker(experiment: Experiment) -> bool:
    algorithm = experiment.algorithm
    return uses_tracker(algorithm) or isinstance(algorithm.sampler, sections.Prioritized)
