"""A run that is continued with more steps is the longer run; with other settings, another one that keeps its state."""

import json
import math
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.forked import FORKS
from tests.random_model import RANDOM
from tests.training.runs import measured, same, trace

import gnomon
from gnomon.algorithms.sections import Greso, SelfImitationBuffer
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core import failpoints
from gnomon.core.errors import ConfigError, RunDirectoryError, Stopped
from gnomon.core.types import Grade, Group, Rollout, State, Task
from gnomon.records.checkpoints import read_states
from gnomon.records.reading import RunRecord
from gnomon.rollouts.curriculum.base import PromptKeys, TaskIndex
from gnomon.rollouts.curriculum.drift import AccumulatedDrift, RescoredDrift
from gnomon.rollouts.curriculum.samplers import GresoCurriculum, UniformCurriculum
from gnomon.rollouts.curriculum.tracker import DecayRule, ValueTracker
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.rollouts.self_imitation_buffer import SelfImitationReplay
from gnomon.training.api import continue_run, resume, train_experiment
from gnomon.training.build_data import questions
from gnomon.training.continuation import ParentRun
from gnomon.training.run import StopRequest

MADE, STEPS = 2, 5
COMMON = (
    "rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=40", "rollouts_per_step=16", "evaluation.every=2",
    "checkpoints.every=1", "checkpoints.keep_last=9", "held_out.size=4",
)  # fmt: skip
ALGORITHMS = {
    "grpo": ("algorithm.num_generations=4", "learner.optimizer.warmup_steps=3"),
    "spo": ("algorithm=spo", "algorithm.tracker.n0=2", "algorithm.updates.minibatches=2"),
}


