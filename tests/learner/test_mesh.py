"""A learner in two processes, each with a part of the model, is the learner in one."""

import asyncio
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.learner.together import alone, apart, moved, recipe_for, together, walk
from torch.distributed.checkpoint import HuggingFaceStorageReader

from gnomon.algorithms import GRPO, P3O, PRESETS, Algorithm
from gnomon.core import failpoints
from gnomon.core.errors import CheckpointError, LearnerError, NotFiniteError
from gnomon.core.tensor_files import SHARE, StoredTensor
from gnomon.core.types import Batch, Snapshot, State
from gnomon.learner.distributed import DistributedLearner
from gnomon.learner.learner import TorchLearner
from gnomon.learner.worker_group import LocalWorkerGroup
from gnomon.models.load import load_model
from gnomon.records.checkpoints import Checkpoints, load

VAPO = PRESETS["vapo"]
NEEDS = frozenset({"proximal", "reference", "values"})


def run(work: Any) -> Any:
    return asyncio.run(work)


def is_identical(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def recipe():
    """With a critic, a reference and two processes; CPU tensors of odd sizes over them."""
    return recipe_for(PRESETS["ppo"])


@pytest.fixture(scope="module")
def started(recipe) -> Iterator[tuple[DistributedLearner, State]]:
    """Processes that every test shares, and the state that they began with."""
    with together(recipe) as distributed:
        yield distributed, distributed.state()


@pytest.fixture
def distributed(started) -> DistributedLearner:
    """The processes, as they began."""
    distributed, first = started
    distributed.restore(first)
    return distributed


@pytest.fixture
def single(recipe) -> TorchLearner:
    """The same learner in this process."""
    return alone(recipe)


@pytest.fixture(scope="module")
def batches(make_batch) -> Callable[[int], list[Batch]]:
    """Nine rows in three groups, so that two processes have unequal parts."""
    return lambda count: [make_batch(seed, 3, 3) for seed in range(count)]


@pytest.mark.parametrize("algorithm", [GRPO, P3O, VAPO], ids=lambda a: a.name)
def test_two_processes_make_the_steps_of_one(
    algorithm: Algorithm, distributed: DistributedLearner, single: TorchLearner, batches
):
    """Weights, moments and all that is measured, over three steps, to 1e-6; the critic's as well (P4)."""
    first = single.state().tensors
    mine, theirs = (walk(learner, algorithm, batches(3)) for learner in (single, distributed))

    assert apart(distributed.state().tensors, single.state().tensors) < 1e-6
    assert moved(single.state().tensors, first) > 1e-3
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_scores_are_those_of_one_process(distributed: DistributedLearner, single: TorchLearner, make_batch):
    """Log-probabilities and values of every row are in every process, and what is masked is 0."""
    batch = make_batch(5, 3, 3)
    wanted, found = (run(learner.score(batch, NEEDS - {"reference"})) for learner in (single, distributed))

    for name in ("proximal", "values", "bootstrap"):
        torch.testing.assert_close(vars(found)[name], vars(wanted)[name], rtol=0, atol=2e-6)
    assert not found.proximal[~batch.mask].any()


def test_state_is_of_no_number_of_processes(distributed: DistributedLearner, single: TorchLearner, batches):
    """What two saved, one goes on from, and back; names, shapes and values are those of one process."""
    steps = batches(4)
    walk(distributed, GRPO, steps[:1])
    single.restore(distributed.state())
    assert apart(single.state().tensors, distributed.state().tensors) == 0.0
    assert single.version == distributed.version == 1

    walk(single, GRPO, steps[1:2], 1)
    distributed.restore(single.state())
    assert apart(single.state().tensors, distributed.state().tensors) == 0.0
    for learner in (distributed, single):
        walk(learner, GRPO, steps[2:], 2)
    assert apart(single.state().tensors, distributed.state().tensors) < 1e-6
    assert distributed.state().values == single.state().values


def test_a_state_of_another_learner_is_refused(distributed: DistributedLearner, single: TorchLearner, batches):
    """It raises in all processes, nothing is changed, and the next step is made."""
    state = single.state()
    others = State({n: t for n, t in state.tensors.items() if "norm" not in n}, state.values)

    with pytest.raises(CheckpointError, match="belongs to another model"):
        distributed.restore(others)

    assert apart(distributed.state().tensors, state.tensors) == 0.0
    walk(distributed, GRPO, batches(1))


def test_a_step_is_undone_from_each_process_s_own_share(distributed: DistributedLearner, batches):
    """Kept, trained twice and undone, all is bit for bit what it was, counts too; then the same step is the same bits.

    The run hears no tensor: nothing is collected.
    """
    steps = batches(3)
    walk(distributed, VAPO, steps[:1])
    before = distributed.state()
    asked: list[list[Any]] = [distributed._ask("keep")]
    walk(distributed, VAPO, steps[1:], 1)
    first = distributed.state().tensors
    asked.append(distributed._ask("undo"))

    assert asked == [[None, None], [None, None]]
    assert moved(first, before.tensors) > 1e-4
    distributed._version = before.values["version"]
    again = distributed.state()
    assert again.values == before.values
    assert is_identical(again.tensors, before.tensors)
    walk(distributed, VAPO, steps[1:], 1)
    assert is_identical(distributed.state().tensors, first)


def saved(learner: Any, folder: Path, step: int = 1, meanwhile: Callable[[], Any] = lambda: None) -> Path:
    """Write a checkpoint of what ``learner`` is now, after ``meanwhile``."""
    state = learner.lend()
    meanwhile()
    return Checkpoints(folder, keep_last=9).save(step, {"learner": state}, lambda folder: None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_process_writes_its_share_while_the_run_goes_on(
    distributed: DistributedLearner, single: TorchLearner, batches, tmp_path: Path
):
    """Saved while two steps are made, it is the state of before, bit for bit, in one process and in two again.

    torch's own reader of distributed checkpoints finds the same numbers.
    """
    steps = batches(3)
    walk(distributed, VAPO, steps[:1])
    before = distributed.state()
    path = saved(distributed, tmp_path, meanwhile=lambda: walk(distributed, VAPO, steps[1:], 1))
    shares = path / "state" / "learner"

    assert sorted(p.name for p in shares.iterdir()) == [SHARE.format(1), SHARE.format(2)]
    assert max(p.stat().st_size for p in shares.iterdir()) < 0.6 * sum(t.nbytes for t in before.tensors.values())
    state = load(path)["learner"]
    assert state.values == before.values
    assert all(state.tensors[name].shape == tensor.shape for name, tensor in before.tensors.items())
    assert is_identical({name: tensor[...] for name, tensor in state.tensors.items()}, before.tensors)
    single.restore(state)
    assert is_identical(single.state().tensors, before.tensors)
    assert moved(distributed.state().tensors, before.tensors) > 1e-4
    distributed.restore(state)
    assert is_identical(distributed.state().tensors, before.tensors)
    found = {name: torch.empty_like(tensor) for name, tensor in before.tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(shares)), no_dist=True)
    assert is_identical(found, dict(before.tensors))


def test_what_one_process_wrote_is_read_as_far_as_it_is_a_share(
    distributed: DistributedLearner, single: TorchLearner, batches, tmp_path: Path
):
    """A checkpoint of one process, the older ones' form too, is gone on from by two; no process is sent a tensor."""
    walk(single, VAPO, batches(1))
    state = load(saved(single, tmp_path), lazily=("learner",))["learner"]

    distributed.restore(state)

    assert {type(tensor) for tensor in state.tensors.values()} == {StoredTensor}
    assert is_identical(distributed.state().tensors, single.state().tensors)
    distributed.restore(load(tmp_path / "step-1")["learner"])
    assert is_identical(distributed.state().tensors, single.state().tensors)


def test_a_share_that_cannot_be_written_is_said_and_the_next_one_is(distributed: DistributedLearner, tmp_path: Path):
    """A folder that is gone: the writer raises what the process met, which lives on."""
    state = distributed.lend()
    assert state.shares is not None

    with pytest.raises(LearnerError, match=r"FileNotFoundError.*nowhere"):
        state.shares.write(tmp_path / "nowhere")

    assert load(saved(distributed, tmp_path))["learner"].values == distributed.state().values


def test_the_same_steps_are_the_same_bits(started, batches):
    """With the same number of processes sums are made in the same order."""
    distributed, first = started
    found = []
    for _ in range(2):
        distributed.restore(first)
        measured = walk(distributed, P3O, batches(2))
        found.append((measured, distributed.state().tensors))

    assert found[0][0] == found[1][0]
    assert apart(found[0][1], found[1][1]) == 0.0


def test_weights_are_sent_as_the_model_computes_with_them(
    distributed: DistributedLearner, single: TorchLearner, batches
):
    """A snapshot is the masters, under the names of one process; it is new after each update."""
    before = {name: tensor.clone() for name, tensor in distributed.snapshot().tensors()}
    walk(distributed, GRPO, batches(1))
    after = dict(distributed.snapshot().tensors())

    assert before.keys() == after.keys() == {name for name, _ in single.snapshot().tensors()}
    assert apart(before, after) > 1e-3
    assert apart(after, {n: distributed.state().tensors[f"master/{n}"] for n in after}) == 0.0


def test_lent_weights_are_given_back(distributed: DistributedLearner, single: TorchLearner, make_batch, batches):
    """Log-probabilities of other weights are theirs; afterwards the learner's own are what they were, bit for bit."""
    batch, state = make_batch(2, 3, 3), distributed.state()
    walk(single, GRPO, batches(1))
    lent = Snapshot(7, lambda: iter(list(single.snapshot().tensors())))

    found = run(distributed.logprobs(batch, lent))

    torch.testing.assert_close(found, run(single.logprobs(batch)), rtol=0, atol=2e-6)
    assert float((found - run(distributed.logprobs(batch))).abs().max()) > 1e-3
    assert apart(distributed.state().tensors, state.tensors) == 0.0


def test_what_is_not_finite_in_one_process_changes_nothing_in_any(distributed: DistributedLearner, make_batch, batches):
    """The row with nan is in one process; all raise, with its text, and the next step is as if it never was."""
    state, minibatch = distributed.state(), GRPO.weigh(GRPO.prepare(make_batch(0, 3, 3)))
    shortest = int(torch.where(GRPO.live_rows(minibatch), minibatch.lengths, 99).argmin())
    minibatch.advantages[shortest] = torch.where(minibatch.mask[shortest], float("nan"), 0.0)

    with pytest.raises(NotFiniteError, match="the loss is not finite: nan, from policy nan"):
        run(distributed.update(minibatch, GRPO, 0))

    assert apart(distributed.state().tensors, state.tensors) == 0.0
    walk(distributed, GRPO, batches(1))


def test_the_model_is_written_as_one_process_writes_it(distributed: DistributedLearner, batches, tmp_path: Path):
    """At once, or later as it was: a Hugging Face folder, and the critic's in it."""
    walk(distributed, GRPO, batches(1))
    later = distributed.model_writer()
    weights = {name: tensor.clone() for name, tensor in distributed.snapshot().tensors()}
    walk(distributed, GRPO, batches(1))
    (tmp_path / "later").mkdir()
    later(tmp_path / "later")
    distributed.write_model(tmp_path / "now")

    for folder in ("later", "now"):
        assert (tmp_path / folder / "critic" / "config.json").is_file()
    loaded = dict(load_model(str(tmp_path / "later"), torch.float32).named_parameters())
    assert apart({name: loaded[name].detach() for name in weights}, weights) == 0.0


def test_a_model_waits_on_the_disk_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What an earlier run left there goes, and what nobody moved; a full disk is said as one, and leaves nothing."""
    waiting, target = tmp_path / "waiting", tmp_path / "target"
    (waiting / "left").mkdir(parents=True)
    target.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, "model:1:full")
    distributed = DistributedLearner(recipe_for(PRESETS["ppo"], processes=1), LocalWorkerGroup(1), waiting=waiting)
    distributed.open()
    try:
        assert not waiting.exists()
        with pytest.raises(OSError, match=r"no space in \S+/waiting for the model .*make room, then") as told:
            distributed.model_writer()
        assert told.value.errno == errno.ENOSPC
        assert list(waiting.iterdir()) == []
        move, _ = distributed.model_writer(), distributed.model_writer()
        assert len(list(waiting.glob("*/model.safetensors"))) == 2
        move(target)
        assert (target / "model.safetensors").is_file()
    finally:
        distributed.close()
    assert not waiting.exists()


@contextmanager
def a_quota(distributed: DistributedLearner, rank: int, size: int) -> Iterator[None]:
    """Let one process write no file beyond so many bytes."""
    pid = distributed.worker_group.members[rank].program.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_room_for_one_share_leaves_the_checkpoint_before(
    rank: int, distributed: DistributedLearner, batches, tmp_path: Path
):
    """Refused in the middle of a share: in words, the older one is the newest, and the processes go on."""
    walk(distributed, GRPO, batches(1))
    checkpoints = Checkpoints(tmp_path)

    def save(step: int) -> None:
        checkpoints.save(step, {"learner": distributed.lend()}, distributed.write_model)

    save(1)
    with (
        a_quota(distributed, rank, 100_000),
        pytest.raises(CheckpointError, match=r"checkpoint of step 2 .* cannot be written: .*File too large") as told,
    ):
        save(2)
    found = checkpoints.newest()
    assert "those before it are as they were" in str(told.value)
    assert found is not None
    assert (found.step, found.warnings) == (1, ())
    save(3)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-1", "step-3"]


def test_a_model_that_finds_no_room_leaves_nobody_waiting(distributed: DistributedLearner, tmp_path: Path):
    """Rank 0 is refused in the middle of a file, the others give their shares to the end, and the next one is whole."""
    with a_quota(distributed, 0, 100_000), pytest.raises(LearnerError, match="File too large"):
        distributed.write_model(tmp_path / "refused")
    hashes = distributed.write_model(tmp_path / "whole")

    weights = dict(distributed.snapshot().tensors())
    loaded = dict(load_model(str(tmp_path / "whole"), torch.float32).named_parameters())
    assert apart({name: loaded[name].detach() for name in weights}, weights) == 0.0
    assert {path.name for path in hashes} == {"model.safetensors"}
    assert len(hashes) == 2


def test_other_errors_are_those_of_one_process(distributed: DistributedLearner, make_batch, batches):
    """A need that nobody can meet is refused in the same words, and the processes live on."""
    with pytest.raises(ValueError, match="needs a reference policy, but the learner was given none"):
        run(distributed.score(make_batch(), {"reference"}))
    walk(distributed, GRPO, batches(1))


def test_a_process_that_dies_ends_the_others(distributed: DistributedLearner, make_batch):
    """At once, with how it died; nobody is left, and nothing more is asked. The last test here: nobody is left."""
    pids = [member.program.pid for member in distributed.worker_group.members]
    os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(LearnerError, match=r"(?s)process 1 of the learner's 2 is gone: it was killed by SIGKILL"):
        run(distributed.score(make_batch(), {"proximal"}))

    for member in distributed.worker_group.members:
        member.program.wait(5)
    with pytest.raises(LearnerError, match="go on from the newest checkpoint"):
        distributed.state()


@pytest.mark.slow
def test_one_that_is_killed_while_shares_are_written_leaves_the_checkpoint_before(tmp_path: Path):
    """Stopped as it is asked for its share, killed once the other one's is there: what is half is no checkpoint."""
    checkpoints, failed = Checkpoints(tmp_path), list[LearnerError]()
    with together(recipe_for(GRPO)) as two:
        checkpoints.save(1, {"learner": two.lend()}, two.write_model)
        lent, pid = two.lend(), two.worker_group.members[1].program.pid
        os.kill(pid, signal.SIGSTOP)

        def save() -> None:
            try:
                checkpoints.save(2, {"learner": lent}, two.write_model)
            except LearnerError as error:
                failed.append(error)

        saving = threading.Thread(target=save)
        saving.start()
        while not list(tmp_path.glob(".tmp-2-*/state/learner/*.safetensors")):
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        saving.join(60)

    found = checkpoints.newest()
    assert "process 1 of the learner's 2 is gone: it was killed by SIGKILL" in str(failed[0])
    assert found is not None
    assert (found.step, found.warnings) == (1, ())
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1"]
