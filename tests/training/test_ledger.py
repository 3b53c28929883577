"""The books of asynchronous runs that were killed: what was asked was trained on once, set aside, or is on its way.

Every preset that can be trained so, with its own way of choosing, filtering and valuing, over several seeds, each
killed at another point; and runs in which weights change in the middle of answers, or slow answers are dropped.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.training.killed import POINTS, killed
from tests.training.runs import measured
from tests.training.test_kills import PATIENT, REWARD, SETTINGS

from gnomon.algorithms import PRESETS, Uniform
from gnomon.config.experiment import Experiment, load
from gnomon.records.rollouts import RecordedRollout, read_rollouts
from gnomon.training.build_data import build_curriculum, questions

pytestmark = pytest.mark.timeout(600)
STEPS, SEEDS = 4, (1, 2)
# No question is asked twice, also where refused ones are replaced by others.
COMMON = (
    REWARD, "task.size=240", "held_out.size=2", "rollouts_per_step=8", f"steps={STEPS}", "evaluation.before=false",
    "grading.workers=1", "checkpoints.every=1", "checkpoints.keep_last=1", *PATIENT,
)  # fmt: skip
GROUPS = ("algorithm.num_generations=2",)
OTHERS = {
    # An engine with less room than there are questions: answers begun by one version are ended by another.
    "in the middle": (
        *GROUPS,
        "max_staleness=3",
        "engine.max_concurrent=3",
        "sampling.max_completion_length=48",  # more than the engine answers while a slow learner learns
        "learner.optimizer.learning_rate=1e-2",
    ),
    "slack": (*GROUPS, "max_staleness=3", "staleness.slack=1"),
    "stragglers": (*GROUPS, "max_staleness=3", "staleness.slack=1", "staleness.stragglers=drop"),
    "measured": (*GROUPS, "max_staleness=measured", "staleness.ess_floor=0.5"),
}


def overrides(name: str, seed: int) -> list[str]:
    """Return what is changed about the `tiny` experiment."""
    if name in OTHERS:
        return [*COMMON, *OTHERS[name], f"seed={seed}"]
    groups = GROUPS if PRESETS[name].num_generations > 1 else ()
    settings = ("algorithm.updates.minibatches=2", *SETTINGS.get(name, ()), "max_staleness=2", f"seed={seed}")
    return [*COMMON, f"algorithm={name}", *groups, *settings]


@dataclass(frozen=True)
class Books:
    """What a run wrote down.

    steps: rollouts of each. waiting: index, round, place, attempt of each question on its way. rounds: begun so far.
    before: rounds that value pre-training used up, whose answers are in no record.
    """

    experiment: Experiment
    steps: dict[int, list[RecordedRollout]]
    waiting: list[list[int]]
    rounds: int
    before: int

    @classmethod
    def of(cls, run: Path) -> "Books":
        """Read those of a run that was made to its end."""
        steps = {int(path.stem.split("-")[1]): list(read_rollouts(path)) for path in sorted(run.glob("rollouts/*"))}
        stream = json.loads((run / "checkpoints" / f"step-{STEPS}" / "state" / "stream.json").read_text())
        before = len(measured(run / "pretraining.jsonl"))
        return cls(load(run / "experiment.toml").experiment, steps, stream["pending"], stream["next"], before)

    def groups(self, is_kept: bool) -> list[tuple[int, str]]:
        """Return step and question of each group that was trained on, or of each that was not."""
        found = {(row.step, row.group): row for rows in self.steps.values() for row in rows if row.is_kept is is_kept}
        return [(step, row.rollout.task_id) for (step, _), row in sorted(found.items())]


def check_nothing_twice(books: Books) -> None:
    """Every group is whole, in one step; no answer was trained on twice; none is older than the bound."""
    generations = books.experiment.algorithm.num_generations
    sizes = Counter((row.step, row.group) for rows in books.steps.values() for row in rows)
    answers = Counter(
        (row.rollout.task_id, row.rollout.response, row.rollout.logprobs)
        for rows in books.steps.values()
        for row in rows
    )
    ages = [step - 1 - row.rollout.oldest_version for step, rows in books.steps.items() for row in rows if row.is_kept]

    assert list(books.steps) == list(range(1, STEPS + 1))
    assert set(sizes.values()) == {generations}
    # Siblings may say the same by chance; another visit has other weights or other draws.
    assert [key for key, count in answers.items() if count > generations] == []
    assert len({(number, place) for _, number, place, _ in books.waiting}) == len(books.waiting)
    assert max(ages) <= books.experiment.staleness_bound


def check_nothing_lost(books: Books, stale: int) -> None:
    """What was asked is trained on, set aside or on its way: question by question where their order is known.

    stale: rollouts that were withdrawn unfinished, which the metrics count and no record names.
    """
    experiment = books.experiment
    algorithm, tasks = experiment.algorithm, questions(experiment).split.train
    trained, aside = books.groups(True), books.groups(False)
    waiting = [tasks[index].id for index, *_ in books.waiting]
    asked = (books.rounds - books.before) * experiment.prompts_per_step
    withdrawn = stale // algorithm.num_generations
    if algorithm.keep is None:
        assert len(trained) + len(aside) + len(waiting) + withdrawn == asked
    else:
        # A refused question's place is taken by another's, so places are in the books once, and questions beside them.
        assert len(trained) + len(waiting) <= asked
    if not isinstance(algorithm.sampler, Uniform):
        return
    seen = Counter(task for _, task in trained + aside) + Counter(waiting)
    first = books.before * experiment.prompts_per_step
    taken = asked if algorithm.keep is None else len(tasks)
    order = build_curriculum(algorithm, tasks, experiment.seed).curriculum.take(first + taken)[first:]
    known = Counter(tasks[index].id for index in order)
    assert seen <= known
    assert set(seen.values()) == {1}
    if algorithm.keep is None:
        assert (known - seen).total() == withdrawn


def cases() -> Iterator[object]:
    """Yield each setting with each seed, at points that follow each other, all but one of them marked as slow."""
    points = list(POINTS)
    yield pytest.param("grpo", 0, "update", id="grpo-0-update-quick")
    for number, (name, seed) in enumerate((name, seed) for name in (*PRESETS, *OTHERS) for seed in SEEDS):
        point = points[number % len(points)]
        yield pytest.param(name, seed, point, marks=pytest.mark.slow, id=f"{name}-{seed}-{point}")


@pytest.mark.parametrize(("name", "seed", "point"), list(cases()))
def test_the_books_of_a_killed_run_balance(tmp_path: Path, name: str, seed: int, point: str):
    """Nothing is lost, and nothing is trained on twice."""
    run = killed(tmp_path / "run", overrides(name, seed), point)
    books = Books.of(run)
    stale = sum(row["stream/stale_rollouts"] for row in measured(run / "metrics.jsonl"))

    check_nothing_twice(books)
    check_nothing_lost(books, stale)


@pytest.mark.slow
def test_weights_do_change_in_the_middle_of_answers(tmp_path: Path):
    """So the setting above has what it says."""
    books = Books.of(killed(tmp_path / "run", overrides("in the middle", 3), "decode"))

    spans = [r.rollout.newest_version - r.rollout.oldest_version for rows in books.steps.values() for r in rows]
    assert max(spans) >= 1
