"""Run directories as a run leaves them, written in milliseconds."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = """model = "tiny"
name = "made"
steps = {steps}
max_staleness = 1

[algorithm]
name = "grpo"

[task]
kind = "arithmetic"

[engine]
kind = "local"

[grading]
workers = 2
"""


def made_run(path: Path, done: int, steps: int = 20) -> Path:
    """Write a run of ``steps`` steps of which ``done`` are done, with an evaluation before, and nobody at work."""
    (path / "rollouts").mkdir(parents=True)
    (path / "experiment.toml").write_text(EXPERIMENT.format(steps=steps))
    (path / ".lock").write_text('{"pid": 1, "host": "elsewhere", "started": "2026-01-01T00:00:00+00:00"}\n')
    add_rows(path / "metrics.jsonl", [metrics(step) for step in range(1, done + 1)])
    add_rows(path / "evaluations.jsonl", [evaluation(0, 0.25)])
    if done:
        write_rollouts(path, done, [rollout(done, n // 4, f"answer {n}", n / 8) for n in range(8)])
    return path


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    """Return a row of metrics; the reward rises, a step takes 2 seconds."""
    row = {
        "step": step, "seconds": 2.0 * step, "rollout/reward_mean": 1 - math.exp(-step / 10), "loss/entropy_nats": 2.0,
        "rollout/length_tokens_mean": 9.5, "rollout/truncated_fraction": 0.25, "loss/ess_fraction": 0.875,
        "rollout/degenerate_group_fraction": 0.5, "rollout/error_fraction": 0.0, "learner/gradient_norm": 1.5,
        "loss/clipped_fraction": 0.01, "loss/kl_behavior_nats": 1e-5, "mismatch/logprob_abs_mean_nats": 3e-6,
        "tokens/generated": 600, "tokens/wasted_fraction": 0.4, "time/step_seconds": 2.0, "time/generate_seconds": 1.0,
        "time/update_seconds": 0.5, "time/score_seconds": 0.25, "time/publish_seconds": 0.2, "time/grade_seconds": 0.05,
        "time/track_seconds": 0.0, "time/wait_seconds": 1.0, "memory/peak_bytes": 3 << 30, "engines/alive": 1,
        "engines/lost": 0, "stream/in_flight_groups": 4, "stream/finished_groups": 2,
        "stream/staleness_steps_mean": 0.5, "stream/staleness_steps_max": 1, "reward/answer_mean": 0.5,
        "learner/learning_rate": 3e-5,
    }  # fmt: skip
    return row | changes


def evaluation(step: int, mean: float) -> dict[str, Any]:
    """Return a row of evaluations."""
    score = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
    return {"step": step, "task": "made", "prompts": 200, "samples": 1, "scores": {"answer": score, "reward": score}}


def rollout(step: int, group: int, text: str, reward: float | None, error: str | None = None) -> dict[str, Any]:
    """Return a line of a rollout file, its fields in the order in which a run writes them."""
    return {
        "step": step, "group": group, "kept": True, "question": f"question {group}", "task_id": f"task-{group}",
        "text": text, "reward": reward, "error": error, "parts": {"answer": reward}, "stop": "stop",
        "oldest_version": 0, "newest_version": 0, "prompt": [1, 2, 3], "response": [4] * 9, "logprobs": [-0.5] * 9,
    }  # fmt: skip


def finding(rule: str, severity: str, step: int, **changes: Any) -> dict[str, Any]:
    """Return a row of findings."""
    row = {
        "rule": rule, "severity": severity, "first_step": 1, "step": step, "summary": f"{rule} was seen at step {step}",
        "evidence": {"share": 0.5}, "meaning": "It usually means this.", "advice": ["Try that.", "Or that."],
        "samples": [],
    }  # fmt: skip
    return row | changes


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_rollouts(path: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rollouts of a step."""
    (path / "rollouts" / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fingerprint(path: Path) -> dict[str, tuple[str, int, int]]:
    """Return the content, time of writing and rights of every file and folder of a run."""
    found = {}
    for place in sorted([path, *path.rglob("*")]):
        status, content = place.stat(), place.read_bytes() if place.is_file() else b""
        name = str(place.relative_to(path))
        found[name] = (hashlib.sha256(content).hexdigest(), status.st_mtime_ns, status.st_mode)
    return found
