"""Group-free against group-synchronous on a real engine: vLLM, with answers whose lengths vary as much as in the claim.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m experiments.group_free.on_vllm > experiments/group_free/vllm.json

Nothing sleeps: SmolLM2 in float32 generates each answer, token by token, to a length of its own. More rows at once make
each step of the engine slower, which the simulation leaves out. Weights are not exchanged, since waiting is measured.
Seconds are of this process's processor time, which is what they would be on the clock if nothing else ran: vLLM
computes all the time, and on one thread (OMP_NUM_THREADS=1). So they can be measured beside other work.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from experiments.group_free.waiting import LogNormal, QueueSetting, measure

from gnomon.core.types import Completion, Rollout, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.vllm.engine import VllmEngine

MODEL = "smollm2-135m-instruct"
SIGMA, MEDIAN, LONGEST = 1.0, 6.0, 200
PROMPT_TOKENS = 16
STEPS, FILLING, SEEDS = 4, 1, (0, 1, 2)
ROWS = 32
SETTINGS = {
    "group-synchronous": QueueSetting(16, 4),
    "groups that wait for themselves": QueueSetting(16, 4, 2, 16),
    "group-free": QueueSetting(16, 1, 2, 16),
    "group-free, the slow dropped": QueueSetting(16, 1, 2, 1, "drop"),
    "group-synchronous, as many at once": QueueSetting(ROWS, 4),
}


@dataclass
class Budgeted:
    """vLLM, asked for answers that end at a length that the key decides; counts tokens and notes versions."""

    inner: VllmEngine
    lengths: LogNormal
    version: int = -1
    tokens: int = 0

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return the answers when the longest of them is there."""
        oldest = self.version
        ids = [
            1 + (prompt[0] * 7919 + place * 104729) % (self.inner.vocabulary_size - 1) for place in range(PROMPT_TOKENS)
        ]
        answers = await asyncio.gather(*(self._one(ids, key, sampling) for key in keys))
        return [replace(done, oldest_version=oldest, newest_version=self.version) for done in answers]

    async def _one(self, prompt: Sequence[int], key: int, sampling: Sampling) -> Completion:
        budget = min(LONGEST, max(1, round(self.lengths((), key))))
        [done] = await self.inner.generate(prompt, [key], replace(sampling, max_completion_length=budget))
        self.tokens += budget
        return done

    async def load(self, snapshot: Snapshot) -> None:
        """Take on the version alone."""
        self.version = snapshot.version


class Busy(asyncio.SelectorEventLoop):
    """An event loop whose clock is this process's processor time."""

    def time(self) -> float:
        """Return seconds."""
        return time.process_time()


def length(rollout: Rollout) -> float:
    return float(len(rollout.response))


def once(engine: VllmEngine, setting: QueueSetting, seed: int) -> dict[str, float]:
    """Return what one run came to."""
    budgeted = Budgeted(engine, LogNormal(SIGMA, MEDIAN))
    with asyncio.Runner(loop_factory=Busy) as runner:
        waited = runner.run(measure(setting, budgeted, STEPS, FILLING, seed, length))
    return {
        "rollouts_per_second": round(waited.rollouts_per_second, 3),
        "trained_tokens_per_second": round(waited.rollouts_per_second * waited.latency_mean, 2),
        "tokens_of_trained": round(waited.latency_mean, 2),
        "staleness_max": waited.staleness_max,
    }


def main() -> None:
    """Measure every setting in turn, for one seed after the other, so that a busy minute meets all of them."""
    engine = VllmEngine(MODEL, torch.float32, max_concurrent=ROWS)
    once(engine, QueueSetting(4), 99)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for seed in SEEDS:
        for name, setting in SETTINGS.items():
            found[name].append(once(engine, setting, seed))
            print(f"{name}, seed {seed}: {found[name][-1]}", file=sys.stderr)
    base = [run["rollouts_per_second"] for run in found["group-synchronous"]]
    rows = {}
    for name, runs in found.items():
        ratios = [run["rollouts_per_second"] / at for run, at in zip(runs, base, strict=True)]
        rows[name] = {"runs": runs, "speed_up": round(statistics.fmean(ratios), 2)}
        rows[name] |= {"lowest": round(min(ratios), 2), "highest": round(max(ratios), 2)}
    setting = {"model": MODEL, "sigma": SIGMA, "median_tokens": MEDIAN, "longest": LONGEST, "steps": STEPS}
    tables = {name: asdict(one) for name, one in SETTINGS.items()}
    print(json.dumps({**setting, "filling": FILLING, "settings": tables, "found": rows}, indent=1))
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
