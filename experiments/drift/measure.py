"""How well does accumulated drift (no extra pass) agree with replayed drift (two extra passes a step)?

    python experiments/drift/measure.py tiny steps=60 algorithm.updates.minibatches=8 > experiments/drift/tiny.json

One SPO run whose tracker uses replayed drift, while accumulated drift is measured beside it for the same visits.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gnomon.config.experiment import load
from gnomon.core.types import Group, State
from gnomon.engines.local import LocalEngine
from gnomon.learner.allocator import tune_allocator
from gnomon.learner.learner import TorchLearner
from gnomon.learner.precision import dtype_of, resolve_precision
from gnomon.models.load import load_model
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.drift import AccumulatedDrift, RescoredDrift, Score
from gnomon.rollouts.curriculum.tracker import DecayRule
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.baseline_tracking import PromptBaseline
from gnomon.training.build_data import build_curriculum, keeping, questions


@dataclass
class Both:
    """Answers with replayed drift, and keeps the accumulated one of the same visits."""

    replayed: RescoredDrift
    accumulated: AccumulatedDrift
    pairs: list[tuple[float, float]] = field(default_factory=list)
    needs_updates = 2

    def record(self, update_drifts: Sequence[float]) -> None:
        """Tell the accumulated one; the replayed one takes no notes."""
        self.accumulated.record(update_drifts)

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return the replayed drift, after noting both."""
        replayed = await self.replayed.measure(groups, score)
        accumulated = await self.accumulated.measure(groups, score)
        self.pairs += [(replayed[task], accumulated[task]) for task in replayed if task in accumulated]
        return replayed

    def state(self) -> State:
        """Return nothing: this run is not resumed."""
        return State()

    def restore(self, state: State) -> None:
        """Refuse: this run is not resumed."""
        raise NotImplementedError("this run is not resumed")


async def measure(source: str, overrides: Sequence[str]) -> dict[str, object]:
    """Return the agreement over all revisits of one run."""
    experiment = load(source, ["algorithm=spo", "algorithm.tracker.initial=prior", *overrides]).experiment
    asked = questions(experiment)
    chosen = build_curriculum(experiment.algorithm, asked.split.train, experiment.seed)
    model = load_model(experiment.model, dtype_of(resolve_precision(experiment.learner.precision)))
    learner, engine = TorchLearner(model, experiment.learner, experiment.steps), LocalEngine(model)
    task_index = TaskIndex(asked.split.train[i].id for i in range(len(asked.split.train)))
    both = Both(RescoredDrift(task_index), AccumulatedDrift(task_index))
    tracking = PromptBaseline(chosen.tracker, both, learner, experiment.sampling.temperature)
    is_kept, attempts = keeping(experiment.algorithm)
    await engine.load(learner.snapshot())
    async with GradingPool(asked.grading) as pool:
        rollouter = Rollouter(engine, pool, asked.tokenizer.decode, asked.sampling, 1, experiment.seed)
        prompts = experiment.prompts_per_step
        stream = RolloutScheduler(chosen.curriculum, asked.split.train, rollouter, prompts, 0, is_kept, attempts)
        for step in range(experiment.steps):
            finished = await stream.next_batch()
            batch = collate(finished.groups, experiment.sampling.temperature, tracking.baseline)
            batch = (await learner.score(batch, experiment.algorithm.needs | {"proximal"})).into(batch)
            batch = experiment.algorithm.prepare(batch)
            cuts = experiment.algorithm.minibatches(batch, step)
            updates = [await learner.update(cut, experiment.algorithm, step) for cut in cuts]
            learner.advance()
            await engine.load(learner.snapshot())
            await tracking.observe(finished.groups, updates)
    await engine.close()
    return agreement(both.pairs, DecayRule(0.875, 0.96, 0.06))


def agreement(pairs: Sequence[tuple[float, float]], forgetting: DecayRule) -> dict[str, object]:
    """Return correlations, the ratio of the two, and how often they give the same forgetting."""
    replayed, accumulated = np.array(pairs).T
    ranks = [np.argsort(np.argsort(x)) for x in (replayed, accumulated)]
    rho = [np.array([forgetting(float(d)) for d in x]) for x in (replayed, accumulated)]
    return {
        "revisits": len(pairs),
        "replayed_nats_quartiles": np.quantile(replayed, [0.25, 0.5, 0.75]).round(5).tolist(),
        "accumulated_nats_quartiles": np.quantile(accumulated, [0.25, 0.5, 0.75]).round(5).tolist(),
        "median_ratio_accumulated_to_replayed": round(float(np.median(accumulated / np.maximum(replayed, 1e-12))), 3),
        "pearson": round(float(np.corrcoef(replayed, accumulated)[0, 1]), 3),
        "spearman": round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 3),
        "rho_mean_abs_difference": round(float(np.abs(rho[0] - rho[1]).mean()), 4),
        "rho_equal_fraction": round(float((np.abs(rho[0] - rho[1]) < 0.005).mean()), 3),
    }


if __name__ == "__main__":
    tune_allocator()
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2:])), indent=2))