def options(algorithm: str, steps: int, *more: str) -> list[str]:
    """Return what the tests change about the `tiny` experiment."""
    return [f"steps={steps}", *COMMON, *ALGORITHMS[algorithm], *more]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function from algorithm and steps to a run that asked for so many steps at first."""
    runs: dict[tuple[str, int], Path] = {}

    def run(algorithm: str, steps: int) -> Path:
        if (algorithm, steps) not in runs:
            runs[algorithm, steps] = tmp_path_factory.mktemp(f"{algorithm}-{steps}") / "run"
            train_experiment(load(RANDOM, options(algorithm, steps)), runs[algorithm, steps])
        return runs[algorithm, steps]

    return run


@pytest.fixture
def short(made: Callable[[str, int], Path], tmp_path: Path) -> Path:
    """Return a copy of the finished short run."""
    return shutil.copytree(made("grpo", MADE), tmp_path / "run")


def _card(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_continued_run_is_the_longer_run(made: Callable[[str, int], Path], tmp_path: Path, algorithm: str):
    """Metrics, tokens, evaluations, values, moments and weights are those of the run that asked for all steps."""
    run = shutil.copytree(made(algorithm, MADE), tmp_path / "run")
    assert continue_run(run, [("steps", STEPS)]).steps == STEPS

    same(trace(run, STEPS), trace(made(algorithm, STEPS), STEPS))
    assert _card(run)["extended"] == [{"steps": [MADE, STEPS]}]
    assert load(run / "experiment.toml").experiment == load(made(algorithm, STEPS) / "experiment.toml").experiment


def test_a_run_is_continued_twice_and_stopped_between(
    short: Path, made: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
):
    """By two commands, the second of which is stopped and resumed; the evaluation at each end is one more."""
    continue_run(short, [("steps", 3)])
    with pytest.raises(Stopped, match="stopped after step 4 of 5, and saved"):
        continue_run(short, [("steps", STEPS)], stop=StopRequest(signal.SIGTERM, after=1))
    capsys.readouterr()
    resume(short)

    assert "edited" not in capsys.readouterr().err
    assert _card(short)["extended"] == [{"steps": [MADE, 3]}, {"steps": [3, STEPS]}]
    mine, whole = trace(short, STEPS), trace(made("grpo", STEPS), STEPS)
    assert [row["step"] for row in mine["evaluations"]] == [0, 2, 3, 4, 5]
    mine["evaluations"] = [row for row in mine["evaluations"] if row["step"] != 3]
    same({name: part for name, part in mine.items() if name != "evaluations/step-000003.jsonl"}, whole)


def _continue(run: Path, dies_at: str) -> None:
    failpoints.arm(dies_at)
    continue_run(run, [("steps", STEPS)])


@pytest.mark.parametrize("point", ["start:1", "update:2", "checkpoint-rename:1"])
def test_a_run_that_is_killed_while_it_is_continued_goes_on(short: Path, made: Callable[[str, int], Path], point: str):
    """SIGKILL before the first new step, in one and after its checkpoint: the same command again does the rest."""
    child = FORKS.Process(target=_continue, args=(short, point))
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL

    continue_run(short, [("steps", STEPS)])

    same(trace(short, STEPS), trace(made("grpo", STEPS), STEPS))
    assert _card(short)["extended"] == [{"steps": [MADE, STEPS]}]


def test_what_would_not_be_the_longer_run_is_refused(made: Callable[[str, int], Path], tmp_path: Path):
    """Fewer steps than are made, other settings, rates that depended on the steps, a run without a checkpoint."""
    run = shutil.copytree(made("grpo", MADE), tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match=rf"steps = 1 counts from the beginning .* {MADE} are made; type steps=3"):
        continue_run(run, [("steps", 1)])
    with pytest.raises(
        ConfigError, match=r"gnomon continue .*run steps=200; to go on as it was begun, type gnomon resu"
    ):
        continue_run(run, [])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        continue_run(run, [("step", 9)])
    assert {path: path.read_bytes() for path in before} == before

    shutil.rmtree(run / "checkpoints")
    (run / ".saved").unlink()
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "rollouts")
    with pytest.raises(ConfigError, match="has no checkpoint, so there is nothing to continue; gnomon resume"):
        continue_run(run, [("steps", 9)])
    with pytest.raises(RunDirectoryError, match="unknown run"):
        continue_run(tmp_path / "rum", [("steps", 9)])


def test_rates_that_depended_on_the_steps_are_refused(tmp_path: Path):
    """A linear schedule gave the second step another rate than it would have had in a longer run."""
    run = tmp_path / "run"
    train_experiment(
        load(RANDOM, options("grpo", 2, "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=0")), run
    )
    written = (run / "experiment.toml").read_bytes()

    with pytest.raises(ConfigError, match=r'schedule = "linear" made the learning rates of the 2 steps'):
        continue_run(run, [("steps", 4)])
    assert (run / "experiment.toml").read_bytes() == written


def test_a_spent_budget_can_be_raised(tmp_path: Path, made: Callable[[str, int], Path]):
    """A run that its budget of tokens ended makes its other steps, which are those of a run without a budget."""
    run = tmp_path / "run"
    train_experiment(load(RANDOM, options("grpo", STEPS, "budget.tokens=1", "budget.evaluations=0")), run)
    assert [row["step"] for row in trace(run, 1)["metrics"]] == [1]
    continue_run(run, [("budget.tokens", 100_000)])

    assert trace(run, STEPS)["metrics"] == trace(made("grpo", STEPS), STEPS)["metrics"]


def test_a_strangers_run_executes_nothing(
    tmp_path: Path, made: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
):
    """A run that another user began and that names code ends with exit code 2, and the code did not run."""
    run, own = shutil.copytree(made("grpo", MADE), tmp_path / "run"), tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(prompt, completion): return 1.0\n")
    text = (run / "experiment.toml").read_text()
    at, end = text.index("[[rewards]]"), text.index("[rewards.verifier]")
    end = text.index("\n[", end)
    text = f'{text[:at]}[[rewards]]\n[rewards.verifier]\nkind = "function"\nfunction = "{own}:score"\n{text[end:]}'
    (run / "experiment.toml").write_text(text)

    assert main(["continue", str(run), "steps=9"]) == 2
    assert f"names code: reward {own}:score" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


# Another run, which begins with the checkpoint of a run.


def _rows(path: Path, numbers: Iterable[int]) -> Path:
    rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in numbers]
    path.write_text("\n".join(rows) + "\n")
    return path


def _remembered(run: Path, step: int) -> dict[str, tuple[float, float, int]]:
    """Return value, evidence and visits of each question that the checkpoint of a step knows, by its text."""
    state = read_states(run / "checkpoints" / f"step-{step}" / "state")["tracker"].tensors
    tasks = questions(load(run / "experiment.toml").experiment).split.train
    columns = [state[name].tolist() for name in ("value", "n_eff", "visits")]
    return {tasks[at].text: (v, n, k) for at, (v, n, k) in enumerate(zip(*columns, strict=True))}


SPO = (
    *COMMON[:1], "rollouts_per_step=8", "algorithm=spo", "algorithm.updates.minibatches=2", "held_out.size=0",
    "algorithm.tracker.initial=prior", "checkpoints.every=1", "checkpoints.keep_last=9",
)  # fmt: skip


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of SPO of three steps on the questions 0 to 15."""
    folder = tmp_path_factory.mktemp("parent")
    path = _rows(folder / "questions.jsonl", range(16))
    train_experiment(load(RANDOM, [f"task={{kind='table', path='{path}'}}", "steps=3", *SPO]), folder / "run")
    return folder / "run"


