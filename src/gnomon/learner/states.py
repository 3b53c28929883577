"""States of parts within the state of a whole."""

from collections.abc import Mapping

from gnomon.errors import CheckpointError
from gnomon.types import State

PLAIN = {"critic": "no critic", "proximal": "no averaged proximal policy"}


def join(whole: State, parts: Mapping[str, State]) -> State:
    """Return the state of a whole that has ``parts``, each under its name.

    >>> part(join(State({}, {"version": 1}), {"critic": State({}, {"count": 2})}), "critic").values
    {'count': 2}
    """
    tensors, values, lent = dict(whole.tensors), dict(whole.values), dict(whole.lent)
    for name, state in parts.items():
        tensors |= {f"{name}/{key}": tensor for key, tensor in state.tensors.items()}
        lent |= {f"{name}/{key}": loan for key, loan in state.lent.items()}
        values[name] = dict(state.values)
    return State(tensors, values, lent)


def part(whole: State, name: str) -> State:
    """Return the part ``name`` of what `join` made; an empty state where there is none."""
    start = f"{name}/"
    tensors = {key.removeprefix(start): tensor for key, tensor in whole.tensors.items() if key.startswith(start)}
    return State(tensors, whole.values.get(name, {}))


def check_composition(state: State, has: Mapping[str, str], frozen: Mapping[str, str]) -> None:
    """Raise CheckpointError when ``state`` is of a learner that ``has`` other pieces or stands on other ``frozen``
    weights.
    """
    saved = state.values.get("has", PLAIN)
    for name in has:
        if saved[name] != has[name]:
            raise CheckpointError(
                f"the checkpoint was made with {saved[name]}, this run has {has[name]}; resume with the algorithm "
                "that the run began with"
            )
    if state.values["frozen"] != frozen:
        raise CheckpointError(
            f"the checkpoint was made on other frozen weights: it says {state.values['frozen']}, this run has "
            f"{frozen}; resume with the model and reference that the run began with"
        )
