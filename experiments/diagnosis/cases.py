"""What is trained: healthy runs of every algorithm, and runs that each have one thing wrong with them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.claims.warm_start import Warming, warm_model

from gnomon.algorithms import PRESETS
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

HERE = Path(__file__).resolve().parent
STEPS, RATE = 32, 5e-4
# Nothing was chosen by what the reported seeds showed; 101 to 104 were looked at when a rule was changed.
TUNED_ON, REPORTED_ON = (0, 100), (105, 106, 107)
HEALTHY_TUNED_ON, HEALTHY_REPORTED_ON = (100, 101), (105, 106, 107)
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@dataclass(frozen=True)
class Case:
    """One way to train.

    changes: overrides of `base`. expected: rules of which one should speak; none for a healthy run. fault: of the
    engine. easy: the model knows nearly every answer beforehand. what: in words.
    """

    name: str
    changes: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    fault: str = ""
    easy: bool = False
    what: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.expected


_REWARD = 'rewards=[{{kind="function", function="{0}:{1}"}}]'


def paid_by(function: str) -> str:
    """Return the override that lets one function of `rewards` judge."""
    return _REWARD.format(HERE / "rewards.py", function)


_PRETRAINED = "algorithm.critic.pretraining.steps=8"
# Sixteen updates a step of four answers each, at this learning rate, end the run: that is no healthy one.
_FEWER = "algorithm.updates.minibatches=4"
_SPECIAL = {
    "dapo": (_FEWER,),
    "vc-ppo": (_PRETRAINED,),
    "vapo": (_PRETRAINED, _FEWER, "algorithm.critic.updates.minibatches=4"),
    "vapo-review": (_PRETRAINED,),
}

HEALTHY = (
    *(Case(name, (f"algorithm={name}", *_SPECIAL.get(name, ()))) for name in PRESETS),
    Case("grpo, four updates", ("algorithm.updates.minibatches=4",)),
    Case("grpo, one step stale", ("max_staleness=1",)),
    Case("tiny", what="the built-in experiment, a model made from scratch"),
)

SICK = (
    Case(
        "wrong extractor",
        ('rewards=[{kind="boxed"}]',),
        ("all-wrong",),
        what="the verifier looks for \\boxed{...}, which nobody was told to write",
    ),
    Case("reward pays for length", (paid_by("longer"),), ("length-reward",), what="reward = characters"),
    Case(
        "learning rate x 100",
        (f"learner.optimizer.learning_rate={100 * RATE}",),
        ("reward-falls", "entropy-collapse", "gradient-norm", "effective-sample-size", "all-wrong"),
        what="a slip of two zeros",
    ),
    Case(
        "frozen weights in the engine",
        (f"learner.optimizer.learning_rate={2 * RATE}",),
        ("weights-not-arrived",),
        fault="frozen",
        what="an engine that loads nothing after its first weights and says it did (proof of arrival switched off)",
    ),
    Case(
        "clip that never opens",
        (
            "algorithm.surrogate.trust.low=1e-6",
            "algorithm.surrogate.trust.high=1e-6",
            "algorithm.updates.minibatches=4",
        ),
        ("clip-fraction",),
        what="a band of a millionth, four updates a step",
    ),
    Case(
        "entropy collapse",
        (
            'algorithm.regularizers=[{piece="Entropy", coefficient=-3.0}]',
            f"learner.optimizer.learning_rate={4 * RATE}",
        ),
        ("entropy-collapse",),
        what="a regularizer with the wrong sign, at four times the learning rate",
    ),
    Case("too few tokens", ("sampling.max_completion_length=7",), ("truncation",), what="answers have up to 12 tokens"),
    Case(
        "flaky verifier",
        (paid_by("flaky"), "grading.max_error_fraction=0.5"),
        ("verifier-errors",),
        what="raises on one answer in sixteen",
    ),
    Case(
        "a side reward dominates",
        (f'rewards=[{{kind="exact", weight=0.1}}, {{kind="function", function="{HERE / "rewards.py"}:tidy"}}]',),
        ("dominant-part",),
        what="the answer counts a tenth of a reward for tidiness",
    ),
    Case(
        "a side reward that is never earned",
        (f'rewards=[{{kind="exact"}}, {{kind="function", function="{HERE / "rewards.py"}:shouts"}}]',),
        ("constant-part",),
        what="one of two parts is always 0",
    ),
    Case(
        "critic that learns nothing",
        ("algorithm=ppo", "algorithm.critic.learning_rate_ratio=1e-9"),
        ("critic-explains-nothing",),
        what="its learning rate is next to nothing",
    ),
    Case(
        "held-out set unlike training",
        ('evaluation.task={kind="table", path="FOLDER/hard.jsonl"}', "evaluation.every=8"),
        ("held-out-gap",),
        what="sums of 50 to 90 are held out, sums to 28 are trained",
    ),
    Case("too hard", ('task.path="FOLDER/hard.jsonl"',), ("all-wrong",), what="sums that the model cannot do"),
    Case(
        "too easy",
        ("sampling.temperature=0.3",),
        ("all-right", "degenerate-groups"),
        easy=True,
        what="the model knows the answers",
    ),
    Case(
        "lenient verifier",
        ('rewards=[{kind="format", pattern=".*"}]',),
        ("all-right",),
        what="anything is right",
    ),
    Case(
        "verdict on the prompt",
        (paid_by("of_the_prompt"),),
        ("degenerate-groups", "zero-gradient"),
        what="the reward depends on the question alone",
    ),
    Case(
        "stale answers",
        ("max_staleness=8", f"learner.optimizer.learning_rate={6 * RATE}"),
        ("mismatch", "effective-sample-size"),
        what="eight steps old, at six times the learning rate",
    ),
    Case(
        "rounded engine",
        ('engine.rounding="int4"',),
        ("mismatch",),
        what="the engine answers with 4-bit weights",
    ),
    Case("repetition rewarded", (paid_by("repeats"),), ("repetition",), what="pays for saying a word again"),
    Case(
        "copies in a group",
        (),
        ("duplicate-rollouts",),
        fault="copying",
        what="an engine that caches answers and ignores the seed",
    ),
    Case("reward function that slows down", (paid_by("slower"),), ("throughput",), what="each call is slower"),
    Case(
        "starved tracker",
        ("algorithm=spo", "algorithm.tracker.initial=prior", "rollouts_per_step=8"),
        ("tracker-starves",),
        what="8 of 195 prompts a step, rates begin as guesses",
    ),
    Case(
        "learning rate / 1000",
        (f"learner.optimizer.learning_rate={RATE / 1000}",),
        ("nothing-moves", "not-learning"),
        what="nothing moves",
    ),
)


def base(case: Case, folder: Path, seed: int) -> tuple[Mapping[str, Any] | str, tuple[str, ...]]:
    """Return the experiment of a case as a table or a built-in name, and its overrides."""
    ends = (f"seed={seed}", f"steps={STEPS}", "checkpoints.every=0")
    if case.name == "tiny":
        return "tiny", ends
    table = {
        "name": case.name.replace(" ", "-"),
        "model": str(_warm(folder, case.easy)),
        "algorithm": "grpo",
        "rollouts_per_step": 64,
        "task": {"kind": "table", "path": str(folder / "sums.jsonl")},
        "held_out": {"size": 30, "fraction": 0.2},
        "rewards": [{"kind": "exact"}],
        "sampling": {"max_completion_length": 14},
        "learner": {"precision": "fp32", "optimizer": {"learning_rate": RATE}},
        "evaluation": {"every": 16},
        "grading": {"workers": 1},
    }
    return table, (*(change.replace("FOLDER", str(folder)) for change in case.changes), *ends)


@cache
def _warm(folder: Path, easy: bool) -> Path:
    # Nearly all questions, the later held-out ones too: what the model knows beforehand is no difference between them.
    held_out = HeldOut(size=1, fraction=0.01)
    rate, plan = (0.97, Warming(spread=0.0, malformed=0.0, steps=3000)) if easy else (0.45, Warming())
    return warm_model(TableTask(str(folder / "sums.jsonl")), folder / "models", rate, plan=plan, held_out=held_out)


def write_tables(folder: Path) -> None:
    """Write the questions: sums to 28 that are trained on, and sums from 100 on that are too hard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("sums", range(15)), ("hard", range(50, 65))):
        rows = [
            {"question": f"{a}+{b}=", "answer": " ".join(_WORDS[int(digit)] for digit in str(a + b))}
            for a in numbers
            for b in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
