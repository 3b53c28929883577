"""Critics on questions whose answers are short or ten times as long: the arms of VAPO's ablation, and what is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from experiments.claims.arms import Arm, Number, whole
from experiments.claims.estimates import NotMeasured
from experiments.claims.exact_rates import checkpoint_rates
from experiments.claims.lengths import MARKED_HELD_OUT, held_out_at, stretch_experiment, write_stretches
from experiments.claims.reward_model import reward_model
from torch import Tensor

from gnomon.config.experiment import load
from gnomon.records.batches import read_batch
from gnomon.records.reading import RunRecord
from gnomon.training.build_data import questions

ALPHA, FIXED = 0.5, 0.5
WITHOUT_CRITIC = ("grpo", "dapo")
OTHERS = (*WITHOUT_CRITIC, "the review's")
FULL = "vapo"
QUARTERS = ("first", "second", "third", "last")
_FOUR = "algorithm.updates.minibatches=4"
_CRITIC = ("algorithm.critic.updates.minibatches=4", "algorithm.critic.learning_rate_ratio=2.0")
_TAUGHT = "algorithm.critic.pretraining.steps=24"
_LENGTH = f"algorithm.advantage.policy_lambda.alpha={ALPHA}"
_REPLAY = 'algorithm.replay={piece="SelfImitationBuffer", every=4, rows=64, capacity=256}'


def _vapo(*changes: str, group: int = 8, taught: str = _TAUGHT, length: str = _LENGTH) -> tuple[str, ...]:
    return ("algorithm=vapo", f"algorithm.num_generations={group}", _FOUR, *_CRITIC, taught, length, *changes)


CRITIC_ARMS: Mapping[str, tuple[str, ...]] = {
    FULL: _vapo(),
    "no value pre-training": _vapo(taught="algorithm.critic.pretraining=none"),
    "no decoupling": _vapo(f"algorithm.advantage.value_lambda={FIXED}"),
    "no length adaptation": _vapo(length=f'algorithm.advantage.policy_lambda={{piece="Fixed", value={FIXED}}}'),
    "no clip-higher": _vapo("algorithm.surrogate.trust.high=0.2"),
    "no token-level loss": _vapo("algorithm.aggregate=SequenceMean"),
    "no imitation": _vapo("algorithm.regularizers=[]"),
    "no group sampling": _vapo(group=1),
    "ppo": (
        "algorithm=ppo",
        _FOUR,
        *_CRITIC,
        "algorithm.aggregate=SequenceMean",
        f"algorithm.advantage.of.policy_lambda.value={FIXED}",
        f"algorithm.advantage.of.value_lambda={FIXED}",
    ),
    "grpo": ("algorithm=grpo", _FOUR),
    "dapo": ("algorithm=dapo", "algorithm.num_generations=8", _FOUR, "algorithm.overlong=none"),
    "length by sigmoid": _vapo(length='algorithm.advantage.policy_lambda={piece="LengthSigmoid"}'),
    "imitation by replay": _vapo("algorithm.regularizers=[]", _REPLAY),
    "the review's": ("algorithm=vapo-review", _FOUR, "algorithm.critic.updates.minibatches=4", _TAUGHT),
}
"""Name to overrides. VAPO's parts are taken out one by one; the last three are other forms of two of them.

A critic with a trunk of its own begins as a reward model; the arms of `OTHERS` have none."""


@dataclass(frozen=True)
class TrainingPace:
    """How the arms are trained.

    rate: learning rate of the policy. steps: each of so many ``answers``. minibatches: a step's, of policy and critic.
    models: warm models that the seeds share; None is one for each seed.
    """

    rate: float = 1e-3
    steps: int = 24
    answers: int = 64
    minibatches: int = 4
    models: int | None = 3

    def overrides(self, name: str) -> tuple[str, ...]:
        """Return what is said over an arm's own four minibatches."""
        whose = ("algorithm",) if name in WITHOUT_CRITIC else ("algorithm", "algorithm.critic")
        return () if self.minibatches == 4 else tuple(f"{one}.updates.minibatches={self.minibatches}" for one in whose)


