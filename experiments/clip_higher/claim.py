"""DAPO's clip-higher: the upper bound of the ratio decides how fast entropy falls."""

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from random import Random

from experiments.claims.arms import Arm, ArmLine, Lines, Runs, first, last, smooth, whole
from experiments.claims.definition import Claim, Gain, Level
from experiments.claims.seeds_needed import fresh_alone
from experiments.claims.warm_start import Warming, warm_model

from gnomon.core.atomic_files import write_durably
from gnomon.core.tables import to_table
from gnomon.records.reading import RunRecord
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

SEEN, FRESH = tuple(range(5)), tuple(range(5, 15))
STEPS, WINDOW, RATE, SKEW = 40, 10, "6e-4", 1.5
LETTERS, LISTED, LENGTH = "abcdefghijklmnopqrstuvwxyz", 8, 3
HELD_OUT = HeldOut(size=48, fraction=0.1)
REWARD = str(Path(__file__).resolve().parent / "listed.py") + ":listed"
BOUNDS = {
    "0.2, 0.2": (0.2, 0.2),
    "0.2, 0.28": (0.2, 0.28),
    "0.2, 0.4": (0.2, 0.4),
    "0.2, 10": (0.2, 10.0),
    "0.4, 0.2": (0.4, 0.2),
}
SYMMETRIC, ENTROPY, KINDS = "0.2, 0.2", "entropy, last 10 steps", "different right answers of 8"


def write_lists(folder: Path, size: int) -> TableTask:
    """Write lists of eight letters, of which an answer names three, and return them as a task.

    Answers to be taught name the k-th letter with a weight of 1 / k^1.5, so that most right choices are rare; wrong
    ones have one letter that is not listed.
    """
    random, rows = Random(f"lists/{size}"), []
    weights = [1 / (place + 1) ** SKEW for place in range(LISTED)]
    for _ in range(size):
        letters = "".join(random.sample(LETTERS, LISTED))
        others = [letter for letter in LETTERS if letter not in letters]
        wrong = []
        for _ in range(6):
            place, said = random.randrange(LENGTH), random.choices(letters, weights, k=LENGTH)
            wrong.append("".join([*said[:place], random.choice(others), *said[place + 1 :]]))
        answer = "".join(random.choices(letters, weights, k=LENGTH))
        rows.append({"question": f"{letters}:", "answer": answer, "wrong": wrong, "letters": letters, "difficulty": 1})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lists-{size}.jsonl"
    write_durably(path, "".join(json.dumps(row) + "\n" for row in rows).encode(), is_synced=False)
    return TableTask(str(path))


def arms(folder: Path, seed: int) -> list[Arm]:
    """Return GRPO with token mean and 8 updates a step under each pair of bounds, and with one update."""
    model = warm_model(write_lists(folder, 20000), folder, 0.5, plan=Warming(steps=1000), held_out=HELD_OUT)
    table = {
        "model": str(model),
        "task": to_table(write_lists(folder, 1000)),
        "held_out": to_table(HELD_OUT),
        "rewards": [{"kind": "function", "function": REWARD}],
        "rollouts_per_step": 64,
        "sampling": {"max_completion_length": 6},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": float(RATE)}},
        "evaluation": {"samples": 1, "before": False},
        "checkpoints": {"every": 0},
        "grading": {"workers": 1},
        "steps": STEPS,
    }
    given = ("algorithm=grpo", "algorithm.aggregate=TokenMean")
    eight = ("algorithm.updates.minibatches=4", "algorithm.updates.epochs=2")
    clipped = [
        Arm(
            name,
            table,
            (*given, *eight, f"algorithm.surrogate.trust.low={low}", f"algorithm.surrogate.trust.high={high}"),
        )
        for name, (low, high) in BOUNDS.items()
    ]
    return [*clipped, Arm("one update", table, given)]


def kept(record: RunRecord) -> float:
    """Return the entropy of the last ten steps as a share of that of the first two."""
    return last("loss/entropy_nats", WINDOW)(record) / first("loss/entropy_nats", 2)(record)


def rare(record: RunRecord) -> float:
    """Return the share of letters below a probability of 0.1 in the right answers of the first two steps."""
    found = [
        logprob
        for step in (1, 2)
        for one in record.rollouts(step)
        if one.rollout.grade.reward == 1.0
        for logprob in one.rollout.logprobs[:LENGTH]
    ]
    return statistics.fmean(logprob < math.log(0.1) for logprob in found)


def kinds(record: RunRecord) -> float:
    """Return how many different right answers a group of eight has, mean over the last ten steps."""
    counts = []
    for step in record.rollout_steps()[-WINDOW:]:
        groups = defaultdict(set)
        for one in record.rollouts(step):
            groups[one.group] |= {tuple(one.rollout.response)} if one.rollout.grade.reward == 1.0 else set()
        counts += [len(found) for found in groups.values()]
    return statistics.fmean(counts)


