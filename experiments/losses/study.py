"""Which loss? Thirteen at equal tokens on one model, synchronous and stale, with fresh and with rounded answers.

    python -m experiments.losses.study --cost
    python -m experiments.losses.study [--workers 2] [--cells "synchronous;stale"]

README.md has the protocol. The command can be stopped and goes on.
"""

import sys
from pathlib import Path

from experiments.claims.grid import Grid, main

LOSSES = (
    "grpo", "dr-grpo", "dapo", "cispo", "gspo", "sapo", "gmpo", "icepop", "ipo", "dppo", "p3o", "spo", "decoupled-ppo",
)  # fmt: skip
SMALL = ("rollouts_per_step=64", "held_out.size=100", "evaluation.samples=4", "checkpoints.every=0")
TASKS = {
    name: (
        *SMALL,
        f'task={{kind="reasoning_gym", generator="{name}", size=2000, seed=1, parameters={{{parameters}}}, '
        'suffix=" Answer with just the answer."}',
        *rewards,
    )
    for name, parameters, rewards in (
        ("basic_arithmetic", "min_terms=2, max_terms=2, min_digits=1, max_digits=2", ()),
        ("chain_sum", "min_terms=2, max_terms=3, min_digits=1, max_digits=1", ()),
        ("letter_counting", "min_words=1, max_words=2", ()),
        ("gcd", "max_numbers=2, max_value=30", ()),
        ("number_sorting", "min_numbers=2, max_numbers=3", ('rewards=[{kind="reasoning"}]',)),
        ("spell_backward", "min_word_len=3, max_word_len=4", ('rewards=[{kind="reasoning"}]',)),
    )
}
"""Candidates of different kinds, in order; the untrained model alone decides which are taken."""
PRIOR = "algorithm.tracker.initial=prior"
STALE, INT4 = "max_staleness=4", 'engine.rounding="int4"'


def preset(name: str) -> tuple[str, ...]:
    """Return the overrides of a preset; SPO's values begin at its prior."""
    return (f"algorithm={name}", PRIOR) if name == "spo" else (f"algorithm={name}",)


GRIDS = {
    "losses": Grid(
        title="Which loss?",
        base="quickstart",
        arms={name: preset(name) for name in LOSSES},
        cells={
            "synchronous": (),
            "stale": (STALE,),
            "int4": (INT4,),
            "int4 and stale": (INT4, STALE),
        },
        tasks=TASKS,
        rates=(1e-5, 3e-5, 1e-4),
        tokens=40_000,
    )
}

if __name__ == "__main__":
    sys.exit(main(GRIDS, Path(__file__).resolve().parent))
