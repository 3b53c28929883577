"""How far an experiment travels once it is loaded: the calls that hand it on are counted.

A stop is a function that is handed the loaded experiment, what was resolved from it, or the context that holds both. A
climb is a hand-over to a file that the path has left before, or to a room above.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import MODULES, parse

START = ("gnomon.training.api", "train_experiment", frozenset({"loaded"}))
CARRIERS = ("TrainingContext", "Resolved", "resolve", "with_absolute_paths", "replace", "settled")
"""Calls whose result holds the experiment that they were given."""
MEMBERS = ("experiment", "resolved")
ROOMS = (
    "core", "rewards", "algorithms", "models", "tasks", "learner", "engines", "records", "rollouts", "diagnosis",
    "config", "training", "analysis", "insight", "cluster", "testing", "cli",
)  # fmt: skip
MOST_STOPS, MOST_CLIMBS = 60, 10

Place = tuple[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_by_place() -> dict[Place, Function]:
    """Return the functions at the top of modules and of classes."""
    found: dict[Place, Function] = {}
    for module, path in MODULES.items():
        for node in parse(path).body:
            if isinstance(node, Function):
                found[module, node.name] = node
            elif isinstance(node, ast.ClassDef):
                found |= {(module, f"{node.name}.{f.name}"): f for f in node.body if isinstance(f, Function)}
    return found


def names_in(module: str) -> dict[str, Place]:
    """Return what each name of a module means: where it is defined, and as what."""
    tree = parse(MODULES[module])
    own = {n.name: (module, n.name) for n in tree.body if isinstance(n, Function | ast.ClassDef)}
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return {**imported, **own}


def holds(node: ast.expr, tracked: set[str]) -> bool:
    """Whether an expression is the experiment or holds it."""
    if isinstance(node, ast.Name):
        return node.id in tracked
    if isinstance(node, ast.Attribute):
        return node.attr in MEMBERS and holds(node.value, tracked)
    is_carrier = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CARRIERS
    return is_carrier and any(holds(argument, tracked) for argument in node.args)


def handed_on(
    function: Function, names: dict[str, Place], tracked: set[str]
) -> Iterator[tuple[Place, list[int | str]]]:
    """Yield each call that is given the experiment: what is called, and at which places of its parameters."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and holds(node.value, tracked):
            tracked.add(node.targets[0].id)
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called, arguments = node.func, node.args
        if isinstance(called, ast.Name) and called.id == "partial" and arguments:
            called, arguments = arguments[0], arguments[1:]
        given: list[int | str] = [place for place, argument in enumerate(arguments) if holds(argument, tracked)]
        given += [k.arg for k in node.keywords if k.arg and holds(k.value, tracked)]
        if given and isinstance(called, ast.Name) and called.id in names:
            yield names[called.id], given


def journey() -> tuple[set[Place], list[str]]:
    """Return the stops of the experiment, and its climbs in words."""
    functions, stops, climbs = functions_by_place(), set[Place](), list[str]()
    waiting, seen = [(*START, (START[0],))], set[tuple[str, str, frozenset[str]]]()
    while waiting:
        module, name, tracked, path = waiting.pop()
        if (module, name, tracked) in seen:
            continue
        seen.add((module, name, tracked))
        stops.add((module, name))
        for target, places in handed_on(functions[module, name], names_in(module), set(tracked)):
            if target not in functions:
                continue
            parameters = [a.arg for a in functions[target].args.args]
            held = frozenset(parameters[p] if isinstance(p, int) else p for p in places)
            is_up = ROOMS.index(target[0].split(".")[1]) > ROOMS.index(module.split(".")[1])
            if is_up or (target[0] in path and target[0] != module):
                climbs.append(f"{module}.{name} calls {target[0]}.{target[1]}")
            waiting.append((*target, held, (*path, target[0])))
    return stops, climbs


def test_an_experiment_makes_few_stops_and_does_not_climb():
    """Fewer than 60 functions are handed it, and fewer than 10 of the calls go back to a file or up to a room."""
    stops, climbs = journey()

    assert 10 < len(stops) < MOST_STOPS, sorted(stops)
    assert len(climbs) < MOST_CLIMBS, climbs
