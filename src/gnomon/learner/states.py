"""States of parts within the state of a whole."""

from collections.abc import Mapping

from gnomon.types import State


def join(whole: State, parts: Mapping[str, State]) -> State:
    """Return the state of a whole that has ``parts``, each under its name.

    >>> part(join(State({}, {"version": 1}), {"critic": State({}, {"count": 2})}), "critic").values
    {'count': 2}
    """
    tensors, values = dict(whole.tensors), dict(whole.values)
    for name, state in parts.items():
        tensors |= {f"{name}/{key}": tensor for key, tensor in state.tensors.items()}
        values[name] = dict(state.values)
    return State(tensors, values)


def part(whole: State, name: str) -> State:
    """Return the part ``name`` of what `join` made; an empty state where there is none."""
    start = f"{name}/"
    tensors = {key.removeprefix(start): tensor for key, tensor in whole.tensors.items() if key.startswith(start)}
    return State(tensors, whole.values.get(name, {}))