CLAIM = Claim(
    title="Clip-higher and entropy",
    claim=(
        "With the same bound on both sides, PPO's clip stops rare tokens from becoming likely sooner than it stops "
        "likely ones, since a token of probability 0.01 may grow to 0.012 and no further in a step. Entropy then "
        "collapses early. A higher upper bound alone keeps entropy up and lets training find more."
    ),
    source="DAPO, arXiv 2503.14476, section 3.1 and figure 2 (0.2 and 0.28); the baseline that VAPO and SPO build on.",
    protocol=(
        "There must be many right choices most of which are rare. A question lists eight letters, and right are any "
        "three of them; a two-layer model was taught to name the k-th with a weight of 1 / k^1.5 and to be right about "
        f"half of the time. GRPO with token mean, {STEPS} steps of 8 prompts of 8 answers, 8 updates a step (2 passes "
        f"of 4), so that ratios leave the bounds, learning rate {RATE}. Bounds 0.2/0.2, 0.2/0.28, 0.2/0.4, "
        "0.2/10 (which binds next to nothing above), and the other way round 0.4/0.2; and one update a step, where "
        "every ratio is 1. The setting was chosen by the symmetric arm alone, one seed at 3e-4 and 6e-4 (clipped above "
        "0.9% and 4.2% of tokens, reward from 0.36 to 0.80, entropy at 0.58 of its beginning): the latter, since "
        "more is "
        "clipped. No other arm was looked at. An earlier form, sorting letters, had hardly a rare right letter. "
        + fresh_alone(
            SEEN,
            FRESH,
            "2026-11-23",
            "what an upper bound of 0.28 does for entropy (-0.055 nats [-0.127, 0.018]), of 0.4 beside it (0.045 "
            "[-0.066, 0.156]) and of 10 beside that (-0.006 [-0.104, 0.092]), and how many different right answers "
            "0.28 and 0.4 find (-0.005 [-0.353, 0.343], -0.073 [-0.412, 0.267])",
        )
    ),
    measure=Runs(
        arms,
        numbers={
            ENTROPY: last("loss/entropy_nats", WINDOW),
            "entropy kept": kept,
            "clipped above": whole("loss/clipped_high_fraction"),
            "clipped below": whole("loss/clipped_low_fraction"),
            "rare letters in right answers": rare,
            KINDS: kinds,
            "reward, last 10": last("rollout/reward_mean", WINDOW),
        },
        curves={"entropy": smooth("loss/entropy_nats", 5), "reward": smooth("rollout/reward_mean", 5)},
        seeds=FRESH,
    ),
    checks=(
        Level(
            "a tenth of the letters in right answers is rare (below 0.1)",
            SYMMETRIC,
            "rare letters in right answers",
            0.1,
        ),
        Level("symmetric: over 1% of tokens are clipped above", SYMMETRIC, "clipped above", above=0.01),
        Level("symmetric: a third of the entropy is gone, or more", SYMMETRIC, "entropy kept", below=0.67),
        Level("symmetric: it learns, above 0.7 from about 0.4", SYMMETRIC, "reward, last 10", above=0.7),
        Level("one update: nothing is clipped", "one update", "clipped above", above=-0.001, below=0.001),
    ),
    scale="two layers, 40 steps",
    expectations=(
        Gain("0.28 above keeps more entropy than 0.2", SYMMETRIC, "0.2, 0.28", ENTROPY, above=0.0),
        Gain("0.4 above keeps more than 0.28", "0.2, 0.28", "0.2, 0.4", ENTROPY, above=0.0),
        Gain("hardly any bound above keeps more than 0.4", "0.2, 0.4", "0.2, 10", ENTROPY, above=0.0),
        Gain("it is the upper bound: 0.2/0.4 keeps more than 0.4/0.2", "0.4, 0.2", "0.2, 0.4", ENTROPY, above=0.0),
        Gain("0.28 above finds more: different right answers of a group", SYMMETRIC, "0.2, 0.28", KINDS, above=0.0),
        Gain("so does 0.4", SYMMETRIC, "0.2, 0.4", KINDS, above=0.0),
        Gain("0.28 above is not 0.02 less often right", SYMMETRIC, "0.2, 0.28", "reward, last 10", above=-0.02),
    ),
    figure=Lines(
        "Entropy under each pair of bounds", "nats a token", tuple(ArmLine(name, "entropy") for name in BOUNDS)
    ),
    remarks=(
        "**What we make of it.** The cause is here: a quarter of the letters in right answers is rare, 4% of tokens "
        "are clipped above, and nearly half of the entropy goes while the reward rises to 0.84. Yet the upper bound "
        "does nothing for entropy: 0.28, 0.4 and hardly any bound leave 0.82 to 0.85 nats beside 0.84 with 0.2, and as "
        "many different right answers. Nor is more of it right: 0.84 to 0.85 under each. Doubling the seeds has "
        "brought none of these differences nearer to a sign. It is the lower bound that acts: with 0.4 below entropy "
        "ends 0.12 nats lower than with 0.2, and 0.03 more is right, so the one comparison that holds is that bound's "
        "doing and not the upper one's. A token that is pushed up is as often a likely one as a rare one, and what "
        "pushing wrong tokens down further frees goes to what is likely. The source's runs are a hundred times as "
        "long; a slow effect would not be seen in 40 steps."
    ),
)