HASTY = TrainingPace()
"""In which PPO loses what it could do, and nobody learns reliably: the noise of 16 answers an update."""

CALM = TrainingPace(rate=1e-3, steps=12, answers=128, minibatches=2, models=None)
"""In which GRPO learns and PPO falls behind, over the first steps."""


def critic_arms(names: Sequence[str], pace: TrainingPace = HASTY) -> Callable[[Path, int], list[Arm]]:
    """Return what makes these arms for a seed."""

    def arms(folder: Path, seed: int) -> list[Arm]:
        model = seed if pace.models is None else seed % pace.models
        base = {**stretch_experiment(folder, model, is_marked=True), "steps": pace.steps}
        base["rollouts_per_step"] = pace.answers
        base["records"] = {"batches": True}
        base["learner"] = {"precision": "fp32", "optimizer": {"learning_rate": pace.rate}}
        first = reward_model(Path(base["model"]), write_stretches(folder, True), folder, MARKED_HELD_OUT)
        begins = (f"algorithm.critic.initial={first}",)
        return [
            Arm(name, base, CRITIC_ARMS[name] + (() if name in OTHERS else begins) + pace.overrides(name))
            for name in names
        ]

    return arms


def held_out_between(shortest: int, longest: int) -> Number:
    """Return what reads the exact held-out success rate of questions whose answers have so many letters."""

    def read(record: RunRecord) -> float:
        found = [rate for length, rate in _by_length(record.path) if shortest <= length <= longest]
        if not found:
            raise NotMeasured("no held-out question is of that length")
        return fmean(found)

    return read


HELD_OUT: Mapping[str, Number] = {
    "held out": held_out_at(),
    "held out, short": held_out_between(2, 7),
    "held out, long": held_out_between(14, 20),
    "reward, all steps": whole("rollout/reward_mean"),
}
"""What every comparison of these arms reads: the exact rate in the end, by length too, and the reward on the way."""


@cache
def _by_length(run: Path) -> list[tuple[float, float]]:
    record = RunRecord(run)
    tasks = questions(load(record.files.experiment).experiment).split.held_out
    lengths = [float(tasks[index].columns["difficulty"]) for index in range(len(tasks))]
    return list(zip(lengths, checkpoint_rates(record), strict=True))


def explained(quarter: int, first: int, last: int) -> Number:
    """Return what reads how well values foretold rewards in one quarter of the responses, over steps first to last.

    1 - Var(R - V) / Var(R) over the tokens whose place lies there, by a critic that had not seen the batch. 1 is
    perfect, 0 no better than a constant.
    """

    def read(record: RunRecord) -> float:
        gaps, rewards = _by_quarter(record.path, first, last)[quarter]
        spread = float(rewards.var()) if len(rewards) > 1 else 0.0
        if spread == 0:
            raise NotMeasured("all rewards are equal")
        return 1 - float(gaps.var()) / spread

    return read


@cache
def _by_quarter(run: Path, first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    """Return of each quarter R - V and R of its tokens. Raises: NotMeasured where there are no values."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in QUARTERS]
    for step in range(first, last + 1):
        path = run / "batches" / f"step-{step:06d}.json"
        batch = read_batch(path).batch if path.is_file() else None
        if batch is None or batch.values is None:
            raise NotMeasured(f"{run.name} has no values of step {step}")
        counts = batch.mask.sum(1, keepdim=True)
        place = (batch.mask.cumsum(1) - 1) * len(QUARTERS) // counts.clamp(min=1)
        rewards = batch.rewards[:, None].expand_as(batch.values)
        for quarter, found in enumerate(parts):
            chosen = batch.mask & (place == quarter)
            found.append(((rewards - batch.values)[chosen], rewards[chosen]))
    return [(torch.cat([g for g, _ in found]), torch.cat([r for _, r in found])) for found in parts]
