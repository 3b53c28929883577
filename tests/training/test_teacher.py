"""Distillation from a teacher: what is refused before anything is loaded, and a run that learns from one."""

import contextlib
import json
from pathlib import Path
from statistics import fmean

import pytest
from tests.random_model import RANDOM
from tests.training.runs import same, trace

from gnomon.algorithms import resolve
from gnomon.config.experiment import load, supervised
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError, DatasetError, Stopped
from gnomon.models.tiny import save_tiny
from gnomon.training.api import resume, train_experiment
from gnomon.training.build_data import completed, questions
from gnomon.training.run import StopRequest

SETTINGS = (
    "learner.precision=fp32",
    "learner.optimizer.learning_rate=3e-3",
    "held_out.size=0",
    "evaluation.before=false",
    "grading.workers=1",
    "sampling.max_completion_length=3",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that learned 8 sums from their answers, and its table."""
    folder = tmp_path_factory.mktemp("teacher")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (*SETTINGS, "model=tiny", "rollouts_per_step=8", f"task={folder / 'sums.jsonl'}", "steps=40")
    train_experiment(supervised({"name": "sft"}, [parse_override(each) for each in own]), folder / "run")
    return folder / "run"


def taught(teacher: Path, *overrides: str) -> list[str]:
    """Return the settings of a student of ``teacher`` on its sums."""
    named = (f"task={teacher.parent / 'sums.jsonl'}", "rewards=[{kind='numeric'}]", "rollouts_per_step=32")
    return [*SETTINGS, *named, "algorithm=opd", f"algorithm.reference.model={teacher}", *overrides]


def test_a_student_comes_closer_to_its_teacher(teacher: Path, tmp_path: Path):
    """No reward enters the loss: the reverse KL falls from 4 nats to below 3 in 20 steps; what the teacher says of each
    token is in the records.
    """
    run = train_experiment(load(RANDOM, taught(teacher, "steps=20", "checkpoints.every=0")), tmp_path / "run")

    distance = [-gap for gap in run.metrics["advantage/mean"]]
    assert fmean(distance[-3:]) < 0.75 * fmean(distance[:3])
    for row in run.rollouts(20):
        gaps = [r - p for r, p in zip(row.taught.reference, row.taught.proximal, strict=True)]
        assert list(row.taught.advantages) == pytest.approx(gaps, abs=1e-4)


def test_a_stopped_student_goes_on_bit_for_bit(teacher: Path, tmp_path: Path):
    """With a teacher by path; an average of its own weights, which the checkpoint holds, is SDFT's below."""
    loaded = load(RANDOM, taught(teacher, "steps=4", "checkpoints.every=2"))
    whole = train_experiment(loaded, tmp_path / "whole")
    with pytest.raises(Stopped):
        train_experiment(loaded, tmp_path / "parts", StopRequest(15, after=2))
    resume(tmp_path / "parts")

    same(trace(whole.directory, 4), trace(tmp_path / "parts", 4))


def test_a_run_as_teacher_is_its_newest_checkpoint(teacher: Path):
    """The resolved experiment names the checkpoint, and a note says so."""
    loaded = completed(load(RANDOM, taught(teacher)))

    assert loaded.experiment.algorithm.reference.model == str(teacher / "checkpoints" / "step-40")
    assert any("its newest checkpoint is taken" in note for note in loaded.notes)


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path):
    """One token string differs: the message names it; fewer logits than the model has are refused too."""
    folder = save_tiny(tmp_path / "other", 1)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary).replace('"A": ', '"\u0100A": '))
    with pytest.raises(ConfigError, match=r"has other tokens than 'tiny': token \d+ is 'A' and there"):
        questions(load(RANDOM, ["algorithm=opd", f"algorithm.reference.model={folder}"]).experiment)


@pytest.mark.parametrize(
    ("context", "said"),
    [(2, "leaves no room for a prompt in the context of 2 tokens of the teacher"),
     (6, "prompts of .* are longer than 3 tokens, the context of 6 of the teacher"), (8, None), (4096, None)],
)  # fmt: skip
def test_a_teacher_whose_context_is_shorter_than_the_answers_is_refused(tmp_path: Path, context: int, said: str | None):
    """It would score tokens at places that it never saw, or end in an error of its table of positions."""
    folder = save_tiny(tmp_path / "other", 1)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    asked = load(RANDOM, ["algorithm=opd", f"algorithm.reference.model={folder}", "rollouts_per_step=8"]).experiment

    with contextlib.nullcontext() if said is None else pytest.raises(DatasetError, match=said):
        questions(asked)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "first weights, which teach nothing; set algorithm.reference.model to another folder, run or model"),
        (("algorithm.reference.model=average",), "an average of the model's own weights, which teach nothing"),
        (("algorithm.reference.model=tiny",), "first weights, which teach nothing"),
        (("algorithm.reference.tasks=[{task='math', model='tiny'}]",), "'math', which is no part of a mixture here"),
    ],
)
def test_a_reference_that_teaches_nothing_is_refused(overrides: tuple[str, ...], said: str):
    """The model's own first weights, and a teacher of questions that are not asked."""
    with pytest.raises(ConfigError, match=said):
        questions(load(RANDOM, ["algorithm=opd", *overrides]).experiment)


