"""Dr. GRPO's length bias, and what a token-level loss does about it."""

import json
import statistics
from pathlib import Path
from random import Random

from gnomon.configuration import to_table
from gnomon.records.reading import RunRecord
from gnomon.studies.arms import Arm, Line, Lines, Runs, last
from gnomon.studies.claims import Claim, Gain, Level
from gnomon.studies.families import sums
from gnomon.studies.measured import NotMeasured, Points
from gnomon.studies.warm import Warming, warm_model
from gnomon.tasks.split import HeldOut
from gnomon.tasks.table import TableTask

STEPS, EARLY, LATE, BUDGET = 40, 5, 10, 32
LONGEST = 15
HELD_OUT = HeldOut(size=64, fraction=0.2)
AGGREGATES = {
    "GRPO": ("algorithm=grpo",),
    "sequence mean": ("algorithm=grpo", "algorithm.advantage.scale=none"),
    "token mean": ("algorithm=grpo", "algorithm.advantage.scale=none", "algorithm.aggregate=TokenMean"),
    "constant length (Dr. GRPO)": ("algorithm=dr-grpo", f"algorithm.aggregate.length={BUDGET}"),
}


def table_of(folder: Path, size: int) -> TableTask:
    """Write sums whose answer may be followed by any number of dots from none to 15; return them as a task.

    A sum comes several times, with other numbers of dots.
    """
    path, random = folder / f"dotted-{size}.jsonl", Random("dotted")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row_of(random)) + "\n" for _ in range(size)))
    return TableTask(str(path), answer_column="answer")


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


def arms(folder: Path, seed: int) -> list[Arm]:
    """Return GRPO with each normalization of the length, one update a step."""
    model = warm_model(table_of(folder, 4000), folder, 0.5, plan=Warming(steps=600), held_out=HELD_OUT)
    table = {
        "model": str(model),
        "task": to_table(table_of(folder, 1000)),
        "held_out": to_table(HELD_OUT),
        "rewards": [{"kind": "numeric", "which": "first", "column": "right"}],
        "rollouts_per_step": 128,
        "sampling": {"max_completion_length": BUDGET},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": 5e-4}},
        "evaluation": {"samples": 1, "before": False},
        "checkpoints": {"every": 0},
        "grading": {"workers": 1},
        "steps": STEPS,
    }
    return [Arm(name, table, said) for name, said in AGGREGATES.items()]


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
        "Sums whose answer comes first and may be followed by any number of dots, then '!': only the number is graded, "
        "so length is free and decided when the answer is already there, right or wrong. In such a state the advantage "
        "A is the same for every length, so an unbiased gradient of the length is A E[grad log p(length)] = 0, while "
        "dividing by the length L leaves A grad E[1 / L]: longer where A < 0, shorter where A > 0. A two-layer model "
        "that is right at about 0.5 and stops after 0 to 15 dots at random is trained for 40 steps of 16 prompts of 8 "
        "answers, one update a step, so that nothing is clipped; 3 seeds. GRPO as it is; the same without the group's "
        "standard deviation, so that only the aggregate differs from the two after it; token mean; constant length. "
        "Change of length: mean over the last ten steps less that over the first five, in tokens."
    ),
    measure=Runs(
        arms,
        numbers={
            "wrong, change": change(0.0),
            "right, change": change(1.0),
            "wrong minus right": gap,
            "reward, last 10": last("rollout/reward_mean", LATE),
        },
        curves={"wrong": lengths(0.0), "right": lengths(1.0)},
    ),
    checks=(
        Level(
            "constant length: no bias beyond 1.5 tokens",
            "constant length (Dr. GRPO)",
            "wrong minus right",
            above=-1.5,
            below=1.5,
        ),
        Level("token mean: no bias beyond 1.5 tokens", "token mean", "wrong minus right", above=-1.5, below=1.5),
    ),
    expectations=(
        Level("sequence mean: wrong answers grow", "sequence mean", "wrong, change", above=0.0),
        Level("sequence mean: right answers shrink", "sequence mean", "right, change", below=0.0),
        Level("GRPO as it is: wrong answers grow more than right ones", "GRPO", "wrong minus right", above=0.0),
        Gain(
            "sequence mean is biased more than constant length",
            "constant length (Dr. GRPO)",
            "sequence mean",
            "wrong minus right",
            above=0.0,
        ),
        Gain("and more than token mean", "token mean", "sequence mean", "wrong minus right", above=0.0),
    ),
    remarks=(
        "**What we make of it.** Nothing is decided in the direction of the bias, and the size of an effect is "
        "bounded: wrong answers grew less than 1.7 tokens more than right ones under every aggregate. Lengths did "
        "move (by two tokens downwards in some seeds), but those of right and wrong answers together: this model, "
        "right in under half of its answers, does not know in the state after its answer whether it was right. "
        "There A has the mean zero, whatever it is divided by. So the bias needs what the derivation takes for "
        "granted, a policy that can tell its wrong answers from its right ones; a task where that can be seen, "
        "and more steps, would be the next thing to try."
    ),
    figure=Lines(
        "Length of wrong answers",
        "tokens",
        tuple(Line(name, "wrong") for name in AGGREGATES),
    ),
)
