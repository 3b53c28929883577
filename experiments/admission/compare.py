"""Fixed bounds on staleness against a measured one, at the smallest scale: `python experiments/admission/compare.py`.

Writes results.json beside this file: one row a run. Four minutes on two cores.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from gnomon.config.experiment import load
from gnomon.records.jsonl import read_rows
from gnomon.training.api import train_experiment

BOUNDS = ("0", "2", "8", "measured")
SEEDS = (0, 1, 2)
STEPS = 30
LAST = 10
COMMON = (
    f"steps={STEPS}", "rollouts_per_step=64", "evaluation.before=false", "checkpoints.every=0",
    "records.rollouts=false", "rewards=[{kind='format', pattern='[0-9].*'}]",
    "learner.optimizer.learning_rate=1e-2",
)  # fmt: skip


def run(bound: str, seed: int) -> dict[str, Any]:
    """Return what one run came to."""
    with tempfile.TemporaryDirectory(prefix="gnomon-admission-") as folder:
        overrides = [*COMMON, f"max_staleness={bound}", f"seed={seed}"]
        train_experiment(load("tiny", overrides), Path(folder) / "run")
        rows = list(read_rows(Path(folder) / "run" / "metrics.jsonl"))

    def mean(name: str, over: list[dict[str, Any]] = rows) -> float:
        return round(fmean([row[name] for row in over if name in row]), 4)

    return {
        "max_staleness": bound,
        "seed": seed,
        "reward_all_steps": mean("rollout/reward_mean"),
        "reward_last_steps": mean("rollout/reward_mean", rows[-LAST:]),
        "seconds": rows[-1]["seconds"],
        "staleness_mean": mean("stream/staleness_steps_mean"),
        "staleness_max": max(row["stream/staleness_steps_max"] for row in rows),
        "ess_mean": mean("loss/ess_fraction"),
        "ess_min": round(min(row["loss/ess_fraction"] for row in rows if "loss/ess_fraction" in row), 4),
        "distrusted_fraction": round(sum(r["stream/distrusted_rollouts"] for r in rows) / (64 * STEPS), 4),
    }


def main() -> None:
    """Run every bound with every seed, seed by seed, so that a busy machine slows all bounds alike."""
    results = [run(bound, seed) for seed in SEEDS for bound in BOUNDS]
    text = json.dumps({"overrides": COMMON, "runs": results}, indent=1)
    Path(__file__).with_name("results.json").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