@pytest.mark.parametrize(
    ("taught", "said"),
    [
        (("a",), "ids of the part 'a:b' begin as those of 'a', whose teacher would score both; give 'a:b' a teacher"),
        (("a#2", "a:b"), None),
        (("a", "a:b"), None),
        (("a:b",), None),
        (("a#3",), r"'a#3', which is no part of a mixture here \(parts: a, a:b, a#2\)"),
    ],
)
def test_teachers_are_told_apart_by_the_parts_ids(tmp_path: Path, taught: tuple[str, ...], said: str | None):
    """A teacher of a part that is not there scores nothing, and one whose name begins another part's scores both."""
    other = save_tiny(tmp_path / "other", 1)
    parts = []
    for number, name in enumerate(("a", "a:b", "a")):
        (tmp_path / str(number)).mkdir()
        file = tmp_path / str(number) / f"{name}.jsonl"
        rows = [{"prompt": f"{n}+{number}=", "answer": str(n + number)} for n in range(8)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        parts.append(f"'{file}'")
    teachers = ", ".join(f"{{task='{name}', model='{other}'}}" for name in taught)
    asked = [f"task={{kind='mixture', size=12, parts=[{', '.join(parts)}]}}", "algorithm=opd", "rewards=['numeric']",
             "held_out.size=0", "rollouts_per_step=8", f"algorithm.reference.model={other}",
             f"algorithm.reference.tasks=[{teachers}]"]  # fmt: skip

    with contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        questions(load(RANDOM, asked).experiment)


def test_a_reference_that_nothing_reads_is_refused():
    """GRPO has no KL: a teacher would cost a pass and change nothing."""
    with pytest.raises(
        ConfigError, match=r"nothing reads the reference policy; set .*algorithm.advantage = \"ReverseKl"
    ):
        resolve({"preset": "grpo", "reference.model": "average"})
    assert resolve({"preset": "rloo", "reference.model": "average"}).reference.model == "average"


HINT = "algorithm.reference.prompt='{question} or {answer}'"


def test_a_policy_learns_what_it_says_when_it_knows_the_answer(teacher: Path, tmp_path: Path):
    """SDFT over a table: the distance to the hinted teacher falls, no reward is used, and a stopped run goes on."""
    settings = taught(teacher, "algorithm=sdft", "algorithm.reference.model=average", HINT, "rollouts_per_step=8")
    loaded = load(
        RANDOM, [*settings, f"model={teacher}", "steps=4", "checkpoints.every=2", "algorithm.surrogate.top_k=8"]
    )
    whole = train_experiment(loaded, tmp_path / "whole")
    with pytest.raises(Stopped):
        train_experiment(loaded, tmp_path / "parts", StopRequest(15, after=2))
    resume(tmp_path / "parts")

    assert whole.metrics["loss/kl_teacher_nats"][-1] < 0.9 * whole.metrics["loss/kl_teacher_nats"][0]
    assert set(whole.metrics["advantage/taught_fraction"]) == {1.0}
    same(trace(whole.directory, 4), trace(tmp_path / "parts", 4))


def test_a_group_is_taught_by_its_best_answer(teacher: Path, tmp_path: Path):
    """SDPO: answers of a group without a right one beside them are not taught, and all others are."""
    settings = taught(teacher, "algorithm=sdpo", "algorithm.reference.model=average", "checkpoints.every=0", "steps=2")
    run = train_experiment(load(RANDOM, [*settings, f"model={teacher}", "sampling.temperature=2"]), tmp_path / "run")

    for step in (1, 2):
        groups: dict[int, list[float]] = {}
        for row in run.rollouts(step):
            groups.setdefault(row.group, []).append(row.rollout.grade.reward or 0.0)
        with_sibling = [any(r == 1 for r in group[:n] + group[n + 1 :]) for group in groups.values() for n in range(8)]
        assert run.metrics["advantage/taught_fraction"][step - 1] == pytest.approx(sum(with_sibling) / 32)


def test_a_mixture_of_rewards_and_a_teacher_is_a_regularizer(teacher: Path, tmp_path: Path):
    """GRPO with an exact KL to a teacher: both parts of the loss are there."""
    kl = "algorithm.regularizers=[{piece='Kl', estimator='exact', top_k=16, coefficient=0.5}]"
    settings = taught(teacher, "algorithm=grpo", kl, "steps=2", "checkpoints.every=0")
    run = train_experiment(load(RANDOM, settings), tmp_path / "run")

    assert min(run.metrics["loss/kl_reference_estimate_nats"]) > 0
    assert run.metrics["loss/kl_reference"][0] == pytest.approx(
        0.5 * run.metrics["loss/kl_reference_estimate_nats"][0], rel=0.5
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preset": "sdft", "reference.prompt": "no question"}, "has no {question}"),
        ({"preset": "opd", "reference.model": "policy"}, "with the same prompt the distance is 0"),
        ({"preset": "sdft", "correction": "TruncatedIS"}, "a correction would weigh the one that was drawn"),
        ({"preset": "a-star-po", "reference.prompt": "{question} {answer}"}, "compares answers to one question"),
        (
            {"preset": "p3o", "regularizers": [{"piece": "EssKl", "estimator": "exact"}], "surrogate": "Distillation"},
            "a batch keeps one",
        ),
        ({"preset": "grpo", "regularizers": [{"piece": "Kl", "top_k": 5}]}, 'estimator = "exact" above it'),
    ],
)
def test_compositions_that_cannot_be_meant_are_refused(change: dict[str, object], said: str):
    """Each message says what to set."""
    with pytest.raises(ConfigError, match=said):
        resolve(change)


def test_a_hint_of_a_column_that_rows_lack_is_refused(teacher: Path):
    """The message names the column and those that there are."""
    prompt = "algorithm.reference.prompt='{question} {feedback}'"
    settings = taught(teacher, "algorithm=sdft", "algorithm.reference.model=average", "rollouts_per_step=8", prompt)
    with pytest.raises(DatasetError, match=r"names \{feedback\}, and the row has .*answer"):
        _ = questions(load(RANDOM, settings).experiment).split.train[0]
