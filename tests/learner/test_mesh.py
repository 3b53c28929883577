"""A learner in two processes, each with a part of the model, is the learner in one."""

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.together import alone, apart, moved, recipe_for, together, walk

from gnomon import failpoints
from gnomon.algorithms import GRPO, P3O, PRESETS, Algorithm
from gnomon.errors import CheckpointError, LearnerError, NotFiniteError
from gnomon.learner.gang import Gang
from gnomon.learner.local_crew import LocalCrew
from gnomon.learner.torch import TorchLearner
from gnomon.models.load import load_model
from gnomon.types import Batch, Snapshot, State

VAPO = PRESETS["vapo"]
NEEDS = frozenset({"proximal", "reference", "values"})


def run(work: Any) -> Any:
    return asyncio.run(work)


@pytest.fixture(scope="module")
def recipe():
    """With a critic, a reference and two processes; CPU tensors of odd sizes over them."""
    return recipe_for(PRESETS["ppo"])


@pytest.fixture(scope="module")
def started(recipe) -> Iterator[tuple[Gang, State]]:
    """Processes that every test shares, and the state that they began with."""
    with together(recipe) as gang:
        yield gang, gang.state()


@pytest.fixture
def gang(started) -> Gang:
    """The processes, as they began."""
    gang, first = started
    gang.restore(first)
    return gang


@pytest.fixture
def single(recipe) -> TorchLearner:
    """The same learner in this process."""
    return alone(recipe)


@pytest.fixture(scope="module")
def batches(make_batch) -> Callable[[int], list[Batch]]:
    """Nine rows in three groups, so that two processes have unequal parts."""
    return lambda count: [make_batch(seed, 3, 3) for seed in range(count)]


@pytest.mark.parametrize("algorithm", [GRPO, P3O, VAPO], ids=lambda a: a.name)
def test_two_processes_make_the_steps_of_one(algorithm: Algorithm, gang: Gang, single: TorchLearner, batches):
    """Weights, moments and all that is measured, over three steps, to 1e-6; the critic's as well (P4)."""
    first = single.state().tensors
    mine, theirs = (walk(learner, algorithm, batches(3)) for learner in (single, gang))

    assert apart(gang.state().tensors, single.state().tensors) < 1e-6
    assert moved(single.state().tensors, first) > 1e-3
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_scores_are_those_of_one_process(gang: Gang, single: TorchLearner, make_batch):
    """Log-probabilities and values of every row are in every process, and what is masked is 0."""
    batch = make_batch(5, 3, 3)
    wanted, found = (run(learner.score(batch, NEEDS - {"reference"})) for learner in (single, gang))

    for name in ("proximal", "values", "bootstrap"):
        torch.testing.assert_close(vars(found)[name], vars(wanted)[name], rtol=0, atol=2e-6)
    assert not found.proximal[~batch.mask].any()


def test_state_is_of_no_number_of_processes(gang: Gang, single: TorchLearner, batches):
    """What two saved, one goes on from, and back; names, shapes and values are those of one process."""
    steps = batches(4)
    walk(gang, GRPO, steps[:1])
    single.restore(gang.state())
    assert apart(single.state().tensors, gang.state().tensors) == 0.0
    assert single.version == gang.version == 1

    walk(single, GRPO, steps[1:2], 1)
    gang.restore(single.state())
    assert apart(single.state().tensors, gang.state().tensors) == 0.0
    for learner in (gang, single):
        walk(learner, GRPO, steps[2:], 2)
    assert apart(single.state().tensors, gang.state().tensors) < 1e-6
    assert gang.state().values == single.state().values


def test_a_state_of_another_learner_is_refused(gang: Gang, single: TorchLearner, batches):
    """It raises in all processes, nothing is changed, and the next step is made."""
    state = single.state()
    others = State({n: t for n, t in state.tensors.items() if "norm" not in n}, state.values)

    with pytest.raises(CheckpointError, match="belongs to another model"):
        gang.restore(others)

    assert apart(gang.state().tensors, state.tensors) == 0.0
    walk(gang, GRPO, batches(1))


def test_the_same_steps_are_the_same_bits(started, batches):
    """With the same number of processes sums are made in the same order."""
    gang, first = started
    found = []
    for _ in range(2):
        gang.restore(first)
        measured = walk(gang, P3O, batches(2))
        found.append((measured, gang.state().tensors))

    assert found[0][0] == found[1][0]
    assert apart(found[0][1], found[1][1]) == 0.0


