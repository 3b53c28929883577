"""Find mutable state of a run that no checkpoint covers."""

import contextlib
import dataclasses
import enum
import functools
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from random import Random
from typing import Any

import numpy as np
import torch

from gnomon.core.types import State, Stateful

_CONSTANT = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, re.Pattern, PurePath,
    types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, torch.dtype, torch.device, np.dtype, np.generic,
)  # fmt: skip
_Ways = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any, Any], Any]]
# How to look at a generator, to draw from it, and to set it back.
_GENERATORS: Mapping[type, _Ways] = {
    Random: (Random.getstate, Random.random, Random.setstate),
    np.random.RandomState: (lambda g: g.get_state(), lambda g: g.random_sample(), lambda g, kept: g.set_state(kept)),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g: g.random(),
        lambda g, kept: setattr(g.bit_generator, "state", kept),
    ),
    torch.Generator: (
        lambda g: g.get_state(),
        lambda g: torch.rand((), generator=g, device=g.device),
        lambda g, kept: g.set_state(kept),
    ),
}


def unsaved_state(
    root: object, parts: Collection[object], stateless: Mapping[type, str], place: str = "run"
) -> list[str]:
    """Return what can change below ``root`` and is neither in ``parts`` nor ``stateless``: its place and its type.

    Everything that ``root`` holds is looked at, through attributes, containers, closures, partial functions and bound
    methods. Constants, functions, and frozen dataclasses of these cannot change. A part answers for all below it, and
    so does an object of exactly a type that is listed as stateless. Whatever is left, from a list to an object with
    attributes of its own to a generator of random numbers, would not be what it was when the run is resumed.
    """
    counted = {id(part) for part in parts}
    found: list[str] = []
    seen: dict[int, object] = {}
    stack = [(_inner(root), place)]
    while stack:
        inner, place = stack.pop()
        for name, item in inner:
            if isinstance(item, _CONSTANT) or id(item) in seen or id(item) in counted or type(item) in stateless:
                continue
            # The object is kept, not its id alone: an id may be given to another object once the first is gone.
            seen[id(item)] = item
            # What cannot change itself is looked into; anything else is reported whole, and not looked into further.
            if _is_fixed(item):
                stack.append((_inner(item), f"{place}.{name}"))
            else:
                found.append(f"{place}.{name} ({type(item).__module__}.{type(item).__qualname__})")
    return sorted(found)


def unsaved_generators(parts: Mapping[str, Stateful]) -> list[str]:
    """Return the places of random generators that a part draws from and that its state does not hold.

    That is tried: a number is drawn from each, and put back; a state that is the same before and after has no place
    for it.
    """
    found: list[str] = []
    for name, part in parts.items():
        for place, generator in _generators(name, part, parts.values()):
            # The state is taken before the draw: a part that saves its generator has another state afterwards.
            if not _drawn(generator, partial(_differs, part, part.state())):
                found.append(f"{place} ({type(generator).__module__}.{type(generator).__qualname__})")
    return sorted(found)


def _is_fixed(item: object) -> bool:
    """Whether an object itself cannot change; what it holds may."""
    if isinstance(item, types.FunctionType | types.MethodType | partial | tuple | frozenset | types.MappingProxyType):
        return True
    fixed: Any = type(item)
    return dataclasses.is_dataclass(item) and bool(fixed.__dataclass_params__.frozen)


def _inner(item: object) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, and by what name."""
    if isinstance(item, types.FunctionType):
        # What a closure has caught is state as much as an attribute is.
        names = item.__code__.co_freevars
        cells = item.__closure__ or ()
        yield from ((n, c.cell_contents) for n, c in zip(names, cells, strict=True) if not _is_empty(c))
        yield from ((str(place), value) for place, value in enumerate(item.__defaults__ or ()))
        yield from (item.__kwdefaults__ or {}).items()
    elif isinstance(item, types.MethodType):
        yield "self", item.__self__
        yield "function", item.__func__
    elif isinstance(item, partial):
        yield from [("function", item.func), *_inner(item.args), *item.keywords.items()]
    elif isinstance(item, Mapping):
        # The text of a tensor would be its numbers.
        yield from ((str(k) if isinstance(k, _CONSTANT) else type(k).__name__, v) for k, v in item.items())
    elif isinstance(item, list | tuple | set | frozenset):
        yield from ((str(place), value) for place, value in enumerate(item))
    yield from _attributes(item)


def _attributes(item: object) -> Iterator[tuple[str, object]]:
    if isinstance(item, types.FunctionType | types.MethodType | partial):
        return
    kind: Any = type(item)
    for name in _slots(kind):
        if (value := _slot(item, name)) is not None:
            yield name, value
    with contextlib.suppress(TypeError):
        # At once: what other threads have may change meanwhile.
        yield from tuple(vars(item).items())


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    stated = [parent.__dict__.get("__slots__", ()) for parent in kind.__mro__]
    return tuple(name for names in stated for name in ([names] if isinstance(names, str) else names))


def _slot(item: object, name: str) -> object:
    try:
        return object.__getattribute__(item, name)
    except AttributeError:
        return None


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _generators(name: str, part: object, parts: Iterable[object]) -> Iterator[tuple[str, Any]]:
    """Yield every random generator below ``part``, whatever is between them but other parts, and its place."""
    seen: dict[int, object] = {id(other): other for other in parts}
    stack: list[tuple[str, object]] = [(name, part)]
    while stack:
        place, item = stack.pop()
        for inner_name, inner in _inner(item):
            # Tensors hold no generator, and listing their elements would take for ever.
            if isinstance(inner, (*_CONSTANT, torch.Tensor, np.ndarray)) or id(inner) in seen:
                continue
            seen[id(inner)] = inner
            if isinstance(inner, tuple(_GENERATORS)):
                yield f"{place}.{inner_name}", inner
            else:
                stack.append((f"{place}.{inner_name}", inner))


def _drawn(generator: Any, look: Callable[[], bool]) -> bool:
    """Return what ``look`` says after a number was drawn, which is then put back."""
    keep, draw, put_back = next(ways for kind, ways in _GENERATORS.items() if isinstance(generator, kind))
    kept = keep(generator)
    draw(generator)
    try:
        return look()
    finally:
        put_back(generator, kept)


def _differs(part: Stateful, before: State) -> bool:
    now = part.state()
    if now.values != before.values or now.tensors.keys() != before.tensors.keys():
        return True
    return not all(torch.equal(tensor, before.tensors[name]) for name, tensor in now.tensors.items())
