"""AdamW on float32 masters, clipping by global norm, and learning-rate schedules."""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gnomon.core.errors import CheckpointError, NotFiniteError
from gnomon.core.failpoints import failpoint
from gnomon.core.tensor_files import extremes
from gnomon.core.types import Loan, State
from gnomon.learner.mesh import Mesh, agree
from gnomon.learner.precision import Masters
from gnomon.learner.sections import OptimizerConfig

# AdamW whose moments take 8 bits each: blocks of 256 with one scale, powers of 2^(1/8) below it.

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
        # (blocks, 256), the last one filled up with zeros, which change no block's largest magnitude.
        blocks = functional.pad(values.detach().float().reshape(-1), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
        self.scales.copy_(blocks.abs().amax(1, keepdim=True))
        # Level 0 is the scale itself, level n is n / 8 factors of two below it; a zero becomes infinity, coded as 0
        # below.
        level = torch.log2(blocks.abs() / self.scales.clamp_min(torch.finfo(torch.float32).tiny)).mul_(-_LEVELS)
        if generator is None:
            level.round_()
        else:
            # Levels are not equally spaced, so the probability of rounding up is linear in the values between two
            # levels, not in the levels: only then is the mean the value itself.
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
                # One float32 parameter's moments exist at a time; both roundings below draw from this step's
                # generator, in this order.
                count = float(own["step"])
                generator = torch.Generator().manual_seed(int(count))
                mean = own["exp_avg"].decoded().lerp_(parameter.grad, 1 - first)
                square = (
                    own["exp_avg_sq"].decoded().mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                )
                own["exp_avg"].copy_(mean, generator)
                own["exp_avg_sq"].copy_(square, generator)
                root = square.div_(1 - second**count).sqrt_().add_(self._epsilon)
                # Decoupled decay comes before the update and does not enter the moments (AdamW, algorithm 2).
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(mean, root, value=-group["lr"] / (1 - first**count))


def sound(name: str, saved: Tensor, least: float = -math.inf) -> Tensor:
    """Return a tensor of a saved state, with floats from ``least`` up.

    Raises:
        CheckpointError: It has a number below that, or one that is not finite.
    """
    low, high = extremes(saved)
    if not (saved.is_floating_point() and least <= low and math.isfinite(low) and math.isfinite(high)):
        said = f"{saved.dtype} from {low} to {high}"
        raise CheckpointError(f"{name} in the saved state is {said}, and no run makes such numbers")
    return saved


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over the float32 masters of a module's trainable parameters. An optimizer is `Stateful`.

    Backward passes add to the gradients; `step` uses them up.

    Attributes:
        begun: Steps that have begun to change weights.

    Args:
        named: Name and parameter, each parameter once; the names are those of the state.
        mesh: Holds them; its processes make each step together.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], plan: OptimizerConfig, mesh: Mesh | None = None
    ) -> None:
        self.plan = plan
        self.masters = Masters(named, mesh)
        parameters = self.masters.parameters.values()
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": plan.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._is_coded = plan.moments == "8bit"
        # Fused: one pass over weights, gradients and moments instead of one for each operation.
        make: Any = CodedAdamW if self._is_coded else partial(torch.optim.AdamW, fused=True)
        self._adam = make(groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.epsilon)
        self._loans: list[Loan] = []
        self.begun = 0
        # Twice the weights: made by Adam in its first step, in the middle of the heap, they would part what is free.
        for parameter in parameters:
            self._adam.state[parameter] = _moments(parameter, self._is_coded)

    def step(self, learning_rate: float) -> float:
        """Clip, update masters and module, and return the gradient's norm before clipping.

        Raises:
            NotFiniteError: The gradient is not finite; nothing was changed then but the gradients, which are gone.
        """
        # The order matters: gradients are summed over processes, then measured, and only a finite norm may change a
        # weight.
        self.masters.collect()
        norm = self.masters.norm()
        if not bool(norm.isfinite()):
            self.masters.drop_gradients()
            raise NotFiniteError(
                f"the gradient is not finite (norm {float(norm)}); no weight was changed. Lower the learning "
                "rate, or look at this step's rollouts for a reward or log-probability that is out of range"
            )
        if float(norm) > self.plan.max_gradient_norm:
            parameters = self.masters.parameters.values()
            torch.nn.utils.clip_grads_with_norm_(parameters, self.plan.max_gradient_norm, norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        # A checkpoint's writer may still be reading lent moments: it gets its copy before Adam changes them.
        self._recall()
        self.begun += 1
        self._adam.step()
        failpoint("optimizer")
        self.masters.drop_gradients()
        self.masters.round_into_module()
        return float(norm)

    def check_finite(self) -> None:
        """Raise NotFiniteError naming a weight that is not finite, in every process."""
        fault = ""
        for name, master in self.masters.parameters.items():
            low, high = extremes(master)
            if not fault and not (math.isfinite(low) and math.isfinite(high)):
                fault = (
                    f"the weight {name} is not finite ({low} to {high}), so these weights are not "
                    "published; resume from the newest checkpoint with a lower learning rate"
                )
        agree(self.masters.mesh, fault)

    def drop_gradients(self) -> None:
        """Forget what backward passes have added."""
        self.masters.drop_gradients()

    def state(self) -> State:
        """Return copies of masters and moments, on the CPU, and how many steps each parameter has made; in rank 0.

        Tensors: ``master/NAME``, and once a parameter has been updated ``moment1/NAME`` and ``moment2/NAME``.
        ``steps`` Float[P], in the order of the names.
        """
        return State(
            {f"{kind}/{name}": self.masters.full(name, own) for kind, name, own in self._held()}
            | {"steps": self._steps()}
        )

    def lend(self) -> State:
        """Return what this process holds of `state`, lent where it can be; ``steps`` in rank 0."""
        held = {f"{kind}/{name}": self.masters.loan(name, own) for kind, name, own in self._held()}
        lent = {name: loan for name, loan in held.items() if loan is not None}
        self._loans += lent.values()
        return State({"steps": self._steps()} if self.masters.mesh.rank == 0 else {}, lent=lent)

    def restore(self, state: State) -> None:
        """Become the optimizer that returned ``state``; the module's parameters are rounded anew.

        Raises:
            CheckpointError: It is of other parameters, and nothing was changed; or has numbers that no run makes.
        """
        self.check(state)
        self._recall()
        self.masters.drop_gradients()
        with torch.no_grad():
            for (name, master), steps in zip(self.masters.parameters.items(), state.tensors["steps"][...], strict=True):
                master.copy_(sound(f"master/{name}", self.masters.shard_of(name, state.tensors[f"master/{name}"])))
                moments = self._adam.state[master]
                moments["step"].copy_(sound(f"steps of {name}", steps, 0.0))
                for key, moment, least in (("exp_avg", "moment1", -math.inf), ("exp_avg_sq", "moment2", 0.0)):
                    saved = f"{moment}/{name}"
                    # A parameter without a gradient so far has moments of zero, which a state does not hold.
                    if not steps:
                        moments[key].zero_()
                    elif saved not in state.tensors:
                        raise CheckpointError(
                            f"{saved} is not in the saved state, and {float(steps):g} steps were made"
                        )
                    else:
                        moments[key].copy_(sound(saved, self.masters.shard_of(name, state.tensors[saved]), least))
        self.masters.round_into_module()

    def changing(self) -> list[Tensor]:
        """Return all that a step changes of what this process holds: masters, moments and counts of steps."""
        masters = self.masters.parameters.values()
        held = [part for master in masters for part in (master.detach(), *self._adam.state[master].values())]
        return [t for part in held for t in ([part] if isinstance(part, Tensor) else [part.codes, part.scales])]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Write copies of `changing` back, bit for bit; the module's parameters are rounded anew."""
        self._recall()
        self.masters.drop_gradients()
        for own, kept in zip(self.changing(), copies, strict=True):
            own.copy_(kept)
        self.masters.round_into_module()

    def check(self, state: State) -> None:
        """Raise CheckpointError when ``state`` is of other parameters."""
        mine = {f"master/{name}": shape for name, shape in self.masters.shapes.items()}
        theirs = {k: tuple(t.shape) for k, t in state.tensors.items() if k.startswith("master/")}
        if mine != theirs:
            # Pairs of name and shape, so that a tensor that is missing and one of another shape are both found.
            unlike = sorted(set(mine.items()) ^ set(theirs.items()))
            raise CheckpointError(
                "the saved optimizer belongs to another model or another set of trained parameters; the first "
                f"of {len(unlike)} differences: {unlike[0][0].removeprefix('master/')} {unlike[0][1]}"
            )
        asked = {
            f"{kind}/{n.partition('/')[2]}": s for n, s in mine.items() for kind in ("master", "moment1", "moment2")
        }
        asked["steps"] = (len(mine),)
        wrong = [
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}"
            for name, tensor in state.tensors.items()
            if name in asked and not (tensor.is_floating_point() and tuple(tensor.shape) == asked[name])
        ]
        if wrong or "steps" not in state.tensors:
            raise CheckpointError(f"the saved optimizer is not what one writes: {', '.join(wrong[:3]) or 'no steps'}")

    def _held(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield masters and moments: which, of which parameter, and what of it is here."""
        for name, master in self.masters.parameters.items():
            yield "master", name, master
            moments = self._adam.state[master]
            if float(moments["step"]) > 0:
                for kind, key in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq")):
                    yield kind, name, moments[key].decoded() if self._is_coded else moments[key]

    def _steps(self) -> Tensor:
        steps = [float(self._adam.state[master]["step"]) for master in self.masters.parameters.values()]
        return torch.tensor(steps, dtype=torch.float32)

    def _recall(self) -> None:
        """Recall all lent tensors before they change."""
        # One by one: where memory ends in the middle, the others are still to be recalled when the step is made again.
        while self._loans:
            self._loans[-1].recall()
            self._loans.pop()


def _moments(parameter: Tensor, is_coded: bool) -> dict[str, Any]:
    """Return what Adam keeps of a parameter, before its first step."""
    first, second = (CodedMoment(parameter, sign) if is_coded else _zeros_like(parameter) for sign in (True, False))
    return dict(zip(_MOMENTS, (torch.zeros((), device=parameter.device), first, second), strict=True))


def _zeros_like(parameter: Tensor) -> Tensor:
    """Return zeros. On a CPU they are pages of their own, which the system makes when they are first written to.

    Writing a gigabyte of zeros takes half a second of a run's start.
    """
    if parameter.device.type != "cpu" or not parameter.is_contiguous() or not parameter.numel():
        return torch.zeros_like(parameter)
    # The tensor keeps the mapping alive, and the mapping is zero by the system's promise.
    pages = mmap.mmap(-1, parameter.nbytes)
    return torch.frombuffer(pages, dtype=parameter.dtype).view(parameter.shape)
