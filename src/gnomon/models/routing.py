"""Record and replay the experts that a mixture model's routers choose.

After an update about a tenth of a large mixture's experts differ for the same token, and the ratio of two policies is
then mostly noise of the router. Routing replay fixes the *choice*: R2 repeats the learner's choice when the step began
(GSPO, arXiv 2507.18071, section 5.3), R3 the engine's choice (arXiv 2510.11370). Only the indices are repeated. The
gates come from the current router's logits, so the router still has a gradient.

Routers of transformers treat their logits differently (softmax before or after, sigmoid, a bias for the choice alone,
groups, a scale), but all choose by one `topk` over the experts. Replay replaces that call while a router runs, and the
router's own formula computes the gates of the repeated indices.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Mean

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Routing:
    """The request to record a pass's free expert choices, and the experts that the pass must use.

    Attributes:
        experts: Int[B S L K], used where >= 0. Routers choose freely at -1, and everywhere if None.
    """

    experts: Tensor | None = None

    def of(self, row: int, length: int) -> "Routing":
        """Return the routing of the first ``length`` positions of one row."""
        return Routing(None if self.experts is None else self.experts[row : row + 1, :length])

    def of_rows(self, rows: Tensor, length: int) -> "Routing":
        """Return the routing of the first ``length`` positions of several rows."""
        return Routing(None if self.experts is None else self.experts[rows.to(self.experts.device), :length])


class Recorder:
    """The free choices of one forward pass's routers, whether other experts were replayed or not.

    A layer's free choice depends on hidden states that earlier layers' replayed experts produced.
    """

    def __init__(self, routers: Sequence["_Routed"]) -> None:
        self._routers = routers

    def experts(self, *shape: int) -> Tensor | None:
        """Return Int16[*shape L K] with the input ids' ``shape``; None for a dense model."""
        if not self._routers:
            return None
        # (positions, layers, K)
        chosen = torch.stack([router.chosen for router in self._routers], 1).to(torch.int16)
        return chosen.view(*shape, *chosen.shape[1:])


def moe_layers(model: nn.Module) -> int:
    """Return the number of mixture layers; 0 for a dense model.

    Raises:
        ConfigError: If the config names experts but no router has a known form.
    """
    return len(_routers(model))


def expert_count(model: Any) -> int:
    """Return the config's number of experts per layer; 0 if it names none."""
    config = model.config.get_text_config()
    counts = [count for name in _EXPERT_COUNTS if isinstance(count := getattr(config, name, None), int)]
    return max(counts, default=0)


def can_record(model: nn.Module) -> bool:
    """Return whether the model is a mixture of experts with routers of the known form."""
    return any(_is_router(module) for module in model.modules())


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record the experts of the block's last forward pass; routers choose freely. No-op if dense.

    Raises:
        ConfigError: As `moe_layers` does.
    """
    with _substitute(model, None) as recorder:
        yield recorder


@contextmanager
def replaying(model: nn.Module, experts: Tensor) -> Iterator[Recorder]:
    """Make routers use ``experts`` Int[... L K] where they are not -1, one entry per position of the input ids.

    The gates come from the current logits. `contexts.recomputing` repeats the same in the backward pass.

    Raises:
        ConfigError: As `moe_layers` does, or if L or the number of positions is wrong.
    """
    with _substitute(model, experts) as recorder:
        yield recorder


def routed(model: nn.Module, routing: Routing | None) -> AbstractContextManager[Recorder | None]:
    """Return the context manager for one pass with this routing; None leaves routers alone."""
    if routing is None:
        return nullcontext()
    return recording(model) if routing.experts is None else replaying(model, routing.experts)


class Resumed:
    """The current routing of ``module``'s routers, which can be entered again later.

    A layer that is computed again in the backward pass is outside the block of `replaying` by then.
    """

    def __init__(self, module: nn.Module) -> None:
        states = [(part, vars(part).get("forward")) for part in module.modules() if _is_router(part)]
        self._routed = [(part, forward) for part, forward in states if isinstance(forward, _Routed)]
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        # A stack, so that the same routing can be entered again within itself.
        self._outer.append([vars(router).get("forward") for router, _ in self._routed])
        for router, forward in self._routed:
            router.forward = forward.again()

    def __exit__(self, *failure: Any) -> None:
        for (router, _), outer in zip(self._routed, self._outer.pop(), strict=True):
            _set_forward(router, outer)


def changed_fraction(chosen: Tensor, recorded: Tensor, prompt_lengths: Tensor, mask: Tensor) -> Mean:
    """Return the share of (trained token, layer) pairs whose set of experts has changed.

    Args:
        chosen: Int[B S L K], the current choice. The order of the K does not count; pairs with -1 are left out.
        recorded: Int[B S L K], the recorded choice.
        prompt_lengths: Int[B].
        mask: Bool[B T]; the token at column t is predicted, and routed, at prompt_length + t - 1.
    """
    rows, columns = mask.nonzero(as_tuple=True)
    where = (rows, prompt_lengths[rows] + columns - 1)
    now, then = (experts[where].sort(-1).values for experts in (chosen, recorded))
    is_known = (now >= 0).all(-1) & (then >= 0).all(-1)
    return Mean(int(((now != then).any(-1) & is_known).sum()), int(is_known.sum()))


def pad_experts(experts: Mapping[int, Tensor | None], rows: int, width: int) -> Tensor | None:
    """Return rows' experts Int[n L K], each by its row, as Int16[rows width L K] with -1 elsewhere; None of nothing."""
    known = {row: own for row, own in experts.items() if own is not None}
    if not known:
        return None
    first = next(iter(known.values()))
    padded = first.new_full((rows, width, *first.shape[1:]), -1, dtype=torch.int16)
    for row, own in known.items():
        padded[row, : own.shape[0]] = own
    return padded