def _weights(run: Path, step: int) -> dict[str, Any]:
    return dict(read_states(run / "checkpoints" / f"step-{step}" / "state")["learner"].tensors)


def test_another_run_keeps_weights_moments_and_what_is_known_of_the_prompts_that_stay(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With 10 of 16 questions, in another order and with 6 more, and longer answers: steps go on from the third."""
    path = _rows(tmp_path / "more.jsonl", [20, 21, *range(15, 5, -1), 22, 23, 24, 25])
    settings = [("task.path", str(path)), ("sampling.max_completion_length", 5), ("steps", 5)]
    result = continue_run(parent, settings, tmp_path / "child")
    said, run = capsys.readouterr().err, result.directory

    assert f"continues {parent} from step 3: its weights and moments are kept" in said
    assert "kept the values of 10 of 16 prompts; 6 gone; 6 new" in said
    before, after = _remembered(parent, 3), _remembered(run, 3)
    assert {text: after[text] for text in before if text in after} == {t: before[t] for t in before if t in after}
    assert len(set(before) & set(after)) == 10
    assert any(visits for _, _, visits in before.values())
    assert {after[f"{number}+1="] for number in (20, 25)} == {(0.5, 1.0, 0)}
    kept, own = _weights(parent, 3), _weights(run, 3)
    assert all(torch.equal(kept[name], own[name]) for name in kept)
    assert any(name.startswith("moment2") for name in own)
    assert [row["step"] for row in RunRecord(run).metrics()] == [4, 5]
    assert RunRecord(run).checkpoint_steps() == [3, 4, 5]
    assert _card(run)["parent"] == str(parent / "checkpoints" / "step-3")


@pytest.fixture(scope="module")
def cooler(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that continues the parent at another temperature, and that nobody killed."""
    return continue_run(parent, COOLER, tmp_path_factory.mktemp("cooler") / "run").directory


COOLER = [("sampling.temperature", 0.7), ("steps", 6)]


def _begin_child(parent: Path, child: Path, dies_at: str) -> None:
    failpoints.arm(dies_at)
    continue_run(parent, COOLER, child)


@pytest.mark.parametrize(
    "point",
    [
        *("start:1", "checkpoint-file:2", "checkpoint-rename:1"),
        *(pytest.param(point, marks=pytest.mark.slow) for point in ("update:2", "record:2")),
    ],
)
def test_another_run_that_is_killed_while_it_begins_is_the_run_that_was_not(
    parent: Path, cooler: Path, tmp_path: Path, point: str
):
    """Before its first checkpoint it takes over the parent's again, later its own; `resume` does the rest."""
    child = FORKS.Process(target=_begin_child, args=(parent, tmp_path / "child", point))
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL

    resume(tmp_path / "child")

    same(trace(tmp_path / "child", 6), trace(cooler, 6))


def test_with_nothing_but_a_name_another_run_is_the_longer_run(parent: Path, tmp_path: Path):
    """The same settings as another run: its steps are those of the run that is extended, and it is continued again."""
    extended = shutil.copytree(parent, tmp_path / "run")
    continue_run(extended, [("steps", 6)])
    first = continue_run(parent, [("steps", 5), ("name", "other")], tmp_path / "first").directory
    second = continue_run(first, [("steps", 6), ("name", "third")]).directory

    assert second == tmp_path / "first-2"
    rows = [*measured(first / "metrics.jsonl"), *measured(second / "metrics.jsonl")]
    assert rows == measured(extended / "metrics.jsonl")[3:]
    mine, theirs = _weights(second, 6), _weights(extended, 6)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    third = continue_run(second, [("steps", 7), ("name", "fourth")]).directory
    assert third == tmp_path / "first-3"


def test_an_adapter_that_cannot_change_is_said_by_its_setting():
    """The setting and both values, as they are written, and no form of Python."""
    begun, asked = (load(RANDOM, ["lora={}", f"lora.base={base}"]).experiment for base in ("nf4", "int8"))

    with pytest.raises(ConfigError, match=r"^lora\.base is 'nf4' in runs/first, .* and cannot become 'int8'; leave it"):
        ParentRun(Path("runs/first/checkpoints/step-3"), begun)._check(asked)


def test_value_pretraining_is_over_when_a_run_is_continued():
    """Other settings of that phase would begin it again in the middle of training, and save a step 0 behind it."""
    steps = "algorithm.critic.pretraining.steps"
    begun, asked = (load(RANDOM, ["algorithm=vapo", "rollouts_per_step=16", f"{steps}={n}"]).experiment for n in (3, 5))

    with pytest.raises(ConfigError, match=r"pretraining is Pretraining\(steps=3.* cannot become Pretraining\(steps=5"):
        ParentRun(Path("runs/first/checkpoints/step-3"), begun)._check(asked)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [("model", "smollm2-135m-instruct"), ("steps", 9)],
            r"model is 'tiny' in .*; leave it as it was, or begin with",
        ),
        ([("lora", {"rank": 4}), ("steps", 9)], r"lora is none in"),
        ([("seed", 3), ("steps", 9)], r"seed is 0 in"),
        ([("algorithm", "ppo"), ("rewards", []), ("steps", 9)], r"algorithm.critic is none in"),
        (
            [("algorithm", "grpo"), ("algorithm.proximal", {"decay": 0.5}), ("steps", 9)],
            r"algorithm.proximal is none in",
        ),
        (
            [("sampling.temperature", 0.5)],
            r"steps = 3 counts from the beginning of .*, of which 3 are made; type steps=6",
        ),
        ([("budget.tokens", 1), ("steps", 9)], r"the budget counts from the beginning of .*: it is spent"),
    ],
)
def test_what_cannot_change_is_refused_before_anything_is_made(
    parent: Path, tmp_path: Path, settings: list[tuple[str, Any]], message: str
):
    """Another network, other draws, parts that the checkpoint does not have, no step left: no directory is left."""
    with pytest.raises(ConfigError, match=message):
        continue_run(parent, settings, tmp_path / "child")
    assert not (tmp_path / "child").exists()


