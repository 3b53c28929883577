"""Dr. GRPO's length bias, and what a token-level loss does about it."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from experiments.claims.arms import Arm, ArmLine, Lines, Runs, last, whole
from experiments.claims.definition import Claim, Gain, Level
from experiments.claims.estimates import NotMeasured, Points
from experiments.claims.families import sums
from experiments.claims.seeds_needed import fresh_alone
from experiments.claims.warm_start import Warming, warm_model

from gnomon.core.atomic_files import write_durably
from gnomon.core.tables import to_table
from gnomon.records.reading import RunRecord
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

STEPS, EARLY, LATE, BUDGET = 40, 5, 10, 32
LONGEST = 15
HELD_OUT = HeldOut(size=64, fraction=0.2)
TOSSES, TOSSED, HAZARD, ROOM = 30, HeldOut(size=8, fraction=0.1), 1 / 8, 64
SEEN, FRESH, ON_SUMS = tuple(range(4)), tuple(range(4, 14)), tuple(range(4, 8))
SEQUENCE, CONSTANT, GAP = "sequence mean", "constant length (Dr. GRPO)", "wrong minus right"
SHOWN = ("yes", "no")  # as in coin.py
COIN = str(Path(__file__).resolve().parent / "coin.py") + ":Coin"


def aggregates(length: int) -> dict[str, tuple[str, ...]]:
    """Return each normalization of the length, by name."""
    return {
        "GRPO": ("algorithm=grpo",),
        SEQUENCE: ("algorithm=grpo", "algorithm.advantage.scale=none"),
        "token mean": ("algorithm=grpo", "algorithm.advantage.scale=none", "algorithm.aggregate=TokenMean"),
        CONSTANT: ("algorithm=dr-grpo", f"algorithm.aggregate.length={length}"),
    }


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> TableTask:
    """Write a table and return it as a task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, "".join(json.dumps(row) + "\n" for row in rows).encode(), is_synced=False)
    return TableTask(str(path), answer_column="answer")


def sums_table(folder: Path, size: int) -> TableTask:
    """Write sums whose answer may be followed by any number of dots from none to 15; return them as a task.

    A sum comes several times, with other numbers of dots.
    """
    random = Random("dotted")
    return write(folder / f"dotted-{size}.jsonl", [row_of(random) for _ in range(size)])


def row_of(random: Random) -> dict[str, object]:
    """Return a sum with an answer to be taught, three wrong ones, and what is right."""
    puzzle = sums(random)
    others = [str(number) for number in range(28) if str(number) != puzzle.answer]

    def dotted(answer: str) -> str:
        return answer + "." * random.randint(0, LONGEST) + "!"

    return {
        "question": puzzle.question,
        "answer": dotted(puzzle.answer),
        "right": puzzle.answer,
        "prefix": puzzle.answer,
        "wrong": [dotted(answer) for answer in random.sample(others, 3)],
        "difficulty": puzzle.difficulty,
    }


def coin_table(folder: Path, shown: Sequence[str]) -> TableTask:
    """Write questions without meaning, each with what the coin shows behind it, and return them as a task.

    Answers are dots, of which each is the last with the same chance, and '!'.
    """
    random, rows = Random("coin"), []

    def dots() -> str:
        return "." * min(ROOM - 8, int(random.expovariate(-math.log1p(-HAZARD)))) + "!"

    for text in shown:
        for number in range(500):
            question = f"{number:03d}:" + (f"\n{text}\n" if text else "")
            rows.append({"question": question, "answer": dots(), "wrong": [dots() for _ in range(8)], "difficulty": 1})
    return write(folder / f"coin-{len(shown)}.jsonl", rows)


