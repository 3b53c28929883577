"""Which rooms there are, who imports whom, and how far the experiment travels.

import-linter keeps the layers between rooms (pyproject.toml); this file looks within them too.
"""

import ast
import re
from dataclasses import fields

from tests.architecture.sources import (
    MODULES,
    PACKAGE,
    Import,
    at_most,
    functions,
    graph,
    imports,
    is_within,
    none_of,
    parameters,
    parse,
    spot,
)

from gnomon.training.run import Components, Progress, Run, Schedule

# Reached through a hook, or by name within a function: each could be a distribution of its own.
OUTER = ("gnomon.insight", "gnomon.cluster", "gnomon.analysis.planner")
# Who imports an outer room nevertheless, at the top of the file or within a function. Only ever remove a line.
# Where an experiment, which a person wrote, becomes what a run needs. Everybody else is handed the latter.
TAKE_EXPERIMENTS = ("gnomon.config", "gnomon.training")

# Today's numbers, which may only go down.
ROOMS = 17
LOOSE_MODULES = 0
CIRCLES_AT_TOP = 0
CIRCLES = 0
EXPERIMENT_TAKERS = 0


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of more than one module each of which reaches the others."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = edges[ahead.pop()] - seen
            seen |= new
            ahead += new
        reach[start] = seen
    parts = {tuple(sorted({w for w in reach[v] if v in reach[w]})) for v in edges}
    return [list(part) for part in sorted(parts) if len(part) > 1]


def circles_between(found: dict[str, list[Import]]) -> list[str]:
    """Return each circle as its modules and the imports that close it."""
    described = []
    for part in circles({module: {i.module for i in its} for module, its in found.items()}):
        steps = [
            f"{spot(MODULES[module], i.line)}: imports {i.module}{' within a function' if i.late else ''}"
            for module in part
            for i in found[module]
            if i.module in part
        ]
        described.append("\n    ".join([f"a circle of {len(part)} files", *steps]))
    return described


def test_circles_are_found():
    """Two that import each other, and three in a ring, are circles; a chain is none."""
    edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}, "g": set()}

    assert circles(edges) == [["a", "b"], ["c", "d", "e"]]


def test_every_kind_of_import_is_seen():
    """A module named whole, as a name from its package, by a name in it, late, or by import_module at the top."""
    modules = {"gnomon", "gnomon.a", "gnomon.a.b"}
    source = (
        "import gnomon.a.b\nfrom gnomon.a import b\nfrom gnomon.a import name\nfrom gnomon import a\n"
        "def f():\n    from gnomon.a.b import g\n    import_module('gnomon.a')\nimport_module('gnomon.a')"
    )

    assert [(i.module, i.line, i.late) for i in imports(ast.parse(source), modules)] == [
        ("gnomon.a.b", 1, False),
        ("gnomon.a.b", 2, False),
        ("gnomon.a", 3, False),
        ("gnomon.a", 4, False),
        ("gnomon.a.b", 6, True),
        ("gnomon.a", 8, False),
    ]


def test_rooms_are_few():
    """The package has no more folders at its top than today, so that one sees the whole machine."""
    rooms = sorted(p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__")

    at_most(ROOMS, [spot(p).removesuffix(":1") for p in rooms], "put it into the room that uses it")


def test_loose_modules_are_few():
    """No more modules than today lie at the top, beside `__init__.py`, `__main__.py` and what users test with."""
    loose = sorted(p for p in PACKAGE.glob("*.py") if p.stem not in ("__init__", "__main__"))

    at_most(LOOSE_MODULES, [spot(p) for p in loose], "put it into a room")


def test_no_files_import_each_other_in_a_circle():
    """Imports at the top of files close no circle, within rooms too."""
    at_top = {module: [i for i in its if not i.late] for module, its in graph().items()}

    at_most(CIRCLES_AT_TOP, circles_between(at_top), "move what both need into a file below both")


def test_no_files_import_each_other_in_a_circle_when_they_are_called():
    """With imports within functions there is no circle either: a late import only hides one."""
    at_most(CIRCLES, circles_between(graph()), "move what both need into a file below both")


def test_outer_rooms_are_imported_by_no_other():
    """No other room imports insight, cluster or planner, in functions neither: they are called by name."""
    found = [
        f"{spot(MODULES[module], i.line)}: imports {i.module}"
        for module, its in graph().items()
        for i in its
        for room in OUTER
        if is_within(i.module, room) and not is_within(module, room)
    ]

    none_of(found, "call it through a hook, or by name: import_module within the function that needs it")


def test_an_experiment_is_resolved_once():
    """No more functions than today, outside of config and training, take what a person wrote."""
    found = [
        f"{spot(path, f.lineno)}: {f.name}"
        for module, path in MODULES.items()
        if not any(is_within(module, place) for place in TAKE_EXPERIMENTS)
        for f in functions(parse(path))
        if any(p.annotation and re.search(r"\bExperiment\b", ast.unparse(p.annotation)) for p in parameters(f))
    ]

    at_most(EXPERIMENT_TAKERS, found, "take the resolved value that it needs: a device, a path, a number")


def test_a_run_is_three_parts_of_at_most_twelve_fields():
    """`Run` holds components, schedule and progress; none of them has more than 12 fields."""
    parts = {f.name: f.type for f in fields(Run)}

    assert set(parts) == {"components", "schedule", "progress"}
    assert [p.__name__ for p in (Components, Schedule, Progress) if len(fields(p)) > 12] == []
