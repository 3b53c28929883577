"""What a process allocates while a step can be undone and a checkpoint is written or read, counted in bytes."""

import asyncio
import gc
import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.conftest import build_batch
from tests.learner.together import alone, recipe_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnomon.algorithms import GRPO, PRESETS
from gnomon.core.tensor_files import SHARE, stored
from gnomon.core.types import State
from gnomon.learner import mesh
from gnomon.learner.worker import _write_share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROCESSES = 3
RECIPE = recipe_for(PRESETS["ppo"], PROCESSES)
SMALL = 4096
"""Bytes of numbers one by one: norms, counts, texts."""


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors that operations make or meet in this thread, from when they are met to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        for held in gc.get_objects():
            if isinstance(held, Tensor) and held.layout == torch.strided and held.device.type == "cpu":
                self._add(held, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, out)):
            if type(each) in (Tensor, torch.nn.Parameter) and each.device.type == "cpu":
                self._add(each, each.untyped_storage().nbytes())
        return out

    def _add(self, tensor: Tensor, count: int) -> None:
        try:
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own, or a fake one
            return
        if place == 0 or place in self._known:
            return

        def drop(reference: Any) -> None:
            self.live -= count
            self._known.pop(place, None)

        self._known[place] = weakref.ref(storage, drop)
        self.live += count
        self.peak = max(self.peak, self.live)


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that ``work`` held at once, beside what was there."""
    gc.collect()
    with Meter() as meter:
        kept = work()
        del kept
    return meter.peak


def measure(rank: int, rendezvous: str, folder: Path, told: Any) -> None:
    """Be one of three processes: train, and tell the peak of each thing that a run asks of its learner."""
    torch.set_num_threads(1)
    mesh.init_mesh(rendezvous, rank, PROCESSES, torch.device("cpu"))
    learner = alone(RECIPE)
    batch = GRPO.weigh(GRPO.prepare(build_batch(0, 3, 3)))
    asyncio.run(learner.update(batch, GRPO, 0))
    share = sum(tensor.nbytes for owner in learner._changing() for tensor in owner.changing())
    lent: list[State] = []

    def write() -> None:
        lent.append(learner.lend())
        for owner in (learner._optimizer, learner._critic.optimizer):
            owner._recall()
        _write_share(folder / SHARE.format(rank + 1), {**lent[0].tensors, **lent[0].lent})

    def model() -> None:
        learner.write_model(folder.parent / "model" if rank == 0 else None)

    found = {"keep": peak(learner.keep), "undo": peak(learner.undo), "write": peak(write), "model": peak(model)}
    # All must have written before one reads.
    mesh.current_mesh().all_reduce_sum(torch.zeros(1))
    state = State(stored(folder), lent.pop().values)
    state = State(state.tensors, {**learner.state().values})
    found["read"] = peak(lambda: learner.restore(state))
    found["collect"] = peak(learner.state)
    told.put((rank, share, found))


def test_no_process_holds_more_than_its_share_and_a_tensor(tmp_path: Path):
    """Three gloo processes: a copy to undo a step and a checkpoint that is waited for take a share, reading it and
    the model's folder, with its critic's, a tensor.

    That collecting the state takes all of it in one process says that the meter sees such a thing.
    """
    shares = tmp_path / "shares"
    shares.mkdir()
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    ranks = [context.Process(target=measure, args=(r, str(tmp_path / "m"), shares, told)) for r in range(PROCESSES)]
    for process in ranks:
        process.start()
    measured = sorted(told.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    tensors = stored(shares)
    whole, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())

    for rank, share, found in measured:
        print(rank, share, {name: round(count / share, 3) for name, count in found.items()})
        assert 3 * share < 1.6 * whole  # a critic that was not trained yet has moments, which are not saved
        assert share < found["keep"] + SMALL <= share + 2 * SMALL
        assert found["undo"] <= largest + SMALL
        assert share / 2 < found["write"] <= share + largest + SMALL
        assert largest <= found["model"] <= largest * (1 + 1 / PROCESSES) + SMALL  # what is padded is copied
        assert found["read"] <= largest + SMALL
        assert found["collect"] > (0.9 * whole if rank == 0 else 0)
