"""In which precision the model computes, and float32 masters for the parameters that are kept in less.

bfloat16 has 8 bits of precision: a weight of 1 does not change when less than 1/256 is added to it. A step of
reinforcement learning adds about 1e-6 to 1e-5, so almost every update would round away. The sums therefore
live in float32 (the *masters*), and the module holds their roundings.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

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
    """Return torch's name for it.

    >>> dtype_of("bf16")
    torch.bfloat16
    """
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


class Masters:
    """The float32 parameters that an optimizer changes, one for each trainable parameter of a module.

    A float32 parameter is its own master: nothing is copied. One in lower precision gets a float32 twin,
    and its gradient is added to the twin's as soon as a backward pass has it, then freed: gradients too are
    summed over micro-batches in float32.

    The module's tensors are only ever written in place, because engines hold them too.

    named: name and parameter, each parameter once.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.module_parameters: dict[str, nn.Parameter] = dict(named)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.module_parameters.items():
            master = parameter
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(_folding_into(master))
            self.parameters[name] = master

    def round_into_module(self) -> None:
        """Write every master, rounded to nearest, into the module's own parameter."""
        with torch.no_grad():
            for name, master in self.parameters.items():
                parameter = self.module_parameters[name]
                if parameter is not master:
                    parameter.copy_(master)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that exist."""
        return [master.grad for master in self.parameters.values() if master.grad is not None]

    def drop_gradients(self) -> None:
        """Forget every gradient, those of an interrupted backward pass included."""
        for name, master in self.parameters.items():
            master.grad = None
            self.module_parameters[name].grad = None


def _folding_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def fold(parameter: Tensor) -> None:
        assert parameter.grad is not None, "torch calls this hook right after it set the gradient"
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return fold