def test_weights_are_sent_as_the_model_computes_with_them(gang: Gang, single: TorchLearner, batches):
    """A snapshot is the masters, under the names of one process; it is new after each update."""
    before = {name: tensor.clone() for name, tensor in gang.snapshot().tensors()}
    walk(gang, GRPO, batches(1))
    after = dict(gang.snapshot().tensors())

    assert before.keys() == after.keys() == {name for name, _ in single.snapshot().tensors()}
    assert apart(before, after) > 1e-3
    assert apart(after, {n: gang.state().tensors[f"master/{n}"] for n in after}) == 0.0


def test_lent_weights_are_given_back(gang: Gang, single: TorchLearner, make_batch, batches):
    """Log-probabilities of other weights are theirs; afterwards the learner's own are what they were, bit for bit."""
    batch, state = make_batch(2, 3, 3), gang.state()
    walk(single, GRPO, batches(1))
    lent = Snapshot(7, lambda: iter(list(single.snapshot().tensors())))

    found = run(gang.logprobs(batch, lent))

    torch.testing.assert_close(found, run(single.logprobs(batch)), rtol=0, atol=2e-6)
    assert float((found - run(gang.logprobs(batch))).abs().max()) > 1e-3
    assert apart(gang.state().tensors, state.tensors) == 0.0


def test_what_is_not_finite_in_one_process_changes_nothing_in_any(gang: Gang, make_batch, batches):
    """The row with nan is in one process; all raise, with its text, and the next step is as if it never was."""
    state, minibatch = gang.state(), GRPO.weigh(GRPO.prepare(make_batch(0, 3, 3)))
    shortest = int(torch.where(GRPO.live_rows(minibatch), minibatch.lengths, 99).argmin())
    minibatch.advantages[shortest] = torch.where(minibatch.mask[shortest], float("nan"), 0.0)

    with pytest.raises(NotFiniteError, match="the loss is not finite: nan, from policy nan"):
        run(gang.update(minibatch, GRPO, 0))

    assert apart(gang.state().tensors, state.tensors) == 0.0
    walk(gang, GRPO, batches(1))


def test_the_model_is_written_as_one_process_writes_it(gang: Gang, batches, tmp_path: Path):
    """At once, or later as it was: a Hugging Face folder, and the critic's in it."""
    walk(gang, GRPO, batches(1))
    later = gang.model_writer()
    weights = {name: tensor.clone() for name, tensor in gang.snapshot().tensors()}
    walk(gang, GRPO, batches(1))
    (tmp_path / "later").mkdir()
    later(tmp_path / "later")
    gang.write_model(tmp_path / "now")

    for folder in ("later", "now"):
        assert (tmp_path / folder / "critic" / "config.json").is_file()
    loaded = dict(load_model(str(tmp_path / "later"), torch.float32).named_parameters())
    assert apart({name: loaded[name].detach() for name in weights}, weights) == 0.0


def test_a_model_waits_on_the_disk_of_its_checkpoint(recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What an earlier run left there goes, and what nobody moved; a full disk is said as one, and leaves nothing."""
    waiting, target = tmp_path / "waiting", tmp_path / "target"
    (waiting / "left").mkdir(parents=True)
    target.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, "model:1:full")
    gang = Gang(recipe, LocalCrew(2), waiting=waiting)
    gang.open()
    try:
        assert not waiting.exists()
        with pytest.raises(OSError, match=r"no space in \S+/waiting for the model .*make room, then") as told:
            gang.model_writer()
        assert told.value.errno == errno.ENOSPC
        assert list(waiting.iterdir()) == []
        move, _ = gang.model_writer(), gang.model_writer()
        assert len(list(waiting.glob("*/model.safetensors"))) == 2
        move(target)
        assert (target / "model.safetensors").is_file()
    finally:
        gang.close()
    assert not waiting.exists()


def test_other_errors_are_those_of_one_process(gang: Gang, make_batch, batches):
    """A need that nobody can meet is refused in the same words, and the processes live on."""
    with pytest.raises(ValueError, match="needs a reference policy, but the learner was given none"):
        run(gang.score(make_batch(), {"reference"}))
    walk(gang, GRPO, batches(1))


def test_a_process_that_dies_ends_the_others(gang: Gang, make_batch):
    """At once, with how it died; nobody is left, and nothing more is asked. The last test here: nobody is left."""
    pids = [member.program.pid for member in gang.crew.members]
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()

    with pytest.raises(LearnerError, match=r"(?s)process 1 of the learner's 2 is gone: it was killed by SIGKILL"):
        run(gang.score(make_batch(), {"proximal"}))

    assert time.monotonic() - began < 10
    for member in gang.crew.members:
        member.program.wait(5)
    with pytest.raises(LearnerError, match="go on from the newest checkpoint"):
        gang.state()
