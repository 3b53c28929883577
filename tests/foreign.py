"""Runs of TRL, verl and prime-rl as these libraries write them, with made-up numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Answers = Mapping[str, Sequence[float | None]]
"""Prompt -> rewards of its answers."""


def lines(path: Path, rows: Sequence[Any]) -> None:
    """Write JSON lines; NaN is written as Python does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trl(path: Path, rewards: Sequence[float], answers: Mapping[int, Answers] | None = None, **more: Any) -> Path:
    """Write trainer_state.json with a row every second step, and a table of completions for steps of ``answers``."""
    history: list[dict[str, Any]] = []
    for number, reward in enumerate(rewards):
        step = 2 * (number + 1)
        history.append(
            {"step": step, "epoch": step / 9, "reward": reward, "rewards/right/mean": reward, "entropy": 0.5,
             "grad_norm": 0.1, "frac_reward_zero_std": 0.25, "completions/mean_length": 12.0,
             "completions/clipped_ratio": 0.0, "clip_ratio/region_mean": 0.0, "kl": None, "num_tokens": 1e4} | more
        )  # fmt: skip
    history += [
        {"step": 2, "eval_loss": 0.0, "eval_reward": 0.5},
        {"step": 2 * len(rewards), "train_runtime": 9.0, "total_flos": 0.0},
    ]
    path.mkdir(parents=True, exist_ok=True)
    (path / "trainer_state.json").write_text(
        json.dumps({"global_step": 2 * len(rewards), "max_steps": 2 * len(rewards), "log_history": history})
    )
    for step, asked in (answers or {}).items():
        _completions(path / "completions" / f"completions_{step:05d}.parquet", step, asked)
    return path


def _completions(path: Path, step: int, asked: Answers) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [(prompt, n, reward) for prompt, rewards in asked.items() for n, reward in enumerate(rewards)]
    columns = {
        "step": [step] * len(rows),
        "prompt": [prompt for prompt, _, _ in rows],
        "completion": [f"answer {n}" for _, n, _ in rows],
        "right": pyarrow.array([reward for *_, reward in rows], pyarrow.float64()),
        "note": ["logged by log_extra"] * len(rows),
        "advantage": [0.0] * len(rows),
    }
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def verl_row(step: int, reward: float, **more: Any) -> dict[str, Any]:
    """Return a row of verl's file logger."""
    data = {"critic/score/mean": reward, "critic/rewards/mean": reward - 1, "actor/entropy": 0.4,
            "actor/grad_norm": 0.2, "actor/pg_clipfrac": 0.01, "response_length/mean": 30.0,
            "response_length/clip_ratio": 0.0, "timing_s/step": 5.0, 
            "training/global_step": step, "perf/throughput": 100.0}  # fmt: skip
    return {"step": step, "data": data | more}


def verl(path: Path, rewards: Sequence[float], held_out: Answers | None = None, **more: Any) -> Path:
    """Write the file logger's lines, step 0 being the validation before training, and the last validation's answers."""
    rows = [{"step": 0, "data": {"val-core/gsm8k/acc/mean@4": 0.1, "val-aux/gsm8k/acc/std@4": 0.2}}]
    rows += [verl_row(step, reward, **more) for step, reward in enumerate(rewards, 1)]
    rows[-1]["data"]["val-core/gsm8k/acc/mean@4"] = 0.6
    lines(path / "grpo.jsonl", rows)
    step = len(rewards)
    dumped = [
        {"input": prompt, "output": f"answer {n}", "gts": "4", "score": reward, "step": step, "acc": reward}
        for prompt, each in (held_out or {}).items()
        for n, reward in enumerate(each)
    ]
    if dumped:
        lines(path / "validation" / f"{step}.jsonl", dumped)
    return path


def prime_rl(
    path: Path, rewards: Sequence[float], answers: Mapping[int, Answers] | None = None, kind: str = "train"
) -> Path:
    """Write metrics.jsonl, to which orchestrator and trainer write rows of one step, and traces."""
    rows: list[dict[str, Any]] = []
    for step, reward in enumerate(rewards):
        agg = {"train/agg/effective/solver/reward/mean": reward, "train/agg/all/has_error/mean": 0.0}
        rows.append({"step": step, "time": 1e9, "progress/output_tokens": 640, "off_policy/mean": 1.0} | agg)
        rows.append({"step": step, "time": 1e9, "optim/grad_norm": 0.3, "optim/lr": 1e-6})
        rows.append({"step": step, "time": 1e9, "entropy/all/mean": 0.6, "mismatch_kl/all/mean": 0.001})
    lines(path / "metrics.jsonl", rows)
    for step, asked in (answers or {}).items():
        episodes = [episode(prompt, n, reward) for prompt, each in asked.items() for n, reward in enumerate(each)]
        for subset in ("all", "effective"):
            lines(path / "rollouts" / f"step_{step}" / kind / subset / "traces.jsonl", episodes)
    return path


def episode(prompt: str, number: int, reward: float | None) -> dict[str, Any]:
    """Return an episode of one trace; a trace that failed has a reward that is null."""
    scored = None if reward is None else {"score": reward * 2, "weight": 0.5}
    trace = {
        "rewards": {"right": scored},
        "calls": [{"finish_reason": "stop"}],
        "nodes": [
            {"message": {"role": "user", "content": prompt}},
            {"message": {"role": "assistant", "content": f"answer {number}"}, "parent": 0},
        ],
        "ok": reward is not None,
    }
    return {"id": f"{prompt}-{number}", "task": {"type": "T", "data": {"prompt": prompt}}, "group": {"id": prompt},
            "ok": True, "traces": [trace]}  # fmt: skip


def event_file(path: Path, rows: Sequence[Mapping[str, Any]], tags: str = "") -> None:
    """Write rows of verl's file logger as one more event file of TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(path), filename_suffix=f".{len(list(path.glob('*')))}")  # type: ignore[no-untyped-call]
    for row in rows:
        for name, value in row["data"].items():
            writer.add_scalar(tags + name, value, row["step"])  # type: ignore[no-untyped-call]
    writer.close()  # type: ignore[no-untyped-call]
