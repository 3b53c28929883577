"""The sections of an algorithm: plain values that other rooms read, each checked when it is made."""

from dataclasses import dataclass
from typing import Literal

from gnomon.core.combinations import check_reference
from gnomon.core.errors import ConfigError, bounded, check_bounds
from gnomon.core.sections import check_braces

__all__ = [
    "EmaProximal", "Greso", "Informative", "NoPositiveResampling", "OptimalValue", "OverlongPenalty", "Prioritized",
    "ReferencePolicy", "RoleAverage", "SelfImitationBuffer", "TaskTeacher", "TrackerConfig", "Uniform", "Updates",
]  # fmt: skip


@dataclass(frozen=True)
@bounded("updates", epochs="at least 1", minibatches="at least 1")
class Updates:
    """How often a rollout batch is trained on.

    Attributes:
        epochs: Passes over the batch, at least 1.
        minibatches: Optimizer updates in a pass, at least 1.
    """

    epochs: int = 1
    minibatches: int = 1

    @property
    def total(self) -> int:
        """Optimizer steps a training step."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class Uniform:
    """Shuffled epochs: every prompt once, then every prompt again in another order."""


@dataclass(frozen=True)
@bounded(epsilon="> 0, so that every prompt can be drawn", gamma="in [0, 1]")
class Prioritized:
    """Prompts by the uncertainty of their tracked success rate, without replacement.

    weight = sqrt(v (1 - v)) / n_eff^gamma + epsilon, drawn by Gumbel-top-k.

    Attributes:
        epsilon: > 0; every prompt keeps a chance.
        gamma: In [0, 1]; 0 is the paper's text, above 0 another version's.

    Source: SPO, arXiv 2509.13232, eq. 11; gamma from the OpenReview version.
    """

    epsilon: float = 0.05
    gamma: float = 0.0


@dataclass(frozen=True)
@bounded(lowest="above 0", highest="below 1", floor="in (0, 1]", step=">= 0", target="in [0, 1]")
class Greso:
    """Shuffled epochs that skip prompts whose last visits taught nothing, before anything is generated.

    A prompt whose last z visits were all right (easy) or all wrong (hard) is skipped with probability 1 - max(p^z,
    floor), p = p_easy or p_hard. After each step p falls by ``step`` where the share of such groups reached its target,
    and rises by ``step`` where it did not. Nothing adapts in the first epoch.

    Attributes:
        initial: First value of p.
        step: Change of p after a step.
        lowest, highest: Bounds of p.
        floor: Smallest probability with which a prompt is asked.
        target: Share of groups without a signal that is tolerated; a third of it easy, two thirds hard.

    Source: GRESO, arXiv 2506.02177; constants of its code.
    """

    initial: float = 0.5
    step: float = 0.01
    lowest: float = 0.05
    highest: float = 0.95
    floor: float = 0.01
    target: float = 0.25

    def __post_init__(self) -> None:
        check_bounds(
            "Greso",
            self,
            lowest=(0 < self.lowest <= self.highest, f"above 0 and at most highest = {self.highest}"),
            initial=(
                self.lowest <= self.initial <= self.highest,
                f"from lowest = {self.lowest} to highest = {self.highest}",
            ),
        )


@dataclass(frozen=True)
@bounded(pass_rate="in (0, 1]")
class NoPositiveResampling:
    """Shuffled epochs that ask a prompt no more once it is mastered.

    A prompt is dropped for good when a visit passes: at least ``pass_rate`` of its graded responses have a reward of
    ``success`` or more. Once all are dropped they are asked again.

    Attributes:
        pass_rate: In (0, 1]; 15 of 16 responses reach 0.9, and of 8 all.
        success: Least reward of a response that passes.
        part: The component of the reward that is compared, by its name, before its weight; "" is the whole reward. A
            response without such a component is judged by its reward.

    Source: no-positive-resampling, ScaleRL, arXiv 2510.13786, section 3.2, which looks at the history of pass rates;
        here each visit is judged by itself.
    """

    pass_rate: float = 0.9
    success: float = 1.0
    part: str = ""


@dataclass(frozen=True)
@bounded(rho_min="in (0, 1)", rho_max="in (0, 1)", d_half="> 0", n0="at least 1", prior=">= 0")
class TrackerConfig:
    """A persistent success rate for each prompt, forgetting as fast as the policy drifts.

    rho = clip(2^(-drift / d_half), rho_min, rho_max); alpha <- rho alpha + r; beta <- rho beta + 1 - r.

    Attributes:
        rho_min, rho_max: In (0, 1); the window is 1 / (1 - rho) visits, 8 to 25.
        d_half: Nats of mean absolute log-probability change that halve the memory.
        drift: "replayed" scores the prompt's previous response again (the reference's), "accumulated" adds up the drift
            that updates measured anyway (ours), "constant" always forgets with rho_min.
        rewards: "binary" (Beta counts; rewards must be 0 or 1) or "continuous" (the same as a moving average of any
            real).
        initial: "prior", "samples" (n0 rollouts a prompt before training), or the path of a JSON file, id to success
            rate or to [successes, samples].
        prior: Pseudo-count added to successes and failures (Jeffreys 0.5); 0 is the paper's plain mean.

    Source: SPO, arXiv 2509.13232, section 3.1; constants of its recipe. Accumulated drift is ours.
    """

    rho_min: float = 0.875
    rho_max: float = 0.96
    d_half: float = 0.06
    drift: Literal["replayed", "accumulated", "constant"] = "replayed"
    rewards: Literal["binary", "continuous"] = "binary"
    initial: str = "samples"
    n0: int = 8
    prior: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.rho_min <= self.rho_max < 1:
            raise ConfigError(f"TrackerConfig needs 0 < rho_min <= rho_max < 1, got {self.rho_min}, {self.rho_max}")


@dataclass(frozen=True)
@bounded(beta="> 0", n0="at least 1")
class OptimalValue:
    """The value of the best policy near the initial one, estimated once for each prompt and then fixed.

    V*(x) = beta log mean exp(r / beta) over ``n0`` samples of the initial policy: the mean for a large beta, the
    largest for a small one. What such a table is worth falls as the policy moves; `TrackerConfig` follows it.

    Attributes:
        beta: > 0, in rewards.
        n0: Number of samples of a prompt.
        initial: "samples", or the path of a JSON file, id to value.

    Source: A*-PO, arXiv 2505.20686, stage 1.
    """

    beta: float = 0.5
    n0: int = 8
    initial: str = "samples"


@dataclass(frozen=True)
@bounded(decay="in (0, 1)")
class RoleAverage:
    """What the policy earned lately in each role, the baseline of a game that it plays with itself.

    b <- decay b + (1 - decay) r for every graded rollout of the role, in their order; b is 0 at first. The role of a
    task is its column ``role``; tasks without one share a role.

    Attributes:
        decay: In (0, 1); 1 / (1 - decay) rollouts count, 20 for 0.95.

    Source: role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119, section 3.3.
    """

    decay: float = 0.95


@dataclass(frozen=True)
@bounded(decay="in (0, 1)")
class EmaProximal:
    """The proximal policy is a moving average of the weights, one step of it after every optimizer step.

    n <- 1 + decay n, then average <- average + (weights - average) / n (bias-corrected), with n = 1 for the initial
    weights: weights that are k updates older count decay^k as much. Its distance behind the current policy stays the
    same however often a step updates.

    Attributes:
        decay: In (0, 1); its center of mass lies decay / (1 - decay) updates back, 8 for 0.889.

    Source: Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641.
    """

    decay: float = 0.889


@dataclass(frozen=True)
class TaskTeacher:
    """The reference of one part of a mixture of tasks.

    Attributes:
        task: The part's name, with which the ids of its questions begin.
        model: A folder, the folder of a run, or the name of a model.

    Source: multi-teacher on-policy distillation (MOPD), arXiv 2601.02780.
    """

    task: str
    model: str


@dataclass(frozen=True)
@bounded("reference", decay="in (0, 1)")
class ReferencePolicy:
    """Whose log-probabilities the reference has: the policy's own of some time, or a teacher's.

    Attributes:
        model: "start", the policy's first weights; "average", a moving average of its weights; "policy", its weights as
            each step begins, which differ by ``prompt`` alone; or a teacher: a folder, the folder of a run (its newest
            checkpoint), or the name of a model. The token strings of a teacher are the policy's.
        tasks: Teachers of the parts of a mixture, {task, model} each; ``model`` is that of the other parts.
        decay: Of "average", in (0, 1); see `EmaProximal`.
        precision: Of a teacher; "auto" is the learner's.
        trust_remote_code: Whether code in a teacher's folder may run.
        prompt: What the reference is asked in place of the question, so that it knows more: text with {question},
            columns of the row as {NAME}, such as {answer}, and {sibling}, the best other answer of the group. "" asks
            the same. A row without such an answer is not taught.
        success: Least reward of a {sibling}.

    Source: another prompt for the policy itself, SDFT, arXiv 2601.19897; with a solution of the group, SDPO, arXiv
        2601.20802.
    """

    model: str = "start"
    tasks: tuple[TaskTeacher, ...] = ()
    decay: float = 0.95
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    trust_remote_code: bool = False
    prompt: str = ""
    success: float = 1.0

    def __post_init__(self) -> None:
        if self.prompt and "{question}" not in self.prompt:
            raise ConfigError(f"reference.prompt = {self.prompt[:60]!r} has no {{question}}; write it where it stands")
        check_braces("algorithm.reference.prompt", self.prompt)
        if self.prompt.strip() == "{question}":
            raise ConfigError(
                "reference.prompt = '{question}' asks the reference what the policy is asked; write what it shall know "
                "too, such as '{question} (The answer is {answer}.)', or remove it"
            )
        if self.model == "policy" and not self.prompt:
            raise ConfigError(
                'reference.model = "policy" is the policy itself, and with the same prompt the distance is 0; set '
                'reference.prompt to what it shall know, such as "{question} (The answer is {answer}.)", or model = '
                '"average"'
            )
        check_reference("reference", self)
        check_bounds("reference", self, model=(bool(self.model), "a name"))
        named = [teacher.task for teacher in self.tasks]
        if len(set(named)) < len(named):
            raise ConfigError(f"reference.tasks names a task twice: {named}; one teacher each")

    @property
    def teachers(self) -> tuple[str, ...]:
        """The other models that it computes with, each once."""
        own = () if self.model in ("start", "average", "policy") else (self.model,)
        return tuple(dict.fromkeys((*own, *(teacher.model for teacher in self.tasks))))


@dataclass(frozen=True)
@bounded(
    capacity="at least 1",
    per_prompt="at least 1",
    every="at least 1",
    rows="at least 1",
    updates="at least 1",
    learning_rate_ratio="> 0 and finite",
    value_coefficient=">= 0 and finite",
    above="finite",
)
class SelfImitationBuffer:
    """Imitation of the best responses so far: a buffer of them, and updates of their own every few steps.

    After every ``every`` training steps ``updates`` optimizer steps are made on ``rows`` responses drawn from the
    buffer, on -w log current, w = 1, or (R - V)_+ with ``weigh = "surplus"``, which needs a critic.

    Attributes:
        capacity: Responses kept, the best by reward, newer before older.
        per_prompt: Most responses of one prompt.
        above: Only rewards greater than this enter.
        every: Training steps between two imitations.
        rows: Responses that an update draws.
        updates: Optimizer steps of an imitation.
        weigh: "all" weighs each response 1, "surplus" by (R - V)_+.
        learning_rate_ratio: Learning rate as a multiple of the policy's, > 0.
        value_coefficient: With "surplus", coefficient of ((R - V)_+)^2 / 2 in the critic's loss.

    Source: "all": the review's form of VAPO; "surplus": Self-Imitation Learning, Oh et al. 2018, arXiv 1806.05635.
    """

    capacity: int = 256
    per_prompt: int = 1
    above: float = 0.0
    every: int = 4
    rows: int = 64
    updates: int = 1
    weigh: Literal["all", "surplus"] = "all"
    learning_rate_ratio: float = 1.0
    value_coefficient: float = 0.01


@dataclass(frozen=True)
@bounded(max_attempts="at least 1")
class Informative:
    """Keep a group only if its rewards differ, else ask another prompt.

    Attributes:
        max_attempts: Prompts asked in all, as a multiple of the step's prompts.
        part: The component of the reward that must differ, by its name, such as "answer"; "" is the whole reward. They
            are not the same where penalties or format rewards make right answers differ.

    Source: DAPO, arXiv 2503.14476, section 3.2, which looks at accuracy; the bound is verl's.
    """

    max_attempts: int = 10
    part: str = ""


@dataclass(frozen=True)
@bounded(buffer="in (0, 1]", factor=">= 0")
class OverlongPenalty:
    """Lower the reward linearly over the last ``buffer`` tokens of the budget, by ``factor`` at its end.

    penalty(l) = -factor * clip((l - (L_max - buffer)) / buffer, 0, 1); L_max is the completion budget.

    Attributes:
        buffer: A fraction of the budget in (0, 1].
        factor: >= 0, in rewards.

    Source: DAPO, arXiv 2503.14476, eq. 13 (4096 of 20480 tokens, that is 0.2).
    """

    buffer: float = 0.2
    factor: float = 1.0
