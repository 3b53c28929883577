"""TRL's GRPOTrainer on the fixed work: the same model, prompts, group size, budget and learning rate.

python trl_grpo.py WORK.json REPEATS fp32|autocast|bf16   prints one JSON object a step; the last line is the result

WORK.json comes from ``python -m benchmarks.harness.contender work``. Nothing of TRL is changed: its methods are
wrapped in clocks. It is set for speed as far as TRL's own settings go: gradient checkpointing off, 16 answers a forward
pass (the fastest of 8, 16 and 64 that were tried), no reference model, nothing saved. "fp32" has weights and arithmetic
in fp32, "autocast" weights in fp32 and arithmetic in bf16 (TRL's own default), "bf16" both in bf16.

A step ends when it was logged; the first one is not counted. "update" is what is neither generation nor reward.
"""

import json
import re
import resource
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

CONTENDERS = {"fp32": "trl fp32", "autocast": "trl bf16 autocast", "bf16": "trl bf16"}
MICRO = 16


class Timed(GRPOTrainer):
    """The trainer with clocks around it."""

    def begin(self, precision: str) -> None:
        """Start the clock of the first step."""
        self.precision = precision
        self.steps: list[dict[str, float]] = []
        self.timer = {"generate": 0.0, "grade": 0.0, "tokens": 0.0}
        self.last = time.perf_counter()

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        answers = super()._generate_single_turn(*arguments, **named)
        self.timer["generate"] += time.perf_counter() - began
        self.timer["tokens"] += sum(map(len, answers[0]))
        return answers

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        rewards = super()._calculate_rewards(*arguments, **named)
        self.timer["grade"] += time.perf_counter() - began
        return rewards

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """End a step, where the trainer logs one; the summary of the whole training is no step."""
        super().log(logs, start_time)
        if "train_runtime" in logs:
            return
        now = time.perf_counter()
        self.steps.append({"total": now - self.last, **self.timer})
        self.timer = dict.fromkeys(self.timer, 0.0)
        self.last = now
        if len(self.steps) > 1:
            print(json.dumps(result(self.steps[1:], self.precision)), flush=True)


def result(steps: list[dict[str, float]], precision: str) -> dict[str, Any]:
    """Return the steps as the bench reads them."""
    for step in steps:
        step["update"] = step["total"] - step["generate"] - step["grade"]
    names = ("total", "generate", "grade", "update")
    measures = [{"name": name, "unit": "s", "values": [step[name] for step in steps]} for name in names]
    measures.append({"name": "tokens", "unit": "tokens", "values": [step["tokens"] for step in steps]})
    unit = 2**30 if sys.platform == "darwin" else 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    measures.append({"name": "peak memory", "unit": "GiB", "values": [peak]})
    facts = {"versions": {"trl": trl.__version__, "torch": torch.__version__}, "micro": MICRO}
    return {"case": "c1", "contender": CONTENDERS[precision], "measures": measures, "facts": facts}


def last_number() -> Any:
    """Return the reward: the last number of the answer is the right one."""

    def reward(prompts: list[str], completions: list[str], answer: list[str], **others: Any) -> list[float]:
        found = [re.findall(r"-?\d+(?:\.\d+)?", text) for text in completions]
        return [float(bool(n) and n[-1] == right) for n, right in zip(found, answer, strict=True)]

    return reward


def main() -> None:
    """Train for the warm-up and the repeats."""
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    repeats, precision = int(sys.argv[2]), sys.argv[3]
    rows = work["prompts_per_step"] * work["generations"]
    micro = min(MICRO, rows)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=precision == "autocast",
            model_init_kwargs={
                "dtype": "bfloat16" if precision == "bf16" else "float32",
                "attn_implementation": "sdpa",
            },
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=work["generations"],
            max_completion_length=work["max_new_tokens"],
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            max_steps=repeats + 1,
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        asked = [{"prompt": p, "answer": a} for p, a in zip(work["prompts"], work["answers"], strict=True)]
        trainer = Timed(
            model=work["model"],
            reward_funcs=last_number(),
            args=config,
            train_dataset=Dataset.from_list(asked),
        )
        trainer.begin(precision)
        trainer.train()


if __name__ == "__main__":
    main()
