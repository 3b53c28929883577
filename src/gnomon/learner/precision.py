"""The precision in which the model computes, and float32 masters of parameters in lower precision.

bfloat16 has 8 bits of precision: a weight of 1 does not change when less than 1/256 is added to it. A step of
reinforcement learning adds about 1e-6 to 1e-5, so almost every update would round away. The sums therefore
live in float32 (the *masters*), and the module holds their roundings.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from gnomon.core.types import Loan
from gnomon.learner.mesh import Mesh, SingleProcess
from gnomon.models.cpu.gradient_sum import GradientSum, add_up

Precision = Literal["fp32", "bf16"]


def resolve_precision(asked: Literal["auto", "fp32", "bf16"], device: str = "cpu") -> Precision:
    """Return what "auto" means on this machine; record the answer, since it changes the numbers of a run.

    >>> resolve_precision("fp32")
    'fp32'
    """
    if asked != "auto":
        return asked
    return "bf16" if is_bf16_faster(device) else "fp32"


def is_bf16_faster(device: str = "cpu") -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware.

    On a processor that means AVX-512 BF16 or AMX (about 7 times float32 speed with AMX); one without them
    emulates bfloat16, ten to twenty-five times slower than float32.
    """
    if torch.device(device).type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


def dtype_of(precision: Precision) -> torch.dtype:
    """Return torch's name for a precision.

    >>> dtype_of("bf16")
    torch.bfloat16
    """
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


class Masters:
    """The float32 parameters that an optimizer changes, one for each trainable parameter of a module.

    A float32 parameter is its own master: nothing is copied. One in lower precision gets a float32 twin, and its
    gradient is added to the twin's as soon as a backward pass has it, then freed: gradients too are summed over
    micro-batches in float32.

    The module's tensors are only ever written in place, because engines hold them too.

    Where parameters are sharded, so are masters: each is the local shard, the same memory.

    Args:
        named: Name and parameter, each parameter once, sharded already.
        mesh: The mesh that shards them.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], mesh: Mesh | None = None) -> None:
        self.mesh: Mesh = SingleProcess() if mesh is None else mesh
        self.module_parameters: dict[str, nn.Parameter] = dict(named)
        self.parameters: dict[str, nn.Parameter] = {}
        self._twins: list[str] = []
        for name, parameter in self.module_parameters.items():
            # On one process this is the parameter itself; on a mesh, a plain tensor that shares the shard's memory.
            own = self.mesh.local(parameter)
            master = parameter if own is parameter else nn.Parameter(own)
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float())
                # The low-precision gradient is added to the float32 sum as soon as it exists and is then freed:
                # gradients of all parameters never exist at once in both formats.
                parameter.register_post_accumulate_grad_hook(_folding_into(add_up(parameter, master)))
                self._twins.append(name)
            # A float32 parameter accumulates its own gradient; `add_up` only lets fused kernels add to it in place.
            elif own is parameter:
                add_up(parameter, parameter)
            self.parameters[name] = master

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names, and shapes of the full parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self.module_parameters.items()}

    def round_into_module(self) -> None:
        """Write every master, rounded to nearest, into the module's own parameter."""
        with torch.no_grad():
            for name in self._twins:
                # In place: engines and captured graphs hold these very tensors.
                self.module_parameters[name].copy_(self.parameters[name])

    def collect(self) -> None:
        """Sum the gradients over all processes' rows into the masters; once a step, after the last backward pass."""
        for name, master in self.parameters.items():
            master.grad = self.mesh.gradient(self._source(name))

    def norm(self) -> Tensor:
        """Return the norm of the full gradient, of which other processes may hold shards."""
        named = self.parameters.items()
        return self.mesh.norm([(self._source(name), m.grad) for name, m in named if m.grad is not None])

    def drop_gradients(self) -> None:
        """Forget every gradient, those of an interrupted backward pass included."""
        for name, master in self.parameters.items():
            master.grad = None
            self.module_parameters[name].grad = None

    def full(self, name: str, own: Tensor) -> Tensor:
        """Return a full copy, on the CPU of rank 0, of a tensor that is sharded as the parameter ``name`` is."""
        return self.mesh.full(self.module_parameters[name], own)

    def shard_of(self, name: str, full: Tensor) -> Tensor:
        """Return this process's shard of a full tensor that is sharded as the parameter ``name`` is."""
        return self.mesh.shard_of(self.module_parameters[name], full)

    def loan(self, name: str, own: Tensor) -> Loan | None:
        """Return the local shard of a tensor that is sharded as the parameter ``name``: lent, or copied.

        It is lent where it is contiguous on the CPU, as a file needs it. None where another process saves it.
        """
        start, is_ready = self.mesh.first_row(self.module_parameters[name]), own.is_cpu and own.is_contiguous()
        if start is None:
            return None
        held = own.detach() if is_ready else own.detach().cpu().contiguous()
        return Loan(held, None if self.mesh.is_whole else start, is_copy=not is_ready)

    def _source(self, name: str) -> nn.Parameter:
        """Return where backward passes leave a gradient."""
        return self.parameters[name] if name in self._twins else self.module_parameters[name]


def _folding_into(total: GradientSum) -> Callable[[Tensor], None]:
    def fold(parameter: Tensor) -> None:
        # None where the backward pass already added the gradient to the sum.
        if parameter.grad is not None:
            total.add(parameter.grad)
            parameter.grad = None

    return fold