class _Routed:
    """Replaces a router's ``forward``. ``given``: Int[N K], one row per position, or None."""

    def __init__(self, router: nn.Module, given: Tensor | None) -> None:
        self._router: Any = router
        self._forward = type(router).forward
        self._given = given
        self.chosen: Tensor

    def __call__(self, *inputs: Any, **settings: Any) -> Any:
        choice = _Choice(self._router.num_experts, self._router.top_k, self._given)
        with choice:
            output = self._forward(self._router, *inputs, **settings)
        if len(choice.made) != 1:
            raise ConfigError(_unknown_form(type(self._router).__name__, f"it called it {len(choice.made)} times"))
        self.chosen = choice.made[0]
        return output

    def again(self) -> "_Routed":
        """Return a copy with the same routing that does not overwrite the recorded choice."""
        return _Routed(self._router, self._given)


class _Choice(TorchFunctionMode):
    """Replaces the `topk` of [N, experts] by which a router chooses. ``made`` collects the free choices Int[N K]."""

    def __init__(self, experts: int, count: int, given: Tensor | None) -> None:
        super().__init__()
        self._shape = (experts, count)
        self._given = given
        self.made: list[Tensor] = []

    def __torch_function__(self, function: Any, _: Any, inputs: Any = (), settings: Any = None) -> Any:
        result = function(*inputs, **(settings or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores, free = inputs[0], result.indices
        if scores.ndim != 2 or (scores.shape[-1], free.shape[-1]) != self._shape:
            return result
        # The free choice is recorded also where another one is replayed: comparing both says how far the router has
        # moved.
        self.made.append(free)
        if self._given is None:
            return result
        if self._given.shape != free.shape:
            raise ConfigError(
                f"a routing of {tuple(self._given.shape)} (positions, experts each) cannot be replayed on "
                f"{tuple(free.shape)}: it was recorded on other rows or on another model"
            )
        given = self._given.to(free.device, free.dtype)
        indices = torch.where((given >= 0).all(-1, keepdim=True), given, free)
        # Scores of the replayed experts from the current router: the gates, and so the router, keep their gradient.
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@contextmanager
def _substitute(model: nn.Module, experts: Tensor | None) -> Iterator[Recorder]:
    routers = _routers(model)
    if experts is not None and routers and experts.shape[-2] != len(routers):
        raise ConfigError(
            f"a routing of {experts.shape[-2]} mixture layers cannot be replayed on a model of {len(routers)}"
        )
    # (positions, L, K) by layer: Int[positions K] for each router, in the order of the modules.
    given = [None] * len(routers) if experts is None or not routers else experts.flatten(0, -3).unbind(1)
    routed = [_Routed(router, own) for router, own in zip(routers, given, strict=True)]
    with ExitStack() as stack:
        for router, forward in zip(routers, routed, strict=True):
            stack.callback(_set_forward, router, vars(router).get("forward"))
            _set_forward(router, forward)
        yield Recorder(routed)


def _routers(model: Any) -> list[nn.Module]:
    found = [module for module in model.modules() if _is_router(module)]
    # A router of another form would be left alone, and replay would do nothing without a word.
    if not found and expert_count(model) > 1:
        raise ConfigError(_unknown_form(type(model).__name__, "no such router was found in it"))
    return found


def _is_router(module: nn.Module) -> bool:
    """Whether a module has one weight row per expert, and states the numbers of experts and of chosen experts."""
    stated = vars(module)
    experts, weight = stated.get("num_experts"), stated["_parameters"].get("weight")
    return isinstance(stated.get("top_k"), int) and weight is not None and weight.shape[0] == experts


def _unknown_form(name: str, found: str) -> str:
    return (
        f"routing can be recorded and replayed where a router chooses its experts by one call of topk; {name} does "
        f'not: {found}. Set algorithm.routing = "free"'
    )


def _set_forward(router: nn.Module, forward: Any) -> None:
    """Set a router's own ``forward``, or restore its class's with None."""
    if forward is None:
        vars(router).pop("forward", None)
        return
    router.forward = forward
