"""Every piece of a user's own is tried on a made batch before a model loads.

What a trial asks of a piece is what the laws (docs/laws.md) ask of gnomon's own on any batch: one number a token, of a
floating type, finite, the same twice, with a gradient where it is a loss; what is padded and how a batch is cut do not
matter; and the batch is left as it was.
"""

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.piece_calls import FORMS, article, cause_of, is_own, said_of, tensors_of
from gnomon.algorithms.pieces import SLOTS, members
from gnomon.algorithms.protocols import Composed, LossInputs, Need, parts_of
from gnomon.algorithms.ratios import Statistics, masked
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import EffectiveSize, Last, Max, Mean, Metrics, Sum
from gnomon.core.types import TOKEN_FIELDS, Batch
from gnomon.core.user_code import Misbehaved, running_user_code

_WHOLE_NUMBERS = ("turn", "state", "rollout_id")
_PER_TOKEN_MADE = tuple(name for name in TOKEN_FIELDS if name not in ("mask", "top_tokens", "top_logprobs"))
_PER_ROW = ("baseline", "bootstrap", "component_rewards", "rollout_id")


def make_batch(
    rewards: Sequence[float | None],
    mask: Sequence[Sequence[int | bool]],
    group: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Batch:
    """Return a valid batch from lists; each prompt is one token.

    Args:
        rewards: One number for each row; None is a response that could not be graded, and its mask becomes false.
        mask: One list for each row; shorter rows are padded.
        group: All rows are one group when it is left out.
        more: ``behavior`` (-1 when left out), ``full_behavior`` (``behavior``) and the other fields of each token as
            lists of rows; baseline, bootstrap, version, is_truncated, rollout_id and component_rewards as lists; any
            other field as it is.

    >>> batch = make_batch([1.0, None], [[1, 1], [1]])
    >>> batch.mask.tolist(), batch.is_graded.tolist()
    ([[True, True], [False, False]], [True, False])
    """
    rows, width = len(rewards), max((len(row) for row in mask), default=0)
    # A row without a grade keeps its tokens, and trains none of them.
    graded = torch.tensor([r is not None for r in rewards], dtype=torch.bool)
    lengths = 1 + torch.tensor([len(row) for row in mask], dtype=torch.long)
    types = dict.fromkeys(_WHOLE_NUMBERS, torch.long)
    per_token = {n: _padded(more.pop(n), width, types.get(n, dtype)) for n in _PER_TOKEN_MADE if n in more}
    behavior = per_token.pop("behavior", torch.full((rows, width), -1.0, dtype=dtype))
    per_row = {n: torch.tensor(more.pop(n), dtype=types.get(n, dtype)) for n in _PER_ROW if n in more}
    batch = Batch(
        tokens=torch.zeros((rows, 1 + width), dtype=torch.long),
        prompt_lengths=torch.ones(rows, dtype=torch.long),
        lengths=lengths,
        mask=_padded(mask, width, torch.bool) & graded[:, None],
        rewards=torch.tensor([r or 0.0 for r in rewards], dtype=dtype),
        is_graded=graded,
        is_truncated=torch.tensor(more.pop("is_truncated", [False] * rows), dtype=torch.bool),
        group=torch.tensor([0] * rows if group is None else group, dtype=torch.long),
        version=torch.tensor(more.pop("version", [0] * rows), dtype=torch.long),
        behavior=behavior,
        full_behavior=per_token.pop("full_behavior", behavior),
    )
    return batch.with_fields(**per_token, **per_row, **more)


def loss_and_gradient(
    algorithm: Algorithm, minibatch: Batch, current: Tensor, cuts: Iterable[Sequence[int]] | None = None
) -> tuple[float, Tensor]:
    """Return the loss of one optimizer step and d loss / d current Float[B T], summed over ``cuts`` of its rows.

    Args:
        minibatch: A prepared minibatch without weights. The entropy that pieces see is -current / 2, and the KL over
            whole distributions, where the algorithm reads one, -current / 3, so that their gradients count too.
    """
    weighed = algorithm.weigh(minibatch)
    # Of the whole step, before any cut, as the learner computes them.
    statistics = algorithm.statistics(current, weighed, -current / 2)
    total, gradient = 0.0, torch.zeros_like(current)
    for rows in [range(len(weighed))] if cuts is None else cuts:
        where = torch.tensor(list(rows), dtype=torch.long)
        # A leaf of its own for each cut: gradients of cuts are summed by hand.
        leaf = current.detach()[where].requires_grad_()
        loss = algorithm.loss(leaf, -leaf / 2, weighed.rows(where), statistics, -leaf / 3)
        (slope,) = torch.autograd.grad(loss.total, leaf)
        total += float(loss.total.detach())
        gradient[where] = slope
    return total, gradient


def _padded(rows: Sequence[Sequence[Any]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype).reshape(len(rows), width)


NEEDS = frozenset(get_args(Need))
_FLOATS = (torch.float32, torch.float64)
# Relative; float32 sums in another order differ by about 1e-6.
_TOLERANCE = 1e-4
# Cuts of the trial's eight rows, of unequal sizes and across both groups.
_CUTS = ([0, 3], [1], [2, 4, 5, 6], [7])
_JUNK = -3.5
_PER_TOKEN = ("behavior", "full_behavior", "proximal", "sharpened", "reference", "values")


def try_pieces(algorithm: Algorithm, every: bool = False) -> None:
    """Try the pieces of an algorithm that are not gnomon's on a made batch.

    Args:
        every: Whether gnomon's own pieces are tried as well. A trial takes about ten milliseconds.

    Raises:
        ConfigError: The message names the piece, what it returned and the protocol's line.
    """
    found = [_Trial(algorithm, *place) for place in _pieces(algorithm, "algorithm") if every or is_own(place[2])]
    # Advantages first, in the order of `_TRIALS`: the losses are tried on what they return.
    with _own_draws():
        for trial in sorted(found, key=lambda trial: list(_TRIALS).index(trial.slot)):
            _TRIALS[trial.slot](trial)


def _pieces(container: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, protocol and piece of everything below ``container`` that stands where a protocol is asked for."""
    from typing import get_type_hints

    try:
        hints = get_type_hints(type(container))
    except Exception:  # annotations of a user's class that cannot be resolved name no piece of gnomon's
        return
    for part in fields(container):
        value, wanted = getattr(container, part.name), members(hints.get(part.name))
        wanted = wanted if wanted.sequence is None else members(wanted.sequence)
        slot = next((kind.__name__ for kind in wanted if kind in SLOTS), None)
        listed = list(enumerate(value)) if isinstance(value, tuple) else [("", value)]
        for number, piece in listed:
            place = f"{path}.{part.name}{f'.{number}' if number != '' else ''}"
            if slot is not None and piece is not None:
                yield place, slot, piece
            if is_dataclass(piece) and not isinstance(piece, type):
                yield from _pieces(piece, place)


@dataclass(frozen=True)
class _Trial:
    """One piece, where it stands, and what can be found wrong with it."""

    algorithm: Algorithm
    path: str
    slot: str
    piece: Any
    draws: list[bool] = field(default_factory=list)
    """Whether it drew random numbers, call by call: what it returns for other rows cannot be compared then."""

    def fail(self, wrong: str, instead: str = "") -> NoReturn:
        """Refuse the piece."""
        form = f"{article(self.slot)} is `{FORMS[self.slot].line}`"
        raise ConfigError(f"{self.path} {said_of(self.piece)} {wrong}; {form}{f'; {instead}' if instead else ''}")

    def call(self, function: Callable[..., Any], *given: Any, prefix: str = "") -> Any:
        """Return what the piece returns; twice the same, and what it was given is left alone."""
        tensors = list(tensors_of(given))
        kept = [tensor.detach().clone() for _, tensor in tensors]
        try:
            # Twice with the same seeds: a piece that keeps state between calls differs.
            first, second = self._drawn(function, given), self._drawn(function, given)
        except Misbehaved as error:
            self.fail(prefix + str(error).removeprefix("a call "))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.fail(f"{prefix}raised {cause_of(error)}", _hint(error))
        for _, found in tensors_of((first, second)):
            if found.layout != torch.strided or found.device.type != "cpu":
                kind = str(found.layout).removeprefix("torch.")
                self.fail(f"{prefix}returned a {kind} tensor on {found.device}", "return a dense one, on its input's")
        # Compared by value, as a change through NumPy's view raises no version.
        for (name, tensor), before in zip(tensors, kept, strict=True):
            if not _same(tensor.detach(), before, 0.0):
                self.fail(f"{prefix}changed {name} in place", "work on a copy: name.clone(), x + y, not x += y")
        pairs = zip(tensors_of((first,)), tensors_of((second,)), strict=False)
        if not all(_same(one.detach(), other.detach(), _TOLERANCE) for (_, one), (_, other) in pairs):
            self.fail(
                f"{prefix}returned something else when it was called again with the same", "keep and draw nothing"
            )
        return first

    def _drawn(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Call it where all generators begin with one seed, and note whether it drew from any."""
        before = _seeded()
        with running_user_code("a call", may_fork=False):
            found = function(*given)
        self.draws.append(_states() != before)
        return found

    def checked(self, found: Any, shape: torch.Size, prefix: str = "", exact: bool = True) -> Tensor:
        """Return a tensor of one finite number a token.

        Args:
            exact: Only a floating type will do.
        """
        if not isinstance(found, Tensor):
            self.fail(f"{prefix}returned {type(found).__name__}, expected a tensor of shape {list(shape)}")
        if found.shape != shape:
            per = "one number a response" if len(shape) == 1 else "one number a token, nothing summed or averaged"
            self.fail(f"{prefix}returned shape {tuple(found.shape)} for {list(shape)}", f"return {per}")
        if exact and found.dtype not in _FLOATS:
            kind = str(found.dtype).removeprefix("torch.")
            self.fail(f"{prefix}returned {kind} for float32", "return the type that it was given")
        return found

    def finite(self, found: Tensor, mask: Tensor, what: str) -> None:
        """Refuse NaN and infinity at trained tokens."""
        bad = ~torch.isfinite(found.detach()) & mask
        if bool(bad.any()):
            row, token = (int(number) for number in bad.nonzero()[0][:2])
            value = float(found.detach()[row, token])
            self.fail(f"{what} {value:g} at row {row}, token {token}", "guard logarithms, roots and divisions by zero")

    def pair(self, view: LossInputs) -> Tensor:
        """Return the tensor of a piece that sees a view, its metrics checked."""
        found = self.call(self.piece, view)
        if not (isinstance(found, tuple) and len(found) == 2):
            said = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            said = f"{len(found)} values" if isinstance(found, tuple) else said
            per = "" if isinstance(found, Tensor) and found.shape == view.log_ratio.shape else "one number a token and "
            self.fail(f"returned {said} for [B, T] = {list(view.log_ratio.shape)}",
                      f"return {per}the measured: (loss, Metrics())")  # fmt: skip
        if not isinstance(found[1], Metrics):
            self.fail(f"returned {type(found[1]).__name__} beside its tensor", "return Metrics(), or Metrics.of({...})")
        taken = {"loss/policy", *self.algorithm.measure(view).measures} if is_own(self.piece) else set()
        for name, measure in found[1].measures.items():
            if not isinstance(measure, Mean | Sum | Max | Last | EffectiveSize):
                self.fail(f"measured {name} as {type(measure).__name__}", "measure with Mean, Sum, Max or Last")
            if name in taken:
                self.fail(f"measured {name}, which gnomon measures", f"give it a name of its own: mine/{name}")
        return self.checked(found[0], view.log_ratio.shape, exact=self.slot != "Correction")


def _try_advantage(trial: _Trial) -> None:
    piece, batch = trial.piece, _batch(trial.algorithm)
    # Properties are called like functions, as they may raise or be of another type.
    needs = trial.call(lambda: piece.needs, prefix="needs ")
    if not isinstance(needs, frozenset) or needs - NEEDS:
        trial.fail(f"needs {needs!r}", f"return a frozenset of {', '.join(sorted(NEEDS))}")
    fewest = trial.call(lambda: piece.minimum_generations, prefix="minimum_generations ")
    if not isinstance(fewest, int):
        trial.fail(f"minimum_generations is {fewest!r}", "return a whole number")
    trial.checked(trial.call(piece.center, batch, prefix="center "), batch.mask.shape, "center ")
    advantages, returns = _estimated(trial, batch)
    trial.finite(advantages, batch.mask, "returned")
    if returns is not None:
        trial.finite(
            trial.checked(returns, batch.mask.shape, "beside its advantages "), batch.mask, "returned a return of"
        )
    elif trial.algorithm.critic is not None:
        trial.fail("returned no returns, and the algorithm teaches a critic", "return (advantages, returns)")
    _try_rewards(trial, batch, masked(advantages, batch.mask))
    order = torch.tensor([7, 2, 0, 5, 1, 6, 3, 4])
    turned, _ = _estimated(trial, _shuffled(batch, order))
    _compare(trial, masked(turned, batch.mask[order]), masked(advantages, batch.mask)[order],
             "depends on the order of rows", "tell groups apart by batch.group")  # fmt: skip
    spoiled, _ = _estimated(trial, _spoiled(batch))
    _compare(trial, masked(spoiled[:, : batch.width], batch.mask), masked(advantages, batch.mask),
             "depends on what is padded", "leave out what batch.mask leaves out")  # fmt: skip


def _try_rewards(trial: _Trial, batch: Batch, advantages: Tensor) -> None:
    """Refuse advantages that do not depend on rewards, are higher where those are lower, or need them to differ."""
    alike = torch.ones_like(batch.rewards)
    parts = None if batch.component_rewards is None else torch.ones_like(batch.component_rewards)
    equal, _ = _estimated(trial, batch.with_fields(rewards=alike, component_rewards=parts))
    trial.finite(equal, batch.mask, "returned, where all rewards are equal,")
    # A piece that draws random numbers gives other rows other numbers.
    if any(trial.draws) or not getattr(trial.piece, "reads_rewards", True):
        return
    # Every reward is turned round: 1 becomes 0.
    several = None if batch.component_rewards is None else 1 - batch.component_rewards
    other = batch.with_fields(rewards=1 - batch.rewards, component_rewards=several)
    found = masked(_estimated(trial, other)[0], batch.mask)
    if _same(found, advantages, _TOLERANCE):
        trial.fail("returned the same advantages for other rewards", "use batch.rewards")
    if bool(((advantages - found) * (2 * batch.rewards - 1)[:, None] <= 0).all()):
        trial.fail("returned lower advantages for higher rewards", "an advantage is reward less what was expected")


def _estimated(trial: _Trial, batch: Batch) -> tuple[Tensor, Any]:
    found = trial.call(trial.piece, batch)
    if not (isinstance(found, tuple) and len(found) == 2):
        said = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        trial.fail(f"returned {said}", "return (advantages, None) where there is no critic")
    return trial.checked(found[0], batch.mask.shape), found[1]


def _try_aggregate(trial: _Trial) -> None:
    batch = _batch(trial.algorithm)
    mask, group = batch.mask, batch.group
    weights = trial.checked(trial.call(trial.piece, mask, group), mask.shape, exact=False)
    trial.finite(weights, mask, "returned")
    _positive(trial, weights[mask], "weight")
    nothing = torch.zeros_like(mask)
    empty = trial.checked(
        trial.call(trial.piece, nothing, group, prefix="without a trained token "), mask.shape, "", False
    )
    trial.finite(empty, ~nothing, "without a trained token returned")
    order = torch.tensor([7, 2, 0, 5, 1, 6, 3, 4])
    _compare(trial, trial.call(trial.piece, mask[order], group[order])[order.argsort()].double(), weights.double(),
             "depends on the order of rows", "tell groups apart by group")  # fmt: skip


def _positive(trial: _Trial, found: Tensor, what: str) -> None:
    """Refuse numbers below 0, which would turn the loss round, and zeros alone."""
    if not bool(found.any()):
        trial.fail(f"returned {what} 0 for every token, so nothing would be trained")
    if bool((found < 0).any()):
        trial.fail(f"returned the {what} {float(found.min()):g}, which turns the loss round", "return 0 or more")


def _try_viewed(trial: _Trial) -> None:
    """Try a loss, a correction or a regularizer."""
    batch = _weighed(trial)
    if trial.slot == "Regularizer":
        _try_weights(trial, batch)
    # Of both policies together: a surrogate may have slope 0 in one of them.
    slope = 0.0
    # With policies that differ, and with one policy for all: ratios of 1 show divisions by zero.
    for is_moved in (True, False):
        view = _view(trial.algorithm, batch, is_moved)
        found = trial.pair(view)
        trial.finite(found, batch.mask, "returned" if is_moved else "returned, where all policies are one,")
        if trial.slot == "Correction":
            if found.requires_grad:
                trial.fail("returned a factor with a gradient", "return factor.detach()")
            _positive(trial, found[batch.mask], "factor")
        else:
            slope += _slope(trial, view, found, is_moved)
        if is_moved:
            _try_cuts(trial, view, found)
            _try_padding(trial, batch, found)
        elif trial.slot == "Surrogate" and slope > 0:
            _try_direction(trial, batch)
    if trial.slot == "Surrogate" and not slope:
        trial.fail(
            "has a gradient of 0 everywhere, so nothing would be trained", "let view.log_ratio or view.current in"
        )


def _try_direction(trial: _Trial, batch: Batch) -> None:
    """Refuse a loss that is the same whatever the advantages, or that makes what earns most the rarest."""
    assert batch.advantages is not None, "it is prepared"
    slopes: list[Tensor | None] = []
    for given in (batch, batch.with_fields(advantages=-batch.advantages)):
        seen = _view(trial.algorithm, given, False)
        total = masked(trial.pair(seen), batch.mask).sum()
        slopes += torch.autograd.grad(total, seen.current, allow_unused=True)
    ours, theirs = slopes
    if ours is None or theirs is None or not bool(batch.advantages[batch.mask].any()):
        return
    if _same(ours, theirs, _TOLERANCE) and not any(trial.draws):
        trial.fail("has the same gradient whatever the advantages, so rewards would not count", "use view.advantages")
    # A step goes against the gradient, so a loss that raises what is good has slopes of the opposite sign to its
    # advantages.
    against = (ours * batch.advantages)[batch.mask]
    if bool((against >= 0).all()) and bool((against > 0).any()):
        trial.fail("makes what has a high advantage rarer", "a loss is made smaller: -view.advantages * ratio")


def _slope(trial: _Trial, view: LossInputs, found: Tensor, is_moved: bool) -> float:
    """Return the size of the gradient, which must be there and be finite."""
    if not found.requires_grad:
        trial.fail("returned numbers without a gradient", "use no detach(), item() or torch.no_grad() on the way")
    total = masked(found, view.batch.mask).sum()
    slopes = torch.autograd.grad(total, (view.current, view.entropy), allow_unused=True)
    size = 0.0
    for slope in slopes:
        if slope is not None:
            where = "has" if is_moved else "has, where all policies are one,"
            trial.finite(slope, torch.ones_like(view.batch.mask), f"{where} a gradient of")
            size += float(slope.abs().sum())
    return size


def _try_cuts(trial: _Trial, view: LossInputs, whole: Tensor) -> None:
    """Refuse a piece whose numbers depend on which rows are beside: cuts of a batch must add up."""
    for rows in _CUTS:
        where = torch.tensor(rows)
        cut = view.batch.rows(where)
        # The same numbers as in the whole batch, so any difference comes from the rows beside.
        policies = view.current[where], view.entropy[where], view.proximal[where]
        part = _seen(trial.algorithm, policies, cut, view.statistics)
        _compare(trial, masked(trial.pair(part).detach(), cut.mask), masked(whole.detach(), view.batch.mask)[where],
                 "depends on how a batch is cut into micro-batches",
                 "leave sums and means over rows to the aggregate")  # fmt: skip


def _try_padding(trial: _Trial, batch: Batch, whole: Tensor) -> None:
    wide = _spoiled(batch)
    found = trial.pair(_view(trial.algorithm, wide, True))
    _compare(trial, masked(found.detach()[:, : batch.width], batch.mask), masked(whole.detach(), batch.mask),
             "depends on what is padded", "leave out what view.batch.mask leaves out")  # fmt: skip


def _try_weights(trial: _Trial, batch: Batch) -> None:
    piece = trial.piece
    name, needs = (trial.call(lambda n=n: getattr(piece, n), prefix=f"{n} ") for n in ("name", "needs"))
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
        trial.fail(f"has the name {name!r}", "return letters, digits and _")
    if is_own(piece) and (
        name == "policy" or f"loss/{name}" in trial.algorithm.measure(_view(trial.algorithm, batch, False)).measures
    ):
        trial.fail(f"has the name {name!r}, and loss/{name} is measured already", "return another name")
    if not isinstance(needs, frozenset) or needs - NEEDS:
        trial.fail(f"needs {needs!r}", f"return a frozenset of {', '.join(sorted(NEEDS))}")
    weights = trial.call(piece.weights, batch, batch.weights, prefix="weights ")
    trial.finite(trial.checked(weights, batch.mask.shape, "weights "), batch.mask, "weights returned")


def _try_trust(trial: _Trial) -> None:
    view = _view(trial.algorithm, _weighed(trial), True)
    ratio = view.log_ratio.detach().exp()
    found = trial.checked(trial.call(trial.piece, ratio, view.statistics), ratio.shape)
    trial.finite(found, view.batch.mask, "returned")
    for rows in _CUTS:
        part = trial.checked(trial.call(trial.piece, ratio[rows], view.statistics), ratio[rows].shape)
        _compare(trial, part, found[rows], "depends on how a batch is cut into micro-batches",
                 "bound each ratio alone; what is of the whole step is in statistics")  # fmt: skip


def _try_lambda(trial: _Trial) -> None:
    # 0: a response without trained tokens.
    lengths = torch.tensor([1, 2, 5, 100, 0])
    found = trial.checked(trial.call(trial.piece, lengths), lengths.shape).detach()
    if not bool(((found >= 0) & (found <= 1)).all()):
        trial.fail(f"returned {found.tolist()} for lengths {lengths.tolist()}", "return numbers in [0, 1]")


def _try_condition(trial: _Trial) -> None:
    batch = _batch(trial.algorithm)
    holds = trial.checked(trial.call(trial.piece, batch), batch.mask.shape, exact=False)
    if holds.dtype != torch.bool:
        trial.fail(f"returned {str(holds.dtype).removeprefix('torch.')}", "return true or false for each token")


_TRIALS: dict[str, Callable[[_Trial], None]] = {
    "Condition": _try_condition,
    "LambdaRule": _try_lambda, "Advantage": _try_advantage, "Aggregate": _try_aggregate, "RatioBound": _try_trust,
    "Surrogate": _try_viewed, "Correction": _try_viewed, "Regularizer": _try_viewed,
}  # fmt: skip


def _batch(algorithm: Algorithm) -> Batch:
    """Return two groups of four in float32, with holes, padding, an error, an empty row, and what is scored for it.

    What the algorithm does not need is None, as it is in training.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 3, 4, 1, 2, 5, 3, 3)
    mask = [[(row + token) % 4 != 3 for token in range(length)] for row, length in enumerate(lengths)]
    # Row 7 has no trained token, row 6 no grade, and other rows have untrained tokens inside.
    mask[7] = [False] * 3

    def near(base: Tensor, size: float) -> Tensor:
        return (base + size * torch.randn(8, 5, generator=generator, dtype=torch.float64)).clamp(max=-0.01)

    behavior = near(torch.full((8, 5), -2.0, dtype=torch.float64), 0.5)
    scored = {"proximal": near(behavior, 0.2), "reference": near(behavior, 0.3), "values": near(behavior, 1).exp()}
    scored["sharpened"] = near(behavior, 0.4)
    more: dict[str, Any] = {name: value.tolist() for name, value in scored.items() if name in algorithm.needs}
    if "values" in algorithm.needs:
        more["bootstrap"] = [0.1 * row for row in range(8)]
    if "component_rewards" in algorithm.needs:
        names = sorted({n for _, p in parts_of(algorithm.advantage) if isinstance(p, Composed) for n in p.components})
        more["components"] = tuple(names) or ("first", "second")
        more["component_weights"] = (1.0,) * len(more["components"])
        more["component_rewards"] = [[float(row >> n & 1) for n in range(len(more["components"]))] for row in range(8)]
    if "role" in algorithm.needs:
        more["role"] = ("white", "black") * 4
    if algorithm.tracker is not None:
        more["baseline"] = [0.4] * 4 + [0.6] * 4
    made = make_batch(
        [1.0, 0.0, 0.25, 1.0, 0.0, 1.0, None, 0.5], mask, [0] * 4 + [1] * 4, torch.float32,
        behavior=behavior.tolist(), full_behavior=near(behavior, 0.01).tolist(),
        is_truncated=[False, True] * 4, version=[1] * 8, **more,
    )  # fmt: skip
    return made.with_fields(tokens=torch.arange(1, 1 + made.tokens.numel()).reshape(made.tokens.shape))


def _weighed(trial: _Trial) -> Batch:
    algorithm = trial.algorithm
    try:
        return algorithm.weigh(algorithm.prepare(_batch(algorithm)))
    except ConfigError as error:
        if str(error).startswith("algorithm."):
            raise
        trial.fail(f"cannot be tried: {error}")
    except Exception as error:  # a regularizer's weights, say: whatever a user's piece raises is its fault
        trial.fail(f"cannot be tried: the algorithm raised {cause_of(error)}", _hint(error))


def _view(algorithm: Algorithm, batch: Batch, is_moved: bool) -> LossInputs:
    """Return what pieces see.

    Args:
        is_moved: The current policy is another than the others, which else are one.
    """
    if not is_moved:
        others = {name: batch.behavior for name in ("proximal", "reference") if getattr(batch, name) is not None}
        batch = batch.with_fields(**others, full_behavior=batch.behavior)
        policies = batch.behavior, -batch.behavior / 2, batch.behavior
        return _seen(algorithm, policies, batch, algorithm.statistics(batch.behavior, batch, -batch.behavior / 2))
    generator = torch.Generator().manual_seed(1)

    def moved(base: Tensor, size: float) -> Tensor:
        step = torch.zeros_like(base)
        step[:, :5] = size * torch.randn(8, 5, generator=generator)
        return (base + step).clamp(max=-0.01)

    proximal = moved(batch.behavior, 0.2) if batch.proximal is None else batch.proximal
    current = moved(proximal, 0.2)
    statistics = algorithm.statistics(current, batch.with_fields(proximal=proximal), -current / 2)
    return _seen(algorithm, (current, -current / 2, proximal), batch, statistics)


def _seen(
    algorithm: Algorithm, policies: tuple[Tensor, Tensor, Tensor], batch: Batch, statistics: Statistics
) -> LossInputs:
    """Return the view of current policy, its entropy and proximal; the batch has the latter only where it is needed."""
    current, entropy, proximal = policies
    view = algorithm.view(_leaf(current), _leaf(entropy), batch.with_fields(proximal=proximal.detach()), statistics)
    return replace(view, batch=batch)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _shuffled(batch: Batch, order: Tensor) -> Batch:
    turned = batch.rows(order)
    # Other group ids, with a gap: 9 and 5.
    return turned.with_fields(group=9 - 4 * turned.group)


def _spoiled(batch: Batch) -> Batch:
    """Return the batch two tokens wider, with other numbers wherever the mask is false."""
    rows, more = len(batch), 2
    mask = torch.cat([batch.mask, torch.zeros(rows, more, dtype=torch.bool)], 1)

    def spoiled(tensor: Tensor, junk: float = _JUNK) -> Tensor:
        # Two columns of padding more, and other numbers wherever the mask is false.
        wider = torch.cat([tensor, torch.full((rows, more), junk, dtype=tensor.dtype)], 1)
        return torch.where(mask, wider, junk)

    given = {name: getattr(batch, name) for name in _PER_TOKEN}
    changes: dict[str, Any] = {name: spoiled(tensor) for name, tensor in given.items() if tensor is not None}
    for name in ("weights", "advantages", "returns"):
        if getattr(batch, name) is not None:
            changes[name] = spoiled(getattr(batch, name), 0.0)
    own = {name: spoiled(tensor, 0.0) for name, tensor in batch.own_weights.items()}
    tokens = torch.cat([batch.tokens, torch.zeros(rows, more, dtype=torch.long)], 1)
    return batch.with_fields(mask=mask, tokens=tokens, own_weights=own, **changes)


def _compare(trial: _Trial, found: Tensor, expected: Tensor, wrong: str, instead: str) -> None:
    if not any(trial.draws) and not _same(found.detach(), expected.detach(), _TOLERANCE):
        trial.fail(wrong, instead)


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    drawn = () if numpy is None else numpy.random.get_state()
    return (
        random.getstate(),
        bytes(torch.get_rng_state().numpy()),
        *(bytes(d) if hasattr(d, "nbytes") else d for d in drawn),
    )


def _seeded() -> tuple[Any, ...]:
    random.seed(0)
    torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return _states()


@contextmanager
def _own_draws() -> Iterator[None]:
    """Leave the generators of the whole process as they are."""
    numpy = sys.modules.get("numpy")
    plain, ours = random.getstate(), torch.get_rng_state()
    theirs = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        torch.set_rng_state(ours)
        if numpy is not None:
            numpy.random.set_state(theirs)


def _same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=tolerance, atol=tolerance / 10, equal_nan=True
    )


def _hint(error: BaseException) -> str:
    return "batch.reference and batch.values are None unless needs names them" if "NoneType" in str(error) else ""
