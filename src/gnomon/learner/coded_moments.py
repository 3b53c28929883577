"""AdamW whose moments take 8 bits each: blocks of 256 with one scale, powers of 2^(1/8) below it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 256
_LEVELS = 8
"""Levels to a factor of two."""
MOMENT_BYTES = 1 + 4 / _BLOCK


class CodedMoment:
    """A moment of Adam's in 8 bits a number, in the place of a tensor.

    A block of 256 numbers has a scale, its largest magnitude s; code 0 is zero, code k the magnitude s 2^((1 - k) / 8),
    with a sign for the first moment: 127 levels there and 255 without, so that the smallest are 2^-15.75 and 2^-31.75
    of s. What is decoded is coded to the same bits again.

    Why levels and not equal steps: a second moment that is rounded to zero makes an update of m / epsilon. Source:
    blocks are Dettmers et al. 2021, arXiv 2110.02861, section 2; the levels, and the rounding that follows, are ours.
    """

    def __init__(self, like: Tensor, is_signed: bool) -> None:
        self._shape, self._most = like.shape, 127 if is_signed else 255
        blocks = -(-like.numel() // _BLOCK)
        kind = torch.int8 if is_signed else torch.uint8
        self.codes = torch.zeros(blocks, _BLOCK, dtype=kind, device=like.device)
        self.scales = torch.zeros(blocks, 1, device=like.device)

    def decoded(self) -> Tensor:
        """Return the moment, Float32."""
        codes = self.codes.float()
        found = torch.exp2((1 - codes.abs()) / _LEVELS).mul_(codes.sign()).mul_(self.scales)
        return found.view(-1)[: math.prod(self._shape)].view(self._shape)

    def zero_(self) -> None:
        """Become zero."""
        self.codes.zero_()
        self.scales.zero_()

    def copy_(self, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Become ``values``, each rounded to the nearest level; with a generator up or down at random.

        At random the mean is the value itself, to float32. Otherwise beta2 = 0.999 would move nothing: a step changes a
        second moment by a thousandth, and levels are a twelfth apart.
        """
        blocks = functional.pad(values.detach().float().reshape(-1), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
        self.scales.copy_(blocks.abs().amax(1, keepdim=True))
        level = torch.log2(blocks.abs() / self.scales.clamp_min(torch.finfo(torch.float32).tiny)).mul_(-_LEVELS)
        if generator is None:
            level.round_()
        else:
            whole, least = level.floor(), 2 ** (-1 / _LEVELS)
            above = torch.exp2((whole - level) / _LEVELS).sub_(least).div_(1 - least)
            level = whole.add_(torch.rand(level.shape, generator=generator).to(level.device) >= above)
        codes = level.add_(1).nan_to_num_(posinf=0.0)
        # Too small for the lowest level: zero for the first moment, the lowest for the second, which must not vanish.
        codes = codes.masked_fill_(codes > self._most, 0) if self._most == 127 else codes.clamp_(max=self._most)
        self.codes.copy_(codes.mul_(blocks.sign()))


class CodedAdamW:
    """AdamW (arXiv 1711.05101, algorithm 2) on coded moments; what `Optimizer` uses of torch's.

    One parameter's moments at a time are float32. The rounding is drawn from the number of the parameter's step, so
    that a resumed run draws the same.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self._betas, self._epsilon = betas, eps
        self.state = dict[Tensor, dict[str, Any]]()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        first, second = self._betas
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = self.state[parameter]
                own["step"] += 1
                count = float(own["step"])
                generator = torch.Generator().manual_seed(int(count))
                mean = own["exp_avg"].decoded().lerp_(parameter.grad, 1 - first)
                square = (
                    own["exp_avg_sq"].decoded().mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                )
                own["exp_avg"].copy_(mean, generator)
                own["exp_avg_sq"].copy_(square, generator)
                root = square.div_(1 - second**count).sqrt_().add_(self._epsilon)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(mean, root, value=-group["lr"] / (1 - first**count))