def arms(folder: Path, seed: int) -> list[Arm]:
    """Return GRPO with each normalization of the length, one update a step, after a coin and, of few seeds, on sums."""
    taught = coin_table(folder, SHOWN)
    coin = {
        "model": str(warm_model(taught, folder, 0.5, plan=Warming(steps=400), held_out=TOSSED)),
        "task": to_table(coin_table(folder, ("",))),
        "held_out": to_table(TOSSED),
        "environment": {"use": COIN, "max_turns": 1},
        "rollouts_per_step": 64,
        "sampling": {"max_completion_length": ROOM},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": 1e-3}},
        "steps": TOSSES,
    }
    plain = {
        "model": str(warm_model(sums_table(folder, 4000), folder, 0.5, plan=Warming(steps=600), held_out=HELD_OUT)),
        "task": to_table(sums_table(folder, 1000)),
        "held_out": to_table(HELD_OUT),
        "rewards": [{"kind": "numeric", "which": "first", "column": "right"}],
        "rollouts_per_step": 128,
        "sampling": {"max_completion_length": BUDGET},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": 5e-4}},
        "steps": STEPS,
    }
    shared = {
        "evaluation": {"samples": 1, "before": False},
        "checkpoints": {"every": 0},
        "grading": {"workers": 1},
    }
    return [
        Arm(f"{setting}{name}", {**table, **shared}, said)
        for setting, table, length in (("coin: ", coin, ROOM), ("sums: ", plain, BUDGET))
        if setting == "coin: " or seed in ON_SUMS
        for name, said in aggregates(length).items()
    ]


def lengths(reward: float):
    """Return what reads the mean length of the answers of one reward at every step."""

    def read(record: RunRecord) -> Points:
        points = []
        for step in record.rollout_steps():
            found = [len(one.rollout.response) for one in record.rollouts(step) if one.rollout.grade.reward == reward]
            points += [(float(step), statistics.fmean(found))] if found else []
        return points

    return read


def change(reward: float):
    """Return what reads how much these answers became longer from the first five steps to the last ten."""

    def read(record: RunRecord) -> float:
        values = [y for _, y in lengths(reward)(record)]
        if len(values) < EARLY + LATE:
            raise NotMeasured("too few steps have such an answer")
        return statistics.fmean(values[-LATE:]) - statistics.fmean(values[:EARLY])

    return read


def gap(record: RunRecord) -> float:
    """Return how much more the wrong answers grew than the right ones."""
    return change(0.0)(record) - change(1.0)(record)


def spread(record: RunRecord) -> float:
    """Return the standard deviation of the lengths of the first step's answers."""
    return statistics.stdev(len(one.rollout.response) for one in record.rollouts(1))


def more(says: str, setting: str, other: str) -> Gain:
    """With the mean over sequences wrong answers grow more beside right ones than with another aggregate."""
    return Gain(says, f"{setting}{other}", f"{setting}{SEQUENCE}", GAP, above=0.0)


