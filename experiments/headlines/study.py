"""The headlines of four papers on SmolLM2-135M, nine grids at equal tokens.

    python -m experiments.headlines.study spo --cost
    python -m experiments.headlines.study spo [--workers 2]

README.md has the protocol and the expectations. A command can be stopped and goes on.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.claims.grid import Grid, main
from experiments.losses.study import PRIOR, SMALL, STALE, TASKS, preset

RATES = (1e-5, 3e-5, 1e-4)
FOUR = "algorithm.updates.minibatches=4"
CRITIC = ("algorithm.critic.updates.minibatches=4", "algorithm.critic.pretraining.steps=5")
VAPO = ("algorithm=vapo", "algorithm.num_generations=8", FOUR, *CRITIC)
LENGTH = "algorithm.advantage.policy_lambda"
PYTHON = 'environment={kind="tools", tools=["python"], max_turns=4}'


def grid(title: str, arms: Mapping[str, tuple[str, ...]], cells: Mapping[str, tuple[str, ...]], **more: Any) -> Grid:
    """Return a grid on SmolLM2-135M with the tasks and the rates that all have."""
    return Grid(**{"title": title, "base": "quickstart", "arms": arms, "cells": cells, "tasks": TASKS, "rates": RATES,
                   "tokens": 60_000} | more)  # fmt: skip


def named(*names: str) -> dict[str, tuple[str, ...]]:
    """Return presets as arms."""
    return {name: preset(name) for name in names}


GRIDS = {
    "first": grid(
        "SPO, GRPO and DAPO on one task",
        named("spo", "grpo", "dapo"),
        {"equal tokens": ()},
        tasks={"basic_arithmetic": TASKS["basic_arithmetic"]},
        pilots=(1000,),
        tokens=16_000,
    ),
    "quick": grid(
        "Five losses on the quickstart's sums",
        named("grpo", "dapo", "gspo", "p3o", "spo"),
        {"equal tokens": ()},
        tasks={"one-digit sums": SMALL},
        pilots=(1000,),
        tokens=24_000,
    ),
    "spo": grid(
        "SPO against methods with groups",
        {
            **named("spo", "grpo", "dapo", "rloo", "opo", "lite-ppo"),
            "greso": ("algorithm=grpo", "algorithm.sampler=Greso"),
            **named("reinforce-pp"),
        },
        {"equal tokens": ()},
    ),
    "precision": grid(
        "Low-precision answers: GRPO and P3O",
        {"grpo": ("algorithm=grpo", FOUR), "p3o": ("algorithm=p3o", FOUR)},
        {name: (f'engine.rounding="{name}"',) for name in ("none", "fp8", "int4")},
        tokens=250_000,
    ),
    "gspo": grid(
        "GSPO and GRPO with long answers",
        {"grpo": ("algorithm=grpo", FOUR), "gspo": ("algorithm=gspo", FOUR)},
        {"256 tokens, four minibatches": ("sampling.max_completion_length=256",)},
        tokens=400_000,
    ),
    "vapo": grid(
        "VAPO, its parts, and methods without a critic",
        {
            "vapo": VAPO,
            "no value pre-training": (*VAPO[:3], CRITIC[0], "algorithm.critic.pretraining=none"),
            "no decoupling": (*VAPO, "algorithm.advantage.value_lambda=0.95"),
            "no length adaptation": (*VAPO, f'{LENGTH}={{piece="Fixed", value=0.95}}'),
            "no clip-higher": (*VAPO, "algorithm.surrogate.trust.high=0.2"),
            "no token-level loss": (*VAPO, "algorithm.aggregate=SequenceMean"),
            "no imitation": (*VAPO, "algorithm.regularizers=[]"),
            "no group sampling": (*VAPO, "algorithm.num_generations=1"),
            "vc-ppo": ("algorithm=vc-ppo", FOUR, *CRITIC),
            "ppo": ("algorithm=ppo", FOUR, CRITIC[0]),
            "grpo": ("algorithm=grpo", FOUR),
        },
        {"200 tokens": ("sampling.max_completion_length=200",)},
        tokens=300_000,
    ),
    "staleness": grid(
        "Stale answers, and answers at another temperature",
        {
            "grpo": ("algorithm=grpo", FOUR),
            **named("decoupled-ppo"),
            **{n: (f"algorithm={n}", FOUR) for n in ("gspo", "p3o")},
        },
        {
            "staleness 0": (),
            "staleness 4": (STALE,),
            "staleness 16": ("max_staleness=16",),
            "sampled at 1.2": ("sampling.temperature=1.2", "learner.temperature=1.0"),
        },
    ),
    "tools": grid(
        "SPO with a Python tool and its real latencies",
        named("spo", "grpo"),
        {"synchronous": (PYTHON,), "two steps ahead": (PYTHON, "max_staleness=2")},
    ),
    "sensitivity": grid(
        "What SPO's and VAPO's constants change",
        {
            **named("spo"),
            **{f"spo, D_half {v}": ("algorithm=spo", PRIOR, f"algorithm.tracker.d_half={v}") for v in (0.02, 0.2)},
            **{f"spo, gamma {v}": ("algorithm=spo", PRIOR, f"algorithm.sampler.gamma={v}") for v in (0.5, 1.0)},
            **{f"spo, epsilon {v}": ("algorithm=spo", PRIOR, f"algorithm.sampler.epsilon={v}") for v in (0.01, 0.2)},
            **{f"spo, rho_min {v}": ("algorithm=spo", PRIOR, f"algorithm.tracker.rho_min={v}") for v in (0.75, 0.94)},
            "vapo": VAPO,
            **{f"vapo, alpha {v}": (*VAPO, f"{LENGTH}.alpha={v}") for v in (0.02, 0.5)},
        },
        {"equal tokens": ()},
    ),
}

if __name__ == "__main__":
    sys.exit(main(GRIDS, Path(__file__).resolve().parent))
