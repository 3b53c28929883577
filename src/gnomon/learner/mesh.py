"""Where a learner's parameters are: all in this process, or a shard of each in every one of several.

Only this file knows torch.distributed. A learner is the same code on either mesh: whatever it adds up (losses,
effective sizes, gradients) is a sum over rows, so what each process adds up of its own rows adds up to the whole.
Therefore gradients are **summed** over processes and divided by nothing, and no statistic is averaged.

A process is on one mesh, as torch.distributed has one default group: `init_mesh` enters it, `current_mesh` returns it.
"""

import datetime
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gnomon.core.errors import NotFiniteError
from gnomon.core.types import Adapted
from gnomon.models.contexts import has_adapters, layers_of, with_weights, without_adapters
from gnomon.models.lora import parts, plain_name, sources, whole
from gnomon.models.weight_files import Read

T = TypeVar("T")

# The same function under its name in newer versions of torch.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
ELSEWHERE = "in another process of the learner"

PATIENCE = datetime.timedelta(minutes=10)
"""How long a process waits for the others in one exchange; one that died is noticed at once, by `distributed`."""
# Bytes of a broadcast text: a fingerprint has 32.
_LONGEST_TEXT = 256
_NETWORK = "tcp://"


class Mesh(Protocol):
    """The processes that hold one learner. Every one of them calls the same methods in the same order.

    Attributes:
        rank, size: Which of how many this is.
        device: Where it computes; None is wherever its model is.
        is_whole: Whether parameters stay full, rather than being sharded.
    """

    rank: int
    size: int
    device: torch.device | None
    is_whole: bool

    def shard(self, model: nn.Module) -> None:
        """Keep the local shard of each parameter, drop the rest. All processes must hold equal models; none waits."""

    def run(self, model: nn.Module, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; its passes through ``model`` find every parameter gathered."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes, the same bits in each.

        Args:
            tensor: On the CPU, the same shape in each.
        """

    def broadcast(self, text: str) -> str:
        """Return the short text of rank 0."""

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return the local shard of a parameter: the same memory."""

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Return this process's shard of a full tensor, or of a `StoredTensor`, sharded as ``parameter`` is."""

    def first_row(self, parameter: nn.Parameter) -> int | None:
        """Return the row of the full parameter at which the local shard begins; None where another process saves it."""

    def full(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """Return a full copy on the CPU in rank 0 of a tensor that is sharded as ``parameter`` is; elsewhere an empty
        tensor.
        """

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the local gradient, summed over the rows of all processes; once after the last backward pass."""

    def norm(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """Return the norm of the full gradient, given its local shards."""

    def export(self, model: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor | Adapted]]:
        """Yield names and whole weights as the model computes with them (`lora.parts`); read each before the next."""

    def export_dtype(self, model: nn.Module, held: Any) -> torch.dtype:
        """Return the type in which `export` yields the weight of ``model`` that ``held`` holds."""

    def swap_weights(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> AbstractContextManager[None]:
        """Return the block in which the model computes with a snapshot's ``tensors``; see `contexts.with_weights`."""


class SingleProcess:
    """One process, which holds everything. Nothing is exchanged.

    >>> SingleProcess().all_reduce_sum(torch.ones(1))
    tensor([1.])
    """

    rank, size, is_whole = 0, 1, True
    device: torch.device | None = None

    def shard(self, model: nn.Module) -> None:
        """Keep everything."""

    def run(self, model: nn.Module, work: Callable[[], T]) -> T:
        """Call ``work``: on one process nothing is gathered."""
        return work()

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor: the sum over one process."""
        return tensor

    def broadcast(self, text: str) -> str:
        """Return the text: one process is rank 0."""
        return text

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter: one process holds all of it."""
        return parameter

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Return the tensor: one process holds all of it."""
        return full[...]

    def first_row(self, parameter: nn.Parameter) -> int | None:
        """Return the first row."""
        return 0

    def full(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """Return a copy."""
        return local.detach().to("cpu", copy=True)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's."""
        return parameter.grad

    def norm(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """Return the length of all of them together."""
        return torch.nn.utils.get_total_norm([gradient for _, gradient in gradients])

    def export(self, model: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor | Adapted]]:
        """Yield the live tensors, nothing copied."""
        return parts(model, names)

    def export_dtype(self, model: nn.Module, held: Any) -> torch.dtype:
        """Return its own."""
        found: torch.dtype = held.dtype
        return found

    def swap_weights(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> AbstractContextManager[None]:
        """Point at them, and back."""
        return with_weights(model, tensors)


class ShardedMesh:
    """Several processes, by FSDP2: gloo between CPUs, NCCL between GPUs, one each.

    A layer's parameters are gathered before it computes, dropped after it, and gathered again for its backward pass;
    then each process keeps its shard of the gradient. The parameters outside of the layers (embedding, head, norm) are
    one more such group.

    Trainable parameters are kept as float32 masters, and gathered in the precision that they were loaded in: what the
    model computes with is their rounding, as in one process; gradients are summed in float32. Parameters of another
    precision than most (a value head) are replicated in every process, and `gradient` sums their gradients.

    Args:
        is_offloaded: Shards, moments and optimizer stay in the machine's memory, and visit the GPU.

    Raises:
        RuntimeError: torch.distributed failed, for example since a process that others wait for is gone.
    """

    def __init__(self, rendezvous: str, rank: int, size: int, device: torch.device, is_offloaded: bool = False) -> None:
        self.rank, self.size, self.is_whole = rank, size, False
        self.device: torch.device | None = device
        self._is_offloaded = is_offloaded
        self._roots: dict[nn.Module, nn.Module] = {}
        self._kinds: dict[nn.Module, torch.dtype | None] = {}
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            # Small sums are made on the CPU whatever computes.
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=_store(rendezvous, size),
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
        self._mesh = init_device_mesh(device.type, (size,))

    def shard(self, model: nn.Module) -> None:
        """Keep this process's shard of each parameter, on the mesh's device."""
        # FSDP casts the parameters of a group to one precision, so those of another precision are left out of it.
        trainable = [p for p in model.parameters() if p.requires_grad]
        precision = _commonest(trainable)
        kept_whole = {p for p in trainable if p.dtype != precision}
        for parameter in trainable:
            if parameter in kept_whole:
                parameter.data = parameter.data.to(self.device)
            elif precision != torch.float32:
                # The shard is the float32 master; `param_dtype` rounds what is gathered for computing.
                parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy()
        if precision not in (None, torch.float32):
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        root = _Root(model)
        # Layers first: a parameter belongs to the innermost module that was sharded, and the root takes what is left.
        for module in (*layers_of(model), root):
            sharded: Any = fully_shard(
                module,
                mesh=self._mesh,
                # The root's as well: what stays gathered after a pass without a gradient would be stale after a step.
                reshard_after_forward=True,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if self._is_offloaded else OffloadPolicy(),
                ignored_params=kept_whole,
            )
            # A loss is already a sum with the weights of the whole minibatch, so gradients are summed; FSDP would
            # average.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self._roots[model], self._kinds[model] = root, precision

    def run(self, model: nn.Module, work: Callable[[], T]) -> T:
        """Call ``work`` within the root's forward pass, where weights outside of the layers are gathered too."""
        root: Any = self._roots[model]
        try:
            result: T = root(work)[0]
        except BaseException:
            # An interrupted pass leaves FSDP in the middle of its schedule; without this the next pass would fail.
            root.reset_iter_state()
            raise
        return result

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum."""
        summed = tensor.clone()
        distributed.all_reduce(summed)
        return summed

    def broadcast(self, text: str) -> str:
        """Return the text of rank 0, which has at most 256 bytes."""
        # Bytes, and not broadcast_object_list, which unpickles what it receives: a rendezvous on the network has no
        # key.
        said = torch.zeros(_LONGEST_TEXT, dtype=torch.uint8)
        written = text.encode()
        said[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)
        distributed.broadcast(said, 0)
        return bytes(said.tolist()).rstrip(b"\0").decode()

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return the local shard."""
        return _local(parameter.data)

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's rows of the first axis."""
        if not isinstance(parameter, DTensor):
            return full[...]
        count = self._row_count(parameter)
        return full[self.rank * count : (self.rank + 1) * count]

    def first_row(self, parameter: nn.Parameter) -> int | None:
        """Return the first row of the local shard; rank 0 saves what is replicated."""
        if not isinstance(parameter, DTensor):
            return 0 if self.rank == 0 else None
        # With fewer rows than ranks the last ranks hold none; rank 0 saves a tensor without rows.
        row = self.rank * self._row_count(parameter)
        return row if row < parameter.shape[0] or self.rank == 0 else None

    def full(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """Return the shards of all ranks, put together."""
        found = self._full(parameter, local.detach())
        return found.to("cpu", copy=found is local) if self.rank == 0 else torch.empty(0)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the local shard of the sum; sum it here where the parameter is replicated."""
        if parameter.grad is None or isinstance(parameter, DTensor):
            return None if parameter.grad is None else _local(parameter.grad)
        parameter.grad = self.all_reduce_sum(parameter.grad.cpu()).to(parameter.grad.device)
        return parameter.grad

    def norm(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """Return the root of all shards' squares; a replicated gradient counts once."""
        sharded = [gradient for parameter, gradient in gradients if isinstance(parameter, DTensor)]
        replicated = [gradient for parameter, gradient in gradients if not isinstance(parameter, DTensor)]
        squares = self.all_reduce_sum(_square(sharded)) + _square(replicated)
        return squares.sqrt().float()

    def export(self, model: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor | Adapted]]:
        """Yield them one by one: one full weight is in memory, or one layer where experts have folded adapters."""
        found = sources(model)
        for name in found if names is None else names:
            if found[name].is_folded:
                # peft folds the adapters of stacked experts through the module's own parameters, so the group is
                # gathered for it.
                with _gathered(self._group(model, name)):
                    yield name, sources(model)[name].read()
                continue
            weight = found[name].read()
            if isinstance(weight, Adapted):
                base, up, down = (
                    self._full(part, self._cast(model, part)) for part in (weight.base, weight.up, weight.down)
                )
                yield name, replace(weight, base=base, up=up, down=down)
                del base, up, down
            else:
                yield name, self._full(weight, self._cast(model, weight))

    def export_dtype(self, model: nn.Module, held: Any) -> torch.dtype:
        """Return what FSDP gathers it in."""
        found: torch.dtype = (self._kinds[model] if isinstance(held, DTensor) else None) or held.dtype
        return found

    def _row_count(self, parameter: Tensor) -> int:
        """Return the rows of a full shard, as FSDP2 deals them out: the last ranks may hold fewer."""
        return -(-parameter.shape[0] // self.size)

    def _cast(self, model: nn.Module, held: Tensor) -> Tensor:
        return _local(held).to(self.export_dtype(model, held))

    def _group(self, model: nn.Module, name: str) -> nn.Module:
        """Return what is gathered together with a weight."""
        marked = {id(layer) for layer in layers_of(model)}
        named = ((plain_name(n), module) for n, module in model.named_modules() if id(module) in marked)
        return next((module for layer, module in named if name.startswith(f"{layer}.")), self._roots[model])

    def _full(self, like: Tensor, local: Tensor) -> Tensor:
        """Return the full tensor, sharded as ``like``, from the ``local`` shard; itself where it is replicated."""
        if not isinstance(like, DTensor):
            return local
        count = self._row_count(like)
        # NCCL's and gloo's gather needs equal shapes, so the last shard is padded with rows that are cut off below.
        mine = local.to(self.device)
        mine = torch.cat([mine, mine.new_zeros(count - len(mine), *like.shape[1:])]) if len(mine) < count else mine
        found = mine.new_empty(self.size * count, *like.shape[1:])
        _gather(found, mine.contiguous())
        return found[: like.shape[0]]

    @contextmanager
    def swap_weights(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Copy this process's shards of them over its own, and its own back."""
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        kept = [(local, local.clone()) for local in map(self.local, named.values())]
        try:
            for name, tensor in tensors:
                if name in named:
                    self.local(named[name]).copy_(self.shard_of(named[name], tensor))
            with without_adapters(model) if has_adapters(model) else nullcontext():
                yield
        finally:
            for local, copy in kept:
                local.copy_(copy)


class _Root(nn.Module):
    """A model with whatever is computed with it as its forward pass, since heads are read without being called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        """Return the result, and the tensors in it whose backward pass needs the parameters again."""
        result = work()
        # FSDP hooks the backward pass on the tensors that a forward pass returns, so they must be visible in its
        # output.
        return result, [t for t in vars(result).values() if isinstance(t, Tensor) and t.requires_grad]


def _store(rendezvous: str, size: int) -> Any:
    if not rendezvous.startswith(_NETWORK):
        return distributed.FileStore(rendezvous, size)  # type: ignore[attr-defined]
    # The process that opened the store already holds it; a second client of its own port would count as one more.
    if rendezvous in _stores:
        return _stores[rendezvous]
    address, _, port = rendezvous.removeprefix(_NETWORK).rpartition(":")
    return distributed.TCPStore(address, int(port), size, False, wait_for_workers=False)  # type: ignore[attr-defined]


_current: list[Mesh] = []
_stores: dict[str, Any] = {}


def init_store(address: str, size: int) -> str:
    """Open the rendezvous of ``size`` processes on the network, this one among them, and return its name.

    Args:
        address: This machine's address, at which alone the store can be reached. A program that reaches the address
            can disturb the rendezvous.
    """
    # TCPStore binds to all interfaces by itself; a listening socket that is handed over is bound to one address.
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    found = distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    rendezvous = f"{_NETWORK}{address}:{port}"
    _stores[rendezvous] = found
    return rendezvous


def init_mesh(rendezvous: str, rank: int, size: int, device: torch.device, is_offloaded: bool = False) -> Mesh:
    """Enter the mesh of ``size`` processes and return it once all are there.

    Args:
        rendezvous: Where they find each other: a file's path on one machine, or what `init_store` returned in one of
            them.
    """
    _current[:] = [ShardedMesh(rendezvous, rank, size, device, is_offloaded)]
    return _current[0]


def current_mesh() -> Mesh:
    """Return the mesh that this process is on.

    >>> current_mesh().size
    1
    """
    return _current[0] if _current else SingleProcess()


def agree(mesh: Mesh, fault: str) -> None:
    """Raise NotFiniteError in all processes when there is a fault in any: with its own text where it has one.

    A process that raised alone would leave the others waiting for it.
    """
    if int(mesh.all_reduce_sum(torch.tensor(int(bool(fault))))):
        raise NotFiniteError(fault or f"a number is not finite {ELSEWHERE}; no weight was changed")


def readable(mesh: Mesh, model: nn.Module, is_copied: bool) -> tuple[Mapping[str, Tensor], Read | None]:
    """Return the weights that ``mesh`` publishes of a model, merged, for `weight_files`: their forms, and how to read.

    Args:
        is_copied: They are copied to the CPU now, and are their own forms; else every process has to read.
    """
    if is_copied:
        return {n: t.detach().to("cpu", copy=True) for n, t in whole(mesh.export(model))}, None
    # Shapes and types are known without reading a weight, so a file's header can be written before its tensors.
    held = {name: source.held for name, source in sources(model).items()}
    forms = {n: torch.empty(h.shape, dtype=mesh.export_dtype(model, h), device="meta") for n, h in held.items()}
    return forms, lambda names: whole(mesh.export(model, names))


@contextmanager
def _gathered(module: Any) -> Iterator[None]:
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _square(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.nn.utils.get_total_norm(gradients).cpu().double().square()


def _commonest(parameters: Sequence[nn.Parameter]) -> torch.dtype | None:
    """Return the precision that most numbers have; None of nothing."""
    counts: dict[torch.dtype, int] = {}
    for parameter in parameters:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda precision: counts[precision], default=None)