CLAIM = Claim(
    title="Length bias: sequence mean, token mean, constant length",
    claim=(
        "GRPO divides the loss of each answer by its own length. A wrong answer is therefore pushed down less for each "
        "token the longer it is, and a right one pushed up more the shorter it is: wrong answers grow, though length "
        "has nothing to do with being right. Dividing by a constant (Dr. GRPO) has no such bias; counting all tokens "
        "alike (DAPO's token-level loss) has next to none."
    ),
    source=(
        "Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783, section 3.1 and figure 5; DAPO, arXiv "
        "2503.14476, section 3.3."
    ),
    protocol=(
        "The length must be decided by a policy that knows whether it is right, and being wrong must not go away. The "
        "earlier form of this experiment (*sums*, below) had neither for certain, so that nothing was decided. *Coin*: "
        "a coin is tossed for each answer and shown before it (`coin.py`, an environment), and is its reward whatever "
        "is said: half of the answers are wrong for ever, no length is better than another, and the policy knows. It "
        "was taught to answer with dots, of which each is the last with a chance of one in eight, so answers are of 1 "
        "to 64 tokens and can grow without end. In such a state the advantage A is the same for every length, so an "
        "unbiased gradient of the length is A E[grad log p(length)] = 0, while dividing by the length L leaves A grad "
        f"E[1 / L]: longer where A < 0, shorter where A > 0. {TOSSES} steps of 8 prompts of 8 answers at 1e-3. *Sums*: "
        "the answer comes first and may be followed by up to 15 dots, then '!', and only the number is graded; a model "
        f"that is right at about 0.5, {STEPS} steps of 16 prompts of 8 answers at 5e-4. Both with one update a "
        "step, so "
        "that nothing is clipped; no pilot was run. GRPO as it is; the same without the group's "
        "standard deviation, so that only the aggregate differs from the two after it; token mean; constant length. "
        "Change of length: mean over the last ten steps less that over the first five, in tokens. "
        + fresh_alone(
            SEEN,
            FRESH,
            "2026-11-23",
            "how far lengths are spread (5.8 [3.6, 7.9] where 4 is asked) and whether constant length and token mean "
            "have no bias beyond 2 tokens (0.23 [-2.1, 2.6], 0.39 [-2.3, 3.1]), with four seeds",
        )
        + f" On the sums, whose differences (0.01 and -0.001 tokens) thousands of seeds would not tell from 0, the "
        f"first {len(ON_SUMS)} of them are run."
    ),
    measure=Runs(
        arms,
        numbers={
            "wrong, change": change(0.0),
            "right, change": change(1.0),
            "wrong minus right": gap,
            "spread of lengths at first": spread,
            "wrong share": lambda record: 1 - whole("rollout/reward_mean")(record),
            "reward, last 10": last("rollout/reward_mean", LATE),
        },
        curves={"wrong": lengths(0.0), "right": lengths(1.0)},
        seeds=FRESH,
    ),
    checks=(
        Level("coin: wrong answers stay: half of all", f"coin: {SEQUENCE}", "wrong share", above=0.45, below=0.55),
        Level(
            "coin: lengths are spread at first: standard deviation of 4 or more",
            f"coin: {SEQUENCE}",
            "spread of lengths at first",
            above=4.0,
        ),
        Level("coin, constant length: no bias beyond 2 tokens", f"coin: {CONSTANT}", GAP, above=-2.0, below=2.0),
    ),
    scale="two layers, 30 and 40 steps",
    expectations=(
        Level("coin, sequence mean: wrong answers grow", f"coin: {SEQUENCE}", "wrong, change", above=0.0),
        Level("coin, sequence mean: right answers shrink", f"coin: {SEQUENCE}", "right, change", below=0.0),
        Level("coin, GRPO as it is: wrong answers grow more than right ones", "coin: GRPO", GAP, above=0.0),
        more("coin: sequence mean is biased more than constant length", "coin: ", CONSTANT),
        more("coin: and more than token mean", "coin: ", "token mean"),
        Level("coin, token mean: no bias beyond 2 tokens", "coin: token mean", GAP, above=-2.0, below=2.0),
        Level("sums, GRPO as it is: wrong answers grow more than right ones", "sums: GRPO", GAP, above=0.0),
        more("sums: sequence mean is biased more than constant length", "sums: ", CONSTANT),
        more("sums: and more than token mean", "sums: ", "token mean"),
    ),
    figure=Lines(
        "Length of right and wrong answers after a coin",
        "tokens",
        (
            ArmLine(f"coin: {SEQUENCE}", "wrong", "wrong, sequence mean"),
            ArmLine(f"coin: {SEQUENCE}", "right", "right, sequence mean"),
            ArmLine(f"coin: {CONSTANT}", "wrong", "wrong, constant length"),
            ArmLine(f"coin: {CONSTANT}", "right", "right, constant length"),
        ),
    ),
    remarks=(
        "**What we make of it.** With the cause present the effect is as large as the source says: dividing by an "
        "answer's length makes wrong answers 14 tokens longer and right ones 6 shorter within 30 steps, whether or "
        "not the group's standard deviation divides too; that lengths have the spread to show it is decided now. "
        "With a constant length both grow by a token or two, and the difference is 0.9 [-0.3, 2.1]. With token mean "
        "both grow by 4 to 5 and the difference is 1.2 [0.3, 2.1], so that it is not free of the bias but has a "
        "seventeenth of it, which is what *next to none* says in the claim. That these two are within 2 tokens of no "
        "bias is undecided by a hair in both, and some 12 seeds would settle it; ten were written down, and none "
        "were added. On the sums nothing moves, and it should not: there a policy does not know whether it is wrong "
        "when it decides how long to be, so the early form of this experiment could not have shown anything. The "
        "bias needs a policy that knows. (The few seeds that its page names as settling the sums go by four seeds' "
        "spread, and the four before had the other sign.)"
    ),
)