def test_values_of_other_rewards_are_not_kept(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A value is the mean of one reward; weights and moments are kept."""
    settings = [("rewards", [{"kind": "format", "pattern": ".*[2-9]"}]), ("steps", 4)]
    run = continue_run(parent, settings, tmp_path / "child").directory

    assert "values of prompts are not kept: the rewards are others" in capsys.readouterr().err
    assert set(_remembered(run, 3).values()) == {(0.5, 1.0, 0)}


def test_a_run_of_an_earlier_version_is_continued(parent: Path, tmp_path: Path):
    """Without keys of its prompts, or with damaged ones, they are listed again; not where the questions changed."""
    older = shutil.copytree(parent, tmp_path / "older")
    (older / "prompts.safetensors").unlink()
    questions_there = _rows(tmp_path / "questions.jsonl", range(16))
    text = (older / "experiment.toml").read_text()
    (older / "experiment.toml").write_text(text.replace(str(parent.parent / "questions.jsonl"), str(questions_there)))
    more = _rows(tmp_path / "more.jsonl", range(12, 24))
    settings = [("task.path", str(more)), ("steps", 4)]
    begun = load(older / "experiment.toml").experiment
    own = ParentRun(parent / "checkpoints" / "step-3", begun).keys()
    for content in (b"torn", b"\0" * 64, (parent / "prompts.safetensors").read_bytes()[:-9]):
        (older / "prompts.safetensors").write_bytes(content)
        listed = ParentRun(older / "checkpoints" / "step-3", begun).keys()
        assert all(np.array_equal(getattr(listed, name), getattr(own, name)) for name in ("ids", "contents", "prompts"))
    (older / "prompts.safetensors").unlink()
    run = continue_run(older, settings, tmp_path / "child").directory
    known = continue_run(parent, settings, tmp_path / "known").directory

    assert _remembered(run, 3) == _remembered(known, 3)
    _rows(questions_there, range(15))
    with pytest.raises(ConfigError, match=r"earlier versions wrote none.*bring those back, or begin with its weights"):
        continue_run(older, settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_strangers_checkpoint_is_not_begun_with_where_its_run_names_code(parent: Path, tmp_path: Path):
    """``continue_from`` of an experiment of one's own reads the other run's settings, and executes none of its code."""
    run = shutil.copytree(parent, tmp_path / "run")
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text.replace("[algorithm]", f"[algorithm]\nown = '{tmp_path}/own.py:X'", 1))
    own = [f"task={{kind='table', path='{parent.parent / 'questions.jsonl'}'}}", "steps=4", *SPO]
    with pytest.raises(ConfigError, match="was not begun by this user on this machine"):
        train_experiment(load(RANDOM, [*own, f"continue_from={run}"]), tmp_path / "child")
    assert train_experiment(load(RANDOM, [*own, f"continue_from={parent}"]), tmp_path / "child").steps == 4


def test_what_is_read_of_a_continued_run_says_so(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its report names the run that it continues; `plan` counts the steps that are left; `doctor` reads it."""
    command = ["continue", str(parent), "steps=5", "held_out.size=2", "--run-dir", str(tmp_path / "child"), "--json"]
    assert main(command) == 0
    made = json.loads(capsys.readouterr().out)
    assert [evaluation["step"] for evaluation in made["evaluations"]] == [3, 5]
    assert str(parent / "checkpoints" / "step-3") in (tmp_path / "child" / "report.html").read_text()
    assert main(["plan", str(tmp_path / "child" / "experiment.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert main(["doctor", str(tmp_path / "child")]) == 0
    assert main(["resume", str(tmp_path / "child")]) == 0
    assert "is finished: 5 of 5 steps" in capsys.readouterr().err
    assert main(["compare", RANDOM, "--algorithms", "grpo,spo", "--steps", "2", f"continue_from={parent}"]) == 2
    assert "the runs of a comparison begin with a model" in capsys.readouterr().err


def test_python_continues_a_run_with_rows_and_functions(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`gnomon.continue_` takes a run and what `train` takes; with steps alone the same run goes on."""
    monkeypatch.chdir(tmp_path)
    run = gnomon.continue_(gnomon.load(shutil.copytree(parent, tmp_path / "run")), steps=4)
    assert (run.directory, run.steps, run.first_step) == (tmp_path / "run", 4, 0)

    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8, 24)]
    other = gnomon.continue_(run, dataset=rows, steps=5, callbacks=[lambda step: print(f"made {step.number}")])
    assert (other.directory, other.steps, other.first_step) == (tmp_path / "run-2", 5, 4)
    said = capsys.readouterr()
    assert "kept the values of 8 of 16 prompts; 8 gone; 8 new" in said.err
    assert "made 5" in said.out


def test_each_form_of_what_is_known_of_prompts_goes_with_them():
    """Values, streaks, visits and responses of the prompts that stay, in another order, and none of those that go."""
    former = [Task(f"old-{at}", (ord(name),), name, {"answer": name}) for at, name in enumerate("abcb")]
    now = (("b", ()), ("x", ()), ("b", ()), ("a", (1,)))
    tasks = [Task(f"new-{at}", (ord(q), *more), q, {"answer": q}) for at, (q, more) in enumerate(now)]
    keys, before = PromptKeys.of(tasks), PromptKeys.of(former)
    kept = keys.kept_of(before)
    # The second of two equal rows stays the second; "a" has other tokens.
    assert kept.places.tolist() == [1, -1, 3, 0]
    assert kept.is_rendered.tolist() == [True, False, True, False]
    assert (kept.new, kept.is_same, before.kept_of(before).is_same) == ([1], False, True)
    assert (kept.successor("old-1"), kept.successor("old-2")) == (0, None)
    there, here = TaskIndex(before.ids), TaskIndex(keys.ids)

    tracker, moved = (ValueTracker(index, DecayRule.constant(0.5)) for index in (there, here))
    for place, reward in enumerate((1.0, 0.0, 1.0, 1.0)):
        tracker.update(place, reward, 0.0)
    moved.restore(moved.moved(tracker.state(), kept))
    assert moved.baseline([0, 1, 2, 3]).tolist() == [tracker.baseline([1])[0], 0.5, *tracker.baseline([3, 0])]
    assert moved.visits([0, 1, 2, 3]).tolist() == [1, 0, 1, 1]

    added, other = AccumulatedDrift(there), AccumulatedDrift(here)
    added.restore(State({"total_at_visit": torch.tensor([1.0, 2.0, 3.0, math.nan]).double()},
                        {**there.identity(), "total": 5.0, "per_update": 0.5}))  # fmt: skip
    marks = other.moved(added.state(), kept).tensors["total_at_visit"].tolist()
    assert (marks[0], marks[3]) == (2.0, 1.0)
    assert math.isnan(marks[1])
    assert math.isnan(marks[2])

    scored, again = RescoredDrift(there), RescoredDrift(here)
    scored.restore(State({"tokens": torch.tensor([7, 8, 9]).int(), "mask": torch.tensor([True] * 3),
                          "logprobs": torch.zeros(3), "ends": torch.tensor([1, 2, 3]),
                          "indices": torch.tensor([0, 1, 2]), "dropped": torch.tensor([3])},
                         there.identity()))  # fmt: skip
    again.restore(again.moved(scored.state(), kept))
    state = again.state().tensors
    # "b" keeps its response; that of "a" was to other tokens, and the second "b" was dropped before.
    assert (state["indices"].tolist(), state["tokens"].tolist(), state["dropped"].tolist()) == ([0], [8], [2, 3])

    greso = GresoCurriculum(here, Greso(), 0)
    streaks = greso.moved(GresoCurriculum(there, Greso(), 0).state(), kept)
    assert streaks.values["epochs"] == {"epoch": 1, "position": 0, "passed_over": []}
    greso.restore(streaks)

    replay = SelfImitationReplay(SelfImitationBuffer(), 0)
    replay.observe([Group(task, (_answer(task),)) for task in former])
    own = replay.moved(replay.state(), kept, tasks)
    assert sorted(own.values["task_ids"]) == ["new-0", "new-2"]


def _answer(task: Task) -> Rollout:
    return Rollout(
        task_id=task.id, prompt=task.prompt, response=(5,), mask=(True,), logprobs=(0.0,), full_logprobs=(0.0,),
        text="", grade=Grade(1.0), oldest_version=0, newest_version=0, stop="stop",
    )  # fmt: skip


def test_prompts_on_their_way_go_on_where_they_fit():
    """Of a task that stays and of a place that there is; otherwise they are asked as if for the first time."""
    tasks = [Task(name, (1,), name) for name in "abc"]
    stream = RolloutScheduler(UniformCurriculum(3, 0), tasks, None, prompts_per_step=2, max_staleness=1)  # type: ignore[arg-type]
    state = State(values={"next": 7, "taken": 5, "slack": 0, "pending": [[0, 6, 0, 0], [2, 6, 1, 0]]})

    assert stream.moved(state, None) == state
    assert stream.moved(state, {2: 0}).values["pending"] == [[0, 6, 1, 0]]
    small = RolloutScheduler(UniformCurriculum(3, 0), tasks, None, prompts_per_step=1)  # type: ignore[arg-type]
    assert small.moved(state, None).values == {**state.values, "pending": []}
